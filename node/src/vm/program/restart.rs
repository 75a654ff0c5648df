//! A program that has ended on all of its hosts is begun anew, where its file says so.
//!
//! * **Decides:** whether, and when. On which host, and that it is begun on one alone, is decided as after the loss of all copies (`images`).
//! * **Flow:** a copy ends -> [`Restart::ended`] -> no other copy took over -> `images` asks the other hosts -> an election -> `Complete` of
//!   one host, which begins; the other one gets a copy of the running program.
//! * **Invariants:** 1. what ended both copies by one input (`poison`) is not begun again, nor what a person has ended; 2. between two
//!   beginnings there is a rest, which doubles while the program does not serve for long.
//! * **Source:** systemd's `Restart=`, Docker's `--restart`. **Not here:** whose data count, and who is waited for (`images`).

use super::state::ProgramLoop;
use dunlin_api::files::RestartPolicy;

/// The rest before the first beginning, and the longest one.
const REST_US: (u64, u64) = (1_000_000, 60_000_000);
/// A program that has lived for so long was well: the next rest is the first one again.
const LONG_US: u64 = 60_000_000;

/// How a copy's end is to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The program has ended by itself, with exit code 0.
    Well,
    /// By another code, or by a signal.
    Badly,
    /// Dunlin could not go on with it, or not begin it.
    OfDunlin,
}

/// What this host knows of a program's ends and beginnings.
#[derive(Default)]
pub(super) struct Restart {
    /// Ends in a row, none of which came after a long life.
    ends: u32,
    /// When the copy here began.
    begun_us: Option<u64>,
    /// When it may be begun again.
    due_us: Option<u64>,
    /// The copy here was, or is to be, begun again.
    pub(super) again: bool,
    /// How often it was begun again on this host.
    pub(super) count: u64,
}

impl Restart {
    /// A copy begins, or was brought here.
    pub(super) fn begins(&mut self, now_us: u64) {
        self.begun_us = Some(now_us);
        self.due_us = None;
    }

    /// The copy here has ended; how long it is left alone, if it is to be begun again.
    pub(super) fn ended(&mut self, policy: RestartPolicy, end: End, now_us: u64) -> Option<u64> {
        let wanted = match (policy, end) {
            (RestartPolicy::Never, _) | (RestartPolicy::OnFailure, End::Well) => false,
            (_, End::Well | End::Badly) => true,
            // A file that is wrong is wrong for ever; what has run before may run again.
            (_, End::OfDunlin) => self.again,
        };
        let lived_us = self
            .begun_us
            .take()
            .map_or(0, |begun_us| now_us.saturating_sub(begun_us));
        if lived_us >= LONG_US {
            self.ends = 0;
        }
        let rest_us = (REST_US.0 << self.ends.min(8)).min(REST_US.1);
        self.ends = self.ends.saturating_add(1);
        self.due_us = wanted.then_some(now_us + rest_us);
        wanted.then_some(rest_us)
    }

    /// It is not begun again (invariant 1).
    pub(super) fn never(&mut self) {
        self.due_us = None;
    }

    /// It is to be begun again, now or later.
    pub(super) fn waits(&self) -> bool {
        self.due_us.is_some()
    }

    /// It may be begun again now.
    pub(super) fn is_due(&self, now_us: u64) -> bool {
        self.due_us.is_some_and(|due_us| due_us <= now_us)
    }
}

impl ProgramLoop {
    /// What a person is told beside how it ended.
    pub(super) fn plan_restart(&mut self, end: End) -> String {
        let now_us = self.now_us();
        match self.own.restart.ended(self.program.restart, end, now_us) {
            Some(rest_us) => format!(
                "; where no other copy goes on it is begun again, after {} s at least (restart = \"{}\")",
                rest_us / 1_000_000,
                self.program.restart.name()
            ),
            None => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RestartPolicy::{Always, Never, OnFailure};

    #[test]
    fn each_policy_begins_again_what_its_name_says() {
        for (policy, end, again) in [
            (Never, End::Well, false),
            (Never, End::Badly, false),
            (OnFailure, End::Well, false),
            (OnFailure, End::Badly, true),
            (Always, End::Well, true),
            (Always, End::Badly, true),
            (Always, End::OfDunlin, false),
        ] {
            let mut restart = Restart::default();
            assert_eq!(
                restart.ended(policy, end, 0).is_some(),
                again,
                "{policy:?} {end:?}"
            );
            assert_eq!(restart.waits(), again);
        }
        let mut restart = Restart {
            again: true,
            ..Restart::default()
        };
        assert!(restart.ended(Always, End::OfDunlin, 0).is_some(), "it ran before");
        restart.never();
        assert!(!restart.waits(), "that was poison");
    }

    #[test]
    fn the_rest_doubles_up_to_a_minute_and_is_short_again_after_a_long_life() {
        let mut restart = Restart::default();
        let mut now_us = 0;
        let mut rests = Vec::new();
        for _ in 0..8 {
            restart.begins(now_us);
            assert!(!restart.waits());
            let rest_us = restart.ended(Always, End::Badly, now_us).expect("again");
            assert!(!restart.is_due(now_us + rest_us - 1) && restart.is_due(now_us + rest_us));
            rests.push(rest_us / 1_000_000);
            now_us += rest_us;
        }
        assert_eq!(rests, [1, 2, 4, 8, 16, 32, 60, 60]);
        restart.begins(now_us);
        assert_eq!(
            restart.ended(Always, End::Badly, now_us + LONG_US),
            Some(REST_US.0)
        );
    }
}
