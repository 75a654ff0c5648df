//! QEMU's `-netdev stream` wire: a 4-byte big-endian length before each frame.
//!
//! Decides:    nothing.
//! Flow:       QEMU's socket -> [`StreamPort::read`] -> gate; agreed input -> [`StreamPort::queue`] -> QEMU.
//! Invariants: 1. never blocks: what the socket does not take is kept, in order; 2. a length no NIC can send is an error,
//!             not an allocation; 3. memory is in proportion to what is kept ([`StreamPort::queued_bytes`]), which the owner
//!             bounds: what was written is given back though the guest may never have read all; 4. one call gives out all that
//!             had come when it began, which is all of a VM that stands, and not much more than a socket holds of one that
//!             never stops sending.
//! Source:     QEMU net/stream.c, net_fill_rstate.
//! Not here:   whether a frame may leave; cards whose rings we serve ourselves (`vhost_user`).

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use super::FrameError;
use crate::sys::socket_queue_bytes;

/// The longest frame QEMU sends: its NET_BUFSIZE, 64 KiB and the headers.
pub const FRAME_BYTES_MAX: usize = 4096 + 65536;
const PREFIX_BYTES: usize = 4;
/// One read takes many small frames, and the longest one fits whatever lies before it.
const INBOX_BYTES: usize = 256 * 1024;
/// When so much of the outbox is written its room is used again; copying the rest costs less the less often that is.
const WRITTEN_BYTES: usize = 1 << 20;

/// Our end of one NIC's socket. Readiness comes from the node's epoll.
pub struct StreamPort {
    socket: UnixStream,
    /// Read and not yet given out: `inbox[..held]`, less than one frame between two calls.
    inbox: Box<[u8]>,
    held: usize,
    /// To be written: `outbox[written..]`, prefixes included.
    outbox: Vec<u8>,
    written: usize,
}

impl StreamPort {
    /// A port and the other end, for [`crate::Ports::frames`].
    pub fn pair() -> io::Result<(StreamPort, std::os::fd::OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // Bursts of a whole TCP window must fit, or frames wait in QEMU where nobody sees them.
        for end in [&ours, &theirs] {
            rustix::net::sockopt::set_socket_send_buffer_size(end, 1 << 20)?;
        }
        let inbox = vec![0; INBOX_BYTES].into_boxed_slice();
        let port = StreamPort {
            socket: ours,
            inbox,
            held: 0,
            outbox: vec![],
            written: 0,
        };
        Ok((port, theirs.into()))
    }

    /// Gives every frame that had come when it is called to `frame`, without waiting (invariant 4). Call when readable.
    pub fn read(&mut self, mut frame: impl FnMut(&[u8])) -> Result<usize, FrameError> {
        let mut count = 0;
        // Bytes in the socket that had come when this began, as far as is known.
        let mut had_come: Option<usize> = None;
        loop {
            let room = INBOX_BYTES - self.held;
            let read = match self.socket.read(&mut self.inbox[self.held..]) {
                Ok(0) => return Err(FrameError::Closed),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(count),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Err(FrameError::Closed),
                Err(e) => return Err(e.into()),
            };
            self.held += read;
            let mut rest = &self.inbox[..self.held];
            while let Some((prefix, after)) = rest.split_first_chunk::<PREFIX_BYTES>() {
                let length = u32::from_be_bytes(*prefix) as usize;
                if length > FRAME_BYTES_MAX {
                    return Err(FrameError::Length(length));
                }
                let Some((content, after)) = after.split_at_checked(length) else {
                    break;
                };
                frame(content);
                count += 1;
                rest = after;
            }
            let taken = self.held - rest.len();
            self.inbox.copy_within(taken..self.held, 0);
            self.held -= taken;
            // A short read emptied the socket: another would only answer WouldBlock.
            if read < room {
                return Ok(count);
            }
            let left = match had_come {
                Some(bytes) => bytes.saturating_sub(read),
                None => socket_queue_bytes(self.socket.as_fd(), libc::FIONREAD)? as usize,
            };
            if left == 0 {
                return Ok(count);
            }
            had_come = Some(left);
        }
    }

    /// Appends a frame for QEMU; it leaves with [`StreamPort::flush`]. One that is longer than any NIC takes is lost, as on any
    /// wire: another host may have put it into the log, and QEMU would lose its place in the stream.
    pub fn queue(&mut self, frame: &[u8]) {
        if frame.len() > FRAME_BYTES_MAX {
            return;
        }
        self.outbox.extend((frame.len() as u32).to_be_bytes());
        self.outbox.extend_from_slice(frame);
    }

    /// What is queued here and was not written yet.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.outbox.len() - self.written
    }

    /// Invariant 3.
    fn give_back(&mut self) {
        if self.written >= WRITTEN_BYTES.max(self.queued_bytes()) {
            self.outbox.drain(..self.written);
            self.written = 0;
            // Room for a flood is not kept for ever.
            self.outbox.shrink_to(2 * self.outbox.len().max(WRITTEN_BYTES));
        }
    }

    /// Writes what the socket takes. False: some is left, watch for writability.
    pub fn flush(&mut self) -> Result<bool, FrameError> {
        while self.written < self.outbox.len() {
            match self
                .socket
                .write_vectored(&[IoSlice::new(&self.outbox[self.written..])])
            {
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.give_back();
                    return Ok(false);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                    ) =>
                {
                    return Err(FrameError::Closed);
                }
                Err(e) => return Err(e.into()),
            }
        }
        self.outbox.clear();
        self.outbox.shrink_to(2 * WRITTEN_BYTES);
        self.written = 0;
        Ok(true)
    }

    /// Bytes on their way to the guest: queued here or not yet read by QEMU.
    pub fn inbound_in_flight(&self) -> io::Result<usize> {
        let unread = socket_queue_bytes(self.socket.as_fd(), libc::TIOCOUTQ)?;
        Ok(self.queued_bytes() + unread as usize)
    }

    /// Bytes on their way from the guest: written by QEMU and not yet given out by [`StreamPort::read`].
    pub fn outbound_in_flight(&self) -> io::Result<usize> {
        Ok(self.held + socket_queue_bytes(self.socket.as_fd(), libc::FIONREAD)? as usize)
    }
}

