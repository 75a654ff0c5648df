//! Decides: which thread does which request of one client.
//!
//! Flow: [`WORKERS`] threads share the socket. One at a time holds the reading end and takes one whole request; then it
//! lets the next one read and does its own request itself. So a request is done by the thread that read it (no switchover
//! in the common case of one at a time), and at most [`WORKERS`] run at once.
//! Invariants: N1 to N4 of [`super`]; replies are written whole, one at a time.
//! Not here: accepting connections of a stranger: sockets are handed in, or lie under a path with mode 0600.

use super::{
    Export,
    handshake::{self, HandshakeError, Session},
    proto::{self, Chunk, Command, NbdError, Request},
};
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use std::{
    io::{self, IoSlice, Read, Write},
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Requests that run at once, per connection. QEMU's virtio-blk sends up to 16 and more; beyond eight, nothing was gained
/// on two cores, and each holds up to 32 MiB.
pub const WORKERS: usize = 8;
/// N2: payloads in flight per connection.
const MOST_IN_FLIGHT_BYTES: u64 = 64 << 20;
/// Extents in one answer to block status.
const MOST_STATUS_EXTENTS: usize = 1024;

struct Shared {
    export: Arc<dyn Export>,
    size_bytes: u64,
    read_only: bool,
    session: Session,
    reading: Mutex<UnixStream>,
    writing: Mutex<UnixStream>,
    closed: AtomicBool,
    in_flight: Arc<AtomicU64>,
    budget: Mutex<u64>,
    returned: Condvar,
}

/// One served connection. Dropping it hangs up and waits for the requests in flight.
pub struct Connection {
    control: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Connection {
    /// Serves `export` on `stream` until the client leaves. `in_flight` counts requests taken but not answered.
    /// `on_end` is told why the connection ended (`None`: in good order).
    ///
    /// # Errors
    /// No thread or descriptor could be had.
    pub fn start(
        stream: UnixStream,
        export: Arc<dyn Export>,
        in_flight: Arc<AtomicU64>,
        on_end: impl FnOnce(Option<String>) + Send + 'static,
    ) -> io::Result<Self> {
        let control = stream.try_clone()?;
        let closer = stream.try_clone()?;
        let thread = thread::Builder::new().name("nbd".into()).spawn(move || {
            let ended = run(stream, export, in_flight);
            // Other handles keep the socket open; a client that said good-bye waits for the end of the stream.
            let _already_closed = closer.shutdown(Shutdown::Both);
            on_end(ended.err().map(|error| error.to_string()));
        })?;
        Ok(Self {
            control,
            thread: Some(thread),
        })
    }

    /// The client has sent what nobody has read yet.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        rustix::io::ioctl_fionread(&self.control).is_ok_and(|bytes| bytes > 0)
    }

    /// The client has left and every request is answered.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Hangs up, waits for the requests in flight.
    pub fn close(&mut self) {
        let _already_closed = self.control.shutdown(Shutdown::Both);
        // The trap: the connection's own thread may be the last that holds the export, and with it this value.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _panicked = thread.join();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

fn run(
    mut stream: UnixStream,
    export: Arc<dyn Export>,
    in_flight: Arc<AtomicU64>,
) -> Result<(), HandshakeError> {
    let info = export.info();
    let Some(session) = handshake::negotiate(&mut stream, &info)? else {
        return Ok(());
    };
    let shared = Shared {
        export,
        size_bytes: info.size_bytes,
        read_only: info.read_only,
        session,
        writing: Mutex::new(stream.try_clone()?),
        reading: Mutex::new(stream),
        closed: AtomicBool::new(false),
        in_flight,
        budget: Mutex::new(0),
        returned: Condvar::new(),
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(|| shared.work())).collect();
        let mut first_error = Ok(());
        for worker in workers {
            let result = worker.join().expect("a worker does not panic");
            if first_error.is_ok() {
                first_error = result;
            }
        }
        first_error
    })
}

/// Counts a request as in flight, and its payload against the budget, until it is dropped.
struct Ticket<'a> {
    shared: &'a Shared,
    bytes: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
        if self.bytes > 0 {
            *self.shared.budget.lock() -= self.bytes;
            self.shared.returned.notify_one();
        }
    }
}

