//! A peer that has most of a disk already is sent the rest, whatever the VM writes meanwhile.

use super::{
    link::{receive, send_now},
    nbd::Export,
    tests::{Dir, Host, MIB, join, sync},
    *,
};
use dunlin_core::disk::mirror::Frame;
use std::{
    fs,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

const MIBS: u64 = 40;
const WAIT: Duration = Duration::from_secs(20);

/// A primary, and a host that was given its image and has never been its peer. Every extent is different from all others.
pub(super) fn seeded(name: &str) -> (Dir, Host, Host) {
    let dir = Dir::new(name);
    let open = |name: &str| Host::open(&dir.0, name, MIBS, Storage::Gannet, Limits::default());
    let primary = open("a");
    primary.disk.start_alone(Term(1)).unwrap();
    for extent in 0..MIBS {
        primary.write(extent * MIB + 17, extent as u8 + 1, 4096);
    }
    primary.disk.flush().unwrap();
    fs::copy(&primary.image, dir.0.join("b.img")).unwrap();
    let peer = open("b");
    (dir, primary, peer)
}

pub(super) fn equal(primary: &Host, peer: &Host) {
    sync(primary, peer, 1);
    assert!(peer.disk.wait_settled(WAIT).unwrap());
    assert!(
        fs::read(&primary.image).unwrap() == fs::read(&peer.image).unwrap(),
        "equal after the join"
    );
}

/// What the copy to `peer` did not send.
fn alike(primary: &Host) -> u64 {
    let events = primary.events.lock();
    let alike = events.try_iter().filter_map(|event| match event {
        DiskEvent::Alike { bytes } => Some(bytes),
        _ => None,
    });
    alike.sum()
}

/// [`join`], but the events that came before the end stay to be looked at.
fn join_quietly(primary: &Host, peer: &Host) {
    let (left, right) = UnixStream::pair().unwrap();
    peer.disk
        .start_backup(MirrorStream::from_unix(right).unwrap())
        .unwrap();
    let stream = MirrorStream::from_unix(left).unwrap();
    primary
        .disk
        .attach_backup(stream, AttachOptions::default())
        .unwrap();
    peer.wait(|event| *event == DiskEvent::Copied);
}

#[test]
fn a_host_that_was_given_the_image_is_sent_what_differs() {
    let (_dir, primary, peer) = seeded("seeded");
    // What has changed since, on one side or the other.
    primary.write(3 * MIB, 99, 512);
    primary.disk.zero(7 * MIB, MIB, true, false).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(&peer.image)
        .map(|file| std::os::unix::fs::FileExt::write_all_at(&file, &[5; 512], 20 * MIB))
        .unwrap()
        .unwrap();
    join_quietly(&primary, &peer);
    primary.wait(|event| {
        *event
            == DiskEvent::Alike {
                bytes: (MIBS - 3) * MIB,
            }
    });
    equal(&primary, &peer);
}

#[test]
fn a_fresh_host_is_sent_everything() {
    let (dir, primary, _given) = seeded("fresh");
    let peer = Host::open(&dir.0, "c", MIBS, Storage::Gannet, Limits::default());
    join_quietly(&primary, &peer);
    assert_eq!(alike(&primary), 0);
    equal(&primary, &peer);
}

/// The two ends of a stream, what is asked on it, and what lets the answers pass.
fn held_answers() -> (MirrorStream, MirrorStream, Receiver<u64>, Sender<()>) {
    let (ours, near) = UnixStream::pair().unwrap();
    let (far, theirs) = UnixStream::pair().unwrap();
    let (may_pass, passes) = channel::<()>();
    let (tell, asked) = channel();
    let forward = |mut from: UnixStream, mut to: UnixStream, mut look: Box<dyn FnMut(Frame) + Send>| {
        thread::spawn(move || {
            while let Ok((frame, payload)) = receive(&mut from) {
                look(frame);
                if send_now(&mut to, frame, &payload).is_err() {
                    return;
                }
            }
        });
    };
    let question = move |frame| {
        if let Frame::AskHash { offset, .. } = frame {
            let _ = tell.send(offset);
        }
    };
    let answer = move |frame| {
        if matches!(frame, Frame::Hash { .. }) {
            // Its end lets all others pass.
            let _ = passes.recv();
        }
    };
    forward(
        near.try_clone().unwrap(),
        far.try_clone().unwrap(),
        Box::new(question),
    );
    forward(far, near, Box::new(answer));
    let stream = |stream| MirrorStream::from_unix(stream).unwrap();
    (stream(ours), stream(theirs), asked, may_pass)
}

#[test]
fn what_is_written_between_the_question_and_the_answer_is_sent() {
    let (_dir, primary, peer) = seeded("between");
    let (ours, theirs, asked, may_pass) = held_answers();
    peer.disk.start_backup(theirs).unwrap();
    primary
        .disk
        .attach_backup(ours, AttachOptions::default())
        .unwrap();
    // The copier waits for the peer, which says that it has them all.
    let asked: Vec<u64> = (0..8).map(|_| asked.recv_timeout(WAIT).unwrap()).collect();
    primary.write(asked[0] + 4096, 200, 512);
    primary.disk.zero(asked[1], 4096, false, false).unwrap();
    // Over the edge: of both extents.
    primary.write(asked[2] + MIB - 256, 201, 512);
    drop(may_pass);
    primary.wait(|event| {
        *event
            == DiskEvent::Alike {
                bytes: (MIBS - 4) * MIB,
            }
    });
    peer.wait(|event| *event == DiskEvent::Copied);
    equal(&primary, &peer);
}

#[test]
fn a_peer_that_says_more_than_it_was_asked_is_let_go() {
    let (_dir, primary, _given) = seeded("talkative");
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = MirrorStream::from_unix(ours).unwrap();
    primary
        .disk
        .attach_backup(stream, AttachOptions::default())
        .unwrap();
    let (_, hello) = receive(&mut theirs).unwrap();
    send_now(&mut theirs, Frame::Welcome, &hello).unwrap();
    // It says a hash for each question and a hundred beside, as long as it is heard.
    while let Ok((frame, _)) = receive(&mut theirs) {
        let Frame::AskHash { offset, len } = frame else {
            continue;
        };
        let mut say = |hash: &[u8]| send_now(&mut theirs, Frame::Hash { offset, len }, hash);
        if (0..100).try_for_each(|_| say(b"short")).is_err() {
            break;
        }
    }
    let DiskEvent::BackupLost { reason } =
        primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }))
    else {
        unreachable!()
    };
    assert_eq!(reason, "the backup's disk says more than it was asked");
    primary.write(0, 1, 4096);
}

#[test]
fn a_storm_of_writes_during_a_copy_to_a_given_image_leaves_both_equal() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let (_dir, primary, peer) = seeded("storm-alike");
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for writer in 0..3u64 {
            let (primary, stop) = (&primary, &stop);
            scope.spawn(move || {
                let mut random = seed ^ (writer + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = (random >> 20) % (MIBS * MIB - 8192);
                    match random >> 61 {
                        0 => primary.disk.zero(at, 8192, random & 1 == 0, false).unwrap(),
                        _ => primary.write(at, random as u8, 4096),
                    }
                }
            });
        }
        join(&primary, &peer, AttachOptions::default());
        stop.store(true, Ordering::Relaxed);
    });
    equal(&primary, &peer);
}
