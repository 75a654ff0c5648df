//! A disk port on each of two hosts, without network.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use dunlin_core::units::Epoch;
use dunlin_guest::disk::{AttachOptions, Disk, DiskConfig, DiskEvent, MirrorStream};

pub const WAIT: Duration = Duration::from_secs(30);

/// A disk on one of two hosts.
pub struct HostDisk {
    pub disk: Arc<Disk>,
    pub image: PathBuf,
    events: Receiver<DiskEvent>,
}

impl HostDisk {
    /// With an image of zeros.
    pub fn empty(dir: &Path, name: &str, bytes: u64) -> HostDisk {
        let image = dir.join(format!("{name}.img"));
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        HostDisk::open(dir, name, image)
    }

    /// With an image that is there.
    pub fn open(dir: &Path, name: &str, image: PathBuf) -> HostDisk {
        let (sender, events) = channel();
        let config = DiskConfig {
            name: name.to_owned(),
            image: image.clone(),
            format: Default::default(),
            state_dir: dir.to_owned(),
            read_only: false,
            storage: Default::default(),
            limits: Default::default(),
            group: None,
        };
        let disk = Disk::open(config, move |event| drop(sender.send(event))).unwrap();
        HostDisk { disk, image, events }
    }

    /// QEMU's end.
    pub fn port(&self) -> std::os::fd::OwnedFd {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.disk.serve(ours).unwrap();
        theirs.into()
    }

    /// Makes `backup` a whole copy of this disk, and keeps it one.
    pub fn mirror_to(&self, backup: &HostDisk) {
        let (left, right) = UnixStream::pair().unwrap();
        backup
            .disk
            .start_backup(MirrorStream::from_unix(right).unwrap())
            .unwrap();
        self.disk
            .attach_backup(MirrorStream::from_unix(left).unwrap(), AttachOptions::default())
            .unwrap();
        self.wait(DiskEvent::Copied);
    }

    /// The disk is let go: threads that served it hold it, and its image's lock, until they have seen QEMU's end.
    pub fn close(self) {
        drop(self.disk);
        let until = Instant::now() + WAIT;
        // Whoever tells events goes with the disk.
        while let Ok(_) | Err(RecvTimeoutError::Timeout) = self.events.recv_timeout(WAIT) {
            assert!(Instant::now() < until, "{} is held", self.image.display());
        }
    }

    pub fn wait(&self, wanted: DiskEvent) {
        while self
            .events
            .recv_timeout(WAIT)
            .unwrap_or_else(|_| panic!("no {wanted:?}"))
            != wanted
        {}
    }
}

/// Moves the backup's disk to the end of `epoch`.
pub fn sync_disks(primary: &HostDisk, backup: &HostDisk, epoch: u64) {
    primary.disk.mark(Epoch(epoch)).unwrap();
    assert!(backup.disk.wait_marked(Epoch(epoch), WAIT).unwrap());
    backup.disk.commit(Epoch(epoch)).unwrap();
}
