//! What it decides: how a one-sided write looks on a byte stream, and which of them land.
//!
//! **Flow**: `write` appends a frame to `out`, `flush` sends; the peer's `progress` reads frames and lands them in its
//! own memory, on its own CPU.
//! **Invariants**: 1. a write of an epoch that is not the open one is read and discarded. 2. a frame out of bounds
//! ends the link. 3. `out` is bounded: beyond it `write` says `Full`. 4. a word waits behind little: what is handed to the system and
//! not sent, and what the peer takes without having read it, are bounded too. Heartbeats share the stream with bulk, and a leader
//! whose beats come late is deposed.
//! **Source**: docs/fabric.md. **Not here**: TLS (`link`), checksums of entries (`ring`).
//!
//! A frame: `length:u32 kind:u8 region:u8 0:u16 epoch:u64 offset:u64` and `length` bytes, all little-endian.
//! Kinds: 1 write; 2 grant (offset = size, 8 bytes key); 3 revoke.

use super::word::SLOT_BYTES;
use super::{
    Grant, Memory, Progress, REGION_MAX_BYTES, REGIONS, RegionId, Transport, TransportError, check_region,
    check_write, end_of, ended, io,
};
use crate::keys;
use crate::link::{Stream, set_option};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};

const HEAD: usize = 24;
const WRITE: u8 = 1;
const GRANT: u8 = 2;
const REVOKE: u8 = 3;
/// With so much waiting for the socket, the next write is `Full`.
const OUT_MAX_BYTES: usize = 256 << 10;
/// Words (`word`) have so much room beyond it: a few thousand, and the newest says it all.
const WORDS_MAX_BYTES: usize = 64 << 10;
/// The system takes no more while it holds so much that is not sent.
const UNSENT_MAX_BYTES: libc::c_int = 128 << 10;
/// So much may be under way or wait unread at the receiver: at 5 ms there and back it is still 200 MB/s.
const WINDOW_MAX_BYTES: libc::c_int = 1 << 20;
const IN_BYTES: usize = 256 << 10;

struct Local {
    memory: Memory,
    grant: Grant,
}

/// A frame whose payload is still arriving.
#[derive(Clone, Copy)]
struct Arriving {
    /// Where the next bytes land; `None`: nowhere, they are stale.
    to: Option<(usize, usize)>,
    left: usize,
}

/// One-sided writes over a [`Stream`] (plain or TLS), which it makes non-blocking.
pub struct Tcp {
    stream: Stream,
    local: [Option<Local>; REGIONS],
    granted: [Option<Grant>; REGIONS],
    out: Vec<u8>,
    sent: usize,
    inbox: Box<[u8]>,
    from: usize,
    to: usize,
    arriving: Option<Arriving>,
    discarded: u64,
}

impl Tcp {
    /// Over a connected stream, whose other end does the same.
    pub fn new(stream: Stream) -> Result<Self, TransportError> {
        stream
            .set_nonblocking(true)
            .map_err(io("making the stream non-blocking"))?;
        for (what, bytes) in [
            (libc::TCP_NOTSENT_LOWAT, UNSENT_MAX_BYTES),
            (libc::TCP_WINDOW_CLAMP, WINDOW_MAX_BYTES),
        ] {
            match set_option(stream.as_raw_fd(), libc::IPPROTO_TCP, what, bytes) {
                // A stream within this host is no TCP, and holds little.
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                set => set.map_err(io("bounding what a word waits behind"))?,
            }
        }
        Ok(Self {
            stream,
            local: [const { None }; REGIONS],
            granted: [None; REGIONS],
            out: Vec::with_capacity(64 << 10),
            sent: 0,
            inbox: vec![0; IN_BYTES].into(),
            from: 0,
            to: 0,
            arriving: None,
            discarded: 0,
        })
    }

    /// How many stale writes were discarded.
    #[must_use]
    pub fn discarded(&self) -> u64 {
        self.discarded
    }

    fn frame(&mut self, kind: u8, region: RegionId, epoch: u64, offset: usize, bytes: &[u8]) {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        head[4] = kind;
        head[5] = region.0;
        head[8..16].copy_from_slice(&epoch.to_le_bytes());
        head[16..].copy_from_slice(&(offset as u64).to_le_bytes());
        self.out.extend_from_slice(&head);
        self.out.extend_from_slice(bytes);
    }

