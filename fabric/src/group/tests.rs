use super::*;
use crate::log::Mode;
use crate::log::tests::Scratch;
use crate::wait::WaitPolicy;
use dunlin_core::consensus::{EntryKind, Snapshot};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

mod durability;
mod protocol;
mod waiting;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fabric {
    Shm,
    Tcp,
}

const BOTH: [Fabric; 2] = [Fabric::Shm, Fabric::Tcp];

fn pair(fabric: Fabric) -> (Stream, Stream) {
    match fabric {
        Fabric::Shm => Stream::pair().unwrap(),
        Fabric::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let b = listener.accept().unwrap().0;
            a.set_nodelay(true).unwrap();
            b.set_nodelay(true).unwrap();
            (Stream::unprotected(a, "peer"), Stream::unprotected(b, "peer"))
        }
    }
}

/// Three replicas in one thread, and what each has applied.
struct Cluster {
    dir: Scratch,
    fabric: Fabric,
    durability: Durability,
    groups: Vec<Option<Group>>,
    applied: Vec<Vec<(u64, Bytes)>>,
    snapshots: Vec<Option<Snapshot>>,
    lost: Vec<(u8, u8)>,
    other: Vec<(u8, String)>,
    start: Instant,
    ring_bytes: usize,
    limit_bytes: Option<u64>,
    log_bytes: Option<usize>,
    /// Where a test keeps the time itself: so many microseconds since the start, and as many more with each round.
    kept_us: Option<u64>,
}

/// The shortest election time-out in these tests.
const ELECTION_MIN_US: u64 = 100_000;
/// How far a kept clock moves in a round.
const ROUND_US: u64 = 100;

impl Cluster {
    fn new(fabric: Fabric, durability: Durability) -> Self {
        Self::with(fabric, durability, 256 << 10)
    }

    /// Time passes only in rounds, and disks answer at once: that a machine is busy is no time-out.
    fn with_kept_time(fabric: Fabric) -> Self {
        Self::begin(fabric, Durability::Memory, 256 << 10, Some(0))
    }

    fn with(fabric: Fabric, durability: Durability, ring_bytes: usize) -> Self {
        Self::begin(fabric, durability, ring_bytes, None)
    }

    fn begin(fabric: Fabric, durability: Durability, ring_bytes: usize, kept_us: Option<u64>) -> Self {
        let mut this = Self {
            dir: Scratch::new("group"),
            fabric,
            durability,
            groups: (0..3).map(|_| None).collect(),
            applied: vec![Vec::new(); 3],
            snapshots: vec![None; 3],
            lost: Vec::new(),
            other: Vec::new(),
            start: Instant::now(),
            ring_bytes,
            limit_bytes: None,
            log_bytes: None,
            kept_us,
        };
        (0..3).for_each(|id| this.start(id));
        this
    }

    fn start(&mut self, id: u8) {
        let members = (0..3).map(Member::full).collect();
        let mut cfg = GroupConfig::new(
            self.dir.path().join(id.to_string()),
            ReplicaId(id),
            members,
            self.durability,
        );
        cfg.ring_bytes = self.ring_bytes;
        if self.kept_us.is_some() {
            cfg.disk_mode = Mode::Inline;
        }
        cfg.disk.segment_bytes = 1 << 20;
        cfg.disk.limit_bytes = self.limit_bytes.filter(|_| id == 2);
        cfg.core.ring_bytes = self.log_bytes.unwrap_or(cfg.core.ring_bytes);
        // Three replicas share a thread with a test runner's others: be patient.
        (
            cfg.core.heartbeat_us,
            cfg.core.election_min_us,
            cfg.core.election_max_us,
        ) = (10_000, ELECTION_MIN_US, 2 * ELECTION_MIN_US);
        let group = Group::open(cfg).unwrap();
        let snapshot = group.snapshot();
        self.applied[id as usize].clear();
        self.snapshots[id as usize] = (snapshot.last.index.0 > 0).then_some(snapshot);
        self.groups[id as usize] = Some(group);
        (0..3)
            .filter(|other| *other != id)
            .for_each(|other| self.connect(id, other));
    }