impl AsFd for StreamPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    fn peer(end: OwnedFd) -> UnixStream {
        UnixStream::from(end)
    }

    fn frames(port: &mut StreamPort) -> Vec<Vec<u8>> {
        let mut frames = vec![];
        port.read(|f| frames.push(f.to_vec())).unwrap();
        frames
    }

    #[test]
    fn a_frame_that_no_nic_takes_is_left_out() {
        let (mut port, end) = StreamPort::pair().unwrap();
        port.queue(&[1; FRAME_BYTES_MAX + 1]);
        port.queue(&[2; 60]);
        assert!(port.flush().unwrap());
        let mut written = [0; 128];
        let length = peer(end).read(&mut written).unwrap();
        assert_eq!(written[..length], [&[0, 0, 0, 60][..], &[2; 60]].concat());
    }

    #[test]
    fn frames_survive_any_cut_of_the_stream() {
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        let sent: Vec<Vec<u8>> = (0..20).map(|i| vec![i as u8; i * 7]).collect();
        let wire: Vec<u8> = sent
            .iter()
            .flat_map(|f| [&(f.len() as u32).to_be_bytes()[..], f].concat())
            .collect();
        let mut seen = vec![];
        for piece in wire.chunks(13) {
            qemu.write_all(piece).unwrap();
            seen.extend(frames(&mut port));
        }
        assert_eq!(seen, sent);
        assert_eq!(port.outbound_in_flight().unwrap(), 0);
    }

    #[test]
    fn all_that_a_vm_has_sent_before_it_stands_is_given_out_at_once() {
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        qemu.set_nonblocking(true).unwrap();
        let wire = [&60_000u32.to_be_bytes()[..], &[5; 60_000]].concat();
        let mut sent = 0;
        while let Ok(bytes) = qemu.write(&wire[sent % wire.len()..]) {
            sent += bytes;
        }
        assert!(sent > INBOX_BYTES, "{sent} bytes take more than one read");
        assert_eq!(frames(&mut port).len(), sent / wire.len());
        assert_eq!(port.outbound_in_flight().unwrap(), sent % wire.len());
    }

    /// The loop has a lease to keep meanwhile, and the frames a budget that is looked at between two calls.
    #[test]
    fn a_guest_that_never_stops_sending_does_not_keep_the_loop() {
        const SOCKET_BYTES: usize = 2 << 20;
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        let flood = std::thread::spawn(move || {
            let wire = [&60_000u32.to_be_bytes()[..], &[5; 60_000]].concat();
            while qemu.write_all(&wire).is_ok() {}
        });
        for _ in 0..200 {
            let mut bytes = 0;
            port.read(|frame| bytes += frame.len()).unwrap();
            assert!(bytes <= SOCKET_BYTES + 3 * INBOX_BYTES, "{bytes} in one call");
        }
        drop(port);
        flood.join().unwrap();
    }

    #[test]
    fn a_full_socket_keeps_the_rest_in_order() {
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        let frame = vec![5u8; 60_000];
        let mut queued = 0;
        while port.flush().unwrap() {
            port.queue(&frame);
            queued += 1;
        }
        let total = queued * (frame.len() + PREFIX_BYTES);
        assert!(port.inbound_in_flight().unwrap() > 0);
        let reader = std::thread::spawn(move || {
            let mut all = vec![0; total];
            qemu.read_exact(&mut all).unwrap();
            (qemu, all)
        });
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !port.flush().unwrap() {
            assert!(std::time::Instant::now() < deadline, "the reader reads");
            std::thread::yield_now();
        }
        let (_qemu, all) = reader.join().unwrap();
        assert!(
            all.chunks(frame.len() + PREFIX_BYTES)
                .all(|c| c[..4] == 60_000u32.to_be_bytes() && c[4..] == frame)
        );
        assert_eq!(port.inbound_in_flight().unwrap(), 0);
    }

    /// A guest that is always a little behind: its queue is never empty, and never long.
    #[test]
    fn a_reader_that_never_catches_up_costs_no_more_memory_than_what_waits() {
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        let frame = vec![5u8; 60_000];
        let each = frame.len() + PREFIX_BYTES;
        let mut read = vec![0; each];
        while port.flush().unwrap() {
            port.queue(&frame);
        }
        let mut most = 0;
        for _ in 0..2000 {
            port.queue(&frame);
            assert!(!port.flush().unwrap(), "it always lags");
            qemu.read_exact(&mut read).unwrap();
            assert!(read[4..] == frame);
            most = most.max(port.outbox.capacity());
        }
        // 120 MB went through, and less than 0.2 MB wait.
        assert!(port.queued_bytes() < 4 * each, "{}", port.queued_bytes());
        assert!(most < 8 << 20, "{most} bytes of memory");
    }

    #[test]
    fn a_length_that_no_nic_sends_is_refused() {
        let (mut port, end) = StreamPort::pair().unwrap();
        let mut qemu = peer(end);
        qemu.write_all(&[0xff; 8]).unwrap();
        assert!(matches!(port.read(|_| ()), Err(FrameError::Length(_))));
        let (mut port, end) = StreamPort::pair().unwrap();
        drop(end);
        assert!(matches!(port.read(|_| ()), Err(FrameError::Closed)));
    }
}
