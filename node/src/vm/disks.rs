//! A machine's disks: opened with it, mirrored to the backup's, moved from one sync to the next with it.
//!
//! Invariant 1: what a sync's acknowledgement covers includes every write before its mark.
//!
//! Not here: the I/O switch and the NBD server (core's and the guest's `disk`).

use super::connect::ConnectError;
use super::remains::Remains;
use super::session::Broken;
use super::session::waiting::Waiting;
use crate::config::{DiskReplication, VmConfig};
use dunlin_api::{DiskFigures, DiskStanding};
use dunlin_core::units::{Epoch, Term};
use dunlin_core::waits::Wait;
use dunlin_core::watchdog::Flow;
use dunlin_fabric::link::Stream;
use dunlin_guest::disk::{
    AttachOptions, Disk, DiskConfig, DiskError, DiskEvent, DiskFormat, DiskGroup, DiskStatus, Member,
    MirrorStream, take_over_all,
};
use dunlin_guest::uefi::{self, UefiError};
use dunlin_guest::{DiskSpec, FirmwareKind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a machine's disks cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// A UEFI's variables, which are a disk like others.
    #[error(transparent)]
    Variables(#[from] UefiError),
    /// More than one mark has room for.
    #[error("a VM has at most 64 disks")]
    TooMany,
    /// By it several disks move from one sync to the next together.
    #[error("the disks' common mark {}: {error}", .path.display())]
    Mark {
        /// Its file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// One of them.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// QEMU would have its end.
    #[error("a socket for the disk: {0}")]
    Socket(#[source] io::Error),
    /// The other host has more of them.
    #[error("there is no disk {0}")]
    NoDisk(usize),
}

/// The disks of one machine, in the order of its configuration.
pub struct Disks {
    disks: Vec<Arc<Disk>>,
    copies: Arc<Copies>,
    replication: DiskReplication,
    /// When the figures are due again, and the last ones.
    shown: Mutex<(u64, Vec<DiskFigures>)>,
    /// What the backup's end of each disk had taken in when that was last seen.
    acknowledged: Mutex<Vec<u64>>,
}

/// The image of a UEFI guest's variables, in a host's state folder: not in the VM's own, since a VM that is taken down and started
/// again finds them, as it finds its disks.
#[must_use]
pub fn variables(state: &Path, vm: &str) -> PathBuf {
    state.join("variables").join(format!("{vm}.fd"))
}

/// What a VM's QEMU has NBD ports for: its disks, and a UEFI's variables, which are a disk like others.
fn images(config: &VmConfig, state: &Path) -> Result<Vec<DiskSpec>, UefiError> {
    let mut images = config.spec.disks.clone();
    if config.spec.firmware == FirmwareKind::Uefi {
        let path = variables(state, &config.name);
        uefi::make_variables(&path)?;
        images.push(DiskSpec {
            path,
            format: DiskFormat::Raw,
        });
    }
    Ok(images)
}

fn folder(config: &VmConfig, state: &Path) -> PathBuf {
    state.join("vms").join(&config.name)
}

/// Several disks move from one sync to the next together.
fn group(config: &VmConfig, state: &Path) -> Result<Option<Arc<DiskGroup>>, DisksError> {
    let count = config.spec.images();
    if count < 2 {
        return Ok(None);
    }
    if count > 64 {
        return Err(DisksError::TooMany);
    }
    let folder = folder(config, state);
    let path = folder.join("disks.mark");
    std::fs::create_dir_all(folder)
        .and_then(|()| DiskGroup::open(&path, count))
        .map(Some)
        .map_err(|error| DisksError::Mark { path, error })
}

/// Whoever asks what disks are doing, and may wait, waits no longer: somebody may hold one over an fdatasync.
const LOOKS_FOR: Duration = Duration::from_millis(10);
/// Figures are no older than this.
const SHOW_US: u64 = 200_000;

fn shown_as(status: &DiskStatus) -> DiskFigures {
    let (backup, generation) = (&status.backup, status.generation);
    DiskFigures {
        role: status.role.into(),
        dirty_bytes: status.dirty_bytes,
        queued_bytes: status.queued_bytes,
        held_bytes: backup.held_bytes.max(status.peer_held_bytes),
        pvm_bytes: backup.pvm_bytes,
        svm_bytes: backup.svm_bytes,
        peak_bytes: backup.counters.peak_bytes,
        compared_bytes: backup.counters.compared_bytes,
        settled_bytes: backup.counters.settled_bytes,
        committed_bytes: backup.counters.committed_bytes,
        requests: status.requests,
        request_ns: status.request_ns,
        settles: backup.settles,
        settle_ns: backup.settle_ns,
        asked_syncs: backup.asked_syncs,
        delayed_writes: backup.delayed_writes,
        light_ns: backup.light_ns,
        generation: (generation.term.0, generation.primary, generation.epoch.0),
        consistent: status.consistent,
    }
}

/// Says when a backup's VM counts as idle for its disks: "compare the increment of processor time with a threshold [...] for
/// five consecutive" times, 1 ms apart (GANNET VI-A); here its threads sleep each time.
#[derive(Default)]
pub struct IdleWatch {
    look_at_us: u64,
    quiet: u32,
    /// What had been taken in when the last pass began: a second one over the same bytes finds nothing.
    passed: u64,
}

impl IdleWatch {
    const EVERY_US: u64 = 1000;
    const TIMES: u32 = 5;

    /// Looks, if it is time; `sleeps` says whether all the VM's threads do.
    pub fn look(&mut self, disks: &Disks, now_us: u64, sleeps: impl FnOnce() -> bool) {
        if now_us < self.look_at_us {
            return;
        }
        self.look_at_us = now_us + Self::EVERY_US;
        let Some(taken_in) = disks.could_settle().filter(|taken_in| *taken_in != self.passed) else {
            self.quiet = 0;
            self.look_at_us = now_us + 5 * Self::EVERY_US;
            return;
        };
        self.quiet = if sleeps() { self.quiet + 1 } else { 0 };
        if self.quiet >= Self::TIMES {
            self.quiet = 0;
            self.passed = taken_in;
            disks.idle();
        }
    }

    /// When to look again.
    pub fn deadline_us(&self) -> u64 {
        self.look_at_us
    }
}

/// How the first copies of a join go.
#[derive(Default)]
struct Copies {
    states: Mutex<Vec<Copy>>,
    changed: Condvar,
}

#[derive(Clone, Default)]
struct Copy {
    done: u64,
    total: u64,
    outcome: Option<Outcome>,
}

/// How a first copy has ended.
#[derive(Clone)]
enum Outcome {
    Copied,
    /// Why it was not, as the disk said.
    Failed(String),
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, Vec<Copy>> {
        self.states.lock()
    }

    fn note(&self, disk: usize, event: &DiskEvent) {
        let mut states = self.lock();
        let Some(copy) = states.get_mut(disk) else { return };
        match event {
            DiskEvent::CopyProgress {
                done_bytes,
                total_bytes,
            } => {
                copy.done = *done_bytes;
                copy.total = *total_bytes;
            }
            DiskEvent::Copied => copy.outcome = Some(Outcome::Copied),
            DiskEvent::AttachFailed { reason } | DiskEvent::BackupLost { reason } => {
                copy.outcome = Some(Outcome::Failed(reason.clone()));
            }
            _ => return,
        }
        self.changed.notify_all();
    }
}

impl Disks {
    /// Opens and locks the images; each is one of what `remains` until it is closed. Also returns QEMU's ends of the disks' sockets. `state` is the
    /// host's folder; `tell` hears what happens to which disk.
    pub fn open(
        config: &VmConfig,
        state: &Path,
        tell: impl Fn(usize, DiskEvent) + Clone + Send + Sync + 'static,
        remains: &Remains,
    ) -> Result<(Self, Vec<OwnedFd>), DisksError> {
        let copies = Arc::new(Copies::default());
        let images = images(config, state)?;
        copies.lock().resize(images.len(), Copy::default());
        let (mut disks, mut ends) = (Vec::new(), Vec::new());
        let group = group(config, state)?;
        for (number, spec) in images.iter().enumerate() {
            let member = group.clone().map(|group| Member { group, number });
            let disk_config = disk_config(config, state, number, spec, member);
            let (copies, tell) = (copies.clone(), tell.clone());
            // The disk lets go of this last, its image before: somebody's request may hold it longer than we do.
            let remain = remains.one();
            let disk = Disk::open(disk_config, move |event| {
                let _ends_with_the_disk = &remain;
                copies.note(number, &event);
                tell(number, event);
            })?;
            let pair = UnixStream::pair().map_err(DisksError::Socket)?;
            disk.serve(pair.0)?;
            disks.push(disk);
            ends.push(pair.1.into());
        }
        let replication = config.disks;
        Ok((
            Self {
                disks,
                copies,
                replication,
                shown: Mutex::default(),
                acknowledged: Mutex::default(),
            },
            ends,
        ))
    }

    /// How new the images are, of a VM that does not run here. What a crash left half-done on them is completed.
    pub fn look(config: &VmConfig, state: &Path) -> Result<Vec<DiskStanding>, DisksError> {
        let group = group(config, state)?;
        let look = |(number, spec)| {
            let member = group.clone().map(|group| Member { group, number });
            let disk = Disk::open(disk_config(config, state, number, spec, member), |_| {});
            let status = disk?.status();
            Ok(DiskStanding {
                consistent: status.consistent,
                term: status.generation.term.0,
                primary: status.generation.primary,
                epoch: status.generation.epoch.0,
            })
        };
        images(config, state)?.iter().enumerate().map(look).collect()
    }

    /// This host's VM is the one that speaks, from the images as they are.
    pub fn start_alone(&self, term: Term) -> Result<(), DiskError> {
        self.disks.iter().try_for_each(|disk| disk.start_alone(term))
    }

    /// The backup's end of disk `number`'s mirror.
    pub fn follow(&self, number: usize, stream: Stream) -> Result<(), DisksError> {
        let disk = self.disks.get(number).ok_or(DisksError::NoDisk(number))?;
        Ok(disk.start_backup(mirror(stream))?)
    }

    /// Copies what the backup lacks while the VM runs; `connect` opens a stream for a disk. This host leads in `term`.
    pub fn join(
        &self,
        term: Term,
        waiting: &Waiting,
        mut connect: impl FnMut(usize) -> Result<Stream, ConnectError>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), Broken> {
        let broken =
            |number: usize, why: String| Broken(format!("copying disk {number} to the backup: {why}"));
        self.copies.lock().fill(Copy::default());
        for (number, disk) in self.disks.iter().enumerate() {
            waiting
                .during(Wait::DiskCopies, || disk.lead(term))
                .map_err(|error| broken(number, error.to_string()))?;
            let stream = connect(number).map_err(|why| broken(number, why.to_string()))?;
            let options = AttachOptions {
                copy_bytes_per_s: self
                    .replication
                    .copy_bytes_per_s
                    .div_ceil(self.disks.len() as u64),
                ..AttachOptions::default()
            };
            disk.attach_backup(mirror(stream), options)
                .map_err(|error| broken(number, error.to_string()))?;
        }
        let mut states = self.copies.lock();
        loop {
            let failed = states
                .iter()
                .enumerate()
                .find_map(|(n, copy)| match &copy.outcome {
                    Some(Outcome::Failed(why)) => Some(broken(n, why.clone())),
                    _ => None,
                });
            if let Some(failed) = failed {
                return Err(failed);
            }
            if states.iter().all(|copy| copy.outcome.is_some()) {
                return Ok(());
            }
            progress(
                states.iter().map(|copy| copy.done).sum(),
                states.iter().map(|copy| copy.total).sum(),
            );
            let changed = &self.copies.changed;
            let waited = waiting.during(Wait::DiskCopies, || {
                changed.wait_for(&mut states, Wait::DiskCopies.bound())
            });
            if waited.timed_out() {
                return Err(Broken(Wait::DiskCopies.said()));
            }
        }
    }

    /// The disks, in order.
    pub fn all(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    /// What the disks are doing; not asked anew all the time, and never waited for.
    pub fn figures(&self, now_us: u64) -> Vec<DiskFigures> {
        let mut shown = self.shown.lock();
        let (due_us, figures) = &mut *shown;
        if now_us >= *due_us {
            *due_us = now_us.saturating_add(SHOW_US);
            figures.resize(self.disks.len(), DiskFigures::default());
            for (disk, figures) in self.disks.iter().zip(figures.iter_mut()) {
                if let Some(status) = disk.status_now() {
                    *figures = shown_as(&status);
                }
            }
        }
        figures.clone()
    }

    /// The VM is being stopped: writes that are slowed down, because a backup's buffers fill, pass. `false` when it runs.
    pub fn expedite(&self, on: bool) {
        for disk in &self.disks {
            disk.expedite(on);
        }
    }

    /// Backup: nothing of the old primary counts any more.
    pub fn forsake_primary(&self) {
        for disk in &self.disks {
            disk.forsake_primary();
        }
    }

    /// Primary: a request that an image fails is not answered while this holds (a complete backup could go on instead).
    pub fn hold_errors(&self, hold: bool) {
        for disk in &self.disks {
            disk.hold_errors(hold);
        }
    }

    /// Backup: bytes taken in so far, if an idle pass could find some of them equal.
    pub fn could_settle(&self) -> Option<u64> {
        if !self.replication.settles_when_idle() {
            return None;
        }
        self.disks
            .iter()
            .filter_map(|disk| disk.could_settle())
            .reduce(u64::wrapping_add)
    }

    /// Backup: the VMs are idle (the lightweight checkpoint). Returns at once.
    pub fn idle(&self) {
        for disk in &self.disks {
            disk.idle();
        }
    }

    /// The session with the backup is over.
    pub fn detach(&self) {
        for disk in &self.disks {
            // One that has no backup is as detached as can be.
            let _ = disk.detach_backup();
        }
    }

    /// The primary's VM stands: what it has written so far belongs to `epoch`.
    pub fn mark(&self, epoch: Epoch) -> Result<(), Broken> {
        let marked = self.disks.iter().try_for_each(|disk| disk.mark(epoch));
        marked.map_err(|error| Broken::new("marking the sync on the disk", error))
    }

    /// How much of what was mirrored the backup has taken in, in frames: it grows as long as the backup is slow and not stuck. A
    /// disk that is busy for too long is where it was last seen: the VM may stand meanwhile.
    pub fn mirrored(&self) -> u64 {
        let deadline = Instant::now() + LOOKS_FOR;
        let mut seen = self.acknowledged.lock();
        seen.resize(self.disks.len(), 0);
        for (disk, seen) in self.disks.iter().zip(seen.iter_mut()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(status) = disk.status_within(left) {
                *seen = status.peer_acknowledged;
            }
        }
        seen.iter().sum()
    }

    /// Which of them somebody holds now, as for as long as they are taken over.
    pub fn held(&self) -> Vec<usize> {
        let held = |number: &usize| self.disks[*number].status_now().is_none();
        (0..self.disks.len()).filter(held).collect()
    }

    /// How far what is brought from the buffers to the images has come: any change is progress. Never waits.
    pub fn steps(&self) -> u64 {
        let steps = self.disks.iter().map(|disk| disk.steps());
        steps.fold(0, u64::wrapping_add)
    }

    /// What a following backup's buffers owe to its images, for the watchdog: a copy whose disk does not answer is no second copy.
    pub fn flow(&self) -> Flow {
        Flow {
            waits: self.disks.iter().any(|disk| disk.owed() > 0),
            progress: self.steps(),
        }
    }

    /// The backup waits until all writes of `epoch` are in its buffers (invariant 1).
    pub fn wait_marked(&self, epoch: Epoch) -> Result<(), Broken> {
        for disk in &self.disks {
            match disk.wait_marked(epoch, Wait::DiskMirrors.bound()) {
                Ok(true) => {}
                Ok(false) => return Err(Broken("the primary's disk writes do not arrive".into())),
                Err(error) => return Err(Broken::new("the mirrored disk", error)),
            }
        }
        Ok(())
    }

    /// The backup's VM stands: its disks move to the end of `epoch`.
    pub fn commit(&self, epoch: Epoch) -> Result<(), Broken> {
        let done = self.disks.iter().try_for_each(|disk| disk.commit(epoch));
        done.map_err(|error| Broken::new("moving the disk to the sync", error))
    }

    /// What the backup's VM wrote since the last sync becomes the images' truth, durably.
    pub fn take_over(&self, term: Term) -> Result<(), Broken> {
        take_over_all(&self.disks, term).map_err(|error| Broken::new("taking the disk over", error))
    }
}

fn disk_config(
    config: &VmConfig,
    state: &Path,
    number: usize,
    spec: &DiskSpec,
    group: Option<Member>,
) -> DiskConfig {
    DiskConfig {
        name: format!("{}-{number}", config.name),
        image: spec.path.clone(),
        format: spec.format,
        state_dir: folder(config, state).join(format!("disk-{number}")),
        read_only: false,
        storage: config.disks.storage,
        limits: config.disks.limits,
        group,
    }
}

fn mirror(stream: Stream) -> MirrorStream {
    let socket = stream.as_fd().try_clone_to_owned();
    let (reader, writer) = stream.split();
    let shutdown = move || {
        if let Ok(socket) = &socket {
            // Closed already is as good.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    };
    MirrorStream {
        reader: Box::new(reader),
        writer: Box::new(writer),
        shutdown: Box::new(shutdown),
    }
}
