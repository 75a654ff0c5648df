//! Shared logs: programs use Dunlin's agreement by itself (docs/log-service.md).
//!
//! A log is a group of `fabric` and `core::consensus` on some hosts of the cluster, always on disk. `run` is its loop, `retained` what
//! can be read of it, `session` the conversations with programs, `store` what is kept of it over restarts. Who makes and removes logs
//! is in `daemon::logs`.

pub mod retained;
mod run;
pub mod session;
pub mod store;

use crate::vm::Host;
use crossbeam_channel::{Sender, bounded, unbounded};
use dunlin_api::log::{LogRecord, LogStatus};
use dunlin_core::wire::WireError;
use dunlin_fabric::group::GroupError;
use dunlin_fabric::link::{Hello, Stream};
use parking_lot::{Condvar, Mutex};
use retained::Retained;
pub use run::hello_name;
use run::{Asked, LogLoop, Order};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Logs on one host.
pub const MOST_LOGS: usize = 16;
/// Conversations about one log on one host.
pub const MOST_SESSIONS: usize = 128;
/// Proposals that wait for the loop; whoever has another one waits.
const MOST_WAITING: usize = 64;

/// Wakes a loop that sleeps in `poll`.
pub(crate) struct Waker {
    fd: OwnedFd,
    rung: AtomicBool,
}

impl Waker {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            rung: AtomicBool::new(false),
        })
    }

    fn wake(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // A full counter means that it rings.
            let _ = write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Before the loop looks at what it was rung for.
    pub(crate) fn clear(&self) {
        if self.rung.load(Ordering::Acquire) {
            // In this order: who rings between the two has said what it rang for, and is looked at next.
            let _ = read(&self.fd, &mut [0; 8]);
            self.rung.store(false, Ordering::Release);
        }
    }
}

/// What the loop, its readers and its writers share.
pub(crate) struct Shared {
    pub(crate) retained: Retained,
    pub(crate) waker: Waker,
    orders: Sender<Order>,
    proposals: Sender<Asked>,
    sessions: AtomicUsize,
    status: Mutex<LogStatus>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn order(&self, order: Order) {
        // The loop may have ended.
        let _ = self.orders.send(order);
        self.waker.wake();
    }

    pub(crate) fn show(&self, status: LogStatus) {
        *self.status.lock() = status;
        self.changed.notify_all();
    }
}

/// What the daemon holds of a log.
pub struct LogHandle {
    record: LogRecord,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Why this host has no part in a log.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its loop would be woken by it.
    #[error("an eventfd: {0}")]
    Eventfd(#[source] io::Error),
    /// It is other hosts'.
    #[error("this host has no part in the log")]
    NoPart,
    /// What is kept of it, or its links.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// What others have said in it.
    #[error("the log's snapshot cannot be understood: {0}")]
    Snapshot(#[from] WireError),
    /// Its loop would run there.
    #[error("a thread for the log: {0}")]
    Thread(#[source] io::Error),
}

/// Nobody leads a log: how it is, in words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.state_in_words())]
pub struct Leaderless(Box<LogStatus>);

impl LogHandle {
    /// Has a part in the log from now on.
    pub fn start(host: &Arc<Host>, record: LogRecord) -> Result<Self, StartError> {
        let (proposals, asked) = bounded(MOST_WAITING);
        // One for each link that stands, and the end.
        let (orders, ordered) = unbounded();
        let shared = Arc::new(Shared {
            retained: Retained::default(),
            waker: Waker::new().map_err(StartError::Eventfd)?,
            orders,
            proposals,
            sessions: AtomicUsize::new(0),
            status: Mutex::default(),
            changed: Condvar::new(),
        });
        let log_loop = LogLoop::new(host, record.clone(), &shared, asked, ordered)?;
        let thread = std::thread::Builder::new()
            .name(format!("log-{}", record.name))
            .spawn(move || log_loop.run())
            .map_err(StartError::Thread)?;
        Ok(Self {
            record,
            shared,
            thread: Some(thread),
        })
    }

    /// What is kept of it.
    #[must_use]
    pub fn record(&self) -> &LogRecord {
        &self.record
    }

    /// Another host of the log connected.
    pub fn accepted(&self, hello: Hello, stream: Stream) {
        self.shared.order(Order::Accepted(hello, stream));
    }

    /// How it is.
    #[must_use]
    pub fn status(&self) -> LogStatus {
        self.shared.status.lock().clone()
    }

    /// A conversation's end of it, if there may be another one.
    #[must_use]
    pub fn port(&self) -> Option<LogPort> {
        let before = self.shared.sessions.fetch_add(1, Ordering::AcqRel);
        let port = LogPort {
            shared: self.shared.clone(),
        };
        (before < MOST_SESSIONS).then_some(port)
    }

    /// Ends its loop; what is kept of it stays.
    pub fn end(mut self) {
        self.shared.order(Order::End);
        crate::vm::join(self.thread.take());
    }
}

/// What a conversation about a log needs of it.
pub struct LogPort {
    shared: Arc<Shared>,
}

impl LogPort {
    /// What can be read.
    #[must_use]
    pub fn retained(&self) -> &Retained {
        &self.shared.retained
    }

    /// Gives a proposal to the loop, waiting for room. False: the loop has ended.
    pub(crate) fn propose(&self, asked: Asked) -> bool {
        let taken = self.shared.proposals.send(asked).is_ok();
        self.shared.waker.wake();
        taken
    }

    /// The host that leads, waiting for one at most so long; else how the log is.
    pub fn leader(&self, wait: Duration) -> Result<String, Leaderless> {
        let mut status = self.shared.status.lock();
        let none = |status: &mut LogStatus| status.leader.is_none();
        self.shared.changed.wait_while_for(&mut status, none, wait);
        let leader = status.leader.clone();
        leader.ok_or_else(|| Leaderless(Box::new(status.clone())))
    }
}

impl Drop for LogPort {
    fn drop(&mut self) {
        self.shared.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crossbeam_channel::Receiver;
    use dunlin_api::log::LogAnswer;
    use dunlin_core::logged::Proposal;

    /// A conversation's end of a log whose loop is the test.
    pub(crate) fn port() -> (LogPort, Receiver<Asked>) {
        let (proposals, asked) = bounded(MOST_WAITING);
        let shared = Shared {
            retained: Retained::default(),
            waker: Waker::new().expect("an eventfd"),
            orders: unbounded().0,
            proposals,
            sessions: AtomicUsize::new(1),
            status: Mutex::default(),
            changed: Condvar::new(),
        };
        let port = LogPort {
            shared: Arc::new(shared),
        };
        (port, asked)
    }

    #[test]
    fn a_loop_that_takes_nothing_makes_writers_wait() {
        let (port, asked) = port();
        let (reply, answers) = bounded::<LogAnswer>(1);
        let writer = std::thread::spawn(move || {
            for number in 1..=1000 {
                let proposal = Proposal {
                    by: None,
                    data: bytes::Bytes::new(),
                };
                let reply = reply.clone();
                if !port.propose(Asked {
                    proposal,
                    number,
                    reply,
                }) {
                    return number;
                }
            }
            0
        });
        while asked.len() < MOST_WAITING {
            std::thread::yield_now();
        }
        assert_eq!(asked.iter().take(3).count(), 3);
        assert!(asked.len() <= MOST_WAITING);
        drop((asked, answers));
        let waited = writer.join().expect("the writer");
        assert!(
            (1..=MOST_WAITING as u64 + 4).contains(&waited),
            "it gave {waited} to nobody"
        );
    }
}
