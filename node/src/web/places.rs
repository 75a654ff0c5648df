//! Places for connections from the network, of people and machines whom nobody knows yet.
//!
//! **Decides**: whether one more connection may come in, by where it comes from. **Flow**: a connection -> a [`Place`], which it gives back when it ends, or
//! when its user is known. **Invariants**: 1. one address has a few of the places, never all. 2. all together are bounded. **Not here**: who
//! is behind an address: it proves nothing, and only says whose places are used up.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// Connections at once from all addresses.
const ALL: usize = 32;
/// From one of them; of IPv6 the first half counts, since one machine has all the others.
const FROM_ONE: usize = 8;

/// The connections there are.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

/// One of them; it is given back when this goes.
#[derive(Debug)]
pub struct Place {
    places: Places,
    from: IpAddr,
}

impl Places {
    /// A place, if there is one.
    pub fn take(&self, from: IpAddr) -> Option<Place> {
        let from = counted_as(from);
        let mut taken = self.0.lock();
        let all: usize = taken.values().sum();
        let mine = taken.get(&from).copied().unwrap_or(0);
        if all >= ALL || mine >= FROM_ONE {
            return None;
        }
        taken.insert(from, mine + 1);
        Some(Place {
            places: self.clone(),
            from,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock();
        if let Some(mine) = taken.get_mut(&self.from) {
            *mine -= 1;
            if *mine == 0 {
                taken.remove(&self.from);
            }
        }
    }
}

fn counted_as(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
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

    #[test]
    fn one_address_never_has_all_the_places() {
        let places = Places::default();
        let one: Vec<Place> = (0..1000).filter_map(|_| places.take(address(1))).collect();
        assert_eq!(one.len(), FROM_ONE);
        assert!(places.take(address(2)).is_some(), "another one comes in");
        let many: Vec<Place> = (2..1000)
            .filter_map(|number| places.take(address(number)))
            .collect();
        assert_eq!(one.len() + many.len(), ALL);
        drop(one);
        let again: Vec<Place> = (0..1000).filter_map(|_| places.take(address(1))).collect();
        assert_eq!(again.len(), FROM_ONE, "what was given back is free");
        drop((again, many));
        assert!(
            places.0.lock().is_empty(),
            "nothing is remembered of who has gone"
        );
    }

    #[test]
    fn an_address_has_no_more_places_by_writing_itself_in_another_way() {
        let places = Places::default();
        let long = |last: u64| IpAddr::V6(Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(last)));
        let held: Vec<Place> = (0..1000).filter_map(|last| places.take(long(last))).collect();
        assert_eq!(held.len(), FROM_ONE);
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        let short: Vec<Place> = (0..FROM_ONE).filter_map(|_| places.take(address(1))).collect();
        assert_eq!(short.len(), FROM_ONE);
        assert!(places.take(mapped).is_none());
    }
}
