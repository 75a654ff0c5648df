//! Which frames of the network are for a card: those to an address behind it.
//!
//! Decides:    which MAC addresses are behind the card: its own, and those that the guest was seen to send from, as a switch learns
//!             what is behind a port.
//! Flow:       every frame of the guest -> [`RxFilter::learn`] -> [`super::Tap::set_rx_filter`].
//! Invariants: 1. an address that was learnt stays; 2. with more than [`ADDRESSES_MAX`] the card gets everything.
//! Source:     struct tun_filter in linux/if_tun.h: it compares so many addresses exactly.
//! Not here:   broadcast and multicast, which every card gets.
//!
//! A segment that floods brings a card what is said between others, the hosts' own links included. If that were agreed on as the VM's
//! inputs, the links would carry it, and it would be flooded again.

/// Addresses that the kernel compares exactly.
pub const ADDRESSES_MAX: usize = 8;

/// What is behind one card.
#[derive(Debug, Clone)]
pub struct RxFilter {
    addresses: Vec<[u8; 6]>,
    everything: bool,
}

impl RxFilter {
    /// For the card with this address; `promiscuous`: everything is for it.
    #[must_use]
    pub fn new(mac: [u8; 6], promiscuous: bool) -> Self {
        Self {
            addresses: vec![mac],
            everything: promiscuous,
        }
    }

    /// Looks at a frame that the guest sent. Whether more is for the card now than before. Cheap when there is nothing new.
    pub fn learn(&mut self, frame: &[u8]) -> bool {
        let Some(source) = frame.get(6..12) else {
            return false;
        };
        let is_multicast = source[0] & 1 == 1;
        if self.everything || is_multicast || self.addresses.iter().any(|known| known == source) {
            return false;
        }
        match self.addresses.len() {
            ADDRESSES_MAX => self.everything = true,
            _ => self.addresses.push(source.try_into().expect("six bytes")),
        }
        true
    }

    /// The addresses behind the card; none: everything is for it.
    #[must_use]
    pub fn addresses(&self) -> &[[u8; 6]] {
        match self.everything {
            true => &[],
            false => &self.addresses,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame_from(source: [u8; 6]) -> Vec<u8> {
        [&[0xff; 6][..], &source, &[8, 0]].concat()
    }

    #[test]
    fn an_address_is_learnt_once_and_beyond_the_most_everything_passes() {
        let own = [0x52, 0x54, 0, 0, 0, 1];
        let mut filter = RxFilter::new(own, false);
        assert!(!filter.learn(&frame_from(own)));
        assert!(!filter.learn(b"short"));
        assert!(!filter.learn(&frame_from([0x33, 0x33, 0, 0, 0, 1])));
        assert_eq!(filter.addresses(), [own]);
        for last in 2..=ADDRESSES_MAX as u8 {
            assert!(filter.learn(&frame_from([2, 0, 0, 0, 0, last])));
            assert!(!filter.learn(&frame_from([2, 0, 0, 0, 0, last])));
        }
        assert_eq!(filter.addresses().len(), ADDRESSES_MAX);
        assert!(filter.learn(&frame_from([2, 0, 0, 0, 0, 99])));
        assert!(filter.addresses().is_empty());
        assert!(!filter.learn(&frame_from([2, 0, 0, 0, 0, 100])));
    }

    #[test]
    fn a_promiscuous_card_gets_everything_from_the_beginning() {
        let mut filter = RxFilter::new([2; 6], true);
        assert!(filter.addresses().is_empty());
        assert!(!filter.learn(&frame_from([4; 6])));
    }
}