    fn push_out(&mut self) -> Result<(), TransportError> {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(0) => return Err(TransportError::GivenUp("nothing more can be written".into())),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if self.sent > 1 << 20 {
                        self.out.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(ended(&self.stream, &e)),
            }
        }
        self.out.clear();
        self.sent = 0;
        if self.stream.wants_write() {
            match self.stream.flush() {
                Err(e) if e.kind() != ErrorKind::WouldBlock => {
                    return Err(ended(&self.stream, &e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes what is in the inbox apart.
    fn take_in(&mut self, progress: &mut Progress) -> Result<(), TransportError> {
        loop {
            let have = self.to - self.from;
            if let Some(mut a) = self.arriving {
                // Words only: what is left of a frame is a multiple of 8, except a torn last word that is still coming.
                let now = a.left.min(have) & !7;
                if now == 0 {
                    return Ok(());
                }
                if let Some((region, offset)) = &mut a.to {
                    if let Some(local) = &self.local[*region] {
                        local
                            .memory
                            .copy_in(*offset, &self.inbox[self.from..self.from + now]);
                        progress.landed = true;
                    }
                    *offset += now;
                }
                self.from += now;
                a.left -= now;
                self.arriving = (a.left > 0).then_some(a);
                continue;
            }
            if have < HEAD {
                return Ok(());
            }
            let head: [u8; HEAD] = self.inbox[self.from..self.from + HEAD]
                .try_into()
                .expect("HEAD bytes");
            let long = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
            let length = u32::from_le_bytes(head[..4].try_into().expect("4 bytes")) as usize;
            let (kind, region, epoch, offset) = (head[4], usize::from(head[5]), long(8), long(16) as usize);
            if region >= REGIONS || length > REGION_MAX_BYTES {
                return Err(TransportError::ProtocolViolation(
                    "a frame with an impossible region or length",
                ));
            }
            match kind {
                WRITE => {
                    self.from += HEAD;
                    self.arrive(region, epoch, offset, length)?;
                }
                GRANT | REVOKE => {
                    if length != 8 {
                        return Err(TransportError::ProtocolViolation("a grant of impossible length"));
                    }
                    if have < HEAD + 8 {
                        return Ok(());
                    }
                    let key = &self.inbox[self.from + HEAD..self.from + HEAD + 8];
                    let key = u64::from_le_bytes(key.try_into().expect("8 bytes"));
                    self.from += HEAD + 8;
                    if kind == GRANT && (offset == 0 || offset > REGION_MAX_BYTES || offset % 64 != 0) {
                        return Err(TransportError::ProtocolViolation("a grant of impossible size"));
                    }
                    self.granted[region] = (kind == GRANT).then_some(Grant {
                        epoch,
                        bytes: offset,
                        key,
                    });
                    progress.grants = true;
                }
                _ => return Err(TransportError::ProtocolViolation("a frame of unknown kind")),
            }
        }
    }

    /// The head of a write was read: where does it go?
    fn arrive(
        &mut self,
        region: usize,
        epoch: u64,
        offset: usize,
        length: usize,
    ) -> Result<(), TransportError> {
        if offset % 8 != 0 || length % 8 != 0 {
            return Err(TransportError::ProtocolViolation("a write that is not in words"));
        }
        let to = match &self.local[region] {
            Some(local) if local.grant.epoch == epoch => {
                if offset > local.grant.bytes || length > local.grant.bytes - offset {
                    return Err(TransportError::ProtocolViolation("a write out of bounds"));
                }
                Some((region, offset))
            }
            _ => {
                self.discarded += 1;
                None
            }
        };
        self.arriving = (length > 0).then_some(Arriving { to, left: length });
        Ok(())
    }
}

impl Transport for Tcp {
    fn fabric(&self) -> &'static str {
        if self.stream.is_encrypted() {
            "tcp+tls"
        } else {
            "tcp"
        }
    }

    fn register(&mut self, region: RegionId, epoch: u64, bytes: usize) -> Result<(), TransportError> {
        check_region(region, bytes);
        let key = u64::from_le_bytes(keys::random().map_err(|e| TransportError::Unavailable(e.to_string()))?);
        self.revoke(region);
        let grant = Grant { epoch, bytes, key };
        let memory = Memory::anonymous(bytes).map_err(io("memory for a region"))?;
        self.local[usize::from(region.0)] = Some(Local { memory, grant });
        self.frame(GRANT, region, epoch, bytes, &key.to_le_bytes());
        self.push_out()
    }

    fn region(&self, region: RegionId) -> Option<&Memory> {
        self.local[usize::from(region.0)].as_ref().map(|l| &l.memory)
    }

    fn opened(&self, region: RegionId) -> Option<Grant> {
        self.local[usize::from(region.0)].as_ref().map(|l| l.grant)
    }

    fn granted(&self, region: RegionId) -> Option<Grant> {
        self.granted[usize::from(region.0)]
    }

    fn write(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError> {
        check_write(self.granted(region), region, epoch, offset, bytes.len())?;
        let words = if bytes.len() <= SLOT_BYTES {
            WORDS_MAX_BYTES
        } else {
            0
        };
        if self.out.len() - self.sent >= OUT_MAX_BYTES + words {
            return Err(TransportError::Full);
        }
        self.frame(WRITE, region, epoch, offset, bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.push_out()
    }

    fn progress(&mut self, budget: usize) -> Result<Progress, TransportError> {
        let mut progress = Progress::default();
        if self.stream.was_ended_here() {
            return Err(end_of(&self.stream)); // whatever is still to be read
        }
        if self.wants_write() {
            self.push_out()?;
        }
        let mut taken = 0;
        progress.more = true;
        while taken < budget {
            if self.from > 0 {
                self.inbox.copy_within(self.from..self.to, 0);
                self.to -= self.from;
                self.from = 0;
            }
            let room = self.inbox.len() - self.to;
            match self.stream.read(&mut self.inbox[self.to..]) {
                Ok(0) => return Err(end_of(&self.stream)),
                Ok(n) => {
                    taken += n;
                    self.to += n;
                    self.take_in(&mut progress)?;
                    if n < room && self.stream.is_drained() {
                        progress.more = false; // the socket is empty: the next read would only say so
                        break;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    progress.more = false;
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(ended(&self.stream, &e)),
            }
        }
        Ok(progress)
    }

    fn lands_by_itself(&self) -> bool {
        false
    }

    fn arm(&mut self) -> Result<(), TransportError> {
        self.push_out() // the socket itself is the bell
    }

    fn disarm(&mut self) {}

    fn revoke(&mut self, region: RegionId) {
        if let Some(local) = self.local[usize::from(region.0)].take() {
            // A frame that is half-way in loses its target with the memory: `take_in` finds it closed. A new
            // registration must not receive its rest, so forget where it went.
            if let Some(a) = &mut self.arriving
                && a.to.is_some_and(|(r, _)| r == usize::from(region.0))
            {
                a.to = None;
            }
            self.frame(REVOKE, region, local.grant.epoch, 0, &[0; 8]);
        }
    }

    fn reconnect(&mut self, stream: Stream) -> Result<(), TransportError> {
        let discarded = self.discarded;
        *self = Self::new(stream)?;
        self.discarded = discarded;
        Ok(())
    }

    fn fds(&self) -> [Option<RawFd>; 2] {
        [Some(self.stream.as_raw_fd()), None]
    }

    fn wants_write(&self) -> bool {
        self.sent < self.out.len() || self.stream.wants_write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const R: RegionId = RegionId(0);

    /// Two ends of a connection, the second of which has opened a region of a MiB to the first.
    fn linked() -> (Tcp, Tcp) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        let mut ours = Tcp::new(Stream::unprotected(ours, "peer")).unwrap();
        let mut theirs = Tcp::new(Stream::unprotected(theirs, "peer")).unwrap();
        theirs.register(R, 1, 1 << 20).unwrap();
        let begun = std::time::Instant::now();
        while ours.granted(R).is_none() {
            ours.progress(1 << 20).unwrap();
            assert!(begun.elapsed().as_secs() < 60, "no grant came");
        }
        (ours, theirs)
    }

    /// Writes until the link is full; how many bytes.
    fn fill(ours: &mut Tcp) -> usize {
        let bytes = vec![7; 64 << 10];
        let mut written = 0;
        loop {
            match ours.write(R, 1, SLOT_BYTES, &bytes) {
                Ok(()) => written += bytes.len(),
                Err(TransportError::Full) => return written,
                Err(error) => panic!("{error}"),
            }
            ours.flush().unwrap();
            assert!(ours.out.len() - ours.sent <= OUT_MAX_BYTES + bytes.len() + HEAD);
            assert!(written < 1 << 30, "it takes whatever it is given");
        }
    }

    #[test]
    fn a_peer_that_does_not_read_costs_a_bounded_buffer() {
        let (mut ours, _theirs) = linked();
        fill(&mut ours);
        assert!(ours.wants_write(), "the peer has not read");
        let word = [1; 40];
        let words = (0..).take_while(|_| ours.write(R, 1, 0, &word).is_ok()).count();
        let most = WORDS_MAX_BYTES / (HEAD + word.len()) + 1;
        assert!(words <= most, "{words} words wait, and {most} may");
    }

    #[test]
    fn a_heartbeat_waits_behind_little() {
        let (mut ours, mut theirs) = linked();
        let before = fill(&mut ours);
        ours.write(R, 1, 0, &[9; 40])
            .expect("words have room of their own");
        // What the system counts of its own for each packet comes on top.
        let most = OUT_MAX_BYTES + (UNSENT_MAX_BYTES + 2 * WINDOW_MAX_BYTES) as usize;
        assert!(before <= most, "{before} bytes go first");
        let begun = std::time::Instant::now();
        while theirs.region(R).unwrap().load(0) != u64::from_le_bytes([9; 8]) {
            ours.flush().unwrap();
            theirs.progress(1 << 20).unwrap();
            assert!(begun.elapsed().as_secs() < 60, "the word does not arrive");
        }
    }
}