    fn connect(&mut self, a: u8, b: u8) {
        let (x, y) = pair(self.fabric);
        if self.groups[a as usize].is_some() && self.groups[b as usize].is_some() {
            self.groups[a as usize]
                .as_mut()
                .unwrap()
                .add_link(ReplicaId(b), x)
                .unwrap();
            self.groups[b as usize]
                .as_mut()
                .unwrap()
                .add_link(ReplicaId(a), y)
                .unwrap();
        }
    }

    fn kill(&mut self, id: u8) {
        self.groups[id as usize] = None;
    }

    fn group(&mut self, id: u8) -> &mut Group {
        self.groups[id as usize].as_mut().unwrap()
    }

    fn now_us(&self) -> u64 {
        self.kept_us
            .unwrap_or_else(|| self.start.elapsed().as_micros() as u64)
    }

    fn round(&mut self) {
        if let Some(us) = &mut self.kept_us {
            *us += ROUND_US;
        }
        for id in 0..3u8 {
            let now = self.now_us();
            let Some(group) = self.groups[id as usize].as_mut() else {
                continue;
            };
            while let Some(event) = group.poll(now) {
                match event {
                    GroupEvent::Committed { through } => {
                        let log = &mut self.applied[id as usize];
                        let base = self.snapshots[id as usize].as_ref().map_or(0, |s| s.last.index.0);
                        for index in base + log.len() as u64 + 1..=through.0 {
                            let entry = group.entry(Index(index)).expect("agreed entries are held");
                            let data = if entry.kind == EntryKind::Data {
                                entry.payload.clone()
                            } else {
                                Bytes::new()
                            };
                            log.push((index, data));
                        }
                        group.applied(through);
                    }
                    GroupEvent::SnapshotInstalled(snapshot) => {
                        group.applied(snapshot.last.index);
                        self.applied[id as usize].clear();
                        self.snapshots[id as usize] = Some(snapshot);
                    }
                    GroupEvent::LinkLost { peer, .. } => self.lost.push((id, peer.0)),
                    GroupEvent::ProtocolViolation { what, .. } => panic!("{id}: violation: {what}"),
                    GroupEvent::DiskFull(why) => self.other.push((id, why)),
                    GroupEvent::DiskRoom => self.other.push((id, "room".into())),
                    GroupEvent::DiskFailed(why) => panic!("{id}: {why}"),
                    _ => {}
                }
            }
        }
        std::thread::yield_now();
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !done(self) {
            self.round();
            if started.elapsed().as_secs() > 60 {
                for group in self.groups.iter().flatten() {
                    eprintln!(
                        "{:?} {:?} committed {:?} appended {:?} {:?}",
                        group.role(),
                        group.term(),
                        group.committed(),
                        group.core().appended(),
                        group.links()
                    );
                }
                panic!("{:?} {:?}: {what}: not in time", self.fabric, self.durability);
            }
        }
    }

    fn leader(&mut self) -> u8 {
        let mut leader = None;
        self.until("a leader is known to all that run", |c| {
            let running = c.groups.iter().flatten();
            let leaders: Vec<_> = running.map(Group::leader).collect();
            leader = leaders[0].map(|l| l.0);
            leader.is_some_and(|l| c.groups[l as usize].is_some()) && leaders.iter().all(|l| *l == leaders[0])
        });
        leader.unwrap()
    }

    /// Proposes until one leader has taken it (an earlier leader's may be lost: the caller's numbers tell).
    fn propose(&mut self, payload: Vec<u8>) {
        let payload = Bytes::from(payload);
        self.until("a proposal is taken", |c| {
            c.groups
                .iter_mut()
                .flatten()
                .any(|g| g.is_leader() && g.propose(payload.clone()).is_ok())
        });
    }

    fn data(&self, id: usize) -> Vec<&Bytes> {
        self.applied[id]
            .iter()
            .map(|(_, data)| data)
            .filter(|d| !d.is_empty())
            .collect()
    }

