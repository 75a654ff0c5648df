//! What it decides: in which mode the two copies of a `dunlin` VM are kept, by what each mode brings on this VM.
//!
//! Release on equal output costs nothing where the two VMs say the same, and a sync for every answer where they do
//! not (clocks in the answers; answers that depend on the order in which connections were served). There a passive
//! backup, or an active one that waits for syncs, serves better. Which does is not guessed but measured: the mode
//! in use all the time, and now and then another one in a short trial.
//!
//! Flow: the primary tells it what has left; its wish starts a sync that begins the next epoch in the other mode.
//!
//! Invariants:
//! 1. Only times next to each other are compared: the load may change. What leaves in another number, or in other sizes, is
//!    another load.
//! 2. A trial that did not pay is repeated after twice the time, up to `LONGEST_BACKOFF_US`: no flapping, and the
//!    share of time spent in trials goes to nothing. It is about a tenth at most, however often the load changes or pauses.
//! 3. While everything matches there are no trials.
//! 4. A mode is judged by what it brings in the long run: not by the moment in which it was doubted, and not while its
//!    backup still warms up. So what lost its place in a burst (connections that all begin at once) is tried again soon.
//! 5. What was measured holds for one backup, and for times in which there was one. What was chosen stays.
//!
//! Source: ours; the alternation of trial and use is the bandit's of any textbook. Not here: the sync that changes
//! over, when to sync inside a mode (`trigger`).

use crate::policy::Mode;
use std::collections::VecDeque;

/// What has left so far, since the VM was protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Frames that left.
    pub released: u64,
    /// Of these, those that left by a sync and not by a match.
    pub by_sync: u64,
    /// Syncs that were begun because the backup said something else, or not what was waited for.
    pub forced: u64,
    /// Of these, because it did not say what was waited for in time.
    pub late: u64,
    /// How long all that left was held, together.
    pub held_us: u64,
    /// The frames' bytes.
    pub bytes: u64,
}

impl Tally {
    /// Syncs that were begun because the backup said something else.
    fn differing(&self) -> u64 {
        self.forced - self.late
    }

    /// Whether, until `now`, nothing left by a match, and nothing was found that never will.
    fn has_told_nothing(&self, now: &Tally) -> bool {
        let by_match = |tally: &Tally| tally.released - tally.by_sync;
        by_match(now) == by_match(self) && now.forced < self.forced + DOUBT
    }
}

/// What a mode brought in a window.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Score {
    frames_per_s: f64,
    held_us: f64,
    bytes_per_frame: f64,
}

impl Score {
    fn of(from: &Tally, to: &Tally, took_us: u64) -> Self {
        let released = (to.released - from.released) as f64;
        Self {
            frames_per_s: released * 1e6 / took_us.max(1) as f64,
            held_us: (to.held_us - from.held_us) as f64 / released.max(1.0),
            bytes_per_frame: (to.bytes - from.bytes) as f64 / released.max(1.0),
        }
    }

    /// More leaves; or, where the client sets the pace, as much leaves sooner.
    fn beats(&self, other: &Score) -> bool {
        if self.frames_per_s > other.frames_per_s * MORE {
            return true;
        }
        self.frames_per_s * MORE > other.frames_per_s && self.held_us * SOONER < other.held_us
    }

    /// Whether a trial of matching that began with `from` has had differences enough, and brought so little between them, that
    /// more of it tells nothing new.
    fn is_out_of_reach(&self, from: &Mark, now: &Mark) -> bool {
        let took_us = now.at_us - from.at_us;
        let differences = now.tally.differing() - from.tally.differing();
        let released = (now.tally.released - from.tally.released) as f64;
        let due = self.frames_per_s * took_us as f64 / 1e6;
        let at_once = took_us >= CLEAR_US && differences >= CLEAR_DIFFERENCES && released < due / 2.0;
        at_once || (took_us >= SPAN_US && differences >= CLEAR_DOUBT && released < due)
    }

