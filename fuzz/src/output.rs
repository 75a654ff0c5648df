//! Frames of guests and of clients, as the commit rule reads them: whole frames of any bytes, TCP and UDP that nearly fit, and
//! the table of numbers that a peer sends.

use crate::script::Script;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::compare::{Comparer, FrameId, Limits, Matched};
use dunlin_core::output::packet::{Direction, Parsed, parse};
use dunlin_core::output::rewriter::SequenceRewriter;

/// An IPv4 frame with lengths, offsets and flags of all kinds. Checksums are as they come.
pub fn frame(script: &mut Script<'_>, from_vm: bool) -> Frame {
    let how = script.byte();
    let nic = how >> 7;
    if how & 3 == 3 {
        let n = usize::from(script.byte());
        let bytes = Bytes::copy_from_slice(script.bytes(n));
        return Frame { nic, bytes };
    }
    let (vm, peer) = ([10, 0, 0, 9], [10, 0, 0, script.byte() % 4]);
    let (port, client) = (80u16, 4000 + u16::from(script.byte() % 4));
    let n = usize::from(script.byte() % 64);
    let payload = script.bytes(n);
    let mut layer4 = Vec::new();
    let (from, to) = if from_vm { (port, client) } else { (client, port) };
    layer4.extend_from_slice(&from.to_be_bytes());
    layer4.extend_from_slice(&to.to_be_bytes());
    let udp = how & 3 == 2;
    if udp {
        layer4.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
        layer4.extend_from_slice(&[0, 0]);
    } else {
        let seq = (script.number() as u32).wrapping_add(u32::MAX - 100);
        let ack = script.number() as u32;
        layer4.extend_from_slice(&seq.to_be_bytes());
        layer4.extend_from_slice(&ack.to_be_bytes());
        let options = script.byte();
        let words = if how & 4 == 0 { 5 } else { options & 15 };
        layer4.extend_from_slice(&[words << 4, script.byte(), 1, 0, 0, 0, 0, 0]);
        if words > 5 {
            let n = usize::from(words - 5) * 4;
            layer4.extend_from_slice(script.bytes(n));
        }
    }
    layer4.extend_from_slice(payload);
    let total = if how & 8 == 0 {
        20 + layer4.len() as u16
    } else {
        script.u16()
    };
    let fragment = if how & 16 == 0 { 0 } else { script.u16() };
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    bytes.extend_from_slice(&[if how & 32 == 0 { 0x45 } else { script.byte() }, 0]);
    bytes.extend_from_slice(&total.to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&fragment.to_be_bytes());
    bytes.extend_from_slice(&[64, if udp { 17 } else { 6 }, 0, 0]);
    let (source, destination) = if from_vm { (vm, peer) } else { (peer, vm) };
    bytes.extend_from_slice(&source);
    bytes.extend_from_slice(&destination);
    bytes.extend_from_slice(&layer4);
    Frame {
        nic,
        bytes: bytes.into(),
    }
}

/// Both VMs say something, clients answer, syncs come and go; nothing is matched twice or out of order.
pub fn output(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut comparer = Comparer::new(Limits {
        buffer_bytes: 4096,
        flows: 4,
        http_dates: bytes.len() % 2 == 1,
    });
    let mut rewriter = SequenceRewriter::new();
    let (mut next, mut matched) = (0u64, None);
    while !script.is_over() {
        match script.byte() % 10 {
            0 | 1 => {
                let said = frame(&mut script, true);
                let _any = parse(&said, Direction::FromVm);
                comparer.primary_said(FrameId(next), &said);
                next += 1;
            }
            2 | 3 => {
                let said = frame(&mut script, true);
                comparer.backup_said(&said);
            }
            4 => {
                let heard = frame(&mut script, false);
                let _any = parse(&heard, Direction::ToVm);
                assert_eq!(rewriter.inbound(&heard).bytes.len(), heard.bytes.len());
            }
            5 => rewriter.overheard(&frame(&mut script, true)),
            6 => {
                let said = frame(&mut script, true);
                assert_eq!(rewriter.outbound(&said).bytes.len(), said.bytes.len());
            }
            7 => {
                comparer.line_drawn();
                comparer.sync_acknowledged();
                comparer.backup_loaded();
            }
            8 => {
                rewriter.take_over();
                let table = rewriter.table();
                let mut other = SequenceRewriter::new();
                assert!(other.load(&table).is_ok(), "what one host writes the other reads");
                assert_eq!(other.table(), table);
            }
            _ => {
                let n = usize::from(script.byte());
                let _refused = rewriter.load(&Bytes::copy_from_slice(script.bytes(n)));
            }
        }
        while let Some(leaves) = comparer.next_matched() {
            let id = match leaves {
                Matched::Frame(FrameId(id)) => id,
                Matched::PartialAck { frame, .. } => {
                    let Parsed::Tcp(segment) = parse(&frame, Direction::FromVm) else {
                        panic!("no segment: {frame:?}");
                    };
                    assert!(segment.is_pure_ack(), "it says more than an acknowledgement");
                    continue;
                }
            };
            assert!(id < next, "a frame that was never said");
            matched = matched.max(Some(id));
        }
        let _any = comparer.verdict();
    }
}
