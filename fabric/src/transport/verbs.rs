//! What it decides: how one-sided writes become RDMA writes of a reliable connection.
//!
//! **UNTESTED ON HARDWARE.** There was no RDMA card (nor soft-RoCE) where this was written. It compiles, it runs its set-up as
//! far as "there is no device", and that error path is tested; the conformance suite runs over it by itself as soon as a
//! device is there (`cargo test -p dunlin-fabric --features verbs`). Until somebody has done that, do not rely on it.
//!
//! **Flow**: a [`Stream`] carries what must be agreed: queue pair numbers first, then grants `{address, key, epoch}`, and the
//! doorbell of a sleeper. Payloads go by RDMA WRITE from registered staging memory; completions free it in order.
//! **Invariants**: 1. a completion frees staging memory and nothing else: it is no vote. 2. to revoke is to deregister the
//! memory, which is synchronous; a late writer's queue pair then breaks, and the owner reconnects. 3. a bell is sent only when
//! all writes before it are completed, since the stream is not ordered with them.
//! **Source**: the verbs manual pages; docs/fabric.md. **Not here**: safety (terms and checksums, above), multicast, shared
//! receive queues, write-with-immediate (it would consume posted receives).

mod device;

use super::{
    Grant, Memory, Progress, REGION_MAX_BYTES, REGIONS, RegionId, Transport, TransportError, check_region,
    check_write, end_of, ended, io,
};
use crate::keys;
use crate::link::Stream;
use device::{Address, Device, Registered};
use rdma_mummy_sys as rdma;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;

const MESSAGE: usize = 48;
const HELLO: u8 = 1;
const GRANT: u8 = 2;
const REVOKE: u8 = 3;
const SLEEPS: u8 = 4;
const BELL: u8 = 5;
/// Writes that may be under way.
const DEPTH: u32 = 512;
const STAGING_BYTES: usize = 4 << 20;
/// The port and the entry of its address table that are used.
const PORT: u8 = 1;
const GID_INDEX: u8 = 0;

#[derive(Clone, Copy)]
struct Remote {
    grant: Grant,
    address: u64,
    rkey: u32,
}

/// RDMA writes of a reliable connection. See the module's first lines: untested on hardware.
pub struct Verbs {
    // Before `device`: memory and staging must be deregistered while the domain still exists.
    local: [Option<(Registered, Grant)>; REGIONS],
    staging: Registered,
    device: Device,
    stream: Stream,
    remote: [Option<Remote>; REGIONS],
    own: Address,
    connected: bool,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// Where the next write is staged, and the ends of those under way, oldest first.
    staged: usize,
    under_way: VecDeque<usize>,
    peer_sleeps: bool,
    /// Something was written since the last bell.
    bell_due: bool,
}

impl Verbs {
    /// Over a connected stream, whose other end does the same, and this host's first RDMA device.
    pub fn new(stream: Stream) -> Result<Self, TransportError> {
        let device = Device::open()?;
        stream
            .set_nonblocking(true)
            .map_err(io("making the stream non-blocking"))?;
        let random: [u8; 4] = keys::random().map_err(|e| TransportError::Unavailable(e.to_string()))?;
        let own = device.address(u32::from_le_bytes(random) & 0xff_ffff)?;
        device.init()?;
        let staging = device.registered(
            Memory::anonymous(STAGING_BYTES).map_err(io("staging memory"))?,
            false,
        )?;
        let mut this = Self {
            local: [const { None }; REGIONS],
            staging,
            device,
            stream,
            remote: [None; REGIONS],
            own,
            connected: false,
            inbox: Vec::new(),
            outbox: Vec::new(),
            staged: 0,
            under_way: VecDeque::new(),
            peer_sleeps: false,
            bell_due: false,
        };
        let mut message = [0; MESSAGE];
        message[2..4].copy_from_slice(&own.lid.to_le_bytes());
        message[8..12].copy_from_slice(&own.pair.to_le_bytes());
        message[12..16].copy_from_slice(&own.psn.to_le_bytes());
        message[16..32].copy_from_slice(&own.gid);
        this.say(HELLO, message)?;
        Ok(this)
    }

    fn say(&mut self, kind: u8, mut message: [u8; MESSAGE]) -> Result<(), TransportError> {
        message[0] = kind;
        self.outbox.extend_from_slice(&message);
        self.push_out()
    }