    /// Whether this is what another load brings, in the same mode.
    fn is_of_another_load_than(&self, other: &Score) -> bool {
        let differs = |a: f64, b: f64, times: f64| a > b * times || b > a * times;
        differs(self.frames_per_s, other.frames_per_s, OTHER_RATE)
            || differs(self.bytes_per_frame, other.bytes_per_frame, OTHER_SIZE)
    }
}

/// A mode's backing off.
#[derive(Clone, Copy, Debug)]
struct Rival {
    mode: Mode,
    try_at_us: u64,
    backoff_us: u64,
}

/// What had left at a moment.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    at_us: u64,
    tally: Tally,
}

/// How long a mode is looked at before it is judged.
struct Pace {
    /// Not at all for this long after it was taken up.
    settle_us: u64,
    /// Nor, for this long, before the backup has said anything: it may have to translate its first answer.
    warm_up_us: u64,
    /// A trial that brings less than half of what was due in this time is over (one of matching: if that is because the
    /// backup says something else, and not because it is slow as yet).
    hopeless_us: u64,
    /// A trial takes so long; of one of matching the second half counts.
    trial_us: u64,
}

impl Pace {
    /// With a sync that costs so much.
    fn of(mode: Mode, sync_us: u64) -> Self {
        match mode {
            // Its backup has to load and, under TCG, to translate anew (60 ms to more than a second measured); and what
            // costs is a difference now and then.
            Mode::Match => Self {
                settle_us: 400_000,
                warm_up_us: 2_500_000,
                hopeless_us: 600_000,
                trial_us: 2_000_000,
            },
            // What leaves by syncs leaves in heaps: less than a few of them tell nothing.
            Mode::Active | Mode::Passive => Self {
                settle_us: 120_000,
                warm_up_us: 0,
                hopeless_us: sync_us.clamp(100_000, 500_000),
                trial_us: (3 * sync_us).clamp(600_000, 1_500_000),
            },
        }
    }
}

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pays,
    DoesNot,
    /// Nobody asked anything meanwhile.
    None,
}

/// When nothing left for a while.
#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    released: u64,
    /// When it last grew.
    grown_us: u64,
}

impl Pauses {
    /// Whether frames leave again, after a pause. With a sync that costs so much, what leaves by syncs leaves in heaps.
    fn is_over(&mut self, now_us: u64, tally: &Tally, sync_us: u64) -> bool {
        if tally.released == self.released {
            return false;
        }
        let paused = now_us - self.grown_us >= (4 * sync_us).clamp(PAUSE_US, IDLE_US / 2);
        self.grown_us = now_us;
        self.released = tally.released;
        paused
    }

    /// Whether nothing leaves.
    fn lasts(&self, now_us: u64) -> bool {
        now_us - self.grown_us >= 2 * PAUSE_US
    }
}

/// The choice of a mode for one VM.
#[derive(Debug)]
pub struct ChangeOver {
    /// In use; during a trial the one to which to return.
    chosen: Mode,
    /// Being tried.
    trial: Option<Mode>,
    /// What had left when it began.
    trial_from: Mark,
    /// When the trials so far are paid for: the mode in use has served `COST` times as long as makes up for what did not leave.
    paid_at_us: u64,
    /// When that was last waived, for a load that is another one.
    waived_us: Option<u64>,
    /// When the mode in use was taken up for good, if it was another one before.
    changed_us: Option<u64>,
    /// What `chosen` brought before the trial.
    score: Option<Score>,
    rivals: [Rival; 2],
    /// The ends of windows since the mode in use was entered or the load changed, newest last.
    marks: VecDeque<Mark>,
    /// What the load brought in the mode in use when it was last taken for another one.
    usual: Option<Score>,
    pauses: Pauses,
    settled_us: u64,
    /// Until then a backup that says nothing in time is no reason for doubt: the VM was just protected.
    cold_until_us: u64,
    /// What had left when the mode in use was entered; and until when its backup is believed to warm up.
    entered: Option<Mark>,
    warm_by_us: u64,
    /// How much of its clients' time a sync costs.
    cost_us: u64,
    wish: Option<Mode>,
    changes: u64,
}

