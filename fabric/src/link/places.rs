//! What it decides: whether one more caller may come in who is not known yet, by where they call from.
//!
//! **Invariants**: 1. strangers never take a member's place: each member's address has places of its own. 2. one stranger's address takes a
//! few of the strangers' places, not all; of IPv6 its network counts (the first half), since one machine has all of that. 3. all
//! together are bounded.
//! **Not here**: who is a member. An address proves nothing; it only says whose places are used up.

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// Callers at once from all addresses that are no member's.
pub(super) const STRANGERS: usize = 32;
/// From one of these.
pub(super) const PER_STRANGER: usize = 8;
/// From one member's address: a few for each VM, when its host comes back.
pub(super) const PER_MEMBER: usize = 64;

/// All places, and who has one.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<Taken>>);

/// One of them; it is given back when this goes.
#[derive(Debug)]
pub struct Place {
    places: Places,
    from: IpAddr,
}

#[derive(Debug, Default)]
struct Taken {
    members: BTreeSet<IpAddr>,
    by: BTreeMap<IpAddr, usize>,
}

impl Places {
    /// Members' addresses have places of their own.
    pub fn keep_for(&self, members: impl IntoIterator<Item = IpAddr>) {
        let members = members.into_iter().map(|address| address.to_canonical());
        self.0.lock().members = members.collect();
    }

    /// A place for a caller from this address, if there is one.
    #[must_use]
    pub fn take(&self, from: IpAddr) -> Option<Place> {
        let from = from.to_canonical();
        self.0.lock().take(from).then(|| Place {
            places: self.clone(),
            from,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock();
        if let Some(count) = taken.by.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                taken.by.remove(&self.from);
            }
        }
    }
}

impl Taken {
    fn take(&mut self, from: IpAddr) -> bool {
        let is_free = match self.members.contains(&from) {
            true => self.by.get(&from).is_none_or(|count| *count < PER_MEMBER),
            false => {
                let strangers = self
                    .by
                    .iter()
                    .filter(|(address, _)| !self.members.contains(address));
                let (mut all, mut mine) = (0, 0);
                for (address, count) in strangers {
                    all += count;
                    mine += if network_of(*address) == network_of(from) {
                        *count
                    } else {
                        0
                    };
                }
                mine < PER_STRANGER && all < STRANGERS
            }
        };
        if is_free {
            *self.by.entry(from).or_default() += 1;
        }
        is_free
    }
}

fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        short => short,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + number).into()
    }

    fn long(last: u64) -> IpAddr {
        Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(last)).into()
    }

    /// As many as there are, for callers from these addresses.
    fn all(places: &Places, from: impl IntoIterator<Item = IpAddr>) -> Vec<Place> {
        from.into_iter().filter_map(|from| places.take(from)).collect()
    }

    fn again_and_again(from: IpAddr) -> impl Iterator<Item = IpAddr> {
        std::iter::repeat_n(from, 1000)
    }

    #[test]
    fn strangers_fill_their_own_places_and_no_others() {
        let places = Places::default();
        places.keep_for([address(1), address(2)]);
        let one = all(&places, again_and_again(address(9)));
        assert_eq!(one.len(), PER_STRANGER);
        let many = all(&places, (100..10_000).map(address));
        assert_eq!(one.len() + many.len(), STRANGERS);
        let members = [1, 2].map(|member| all(&places, again_and_again(address(member))));
        assert!(members.iter().all(|mine| mine.len() == PER_MEMBER));
        drop(one);
        assert!(
            places.take(address(1)).is_none(),
            "a stranger's place is no member's"
        );
        assert_eq!(all(&places, (10_000..20_000).map(address)).len(), PER_STRANGER);
        drop((many, members));
        assert!(
            places.0.lock().by.is_empty(),
            "nothing is remembered of who has gone"
        );
    }

    #[test]
    fn an_address_has_no_more_places_by_writing_itself_in_another_way() {
        let places = Places::default();
        places.keep_for([address(1), long(1)]);
        let IpAddr::V4(short) = address(1) else {
            unreachable!()
        };
        let mapped = IpAddr::V6(short.to_ipv6_mapped());
        let member = all(&places, again_and_again(mapped));
        assert_eq!(member.len(), PER_MEMBER);
        assert!(places.take(address(1)).is_none());
        let network = all(&places, (2..1000).map(long));
        assert_eq!(network.len(), PER_STRANGER);
        assert_eq!(
            all(&places, again_and_again(long(1))).len(),
            PER_MEMBER,
            "a member is one by its whole address"
        );
    }

    #[test]
    fn who_becomes_a_member_or_no_longer_is_one_is_counted_right() {
        let places = Places::default();
        let (one, other) = (places.take(address(1)), places.take(address(2)));
        let strangers = |places: &Places| STRANGERS - all(places, (100..1000).map(address)).len();
        assert_eq!(strangers(&places), 2);
        places.keep_for([address(1)]);
        assert_eq!(strangers(&places), 1);
        drop(one);
        places.keep_for([]);
        assert_eq!(strangers(&places), 1);
        drop(other);
        assert!(places.0.lock().by.is_empty());
    }
}
