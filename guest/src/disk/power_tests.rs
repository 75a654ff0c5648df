//! Both hosts lose power at once, at each point of a run of syncs, lightweight checkpoints and a take-over, in turn: a child process
//! plays it and is killed there, with half of what no flush had covered lost. Then the images are opened again.

use super::tests::{Dir, Host, MIB};
use super::*;
use std::{os::unix::process::ExitStatusExt, path::Path, process::Command};

const SYNCS: u64 = 4;
const DISKS: usize = 2;
const CHILD: &str = "DUNLIN_POWER_CHILD";

fn open(dir: &Path, host: &str) -> Vec<Host> {
    let group = DiskGroup::open(&dir.join(format!("{host}.mark")), DISKS).unwrap();
    (0..DISKS)
        .map(|number| {
            let image = dir.join(format!("{host}{number}.img"));
            if !image.exists() {
                std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
            }
            Host::of(DiskConfig {
                name: "disk".into(),
                image,
                format: DiskFormat::Raw,
                state_dir: dir.join(format!("{host}{number}")),
                read_only: false,
                storage: Storage::Gannet,
                limits: Limits::default(),
                group: Some(Member {
                    group: group.clone(),
                    number,
                }),
            })
        })
        .collect()
}

/// What the primary's VM writes to a disk before sync `epoch`: (offset, byte). The backup's VM writes the first two alike.
fn writes(disk: usize, epoch: u64) -> [(u64, u8); 4] {
    let byte = (epoch * 2 + disk as u64) as u8;
    [
        (0, byte),
        (64 << 10, byte),
        (epoch << 12, byte),
        ((epoch << 12) + (512 << 10), byte),
    ]
}

const OWN: [(u64, u8); 2] = [(0, 200), (700 << 10, 201)];

/// The disk after `epoch` syncs, of which the first one is the join's and changes nothing; with the backup VM's own writes on top after a take-over.
fn expected(disk: usize, epoch: u64, taken_over: bool) -> Vec<u8> {
    let mut image = vec![0; MIB as usize];
    let all = (2..=epoch).flat_map(|epoch| writes(disk, epoch));
    for (offset, byte) in all.chain(OWN.into_iter().filter(|_| taken_over)) {
        image[offset as usize..offset as usize + 4096].fill(byte);
    }
    image
}

/// The whole story, in the child. `joined` is made when the pair is whole: before that nothing is promised.
fn play(dir: &Path) {
    let (primary, backup) = (open(dir, "a"), open(dir, "b"));
    let wait = Duration::from_secs(20);
    let sync = |epoch: u64| {
        primary
            .iter()
            .for_each(|host| host.disk.mark(Epoch(epoch)).unwrap());
        for host in &backup {
            assert!(host.disk.wait_marked(Epoch(epoch), wait).unwrap());
        }
        backup
            .iter()
            .for_each(|host| host.disk.commit(Epoch(epoch)).unwrap());
    };
    for (primary, backup) in primary.iter().zip(&backup) {
        primary.disk.start_alone(Term(1)).unwrap();
        super::tests::join(primary, backup, AttachOptions::default());
    }
    sync(1);
    backup
        .iter()
        .for_each(|host| assert!(host.disk.wait_settled(wait).unwrap()));
    std::fs::write(dir.join("joined"), b"").unwrap();
    let at = std::env::var("DUNLIN_POWER_AT").unwrap().parse().unwrap();
    power::arm(at, at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for epoch in 2..=SYNCS {
        for (disk, (primary, backup)) in primary.iter().zip(&backup).enumerate() {
            let list = writes(disk, epoch);
            for (offset, byte) in list {
                primary.write(offset, byte, 4096);
            }
            for (offset, byte) in &list[..2] {
                backup.write(*offset, *byte, 4096);
            }
            let until = std::time::Instant::now() + wait;
            // The lightweight checkpoint: asked for again until the mirrored writes are there to be compared.
            while backup.disk.status().backup.counters.settled_bytes < (epoch - 1) * 8192 {
                backup.disk.idle();
                std::thread::yield_now();
                assert!(std::time::Instant::now() < until, "equal writes are settled");
            }
        }
        sync(epoch);
        if epoch % 2 == 0 {
            backup
                .iter()
                .for_each(|host| assert!(host.disk.wait_settled(wait).unwrap()));
        }
    }
    for host in &backup {
        OWN.iter()
            .for_each(|(offset, byte)| host.write(*offset, *byte, 4096));
    }
    let disks: Vec<_> = backup.iter().map(|host| host.disk.clone()).collect();
    take_over_all(&disks, Term(2)).unwrap();
}

#[test]
fn child_of_the_test_below() {
    if let Some(dir) = std::env::var_os(CHILD) {
        play(Path::new(&dir));
    }
}

#[test]
fn a_power_loss_of_everything_at_any_point_leaves_all_disks_at_one_and_the_same_sync() {
    let (mut points, mut seen) = (0, std::collections::BTreeSet::new());
    for at in 1.. {
        assert!(at < 2000, "the story never ends");
        let dir = Dir::new(&format!("power-{at}"));
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "disk::power_tests::child_of_the_test_below"])
            .env(CHILD, &dir.0)
            .env("DUNLIN_POWER_AT", at.to_string())
            .output()
            .unwrap();
        let survived = output.status.success();
        let words = String::from_utf8_lossy(&output.stdout);
        assert!(
            survived || output.status.signal() == Some(9),
            "point {at}: {words}"
        );
        assert!(dir.0.join("joined").exists(), "the pair was whole");
        let (primary, backup) = (open(&dir.0, "a"), open(&dir.0, "b"));
        let newest = |hosts: &[Host]| {
            hosts
                .iter()
                .map(|host| host.disk.status().generation)
                .collect::<Vec<_>>()
        };
        let generations = newest(&backup);
        assert!(
            primary
                .iter()
                .chain(&backup)
                .all(|host| host.disk.status().consistent),
            "point {at}: all images are whole"
        );
        // The marks of one moment: a disk on which a sync changed nothing may tell an older epoch, but not another role.
        assert_eq!(
            generations[0].primary, generations[1].primary,
            "point {at}: {generations:?}"
        );
        let taken_over = generations[0].primary;
        let images: Vec<_> = backup
            .iter()
            .map(|host| std::fs::read(&host.image).unwrap())
            .collect();
        let moment = (1..=SYNCS)
            .rev()
            .find(|epoch| (0..DISKS).all(|disk| images[disk] == expected(disk, *epoch, taken_over)));
        let Some(moment) = moment else {
            let each: Vec<Vec<u64>> = (0..DISKS)
                .map(|disk| {
                    (1..=SYNCS)
                        .filter(|epoch| images[disk] == expected(disk, *epoch, taken_over))
                        .collect()
                })
                .collect();
            panic!("point {at}: the disks are of different moments: {each:?}, {generations:?}");
        };
        assert!(
            !taken_over || moment == SYNCS,
            "point {at}: a take-over is of the last sync"
        );
        assert_eq!(
            newest(&primary).iter().min() > generations.iter().max(),
            !taken_over,
            "point {at}: which host has the newest image is told"
        );
        seen.insert((moment, taken_over));
        points = at;
        if survived {
            break;
        }
    }
    println!("{points} points; found at {seen:?}");
    assert!(points > 30, "only {points} points");
    assert!(
        seen.len() as u64 > SYNCS - 1 && seen.contains(&(SYNCS, true)),
        "{seen:?}"
    );
}