    fn push_out(&mut self) -> Result<(), TransportError> {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(n) => drop(self.outbox.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(ended(&self.stream, &e)),
            }
        }
        Ok(())
    }

    fn listen(&mut self, progress: &mut Progress) -> Result<(), TransportError> {
        let mut buf = [0; MESSAGE * 16];
        loop {
            match self.stream.read(&mut buf) {
                Ok(0) => return Err(end_of(&self.stream)),
                Ok(n) => self.inbox.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(ended(&self.stream, &e)),
            }
        }
        while let Some(message) = self.inbox.first_chunk::<MESSAGE>().copied() {
            self.inbox.drain(..MESSAGE);
            self.hear(&message, progress)?;
        }
        Ok(())
    }

    fn hear(&mut self, m: &[u8; MESSAGE], progress: &mut Progress) -> Result<(), TransportError> {
        let long = |at: usize| u64::from_le_bytes(m[at..at + 8].try_into().expect("8 bytes"));
        let int = |at: usize| u32::from_le_bytes(m[at..at + 4].try_into().expect("4 bytes"));
        let region = usize::from(m[1]);
        if region >= REGIONS {
            return Err(TransportError::ProtocolViolation(
                "a message about an impossible region",
            ));
        }
        match m[0] {
            HELLO if !self.connected => {
                let gid = m[16..32].try_into().expect("16 bytes");
                let peer = Address {
                    pair: int(8),
                    psn: int(12),
                    lid: u16::from_le_bytes([m[2], m[3]]),
                    gid,
                };
                self.device.connect(&peer, self.own.psn)?;
                self.connected = true;
            }
            GRANT => {
                let grant = Grant {
                    epoch: long(8),
                    bytes: long(16) as usize,
                    key: long(24),
                };
                if grant.bytes == 0 || grant.bytes > REGION_MAX_BYTES || grant.bytes % 64 != 0 {
                    return Err(TransportError::ProtocolViolation("a grant of impossible size"));
                }
                self.remote[region] = Some(Remote {
                    grant,
                    address: long(32),
                    rkey: int(40),
                });
                progress.grants = true;
            }
            REVOKE => {
                self.remote[region] = None;
                progress.grants = true;
            }
            SLEEPS => self.peer_sleeps = true,
            BELL => progress.landed = true,
            _ => return Err(TransportError::ProtocolViolation("a message of unknown kind")),
        }
        Ok(())
    }

    /// Takes completions: their staging memory is free again.
    fn complete(&mut self) -> Result<(), TransportError> {
        // SAFETY: the queue is open; zeros are valid for the results, of which as many as stated are there.
        let done = unsafe {
            let mut done: [rdma::ibv_wc; 16] = std::mem::zeroed();
            match rdma::ibv_poll_cq(self.device.completions, 16, done.as_mut_ptr()) {
                n if n < 0 => return Err(TransportError::GivenUp("the completion queue failed".into())),
                n => done.into_iter().take(n as usize).collect::<Vec<_>>(),
            }
        };
        for wc in done {
            if wc.status != rdma::ibv_wc_status::IBV_WC_SUCCESS {
                return Err(TransportError::GivenUp(format!(
                    "a write failed with status {}",
                    wc.status
                )));
            }
            self.under_way.pop_front();
        }
        Ok(())
    }

    /// Room for `len` bytes of staging, as an offset.
    fn stage(&mut self, len: usize) -> Option<usize> {
        if self.under_way.len() >= DEPTH as usize {
            return None;
        }
        let Some(&oldest_end) = self.under_way.front() else {
            self.staged = len;
            return Some(0);
        };
        // Between the newest end and the end of the buffer, or before the oldest one under way (its start is not known here,
        // so half of the buffer is kept between).
        let start = if self.staged + len <= STAGING_BYTES {
            self.staged
        } else {
            0
        };
        let clear = if start >= oldest_end {
            true
        } else {
            start + len + STAGING_BYTES / 2 <= oldest_end
        };
        if !clear {
            return None;
        }
        self.staged = start + len;
        Some(start)
    }

    fn ring(&mut self) -> Result<(), TransportError> {
        if self.peer_sleeps && self.bell_due && self.under_way.is_empty() {
            (self.peer_sleeps, self.bell_due) = (false, false);
            self.say(BELL, [0; MESSAGE])?;
        }
        Ok(())
    }
}

