//! Cuts a large frame into segments, and finishes checksums.
//!
//! Invariants: 1. total: whatever a guest writes into header and frame, at most [`MOST_CUT`] frames come out, none longer than what went in, and all of
//!             them together by their headers alone ([`MOST_HEADERS_BYTES`] each); 2. a frame that contradicts its header is lost, as on any wire.

use super::{ECN, Headers, MOST_CUT, MOST_HEADERS_BYTES, Offload, TCP_CHECKSUM, TCP_V4, TCP_V6, set};
use crate::output::packet::{FIN, PSH, u16_at, u32_at};
use crate::output::rewriter::rewrite::{fold, sum};

/// TCP's flag that only the first segment has. FIN and PSH are the last one's.
const CWR: u8 = 0x80;

/// Gives the segments of a frame, in order, to `each`, each whole. What is in `scratch` does not matter. False: offload and frame contradict each other.
pub fn segments(
    offload: &Offload,
    frame: &mut [u8],
    scratch: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]),
) -> bool {
    match offload.gso_type & !ECN {
        0 if !offload.needs_csum => each(frame),
        0 => match finish_checksum(offload, frame) {
            Some(()) => each(frame),
            None => return false,
        },
        TCP_V4 | TCP_V6 => return cut(offload, frame, scratch, each).is_some(),
        _ => return false,
    }
    true
}

fn finish_checksum(offload: &Offload, frame: &mut [u8]) -> Option<()> {
    let from = usize::from(offload.csum_start);
    let at = from + usize::from(offload.csum_offset);
    // What stands there is the sum of what precedes.
    let sum = sum(frame.get(from..)?);
    frame.get(at..at + 2)?;
    // 0 would say that there is none, to UDP; for all others it is the same number.
    let finished = match !fold(sum) {
        0 => 0xffff,
        finished => finished,
    };
    set(frame, at, finished);
    Some(())
}

fn cut(offload: &Offload, frame: &[u8], scratch: &mut Vec<u8>, mut each: impl FnMut(&[u8])) -> Option<()> {
    let headers = Headers::of(frame)?;
    let most = usize::from(offload.gso_size);
    let (head, payload) = frame.split_at(headers.payload);
    // Before the first one comes out (invariants 1 and 2).
    if most == 0 || head.len() > MOST_HEADERS_BYTES || payload.len().div_ceil(most) > MOST_CUT {
        return None;
    }
    let first_id = headers.is_v4.then(|| u16_at(frame, headers.ip + 4)).flatten();
    let first_seq = u32_at(frame, headers.tcp + 4)?;
    let flags = frame[headers.tcp + 13];
    let count = payload.len().div_ceil(most).max(1);
    for number in 0..count {
        let piece = &payload[number * most..payload.len().min((number + 1) * most)];
        scratch.clear();
        scratch.extend_from_slice(head);
        scratch.extend_from_slice(piece);
        if let Some(id) = first_id {
            set(scratch, headers.ip + 4, id.wrapping_add(number as u16));
        }
        let seq = first_seq.wrapping_add((number * most) as u32);
        scratch[headers.tcp + 4..headers.tcp + 8].copy_from_slice(&seq.to_be_bytes());
        let not_first = if number > 0 { CWR } else { 0 };
        let not_last = if number + 1 < count { FIN | PSH } else { 0 };
        scratch[headers.tcp + 13] = flags & !not_first & !not_last;
        let segment_bytes = scratch.len() - headers.tcp;
        headers.set_length(scratch, segment_bytes);
        set(scratch, headers.tcp + TCP_CHECKSUM, 0);
        let sum = headers.pseudo_sum(scratch, segment_bytes) + sum(&scratch[headers.tcp..]);
        set(scratch, headers.tcp + TCP_CHECKSUM, !fold(sum));
        each(scratch);
    }
    Some(())
}
