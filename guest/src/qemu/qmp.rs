//! The QMP client: commands and their answers, events beside them.
//!
//! Decides:    which line is an answer and which an event.
//! Flow:       `Qemu` and `Colo` -> [`Qmp::execute`]; the node's epoll -> [`Qmp::poll_events`].
//! Invariants: 1. one command at a time, its answer is recognised by its id; 2. an event is never lost: it is queued
//!             wherever it was read; 3. after `execute` and `poll_events` no whole line stays unread in our buffer
//!             (epoll would not report it); 4. a command has one deadline: for its turn behind other threads' commands, and for its
//!             answer; 5. nobody waits for QEMU to read.
//! Source:     QEMU's docs/interop/qmp-spec. The `qapi` crate was looked at: its closed enums refuse the events and
//!             capabilities of a QEMU that is newer than the crate's schema, and its reader hides lines from epoll.
//! Not here:   what the commands mean.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dunlin_core::waits::Wait;
use rustix::net::SendFlags;
use serde_json::{Value, json};

use crate::sys::wait_readable;

/// The longest wait for the answer to a command. QEMU's main loop answers in well under a millisecond unless the machine is
/// starved; a VM that a sync has stopped does not stand for longer than these.
fn bound(command: &str) -> Duration {
    match command {
        "stop" => Wait::VmStops,
        "xen-save-devices-state" => Wait::DevicesSave,
        "cont" => Wait::VmResumes,
        "system_powerdown" => Wait::GuestAsked,
        _ => Wait::QemuAnswers,
    }
    .bound()
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU understood and refused.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, as `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// QEMU closed the socket: it has ended or is ending.
    #[error("QEMU has closed its control socket: the process has ended")]
    Closed,
    /// No answer in time.
    #[error("QEMU did not answer {0} within {1:?}: it hangs or the host is starved")]
    Timeout(String, Duration),
    /// Another command had no answer in time, or QEMU reads nothing any more: it does not know of this one.
    #[error("QEMU could not be told {0} within {1:?}: it hangs or the host is starved")]
    NotTold(String, Duration),
    /// The answer is not QMP.
    #[error("QEMU's answer is not understood: {0}")]
    NotUnderstood(String),
    /// The socket failed.
    #[error("QEMU's control socket: {0}")]
    Io(#[from] io::Error),
}

/// What QEMU reports by itself. Unknown events are kept by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QemuEvent {
    /// The VM is stopped (by us, by COLO, or by an error).
    Stop,
    /// The VM runs again.
    Resume,
    /// The VM ends; `guest` says whether the guest asked for it.
    Shutdown {
        /// The guest switched itself off (else the host asked).
        guest: bool,
        /// QEMU's reason, as `guest-shutdown` or `host-qmp-quit`.
        reason: String,
    },
    /// The VM was reset; `guest == false` is our own `system_reset` while loading q35.
    Reset {
        /// The guest asked for it.
        guest: bool,
    },
    /// The guest's kernel reported a panic.
    GuestPanicked,
    /// A disk request failed.
    BlockIoError {
        /// QEMU's words.
        reason: String,
        /// The VM stands still until it is told to go on, and then tries again (QEMU does so where there is no room left).
        stopped: bool,
    },
    /// Anything else.
    Other(String),
}

/// Events that nobody has asked for are kept up to so many: a backup's are asked for when it is the primary, and each sync
/// stops and resumes it.
const MOST_EVENTS: usize = 1024;

impl QemuEvent {
    /// Whether it says only what has passed.
    fn is_news(&self) -> bool {
        matches!(
            self,
            Self::Stop | Self::Resume | Self::Reset { .. } | Self::Other(_)
        )
    }
}

struct Connection {
    stream: UnixStream,
    unread: Vec<u8>,
    events: VecDeque<QemuEvent>,
    next_id: u64,
    closed: bool,
}

/// By when a command is to be answered.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    bound: Duration,
}

impl Deadline {
    fn within(bound: Duration) -> Self {
        Self {
            at: Instant::now() + bound,
            bound,
        }
    }

    fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }
}

/// One QMP connection; its commands may be given from several threads.
pub struct Qmp {
    /// None while a thread has its turn. The lock itself is never held for long.
    connection: Mutex<Option<Connection>>,
    given_back: Condvar,
    stream: UnixStream,
}

/// A thread's turn.
struct Turn<'a> {
    qmp: &'a Qmp,
    connection: Option<Connection>,
}

impl Deref for Turn<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection
            .as_ref()
            .expect("it is given back at the end only")
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection
            .as_mut()
            .expect("it is given back at the end only")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.qmp.lock() = self.connection.take();
        self.qmp.given_back.notify_one();
    }
}

impl Qmp {
    /// Reads the greeting, negotiates, and answers with the client and QEMU's version text (`7.2.22 (Debian ...)`).
    pub fn handshake(stream: UnixStream, timeout: Duration) -> Result<(Qmp, String), QmpError> {
        let deadline = Deadline::within(timeout);
        let ours = stream.try_clone()?;
        let mut connection = Connection {
            stream,
            unread: vec![],
            events: VecDeque::new(),
            next_id: 0,
            closed: false,
        };
        let greeting = connection.wait_line(deadline, "the greeting")?;
        let version = &greeting["QMP"]["version"];
        let part = |name| version["qemu"][name].as_u64();
        let (Some(major), Some(minor), Some(micro)) = (part("major"), part("minor"), part("micro")) else {
            return Err(QmpError::NotUnderstood(greeting.to_string()));
        };
        let text = format!(
            "{major}.{minor}.{micro} {}",
            version["package"].as_str().unwrap_or("")
        );
        connection.execute("qmp_capabilities", Value::Null, deadline)?;
        let qmp = Qmp {
            connection: Mutex::new(Some(connection)),
            given_back: Condvar::new(),
            stream: ours,
        };
        Ok((qmp, text.trim().to_owned()))
    }

    /// Gives a command and waits for its answer's `return`.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, bound(command))
    }

    /// The same, with another bound (invariant 4).
    pub fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        bound: Duration,
    ) -> Result<Value, QmpError> {
        let deadline = Deadline::within(bound);
        self.turn(command, deadline)?
            .execute(command, arguments, deadline)
    }

    /// Gives a command and waits for its answer and for the event that tells that it is done. The event is kept for
    /// [`Qmp::poll_events`].
    pub fn execute_until(&self, command: &str, event: &QemuEvent) -> Result<(), QmpError> {
        let deadline = Deadline::within(bound(command));
        let mut connection = self.turn(command, deadline)?;
        let earlier = std::mem::take(&mut connection.events);
        let done = connection.execute_until(command, event, deadline);
        let later = std::mem::replace(&mut connection.events, earlier);
        later.into_iter().for_each(|one| connection.keep(one));
        done
    }

    /// Gives a command that QEMU must know of, whoever else waits for an answer: it is carried out behind the others. Nobody hears
    /// what became of it.
    pub(super) fn tell(&self, command: &str, bound: Duration) -> Result<(), QmpError> {
        send(&self.stream, &json!({"execute": command}), command, bound)
    }

    /// The events that have come, without waiting: none while another thread's command has no answer yet (a `stop` waits for every
    /// request to a slow disk); it keeps them for the next call. To be called when [`Qmp::as_fd`] is readable; `Closed` when QEMU
    /// is gone.
    pub fn poll_events(&self) -> Result<Vec<QemuEvent>, QmpError> {
        let Some(mut connection) = self.try_turn(&mut self.lock()) else {
            return Ok(Vec::new());
        };
        while connection.fill()? {}
        while let Some(line) = connection.line()? {
            connection.queue_event(&line);
        }
        match connection.events.is_empty() && connection.closed {
            true => Err(QmpError::Closed),
            false => Ok(connection.events.drain(..).collect()),
        }
    }

    /// Throws away the events that have come: what a backup's VM did before a load has not happened. They would also pile up,
    /// since nobody follows a backup's.
    pub(crate) fn forget_events(&self) -> Result<(), QmpError> {
        let command = "what has happened";
        let mut connection = self.turn(command, Deadline::within(bound(command)))?;
        while connection.fill()? {}
        while connection.line()?.is_some() {}
        connection.events.clear();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Connection>> {
        self.connection.lock()
    }

    fn try_turn(&self, held: &mut Option<Connection>) -> Option<Turn<'_>> {
        held.take().map(|connection| Turn {
            qmp: self,
            connection: Some(connection),
        })
    }

    /// Waits until no other thread waits for an answer (invariant 4).
    fn turn(&self, command: &str, deadline: Deadline) -> Result<Turn<'_>, QmpError> {
        let mut held = self.lock();
        self.given_back
            .wait_while_for(&mut held, |held| held.is_none(), deadline.left());
        self.try_turn(&mut held)
            .ok_or_else(|| QmpError::NotTold(command.to_owned(), deadline.bound))
    }
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// One line in one piece, so that two threads' lines do not mix (invariant 5).
fn send(stream: &UnixStream, line: &Value, command: &str, bound: Duration) -> Result<(), QmpError> {
    let line = format!("{line}\n");
    let error = match rustix::net::send(stream, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) if sent == line.len() => return Ok(()),
        Ok(_) => io::ErrorKind::WriteZero.into(),
        Err(error) => io::Error::from(error),
    };
    Err(match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed,
        io::ErrorKind::WouldBlock => QmpError::NotTold(command.to_owned(), bound),
        _ => error.into(),
    })
}

impl Connection {
    fn execute(&mut self, command: &str, arguments: Value, deadline: Deadline) -> Result<Value, QmpError> {
        self.next_id += 1;
        let id = self.next_id;
        let mut request = json!({"execute": command, "id": id});
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        send(&self.stream, &request, command, deadline.bound)?;
        let answer = loop {
            let line = self.wait_line(deadline, command)?;
            if line["id"].as_u64() == Some(id) {
                break line;
            }
            self.queue_event(&line);
        };
        while let Some(line) = self.line()? {
            self.queue_event(&line);
        }
        if let Some(value) = answer.get("return") {
            return Ok(value.clone());
        }
        let word = |key| answer["error"][key].as_str().unwrap_or("?").to_owned();
        Err(QmpError::Refused {
            command: command.to_owned(),
            class: word("class"),
            description: word("desc"),
        })
    }

    /// As [`Connection::execute`], and the event has come since.
    fn execute_until(
        &mut self,
        command: &str,
        event: &QemuEvent,
        deadline: Deadline,
    ) -> Result<(), QmpError> {
        self.execute(command, Value::Null, deadline)?;
        while !self.events.contains(event) {
            let line = self.wait_line(deadline, command)?;
            self.queue_event(&line);
        }
        while let Some(line) = self.line()? {
            self.queue_event(&line);
        }
        Ok(())
    }

    /// The next whole line, waiting for it.
    fn wait_line(&mut self, deadline: Deadline, what: &str) -> Result<Value, QmpError> {
        loop {
            if let Some(line) = self.line()? {
                return Ok(line);
            }
            if self.closed {
                return Err(QmpError::Closed);
            }
            if !wait_readable(self.stream.as_fd(), deadline.at)? {
                return Err(QmpError::Timeout(what.to_owned(), deadline.bound));
            }
            self.fill()?;
        }
    }

    /// The next whole line that has already been read.
    fn line(&mut self) -> Result<Option<Value>, QmpError> {
        let Some(end) = self.unread.iter().position(|b| *b == b'\n') else {
            return Ok(None);
        };
        let line: Vec<u8> = self.unread.drain(..=end).collect();
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|e| QmpError::NotUnderstood(format!("{e}: {}", String::from_utf8_lossy(&line))))
    }

    /// Reads what is there; false when nothing is.
    fn fill(&mut self) -> Result<bool, QmpError> {
        let mut buffer = [0u8; 8192];
        // SAFETY: the buffer is live and of the length given.
        let count = unsafe {
            libc::recv(
                self.stream.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_DONTWAIT,
            )
        };
        match count {
            0 => self.closed = true,
            n if n > 0 => self.unread.extend_from_slice(&buffer[..n as usize]),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => {}
                e if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
                e if e.kind() == io::ErrorKind::ConnectionReset => self.closed = true,
                e => return Err(e.into()),
            },
        }
        Ok(count > 0)
    }

    fn queue_event(&mut self, line: &Value) {
        let Some(name) = line["event"].as_str() else {
            return;
        };
        let data = &line["data"];
        let guest = data["guest"].as_bool().unwrap_or(false);
        let reason = || data["reason"].as_str().unwrap_or("").to_owned();
        self.keep(match name {
            "STOP" => QemuEvent::Stop,
            "RESUME" => QemuEvent::Resume,
            "SHUTDOWN" => QemuEvent::Shutdown {
                guest,
                reason: reason(),
            },
            "RESET" => QemuEvent::Reset { guest },
            "GUEST_PANICKED" => QemuEvent::GuestPanicked,
            "BLOCK_IO_ERROR" => QemuEvent::BlockIoError {
                reason: reason(),
                stopped: data["action"] == "stop",
            },
            other => QemuEvent::Other(other.to_owned()),
        });
    }

    fn keep(&mut self, event: QemuEvent) {
        self.events.push_back(event);
        if self.events.len() > MOST_EVENTS {
            // The oldest, but news before what has to be answered.
            let oldest = self.events.iter().position(QemuEvent::is_news).unwrap_or(0);
            self.events.remove(oldest);
        }
    }
}

#[cfg(test)]
mod tests;
