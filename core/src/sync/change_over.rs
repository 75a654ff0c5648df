//! What it decides: in which manner the two copies of a `dunlin` VM are kept, by what each manner brings on this VM.
//!
//! Release on equal output costs nothing where the two VMs say the same, and a sync for every answer where they do
//! not (clocks in the answers; answers that depend on the order in which connections were served). There a passive
//! backup, or an active one that waits for syncs, serves better. Which does is not guessed but measured: the manner
//! in use in windows, and now and then another one in a short trial right after such a window.
//!
//! Flow: the primary tells it what has left; its wish starts a sync that begins the next epoch in the other manner.
//!
//! Invariants:
//! 1. Only windows next to each other in time are compared: the load may change.
//! 2. A trial that did not pay is repeated after twice the time, up to `LONGEST_BACKOFF_US`: no flapping, and the
//!    share of time spent in trials goes to nothing.
//! 3. While everything matches there are no trials.
//!
//! Source: ours; the alternation of trial and use is the bandit's of any textbook. Not here: the sync that changes
//! over, when to sync inside a manner (`trigger`).

use crate::policy::Manner;

/// What has left so far, since the VM was protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Frames that left.
    pub released: u64,
    /// Of these, those that left by a sync and not by a match.
    pub by_sync: u64,
    /// Syncs that were begun because the backup said something else, or not what was waited for.
    pub forced: u64,
    /// How long all of them together were held.
    pub held_us: u64,
}

/// What a manner brought in a window.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Score {
    frames_per_s: f64,
    held_us: f64,
}

impl Score {
    fn of(from: &Tally, to: &Tally, took_us: u64) -> Self {
        let released = (to.released - from.released) as f64;
        Self {
            frames_per_s: released * 1e6 / took_us.max(1) as f64,
            held_us: (to.held_us - from.held_us) as f64 / released.max(1.0),
        }
    }

    /// More leaves; or, where the client sets the pace, as much leaves sooner.
    fn beats(&self, other: &Score) -> bool {
        if self.frames_per_s > other.frames_per_s * MORE {
            return true;
        }
        self.frames_per_s * MORE > other.frames_per_s && self.held_us * SOONER < other.held_us
    }
}

/// A manner's backing off.
#[derive(Clone, Copy, Debug)]
struct Rival {
    manner: Manner,
    try_at_us: u64,
    backoff_us: u64,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    since_us: u64,
    at: Tally,
}

/// The choice of a manner for one VM.
#[derive(Debug)]
pub struct ChangeOver {
    /// In use; during a trial the one to which to return.
    chosen: Manner,
    /// Being tried.
    trial: Option<Manner>,
    /// What `chosen` brought in its last window.
    score: Option<Score>,
    rivals: [Rival; 2],
    window: Option<Window>,
    settled_us: u64,
    wish: Option<Manner>,
    changes: u64,
}

/// A manner has to bring this much more to be chosen.
const MORE: f64 = 1.10;
/// Or as much with this much shorter waiting.
const SOONER: f64 = 1.25;
/// After a change a VM is not measured at once: its backup has to load, and under TCG to translate anew (60 to 115 ms
/// measured).
const SETTLE_US: u64 = 120_000;
/// A window's length, and how many frames it needs to mean anything.
const WINDOW_US: u64 = 250_000;
const WINDOW_FRAMES: u64 = 16;
/// A window that never gets its frames starts again: the VM is idle.
const IDLE_US: u64 = 5_000_000;
/// A trial that brings less than half of what was due, after this time and this many due, is over.
const HOPELESS_US: u64 = 100_000;
const HOPELESS_FRAMES: f64 = 8.0;
/// A trial is repeated no sooner than this after the last, and no later than that.
const SHORTEST_BACKOFF_US: u64 = 2_000_000;
const LONGEST_BACKOFF_US: u64 = 120_000_000;
/// So many forced syncs in one window put matching in doubt. Routine syncs, which cover as many frames as there are
/// connections, do not.
const DOUBT: u64 = 2;
/// The load is another one when this many times more, or less, leaves in the same manner.
const OTHER_LOAD: f64 = 2.5;

