//! Two disk ports joined by a socket, driven without QEMU. The pure rules are tested in `dunlin_core::disk`.

use super::{nbd::Export, *};
use bytes::Bytes;
use std::{
    fs,
    path::Path,
    sync::mpsc::{Receiver, channel},
    time::Instant,
};

pub(super) const MIB: u64 = 1 << 20;

/// A directory that vanishes with the test.
pub(super) struct Dir(pub PathBuf);

impl Dir {
    pub(super) fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("dunlin-disk-{}-{name}", std::process::id()));
        let _old = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

pub(super) struct Host {
    pub disk: Arc<Disk>,
    pub events: Mutex<Receiver<DiskEvent>>,
    pub image: PathBuf,
}

impl Host {
    pub(super) fn open(dir: &Path, name: &str, mib: u64, storage: Storage, limits: Limits) -> Self {
        let image = dir.join(format!("{name}.img"));
        if !image.exists() {
            fs::File::create(&image).unwrap().set_len(mib * MIB).unwrap();
        }
        let config = DiskConfig {
            name: "disk0".into(),
            image: image.clone(),
            format: Default::default(),
            state_dir: dir.join(name),
            read_only: false,
            storage,
            limits,
            group: None,
        };
        Self::of(config)
    }

    pub(super) fn of(config: DiskConfig) -> Self {
        let image = config.image.clone();
        let (sender, events) = channel();
        let sender = Mutex::new(sender);
        let disk = Disk::open(config, move |event| drop(sender.lock().send(event))).unwrap();
        Self {
            disk,
            events: Mutex::new(events),
            image,
        }
    }

    pub(super) fn wait(&self, what: impl Fn(&DiskEvent) -> bool) -> DiskEvent {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let event = self
                .events
                .lock()
                .recv_timeout(until.saturating_duration_since(Instant::now()))
                .expect("the awaited event comes within 20 s");
            if what(&event) {
                return event;
            }
        }
    }

    pub(super) fn write(&self, offset: u64, byte: u8, len: usize) {
        self.disk
            .write(offset, Bytes::from(vec![byte; len]), false)
            .unwrap();
    }

    pub(super) fn byte(&self, offset: u64) -> u8 {
        let mut out = [0];
        self.disk.read(offset, &mut out).unwrap();
        out[0]
    }

    pub(super) fn image_byte(&self, offset: u64) -> u8 {
        fs::read(&self.image).unwrap()[offset as usize]
    }

    /// Ends it, with all of its threads: only then does it let go of its image.
    pub(super) fn end(self) {
        let shared = Arc::downgrade(&self.disk.shared);
        drop(self);
        let until = Instant::now() + Duration::from_secs(20);
        while shared.strong_count() > 0 {
            assert!(Instant::now() < until, "all of its threads end");
            std::thread::yield_now();
        }
    }
}

pub(super) fn join(primary: &Host, backup: &Host, options: AttachOptions) {
    attach(primary, backup, options);
    primary.wait(|event| *event == DiskEvent::Copied);
    backup.wait(|event| *event == DiskEvent::Copied);
}

/// The copy begins. A backup that is late, because other tests have things to do as well, is not taken for lost.
pub(super) fn attach(primary: &Host, backup: &Host, mut options: AttachOptions) {
    options.tuning.stall = Duration::from_secs(20);
    attach_as_it_is(primary, backup, options);
}

pub(super) fn attach_as_it_is(primary: &Host, backup: &Host, options: AttachOptions) {
    let (left, right) = UnixStream::pair().unwrap();
    backup
        .disk
        .start_backup(MirrorStream::from_unix(right).unwrap())
        .unwrap();
    primary
        .disk
        .attach_backup(MirrorStream::from_unix(left).unwrap(), options)
        .unwrap();
}

/// What the node does at a sync, both VMs stopped.
pub(super) fn sync(primary: &Host, backup: &Host, epoch: u64) {
    primary.disk.mark(Epoch(epoch)).unwrap();
    assert!(
        backup
            .disk
            .wait_marked(Epoch(epoch), Duration::from_secs(10))
            .unwrap()
    );
    backup.disk.commit(Epoch(epoch)).unwrap();
}

pub(super) fn pair(name: &str, storage: Storage, limits: Limits) -> (Dir, Host, Host) {
    let dir = Dir::new(name);
    let primary = Host::open(&dir.0, "a", 8, storage, limits);
    let backup = Host::open(&dir.0, "b", 8, storage, limits);
    primary.disk.start_alone(Term(1)).unwrap();
    primary.write(5 * MIB + 3, 9, 100);
    join(&primary, &backup, AttachOptions::default());
    (dir, primary, backup)
}

#[test]
fn a_sync_makes_the_backups_view_the_primarys() {
    for storage in [Storage::Gannet, Storage::Colo, Storage::Sync] {
        let (_dir, primary, backup) = pair(&format!("view-{storage:?}"), storage, Limits::default());
        sync(&primary, &backup, 1);
        assert_eq!(backup.byte(5 * MIB + 50), 9, "{storage:?}: the first copy");
        primary.write(0, 1, 4096);
        primary.write(8192, 1, 4096);
        backup.write(0, 2, 512);
        backup.write(MIB, 3, 512);
        primary.disk.mark(Epoch(2)).unwrap();
        assert!(
            backup
                .disk
                .wait_marked(Epoch(2), Duration::from_secs(10))
                .unwrap()
        );
        primary.write(8192, 7, 512);
        assert_eq!(
            (backup.byte(0), backup.byte(8192), backup.byte(MIB)),
            (2, 0, 3),
            "{storage:?}: own view"
        );
        backup.disk.commit(Epoch(2)).unwrap();
        assert_eq!(
            (backup.byte(0), backup.byte(8192), backup.byte(MIB)),
            (1, 1, 0),
            "{storage:?}: at mark 2"
        );
        assert!(backup.disk.wait_settled(Duration::from_secs(10)).unwrap());
        let error = backup.disk.commit(Epoch(3)).unwrap_err().to_string();
        assert!(error.contains("has not arrived"), "{error}");
    }
}

