//! A real limit of the system (RLIMIT_FSIZE, which fails writes as a full disk does) instead of our own. One test: the limit
//! is the whole process's.

use dunlin_core::consensus::{Durability, Member};
use dunlin_core::units::ReplicaId;
use dunlin_fabric::group::{Group, GroupConfig, GroupEvent};
use std::time::{Duration, Instant};

fn limit(bytes: libc::rlim_t) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: plain calls; the limit lives across them. The signal would kill instead of failing the write.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}

#[test]
fn a_full_disk_stops_the_acknowledgement_not_the_process() {
    let dir = std::env::temp_dir().join(format!("dunlin-full-{}", std::process::id()));
    let mut cfg = GroupConfig::new(&dir, ReplicaId(0), vec![Member::full(0)], Durability::Disk);
    cfg.disk.segment_bytes = 1 << 20;
    let mut group = Group::open(cfg).unwrap();
    let start = Instant::now();
    let (mut full, mut room, mut committed) = (false, false, 0);
    let turn = |group: &mut Group, full: &mut bool, room: &mut bool, committed: &mut u64| {
        while let Some(event) = group.poll(start.elapsed().as_micros() as u64) {
            match event {
                GroupEvent::Committed { through } => *committed = through.0,
                GroupEvent::DiskFull(why) => {
                    assert!(why.contains("no space left"), "{why}");
                    *full = true;
                }
                GroupEvent::DiskRoom => *room = true,
                GroupEvent::DiskFailed(why) => panic!("{why}"),
                _ => {}
            }
        }
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::yield_now();
    };
    while committed == 0 {
        turn(&mut group, &mut full, &mut room, &mut committed);
    }
    limit(512 << 10); // no new segment fits
    let mut proposed = 0u64;
    while !full {
        proposed += u64::from(group.propose(vec![1; 20_000].into()).is_ok());
        turn(&mut group, &mut full, &mut room, &mut committed);
    }
    let before = committed;
    for _ in 0..1000 {
        turn(&mut group, &mut full, &mut room, &mut committed);
    }
    assert!(
        group.is_leader() && group.committed().0 < proposed + 1,
        "it lives, and acknowledges nothing more"
    );
    assert!(committed <= before + 1);
    limit(libc::RLIM_INFINITY);
    while !(room && committed == proposed + 1) {
        turn(&mut group, &mut full, &mut room, &mut committed);
    }
    drop(group);
    let _ = std::fs::remove_dir_all(&dir);
}