/// A mode has to bring this much more to be chosen.
const MORE: f64 = 1.10;
/// Or as much with this much shorter waiting.
const SOONER: f64 = 1.25;
/// A window's length, the least that the mode in use is judged by, and how many frames that needs to mean anything.
const WINDOW_US: u64 = 250_000;
const SPAN_US: u64 = 1_000_000;
const SPAN_FRAMES: u64 = 16;
/// What left longer ago does not count; a trial that never gets its frames is over: the VM is idle.
const IDLE_US: u64 = 5_000_000;
/// A trial of matching is over at once after so long and so many differences, if less than half of what was due left meanwhile.
const CLEAR_US: u64 = 100_000;
const CLEAR_DIFFERENCES: u64 = 3;
/// A trial is hopeless only where at least this many frames were due.
const HOPELESS_FRAMES: f64 = 8.0;
/// After a trial that did not pay the mode in use serves so many times as long as was lost by it, before the next one.
const COST: u64 = 10;
/// A trial without a result counts for no more than this: clients may just have stopped to ask.
const NO_VERDICT_US: u64 = 500_000;
/// A trial is repeated no sooner than this after the last, and no later than that.
const SHORTEST_BACKOFF_US: u64 = 4_000_000;
const LONGEST_BACKOFF_US: u64 = 120_000_000;
/// A change of mode so long after the last one may have come from a burst. Another load so long after the last one has its trial
/// before the trials so far are paid for.
const LATELY_US: u64 = 10_000_000;
/// Forced syncs put matching in doubt when they cost clients so much in the longest time that counts, by what a sync costs (one
/// that waited for a late backup's word has cost that as well). One alone does not.
const DOUBT: u64 = 2;
const DOUBT_COST_US: u64 = IDLE_US / 5;
const LATE_COST_US: u64 = 1_000_000;
const UNKNOWN_COST_US: u64 = 250_000;
/// So many differences within the shortest time do by themselves if no more than so many frames left for each: a sync in
/// another mode lets out some tens. Fewer may be connections that begin, with a nonce in the greeting. Routine syncs, which
/// cover as many frames as there are connections, do not count.
const CLEAR_DOUBT: u64 = 6;
const CLEAR_DOUBT_FRAMES: u64 = 256;
/// A backup's VM that has just begun to run translates all of its code, and its caches are cold: after this it does not.
const COLD_US: u64 = 10_000_000;
/// The load is another one when this many times more frames, or fewer, leave in the same mode, or so many times larger
/// ones. One that comes in bursts is none.
const OTHER_RATE: f64 = 2.5;
const OTHER_SIZE: f64 = 1.2;
/// Before and after a pause of this length what leaves is not one load.
const PAUSE_US: u64 = 500_000;

impl ChangeOver {
    /// A VM that was just protected, in `first`.
    #[must_use]
    pub fn new(first: Mode, now_us: u64) -> Self {
        let mut others = Mode::ALL.into_iter().filter(|mode| *mode != first);
        let mut rival = || Rival {
            mode: others.next().expect("there are three modes"),
            try_at_us: 0,
            backoff_us: SHORTEST_BACKOFF_US,
        };
        let mut rivals = [rival(), rival()];
        // The more promising one first: waiting for syncs with an active backup costs what a difference costs.
        for rival in &mut rivals {
            if rival.mode == Mode::Active {
                rival.try_at_us = now_us + 2 * SHORTEST_BACKOFF_US;
            }
        }
        Self {
            chosen: first,
            trial: None,
            trial_from: Mark::default(),
            paid_at_us: 0,
            waived_us: None,
            changed_us: None,
            score: None,
            rivals,
            marks: VecDeque::new(),
            usual: None,
            pauses: Pauses::default(),
            settled_us: now_us + Pace::of(first, UNKNOWN_COST_US).settle_us,
            cold_until_us: now_us + COLD_US,
            entered: None,
            warm_by_us: now_us + Pace::of(first, UNKNOWN_COST_US).warm_up_us,
            cost_us: UNKNOWN_COST_US,
            wish: None,
            changes: 0,
        }
    }

