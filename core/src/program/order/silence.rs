//! Which input is owed no answer now: one that was read, while every copy is at rest and has not answered it. It waits for something: a lock
//! that another client's connection holds, say, whose next input would wait for it in vain.
//!
//! It is a copy's state, and no time, that ends the wait: so each host ends it at the same place of its copy's work, however busy it is.
//!
//! Invariants: 1. rest is looked for only where another input waits, and not before [`ASKED_AFTER_US`]: most answers are quicker; 2. a copy has
//! to be found at rest twice, [`APART_US`] from each other: a thread that sleeps for a moment of its own accord is at work.
//!
//! Not here: how rest is seen (`dunlin_program::rest`).

use super::Next;

/// So long an answer is just waited for.
const ASKED_AFTER_US: u64 = 2_000;
/// Between two looks that find rest.
const APART_US: u64 = 2_000;

/// What is known of the newest input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Silence {
    /// Nothing, and it is not looked at before that time.
    Unknown { from_us: u64 },
    /// Every copy was at rest then.
    Rested { at_us: u64 },
    /// It is looked at for the second time.
    Again,
    /// It waits for something else than time.
    OwesNothing,
}

impl Silence {
    pub(super) fn since(now_us: u64) -> Self {
        Self::Unknown {
            from_us: now_us + ASKED_AFTER_US,
        }
    }

    /// Every copy is at rest.
    pub(super) fn rests(&mut self, now_us: u64) {
        *self = match *self {
            Self::Unknown { .. } => Self::Rested { at_us: now_us },
            Self::Again => Self::OwesNothing,
            known => known,
        };
    }

    /// What is to be done to know it; none where it is known that no answer is owed.
    pub(super) fn next(&mut self, now_us: u64, until_us: u64) -> Option<Next> {
        match *self {
            Self::OwesNothing => None,
            Self::Unknown { from_us } if now_us < from_us => Some(Next::Wait(until_us.min(from_us))),
            Self::Rested { at_us } if now_us < at_us + APART_US => {
                Some(Next::Wait(until_us.min(at_us + APART_US)))
            }
            Self::Rested { .. } => {
                *self = Self::Again;
                Some(Next::AskForRest)
            }
            // It was not at rest when it was looked at again.
            Self::Again => {
                *self = Self::Unknown { from_us: now_us };
                Some(Next::AskForRest)
            }
            Self::Unknown { .. } => Some(Next::AskForRest),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::agreed::Frame;
    use crate::output::packet::{ACK, PSH, SYN};
    use crate::program::order::tests::{answer, client, key, socket};
    use crate::program::order::{Gate, Next, Of, Order};

    /// Two clients' inputs: the first one is read, waits for a lock, and owes no answer before the second one's connection has let it go.
    fn one_waits_for_another() -> (Gate, Frame) {
        let mut gate = Gate::new(Order::Answer, 2, 200_000);
        for port in [1, 2] {
            assert!(gate.arrived(client(port, SYN, 99, b"")).is_some());
            assert_eq!(gate.arrived(client(port, ACK, 100, b"")), None);
            assert!(matches!(gate.next(0), Next::Deliver(_)));
            answer(&mut gate, 0, &[socket(0, 0), socket(0, 0)], Of::Listener);
            assert_eq!(gate.next(0), Next::Idle);
        }
        assert_eq!(gate.arrived(client(1, ACK | PSH, 100, b"update")), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
        answer(&mut gate, 0, &[socket(6, 0), socket(6, 0)], Of::Connection);
        assert_eq!(gate.next(0), Next::Wait(200_000), "nothing waits for it");
        let commit = client(2, ACK | PSH, 100, b"commit");
        assert_eq!(gate.arrived(commit.clone()), None);
        (gate, commit)
    }

    #[test]
    fn who_is_at_rest_without_an_answer_owes_none() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(10), Next::Wait(2_000), "most answers are quicker");
        assert_eq!(gate.next(2_000), Next::AskForRest);
        assert_eq!(gate.next(2_100), Next::AskForRest, "it is at work");
        gate.are_at_rest(2_100);
        assert_eq!(
            gate.next(2_100),
            Next::Wait(4_100),
            "it may sleep for a moment only"
        );
        assert_eq!(gate.next(4_100), Next::AskForRest);
        gate.are_at_rest(4_100);
        assert_eq!(gate.next(4_100), Next::Deliver(commit));
        assert_eq!((gate.counters().silent, gate.counters().impatient), (1, 0));
    }

    #[test]
    fn who_sleeps_for_a_moment_and_goes_on_owes_an_answer_still() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(2_000), Next::AskForRest);
        gate.are_at_rest(2_000);
        assert_eq!(gate.next(4_000), Next::AskForRest);
        assert_eq!(gate.next(4_100), Next::AskForRest, "it is at work again");
        gate.are_at_rest(4_200);
        assert_eq!(
            gate.next(4_200),
            Next::Wait(6_200),
            "found at rest once since then"
        );
        // One copy's answer is not both's.
        gate.answered(0, &key(1));
        assert_eq!(gate.next(6_100), Next::Wait(6_200));
        gate.answered(1, &key(1));
        assert_eq!(gate.next(6_100), Next::Deliver(commit));
        assert_eq!(gate.counters().silent, 0);
    }

    #[test]
    fn who_is_never_at_rest_is_waited_for_as_long_as_patience_lasts() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(199_999), Next::AskForRest);
        assert_eq!(gate.next(200_000), Next::Deliver(commit));
        assert_eq!((gate.counters().silent, gate.counters().impatient), (0, 1));
    }
}
