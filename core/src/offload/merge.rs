//! Finds frames that one large frame may stand for: what a TCP has sent in one go.
//!
//! Invariants: 1. frames keep their order, and none is left out; 2. cutting the large frame gives the same bytes again (so a run has one acknowledgement, one
//!             window, the same options, IPv4's numbers one after the other); 3. only frames whose checksums are right.

use super::{Headers, MOST_IP_BYTES, MOST_SEGMENTS, Offload, TCP_CHECKSUM, TCP_V4, TCP_V6, set};
use crate::output::packet::{ACK, PSH, u16_at, u32_at};
use crate::output::rewriter::rewrite::{fold, sum};

/// Frames at the front of a queue that leave as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// How many they are, one at least.
    pub frames: usize,
    /// What the large frame leaves to the device; a single one leaves nothing.
    pub offload: Offload,
    /// The large frame's own headers; empty for a single frame.
    pub head: Vec<u8>,
    /// Where in each of the frames begins what follows `head`.
    pub payload_at: usize,
}

impl Run {
    /// One frame as it is.
    #[must_use]
    pub fn single() -> Self {
        Self {
            frames: 1,
            offload: Offload::default(),
            head: Vec::new(),
            payload_at: 0,
        }
    }

    /// The longest one at the front of `frames`, of at most `most` frames. There is one frame at least.
    #[must_use]
    pub fn at_front<'a>(frames: impl IntoIterator<Item = &'a [u8]>, most: usize) -> Self {
        let mut frames = frames.into_iter().take(most.min(MOST_SEGMENTS));
        let Some(first) = frames.next() else {
            return Self::single();
        };
        let mut next = frames.next();
        let first = match next.is_some().then(|| First::of(first)).flatten() {
            Some(first) => first,
            None => return Self::single(),
        };
        let (mut count, mut payload_bytes) = (1, first.segment_bytes());
        let mut flags = first.frame[first.headers.tcp + 13];
        let mut is_last = flags & PSH != 0;
        while !is_last
            && let Some(frame) = next
            && let Some(more) = first.goes_on(frame, count, payload_bytes)
        {
            count += 1;
            payload_bytes += more;
            flags = frame[first.headers.tcp + 13];
            is_last = more < first.segment_bytes() || flags & PSH != 0;
            next = frames.next();
        }
        match count {
            1 => Self::single(),
            _ => first.run(count, payload_bytes, flags),
        }
    }
}

/// What frames have to go on from.
struct First<'a> {
    frame: &'a [u8],
    headers: Headers,
    seq: u32,
}

impl<'a> First<'a> {
    fn of(frame: &'a [u8]) -> Option<Self> {
        let headers = Headers::of(frame)?;
        // What else a flag would say is said of one segment alone. The four bits beside the header's length are flags of the future.
        let says_data = frame[headers.tcp + 13] & !PSH == ACK && frame[headers.tcp + 12] & 0xf == 0;
        let fits = headers.payload < frame.len() && says_data && is_right(frame, &headers);
        fits.then_some(Self {
            frame,
            seq: u32_at(frame, headers.tcp + 4)?,
            headers,
        })
    }

    fn segment_bytes(&self) -> usize {
        self.frame.len() - self.headers.payload
    }

    /// How many bytes of the stream `frame` adds, as the one with `number` after this one.
    fn goes_on(&self, frame: &[u8], number: usize, payload_bytes: usize) -> Option<usize> {
        let headers = Headers::of(frame)?;
        if headers != self.headers || frame.len() <= headers.payload {
            return None;
        }
        let more = frame.len() - headers.payload;
        let ip_bytes = headers.payload - headers.ip + payload_bytes + more;
        let is_next = u32_at(frame, headers.tcp + 4)? == self.seq.wrapping_add(payload_bytes as u32)
            && (!headers.is_v4
                || u16_at(frame, headers.ip + 4)?
                    == u16_at(self.frame, headers.ip + 4)?.wrapping_add(number as u16));
        let fits = more <= self.segment_bytes() && ip_bytes <= MOST_IP_BYTES;
        (is_next && fits && self.is_alike(frame) && is_right(frame, &headers)).then_some(more)
    }

    /// Whether the headers are the same but for what each segment has of its own.
    fn is_alike(&self, frame: &[u8]) -> bool {
        let (ip, tcp, end) = (self.headers.ip, self.headers.tcp, self.headers.payload);
        let alike = |range: std::ops::Range<usize>| frame[range.clone()] == self.frame[range];
        let ip_is_alike = match self.headers.is_v4 {
            // But for length, number and checksum.
            true => alike(0..ip + 2) && alike(ip + 6..ip + 10) && alike(ip + 12..tcp),
            // But for the length.
            false => alike(0..ip + 4) && alike(ip + 6..tcp),
        };
        // Ports; acknowledgement and header's length; window; urgent pointer and options.
        let tcp_is_alike = alike(tcp..tcp + 4)
            && alike(tcp + 8..tcp + 13)
            && alike(tcp + 14..tcp + 16)
            && alike(tcp + 18..end);
        ip_is_alike && tcp_is_alike && frame[tcp + 13] & !PSH == ACK
    }

    fn run(&self, frames: usize, payload_bytes: usize, flags: u8) -> Run {
        let headers = &self.headers;
        let mut head = self.frame[..headers.payload].to_vec();
        let segment_bytes = headers.payload - headers.tcp + payload_bytes;
        headers.set_length(&mut head, segment_bytes);
        head[headers.tcp + 13] = flags;
        // Whoever finishes the checksum counts on the sum of what precedes.
        let pseudo = fold(headers.pseudo_sum(&head, segment_bytes));
        set(&mut head, headers.tcp + TCP_CHECKSUM, pseudo);
        Run {
            frames,
            offload: Offload {
                needs_csum: true,
                gso_type: if headers.is_v4 { TCP_V4 } else { TCP_V6 },
                hdr_len: headers.payload as u16,
                gso_size: self.segment_bytes() as u16,
                csum_start: headers.tcp as u16,
                csum_offset: TCP_CHECKSUM as u16,
            },
            head,
            payload_at: headers.payload,
        }
    }
}

/// Invariant 3.
fn is_right(frame: &[u8], headers: &Headers) -> bool {
    let segment = &frame[headers.tcp..];
    let ip_is_right = !headers.is_v4 || fold(sum(&frame[headers.ip..headers.tcp])) == 0xffff;
    ip_is_right && fold(headers.pseudo_sum(frame, segment.len()) + sum(segment)) == 0xffff
}
