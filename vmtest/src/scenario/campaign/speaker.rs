//! One speaker: whether those who were heard at the switch were allowed to speak.
//!
//! Whoever begins to speak after another must have taken over in between, by its own daemon's events; a frame of the old one after
//! the new one's first is a turn that nobody took over for. Only the order counts: clocks are among the faults.
//!
//! What waits in a slow cable's queue was spoken when it came into it. So frames of the old speaker are not held against it when they
//! come out of such a queue, no later after the new one's first than the queue can hold them. No host can call them back, and the new
//! speaker announces itself again when it sees them.
//!
//! The same holds for one frame of a host that stood still: nothing but the kernel stands between its last look whether it may speak and its
//! write, and it may have been stopped just there.

use dunlin_api::EventKind;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::Result;

use crate::cluster::Cluster;
use crate::testbed::Spoken;

/// What held frames that were spoken: a cable that was slow for a while, and lost at the end what it still held; or a host that stood still in a write.
#[derive(Clone, Debug)]
pub struct Queue {
    /// Whose frames.
    pub host: String,
    /// Since when.
    pub from: SystemTime,
    /// Until when.
    pub until: SystemTime,
    /// The longest that it holds a frame.
    pub holds: Duration,
    /// How many come out of it at most, in all turns together.
    pub frames: u64,
}

impl Queue {
    /// Of a host that goes on at that moment.
    pub fn of_a_standstill(host: &str, goes_on: SystemTime) -> Self {
        Self {
            host: host.to_owned(),
            from: goes_on,
            until: goes_on + Duration::from_secs(1),
            holds: Duration::MAX,
            frames: 1,
        }
    }

    /// Whether what was said in that turn may have waited in this queue since before the next speaker's `first`.
    fn may_have_held(&self, turn: &Spoken, first: SystemTime) -> bool {
        turn.host == self.host
            && turn.first >= self.from
            && turn.last <= self.until
            && turn
                .last
                .duration_since(first)
                .is_ok_and(|late| late <= self.holds)
    }
}

/// How often each host took over, by its daemon's words.
pub type TakeOvers = BTreeMap<String, usize>;

/// The same of all hosts since the cluster began, by their daemons' logs, which outlive the daemons.
///
/// # Errors
/// When a log cannot be read.
pub fn take_overs(cluster: &Cluster<'_>) -> Result<TakeOvers> {
    let mut counts = TakeOvers::new();
    for event in cluster.logged()? {
        if event.kind == EventKind::TookOver {
            *counts.entry(event.host).or_default() += 1;
        }
    }
    Ok(counts)
}

/// Judges from one moment to the next.
#[derive(Default)]
pub struct OneSpeaker {
    turns: TakeOvers,
    took_over: TakeOvers,
}

impl OneSpeaker {
    /// Looks at what was heard and told since the last time.
    ///
    /// # Errors
    /// With the host that spoke without having taken over, and the turns around it.
    pub fn judge(
        &mut self,
        heard: &[Spoken],
        took_over: &TakeOvers,
        queues: &[Queue],
    ) -> std::result::Result<(), String> {
        let turns = turns(&without_late(heard, queues));
        let of = |counts: &TakeOvers, host: &str| counts.get(host).copied().unwrap_or_default();
        for host in turns.keys() {
            let spoke = of(&turns, host) - of(&self.turns, host);
            let allowed = of(took_over, host).saturating_sub(of(&self.took_over, host));
            if spoke > allowed {
                return Err(format!(
                    "two speakers: host {host} began to speak {spoke} times and took over {allowed} times: {}",
                    tell(heard)
                ));
            }
        }
        (self.turns, self.took_over) = (turns, took_over.clone());
        Ok(())
    }
}

/// The turns without those that came late out of a queue; what one host said before and after such a turn is one turn.
fn without_late(heard: &[Spoken], queues: &[Queue]) -> Vec<Spoken> {
    let mut kept: Vec<Spoken> = Vec::new();
    let mut left: Vec<u64> = queues.iter().map(|queue| queue.frames).collect();
    // What comes out of a queue is no longer in it.
    let mut comes_late = |turn: &Spoken, first: SystemTime| {
        let may =
            |(at, queue): &(usize, &Queue)| queue.may_have_held(turn, first) && turn.frames <= left[*at];
        let at = queues.iter().enumerate().find(may).map(|(at, _)| at);
        if let Some(at) = at {
            left[at] -= turn.frames;
        }
        at.is_some()
    };
    for turn in heard {
        match &mut kept[..] {
            [.., now] if now.host == turn.host => {
                now.last = turn.last;
                now.frames += turn.frames;
            }
            [.., old, now] if old.host == turn.host && comes_late(turn, now.first) => {}
            _ => kept.push(turn.clone()),
        }
    }
    kept
}

/// How often each host began to speak after another. The first of all began with the VM.
fn turns(heard: &[Spoken]) -> TakeOvers {
    let mut turns = TakeOvers::new();
    for next in heard.iter().skip(1) {
        *turns.entry(next.host.clone()).or_default() += 1;
    }
    turns
}

