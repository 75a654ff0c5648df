//! What it decides: which offer of the network's the VM does not hear: Multipath TCP.
//!
//! Flow: a frame off the network -> [`without`] -> the log, or the VM.
//!
//! A connection over several paths has keys that each end draws by chance, and numbers that follow from them, in options beside the byte stream. Two copies of a
//! VM draw other ones, and their streams are the same all the same. The client knows the primary's, and would throw away what another copy says after a
//! take-over. So the VM is offered none: whoever offers it speaks plain TCP where nobody answers that, and so does a VM whose own offer is not answered. Some
//! servers accept it without being asked (Go's, since 1.24).
//!
//! Invariants:
//! 1. Total: any bytes may come.
//! 2. Nothing but the option changes, and a checksum that was right is right.
//!
//! Source: RFC 8684, 3.7 (fall-back). Not here: connections that were begun where nobody took the offer away.

use super::packet::{Direction, Parsed, parse};
use super::rewriter::rewrite::Rewriter;
use crate::agreed::Frame;

/// TCP's option of that name.
const MPTCP: u8 = 30;
/// The option that says nothing.
const NOP: u8 = 1;
/// The end of all options.
const END: u8 = 0;

/// `frame`, which is for the VM, without an offer of Multipath TCP; none where it makes none.
#[must_use]
pub fn without(frame: &Frame) -> Option<Frame> {
    let Parsed::Tcp(segment) = parse(frame, Direction::ToVm) else {
        return None;
    };
    if !segment.syn() {
        return None;
    }
    let mut plain = Rewriter::of(frame, &segment);
    let bytes = &frame.bytes[..segment.options.end];
    let (mut at, mut offers) = (segment.options.start, false);
    while let Some(&kind) = bytes.get(at) {
        let length = match (kind, bytes.get(at + 1)) {
            (NOP, _) => 1,
            (END, _) | (_, None) => break,
            (_, Some(&length)) => usize::from(length),
        };
        // What is cut short ends the list, as it does for Linux.
        if length == 0 || kind != NOP && length < 2 || at + length > bytes.len() {
            break;
        }
        if kind == MPTCP {
            (at..at + length).for_each(|at| plain.set_byte(at, NOP));
            offers = true;
        }
        at += length;
    }
    offers.then(|| plain.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::packet::testing::{Seg, checksum_is_right, segment, sum_of};
    use crate::output::packet::{ACK, SYN};
    use proptest::prelude::*;

    /// `seg` with its SACK blocks made an option of this kind.
    fn with_kind(seg: &Seg, kind: u8) -> Frame {
        let plain = seg.frame();
        let mut bytes = plain.bytes.to_vec();
        let found = segment(&plain, Direction::ToVm);
        bytes[found.sack.start - 2] = kind;
        bytes[found.tcp + 16..found.tcp + 18].fill(0);
        let (tcp, ip) = (&bytes[found.tcp..], if seg.v6 { 22..54 } else { 26..34 });
        let words = [&bytes[ip], &[0, 6], &(tcp.len() as u16).to_be_bytes(), tcp].concat();
        bytes[found.tcp + 16..found.tcp + 18].copy_from_slice(&(!sum_of(&words)).to_be_bytes());
        let frame = Frame {
            nic: 0,
            bytes: bytes.into(),
        };
        assert!(checksum_is_right(&frame, Direction::ToVm));
        frame
    }

    fn opening(v6: bool, odd: bool, flags: u8) -> Seg {
        Seg {
            v6,
            odd,
            sack: vec![(0x8100_0102, 0x0304_0506)],
            ..Seg::to_vm(flags, 7, 0).ticks(1, 2)
        }
    }

    #[test]
    fn an_offer_becomes_nothing_and_the_rest_stays() {
        for (v6, odd) in [(false, false), (true, false), (false, true), (true, true)] {
            for flags in [SYN, SYN | ACK] {
                let seg = opening(v6, odd, flags);
                let heard = without(&with_kind(&seg, MPTCP)).expect("it makes the offer");
                assert!(checksum_is_right(&heard, Direction::ToVm));
                let wanted = Seg { sack: vec![], ..seg };
                let found = segment(&heard, Direction::ToVm);
                assert!(!heard.bytes[found.options.clone()].contains(&MPTCP));
                assert_eq!(
                    found.timestamps.map(|found| (found.value, found.echo)),
                    wanted.ticks
                );
                assert_eq!((found.seq, found.flags), (wanted.seq, flags));
            }
        }
    }

    #[test]
    fn all_else_is_as_it_came() {
        assert_eq!(without(&opening(false, false, SYN).frame()), None);
        assert_eq!(without(&with_kind(&opening(false, false, SYN), 34)), None);
        // No end offers it later.
        assert_eq!(without(&with_kind(&opening(false, false, ACK), MPTCP)), None);
    }

    proptest! {
        #[test]
        fn any_options_end(options in prop::collection::vec(any::<u8>(), 40)) {
            let seg = Seg { sack: vec![(0, 0); 3], ..Seg::to_vm(SYN, 7, 0).ticks(1, 2) };
            let frame = seg.frame();
            let mut bytes = frame.bytes.to_vec();
            let place = segment(&frame, Direction::ToVm).options;
            let length = place.len();
            bytes[place].copy_from_slice(&options[..length]);
            let frame = Frame { nic: 0, bytes: bytes.into() };
            let heard = without(&frame).unwrap_or_else(|| frame.clone());
            prop_assert_eq!(without(&heard), None);
            prop_assert_eq!(heard.bytes.len(), frame.bytes.len());
        }
    }
}
