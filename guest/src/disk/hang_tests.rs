//! A disk, or a peer, that does not answer at all: the VM's loop, which marks and detaches, is never kept by it.

use super::tests::{Dir, Host, MIB, join, sync};
use super::*;
use bytes::Bytes;
use dunlin_core::disk::mirror::Frame;
use dunlin_core::waits::Wait;
use std::{fs, io, sync::mpsc::channel, thread, time::Instant};

const WAIT: Duration = Duration::from_secs(60);
/// Shorter than what a link waits for its peer here (`tests::attach`), which is what would keep a loop.
const COMES_BACK: Duration = Duration::from_secs(15);

/// Does what must not wait for a disk; says whether it came back in time. (Not scoped: what does not come back may stay.)
fn comes_back(work: impl FnOnce() + Send + 'static) -> bool {
    let (done, told) = channel();
    thread::spawn(move || {
        work();
        done.send(())
    });
    told.recv_timeout(COMES_BACK).is_ok()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        thread::yield_now();
    }
}

/// Two hosts whose maps have room for extents that nobody has noted, and are cleared at every commit.
fn pair(name: &str) -> (Dir, Host, Host) {
    let dir = Dir::new(name);
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, 64, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    let mut options = AttachOptions::default();
    options.tuning.clear_every = Duration::ZERO;
    join(&primary, &backup, options);
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    (dir, primary, backup)
}

#[test]
fn a_state_folder_that_hangs_keeps_neither_a_mark_nor_the_end_of_a_session() {
    let (_dir, primary, backup) = pair("state-hangs");
    primary.write(0, 1, 4096);
    primary.disk.faults().state_hang(true);
    // The first write to another 16 MiB: it waits until the map is durable.
    let disk = primary.disk.clone();
    let writes =
        thread::spawn(move || nbd::Export::write(&*disk, 32 * MIB, Bytes::from_static(&[2; 512]), false));
    until("the map's fdatasync hangs", || primary.disk.faults().held() == 1);
    sync(&primary, &backup, 2);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(2) });
    let shared = primary.disk.shared.clone();
    let cleared = comes_back(move || {
        until("the map is cleared in memory", || shared.dirty.all().is_empty());
    });
    let disk = primary.disk.clone();
    let marked = comes_back(move || disk.mark(Epoch(3)).unwrap());
    let disk = primary.disk.clone();
    let detached = comes_back(move || disk.detach_backup().unwrap());
    primary.disk.faults().state_hang(false);
    writes.join().unwrap().unwrap();
    assert!(
        cleared && marked && detached,
        "behind an fdatasync that hangs: cleared {cleared}, marked {marked}, detached {detached}"
    );
    // M1: what came back from the hang is noted, in the file as well.
    let noted = primary.disk.shared.dirty.all();
    assert!(noted.iter().any(|extent| extent == 32), "{noted:?}");
    let file = fs::read(primary.image.with_file_name("a/disk0.dirty")).unwrap();
    assert_ne!(file[4096 + 4] & 1, 0, "extent 32 is durable");
}

#[test]
fn a_write_to_what_is_noted_waits_for_nobody_elses_note() {
    let (_dir, primary, backup) = pair("noted-already");
    primary.write(0, 1, 4096);
    primary.disk.faults().state_hang(true);
    let disk = primary.disk.clone();
    let writes =
        thread::spawn(move || nbd::Export::write(&*disk, 32 * MIB, Bytes::from_static(&[2; 512]), false));
    until("the map's fdatasync hangs", || primary.disk.faults().held() == 1);
    let disk = primary.disk.clone();
    let written = comes_back(move || {
        nbd::Export::write(&*disk, MIB, Bytes::from_static(&[3; 512]), false).unwrap();
    });
    primary.disk.faults().state_hang(false);
    writes.join().unwrap().unwrap();
    assert!(written, "its extent was durable before");
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn an_image_that_hangs_keeps_no_mark_and_no_end_of_a_session() {
    let (_dir, primary, backup) = pair("image-hangs");
    primary.write(0, 1, 4096);
    primary.disk.faults().hang(true);
    let disk = primary.disk.clone();
    let writes = thread::spawn(move || nbd::Export::write(&*disk, MIB, Bytes::from_static(&[2; 512]), false));
    until("the write hangs", || primary.disk.faults().held() > 0);
    for epoch in 2..20 {
        let disk = primary.disk.clone();
        assert!(
            comes_back(move || disk.mark(Epoch(epoch)).unwrap()),
            "mark {epoch}"
        );
        assert!(backup.disk.wait_marked(Epoch(epoch), WAIT).unwrap());
        backup.disk.commit(Epoch(epoch)).unwrap();
    }
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(19) });
    let disk = primary.disk.clone();
    let detached = comes_back(move || disk.detach_backup().unwrap());
    primary.disk.faults().hang(false);
    writes.join().unwrap().unwrap();
    assert!(detached);
    assert_eq!(primary.disk.status().dirty_bytes, MIB, "the write that hung");
}

