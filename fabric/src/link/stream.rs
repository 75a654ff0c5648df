//! What it decides: how one authenticated connection is read and written, plain or TLS, blocking or not.
//!
//! **Flow**: made by `handshake`; bulk users (sync, mirror) [`Stream::split`] it over two threads, the log's transport
//! keeps it whole and non-blocking in the VM loop's epoll.
//! **Invariants**: 1. non-blocking: `WouldBlock` from `write` means that nothing was taken; what was taken leaves with
//! later calls of `write` or `flush` ([`Stream::wants_write`] says that some is left). 2. readable means read until
//! `WouldBlock`: with TLS, plaintext may be left though the socket is empty. 3. an end that this host makes is known here
//! ([`Stream::was_ended_here`]) before it can be seen: whoever finds it does not take it for the peer's. Of a non-blocking stream the peer sees it
//! only when its owner has let go of it: what a leader counts must be forgotten first (X2 in core's `lease`).
//! **Not here**: framing, retries.

use super::tls::{Raw, Session};
use super::version::Spoken;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The socket below.
pub(crate) enum Sock {
    Tcp(TcpStream),
    Unix(UnixStream),
}

macro_rules! on_sock {
    ($self:expr, $s:ident => $body:expr) => {
        match $self {
            Sock::Tcp($s) => $body,
            Sock::Unix($s) => $body,
        }
    };
}

#[derive(Clone, Copy)]
struct SockRef<'a>(&'a Sock);

impl Read for SockRef<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        on_sock!(self.0, s => (&mut &*s).read(buf))
    }
}

impl Write for SockRef<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        on_sock!(self.0, s => (&mut &*s).write(buf))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads without waiting, whatever was set for the socket.
struct AtOnce<'a>(&'a Sock);

impl Read for AtOnce<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let fd = on_sock!(self.0, s => s.as_raw_fd());
        // SAFETY: the buffer lives across the call, and no more is written than it holds.
        let n = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), libc::MSG_DONTWAIT) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

struct Shared {
    sock: Sock,
    tls: Option<Session>,
    peer: String,
    spoken: Spoken,
    /// Invariant 3.
    ended_here: AtomicBool,
    nonblocking: AtomicBool,
}

impl Shared {
    fn new(sock: Sock, tls: Option<Session>, peer: String, spoken: Spoken) -> Self {
        Self {
            sock,
            tls,
            peer,
            spoken,
            ended_here: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
        }
    }

    fn write(&self, buf: &[u8]) -> io::Result<usize> {
        match &self.tls {
            None => SockRef(&self.sock).write(buf),
            Some(tls) => tls.write(SockRef(&self.sock), buf),
        }
    }
    fn flush(&self) -> io::Result<()> {
        self.tls
            .as_ref()
            .map_or(Ok(()), |tls| tls.flush(SockRef(&self.sock)))
    }
    fn read(&self, raw: &mut Option<Raw>, mut sock: impl Read, buf: &mut [u8]) -> io::Result<usize> {
        match (&self.tls, raw) {
            (Some(tls), Some(raw)) => tls.read(raw, sock, buf),
            _ => sock.read(buf),
        }
    }
    fn shutdown(&self) {
        self.end(Shutdown::Both);
    }
    /// By somebody else than its owner. Nobody is blocked in a non-blocking one: its owner is woken, and lets go of it.
    fn shutdown_from_outside(&self) {
        self.end(match self.nonblocking.load(Ordering::Acquire) {
            true => Shutdown::Read,
            false => Shutdown::Both,
        });
    }
    fn end(&self, how: Shutdown) {
        self.ended_here.store(true, Ordering::Release);
        let _ = on_sock!(&self.sock, s => s.shutdown(how)); // an already dead connection is as good
    }
}

/// An authenticated byte stream to another host.
pub struct Stream {
    shared: Arc<Shared>,
    raw: Option<Raw>,
}

/// A stream's reader; `Send`, independent of the writer.
pub struct ReadHalf {
    shared: Arc<Shared>,
    raw: Option<Raw>,
}

/// A stream's writer; `Send`, independent of the reader.
pub struct WriteHalf {
    shared: Arc<Shared>,
}

/// Ends a stream that somebody else has.
pub(super) struct Ender(Weak<Shared>);

impl Ender {
    /// Whether there was a stream to end.
    pub(super) fn end(&self) -> bool {
        let shared = self.0.upgrade();
        shared.inspect(|shared| shared.shutdown_from_outside()).is_some()
    }