/// The last turns, for a person.
fn tell(heard: &[Spoken]) -> String {
    let from = heard.len().saturating_sub(8);
    let mut words = Vec::new();
    for (at, turn) in heard.iter().enumerate().skip(from) {
        let pause = at
            .checked_sub(1)
            .and_then(|last| turn.first.duration_since(heard[last].last).ok())
            .unwrap_or_default();
        let lasted = turn.last.duration_since(turn.first).unwrap_or_default();
        words.push(format!(
            "+{} ms: {} for {} ms, {} frames",
            pause.as_millis(),
            turn.host,
            lasted.as_millis(),
            turn.frames
        ));
    }
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spoken(hosts: &[&str]) -> Vec<Spoken> {
        let now = SystemTime::now();
        let one = |host: &&str| Spoken {
            host: (*host).to_owned(),
            first: now,
            last: now,
            frames: 1,
        };
        hosts.iter().map(one).collect()
    }

    fn told(counts: &[(&str, usize)]) -> TakeOvers {
        counts
            .iter()
            .map(|(host, count)| ((*host).to_owned(), *count))
            .collect()
    }

    /// Turns from so many milliseconds to so many.
    fn timed(turns: &[(&str, u64, u64)]) -> Vec<Spoken> {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        let one = |&(host, first, last): &(&str, u64, u64)| Spoken {
            host: host.to_owned(),
            first: at(first),
            last: at(last),
            frames: 1,
        };
        turns.iter().map(one).collect()
    }

    /// The cable of `b` is slow from 100 to 900 ms, and holds frames for 300 ms.
    fn slow() -> Vec<Queue> {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        vec![Queue {
            host: "b".to_owned(),
            from: at(100),
            until: at(900),
            holds: Duration::from_millis(300),
            frames: u64::MAX,
        }]
    }

    #[test]
    fn what_waited_in_a_slow_cable_is_no_turn() {
        let heard = timed(&[
            ("b", 0, 200),
            ("a", 500, 540),
            ("b", 544, 550),
            ("a", 550, 550),
            ("b", 550, 799),
            ("a", 801, 2000),
        ]);
        OneSpeaker::default()
            .judge(&heard, &told(&[("a", 1)]), &slow())
            .unwrap();
        let error = OneSpeaker::default()
            .judge(&heard, &told(&[("a", 1)]), &[])
            .unwrap_err();
        assert!(error.contains("two speakers: host a"), "{error}");
    }

    #[test]
    fn a_slow_cable_excuses_nothing_else() {
        let judge = |heard: &[(&str, u64, u64)]| {
            OneSpeaker::default().judge(&timed(heard), &told(&[("a", 1)]), &slow())
        };
        // Longer than a queue can hold it; after the cable was mended; through another host's cable.
        for late in [
            [("b", 0, 200), ("a", 500, 600), ("b", 700, 801), ("a", 802, 850)],
            [("b", 0, 800), ("a", 850, 890), ("b", 895, 901), ("a", 902, 999)],
        ] {
            assert!(judge(&late).is_err(), "{late:?}");
        }
        let other = timed(&[("a", 0, 200), ("b", 500, 600), ("a", 610, 620), ("b", 630, 640)]);
        assert!(
            OneSpeaker::default()
                .judge(&other, &told(&[("b", 1)]), &slow())
                .is_err()
        );
    }

    #[test]
    fn a_host_that_stood_still_in_a_write_says_one_frame_and_no_more() {
        let goes_on = SystemTime::UNIX_EPOCH + Duration::from_millis(3_000);
        let stood = [Queue::of_a_standstill("a", goes_on)];
        let judge = |first, last, frames| {
            let mut heard = timed(&[
                ("a", 0, 100),
                ("b", 300, 3_000),
                ("a", first, last),
                ("b", last, 9_000),
            ]);
            heard[2].frames = frames;
            OneSpeaker::default().judge(&heard, &told(&[("b", 1)]), &stood)
        };
        judge(3_001, 3_001, 1).unwrap();
        for (first, last, frames) in [(3_001, 3_002, 2), (2_999, 2_999, 1), (4_001, 4_001, 1)] {
            assert!(judge(first, last, frames).is_err(), "{first} {last} {frames}");
        }
        // One by one between the other's.
        let again = timed(&[
            ("a", 0, 100),
            ("b", 300, 3_000),
            ("a", 3_001, 3_001),
            ("b", 3_002, 3_002),
            ("a", 3_003, 3_003),
            ("b", 3_004, 9_000),
        ]);
        let judged = OneSpeaker::default().judge(&again, &told(&[("b", 1)]), &stood);
        assert!(judged.is_err());
    }

    #[test]
    fn each_turn_needs_a_take_over_of_its_own() {
        let mut judge = OneSpeaker::default();
        judge.judge(&spoken(&["a"]), &told(&[]), &[]).unwrap();
        judge
            .judge(&spoken(&["a", "b"]), &told(&[("b", 1)]), &[])
            .unwrap();
        // The deposed one's last frames, after the new one's first.
        let late = spoken(&["a", "b", "a", "b"]);
        let error = judge.judge(&late, &told(&[("b", 1)]), &[]).unwrap_err();
        assert!(error.contains("two speakers: host a"), "{error}");
        // Had both taken over, it would be right.
        judge.judge(&late, &told(&[("a", 1), ("b", 2)]), &[]).unwrap();
    }

    #[test]
    fn a_take_over_that_was_never_heard_allows_nothing_later() {
        let mut judge = OneSpeaker::default();
        let counts = told(&[("b", 1)]);
        judge.judge(&spoken(&["a"]), &counts, &[]).unwrap();
        assert!(judge.judge(&spoken(&["a", "b"]), &counts, &[]).is_err());
    }
}
