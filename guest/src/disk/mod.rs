//! The disk port. Decides: which role a VM's disk has on this host, and what each NBD request means in it.
//!
//! Flow: QEMU -> NBD on a socketpair ([`nbd`]) -> [`Disk`] -> by role: [`primary`] (write through, mirror) or [`backup`]
//! (I/O switch) -> [`image`].
//!
//! ```text
//!            start_alone            attach_backup             peer lost
//!   Idle ----------------> Alone ----------------> Primary ----------------> Alone
//!   Idle --start_backup--> Backup --take_over--> Alone
//! ```
//!
//! Invariants: **G1** (the gate) a role changes, a sync commits and a take-over happens only while no NBD request of the VM
//! is being done; **G2** events are told without a lock held. The order in which the node must call is in `docs/disk.md`.
//! Longer than 400 lines: one state machine, whose edges are to be read together.
//! Source: GANNET III, IV. Not here: when to sync, who leads, where the stream comes from (`node`).

#[cfg(test)]
mod alike_tests;
mod backup;
mod dirty_map;
#[cfg(test)]
mod fault_tests;
mod faults;
#[cfg(test)]
mod flush_tests;
mod group;
#[cfg(test)]
mod hang_tests;
mod image;
#[cfg(test)]
mod image_tests;
mod journal;
mod link;
pub mod nbd;
#[cfg(test)]
mod persist_tests;
mod power;
#[cfg(test)]
mod power_tests;
mod primary;
mod qcow2;
mod ranges;
mod requests;
mod shared;
mod size;
#[cfg(test)]
mod storm_tests;
mod superblock;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tools_tests;
#[cfg(test)]
mod trim_tests;
mod types;
#[cfg(test)]
mod unreadable_tests;
mod verify;
mod words;

pub use backup::BackupFigures;
pub use dunlin_core::disk::{Generation, Storage, io_switch::Limits};
pub use faults::{Fault, Faults, UnknownFault};
pub use group::{DiskGroup, Member};
pub use image::{Image, ImageError, check};
pub use link::{MirrorStream, Tuning};
pub use primary::AttachOptions;
pub use size::size_bytes;
pub use types::{DiskConfig, DiskError, DiskEvent, DiskStatus, EventSink, TakeOver};
pub use verify::{CHUNK_BYTES as COMPARED_AT_ONCE, VerifyOptions, VerifyReport};

pub use crate::spec::DiskFormat;

