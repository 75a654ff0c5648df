//! The QMP client: commands and their answers, events beside them.
//!
//! Decides:    which line is an answer and which an event.
//! Flow:       `Qemu` and `Colo` -> [`Qmp::execute`]; the node's epoll -> [`Qmp::poll_events`].
//! Invariants: 1. one command at a time, its answer is recognised by its id; 2. an event is never lost: it is queued
//!             wherever it was read; 3. after `execute` and `poll_events` no whole line stays unread in our buffer
//!             (epoll would not report it).
//! Source:     QEMU's docs/interop/qmp-spec. The `qapi` crate was looked at: its closed enums refuse the events and
//!             capabilities of a QEMU that is newer than the crate's schema, and its reader hides lines from epoll.
//! Not here:   what the commands mean.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use dunlin_core::waits::Wait;
use serde_json::{Value, json};

use crate::sys::wait_readable;

/// The longest wait for the answer to a command. QEMU's main loop answers in well under a millisecond unless the machine is
/// starved; a VM that a sync has stopped does not stand for longer than these.
fn bound(command: &str) -> Duration {
    match command {
        "stop" => Wait::VmStops,
        "xen-save-devices-state" => Wait::DevicesSave,
        "cont" => Wait::VmResumes,
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

/// One QMP connection; its commands may be given from several threads.
pub struct Qmp(Mutex<Connection>, UnixStream);

impl Qmp {
    /// Reads the greeting, negotiates, and answers with the client and QEMU's version text (`7.2.22 (Debian ...)`).
    pub fn handshake(stream: UnixStream, timeout: Duration) -> Result<(Qmp, String), QmpError> {
        let deadline = Instant::now() + timeout;
        let for_epoll = stream.try_clone()?;
        let mut connection = Connection {
            stream,
            unread: vec![],
            events: VecDeque::new(),
            next_id: 0,
            closed: false,
        };
        let greeting = connection.wait_line(deadline, "the greeting", timeout)?;
        let version = &greeting["QMP"]["version"];
        let part = |name| version["qemu"][name].as_u64();
        let (Some(major), Some(minor), Some(micro)) = (part("major"), part("minor"), part("micro")) else {
            return Err(QmpError::NotUnderstood(greeting.to_string()));
        };
        let text = format!(
            "{major}.{minor}.{micro} {}",
            version["package"].as_str().unwrap_or("")
        );
        connection.execute("qmp_capabilities", Value::Null, timeout)?;
        Ok((Qmp(Mutex::new(connection), for_epoll), text.trim().to_owned()))
    }

    /// Gives a command and waits for its answer's `return`.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.lock().execute(command, arguments, bound(command))
    }

    /// Gives a command and waits for its answer and for the event that tells that it is done. The event is kept for
    /// [`Qmp::poll_events`].
    pub fn execute_until(&self, command: &str, event: &QemuEvent) -> Result<(), QmpError> {
        let mut connection = self.lock();
        let earlier = std::mem::take(&mut connection.events);
        let done = connection.execute_until(command, event, bound(command));
        let later = std::mem::replace(&mut connection.events, earlier);
        later.into_iter().for_each(|one| connection.keep(one));
        done
    }

    /// The events that have come, without waiting: none while another thread's command has no answer yet (a `stop` waits for every
    /// request to a slow disk); it keeps them for the next call. To be called when [`Qmp::as_fd`] is readable; `Closed` when QEMU
    /// is gone.
    pub fn poll_events(&self) -> Result<Vec<QemuEvent>, QmpError> {
        let mut connection = match self.0.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(Vec::new()),
            other => other.expect("no thread panics while it holds the QMP connection"),
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
        let mut connection = self.lock();
        while connection.fill()? {}
        while connection.line()?.is_some() {}
        connection.events.clear();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.0
            .lock()
            .expect("no thread panics while it holds the QMP connection")
    }
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }
}

impl Connection {
    fn execute(&mut self, command: &str, arguments: Value, timeout: Duration) -> Result<Value, QmpError> {
        let deadline = Instant::now() + timeout;
        self.next_id += 1;
        let id = self.next_id;
        let mut request = json!({"execute": command, "id": id});
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let mut text = request.to_string();
        text.push('\n');
        if let Err(error) = self.stream.write_all(text.as_bytes()) {
            return Err(match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed,
                _ => error.into(),
            });
        }
        let answer = loop {
            let line = self.wait_line(deadline, command, timeout)?;
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
    fn execute_until(&mut self, command: &str, event: &QemuEvent, timeout: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + timeout;
        self.execute(command, Value::Null, timeout)?;
        while !self.events.contains(event) {
            let line = self.wait_line(deadline, command, timeout)?;
            self.queue_event(&line);
        }
        while let Some(line) = self.line()? {
            self.queue_event(&line);
        }
        Ok(())
    }

    /// The next whole line, waiting for it.
    fn wait_line(&mut self, deadline: Instant, what: &str, timeout: Duration) -> Result<Value, QmpError> {
        loop {
            if let Some(line) = self.line()? {
                return Ok(line);
            }
            if self.closed {
                return Err(QmpError::Closed);
            }
            if !wait_readable(self.stream.as_fd(), deadline)? {
                return Err(QmpError::Timeout(what.to_owned(), timeout));
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
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}, \"package\": \"Debian\"}, \"capabilities\": []}}\r\n";

    /// A QEMU that answers each line it gets with the next text of the script.
    fn scripted(script: &'static [&'static str]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            (&theirs).write_all(GREETING.as_bytes()).unwrap();
            for text in script {
                lines.next();
                (&theirs).write_all(text.as_bytes()).unwrap();
            }
        });
        ours
    }

