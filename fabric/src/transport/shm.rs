//! What it decides: how two processes of one machine share memory, and how one wakes the other.
//!
//! **Flow**: a Unix socket carries descriptors: first each side's bell (a page with a "sleeps" word, and an eventfd),
//! then a memfd for every registration. Writes are plain stores into the peer's memfd.
//! **Invariants**: 1. one memfd per region and epoch: to revoke is to abandon it; late stores hit memory that nobody
//! reads. 2. Bell: the sleeper stores "sleeps", then looks at the memory; the writer stores, then looks at "sleeps";
//! both with a sequentially consistent fence between, so at least one sees the other. 3. the socket's end is the peer's.
//! **Source**: docs/fabric.md; Dekker's two flags. **Not here**: hosts further away.

use super::{
    Grant, Memory, Progress, REGION_MAX_BYTES, REGIONS, RegionId, Transport, TransportError, check_region,
    check_write, end_of, ended, io,
};
use crate::keys;
use crate::link::Stream;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{Ordering, fence};

const BELL: u8 = 1;
const GRANT: u8 = 2;
const REVOKE: u8 = 3;
const BELL_BYTES: usize = 4096;
const MESSAGE: usize = 32;
/// The socket is looked at once in this many calls of `progress`: a system call costs as much as a whole round trip.
const SOCKET_EVERY: u32 = 64;

struct Local {
    memory: Memory,
    grant: Grant,
}

struct Bell {
    page: Memory,
    event: OwnedFd,
}

/// Memory shared with another process of this machine.
pub struct Shm {
    stream: Stream,
    mine: Bell,
    theirs: Option<Bell>,
    local: [Option<Local>; REGIONS],
    remote: [Option<Local>; REGIONS],
    calls: u32,
    partial: Vec<u8>,
    fds: Vec<OwnedFd>,
}