impl Transport for Verbs {
    fn fabric(&self) -> &'static str {
        "verbs"
    }

    fn register(&mut self, region: RegionId, epoch: u64, bytes: usize) -> Result<(), TransportError> {
        check_region(region, bytes);
        let key = u64::from_le_bytes(keys::random().map_err(|e| TransportError::Unavailable(e.to_string()))?);
        self.revoke(region);
        let memory = Memory::anonymous(bytes).map_err(io("memory for a region"))?;
        let registered = self.device.registered(memory, true)?;
        // SAFETY: a live registration.
        let (rkey, address) = (
            unsafe { (*registered.mr).rkey },
            registered.memory.address() as u64,
        );
        let grant = Grant { epoch, bytes, key };
        self.local[usize::from(region.0)] = Some((registered, grant));
        let mut message = [0; MESSAGE];
        message[1] = region.0;
        for (at, word) in [(8, epoch), (16, bytes as u64), (24, key), (32, address)] {
            message[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        message[40..44].copy_from_slice(&rkey.to_le_bytes());
        self.say(GRANT, message)
    }

    fn region(&self, region: RegionId) -> Option<&Memory> {
        self.local[usize::from(region.0)].as_ref().map(|(r, _)| &r.memory)
    }

    fn opened(&self, region: RegionId) -> Option<Grant> {
        self.local[usize::from(region.0)]
            .as_ref()
            .map(|(_, grant)| *grant)
    }

    fn granted(&self, region: RegionId) -> Option<Grant> {
        self.remote[usize::from(region.0)]
            .as_ref()
            .filter(|_| self.connected)
            .map(|r| r.grant)
    }

    fn write(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError> {
        check_write(self.granted(region), region, epoch, offset, bytes.len())?;
        let Some(remote) = self.remote[usize::from(region.0)].filter(|_| bytes.len() <= STAGING_BYTES / 4)
        else {
            return Err(TransportError::Full);
        };
        let staged = match self.stage(bytes.len()) {
            Some(at) => at,
            None => {
                self.complete()?;
                self.stage(bytes.len()).ok_or(TransportError::Full)?
            }
        };
        self.staging.memory.copy_in(staged, bytes);
        // SAFETY: the pair is connected; list, request and staging memory live until the completion (staging) or the return.
        let rc = unsafe {
            let mut list = rdma::ibv_sge {
                addr: self.staging.memory.address() as u64 + staged as u64,
                length: bytes.len() as u32,
                lkey: (*self.staging.mr).lkey,
            };
            let mut request: rdma::ibv_send_wr = std::mem::zeroed();
            request.sg_list = &raw mut list;
            request.num_sge = 1;
            request.opcode = rdma::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            request.send_flags = rdma::ibv_send_flags::IBV_SEND_SIGNALED.0;
            request.wr.rdma = rdma::rdma_t {
                remote_addr: remote.address + offset as u64,
                rkey: remote.rkey,
            };
            let mut bad = null_mut();
            rdma::ibv_post_send(self.device.pair, &raw mut request, &raw mut bad)
        };
        if rc != 0 {
            return Err(TransportError::GivenUp(format!(
                "posting a write failed with {rc}"
            )));
        }
        self.under_way.push_back(staged + bytes.len());
        self.bell_due = true;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.push_out()?;
        self.ring()
    }

    fn progress(&mut self, _budget: usize) -> Result<Progress, TransportError> {
        let mut progress = Progress {
            landed: true,
            ..Progress::default()
        };
        self.push_out()?;
        self.listen(&mut progress)?;
        self.complete()?;
        self.ring()?;
        Ok(progress)
    }

    fn arm(&mut self) -> Result<(), TransportError> {
        self.complete()?;
        self.say(SLEEPS, [0; MESSAGE])
    }

    fn disarm(&mut self) {}

    fn revoke(&mut self, region: RegionId) {
        if self.local[usize::from(region.0)].take().is_some() {
            let mut message = [0; MESSAGE];
            message[1] = region.0;
            let _ = self.say(REVOKE, message); // a dead peer is told by `progress`
        }
    }

    fn reconnect(&mut self, stream: Stream) -> Result<(), TransportError> {
        *self = Self::new(stream)?;
        Ok(())
    }

    fn fds(&self) -> [Option<RawFd>; 2] {
        [Some(self.stream.as_raw_fd()), None]
    }

    fn wants_write(&self) -> bool {
        !self.outbox.is_empty() || self.stream.wants_write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::conformance::{self, Bed};

    struct Cards;

    impl Bed for Cards {
        fn name(&self) -> String {
            "verbs".into()
        }
        fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>) {
            let (a, b) = Stream::pair().unwrap();
            (Box::new(Verbs::new(a).unwrap()), Box::new(Verbs::new(b).unwrap()))
        }
        fn streams(&mut self) -> Option<(Stream, Stream)> {
            Some(Stream::pair().unwrap())
        }
    }

    /// With a device: the whole suite. Without: the error says what to do, and nothing breaks.
    #[test]
    fn keeps_the_invariants_or_says_what_is_missing() {
        match Verbs::new(Stream::pair().unwrap().0) {
            Ok(_) => conformance::run(&mut Cards),
            Err(e) => {
                println!("not run: {e}");
                assert!(
                    matches!(&e, TransportError::Unavailable(why) if why.contains("RDMA")),
                    "{e}"
                );
            }
        }
    }
}
