//! One QEMU with what the host holds of its ports: shared between the loop and a session's thread.
//!
//! Invariants: 1. whoever lets go of a machine last does not wait for its end, which takes as long as its disks do: that is a thread's
//! own; 2. the next machine of the VM on this host begins when nothing [remains](Remains) of the last one.

use super::disks::{Disks, DisksError};
use super::fault_at::FaultAt;
use super::held_memory::Taken;
use super::nics::{FramePorts, NicsError};
use super::remains::{Remain, StillThere};
use super::shared::Shared;
use super::state::speculating::Speculating;
use crate::config::VmConfig;
use dunlin_core::units::Term;
use dunlin_guest::colo::Colo;
use dunlin_guest::disk::{DiskError, DiskEvent};
use dunlin_guest::frames::FramePort;
use dunlin_guest::qemu::StartError;
use dunlin_guest::{Ports, Qemu, Start};
use dunlin_speculation::{Sockets, SocketsError};
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The last one (invariant 2).
    #[error(transparent)]
    Remains(#[from] StillThere),
    /// QEMU would have its end.
    #[error("a socket for the NIC: {0}")]
    Nic(#[source] io::Error),
    /// Its disks.
    #[error(transparent)]
    Disks(#[from] DisksError),
    /// One of them is not this host's alone.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The process.
    #[error(transparent)]
    Qemu(#[from] StartError),
    /// What speculates for it.
    #[error(transparent)]
    Sockets(#[from] SocketsError),
    /// Its cards.
    #[error(transparent)]
    Nics(#[from] NicsError),
    /// It would be started there.
    #[error("a thread to start QEMU: {0}")]
    Thread(#[source] io::Error),
}

/// A running VM.
pub struct Machine {
    /// All of it, until it is dropped (invariant 1).
    parts: Option<Parts>,
}

/// What a machine is made of.
pub struct Parts {
    /// The process and its control ports.
    pub qemu: Qemu,
    /// Its disks. After `qemu`: a process that still writes must be gone before they close.
    pub disks: Disks,
    /// Tests only.
    pub fault_at: Arc<FaultAt>,
    /// After all others (invariant 2).
    _remain: Remain,
}

impl Deref for Machine {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        self.parts.as_ref().expect("only taken when it is dropped")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        end_elsewhere(self.parts.take());
    }
}

/// Invariant 1.
fn end_elsewhere(parts: impl Send + 'static) {
    let ends = std::thread::Builder::new().name("machine-ends".into());
    if let Err(error) = ends.spawn(move || drop(parts)) {
        // It has ended here, with the thread that was not begun.
        tracing::error!("a thread to end a VM: {error}");
    }
}

/// A QEMU that was just started.
pub struct Started {
    /// The machine.
    pub machine: Arc<Machine>,
    /// The NICs' ports.
    pub ports: FramePorts,
    /// A backup's port for states.
    pub colo: Option<Colo>,
    /// Where shadow sockets are to be, for a VM that speculates.
    pub sockets: Option<Sockets>,
}

impl Machine {
    /// Starts QEMU when the last one has ended (invariant 2); blocks for some 100 ms. `state` is this host's folder, and `tell`
    /// hears what happens to which disk. `held` is what this host holds of the VM's memory: taken only when QEMU gets it.
    pub fn start(
        config: &VmConfig,
        start: Start,
        term: Term,
        state: &Path,
        shared: &Shared,
        held: &mut Option<Taken>,
        tell: impl Fn(usize, DiskEvent) + Clone + Send + Sync + 'static,
    ) -> Result<Started, MachineError> {
        let remain = shared.remains.begin()?;
        let mut ports = Ports::default();
        let mut frames = Vec::new();
        for _ in &config.spec.nics {
            let (ours, theirs) = FramePort::pair(config.spec.nic_backend).map_err(MachineError::Nic)?;
            ports.ram_writers.extend(ours.ram_writer());
            frames.push(ours);
            ports.frames.push(theirs);
        }
        let nobody_looks = shared.opening_disks.lock();
        let (disks, ends) = Disks::open(config, state, tell, &shared.remains)?;
        drop(nobody_looks);
        ports.nbd = ends;
        if start == Start::Boot {
            disks.start_alone(term)?;
        }
        ports.ram = held.take().map(Taken::into_ram);
        let mut qemu = Qemu::start(&config.spec, start, ports)?;
        let colo = qemu.take_colo();
        let sockets = match config.speculative {
            true => Some(Speculating::sockets()?),
            false => None,
        };
        Ok(Started {
            machine: Arc::new(Self {
                parts: Some(Parts {
                    qemu,
                    disks,
                    fault_at: shared.fault_at.clone(),
                    _remain: remain,
                }),
            }),
            ports: frames,
            colo,
            sockets,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cluster;
    use crate::vm::remains::Remains;
    use dunlin_core::units::Epoch;
    use dunlin_guest::disk::{AttachOptions, Disk, DiskConfig, DiskFormat, Limits, MirrorStream, Storage};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    const PATIENCE: Duration = Duration::from_secs(30);
    const HOSTS: &str = "name = 't'\nid = '00112233445566778899aabbccddeeff'\n[[hosts]]\nname = 'a'\naddress = '10.0.0.1:7700'\n\
                         [[hosts]]\nname = 'b'\naddress = '10.0.0.2:7700'\n[[hosts]]\nname = 'c'\naddress = '10.0.0.3:7700'\n";

    /// A primary's disk, beside the backup's that is to be tested.
    fn primary(folder: &Path) -> Arc<Disk> {
        let config = DiskConfig {
            name: "v-0".into(),
            image: folder.join("primary.img"),
            format: DiskFormat::Raw,
            state_dir: folder.join("primary"),
            read_only: false,
            storage: Storage::Gannet,
            limits: Limits::default(),
            group: None,
        };
        let disk = Disk::open(config, |_| {}).expect("the primary's disk");
        disk.start_alone(Term(1)).expect("it is idle");
        disk
    }

    fn mirror(end: UnixStream) -> MirrorStream {
        MirrorStream::from_unix(end).expect("descriptors")
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    }

    /// A backup whose disk hangs while a sync is brought to it: its threads cannot be joined.
    #[test]
    fn invariants_1_and_2_a_disk_that_hangs_keeps_nobody_but_the_next_start_and_that_not_for_ever() {
        let folder = std::env::temp_dir().join(format!("dunlin-machine-{}", std::process::id()));
        let _old = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        for image in ["primary.img", "v.img"] {
            let file = std::fs::File::create(folder.join(image)).expect("an image");
            file.set_len(4 << 20).expect("room");
        }
        let cluster = Cluster::parse(HOSTS, "cluster.toml").expect("a good file");
        let text = format!(
            "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\npolicy = 'plover'\n[vm]\nmemory_mib = 64\nkernel = '/k'\n\
             [[vm.disks]]\npath = '{}'\nformat = 'raw'\n",
            folder.join("v.img").display()
        );
        let config = VmConfig::parse(&text, "v.toml", &cluster).expect("a good file");
        let remains = Remains::default();
        let open = || Disks::open(&config, &folder, |_, _| {}, &remains).map(|(disks, _ends)| disks);
        let disks = open().expect("the backup's disk");
        let backup = &disks.all()[0];
        let primary = primary(&folder);
        let (left, right) = UnixStream::pair().expect("a pair");
        backup.start_backup(mirror(right)).expect("it is idle");
        primary
            .attach_backup(mirror(left), AttachOptions::default())
            .expect("it is alone");
        until("the copy is whole", || primary.mark(Epoch(1)).is_ok());
        assert!(backup.wait_marked(Epoch(1), PATIENCE).expect("a backup"));
        backup.commit(Epoch(1)).expect("it is marked");
        assert!(backup.wait_settled(PATIENCE).expect("a backup"));
        let write = |byte| {
            let data = vec![byte; 4096].into();
            dunlin_guest::disk::nbd::Export::write(&*primary, 0, data, false).expect("a write");
        };
        write(1);
        primary.mark(Epoch(2)).expect("a mark");
        assert!(backup.wait_marked(Epoch(2), PATIENCE).expect("a backup"));
        let faults = backup.faults().clone();
        faults.hang(true);
        backup.commit(Epoch(2)).expect("it is marked");
        until("the sync hangs on its way to the disk", || faults.held() > 0);

        let (done, told) = channel();
        let lets_go = move || {
            end_elsewhere(disks);
            let _ = done.send(());
        };
        std::thread::spawn(lets_go);
        assert!(
            told.recv_timeout(PATIENCE).is_ok(),
            "whoever lets go waits for the disk"
        );
        assert!(!remains.is_none(), "it hangs");
        assert!(open().is_err(), "the image is not free");
        faults.hang(false);
        drop(primary);
        remains.await_none().expect("it hangs no more");
        open().expect("the image is free at once");
        let _gone = std::fs::remove_dir_all(&folder);
    }
}