impl Shared {
    fn work(&self) -> Result<(), HandshakeError> {
        loop {
            let (request, data, ticket) = {
                let mut stream = self.reading.lock();
                if self.closed.load(Ordering::Acquire) {
                    return Ok(());
                }
                match self.take(&mut stream) {
                    Ok(Some(taken)) => taken,
                    Ok(None) => {
                        self.closed.store(true, Ordering::Release);
                        return Ok(());
                    }
                    Err(error) => {
                        self.closed.store(true, Ordering::Release);
                        return Err(error);
                    }
                }
            };
            let answered = self.answer(request, data);
            drop(ticket);
            if let Err(error) = answered {
                self.closed.store(true, Ordering::Release);
                // Wakes the thread that reads.
                let writing = self.writing.lock();
                let _already_closed = writing.shutdown(Shutdown::Both);
                return Err(error.into());
            }
        }
    }

    /// Reads one request with its data. `None`: the client has left.
    fn take(&self, stream: &mut UnixStream) -> Result<Option<(Request, Bytes, Ticket<'_>)>, HandshakeError> {
        let mut head = [0; proto::REQUEST_BYTES];
        match stream.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let mut ticket = Ticket {
            shared: self,
            bytes: 0,
        };
        let request = proto::request(&head)?;
        if request.command == Command::Disconnect {
            return Ok(None);
        }
        let carries = matches!(request.command, Command::Read | Command::Write);
        if carries && request.len <= proto::MOST_REQUEST_BYTES {
            let want = u64::from(request.len);
            let mut used = self.budget.lock();
            while *used > 0 && *used + want > MOST_IN_FLIGHT_BYTES {
                self.returned.wait(&mut used);
            }
            *used += want;
            ticket.bytes = want;
        }
        let mut data = Vec::new();
        if request.command == Command::Write {
            // Reserved, not touched: a client that announces much and sends little costs address space only.
            data.reserve_exact(request.len as usize);
            let got = (&mut *stream)
                .take(u64::from(request.len))
                .read_to_end(&mut data)?;
            if got < request.len as usize {
                return Ok(None);
            }
        }
        Ok(Some((request, Bytes::from(data), ticket)))
    }

    fn answer(&self, request: Request, data: Bytes) -> io::Result<()> {
        match request.command {
            Command::Read => return self.answer_read(request),
            Command::BlockStatus => return self.answer_status(request),
            _ => {}
        }
        let done = self.check(&request).and_then(|()| self.change(&request, data));
        self.send(&[&proto::simple_reply(request.cookie, done.err())])
    }

    fn change(&self, request: &Request, data: Bytes) -> Result<(), NbdError> {
        let (offset, len) = (request.offset, u64::from(request.len));
        let done = match request.command {
            Command::Write => self.export.write(offset, data, request.fua),
            Command::WriteZeroes => self.export.zero(offset, len, !request.no_hole, request.fua),
            Command::Trim => self.export.zero(offset, len, true, request.fua),
            Command::Flush => self.export.flush(),
            Command::Cache => Ok(()),
            _ => return Err(NbdError::Invalid),
        };
        done.map_err(|error| error_number(&error))
    }

