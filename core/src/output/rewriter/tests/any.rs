//! Any bytes, any numbers.

use super::*;
use proptest::prelude::*;

fn any_seg() -> impl Strategy<Value = Seg> {
    let flags = prop::sample::select(vec![ACK, SYN, SYN | ACK, FIN | ACK, RST, 0]);
    let options = (
        prop::option::of((any::<u32>(), any::<u32>())),
        prop::collection::vec((any::<u32>(), any::<u32>()), 0..3),
        any::<(bool, bool)>(),
    );
    let payload = prop::collection::vec(any::<u8>(), 0..40);
    (any::<(u32, u32)>(), flags, options, payload).prop_map(
        |((seq, ack), flags, (ticks, sack, (v6, odd)), payload)| Seg {
            v6,
            odd,
            ticks,
            sack,
            payload,
            ..Seg::from_vm(flags, seq, ack)
        },
    )
}

/// A backup with one connection: the client's numbers are the VM's and `delta`, and `ticks`.
fn translating(v6: bool, delta: u32, ticks: u32) -> SequenceRewriter {
    let mut rewriter = SequenceRewriter::new();
    let side = |seg: Seg| Seg { v6, ..seg };
    rewriter.overheard(&side(Seg::from_vm(SYN | ACK, 6, C + 1)).ticks(1, 9).frame());
    let ack = Seg::to_vm(ACK, C + 1, delta.wrapping_add(7)).ticks(10, ticks.wrapping_add(1));
    into(&mut rewriter, &side(ack));
    rewriter
}

proptest! {
    /// Invariant 1: what the VM says comes back as it was said; and nothing but numbers changes on the way.
    #[test]
    fn translation_in_undoes_translation_out(
        seg in any_seg(),
        delta in any::<u32>(),
        ticks in 0..u32::MAX,
        over in any::<bool>(),
    ) {
        let mut rewriter = translating(seg.v6, delta, ticks);
        if over {
            rewriter.take_over();
        }
        let seg = Seg { flags: ACK, ..seg };
        let said = out(&mut rewriter, &seg);
        prop_assert_eq!(said.seq, seg.seq.wrapping_add(delta));
        prop_assert_eq!((said.ack, said.flags), (seg.ack, seg.flags));
        prop_assert_eq!((&said.payload, &said.sack), (&seg.payload, &seg.sack));
        let (value, echo) = said.ticks.unwrap_or((0, 0));
        prop_assert_eq!(echo, seg.ticks.map_or(0, |(_, echo)| echo));
        // The client acknowledges it, and its SACK block is all of it.
        let heard = Seg {
            from_vm: false,
            seq: C + 1,
            ack: said.seq_after(),
            ticks: Some((3, value)),
            sack: vec![(said.seq, said.seq_after())],
            ..said
        };
        let back = into(&mut rewriter, &heard);
        prop_assert_eq!(back.ack, seg.seq_after());
        prop_assert_eq!(back.sack, vec![(seg.seq, seg.seq_after())]);
        prop_assert_eq!((back.seq, back.payload), (heard.seq, heard.payload));
        if value != 0 {
            prop_assert_eq!(back.ticks, seg.ticks.map(|(value, _)| (3, value)));
        }
    }

    /// Invariant 2, whatever was learnt before: `into` and `out` look at the checksums.
    #[test]
    fn checksums_stay_right(
        segs in prop::collection::vec((any::<bool>(), any_seg()), 1..30),
        delta in any::<u32>(),
        ticks in any::<u32>(),
    ) {
        let mut rewriter = translating(false, delta, ticks);
        for (n, (inward, seg)) in segs.into_iter().enumerate() {
            if n == 10 {
                rewriter.take_over();
            }
            if inward {
                into(&mut rewriter, &Seg { from_vm: false, ..seg });
            } else if n < 10 {
                rewriter.overheard(&seg.frame());
            } else {
                out(&mut rewriter, &seg);
            }
        }
        let mut other = SequenceRewriter::new();
        prop_assert_eq!(other.load(&rewriter.table()), Ok(()));
        prop_assert_eq!(other.table(), rewriter.table());
    }

    /// Bytes behind right headers, right bytes that were damaged, and noise.
    #[test]
    fn damaged_frames_do_no_harm(
        segs in prop::collection::vec((any_seg(), any::<prop::sample::Index>(), any::<u8>(), 0_u8..5), 0..30),
    ) {
        let mut rewriter = translating(false, 5, 6);
        for (seg, at, byte, how) in segs {
            let mut bytes = Seg { from_vm: how != 0, ..seg.clone() }.frame().bytes.to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(if byte % 4 == 0 { at } else { bytes.len() });
            if how == 4 {
                bytes = seg.payload;
            }
            let frame = Frame { nic: 0, bytes: bytes.into() };
            let after = match how {
                0 | 4 => rewriter.inbound(&frame),
                1 => rewriter.outbound(&frame),
                2 => {
                    rewriter.overheard(&frame);
                    continue;
                }
                _ => {
                    rewriter.take_over();
                    continue;
                }
            };
            prop_assert_eq!(after.bytes.len(), frame.bytes.len());
        }
    }

    /// As a hostile host would write it.
    #[test]
    fn any_table_is_read_or_refused(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        count in 0_u8..4,
        shaped in any::<bool>(),
    ) {
        let head = [2, 0, 0, 0, 7, 0, 0, 0, count, 0, 0, 0, 0, 0, 4];
        let table = if shaped { [&head[..], &noise].concat() } else { noise };
        let mut rewriter = SequenceRewriter::new();
        if rewriter.load(&table.into()).is_ok() {
            let again = rewriter.table();
            let mut other = SequenceRewriter::new();
            prop_assert_eq!(other.load(&again), Ok(()));
            prop_assert_eq!(other.table(), again);
            rewriter.take_over();
            out(&mut rewriter, &Seg::from_vm(ACK, 1, 2).ticks(3, 4));
        }
    }
}
