//! What it decides: whether one more handshake may begin, by where the caller is.
//!
//! **Invariants**: 1. strangers' handshakes never take a member's place: each member's address has places of its own.
//! 2. one stranger's address takes a few of the strangers' places, not all. 3. all together are bounded.
//! **Not here**: who is a member. An address proves nothing; it only says whose places are used up.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Handshakes at once from all addresses that are no member's.
pub(super) const STRANGERS: usize = 32;
/// Handshakes at once from one of these.
pub(super) const PER_STRANGER: usize = 8;
/// Handshakes at once from one member's address: a few for each VM, when its host comes back.
pub(super) const PER_MEMBER: usize = 64;

/// The handshakes under way.
#[derive(Debug, Default)]
pub(super) struct Places {
    members: BTreeSet<IpAddr>,
    under_way: BTreeMap<IpAddr, usize>,
    strangers: usize,
}

impl Places {
    /// Members' addresses have places of their own.
    pub(super) fn keep_for(&mut self, members: impl IntoIterator<Item = IpAddr>) {
        self.members = members
            .into_iter()
            .map(|address| address.to_canonical())
            .collect();
        let strangers = self
            .under_way
            .iter()
            .filter(|(address, _)| !self.members.contains(address));
        self.strangers = strangers.map(|(_, count)| count).sum();
    }

    /// Whether a handshake with this address may begin; if so its place is taken.
    pub(super) fn take(&mut self, from: IpAddr) -> bool {
        let from = from.to_canonical();
        let mine = self.under_way.get(&from).copied().unwrap_or(0);
        let is_member = self.members.contains(&from);
        let is_free = match is_member {
            true => mine < PER_MEMBER,
            false => mine < PER_STRANGER && self.strangers < STRANGERS,
        };
        if is_free {
            self.under_way.insert(from, mine + 1);
            self.strangers += usize::from(!is_member);
        }
        is_free
    }

    /// A handshake that [`take`](Self::take) allowed is over.
    pub(super) fn leave(&mut self, from: IpAddr) {
        let from = from.to_canonical();
        let Some(mine) = self.under_way.get_mut(&from) else {
            return;
        };
        *mine -= 1;
        if *mine == 0 {
            self.under_way.remove(&from);
        }
        self.strangers -= usize::from(!self.members.contains(&from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + number).into()
    }

    #[test]
    fn strangers_fill_their_own_places_and_no_others() {
        let mut places = Places::default();
        places.keep_for([address(1), address(2)]);
        let one = (0..1000).filter(|_| places.take(address(9))).count();
        assert_eq!(one, PER_STRANGER);
        let many = (100..10_000)
            .filter(|&number| places.take(address(number)))
            .count();
        assert_eq!(one + many, STRANGERS);
        for member in [1, 2] {
            assert_eq!(
                (0..1000).filter(|_| places.take(address(member))).count(),
                PER_MEMBER
            );
        }
        places.leave(address(9));
        assert!(!places.take(address(1)), "a stranger's place is no member's");
        assert!(places.take(address(10_001)));
        assert!(!places.take(address(10_002)));
    }

    #[test]
    fn an_address_written_in_the_long_form_is_the_same_one() {
        let mut places = Places::default();
        places.keep_for([address(1)]);
        let IpAddr::V4(short) = address(1) else {
            unreachable!()
        };
        let long = IpAddr::V6(short.to_ipv6_mapped());
        assert_eq!((0..1000).filter(|_| places.take(long)).count(), PER_MEMBER);
        (0..PER_MEMBER).for_each(|_| places.leave(address(1)));
        assert!(places.under_way.is_empty() && places.strangers == 0);
    }

    #[test]
    fn who_becomes_a_member_or_no_longer_is_one_is_counted_right() {
        let mut places = Places::default();
        assert!(places.take(address(1)) && places.take(address(2)));
        places.keep_for([address(1)]);
        assert_eq!(places.strangers, 1);
        places.leave(address(1));
        places.keep_for([]);
        places.leave(address(2));
        assert_eq!(places.strangers, 0);
    }
}
