//! What it decides: nothing; it gives every caller the same short time to say who it is.
//!
//! **Flow**: accept thread -> a place by the caller's address -> one short-lived thread per handshake -> channel ->
//! [`Listener::accept`].
//! **Invariants**: 1. each handshake ends within [`PATIENCE`], and so many run at once as there are places, of which
//! members' addresses have their own ([`Places`]): strangers can neither block members nor use up memory. 2. a failed handshake is reported once per address and minute, with the
//! number of those that were not reported.
//! **Not here**: routing of accepted streams.

use super::places::{PER_MEMBER, Places, STRANGERS};
use super::{Hello, Identity, LinkError, Stream, Welcome, handshake};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long one may take; a test's machine may stand still for longer.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 3 });
/// A refusal of the same address is reported again after this.
const QUIET: Duration = Duration::from_secs(60);
/// Addresses that are remembered for that.
const REMEMBERED: usize = 1024;

/// The owner's word on an authenticated hello.
pub type Policy = Arc<dyn Fn(&Hello) -> Result<Welcome, NotWelcome> + Send + Sync>;

/// The reason that a peer is told, in its owner's words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotWelcome(pub String);

/// A refused connection, as [`Listener::accept`] reports it.
#[derive(Debug, thiserror::Error)]
#[error("connection from {from} refused: {error}{}", if *.unreported > 0 { format!(" ({unreported} more since the last report)") } else { String::new() })]
pub struct Refusal {
    /// Where it came from.
    pub from: SocketAddr,
    /// Why.
    pub error: LinkError,
    /// How many refusals of this address were counted but not reported since the last report.
    pub unreported: u64,
}

/// How many connections a listener has refused, by [`LinkError::kind`]. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Refusals {
    /// The counts so far; kinds that never came are not there.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().clone()
    }

    fn note(&self, kind: &'static str) {
        *self.0.lock().entry(kind).or_default() += 1;
    }
}

type Accepted = Result<(Hello, Stream), Refusal>;

/// A listening socket and its threads; dropping it ends them.
pub struct Listener {
    addr: SocketAddr,
    queue: Receiver<Accepted>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    socket: TcpListener,
    identity: Identity,
    policy: Policy,
    closing: AtomicBool,
    places: Places,
    refused: Refusals,
    reports: Mutex<BTreeMap<IpAddr, (Instant, u64)>>,
}

impl Listener {
    /// Binds and begins to accept; every authenticated hello is welcome.
    pub fn bind(addr: impl std::net::ToSocketAddrs, identity: Identity) -> Result<Self, LinkError> {
        Self::bind_with(addr, identity, Arc::new(|_| Ok(Welcome::default())))
    }

    /// As [`Self::bind`], with the owner's own check (unknown VM, another QEMU version).
    pub fn bind_with(
        addr: impl std::net::ToSocketAddrs,
        identity: Identity,
        policy: Policy,
    ) -> Result<Self, LinkError> {
        let socket = TcpListener::bind(addr).map_err(LinkError::io("binding the listening address"))?;
        let addr = socket
            .local_addr()
            .map_err(LinkError::io("binding the listening address"))?;
        let shared = Arc::new(Shared {
            socket,
            identity,
            policy,
            closing: AtomicBool::new(false),
            places: Places::default(),
            refused: Refusals::default(),
            reports: Mutex::default(),
        });
        let (sender, queue) = sync_channel(STRANGERS + PER_MEMBER);
        let on_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("dunlin-accept".into())
            .spawn(move || on_thread.accept_all(&sender))
            .map_err(LinkError::io("starting the accept thread"))?;
        Ok(Self {
            addr,
            queue,
            shared,
            thread: Some(thread),
        })
    }

    /// Keeps places for these addresses: whoever else calls, and however often, a member at one of them is heard. To be called
    /// again when they change.
    pub fn keep_places_for(&self, members: impl IntoIterator<Item = IpAddr>) {
        self.shared.places.keep_for(members);
    }

    /// Where it listens (the port, if 0 was asked for).
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The next authenticated peer, or a refusal worth logging. Blocks.
    pub fn accept(&self) -> Result<(Hello, Stream), Refusal> {
        self.queue
            .recv()
            .expect("the accept thread lives as long as the listener")
    }

    /// As [`Self::accept`], for at most `timeout`.
    pub fn accept_timeout(&self, timeout: Duration) -> Option<Result<(Hello, Stream), Refusal>> {
        self.queue.recv_timeout(timeout).ok()
    }

    /// How many connections were refused so far, reported or not.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.shared.refused.counts().values().sum()
    }

    /// The same by kind, for whoever does not have the listener.
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        self.shared.refused.clone()
    }
}

impl Shared {
    fn accept_all(self: &Arc<Self>, sender: &SyncSender<Accepted>) {
        loop {
            let (tcp, from) = match self.socket.accept() {
                _ if self.closing.load(Ordering::Acquire) => return,
                Ok(accepted) => accepted,
                Err(_) => {
                    // Out of descriptors, or the peer is gone already. The former needs time to mend, and there is no
                    // event for it.
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let Some(place) = self.places.take(from.ip()) else {
                self.refused.note("too-many");
                continue; // dropped: the member tries again, the stranger may too
            };
            let (this, sender) = (self.clone(), sender.clone());
            // Without a thread the connection goes, and its place with it.
            let _ = std::thread::Builder::new()
                .name("dunlin-hello".into())
                .spawn(move || {
                    let accepted = this.handshake(tcp, from);
                    drop(place);
                    if let Some(accepted) = accepted {
                        let _ = sender.send(accepted); // the listener may be gone: so is the need
                    }
                });
        }
    }

    fn handshake(&self, tcp: TcpStream, from: SocketAddr) -> Option<Accepted> {
        match handshake::respond(tcp, &self.identity, Instant::now() + PATIENCE, &*self.policy) {
            Ok(accepted) => Some(Ok(accepted)),
            Err(error) => {
                let error = if matches!(error, LinkError::Timeout(_)) {
                    LinkError::Timeout(PATIENCE)
                } else {
                    error
                };
                self.report(from, error).map(Err)
            }
        }
    }

    fn report(&self, from: SocketAddr, error: LinkError) -> Option<Refusal> {
        self.refused.note(error.kind());
        let now = Instant::now();
        let mut reports = self.reports.lock();
        if reports.len() >= REMEMBERED {
            reports.retain(|_, (at, _)| now.duration_since(*at) < QUIET);
        }
        if let Some((at, unreported)) = reports.get_mut(&from.ip()) {
            if now.duration_since(*at) < QUIET {
                *unreported += 1;
                return None;
            }
            let unreported = std::mem::take(unreported);
            *at = now;
            return Some(Refusal {
                from,
                error,
                unreported,
            });
        }
        if reports.len() >= REMEMBERED {
            return None; // counted; a flood from many addresses does not fill the log
        }
        reports.insert(from.ip(), (now, 0));
        Some(Refusal {
            from,
            error,
            unreported: 0,
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        // SAFETY: shutdown on an open listening socket that `shared` keeps open; it wakes the blocked accept.
        unsafe { libc::shutdown(self.shared.socket.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