    fn until_all_have(&mut self, count: usize) {
        self.until("all have applied everything", |c| {
            (0..3)
                .filter(|id| c.groups[*id].is_some())
                .all(|id| c.data(id).len() >= count)
        });
    }
}

fn numbered(n: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![n as u8; len.max(8)];
    bytes[..8].copy_from_slice(&(n as u64).to_le_bytes());
    bytes
}

#[test]
fn three_replicas_agree_on_entries_of_all_sizes() {
    for fabric in BOTH {
        for durability in [Durability::Memory, Durability::Disk] {
            let mut c = Cluster::new(fabric, durability);
            c.leader();
            let sizes = [8, 64, 1000, 40_000, 300_000, 3_000_000];
            for n in 0..120 {
                // The large ones do not fit into the ring of 256 KiB at once.
                c.propose(numbered(n, sizes[if n % 20 == 19 { 5 } else { n % 5 }]));
                if n % 7 == 0 {
                    c.round();
                }
            }
            c.until_all_have(120);
            for id in 0..3 {
                let data = c.data(id);
                assert_eq!(data.len(), 120, "none twice");
                let good = data
                    .iter()
                    .enumerate()
                    .all(|(n, d)| d[..8] == (n as u64).to_le_bytes());
                assert!(good, "{fabric:?} {durability:?}: order");
                assert_eq!(c.applied[id], c.applied[0]);
            }
            let links = c.group(0).links();
            assert!(links.iter().all(|l| l.connected), "{links:?}");
        }
    }
}

#[test]
fn each_replica_is_killed_and_comes_back_while_entries_flow() {
    for fabric in BOTH {
        for durability in [Durability::Memory, Durability::Disk] {
            let mut c = Cluster::new(fabric, durability);
            c.leader();
            let mut n = 0;
            for victim in [0u8, 1, 2, 1, 0, 2] {
                for _ in 0..30 {
                    c.propose(numbered(n, 100));
                    n += 1;
                }
                // Everything taken so far is agreed, so none of it may be lost.
                c.until_all_have(n);
                c.kill(victim);
                for _ in 0..30 {
                    let before = c.data((victim as usize + 1) % 3).len();
                    c.propose(numbered(n, 100));
                    c.until("an entry is agreed by two", |c| {
                        c.data((victim as usize + 1) % 3).len() > before
                    });
                    n += 1;
                }
                c.start(victim);
                let leader = c.leader();
                assert!(
                    durability == Durability::Disk || leader != victim,
                    "a replica without memory must not lead"
                );
                c.until_all_have(n);
            }
            // A barrier of the last election may be known to one of them first.
            c.until("all have applied the same", |c| {
                (1..3).all(|id| c.applied[id] == c.applied[0])
            });
            let data = c.data(0);
            let numbers: Vec<u64> = data
                .iter()
                .map(|d| u64::from_le_bytes(d[..8].try_into().unwrap()))
                .collect();
            assert_eq!(
                numbers,
                (0..n as u64).collect::<Vec<_>>(),
                "none lost, none twice, in order"
            );
        }
    }
}

#[test]
fn a_lost_leader_link_is_reported_and_another_leader_found_at_once() {
    for fabric in BOTH {
        let mut c = Cluster::with_kept_time(fabric);
        let leader = c.leader();
        // Both have heard it just now: whoever still believes in it does so for an election time-out.
        c.until("a heartbeat", |c| {
            let now = c.now_us();
            let heard = |group: &Group| group.links().iter().find(|link| link.peer.0 == leader)?.heard_us;
            let others = (0..3).filter(|id| *id != leader);
            let heard: Vec<_> = others
                .map(|id| c.groups[id as usize].as_ref().and_then(heard))
                .collect();
            heard
                .iter()
                .all(|at| at.is_some_and(|at| at + 10 * ROUND_US >= now))
        });
        c.kill(leader);
        let at_us = c.now_us();
        let others: Vec<u8> = (0..3).filter(|id| *id != leader).collect();
        // The clock stops before any election time-out, however long the system takes to carry a word.
        let until_us = at_us + ELECTION_MIN_US - 20 * ROUND_US;
        c.until("a new leader", |c| {
            c.kept_us = c.kept_us.map(|us| us.min(until_us));
            c.groups.iter().flatten().any(Group::is_leader)
        });
        println!(
            "{fabric:?}: new leader after {} us of the test's own time",
            c.now_us() - at_us
        );
        assert!(
            c.now_us() - at_us < ELECTION_MIN_US,
            "no election time-out has passed: the closed link told them"
        );
        for other in others {
            assert!(c.lost.contains(&(other, leader)));
        }
    }
}