use backup::Backup;
use dunlin_core::units::{Epoch, Term};
use parking_lot::{Mutex, RwLock};
use primary::Primary;
use requests::{Held, Served};
use shared::Shared;
use std::{
    ops::ControlFlow,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

enum Role {
    Idle,
    Primary(Arc<Primary>),
    Backup(Arc<Backup>),
}

/// One VM disk on one host: see [the module](self).
pub struct Disk {
    shared: Arc<Shared>,
    state_dir: PathBuf,
    faults: Arc<Faults>,
    /// G1. A request holds it shared for as long as it runs.
    gate: RwLock<Role>,
    in_flight: Arc<AtomicU64>,
    served: Served,
    held: Held,
    connections: Mutex<Vec<nbd::Connection>>,
}

impl Disk {
    /// Opens and locks the image. The disk is idle at first: reads work, writes are refused.
    ///
    /// # Errors
    /// The image is missing, empty or in use.
    pub fn open(
        config: DiskConfig,
        events: impl Fn(DiskEvent) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, DiskError> {
        let faults = Arc::new(Faults::default());
        let state_dir = config.state_dir.clone();
        let shared = Shared::open(config, faults.clone(), Arc::new(events))?;
        Ok(Arc::new(Self {
            shared,
            state_dir,
            faults,
            gate: RwLock::new(Role::Idle),
            in_flight: Arc::new(AtomicU64::new(0)),
            served: Served::default(),
            held: Held::default(),
            connections: Mutex::new(Vec::new()),
        }))
    }

    /// Faults to inject below this disk.
    #[must_use]
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// Serves the VM: one end of a socketpair, whose other end QEMU inherits.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn serve(self: &Arc<Self>, stream: UnixStream) -> Result<(), DiskError> {
        let shared = self.shared.clone();
        let connection =
            nbd::Connection::start(stream, self.clone(), self.in_flight.clone(), move |reason| {
                shared.event(DiskEvent::Disconnected { reason });
            })
            .map_err(DiskError::Thread)?;
        let mut connections = self.connections.lock();
        connections.retain(|connection| !connection.is_finished());
        connections.push(connection);
        Ok(())
    }

    /// Hangs up on every NBD client and waits for requests in flight. The role stays.
    pub fn hang_up(&self) {
        self.hold_errors(false);
        self.expedite(true);
        let connections = std::mem::take(&mut *self.connections.lock());
        drop(connections);
        self.expedite(false);
    }

    /// Requests of the VM that are not answered; bytes that still wait in a socket count as one.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let connections = self.connections.lock();
        let waiting = connections
            .iter()
            .filter(|connection| connection.has_unread())
            .count() as u64;
        waiting + self.in_flight.load(Ordering::Acquire)
    }

    /// The export's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The size found at opening.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.shared.image.size_bytes()
    }

    fn role(&self) -> parking_lot::RwLockReadGuard<'_, Role> {
        self.gate.read()
    }

    fn gate(&self) -> parking_lot::RwLockWriteGuard<'_, Role> {
        self.gate.write()
    }

    fn wrong_role(&self, role: &Role, what: &'static str) -> DiskError {
        DiskError::Role {
            disk: self.shared.name.clone(),
            role: role.name(),
            what,
        }
    }

    fn primary(&self, what: &'static str) -> Result<Arc<Primary>, DiskError> {
        match &*self.role() {
            Role::Primary(primary) => Ok(primary.clone()),
            other => Err(self.wrong_role(other, what)),
        }
    }

    fn backup(&self, what: &'static str) -> Result<Arc<Backup>, DiskError> {
        match &*self.role() {
            Role::Backup(backup) => Ok(backup.clone()),
            other => Err(self.wrong_role(other, what)),
        }
    }

    /// Idle -> Alone: this host's VM is the one that speaks, in `term`, from the image as it is.
    ///
    /// # Errors
    /// The disk is not idle, or the superblock cannot be written.
    pub fn start_alone(&self, term: Term) -> Result<(), DiskError> {
        let mut role = self.gate();
        if !matches!(*role, Role::Idle) {
            return Err(self.wrong_role(&role, "start alone"));
        }
        self.shared.become_primary(term)?;
        *role = Role::Primary(Primary::new(self.shared.clone(), self.shared.dirty.all()));
        Ok(())
    }

    /// A primary that was elected again, in `term`: its image is newer than that of a host which was elected in between and whose
    /// take-over came to nothing. To be called before a backup is attached; waits for the image's flush if the term is a later one.
    ///
    /// # Errors
    /// Not a primary, or the superblock cannot be written.
    pub fn lead(&self, term: Term) -> Result<(), DiskError> {
        self.primary("lead in a new term")?;
        if self.shared.identity().generation.term < term {
            self.shared.become_primary(term)?;
        }
        Ok(())
    }

    /// Idle -> Backup: mirrored writes come on `stream`; a VM that runs here has its writes in the SVM buffer. A passive
    /// backup is the same without a VM. A new primary after a broken one: [`Disk::reset`] first.
    ///
    /// # Errors
    /// The disk is not idle.
    pub fn start_backup(&self, stream: MirrorStream) -> Result<(), DiskError> {
        let mut role = self.gate();
        if !matches!(*role, Role::Idle) {
            return Err(self.wrong_role(&role, "start as a backup"));
        }
        *role = Role::Backup(Backup::start(&self.shared, stream)?);
        Ok(())
    }

    /// Any role -> Idle. A backup's buffers are dropped; its image then is the last committed sync.
    pub fn reset(&self) {
        self.hold_errors(false);
        self.expedite(true);
        let mut role = self.gate();
        match std::mem::replace(&mut *role, Role::Idle) {
            Role::Idle => {}
            Role::Primary(primary) => primary.detach("this host stopped"),
            Role::Backup(backup) => {
                backup.stop("this host stopped");
                if let Err(error) = self.shared.roll_back(&self.state_dir) {
                    self.shared.event(DiskEvent::ImageFailed {
                        reason: error.to_string(),
                        full: false,
                    });
                }
            }
        }
    }

    /// Alone -> Primary: greets the backup on `stream` and copies what it lacks while the VM runs. Returns at once;
    /// [`DiskEvent::Copied`] or [`DiskEvent::AttachFailed`] tells the rest.
    ///
    /// # Errors
    /// Not alone.
    pub fn attach_backup(&self, stream: MirrorStream, options: AttachOptions) -> Result<(), DiskError> {
        self.primary("attach a backup")?.attach(stream, options)
    }

    /// Primary -> Alone, on purpose ("If the secondary node fails, the primary controller simply asks the I/O switch to stop
    /// forwarding", GANNET IV-A).
    ///
    /// # Errors
    /// Not a primary.
    pub fn detach_backup(&self) -> Result<(), DiskError> {
        self.primary("detach a backup")?.detach("the backup was removed");
        Ok(())
    }

    /// Primary: ends `epoch` in the mirror stream. The VM must be stopped, or the mark lies somewhere within its writes.
    ///
    /// # Errors
    /// No backup, or its first copy is not whole, or the epoch was used before.
    pub fn mark(&self, epoch: Epoch) -> Result<(), DiskError> {
        self.primary("mark a sync")?.mark(epoch)
    }

    /// Backup: waits until the primary's mark of `epoch` is here; says whether it is. [`DiskEvent::Marked`] tells the same.
    /// Given up when nothing at all has come from the primary for `timeout`, and at once when its stream has ended.
    ///
    /// # Errors
    /// Not a backup.
    pub fn wait_marked(&self, epoch: Epoch, timeout: Duration) -> Result<bool, DiskError> {
        Ok(self.backup("wait for a mark")?.wait_marked(epoch, timeout))
    }

    /// Backup: drops the SVM buffer and makes the primary's disk at mark `epoch` what the VM here sees. Waits for requests
    /// in flight; the VM must be paused. What must reach the image does so afterwards, on a thread of the disk's.
    ///
    /// # Errors
    /// The mark has not arrived; the first copy is not whole; the backup has failed.
    pub fn commit(&self, epoch: Epoch) -> Result<(), DiskError> {
        self.expedite(true);
        let result = match &*self.gate() {
            Role::Backup(backup) => backup.commit(epoch),
            other => Err(self.wrong_role(other, "commit a sync")),
        };
        self.expedite(false);
        result
    }

    /// Backup: waits until every committed sync is on the image; says whether it is.
    ///
    /// # Errors
    /// Not a backup.
    pub fn wait_settled(&self, timeout: Duration) -> Result<bool, DiskError> {
        Ok(self.backup("wait for the image")?.wait_settled(timeout))
    }

    /// Backup -> Alone, in `term`. On return everything that this VM wrote since the last commit is on the image, on stable
    /// storage, and the primary's uncommitted writes are dropped. Call it *before* the VM speaks. Requests of the VM wait
    /// meanwhile.
    ///
    /// # Errors
    /// The first copy was never whole, or the image cannot be written: then this host cannot take over.
    ///
    /// For a disk that moves together with others: [`take_over_all`].
    pub fn take_over(&self, term: Term) -> Result<TakeOver, DiskError> {
        let done = self.take_over_alone(term);
        if let (Err(error), Some(member)) = (&done, &self.shared.group) {
            // The others wait for this one, and must not move without it.
            member.group.fail(&error.to_string());
        }
        done
    }

    fn take_over_alone(&self, term: Term) -> Result<TakeOver, DiskError> {
        self.expedite(true);
        let mut role = self.gate();
        let Role::Backup(backup) = &*role else {
            return Err(self.wrong_role(&role, "take over"));
        };
        let started = Instant::now();
        let (buffer, epoch) = backup.take_over()?;
        let dirty = backup::extents(&buffer);
        let mut base = self.shared.dirty.all();
        self.shared.settle_take_over(term, epoch, &buffer)?;
        base.union(&dirty);
        *role = Role::Primary(Primary::new(self.shared.clone(), base));
        let flushed_bytes = buffer.runs().map(|(_, content)| content.len()).sum();
        Ok(TakeOver {
            flushed_bytes,
            took: started.elapsed(),
        })
    }

    /// Lets writes that are being slowed down pass, while the VM is being stopped for a sync. `false` when it runs again.
    pub fn expedite(&self, on: bool) {
        // Not through the gate: a slowed write holds it.
        let Some(role) = self.gate.try_read() else { return };
        match &*role {
            Role::Idle => {}
            Role::Primary(primary) => primary.expedite(on),
            Role::Backup(backup) => backup.expedite(on),
        }
    }

    /// Backup: another host leads from here on; nothing of the old primary counts any more, and nobody waits for its marks. Never waits.
    pub fn forsake_primary(&self) {
        // Who holds the gate commits or takes over, and has all its marks.
        let Some(role) = self.gate.try_read() else { return };
        if let Role::Backup(backup) = &*role {
            backup.forsake("another host leads now");
        }
    }

    /// Primary: while a backup could go on in this VM's place, a request that the image fails is not answered: the VM is not
    /// told what the other copy never saw, and is ended instead ([`DiskEvent::ImageFailed`] comes at once). `false` lets go of
    /// all of them. A VM with such a request does not come to a stop.
    pub fn hold_errors(&self, hold: bool) {
        self.held.set(hold);
    }

    /// Backup: the VMs are idle, so compare and settle what both wrote (the lightweight checkpoint). Returns at once.
    pub fn idle(&self) {
        // While a commit or a take-over holds the gate there is nothing to be settled.
        if let Some(role) = self.gate.try_read()
            && let Role::Backup(backup) = &*role
        {
            backup.idle();
        }
    }

    /// Primary: compares this image with the backup's disk block by block, while the VM runs, by a 128-bit checksum over each
    /// megabyte. With `repair`, what differs is sent again and right after the next committed sync. `may_ask` is told
    /// (compared, total) bytes before each piece, while nothing of the disk is held, and when all is compared: it may wait, or end it.
    ///
    /// # Errors
    /// No backup, or it was lost, or an image cannot be read, or it was ended.
    pub fn verify(
        &self,
        options: VerifyOptions,
        may_ask: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<VerifyReport, DiskError> {
        self.primary("compare with a backup")?.verify(options, may_ask)
    }

    /// What the disk is doing, however long somebody else holds what it looks at: for tests, benchmarks, and a disk that nobody else uses.
    #[must_use]
    pub fn status(&self) -> DiskStatus {
        loop {
            if let Some(status) = self.status_within(Duration::from_secs(1)) {
                return status;
            }
        }
    }

    /// As [`Self::status_now`], looked for again until `at_most` is over.
    #[must_use]
    pub fn status_within(&self, at_most: Duration) -> Option<DiskStatus> {
        let deadline = Instant::now() + at_most;
        loop {
            let status = self.status_now();
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            std::thread::yield_now();
        }
    }

    /// How far what is brought from the buffers to the image has come: any change is progress. Never waits.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.shared.steps()
    }

    /// Backup: committed syncs that the image does not have yet. Never waits.
    #[must_use]
    pub fn owed(&self) -> u64 {
        self.shared.owed()
    }

    /// What the disk is doing, but nothing while somebody else holds what is looked at (perhaps over an fdatasync): for whoever must
    /// not wait, such as a loop whose silence the other hosts would take for death.
    #[must_use]
    pub fn status_now(&self) -> Option<DiskStatus> {
        self.status_of(&*self.gate.try_read()?)
    }

    /// Backup: bytes taken in so far, if both VMs' buffers hold some: what an idle pass could find equal. Never waits.
    #[must_use]
    pub fn could_settle(&self) -> Option<u64> {
        match &*self.gate.try_read()? {
            Role::Backup(backup) => backup.could_settle(),
            _ => None,
        }
    }

    fn status_of(&self, role: &Role) -> Option<DiskStatus> {
        let identity = self.shared.identity();
        let mut status = DiskStatus {
            role: match role {
                Role::Primary(_) => "alone",
                other => other.name(),
            },
            copied: false,
            dirty_bytes: 0,
            copy_left_bytes: 0,
            queued_bytes: 0,
            peer_held_bytes: 0,
            peer_acknowledged: 0,
            requests: self.served.requests.load(Ordering::Relaxed),
            request_ns: self.served.ns.load(Ordering::Relaxed),
            backup: BackupFigures::default(),
            generation: identity.generation,
            consistent: identity.consistent,
        };
        match role {
            Role::Idle => {}
            Role::Primary(primary) => primary.describe(&mut status)?,
            Role::Backup(backup) => status.backup = backup.figures()?,
        }
        Some(status)
    }
}

