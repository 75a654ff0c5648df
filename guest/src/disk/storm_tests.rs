//! Both VMs write from several threads while syncs, idle passes and fail-overs happen: the same promises as the pure model,
//! with real threads, files and sockets. `DUNLIN_DISK_STORM_MS` sets how long each storage is tried.

use super::tests::{Dir, Host, MIB, join, sync};
use super::*;
use std::{fs, sync::atomic::AtomicBool, thread, time::Instant};

const MIBS: u64 = 4;
const WRITERS: u64 = 3;

/// What a VM was told, and whether it runs. A writer holds it shared for each write, a pause exclusively.
struct Vm {
    runs: RwLock<()>,
    told: Vec<Mutex<Vec<u8>>>,
}

impl Vm {
    fn new() -> Self {
        let region = (MIBS * MIB / WRITERS) as usize;
        Self {
            runs: RwLock::new(()),
            told: (0..WRITERS).map(|_| Mutex::new(vec![0; region])).collect(),
        }
    }

    fn run(&self) -> parking_lot::RwLockReadGuard<'_, ()> {
        self.runs.read()
    }

    fn region_start(writer: u64) -> u64 {
        writer * (MIBS * MIB / WRITERS)
    }

    fn check(&self, host: &Host, what: &str) {
        for writer in 0..WRITERS {
            let told = self.told[writer as usize].lock();
            let mut read = vec![0; told.len()];
            nbd::Export::read(&*host.disk, Self::region_start(writer), &mut read).unwrap();
            let differs = read.iter().zip(&*told).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{what}: writer {writer}");
        }
    }

    fn becomes(&self, other: &Self) {
        for (ours, theirs) in self.told.iter().zip(&other.told) {
            ours.lock().clone_from(&theirs.lock());
        }
    }
}

/// One thread of a VM: both VMs run the same program, so mostly they write the same.
fn writer(host: &Host, vm: &Vm, number: u64, own: u64, stop: &AtomicBool) {
    let mut word = number + 1;
    while !stop.load(Ordering::Acquire) {
        let _runs = vm.run();
        word = word
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let differs = (word >> 50).is_multiple_of(5);
        let byte = ((word >> 40) % 250) as u8 + if differs { own as u8 } else { 0 };
        let mut told = vm.told[number as usize].lock();
        let len = ((word >> 30) % 9000 + 1).min(told.len() as u64);
        let at = (word >> 10) % (told.len() as u64 - len + 1);
        let start = Vm::region_start(number) + at;
        if word.is_multiple_of(16) {
            nbd::Export::zero(&*host.disk, start, len, true, false).unwrap();
            told[at as usize..(at + len) as usize].fill(0);
        } else {
            host.write(start, byte, len as usize);
            told[at as usize..(at + len) as usize].fill(byte);
        }
        if word % 64 == 1 {
            nbd::Export::flush(&*host.disk).unwrap();
        }
        let mut read = vec![0; len as usize];
        nbd::Export::read(&*host.disk, start, &mut read).unwrap();
        assert!(
            read == told[at as usize..(at + len) as usize],
            "a VM reads its own write"
        );
    }
}

fn storm(storage: Storage) {
    let millis = std::env::var("DUNLIN_DISK_STORM_MS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(500);
    let dir = Dir::new(&format!("storm-{storage:?}"));
    let mut names = ["a", "b"];
    let mut hosts = names.map(|name| Host::open(&dir.0, name, MIBS, storage, Limits::default()));
    hosts[0].disk.start_alone(Term(1)).unwrap();
    let (mut epoch, mut term, mut settled) = (0, 1, 0);
    let told = Vm::new();
    for round in 0..4 {
        let [primary, backup] = &hosts;
        let vms = [Vm::new(), Vm::new()];
        vms[0].becomes(&told);
        join(primary, backup, AttachOptions::default());
        epoch += 1;
        sync(primary, backup, epoch);
        vms[1].becomes(&vms[0]);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for number in 0..WRITERS {
                let (vms, stop) = (&vms, &stop);
                scope.spawn(move || writer(primary, &vms[0], number, 1, stop));
                scope.spawn(move || writer(backup, &vms[1], number, 2, stop));
            }
            let until = Instant::now() + Duration::from_millis(millis / 4);
            // Between two syncs of a busy machine no idle pass may have its turn: the last round goes on until one has had it.
            let last = until + Duration::from_secs(60);
            let lacks = || {
                let has = settled + backup.disk.status().backup.counters.settled_bytes;
                storage == Storage::Gannet && round == 3 && has == 0
            };
            while Instant::now() < until || lacks() && Instant::now() < last {
                thread::sleep(Duration::from_millis(3));
                backup.disk.idle();
                if epoch % 3 == 0 {
                    thread::sleep(Duration::from_millis(5));
                }
                let pause = Instant::now() + Duration::from_millis(100);
                while Instant::now() >= until && lacks() && Instant::now() < pause {
                    // What is committed comes first on the way to the image.
                    backup.disk.wait_settled(Duration::from_millis(100)).unwrap();
                    backup.disk.idle();
                    thread::sleep(Duration::from_millis(3));
                }
                epoch += 1;
                let backup_pauses = vms[1].runs.write();
                let primary_pauses = vms[0].runs.write();
                primary.disk.mark(Epoch(epoch)).unwrap();
                vms[1].becomes(&vms[0]);
                drop(primary_pauses);
                assert!(
                    backup
                        .disk
                        .wait_marked(Epoch(epoch), Duration::from_secs(10))
                        .unwrap()
                );
                backup.disk.commit(Epoch(epoch)).unwrap();
                vms[1].check(backup, "after a sync");
                drop(backup_pauses);
            }
            stop.store(true, Ordering::Release);
        });
        settled += backup.disk.status().backup.counters.settled_bytes;
        vms[0].check(primary, "the primary");
        assert_eq!(
            primary
                .disk
                .verify(VerifyOptions::default(), |_, _| ControlFlow::Continue(()))
                .unwrap()
                .different,
            [],
            "round {round}"
        );
        primary.disk.reset();
        term += 1;
        backup.disk.take_over(Term(term)).unwrap();
        vms[1].check(backup, "after the fail-over");
        let image = fs::read(&backup.image).unwrap();
        for number in 0..WRITERS {
            let start = Vm::region_start(number) as usize;
            let told = vms[1].told[number as usize].lock();
            assert!(
                image[start..start + told.len()] == told[..],
                "D4, on the image itself"
            );
        }
        told.becomes(&vms[1]);
        names.reverse();
        hosts.reverse();
    }
    assert!(
        storage != Storage::Gannet || settled > 0,
        "the idle pass settled nothing"
    );
}

#[test]
fn gannet_weathers_a_storm() {
    storm(Storage::Gannet);
}

#[test]
fn colo_weathers_a_storm() {
    storm(Storage::Colo);
}

#[test]
fn synchronous_mirroring_weathers_a_storm() {
    storm(Storage::Sync);
}