fn eventfd() -> std::io::Result<OwnedFd> {
    // SAFETY: a plain call; the result is checked and owned by nobody else.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        if fd < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

impl Shm {
    /// Over a connected Unix socket ([`Stream::local`]), whose other end does the same.
    pub fn new(stream: Stream) -> Result<Self, TransportError> {
        if !stream.is_local() {
            return Err(TransportError::Unavailable(
                "shm needs a Unix socket, to pass descriptors".into(),
            ));
        }
        stream
            .set_nonblocking(true)
            .map_err(io("making the socket non-blocking"))?;
        let (page, page_fd) = Memory::shared(BELL_BYTES).map_err(io("memory for the bell"))?;
        let event = eventfd().map_err(io("eventfd"))?;
        let mine = Bell { page, event };
        let shm = Self {
            stream,
            mine,
            theirs: None,
            local: [const { None }; REGIONS],
            remote: [const { None }; REGIONS],
            calls: 0,
            partial: Vec::new(),
            fds: Vec::new(),
        };
        shm.say(
            BELL,
            0,
            0,
            0,
            0,
            &[page_fd.as_raw_fd(), shm.mine.event.as_raw_fd()],
        )?;
        Ok(shm)
    }

    fn say(
        &self,
        kind: u8,
        region: u8,
        epoch: u64,
        bytes: u64,
        key: u64,
        fds: &[RawFd],
    ) -> Result<(), TransportError> {
        let mut message = [0u8; MESSAGE];
        (message[0], message[1]) = (kind, region);
        message[8..16].copy_from_slice(&epoch.to_le_bytes());
        message[16..24].copy_from_slice(&bytes.to_le_bytes());
        message[24..].copy_from_slice(&key.to_le_bytes());
        match send_with_fds(self.stream.as_raw_fd(), &message, fds) {
            Ok(MESSAGE) => Ok(()),
            Ok(_) => Err(TransportError::GivenUp("the socket is full".into())),
            Err(e) => Err(ended(&self.stream, &e)),
        }
    }

    /// Reads what the peer said about its memory.
    fn listen(&mut self, progress: &mut Progress) -> Result<(), TransportError> {
        loop {
            let mut buf = [0u8; MESSAGE * 8];
            match receive_with_fds(self.stream.as_raw_fd(), &mut buf, &mut self.fds) {
                Ok(0) => return Err(end_of(&self.stream)),
                Ok(n) => self.partial.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(ended(&self.stream, &e)),
            }
            while let Some((message, rest)) = self.partial.split_first_chunk::<MESSAGE>() {
                let (message, rest) = (*message, rest.to_vec());
                self.partial = rest;
                self.hear(&message)?;
                progress.grants = true;
            }
        }
    }

    fn hear(&mut self, message: &[u8; MESSAGE]) -> Result<(), TransportError> {
        let long = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().expect("8 bytes"));
        let (kind, region) = (message[0], usize::from(message[1]));
        let grant = Grant {
            epoch: long(8),
            bytes: long(16) as usize,
            key: long(24),
        };
        if region >= REGIONS {
            return Err(TransportError::ProtocolViolation(
                "a message about an impossible region",
            ));
        }
        let mut fd = || {
            if self.fds.is_empty() {
                Err(TransportError::ProtocolViolation(
                    "a message without its descriptor",
                ))
            } else {
                Ok(self.fds.remove(0))
            }
        };
        match kind {
            BELL => {
                let (page, event) = (fd()?, fd()?);
                let page =
                    Memory::of_peer(page.as_fd(), BELL_BYTES).map_err(io("mapping the peer's bell"))?;
                self.theirs = Some(Bell { page, event });
                self.ring(); // what was written before we knew the bell
            }
            GRANT => {
                let fd = fd()?;
                if grant.bytes == 0 || grant.bytes > REGION_MAX_BYTES || grant.bytes % 64 != 0 {
                    return Err(TransportError::ProtocolViolation("a grant of impossible size"));
                }
                let memory =
                    Memory::of_peer(fd.as_fd(), grant.bytes).map_err(io("mapping the peer's memory"))?;
                self.remote[region] = Some(Local { memory, grant });
            }
            REVOKE => self.remote[region] = None,
            _ => return Err(TransportError::ProtocolViolation("a message of unknown kind")),
        }
        Ok(())
    }

    /// Wakes the peer if it sleeps.
    fn ring(&self) {
        let Some(bell) = &self.theirs else { return };
        fence(Ordering::SeqCst);
        if bell.page.load(0) != 0 && bell.page.swap(0, 0) != 0 {
            let one = 1u64.to_ne_bytes();
            // SAFETY: writes 8 bytes of our own to an owned descriptor. A full counter means that it is awake anyway.
            unsafe { libc::write(bell.event.as_raw_fd(), one.as_ptr().cast(), 8) };
        }
    }
}