    /// The mode that should be in use now.
    #[must_use]
    pub fn wish(&self) -> Mode {
        self.wish.or(self.trial).unwrap_or(self.chosen)
    }

    /// How often another mode was taken up for good.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The sync that takes up `mode` is loaded.
    pub fn entered(&mut self, mode: Mode, now_us: u64) {
        if self.wish.take_if(|wish| *wish == mode).is_some() {
            self.trial = (mode != self.chosen).then_some(mode);
            self.settles(mode, now_us);
        }
    }

    /// The mode that is wished for cannot be taken up now. A trial is put off; the way back to what was chosen is not, it only takes longer.
    pub fn refused(&mut self, now_us: u64) {
        let chosen = self.chosen;
        if let Some(refused) = self.wish.take_if(|wish| *wish != chosen) {
            let rival = self.rival(refused);
            rival.backoff_us = (rival.backoff_us * 2).clamp(SHORTEST_BACKOFF_US, LONGEST_BACKOFF_US);
            rival.try_at_us = now_us + rival.backoff_us;
            self.score = None;
        }
    }

    /// There is no backup (invariant 5). It may be told so again and again.
    pub fn lost(&mut self, now_us: u64) {
        if let Some(tried) = self.trial.take() {
            // It may be what has lost the backup.
            let rival = self.rival(tried);
            rival.try_at_us = now_us + rival.backoff_us.max(SHORTEST_BACKOFF_US);
        }
        self.wish = None;
        self.score = None;
        self.usual = None;
        self.marks.clear();
        self.entered = None;
    }

    /// A backup is complete, in `mode`: another one than so far, or one that was away.
    pub fn joined(&mut self, mode: Mode, now_us: u64) {
        self.lost(now_us);
        self.wish = (mode != self.chosen).then_some(self.chosen);
        self.cold_until_us = now_us + COLD_US;
        self.settles(mode, now_us);
    }

    fn rival(&mut self, mode: Mode) -> &mut Rival {
        let found = self.rivals.iter_mut().find(|rival| rival.mode == mode);
        found.expect("what is tried is a rival")
    }

    fn settles(&mut self, mode: Mode, now_us: u64) {
        self.marks.clear();
        self.entered = None;
        let pace = Pace::of(mode, self.cost_us);
        self.settled_us = now_us + pace.settle_us;
        self.warm_by_us = now_us + pace.warm_up_us;
    }

    /// Looks at what has left until now. Call it a few times in each window; `wish` may be another one afterwards.
    ///
    /// `cost_us` is how much of its clients' time a sync costs, if that is known.
    pub fn observe(&mut self, now_us: u64, tally: &Tally, cost_us: Option<u64>) {
        self.cost_us = cost_us.unwrap_or(UNKNOWN_COST_US);
        if self.pauses.is_over(now_us, tally, self.cost_us) && self.trial.is_none() {
            self.marks.clear();
        }
        if self.wish.is_some() {
            return;
        }
        let now = Mark {
            at_us: now_us,
            tally: *tally,
        };
        let entered = *self.entered.get_or_insert(now);
        if let Some((tried, before)) = self.trial.zip(self.score)
            && before.is_out_of_reach(&entered, &now)
        {
            return self.trial_ended(tried, &before, Verdict::DoesNot, &now);
        }
        if now_us < self.settled_us || (now_us < self.warm_by_us && entered.tally.has_told_nothing(tally)) {
            return;
        }
        let Some((first, last)) = self.marks.front().zip(self.marks.back()) else {
            return self.marks.push_back(now);
        };
        if let Some((tried, before)) = self.trial.zip(self.score) {
            let (first, half) = (*first, self.marks.get(1).copied());
            let half = if tried == Mode::Match { half } else { Some(first) };
            return self.look_at_trial(tried, &before, first, half, &now);
        }
        if now_us - last.at_us >= WINDOW_US {
            // A pause that begins is not another load.
            let pauses = last.tally.released == tally.released;
            self.marks.push_back(now);
            self.marks.retain(|mark| now_us - mark.at_us <= IDLE_US);
            if !pauses {
                self.judge(&now);
            }
        }
    }

