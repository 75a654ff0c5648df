use super::*;
use crate::output::packet::testing::Seg;
use crate::output::packet::{ACK, FIN, RST, SYN};
use proptest::prelude::*;

fn said(buffer: &mut RetransmitBuffer, segs: &[Seg]) {
    segs.iter().for_each(|seg| buffer.said(&seg.frame()));
}

fn taken(buffer: &mut RetransmitBuffer) -> Vec<Seg> {
    buffer
        .take()
        .iter()
        .map(|frame| Seg::read(frame, Direction::FromVm))
        .collect()
}

fn udp(port: u16, n: u16) -> Frame {
    let mut bytes = vec![2; 12];
    bytes.extend([
        8, 0, 0x45, 0, 0, 30, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 53,
    ]);
    bytes.extend(port.to_be_bytes());
    bytes.extend([0, 10, 0, 0]);
    bytes.extend(n.to_be_bytes());
    let bytes = bytes.into();
    Frame { nic: 0, bytes }
}

fn data(seq: u32) -> Seg {
    Seg::from_vm(ACK, seq, 1).with(&[0; 100])
}

#[test]
fn a_segment_stays_until_its_last_byte_is_acknowledged() {
    let mut buffer = RetransmitBuffer::new();
    let first = u32::MAX - 50;
    let segs = [0, 100, 200].map(|n| data(first.wrapping_add(n)));
    said(&mut buffer, &segs);
    buffer.heard(&Seg::to_vm(ACK, 1, first.wrapping_add(199)).frame());
    assert_eq!(buffer.frames(), 2);
    buffer.heard(
        &Seg {
            port: 9,
            ..Seg::to_vm(ACK, 1, first.wrapping_add(300))
        }
        .frame(),
    );
    assert_eq!(buffer.frames(), 2, "that was another client");
    buffer.heard(&Seg::to_vm(ACK, 1, first.wrapping_add(200)).frame());
    assert_eq!(taken(&mut buffer), segs[2..]);
    assert_eq!((buffer.frames(), buffer.bytes(), buffer.flows.len()), (0, 0, 0));
}

#[test]
fn syn_and_fin_are_acknowledged_like_bytes() {
    let mut buffer = RetransmitBuffer::new();
    said(
        &mut buffer,
        &[Seg::from_vm(SYN | ACK, 7, 1), Seg::from_vm(FIN | ACK, 8, 1)],
    );
    buffer.heard(&Seg::to_vm(ACK, 1, 8).frame());
    assert_eq!(buffer.frames(), 1);
    buffer.heard(&Seg::to_vm(ACK, 1, 9).frame());
    assert_eq!((buffer.frames(), buffer.flows.len()), (0, 0));
}

#[test]
fn one_acknowledgement_and_one_reset_of_a_connection_are_kept_the_newest() {
    let mut buffer = RetransmitBuffer::new();
    let (data, other) = (
        data(10),
        Seg {
            port: 9,
            ..Seg::from_vm(ACK, 10, 2)
        },
    );
    let acks = [1, 2, 3].map(|ack| Seg::from_vm(ACK, 10, ack));
    let resets = [1, 2].map(|seq| Seg::from_vm(RST, seq, 0));
    said(
        &mut buffer,
        &[
            acks[0].clone(),
            other.clone(),
            resets[0].clone(),
            acks[1].clone(),
            data.clone(),
        ],
    );
    said(&mut buffer, &[acks[2].clone(), resets[1].clone()]);
    assert_eq!(
        taken(&mut buffer),
        [other, data, acks[2].clone(), resets[1].clone()]
    );
}

#[test]
fn the_newest_datagrams_of_a_flow_are_kept() {
    let mut buffer = RetransmitBuffer::new();
    let arp = Frame {
        nic: 0,
        bytes: [&[2; 12][..], &[8, 6], &[0; 28]].concat().into(),
    };
    buffer.said(&udp(9, 1));
    for n in 0..100 {
        buffer.said(&udp(8, n));
        buffer.said(&arp);
    }
    let frames = buffer.take();
    assert_eq!(frames.len(), 1 + 2 * MOST_OF_A_FLOW);
    assert_eq!(frames[0], udp(9, 1));
    assert_eq!(frames[1], udp(8, 36));
}

#[test]
fn a_sync_covers_everything() {
    let mut buffer = RetransmitBuffer::new();
    said(&mut buffer, &[data(1), Seg::from_vm(ACK, 101, 5)]);
    buffer.applied();
    assert_eq!((buffer.frames(), buffer.bytes(), buffer.flows.len()), (0, 0, 0));
    assert_eq!(buffer.take(), []);
}

#[test]
fn when_it_is_too_much_the_oldest_goes_first() {
    let mut buffer = RetransmitBuffer::with_most(5 * cost(&data(0).frame()));
    let segs: Vec<_> = (0..9)
        .map(|n| Seg {
            port: n,
            ..data(n.into())
        })
        .collect();
    said(&mut buffer, &segs);
    assert_eq!(buffer.flows.len(), 5);
    assert_eq!(taken(&mut buffer), segs[4..]);
}

proptest! {
    /// Against a list that is searched from end to end, as long as there is room; and the bound when there is not.
    #[test]
    fn what_is_kept_is_what_the_rules_say(
        steps in prop::collection::vec((0_u8..6, 0_u16..3, 0_u32..400), 0..200),
        most in prop::sample::select(vec![2000_usize, 1 << 20]),
    ) {
        let mut buffer = RetransmitBuffer::with_most(most);
        let mut model: Vec<Seg> = Vec::new();
        // Far enough ahead that a client of random numbers acknowledges some and not others.
        let mut next = [u32::MAX - 300; 3];
        for (step, port, n) in steps {
            let at = next[usize::from(port)];
            let pure = |seg: &Seg| seg.payload.is_empty() && seg.flags == ACK;
            match step {
                0..3 => {
                    let seg = Seg { port, ..Seg::from_vm(ACK, at, 1) }.with(&vec![1; n as usize % 50 + 1]);
                    next[usize::from(port)] = seg.seq_after();
                    model.push(seg);
                }
                3 => {
                    model.retain(|seg| !(pure(seg) && seg.port == port));
                    model.push(Seg { port, ..Seg::from_vm(ACK, at, n) });
                }
                4 => {
                    let ack = at.wrapping_sub(n);
                    buffer.heard(&Seg { port, ..Seg::to_vm(ACK, 1, ack) }.frame());
                    model.retain(|seg| pure(seg) || seg.port != port || before(ack, seg.seq_after()));
                }
                _ if n < 10 => {
                    buffer.applied();
                    model.clear();
                }
                _ => {}
            }
            if step < 4 && let Some(seg) = model.last() {
                buffer.said(&seg.frame());
            }
            prop_assert!(buffer.bytes() <= most);
            prop_assert!(buffer.flows.len() <= buffer.frames());
        }
        let left = taken(&mut buffer);
        if most > 2000 {
            prop_assert_eq!(left, model);
        } else {
            prop_assert!(model.ends_with(&left), "a part is missing in the middle");
        }
        prop_assert_eq!(buffer.bytes(), 0);
    }

    #[test]
    fn any_bytes_do_no_harm(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..120), 0..50)) {
        let mut buffer = RetransmitBuffer::with_most(4000);
        for (n, bytes) in frames.into_iter().enumerate() {
            let frame = Frame { nic: (n % 2) as u8, bytes: bytes.into() };
            buffer.said(&frame);
            buffer.heard(&frame);
            prop_assert!(buffer.bytes() <= 4000);
        }
    }
}
