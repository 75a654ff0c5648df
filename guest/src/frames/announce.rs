//! Tells the network where the VM is now: gratuitous ARP and unsolicited neighbour advertisements.
//!
//! Decides:    which addresses the guest has: those it was heard to claim. What it sends from is no claim: a guest that forwards sends from addresses of others.
//! Flow:       every released frame -> [`Announcer::learn`]; take-over -> [`Announcer::frames`] -> TAP.
//! Invariants: 1. only frames from the NIC's own MAC teach; 2. at most [`ADDRESSES_MAX`] addresses are kept, the oldest go.
//! Source:     RFC 5227 section 2.3 (ARP announcement), RFC 4861 section 7.2.6 (unsolicited advertisements).
//! Not here:   when to send them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{EtherType, Ethernet2HeaderSlice, IpNumber, Ipv6HeaderSlice, PacketBuilder, SlicedPacket};

/// Addresses kept per NIC.
pub const ADDRESSES_MAX: usize = 16;

const BROADCAST: [u8; 6] = [0xff; 6];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// ICMPv6's types: who asks for a neighbour does so from its own address, and who advertises itself names it.
const NEIGHBOR_SOLICITATION: u8 = 135;
const NEIGHBOR_ADVERTISEMENT: u8 = 136;
const ARP_ETHERNET: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1]; // Ethernet, IPv4, lengths, request

/// Learns one NIC's addresses and announces them.
#[derive(Debug, Clone)]
pub struct Announcer {
    mac: [u8; 6],
    addresses: VecDeque<IpAddr>,
}

impl Announcer {
    /// For the NIC with this MAC address.
    pub fn new(mac: [u8; 6]) -> Announcer {
        Announcer {
            mac,
            addresses: VecDeque::new(),
        }
    }

    /// The guest's addresses, most recently learnt last.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.addresses.iter().copied()
    }

    /// Adds an address that is known otherwise (from a peer).
    pub fn add(&mut self, address: IpAddr) {
        if self.addresses.contains(&address) {
            return;
        }
        if self.addresses.len() == ADDRESSES_MAX {
            self.addresses.pop_front();
        }
        self.addresses.push_back(address);
    }

    /// Whether a frame says that it comes from this NIC.
    pub fn is_from_here(&self, frame: &[u8]) -> bool {
        frame.get(6..12) == Some(&self.mac[..])
    }

    /// Looks at a frame that the guest sent. Cheap when there is nothing new.
    pub fn learn(&mut self, frame: &[u8]) {
        let Ok(ethernet) = Ethernet2HeaderSlice::from_slice(frame) else {
            return;
        };
        if ethernet.source() != self.mac {
            return;
        }
        let payload = &frame[ethernet.slice().len()..];
        let source: IpAddr = match ethernet.ether_type() {
            EtherType::IPV6 => match claimed_v6(payload) {
                Some(address) => address.into(),
                None => return,
            },
            // Only Ethernet/IPv4; the sender's MAC must be ours too.
            EtherType::ARP
                if payload.len() >= 28 && payload[..6] == ARP_ETHERNET[..6] && payload[8..14] == self.mac =>
            {
                Ipv4Addr::new(payload[14], payload[15], payload[16], payload[17]).into()
            }
            _ => return,
        };
        let usable = match source {
            IpAddr::V4(a) => {
                !a.is_unspecified() && !a.is_multicast() && !a.is_broadcast() && !a.is_loopback()
            }
            IpAddr::V6(a) => !a.is_unspecified() && !a.is_multicast() && !a.is_loopback(),
        };
        if usable && self.addresses.back() != Some(&source) {
            self.add(source);
        }
    }

    /// The frames to send at a take-over. Without a known address: one frame that at least teaches the switches.
    pub fn frames(&self) -> Vec<Vec<u8>> {
        if self.addresses.is_empty() {
            return vec![gratuitous_arp(self.mac, Ipv4Addr::UNSPECIFIED)];
        }
        let frame = |address: &IpAddr| match address {
            IpAddr::V4(address) => gratuitous_arp(self.mac, *address),
            IpAddr::V6(address) => unsolicited_advertisement(self.mac, *address),
        };
        self.addresses.iter().map(frame).collect()
    }
}

/// What neighbour discovery's words in an IPv6 packet claim. With any other hop limit they have passed a router, and count nowhere.
fn claimed_v6(packet: &[u8]) -> Option<Ipv6Addr> {
    const HOP_LIMIT: u8 = 255;
    let ip = Ipv6HeaderSlice::from_slice(packet).ok()?;
    if ip.next_header() != IpNumber::IPV6_ICMP || ip.hop_limit() != HOP_LIMIT {
        return None;
    }
    // Type, code, checksum and flags, then the target.
    let message = &packet[ip.slice().len()..];
    let target: [u8; 16] = *message.get(8..)?.first_chunk()?;
    match *message.first()? {
        NEIGHBOR_SOLICITATION => Some(ip.source_addr()),
        NEIGHBOR_ADVERTISEMENT => Some(target.into()),
        _ => None,
    }
}

/// An ARP announcement: a broadcast request whose sender and target are both `address`.
pub fn gratuitous_arp(mac: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = [
        &BROADCAST[..],
        &mac,
        &EtherType::ARP.0.to_be_bytes(),
        &ARP_ETHERNET,
    ]
    .concat();
    frame.extend([&mac[..], &address.octets(), &[0; 6], &address.octets()].concat());
    frame.resize(60, 0); // the shortest Ethernet frame
    frame
}