#[test]
fn a_take_over_keeps_what_the_backup_vm_wrote_and_drops_the_rest() {
    for storage in [Storage::Gannet, Storage::Colo, Storage::Sync] {
        let (_dir, primary, backup) = pair(&format!("take-{storage:?}"), storage, Limits::default());
        sync(&primary, &backup, 1);
        primary.write(0, 1, 4096);
        backup.write(0, 2, 1000);
        primary.disk.mark(Epoch(2)).unwrap();
        assert!(
            backup
                .disk
                .wait_marked(Epoch(2), Duration::from_secs(10))
                .unwrap()
        );
        drop(primary);
        backup.wait(|event| matches!(event, DiskEvent::PrimaryLost { .. }));
        backup.disk.take_over(Term(2)).unwrap();
        assert_eq!(backup.disk.status().role, "alone");
        assert_eq!((backup.byte(0), backup.byte(1000)), (2, 0), "{storage:?}");
        assert_eq!(
            (backup.image_byte(0), backup.image_byte(1000)),
            (2, 0),
            "{storage:?}"
        );
        backup.write(0, 4, 10);
        assert_eq!(backup.image_byte(0), 4);
    }
}

#[test]
fn a_lost_backup_leaves_the_primary_alone_with_its_dirty_extents() {
    let (_dir, primary, backup) = pair("lost", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    backup.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    assert_eq!(primary.disk.status().dirty_bytes, 0);
    backup.disk.reset();
    primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    primary.write(3 * MIB, 1, 512);
    let status = primary.disk.status();
    assert_eq!((status.role, status.dirty_bytes), ("alone", MIB));
    assert!(matches!(primary.disk.mark(Epoch(2)), Err(DiskError::NoBackup)));
}

#[test]
fn a_connection_that_holds_its_disk_longest_ends_it_in_good_order() {
    struct Tell(std::sync::mpsc::Sender<bool>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.send(std::thread::panicking()).unwrap();
        }
    }
    let dir = Dir::new("longest");
    let image = dir.0.join("a.img");
    fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    let config = DiskConfig {
        name: "disk0".into(),
        image,
        format: Default::default(),
        state_dir: dir.0.join("a"),
        read_only: false,
        storage: Storage::Gannet,
        limits: Limits::default(),
        group: None,
    };
    let (sender, ended) = channel();
    let tell = Tell(sender);
    let disk = Disk::open(config, move |_| {
        let _kept_as_long_as_the_disk = &tell;
    })
    .unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    disk.serve(ours).unwrap();
    drop(disk);
    drop(theirs);
    let panicked = ended.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(!panicked, "a panic ends the whole daemon");
}

#[test]
fn an_image_in_use_is_refused_in_one_line() {
    let dir = Dir::new("lock");
    let host = Host::open(&dir.0, "a", 1, Storage::Gannet, Limits::default());
    let config = DiskConfig {
        name: "other".into(),
        image: host.image.clone(),
        format: Default::default(),
        state_dir: dir.0.join("other"),
        read_only: false,
        storage: Storage::Gannet,
        limits: Limits::default(),
        group: None,
    };
    let error = Disk::open(config, |_| {}).err().unwrap().to_string();
    assert!(
        error.contains("in use by another VM") && !error.contains('\n'),
        "{error}"
    );
    // The same disk again is the VM's own last copy, and no other VM that a person could stop.
    let own = DiskConfig {
        name: "disk0".into(),
        image: host.image.clone(),
        format: Default::default(),
        state_dir: dir.0.join("own"),
        read_only: false,
        storage: Storage::Gannet,
        limits: Limits::default(),
        group: None,
    };
    let error = Disk::open(own.clone(), |_| {}).err().unwrap().to_string();
    assert!(
        error.contains("last copy of this VM") && !error.contains("another VM"),
        "{error}"
    );
    drop(host);
    Disk::open(own, |_| {}).expect("free when the last copy has gone");
}

/// The state of a sync arrived and its mark never will: the backup's host must not wait with its take-over.
#[test]
fn nobody_waits_for_the_mark_of_a_primary_that_is_gone() {
    const FOR_EVER: Duration = Duration::from_secs(86_400);
    for (name, elected) in [("gone-stream", false), ("gone-elected", true)] {
        let (_dir, primary, backup) = pair(name, Storage::Gannet, Limits::default());
        sync(&primary, &backup, 1);
        primary.write(0, 1, 4096);
        backup.write(0, 2, 4096);
        if elected {
            backup.disk.forsake_primary();
        } else {
            primary.disk.detach_backup().unwrap();
        }
        assert!(!backup.disk.wait_marked(Epoch(2), FOR_EVER).unwrap());
        backup.disk.take_over(Term(2)).unwrap();
        assert_eq!(backup.byte(0), 2, "what the VM here was told");
    }
}
