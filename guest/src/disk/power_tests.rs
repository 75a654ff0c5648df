//! Both hosts lose power at once, at each point of a run of syncs, lightweight checkpoints and a take-over, in turn: a child process
//! plays it and is killed there, with half of what no flush had covered lost. Then the images are opened again.
//!
//! And a primary's host alone loses power: its backup takes over, it returns as the backup of that, gets what either host noted,
//! and has to be equal.

use super::tests::{Dir, Host, MIB, join, sync};
use super::*;
use std::{fs, io::Write, os::unix::process::ExitStatusExt, path::Path, process::Command, time::Instant};

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

const WAIT: Duration = Duration::from_secs(20);

/// One is on its way with the last sync when the other, whose disk is slow, has not begun with it: a UEFI's variables, which nobody writes to, beside
/// a disk under load.
#[test]
fn disks_of_which_one_is_a_sync_ahead_are_taken_over_together() {
    let dir = Dir::new("power-ahead");
    let (primary, backup) = (open(&dir.0, "a"), open(&dir.0, "b"));
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let until = Instant::now() + WAIT;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    };
    for (primary, backup) in primary.iter().zip(&backup) {
        primary.disk.start_alone(Term(1)).unwrap();
        join(primary, backup, AttachOptions::default());
        sync(primary, backup, 1);
        assert!(backup.disk.wait_settled(WAIT).unwrap());
    }
    // What both VMs have written alike is on its way to the second disk, and comes to no end.
    primary[1].write(0, 7, 4096);
    backup[1].write(0, 7, 4096);
    let slow = backup[1].disk.faults().clone();
    slow.hang(true);
    until("the lightweight checkpoint hangs", &|| {
        backup[1].disk.idle();
        slow.held() > 0
    });
    let steps = backup[0].disk.steps();
    primary[0].write(0, 8, 4096);
    for (primary, backup) in primary.iter().zip(&backup) {
        sync(primary, backup, 2);
    }
    until("the first disk has begun with the sync", &|| {
        backup[0].disk.steps() > steps
    });
    let disks: Vec<_> = backup.iter().map(|host| host.disk.clone()).collect();
    let (done, told) = std::sync::mpsc::channel();
    // Not scoped: what does not come back may stay.
    std::thread::spawn(move || done.send(take_over_all(&disks, Term(2))));
    // The second disk's thread has been told to end: it does not begin with the sync any more.
    primary[1].wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    slow.hang(false);
    let taken_over = told.recv_timeout(WAIT);
    assert!(matches!(taken_over, Ok(Ok(()))), "{taken_over:?}");
    let of = |host: &Host| (host.disk.status().generation, host.image_byte(0));
    let (generation, first) = of(&backup[0]);
    assert_eq!((generation.epoch, first), (Epoch(2), 8));
    assert_eq!(of(&backup[1]), (generation, 7));
}

/// A primary and its backup, whose map is cleared at every commit; the power of the primary's host will fail.
struct Pair {
    dir: Dir,
    primary: Host,
    backup: Host,
}

impl Pair {
    fn open(dir: &Dir, host: &str) -> Host {
        Host::open(&dir.0, host, 8, Storage::Gannet, Limits::default())
    }

    /// The join's commit is told. `before`: what was written when there was no backup yet.
    fn new(name: &str, before: &[(u64, u8)]) -> Self {
        let dir = Dir::new(name);
        let (primary, backup) = (Self::open(&dir, "a"), Self::open(&dir, "b"));
        power::watch(&primary.image);
        primary.disk.start_alone(Term(1)).unwrap();
        for (offset, byte) in before {
            primary.write(*offset, *byte, 4096);
        }
        let mut options = AttachOptions::default();
        options.tuning.clear_every = Duration::ZERO;
        join(&primary, &backup, options);
        sync(&primary, &backup, 1);
        primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
        Self { dir, primary, backup }
    }

    /// The map has no more notes.
    fn wait_cleared(&self) {
        let until = Instant::now() + WAIT;
        while !self.primary.disk.shared.dirty.all().is_empty() {
            assert!(Instant::now() < until, "the map is cleared");
            std::thread::yield_now();
        }
    }