#[test]
fn a_replica_that_was_away_too_long_gets_a_snapshot() {
    for fabric in BOTH {
        let mut c = Cluster::new(fabric, Durability::Disk);
        let away = (c.leader() + 1) % 3;
        c.kill(away);
        for n in 0..200 {
            c.propose(numbered(n, 10_000));
            c.round();
        }
        c.until_all_have(200);
        let state = Bytes::from(vec![0x77; 2_000_000]); // larger than the mailbox
        for id in (0..3).filter(|id| *id != away) {
            let through = c.group(id).committed();
            c.group(id).truncate(through, state.clone());
        }
        c.start(away);
        c.propose(numbered(200, 10));
        c.until("the snapshot arrives", |c| c.snapshots[away as usize].is_some());
        c.until("and the entry after it", |c| c.data(away as usize).len() == 1);
        assert_eq!(c.snapshots[away as usize].as_ref().unwrap().state, state);
        // It is on its disk, too.
        c.until("a while", |c| {
            c.group(away).core().appended().index == c.group(away).committed()
        });
        c.kill(away);
        c.start(away);
        assert_eq!(c.snapshots[away as usize].as_ref().unwrap().state, state);
        c.propose(numbered(201, 10));
        c.until("it catches up", |c| c.data(away as usize).len() == 2);
    }
}

#[test]
fn a_full_disk_stops_one_replica_only_and_it_goes_on_later() {
    let mut c = Cluster::new(Fabric::Tcp, Durability::Disk);
    c.kill(2);
    c.limit_bytes = Some(2 << 20);
    c.start(2);
    if c.leader() == 2 {
        c.group(2).step_down();
        c.until("another leads", |c| {
            c.groups[..2].iter().flatten().any(Group::is_leader)
        });
    }
    for n in 0..300 {
        c.propose(numbered(n, 10_000));
        c.round();
    }
    c.until("it says that its disk is full", |c| {
        c.other
            .iter()
            .any(|(id, why)| *id == 2 && why.contains("no space left"))
    });
    c.until("the others agree without it", |c| {
        c.data(0).len() == 300 && c.data(1).len() == 300
    });
    for id in 0..3 {
        let through = c.group(id).core().applied();
        c.group(id).truncate(through, Bytes::from_static(b"state"));
    }
    c.until("it has room again", |c| c.other.contains(&(2, "room".into())));
    c.propose(numbered(300, 10));
    c.until("it holds everything", |c| {
        let committed = c.group(0).committed().max(c.group(1).committed());
        c.group(2).committed() == committed && committed.0 > 300
    });
}

