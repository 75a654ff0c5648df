//! Which connections are followed, where there are too many of them.
//!
//! One that has ended gives its place to a new one; where there is none, the longest in its handshake does: nobody may ever complete that (its SYN was
//! forged, or the port is closed). Of a connection that is forgotten nobody knows how far it was read.
//!
//! Invariants:
//! 1. Which connections are followed and have not ended follows from the frames as they arrived, and from nothing else: not from how far they were
//!    delivered, of which each host has its own pace. So both hosts follow the same ones, whose handshakes' ends are inputs for both.
//! 2. No SYN costs a look at all of them.
//!
//! Not here: what a copy of a running program takes over (`carried`).

use super::{Gate, Heard, MOST_CONNECTIONS};
use crate::output::packet::{FlowKey, Segment};
use std::collections::BTreeMap;

/// Those that may be forgotten, in the order of their SYNs.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// What the next connection's number is.
    next: u64,
    ended: BTreeMap<u64, FlowKey>,
    opening: BTreeMap<u64, FlowKey>,
}

impl Spare {
    /// Of these, which have their numbers from a table.
    fn of(all: &BTreeMap<FlowKey, Heard>) -> Self {
        let mut spare = Self::default();
        for (key, heard) in all {
            spare.next = spare.next.max(heard.number + 1);
            if heard.ended {
                spare.ended.insert(heard.number, *key);
            } else if heard.opening {
                spare.opening.insert(heard.number, *key);
            }
        }
        spare
    }

    /// A connection begins: its number.
    fn begins(&mut self, key: &FlowKey) -> u64 {
        let number = self.next;
        self.next += 1;
        self.opening.insert(number, *key);
        number
    }

    /// Its handshake has ended.
    pub(super) fn opened(&mut self, number: u64) {
        self.opening.remove(&number);
    }

    fn ends(&mut self, key: &FlowKey, number: u64) {
        self.opening.remove(&number);
        self.ended.insert(number, *key);
    }

    fn gone(&mut self, number: u64) {
        self.opening.remove(&number);
        self.ended.remove(&number);
    }

    fn first(&self) -> Option<FlowKey> {
        self.ended.values().chain(self.opening.values()).next().copied()
    }
}

impl Gate {
    /// A SYN arrived. One that is said again begins nothing.
    pub(super) fn begins(&mut self, segment: &Segment) {
        let key = &segment.key;
        if self.heard.get(key).is_some_and(|heard| heard.isn == segment.seq) {
            return;
        }
        self.forget(key);
        if self.heard.len() >= MOST_CONNECTIONS {
            let Some(spare) = self.spare.first() else {
                return;
            };
            self.forget(&spare);
        }
        let number = self.spare.begins(key);
        self.heard.insert(*key, Heard::since(segment.seq, number));
    }

    /// The client has said that it ends this one. A reset ends it here as well, before it is delivered (invariant 1).
    pub(super) fn ends(&mut self, key: &FlowKey) {
        if let Some(heard) = self.heard.get_mut(key) {
            heard.ended = true;
            self.spare.ends(key, heard.number);
        }
    }

    /// All that are followed were loaded.
    pub(super) fn count_spare(&mut self) {
        self.spare = Spare::of(&self.heard);
    }

    pub(super) fn forget(&mut self, key: &FlowKey) {
        let gone = self.heard.remove(key);
        if let Some(gone) = &gone {
            self.beyond -= gone.beyond.len();
            self.spare.gone(gone.number);
        }
        self.owing.gone(gone.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use crate::output::packet::{ACK, RST, SYN};
    use crate::program::order::tests::client;
    use crate::program::order::{Gate, Next, Order};

    #[test]
    fn a_handshake_that_was_reset_ends_on_no_host_whether_the_reset_was_delivered_or_not() {
        for is_delivered in [true, false] {
            let mut gate = Gate::new(Order::Read, 2, 1000);
            assert!(gate.arrived(client(1, SYN, 99, b"")).is_some());
            assert_eq!(gate.arrived(client(1, RST, 100, b"")), None);
            if is_delivered {
                assert!(matches!(gate.next(0), Next::Deliver(_)));
            }
            let opens = gate.arrived(client(1, ACK, 100, b""));
            assert!(opens.is_some(), "it is no input");
        }
    }
}
