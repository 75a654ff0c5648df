//! What it decides: when heartbeats, acknowledgements and votes do not wait for the group's owner.
//!
//! The owner of a [`Group`] does more than to drive it: a VM's loop applies what was agreed, talks to QEMU and to disks, and may
//! take milliseconds for it. Here the group has a second thread, the *keeper*, which drives it while the owner is busy.
//!
//! **Flow**: the owner calls what it calls of a [`Group`], under a lock that is held for that call alone. The keeper wakes once a
//! heartbeat. Was the owner here since, it sleeps on. If not, it lets bytes land, hears the peers, lets a *leader's* clock tick and
//! sends. What the owner must know waits for its next `poll`, and its descriptor becomes readable.
//!
//! **Invariants**
//! 1. The keeper begins no campaign: whether this replica may lead is the owner's word, and the owner is not there to give it.
//! 2. An owner that was not here for `patience` is taken for hung: the keeper falls silent, and the others go on without this
//!    replica. A lively thread must not speak for a dead one.
//! 3. Nothing is kept from the owner: events come in the same order, from the same queue.
//! 4. Whoever drives the group, it does so by the time that it is, not by what the owner's clock said when its turn began
//!    (`core::consensus::Standby`).
//! 5. The keeper does not wait for an owner that was kept from its core: who holds the lock runs as urgently as who waits for it (`lock`).
//!
//! **Source**: failure detection by a thread of its own with real-time priority, as in corosync's totem. **Not here**: what is
//! heard and said (`Group`).

mod lock;

use self::lock::{Held, InheritingLock};
use super::{Counters, Group, GroupConfig, GroupError, GroupEvent, LinkState};
use crate::clock::HostClock;
use crate::link::Stream;
use crate::transport::TransportError;
use bytes::Bytes;
use dunlin_core::consensus::{Entry, Member, Refusal, Role, Snapshot, Standby};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The lowest of the real-time priorities: above every ordinary thread, below whatever an administrator put there.
const REAL_TIME: libc::c_int = 1;
/// Where that is not allowed.
const NICE: libc::c_int = -15;

/// A group that is kept alive while its owner is busy.
pub struct KeptGroup {
    shared: Arc<Shared>,
    /// The group's own descriptor, which stays the same.
    epoll: OwnedFd,
    keeper: Option<JoinHandle<()>>,
}

struct Shared {
    kept: InheritingLock<Kept>,
    clock: HostClock,
    stop: AtomicBool,
    /// How often the keeper did the owner's work.
    stood_in: AtomicU64,
}

struct Kept {
    group: Group,
    standby: Standby,
    waker: OwnedFd,
    rung: bool,
}

impl KeptGroup {
    /// Opens the group and starts its keeper. An owner that does not `poll` for `patience` is taken for hung.
    pub fn open(cfg: GroupConfig, patience: Duration) -> Result<Self, GroupError> {
        let fail = |what| move |source| GroupError::Io { what, source };
        let period = Duration::from_micros(cfg.core.heartbeat_us.max(1000));
        let group = Group::open(cfg)?;
        let waker = eventfd().map_err(fail("eventfd"))?;
        group
            .watch(waker.as_raw_fd(), libc::EPOLLIN, super::OTHER)
            .map_err(fail("epoll"))?;
        let epoll = group.as_fd().try_clone_to_owned().map_err(fail("epoll"))?;
        let shared = Arc::new(Shared {
            kept: InheritingLock::new(Kept {
                group,
                standby: Standby::new(period.as_micros() as u64, patience.as_micros() as u64),
                waker,
                rung: false,
            })
            .map_err(fail("the group's lock"))?,
            clock: HostClock::begin(),
            stop: AtomicBool::new(false),
            stood_in: AtomicU64::new(0),
        });
        let for_keeper = Arc::clone(&shared);
        let keeper = std::thread::Builder::new()
            .name("group-keeper".to_owned())
            .spawn(move || {
                if real_time().is_err() {
                    // SAFETY: a plain call about this thread alone; without the right to it nothing changes.
                    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
                }
                for_keeper.keep(period);
            })
            .map_err(fail("starting the group's keeper"))?;
        Ok(Self {
            shared,
            epoll,
            keeper: Some(keeper),
        })
    }