    pub(super) fn stands(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl Stream {
    pub(super) fn ender(&self) -> Ender {
        Ender(Arc::downgrade(&self.shared))
    }

    pub(super) fn new(tcp: TcpStream, tls: Option<rustls::Connection>, peer: String, spoken: Spoken) -> Self {
        let raw = tls.is_some().then(Raw::new);
        let shared = Shared::new(Sock::Tcp(tcp), tls.map(Session::new), peer, spoken);
        Self {
            shared: Arc::new(shared),
            raw,
        }
    }

    /// A stream over a Unix socket of this machine: for the `shm` fabric (it carries descriptors), tests and benches.
    /// There is no authentication: whoever holds the other end is trusted.
    #[must_use]
    pub fn local(unix: UnixStream, peer: &str) -> Self {
        let spoken = Spoken::within_this_build();
        Self {
            shared: Arc::new(Shared::new(Sock::Unix(unix), None, peer.to_owned(), spoken)),
            raw: None,
        }
    }

    /// A plain TCP stream without any handshake, for tests and benches.
    #[must_use]
    pub fn unprotected(tcp: TcpStream, peer: &str) -> Self {
        Self::new(tcp, None, peer.to_owned(), Spoken::within_this_build())
    }

    /// As a handshake would have made it with a peer of that version.
    #[cfg(test)]
    pub(crate) fn speaking(mut self, version: u16) -> Self {
        let shared = Arc::get_mut(&mut self.shared).expect("nobody else has it yet");
        shared.spoken.version = version;
        self
    }

    /// Two connected ends within this process.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        Ok((Self::local(a, "pair"), Self::local(b, "pair")))
    }

    /// The host at the other end.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.shared.peer
    }

    /// In which version both speak, and which build the peer is.
    #[must_use]
    pub fn spoken(&self) -> &Spoken {
        &self.shared.spoken
    }

    /// Whether what is sent is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.shared.tls.is_some()
    }

    /// Whether the other end is on a Unix socket (so descriptors can be passed).
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self.shared.sock, Sock::Unix(_))
    }

    /// After a read that did not fill its buffer: whether the socket was empty then, so that another read would only say so.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.raw.as_ref().is_none_or(Raw::is_drained)
    }

    /// Blocking or not, for both directions.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        on_sock!(&self.shared.sock, s => s.set_nonblocking(on))?;
        self.shared.nonblocking.store(on, Ordering::Release);
        Ok(())
    }

    /// Whether this host has ended it: its end says nothing about the peer then.
    #[must_use]
    pub fn was_ended_here(&self) -> bool {
        self.shared.ended_here.load(Ordering::Acquire)
    }

    /// A blocked read gives up with `WouldBlock` after this long.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        on_sock!(&self.shared.sock, s => s.set_read_timeout(timeout))
    }

    /// A blocked write gives up with `WouldBlock` after this long.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        on_sock!(&self.shared.sock, s => s.set_write_timeout(timeout))
    }

    /// Taken but not sent yet: wait for writability and call `flush`.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        self.shared.tls.as_ref().is_some_and(Session::wants_write)
    }

    /// Ends both directions; blocked readers and writers of either half return.
    pub fn shutdown(&self) {
        self.shared.shutdown();
    }

    /// Two halves for two threads.
    #[must_use]
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        (
            ReadHalf {
                shared: self.shared.clone(),
                raw: self.raw,
            },
            WriteHalf { shared: self.shared },
        )
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.shared.read(&mut self.raw, SockRef(&self.shared.sock), buf)
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.shared.write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.shared.flush()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on_sock!(&self.shared.sock, s => s.as_fd())
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl ReadHalf {
    /// As `read`, and never waits, though the stream is one that blocks: `WouldBlock` says that nothing is there.
    pub fn read_now(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.shared.read(&mut self.raw, AtOnce(&self.shared.sock), buf)
    }

    /// After a read that did not fill its buffer: whether the socket was empty then, so that another read would only say so.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.raw.as_ref().is_none_or(Raw::is_drained)
    }

    /// Ends both directions of the stream.
    pub fn shutdown(&self) {
        self.shared.shutdown();
    }
}

impl Read for ReadHalf {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.shared.read(&mut self.raw, SockRef(&self.shared.sock), buf)
    }
}

impl AsFd for ReadHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on_sock!(&self.shared.sock, s => s.as_fd())
    }
}

impl WriteHalf {
    /// Bytes that the other end has not got yet, as far as the system knows (SIOCOUTQ).
    pub fn in_flight(&self) -> io::Result<usize> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: this ioctl writes one int.
        let result = unsafe { libc::ioctl(self.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        match result {
            0 => Ok(usize::try_from(bytes).unwrap_or(0)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ends both directions of the stream.
    pub fn shutdown(&self) {
        self.shared.shutdown();
    }
}

impl Write for WriteHalf {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.shared.write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.shared.flush()
    }
}

impl AsFd for WriteHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on_sock!(&self.shared.sock, s => s.as_fd())
    }
}