impl Transport for Shm {
    fn fabric(&self) -> &'static str {
        "shm"
    }

    fn register(&mut self, region: RegionId, epoch: u64, bytes: usize) -> Result<(), TransportError> {
        check_region(region, bytes);
        let key = u64::from_le_bytes(keys::random().map_err(|e| TransportError::Unavailable(e.to_string()))?);
        let (memory, fd) = Memory::shared(bytes).map_err(io("memory for a region"))?;
        let grant = Grant { epoch, bytes, key };
        self.local[usize::from(region.0)] = Some(Local { memory, grant });
        self.say(GRANT, region.0, epoch, bytes as u64, key, &[fd.as_raw_fd()])
    }

    fn region(&self, region: RegionId) -> Option<&Memory> {
        self.local[usize::from(region.0)].as_ref().map(|l| &l.memory)
    }

    fn opened(&self, region: RegionId) -> Option<Grant> {
        self.local[usize::from(region.0)].as_ref().map(|l| l.grant)
    }

    fn granted(&self, region: RegionId) -> Option<Grant> {
        self.remote[usize::from(region.0)].as_ref().map(|l| l.grant)
    }

    fn write(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError> {
        check_write(self.granted(region), region, epoch, offset, bytes.len())?;
        if let Some(remote) = &self.remote[usize::from(region.0)] {
            remote.memory.copy_in(offset, bytes);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.ring();
        Ok(())
    }

    fn progress(&mut self, _budget: usize) -> Result<Progress, TransportError> {
        let mut progress = Progress {
            landed: true,
            ..Progress::default()
        };
        self.calls = self.calls.wrapping_add(1);
        if self.calls % SOCKET_EVERY == 0 || self.theirs.is_none() {
            self.listen(&mut progress)?;
        }
        Ok(progress)
    }

    fn hint(&mut self, readable: bool) {
        self.calls = if readable { SOCKET_EVERY - 1 } else { 0 };
    }

    fn arm(&mut self) -> Result<(), TransportError> {
        self.mine.page.swap(0, 1);
        fence(Ordering::SeqCst);
        self.calls = SOCKET_EVERY - 1; // the first look after waking includes the socket
        Ok(())
    }

    fn disarm(&mut self) {
        if self.mine.page.swap(0, 0) == 0 {
            let mut count = [0u8; 8];
            // SAFETY: reads 8 bytes into our own memory; an empty counter says EAGAIN.
            unsafe { libc::read(self.mine.event.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
        }
    }

    fn revoke(&mut self, region: RegionId) {
        if let Some(local) = self.local[usize::from(region.0)].take() {
            let _ = self.say(REVOKE, region.0, local.grant.epoch, 0, 0, &[]); // a dead peer is told by `progress`
        }
    }

    fn reconnect(&mut self, stream: Stream) -> Result<(), TransportError> {
        *self = Self::new(stream)?;
        Ok(())
    }

    fn fds(&self) -> [Option<RawFd>; 2] {
        [Some(self.stream.as_raw_fd()), Some(self.mine.event.as_raw_fd())]
    }

    fn wants_write(&self) -> bool {
        false
    }
}

/// Room for a control message with up to four descriptors.
#[repr(align(8))]
struct Control([u8; 64]);

fn send_with_fds(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> std::io::Result<usize> {
    let mut control = Control([0; 64]);
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let fd_bytes = size_of_val(fds) as u32;
    // SAFETY: the header points to live buffers of the stated sizes; the control message fits (at most 4 descriptors
    // need CMSG_SPACE(16) = 32 bytes) and is filled through the libc's own accessors.
    let n = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut iov;
        header.msg_iovlen = 1;
        if !fds.is_empty() {
            assert!(fds.len() <= 4);
            header.msg_control = control.0.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(fd_bytes) as usize;
            let cmsg = libc::CMSG_FIRSTHDR(&raw const header);
            (*cmsg).cmsg_level = libc::SOL_SOCKET;
            (*cmsg).cmsg_type = libc::SCM_RIGHTS;
            (*cmsg).cmsg_len = libc::CMSG_LEN(fd_bytes) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(cmsg), fd_bytes as usize);
        }
        libc::sendmsg(socket, &raw const header, libc::MSG_NOSIGNAL)
    };
    if n < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(n as usize)
    }
}

fn receive_with_fds(socket: RawFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> std::io::Result<usize> {
    let mut control = Control([0; 64]);
    let mut iov = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: the header points to live buffers of the stated sizes; the kernel fills the control buffer with well
    // formed messages, whose descriptors become ours.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len();
        let n = libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC);
        if n < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut cmsg = libc::CMSG_FIRSTHDR(&raw const header);
        while !cmsg.is_null() {
            if (*cmsg).cmsg_level == libc::SOL_SOCKET && (*cmsg).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*cmsg).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                for i in 0..count {
                    let fd = libc::CMSG_DATA(cmsg).cast::<RawFd>().add(i).read_unaligned();
                    fds.push(OwnedFd::from_raw_fd(fd));
                }
            }
            cmsg = libc::CMSG_NXTHDR(&raw const header, cmsg);
        }
        Ok(n as usize)
    }
}