    fn look_at_trial(&mut self, tried: Mode, before: &Score, first: Mark, half: Option<Mark>, now: &Mark) {
        let pace = Pace::of(tried, self.cost_us);
        let took_us = now.at_us - first.at_us;
        let frames = now.tally.released - first.tally.released;
        let due = before.frames_per_s * took_us as f64 / 1e6;
        let differs = tried != Mode::Match || now.tally.forced - first.tally.forced >= DOUBT;
        let poor = due >= HOPELESS_FRAMES && (frames as f64) < due / 2.0;
        if frames == 0 && tried != Mode::Match && took_us >= pace.trial_us {
            return self.trial_ended(tried, before, Verdict::None, now);
        }
        if took_us >= pace.hopeless_us && frames > 0 && poor && differs {
            return self.trial_ended(tried, before, Verdict::DoesNot, now);
        }
        let Some(half) = half else {
            if took_us >= pace.trial_us / 2 {
                self.marks.push_back(*now);
            }
            return;
        };
        if took_us >= pace.trial_us && frames >= SPAN_FRAMES {
            let score = Score::of(&half.tally, &now.tally, now.at_us - half.at_us);
            let verdict = if score.beats(before) {
                Verdict::Pays
            } else {
                Verdict::DoesNot
            };
            self.trial_ended(tried, before, verdict, now);
        } else if took_us > IDLE_US {
            let verdict = if self.pauses.lasts(now.at_us) {
                Verdict::None
            } else {
                Verdict::DoesNot
            };
            self.trial_ended(tried, before, verdict, now);
        }
    }

    fn trial_ended(&mut self, tried: Mode, before: &Score, verdict: Verdict, now: &Mark) {
        let now_us = now.at_us;
        self.marks.clear();
        self.score = None;
        if verdict == Verdict::Pays {
            return self.take_up(tried, now_us);
        }
        let took_us = now_us - self.trial_from.at_us;
        let left = (now.tally.released - self.trial_from.tally.released) as f64;
        let mut lost_us = took_us.saturating_sub((left * 1e6 / before.frames_per_s) as u64);
        let rival = self.rival(tried);
        if verdict == Verdict::DoesNot {
            rival.backoff_us = (rival.backoff_us * 2).clamp(SHORTEST_BACKOFF_US, LONGEST_BACKOFF_US);
        } else {
            lost_us = lost_us.min(NO_VERDICT_US);
        }
        rival.try_at_us = now_us + rival.backoff_us.max(SHORTEST_BACKOFF_US);
        // With the sync back.
        self.paid_at_us = now_us + COST * (lost_us + self.cost_us);
        self.wish = Some(self.chosen);
    }

    /// What was tried is in use for good.
    fn take_up(&mut self, tried: Mode, now_us: u64) {
        // The loser was measured right now, but perhaps in a burst (invariant 4): it is the next to be tried. Where modes change in
        // turns, it waits until the load may have changed.
        let lately = self.changed_us.is_some_and(|at_us| now_us - at_us < LATELY_US);
        let again_us = if lately { SHORTEST_BACKOFF_US } else { 0 };
        let loser = Rival {
            mode: self.chosen,
            try_at_us: now_us + again_us,
            backoff_us: again_us,
        };
        for rival in &mut self.rivals {
            if rival.mode == tried {
                *rival = loser;
            } else {
                rival.try_at_us = rival.try_at_us.max(now_us + SHORTEST_BACKOFF_US);
            }
        }
        self.chosen = tried;
        self.trial = None;
        self.usual = None;
        self.changed_us = Some(now_us);
        self.changes += 1;
    }