    /// The power fails, the backup takes over and writes on, the old primary returns as its backup, and takes over in turn.
    /// Returns how many writes had not been covered by a flush.
    fn fail_and_return(self, loses: impl FnMut() -> bool) -> usize {
        let Self { dir, primary, backup } = self;
        let image = primary.image.clone();
        primary.end();
        let unsafe_yet = power::fail(&image, loses);
        backup.disk.take_over(Term(2)).unwrap();
        backup.write(6 * MIB, 99, 4096);
        let returned = Self::open(&dir, "a");
        let (left, right) = UnixStream::pair().unwrap();
        let stream = |end| MirrorStream::from_unix(end).unwrap();
        returned.disk.start_backup(stream(right)).unwrap();
        let options = AttachOptions::default();
        backup.disk.attach_backup(stream(left), options).unwrap();
        let started = backup.wait(|event| matches!(event, DiskEvent::CopyStarted { .. }));
        assert!(
            matches!(started, DiskEvent::CopyStarted { whole: false, .. }),
            "{started:?}"
        );
        backup.wait(|event| *event == DiskEvent::Copied);
        sync(&backup, &returned, 1_000);
        assert!(returned.disk.wait_settled(WAIT).unwrap());
        assert_eq!(
            backup
                .disk
                .verify(VerifyOptions::default(), |_, _| ControlFlow::Continue(()))
                .unwrap()
                .different,
            [],
            "stale, and nobody knows"
        );
        let newest = fs::read(&backup.image).unwrap();
        drop(backup);
        returned.disk.take_over(Term(3)).unwrap();
        assert!(
            fs::read(&returned.image).unwrap() == newest,
            "after the second take-over"
        );
        unsafe_yet
    }
}

#[test]
fn what_a_primary_lost_with_its_power_is_copied_when_it_returns() {
    let pair = Pair::new("power-cleared", &[]);
    pair.primary.write(2 * MIB, 7, 4096);
    sync(&pair.primary, &pair.backup, 2);
    pair.wait_cleared();
    pair.fail_and_return(|| true);
}

#[test]
fn what_a_primary_wrote_before_it_had_a_backup_is_durable_when_the_pair_is_made() {
    let pair = Pair::new("power-before", &[(3 * MIB, 5), (MIB, 6)]);
    assert_eq!(pair.fail_and_return(|| true), 0, "the name of the pair says so");
}

/// Writes, flushes, syncs and the clearing of the map beside them, at random; half of what no flush covered is lost.
#[test]
fn a_primary_that_loses_power_at_any_moment_is_equal_after_its_return() {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let chosen = std::env::var("DUNLIN_POWER_SEED")
        .ok()
        .map(|text| text.parse().unwrap());
    let first: u64 = chosen.unwrap_or_else(|| clock.unwrap().as_nanos() as u64);
    // Past the harness, which shows what a test prints only when it fails.
    writeln!(
        std::io::stderr(),
        "20 power losses of primaries, DUNLIN_POWER_SEED={first}"
    )
    .unwrap();
    let mut unsafe_yet = 0;
    for round in 0..20 {
        let mut state = first.wrapping_add(round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let pair = Pair::new(&format!("power-any-{round}"), &[(random(2000) << 12, 1)]);
        for epoch in 2..2 + random(6) {
            for _ in 0..random(6) {
                let (offset, byte) = (random(2047) << 12, random(256) as u8);
                match random(8) {
                    0 => nbd::Export::flush(&*pair.primary.disk).unwrap(),
                    1 => nbd::Export::zero(&*pair.primary.disk, offset, 4096, random(2) == 0, false).unwrap(),
                    _ => pair.primary.write(offset, byte, 4096),
                }
            }
            sync(&pair.primary, &pair.backup, epoch);
            // Beside the commit and the clearing.
            for _ in 0..random(4) {
                pair.primary.write(random(2047) << 12, random(256) as u8, 4096);
            }
            if random(3) == 0 {
                pair.primary
                    .wait(|event| *event == DiskEvent::Committed { epoch: Epoch(epoch) });
            }
        }
        unsafe_yet += pair.fail_and_return(|| random(2) == 0);
    }
    assert!(unsafe_yet > 0, "there was nothing to lose");
}