/// A neighbour advertisement to all nodes, with the override flag and the target's link-layer address.
pub fn unsolicited_advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    const OVERRIDE: u8 = 0x20;
    const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
    let body = [&address.octets()[..], &[TARGET_LINK_LAYER_ADDRESS, 1], &mac].concat();
    let builder = PacketBuilder::ethernet2(mac, ALL_NODES_MAC)
        .ipv6(address.octets(), ALL_NODES.octets(), 255)
        .icmpv6_raw(NEIGHBOR_ADVERTISEMENT, 0, [OVERRIDE, 0, 0, 0]);
    let mut frame = Vec::with_capacity(builder.size(body.len()));
    builder
        .write(&mut frame, &body)
        .expect("a vector takes everything");
    debug_assert!(SlicedPacket::from_ethernet(&frame).is_ok());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{NetSlice, TransportSlice};

    const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];

    #[test]
    fn the_arp_announcement_is_what_rfc_5227_says() {
        let frame = gratuitous_arp(MAC, Ipv4Addr::new(10, 0, 0, 7));
        let packet = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(NetSlice::Arp(arp)) = packet.net else {
            panic!("not ARP")
        };
        assert_eq!(arp.operation().0, 1);
        assert_eq!(
            (arp.sender_hw_addr(), arp.sender_protocol_addr()),
            (&MAC[..], &[10, 0, 0, 7][..])
        );
        assert_eq!(arp.target_protocol_addr(), [10, 0, 0, 7]);
    }

    #[test]
    fn the_advertisement_has_a_right_checksum_and_hop_limit_255() {
        let address: Ipv6Addr = "fe80::7".parse().unwrap();
        let frame = unsolicited_advertisement(MAC, address);
        let packet = SlicedPacket::from_ethernet(&frame).unwrap();
        let (Some(NetSlice::Ipv6(ip)), Some(TransportSlice::Icmpv6(icmp))) = (packet.net, packet.transport)
        else {
            panic!("not ICMPv6")
        };
        assert_eq!(ip.header().hop_limit(), 255);
        assert!(icmp.is_checksum_valid(ip.header().source(), ip.header().destination()));
        assert_eq!((icmp.type_u8(), frame.len()), (136, 14 + 40 + 32));
    }

    fn address(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    /// A neighbour solicitation.
    fn asks_from(source: Ipv6Addr, hop_limit: u8) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2(MAC, ALL_NODES_MAC)
            .ipv6(source.octets(), ALL_NODES.octets(), hop_limit)
            .icmpv6_raw(NEIGHBOR_SOLICITATION, 0, [0; 4]);
        let mut frame = vec![];
        builder.write(&mut frame, &[7; 16]).unwrap();
        frame
    }

    /// A guest that is a router or has containers: at a take-over it would be said to be all of them.
    #[test]
    fn what_a_guest_forwards_is_not_its_own() {
        let mut announcer = Announcer::new(MAC);
        let to_everybody = || PacketBuilder::ethernet2(MAC, BROADCAST);
        let mut frame = vec![];
        let v4 = to_everybody().ipv4([10, 9, 9, 9], [10, 0, 0, 1], 63).udp(1, 2);
        v4.write(&mut frame, b"x").unwrap();
        announcer.learn(&frame);
        frame.clear();
        let v6 = to_everybody()
            .ipv6(address("fd00::9").octets(), address("fd00::1").octets(), 255)
            .udp(1, 2);
        v6.write(&mut frame, b"x").unwrap();
        announcer.learn(&frame);
        assert_eq!(announcer.addresses().count(), 0);
        assert_eq!(announcer.frames(), [gratuitous_arp(MAC, Ipv4Addr::UNSPECIFIED)]);
    }

    #[test]
    fn addresses_are_learnt_from_the_guests_own_frames_only() {
        let mut announcer = Announcer::new(MAC);
        let arp = |mac, last| gratuitous_arp(mac, Ipv4Addr::new(10, 0, 0, last));
        announcer.learn(&arp(MAC, 7));
        announcer.learn(&arp(MAC, 7));
        announcer.learn(&arp([2; 6], 8));
        announcer.learn(&gratuitous_arp(MAC, Ipv4Addr::UNSPECIFIED));
        announcer.learn(&arp(MAC, 9));
        announcer.learn(&unsolicited_advertisement(MAC, address("fe80::7")));
        let asks = |hop_limit| asks_from(address("fd00::7"), hop_limit);
        announcer.learn(&asks(254));
        assert_eq!(announcer.addresses().count(), 3, "a router lay in between");
        announcer.learn(&asks(255));
        // Who makes sure that nobody has an address asks from none.
        announcer.learn(&asks_from(Ipv6Addr::UNSPECIFIED, 255));
        announcer.learn(&asks(255)[..60]);
        announcer.learn(b"short");
        let seen: Vec<String> = announcer.addresses().map(|a| a.to_string()).collect();
        assert_eq!(seen, ["10.0.0.7", "10.0.0.9", "fe80::7", "fd00::7"]);
        assert_eq!(announcer.frames().len(), 4);
        (0..40).for_each(|i| announcer.add(Ipv4Addr::new(10, 1, 0, i).into()));
        assert_eq!(announcer.addresses().count(), ADDRESSES_MAX);
        assert_eq!(Announcer::new(MAC).frames().len(), 1);
    }
}