/// A host with a disk, and two peers: `mute` may greet at some time, and `backup` follows.
fn lonely(name: &str) -> (Dir, Host, Host) {
    let dir = Dir::new(name);
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, 8, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    (dir, primary, backup)
}

fn attach_failed(primary: &Host) -> String {
    match primary.wait(|event| matches!(event, DiskEvent::AttachFailed { .. })) {
        DiskEvent::AttachFailed { reason } => reason,
        other => unreachable!("{other:?}"),
    }
}

/// Takes the primary's greeting, and answers with it.
fn greets_late(peer: &mut UnixStream, hello: &[u8]) -> io::Result<()> {
    link::send_now(peer, Frame::Welcome, hello)
}

#[test]
fn a_peer_that_never_greets_is_given_up_and_the_next_join_is_taken() {
    let (_dir, primary, backup) = lonely("never-greets");
    let (left, mute) = UnixStream::pair().unwrap();
    let mut options = AttachOptions::default();
    assert_eq!(options.tuning.greeting, Wait::MirrorGreets.bound());
    options.tuning.greeting = Duration::from_millis(200);
    let stream = MirrorStream::from_unix(left).unwrap();
    primary.disk.attach_backup(stream, options).unwrap();
    let reason = attach_failed(&primary);
    assert!(
        reason.contains("waited 0.2 s in vain") && reason.contains("mirror-greets"),
        "{reason}"
    );
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    drop(mute);
}

#[test]
fn the_end_of_a_session_breaks_a_greeting_and_a_late_one_is_nobodys() {
    let (_dir, primary, backup) = lonely("greets-late");
    let (left, mut mute) = UnixStream::pair().unwrap();
    let stream = MirrorStream::from_unix(left).unwrap();
    primary
        .disk
        .attach_backup(stream, AttachOptions::default())
        .unwrap();
    let (_, hello) = link::receive(&mut mute).unwrap();
    primary.disk.detach_backup().unwrap();
    assert_eq!(attach_failed(&primary), "the backup was removed");
    assert!(
        greets_late(&mut mute, &hello).is_err() || link::receive(&mut mute).is_err(),
        "the stream is broken"
    );
    assert_eq!(primary.disk.status().role, "alone");
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
}

/// The greeting was in this host's hands when the session ended: nothing of the stream can break it any more.
#[test]
fn a_greeting_that_came_before_the_end_of_its_session_and_is_looked_at_after_it_counts_no_more() {
    let (_dir, primary, backup) = lonely("greets-between");
    let (left, mut peer) = UnixStream::pair().unwrap();
    let stream = MirrorStream {
        reader: Box::new(left.try_clone().unwrap()),
        writer: Box::new(left),
        shutdown: Box::new(|| {}),
    };
    primary
        .disk
        .attach_backup(stream, AttachOptions::default())
        .unwrap();
    let (_, hello) = link::receive(&mut peer).unwrap();
    primary.disk.detach_backup().unwrap();
    attach_failed(&primary);
    greets_late(&mut peer, &hello).unwrap();
    // It has been looked at when the stream ends.
    assert!(link::receive(&mut peer).is_err());
    assert_eq!(
        primary.disk.status().role,
        "alone",
        "a peer of a session that has ended"
    );
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
}

/// A write of the guest waits for a peer's disk as briefly as the guest can bear; a copy that took an hour so far has more time.
#[test]
fn a_backup_s_disk_that_stalls_for_longer_than_a_write_may_wait_ends_no_first_copy() {
    const MIBS: u64 = 160;
    // What is not to be taken for a stall has to end within it, on a busy machine too.
    const STALL: Duration = Duration::from_secs(2);
    let dir = Dir::new("copy-stalls");
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, MIBS, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    (0..MIBS).for_each(|extent| primary.write(extent * MIB, extent as u8 + 1, 4096));
    let mut options = AttachOptions {
        // Slow, so that it hangs long before its end.
        copy_bytes_per_s: 16 * MIB,
        ..AttachOptions::default()
    };
    options.tuning.queue_bytes = MIB;
    options.tuning.stall = STALL;
    super::tests::attach_as_it_is(&primary, &backup, options);
    // So far on that a fresh host is asked seldom: what fills the queue are pieces.
    primary
        .wait(|event| matches!(event, DiskEvent::CopyProgress { done_bytes, .. } if *done_bytes >= 72 * MIB));
    backup.disk.faults().hang(true);
    until("the copy hangs", || backup.disk.faults().held() > 0);
    thread::sleep(STALL * 3);
    backup.disk.faults().hang(false);
    let ended = primary.wait(|event| matches!(event, DiskEvent::Copied | DiskEvent::BackupLost { .. }));
    assert_eq!(ended, DiskEvent::Copied);
    backup.wait(|event| *event == DiskEvent::Copied);
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}