    #[test]
    fn events_beside_answers_are_kept_and_an_unknown_one_harms_nothing() {
        let ours = scripted(&[
            "{\"return\": {}, \"id\": 1}\r\n",
            "{\"event\": \"STOP\"}\r\n{\"event\": \"FROM_THE_FUTURE\", \"data\": {\"x\": 1}}\r\n{\"return\": {\"a\": 5}, \"id\": 2}\r\n{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-shutdown\"}}\r\n",
        ]);
        let (qmp, version) = Qmp::handshake(ours, Duration::from_secs(5)).unwrap();
        assert_eq!(version, "7.2.22 Debian");
        assert_eq!(qmp.execute("stop", Value::Null).unwrap()["a"], 5);
        let mut events = vec![];
        while let Ok(more) = qmp.poll_events() {
            events.extend(more);
        }
        let shutdown = QemuEvent::Shutdown {
            guest: true,
            reason: "guest-shutdown".into(),
        };
        assert_eq!(
            events,
            [
                QemuEvent::Stop,
                QemuEvent::Other("FROM_THE_FUTURE".into()),
                shutdown
            ]
        );
        assert!(matches!(qmp.poll_events(), Err(QmpError::Closed)));
        assert!(matches!(qmp.execute("cont", Value::Null), Err(QmpError::Closed)));
    }

    #[test]
    fn events_that_nobody_asks_for_are_bounded_and_a_shutdown_outlasts_the_rest() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut connection = Connection {
            stream: ours,
            unread: vec![],
            events: VecDeque::new(),
            next_id: 0,
            closed: false,
        };
        connection.queue_event(&json!({"event": "SHUTDOWN", "data": {"guest": true, "reason": "r"}}));
        for _ in 0..3 * MOST_EVENTS {
            connection.queue_event(&json!({"event": "STOP"}));
            connection.queue_event(&json!({"event": "RESUME"}));
            assert!(connection.events.len() <= MOST_EVENTS, "it grows without bound");
        }
        assert!(matches!(
            connection.events[0],
            QemuEvent::Shutdown { guest: true, .. }
        ));
        assert_eq!(
            connection.events.back(),
            Some(&QemuEvent::Resume),
            "the newest is kept"
        );
        for _ in 0..2 * MOST_EVENTS {
            connection.queue_event(&json!({"event": "GUEST_PANICKED"}));
        }
        assert_eq!(connection.events.len(), MOST_EVENTS);
    }

    #[test]
    fn a_command_that_is_only_asked_for_is_waited_for_until_its_event() {
        // An event of the same name that came before does not count, nor does another one.
        let ours = scripted(&[
            "{\"return\": {}, \"id\": 1}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": false}}\r\n",
            "{\"return\": {}, \"id\": 2}\r\n{\"event\": \"STOP\"}\r\n",
        ]);
        let (qmp, _) = Qmp::handshake(ours.try_clone().unwrap(), Duration::from_secs(5)).unwrap();
        assert!(matches!(
            qmp.execute_until("system_reset", &QemuEvent::Reset { guest: false }),
            Err(QmpError::Closed)
        ));
        let ours = scripted(&[
            "{\"return\": {}, \"id\": 1}\r\n",
            "{\"return\": {}, \"id\": 2}\r\n{\"event\": \"STOP\"}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": false}}\r\n",
        ]);
        let (qmp, _) = Qmp::handshake(ours, Duration::from_secs(5)).unwrap();
        qmp.execute_until("system_reset", &QemuEvent::Reset { guest: false })
            .unwrap();
        assert_eq!(
            qmp.poll_events().unwrap(),
            [QemuEvent::Stop, QemuEvent::Reset { guest: false }]
        );
    }

    #[test]
    fn a_refusal_carries_qemus_words() {
        let ours = scripted(&[
            "{\"return\": {}, \"id\": 1}\r\n",
            "{\"id\": 2, \"error\": {\"class\": \"GenericError\", \"desc\": \"no such thing\"}}\r\n",
        ]);
        let (qmp, _) = Qmp::handshake(ours, Duration::from_secs(5)).unwrap();
        let error = qmp.execute("x-y", Value::Null).unwrap_err().to_string();
        assert_eq!(error, "QEMU refuses x-y: no such thing");
    }
}