    /// N1.
    fn check(&self, request: &Request) -> Result<(), NbdError> {
        let writes = matches!(
            request.command,
            Command::Write | Command::WriteZeroes | Command::Trim
        );
        if writes && self.read_only {
            return Err(NbdError::NotPermitted);
        }
        if request.fast {
            return Err(NbdError::NotSupported);
        }
        if request.command == Command::Flush {
            return if request.offset == 0 && request.len == 0 {
                Ok(())
            } else {
                Err(NbdError::Invalid)
            };
        }
        if request.command == Command::Read && request.len > proto::MOST_REQUEST_BYTES {
            return Err(NbdError::Overflow);
        }
        let end = request.offset.checked_add(u64::from(request.len));
        match end {
            Some(end) if end <= self.size_bytes && request.len > 0 => Ok(()),
            // proto.md: a write past the end is answered with ENOSPC, anything else with EINVAL.
            Some(end) if end > self.size_bytes && request.command == Command::Write => Err(NbdError::NoSpace),
            _ => Err(NbdError::Invalid),
        }
    }

    fn answer_read(&self, request: Request) -> io::Result<()> {
        let mut out = Vec::new();
        let read = self.check(&request).and_then(|()| {
            out.resize(request.len as usize, 0);
            self.export
                .read(request.offset, &mut out)
                .map_err(|error| error_number(&error))
        });
        match (read, self.session.structured) {
            (Ok(()), true) => self.send(&[
                &proto::chunk(request.cookie, Chunk::OffsetData, 8 + out.len()),
                &request.offset.to_be_bytes(),
                &out,
            ]),
            (Ok(()), false) => self.send(&[&proto::simple_reply(request.cookie, None), &out]),
            (Err(error), structured) => self.send_error(request.cookie, error, structured),
        }
    }

    fn answer_status(&self, request: Request) -> io::Result<()> {
        let status = if self.session.allocation {
            self.check(&request).and_then(|()| {
                self.export
                    .status(request.offset, u64::from(request.len))
                    .map_err(|error| error_number(&error))
            })
        } else {
            Err(NbdError::Invalid)
        };
        let status = match status {
            Ok(status) => status,
            Err(error) => return self.send_error(request.cookie, error, self.session.structured),
        };
        let most = if request.one { 1 } else { MOST_STATUS_EXTENTS };
        let mut body = proto::ALLOCATION_ID.to_be_bytes().to_vec();
        for (len, holds_data) in status.into_iter().take(most) {
            body.extend(u32::try_from(len).unwrap_or(1 << 31).to_be_bytes());
            // NBD_STATE_HOLE | NBD_STATE_ZERO
            body.extend((if holds_data { 0u32 } else { 3 }).to_be_bytes());
        }
        self.send(&[
            &proto::chunk(request.cookie, Chunk::BlockStatus, body.len()),
            &body,
        ])
    }

    fn send_error(&self, cookie: u64, error: NbdError, structured: bool) -> io::Result<()> {
        if !structured {
            return self.send(&[&proto::simple_reply(cookie, Some(error))]);
        }
        let mut body = (error as u32).to_be_bytes().to_vec();
        body.extend(0u16.to_be_bytes());
        self.send(&[&proto::chunk(cookie, Chunk::Error, body.len()), &body])
    }

    fn send(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut stream = self.writing.lock();
        let mut slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut left = &mut slices[..];
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            match stream.write_vectored(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => IoSlice::advance_slices(&mut left, sent),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn error_number(error: &io::Error) -> NbdError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => NbdError::NoSpace,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => NbdError::NotPermitted,
        io::ErrorKind::OutOfMemory => NbdError::NoMemory,
        io::ErrorKind::Unsupported => NbdError::NotSupported,
        io::ErrorKind::InvalidInput => NbdError::Invalid,
        io::ErrorKind::NotConnected => NbdError::Shutdown,
        _ => NbdError::Io,
    }
}

/// Listens on a path (mode 0600) and serves every client with `start`: for tools such as `nbdinfo`, `nbdcopy`, `qemu-io`
/// and `fio`. Returns once the listener is up; ends with the process or when the path's socket is shut down.
///
/// # Errors
/// The path is taken or cannot be made.
pub fn serve_path(
    path: &Path,
    mut start: impl FnMut(UnixStream) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    thread::Builder::new().name("nbd-listen".into()).spawn(move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => start(stream),
                Err(_) => return,
            }
        }
    })
}