/// A host that has no thread to give is asked again for so long, and so often: a copy of a VM hangs on it.
const THREADS_COME: Duration = Duration::from_secs(5);
const ASKED_AGAIN: Duration = Duration::from_millis(20);

/// As [`Disk::take_over`] for all disks of a VM: all of them, or none counts after a power loss. One disk needs no thread.
///
/// # Errors
/// The first disk's that could not; or there are too few threads, and then no disk was touched.
pub fn take_over_all(disks: &[Arc<Disk>], term: Term) -> Result<(), DiskError> {
    let Some((first, others)) = disks.split_first() else {
        return Ok(());
    };
    // Disks of a group wait for each other, so none begins before each has its thread.
    let all_begin = RwLock::new(false);
    let take_over = |disk: &Arc<Disk>| {
        let begins = *all_begin.read();
        match begins {
            true => disk.take_over(term).map(drop),
            false => Ok(()),
        }
    };
    std::thread::scope(|scope| {
        let mut begin = all_begin.write();
        let until = Instant::now() + THREADS_COME;
        let mut threads = Vec::new();
        for disk in others {
            let take_over = &take_over;
            let thread = loop {
                let named = std::thread::Builder::new().name("disk-take-over".into());
                match named.spawn_scoped(scope, move || take_over(disk)) {
                    Err(_) if Instant::now() < until => std::thread::sleep(ASKED_AGAIN),
                    asked => break asked.map_err(DiskError::Thread)?,
                }
            };
            threads.push(thread);
        }
        *begin = true;
        drop(begin);
        let own = take_over(first);
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a take-over does not panic"))
            .fold(own, Result::and)
    })
}

impl Role {
    fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Primary(primary) if primary.peer().0 => "primary",
            Self::Primary(_) => "alone",
            Self::Backup(_) => "backup",
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.reset();
    }
}