    /// Whether another mode than the one in use is worth a trial, by the shortest time that means anything.
    fn judge(&mut self, now: &Mark) {
        let means_something = |mark: &&Mark| {
            let frames = now.tally.released - mark.tally.released;
            now.at_us - mark.at_us >= SPAN_US && frames >= SPAN_FRAMES
        };
        // A load that has just become another one shows in the shortest time, what happens once a second in the longest.
        let shortest = self.marks.iter().rev().find(means_something).copied();
        let longest = self.marks.front().filter(means_something).copied();
        let Some((shortest, longest)) = shortest.zip(longest) else {
            return;
        };
        let doubted = if self.chosen != Mode::Match {
            None
        } else if differs_clearly(&shortest, now) {
            Some(shortest)
        } else {
            Some(longest).filter(|longest| self.costs_too_much(longest, now))
        };
        let from = doubted.unwrap_or(shortest);
        let score = Score::of(&from.tally, &now.tally, now.at_us - from.at_us);
        // While everything matches, another load is no news: it is when it comes to be doubted.
        let counts = self.chosen != Mode::Match || doubted.is_some();
        let is_another = score.is_of_another_load_than(self.usual.get_or_insert(score));
        if is_another && counts {
            self.usual = Some(score);
            if self.begin_anew(now.at_us) {
                // What it is compared with must be of this load alone.
                self.marks.retain(|mark| now.at_us - mark.at_us <= 2 * WINDOW_US);
                return;
            }
        }
        // Invariant 3.
        if self.chosen == Mode::Match && doubted.is_none() {
            return;
        }
        let due = self
            .rivals
            .iter()
            .filter(|rival| rival.try_at_us.max(self.paid_at_us) <= now.at_us)
            .min_by_key(|rival| (rival.try_at_us, rival.mode));
        self.wish = due.map(|rival| rival.mode);
        self.trial_from = *now;
        self.score = due.map(|_| score);
    }

    /// Whether the syncs that matching was forced to since then cost too much.
    fn costs_too_much(&self, from: &Mark, now: &Mark) -> bool {
        let cold = now.at_us < self.cold_until_us;
        let late = if cold { 0 } else { now.tally.late - from.tally.late };
        let forced = now.tally.differing() - from.tally.differing() + late;
        forced >= DOUBT && forced * self.cost_us + late * LATE_COST_US >= DOUBT_COST_US
    }

    /// Another load: what was learnt of the other modes does not count. Returns whether what trials have cost so far is waived.
    fn begin_anew(&mut self, now_us: u64) -> bool {
        let matches = self.chosen == Mode::Match;
        // A load that becomes another one every moment pays as any other (invariant 2).
        let waives = self.waived_us.is_none_or(|at_us| now_us - at_us >= LATELY_US);
        for rival in &mut self.rivals {
            // Matching costs nothing where it pays, and waiting for syncs with an active backup costs what a difference costs.
            let first = if matches { Mode::Passive } else { Mode::Match };
            let try_at_us = now_us
                + if rival.mode == first {
                    0
                } else {
                    SHORTEST_BACKOFF_US
                };
            rival.backoff_us = SHORTEST_BACKOFF_US;
            rival.try_at_us = if waives {
                try_at_us
            } else {
                rival.try_at_us.min(try_at_us)
            };
        }
        if waives {
            self.waived_us = Some(now_us);
            self.paid_at_us = self.paid_at_us.min(now_us);
        }
        waives
    }
}

/// Whether there is a difference in nearly all that the backup says.
fn differs_clearly(from: &Mark, now: &Mark) -> bool {
    let differing = now.tally.differing() - from.tally.differing();
    let frames = now.tally.released - from.tally.released;
    differing >= CLEAR_DOUBT && frames <= CLEAR_DOUBT_FRAMES * differing
}

#[cfg(test)]
mod tests;
