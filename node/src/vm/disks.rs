//! A machine's disks: opened with it, mirrored to the backup's, moved from one sync to the next with it.
//!
//! Invariant 1: what a sync's acknowledgement covers includes every write before its mark.
//!
//! Not here: the I/O switch and the NBD server (core's and the guest's `disk`).

use super::event::{LoopEvent, LoopSender};
use super::session::Broken;
use super::session::link::PATIENCE;
use crate::config::{DiskReplication, VmConfig};
use dunlin_core::units::{Epoch, Term};
use dunlin_fabric::link::Stream;
use dunlin_guest::disk::{AttachOptions, Disk, DiskConfig, DiskEvent, MirrorStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The disks of one machine, in the order of its configuration.
pub struct Disks {
    disks: Vec<Arc<Disk>>,
    copies: Arc<Copies>,
    replication: DiskReplication,
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
    outcome: Option<Result<(), String>>,
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, Vec<Copy>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
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
            DiskEvent::Copied => copy.outcome = Some(Ok(())),
            DiskEvent::AttachFailed { reason } | DiskEvent::BackupLost { reason } => {
                copy.outcome = Some(Err(reason.clone()));
            }
            _ => return,
        }
        self.changed.notify_all();
    }
}

impl Disks {
    /// Opens and locks the images. Also returns QEMU's ends of the disks' sockets.
    pub fn open(
        config: &VmConfig,
        state: &Path,
        to_loop: &LoopSender,
    ) -> Result<(Self, Vec<OwnedFd>), String> {
        let copies = Arc::new(Copies::default());
        copies.lock().resize(config.spec.disks.len(), Copy::default());
        let (mut disks, mut ends) = (Vec::new(), Vec::new());
        for (number, spec) in config.spec.disks.iter().enumerate() {
            let disk_config = DiskConfig {
                name: format!("{}-{number}", config.name),
                image: spec.path.clone(),
                format: spec.format,
                state_dir: state.join(format!("disk-{number}")),
                read_only: false,
                storage: config.disks.storage,
                limits: config.disks.limits,
            };
            let (copies, to_loop) = (copies.clone(), to_loop.clone());
            let disk = Disk::open(disk_config, move |event| {
                copies.note(number, &event);
                to_loop.send(LoopEvent::Disk { number, event });
            })
            .map_err(|error| error.to_string())?;
            let pair = UnixStream::pair().map_err(|error| format!("a socket for the disk: {error}"))?;
            disk.serve(pair.0).map_err(|error| error.to_string())?;
            disks.push(disk);
            ends.push(pair.1.into());
        }
        let replication = config.disks;
        Ok((
            Self {
                disks,
                copies,
                replication,
            },
            ends,
        ))
    }

    /// This host's VM is the one that speaks, from the images as they are.
    pub fn start_alone(&self, term: Term) -> Result<(), String> {
        self.disks
            .iter()
            .try_for_each(|disk| disk.start_alone(term))
            .map_err(|error| error.to_string())
    }

    /// The backup's end of disk `number`'s mirror.
    pub fn follow(&self, number: usize, stream: Stream) -> Result<(), String> {
        let disk = self
            .disks
            .get(number)
            .ok_or_else(|| format!("there is no disk {number}"))?;
        disk.start_backup(mirror(stream))
            .map_err(|error| error.to_string())
    }

    /// Copies what the backup lacks while the VM runs; `connect` opens a stream for a disk.
    pub fn join(
        &self,
        mut connect: impl FnMut(usize) -> Result<Stream, String>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), Broken> {
        let broken =
            |number: usize, why: String| Broken(format!("copying disk {number} to the backup: {why}"));
        self.copies.lock().fill(Copy::default());
        for (number, disk) in self.disks.iter().enumerate() {
            let stream = connect(number).map_err(|why| broken(number, why))?;
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
                    Some(Err(why)) => Some(broken(n, why.clone())),
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
            // A backup that takes nothing is given up by the mirror itself, which changes the state.
            states = self
                .copies
                .changed
                .wait(states)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The disks, in order.
    pub fn all(&self) -> &[Arc<Disk>] {
        &self.disks
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

    /// The backup waits until all writes of `epoch` are in its buffers (invariant 1).
    pub fn wait_marked(&self, epoch: Epoch) -> Result<(), Broken> {
        for disk in &self.disks {
            match disk.wait_marked(epoch, PATIENCE) {
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
        let done = self
            .disks
            .iter()
            .try_for_each(|disk| disk.take_over(term).map(drop));
        done.map_err(|error| Broken::new("taking the disk over", error))
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