    fn lock(&self) -> Held<'_, Kept> {
        self.shared.lock()
    }

    /// As [`Group::poll`]. The owner is here; its clock said `now_us` a while ago.
    pub fn poll(&mut self, now_us: u64) -> Option<GroupEvent> {
        let mut kept = self.lock();
        kept.hush();
        let time_us = kept.standby.owner_drives(self.shared.now_us(), now_us);
        kept.group.poll(time_us)
    }

    /// As [`Group::arm`].
    pub fn arm(&mut self) -> bool {
        let mut kept = self.lock();
        kept.standby.owner_is_here(self.shared.now_us());
        kept.group.arm()
    }

    /// As [`Group::woke`].
    pub fn woke(&mut self, readable: bool) {
        self.lock().group.woke(readable);
    }

    /// As [`Group::add_link`].
    pub fn add_link(&mut self, id: ReplicaId, stream: Stream) -> Result<(), TransportError> {
        self.lock().group.add_link(id, stream)
    }

    /// As [`Group::remove_link`].
    pub fn remove_link(&mut self, id: ReplicaId) {
        self.lock().group.remove_link(id);
    }

    /// As [`Group::propose`].
    pub fn propose(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        self.lock().group.propose(payload)
    }

    /// As [`Group::propose_control`].
    pub fn propose_control(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        self.lock().group.propose_control(payload)
    }

    /// As [`Group::change_members`].
    pub fn change_members(&mut self, members: Vec<Member>) -> Result<Index, Refusal> {
        self.lock().group.change_members(members)
    }

    /// As [`Group::applied`].
    pub fn applied(&mut self, through: Index) {
        self.lock().group.applied(through);
    }

    /// As [`Group::released`].
    pub fn released(&mut self, through: Index) {
        self.lock().group.released(through);
    }

    /// As [`Group::truncate`].
    pub fn truncate(&mut self, through: Index, state: Bytes) {
        self.lock().group.truncate(through, state);
    }

    /// As [`Group::may_lead`].
    pub fn may_lead(&mut self, may: bool) {
        self.lock().group.may_lead(may);
    }

    /// As [`Group::transfer_to`].
    pub fn transfer_to(&mut self, to: ReplicaId) {
        self.lock().group.transfer_to(to);
    }

    /// As [`Group::step_down`].
    pub fn step_down(&mut self) {
        self.lock().group.step_down();
    }

    /// As [`Group::stand_alone`].
    pub fn stand_alone(&mut self) {
        self.lock().group.stand_alone();
    }

    /// How often the keeper did the owner's work.
    #[must_use]
    pub fn stood_in(&self) -> u64 {
        self.shared.stood_in.load(Ordering::Relaxed)
    }
}