impl ChangeOver {
    /// A VM that was just protected, in `first`.
    #[must_use]
    pub fn new(first: Manner, now_us: u64) -> Self {
        let mut others = Manner::ALL.into_iter().filter(|manner| *manner != first);
        let mut rival = || Rival {
            manner: others.next().expect("there are three manners"),
            try_at_us: 0,
            backoff_us: SHORTEST_BACKOFF_US,
        };
        let mut rivals = [rival(), rival()];
        // The more promising one first: waiting for syncs with an active backup costs what a difference costs.
        for rival in &mut rivals {
            if rival.manner == Manner::Active {
                rival.try_at_us = now_us + 4 * SHORTEST_BACKOFF_US;
            }
        }
        Self {
            chosen: first,
            trial: None,
            score: None,
            rivals,
            window: None,
            settled_us: now_us + SETTLE_US,
            wish: None,
            changes: 0,
        }
    }

    /// The manner that should be in use now.
    #[must_use]
    pub fn wish(&self) -> Manner {
        self.wish.or(self.trial).unwrap_or(self.chosen)
    }

    /// How often another manner was taken up for good.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The sync that takes up `manner` is loaded.
    pub fn entered(&mut self, manner: Manner, now_us: u64) {
        if self.wish.take_if(|wish| *wish == manner).is_some() {
            self.trial = (manner != self.chosen).then_some(manner);
            self.window = None;
            self.settled_us = now_us + SETTLE_US;
        }
    }

    /// Looks at what has left until now. Call it a few times in each window; `wish` may be another one afterwards.
    pub fn observe(&mut self, now_us: u64, tally: &Tally) {
        if self.wish.is_some() || now_us < self.settled_us {
            return;
        }
        let window = *self.window.get_or_insert(Window {
            since_us: now_us,
            at: *tally,
        });
        let took_us = now_us - window.since_us;
        let frames = tally.released - window.at.released;
        let score = Score::of(&window.at, tally, took_us);
        let whole = took_us >= WINDOW_US && frames >= WINDOW_FRAMES;
        match (self.trial, self.score) {
            (Some(tried), Some(before)) => {
                let due = before.frames_per_s * took_us as f64 / 1e6;
                let hopeless =
                    took_us >= HOPELESS_US && due >= HOPELESS_FRAMES && (frames as f64) < due / 2.0;
                if hopeless || whole {
                    self.trial_ended(tried, !hopeless && score.beats(&before), score, now_us);
                } else if took_us > IDLE_US {
                    // Nobody asks anything any more: no verdict.
                    self.trial_ended(tried, false, before, now_us);
                }
            }
            _ if whole => self.window_ended(&window, tally, score, now_us),
            _ if took_us > IDLE_US => self.window = None,
            _ => {}
        }
    }

    fn trial_ended(&mut self, tried: Manner, pays: bool, score: Score, now_us: u64) {
        self.window = None;
        let rival = self
            .rivals
            .iter_mut()
            .find(|rival| rival.manner == tried)
            .expect("what is tried is a rival");
        if pays {
            // The loser was measured right now; it is tried again when the load may have changed.
            *rival = Rival {
                manner: self.chosen,
                try_at_us: now_us + SHORTEST_BACKOFF_US,
                backoff_us: SHORTEST_BACKOFF_US,
            };
            self.chosen = tried;
            self.trial = None;
            self.score = Some(score);
            self.changes += 1;
        } else {
            rival.backoff_us = (rival.backoff_us * 2).min(LONGEST_BACKOFF_US);
            rival.try_at_us = now_us + rival.backoff_us;
            self.wish = Some(self.chosen);
        }
    }

    fn window_ended(&mut self, window: &Window, tally: &Tally, score: Score, now_us: u64) {
        self.window = None;
        if let Some(last) = self.score {
            let ratio = score.frames_per_s / last.frames_per_s;
            if !(1.0 / OTHER_LOAD..OTHER_LOAD).contains(&ratio) {
                for rival in &mut self.rivals {
                    rival.backoff_us = SHORTEST_BACKOFF_US;
                    rival.try_at_us = rival.try_at_us.min(now_us + SHORTEST_BACKOFF_US);
                }
            }
        }
        self.score = Some(score);
        // Invariant 3.
        if self.chosen == Manner::Match && tally.forced - window.at.forced < DOUBT {
            return;
        }
        let due = self
            .rivals
            .iter()
            .filter(|rival| rival.try_at_us <= now_us)
            .min_by_key(|rival| rival.try_at_us);
        self.wish = due.map(|rival| rival.manner);
    }
}

#[cfg(test)]
mod tests;