/// Its followers are quick enough for a majority, so nothing else would hold it back.
#[test]
fn a_leader_whose_own_disk_is_full_takes_no_more_than_may_wait_for_it() {
    // Time passes only in rounds: a busy machine changes no leader.
    let mut c = Cluster::begin(Fabric::Tcp, Durability::Disk, 256 << 10, Some(0));
    (0..3).for_each(|id| c.kill(id));
    c.limit_bytes = Some(2 << 20);
    c.log_bytes = Some(4 << 20);
    (0..3).for_each(|id| c.start(id));
    let leader = c.leader();
    if leader != 2 {
        c.group(leader).transfer_to(ReplicaId(2));
    }
    c.until("the one with the small disk leads", |c| c.group(2).is_leader());
    let input = Bytes::from(vec![7; 100]);
    c.until("what waits for the disk is at its limit", |c| {
        let group = c.group(2);
        let taken = (0..500)
            .take_while(|_| group.propose(input.clone()).is_ok())
            .count();
        taken < 500
    });
    let group = c.group(2);
    let (waits, most) = group.disk_queue();
    assert!(waits > most && waits < most + (256 << 10), "{waits} of {most}");
    assert!(
        group.core().has_input_room(input.len()),
        "the log itself has room"
    );
    assert!(!group.has_input_room(input.len()));
    group
        .propose_control(Bytes::from_static(b"sync"))
        .expect("this one it takes");
    c.until("all of it is agreed", |c| {
        c.group(2).committed() == c.group(2).core().appended().index
    });
    let through = c.group(2).core().applied();
    c.group(2).truncate(through, Bytes::from_static(b"state"));
    c.until("the cut made room on the disk", |c| {
        c.group(2).has_input_room(100)
    });
    c.propose(numbered(1, 100));
}

#[test]
fn replicas_on_threads_that_sleep_are_woken_for_every_entry() {
    for fabric in BOTH {
        for wait in [WaitPolicy::BLOCK, WaitPolicy::POLITE] {
            let dir = Scratch::new("threads");
            let members: Vec<_> = (0..3).map(Member::full).collect();
            let mut groups: Vec<_> = (0..3u8)
                .map(|id| {
                    let path = dir.path().join(id.to_string());
                    let mut cfg = GroupConfig::new(path, ReplicaId(id), members.clone(), Durability::Memory);
                    cfg.wait = wait;
                    (cfg.core.election_min_us, cfg.core.election_max_us) = (200_000, 400_000);
                    Group::open(cfg).unwrap()
                })
                .collect();
            for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                let (x, y) = pair(fabric);
                groups[a as usize].add_link(ReplicaId(b), x).unwrap();
                groups[b as usize].add_link(ReplicaId(a), y).unwrap();
            }
            const COUNT: u64 = 2000;
            let start = Instant::now();
            let stop = std::sync::atomic::AtomicBool::new(false);
            let now = || start.elapsed().as_micros() as u64;
            std::thread::scope(|scope| {
                for mut group in groups {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut proposed = 0;
                        while !stop.load(std::sync::atomic::Ordering::Acquire) {
                            while let Some(event) = group.poll(now()) {
                                if let GroupEvent::Committed { through } = event {
                                    group.applied(through);
                                    if group.is_leader() && proposed < COUNT {
                                        proposed +=
                                            u64::from(group.propose(Bytes::from_static(&[7; 64])).is_ok());
                                    } else if proposed >= COUNT {
                                        stop.store(true, std::sync::atomic::Ordering::Release);
                                    }
                                }
                            }
                            group.wait(now(), now() + 50_000);
                            assert!(
                                start.elapsed().as_secs() < 60,
                                "{fabric:?}: {proposed} entries only"
                            );
                        }
                    });
                }
            });
            println!(
                "{fabric:?}, {wait}: {} us per entry",
                start.elapsed().as_micros() / u128::from(COUNT)
            );
        }
    }
}

/// A ring that was read far and then revoked leaves nothing behind that the next term's ring could trip over.
#[test]
fn leadership_moves_while_much_was_read_from_every_ring() {
    for fabric in BOTH {
        let mut c = Cluster::new(fabric, Durability::Memory);
        let mut n = 0;
        for _ in 0..6 {
            let leader = c.leader();
            for _ in 0..60 {
                c.propose(numbered(n, 10_000)); // more than two rings in all
                n += 1;
                c.round();
            }
            c.until_all_have(n);
            c.group(leader).transfer_to(ReplicaId((leader + 1) % 3));
            c.until("it was handed over", |c| c.group((leader + 1) % 3).is_leader());
        }
        c.until_all_have(n);
        // The last barrier may be known to one of them first.
        c.until("all have applied the same", |c| {
            (1..3).all(|id| c.applied[id] == c.applied[0])
        });
    }
}