/// What the owner looks at. Everything is copied out: the keeper goes on meanwhile.
impl KeptGroup {
    /// As [`Group::next_deadline_us`].
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.lock().group.next_deadline_us()
    }

    /// As [`Group::entry`].
    #[must_use]
    pub fn entry(&self, index: Index) -> Option<Entry> {
        self.lock().group.entry(index).cloned()
    }

    /// The newest entry that is held, agreed or not.
    #[must_use]
    pub fn appended(&self) -> Viewstamp {
        self.lock().group.core().appended()
    }

    /// The members by the newest such entry that is held.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        self.lock().group.core().members().to_vec()
    }

    /// Whether there is no room for another entry.
    #[must_use]
    pub fn log_is_full(&self) -> bool {
        self.lock().group.core().log_is_full()
    }

    /// How many entries the log holds, and how many bytes.
    #[must_use]
    pub fn log_size(&self) -> (usize, usize) {
        let kept = self.lock();
        let core = kept.group.core();
        (core.log_entries(), core.log_bytes())
    }

    /// How many entries and bytes it may hold.
    #[must_use]
    pub fn log_limits(&self) -> (usize, usize) {
        let kept = self.lock();
        let config = kept.group.core().config();
        (config.ring_entries, config.ring_bytes)
    }

    /// As [`Group::has_input_room`].
    #[must_use]
    pub fn has_input_room(&self, bytes: usize) -> bool {
        self.lock().group.has_input_room(bytes)
    }

    /// As [`Group::disk_queue`].
    #[must_use]
    pub fn disk_queue(&self) -> (usize, usize) {
        self.lock().group.disk_queue()
    }

    /// As [`Group::link_queue`].
    #[must_use]
    pub fn link_queue(&self) -> (usize, usize, u64) {
        self.lock().group.link_queue()
    }

    /// As [`Group::committed`].
    #[must_use]
    pub fn committed(&self) -> Index {
        self.lock().group.committed()
    }

    /// As [`Group::role`].
    #[must_use]
    pub fn role(&self) -> Role {
        self.lock().group.role()
    }

    /// As [`Group::is_leader`].
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.lock().group.is_leader()
    }

    /// As [`Group::may_speak`].
    #[must_use]
    pub fn may_speak(&self, now_us: u64) -> bool {
        self.lock().group.may_speak(now_us)
    }

    /// As [`Group::term`].
    #[must_use]
    pub fn term(&self) -> Term {
        self.lock().group.term()
    }

    /// As [`Group::leader`].
    #[must_use]
    pub fn leader(&self) -> Option<ReplicaId> {
        self.lock().group.leader()
    }

    /// As [`Group::snapshot`].
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.lock().group.snapshot()
    }

    /// As [`Group::counters`].
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.lock().group.counters()
    }

    /// As [`Group::protocol`].
    #[must_use]
    pub fn protocol(&self) -> Option<u16> {
        self.lock().group.protocol()
    }

    /// As [`Group::heard_us`].
    #[must_use]
    pub fn heard_us(&self, id: ReplicaId) -> Option<u64> {
        self.lock().group.heard_us(id)
    }

    /// As [`Group::links`].
    #[must_use]
    pub fn links(&self) -> Vec<LinkState> {
        self.lock().group.links()
    }
}

impl AsFd for KeptGroup {
    /// Readable means: call `poll`. The same descriptor for the group's life.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for KeptGroup {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(keeper) = self.keeper.take() {
            keeper.thread().unpark();
            let _ = keeper.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> Held<'_, Kept> {
        self.kept.lock()
    }

    fn now_us(&self) -> u64 {
        self.clock.now_us()
    }

    fn keep(&self, period: Duration) {
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(period);
            let mut kept = self.lock();
            let Some(time_us) = kept.standby.stands_in(self.now_us()) else {
                continue;
            };
            if kept.group.keep(time_us) {
                self.stood_in.fetch_add(1, Ordering::Relaxed);
                kept.ring();
            }
        }
    }
}

impl Kept {
    fn ring(&mut self) {
        if !std::mem::replace(&mut self.rung, true) {
            let one = 1_u64.to_ne_bytes();
            // SAFETY: eight bytes that live across the call; the descriptor is open. A full counter rings already.
            unsafe { libc::write(self.waker.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    fn hush(&mut self) {
        if std::mem::take(&mut self.rung) {
            let mut count = [0_u8; 8];
            // SAFETY: eight bytes that live across the call; the descriptor is open and does not block.
            unsafe { libc::read(self.waker.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        }
    }
}

fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the result is checked and owned by nobody else.
    unsafe {
        match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
            fd if fd >= 0 => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// From now on this thread goes before all ordinary ones; whatever it starts does not.
fn real_time() -> io::Result<()> {
    let priority = libc::sched_param {
        sched_priority: REAL_TIME,
    };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the parameter lives across the call, which is about this thread alone.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether this process may give its heartbeats real-time priority.
///
/// # Errors
/// The system's answer, where it may not.
pub fn may_be_real_time() -> io::Result<()> {
    // On a thread of its own, which ends at once: the caller's priority stays what it is.
    let asked = std::thread::Builder::new().spawn(real_time)?.join();
    asked.unwrap_or_else(|_| Err(io::Error::other("the thread that asked has panicked")))
}

#[cfg(test)]
mod tests;
