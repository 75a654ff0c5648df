//! A group in one process with a perfect network and instant disks; faults are the simulator's.
#![allow(dead_code)] // Each test program uses a part of it.

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Entry, EntryKind, Event, HardState, Member, Restored, Role,
    Snapshot, Standby,
};
use dunlin_core::units::{Index, ReplicaId};
use std::collections::BTreeMap;

pub struct Group {
    pub now_us: u64,
    pub nodes: BTreeMap<u8, Consensus>,
    pub disks: BTreeMap<u8, Disk>,
    /// Neither hears nor speaks.
    pub down: Vec<u8>,
    /// Every message arrives twice.
    pub twice: bool,
    /// `Config::witness_waits` of those that are added or started from here on.
    pub witness_waits: bool,
    /// Replicas whose owners read their clocks so long before they drive them, with what a daemon has against that or without.
    pub late: BTreeMap<u8, (u64, Option<Standby>)>,
    pub events: Vec<(u8, Action)>,
    /// Disks that take so long to write a hard state, one after the other.
    pub slow: BTreeMap<u8, u64>,
    /// When each of them is done, with what.
    pub writing: Vec<(u64, u8, HardState)>,
}

#[derive(Default, Clone)]
pub struct Disk {
    pub hard_state: HardState,
    pub snapshot: Snapshot,
    pub log: Vec<Entry>,
}

impl Group {
    pub fn new(durability: Durability, members: &[Member]) -> Self {
        let mut group = Self {
            now_us: 1,
            nodes: BTreeMap::new(),
            disks: BTreeMap::new(),
            down: Vec::new(),
            twice: false,
            witness_waits: false,
            late: BTreeMap::new(),
            events: Vec::new(),
            slow: BTreeMap::new(),
            writing: Vec::new(),
        };
        for member in members {
            group.add(durability, member.id.0, members.to_vec());
        }
        group
    }

    /// A group whose witness gets inputs with the next heartbeat.
    pub fn with_waiting_witness(durability: Durability, members: &[Member]) -> Self {
        let mut group = Self::new(durability, &[]);
        group.witness_waits = true;
        for member in members {
            group.add(durability, member.id.0, members.to_vec());
        }
        group
    }

    pub fn add(&mut self, durability: Durability, id: u8, members: Vec<Member>) {
        let restored = Restored::fresh(members);
        self.disks.insert(
            id,
            Disk {
                snapshot: restored.snapshot.clone(),
                ..Disk::default()
            },
        );
        self.nodes.insert(
            id,
            Consensus::new(self.config(id, durability), restored, u64::from(id) + 1),
        );
    }

    fn config(&self, id: u8, durability: Durability) -> Config {
        Config {
            witness_waits: self.witness_waits,
            ..Config::new(ReplicaId(id), durability)
        }
    }

    pub fn step(&mut self, id: u8, event: Event) {
        let mut todo = vec![(id, event)];
        while !todo.is_empty() {
            let (id, event) = todo.remove(0);
            if self.down.contains(&id) {
                continue;
            }
            let mut out = Vec::new();
            let node = self.nodes.get_mut(&id).unwrap();
            let now_us = self.now_us;
            let time_us = match self.late.get_mut(&id) {
                Some((late_us, Some(standby))) => standby.owner_drives(now_us, now_us - *late_us),
                Some((late_us, None)) => now_us - *late_us,
                None => now_us,
            };
            node.step(time_us, event, &mut out);
            let disk = self.disks.get_mut(&id).unwrap();
            for action in out {
                self.events.push((id, action.clone()));
                match action {
                    Action::Send { to, message } => {
                        let from = ReplicaId(id);
                        for _ in 0..=usize::from(self.twice) {
                            let message = message.clone();
                            todo.push((to.0, Event::Received { from, message }));
                        }
                    }
                    Action::SendEntries {
                        to,
                        term,
                        prev,
                        through,
                    } => {
                        let message = node.append_message(term, prev, through);
                        todo.push((
                            to.0,
                            Event::Received {
                                from: ReplicaId(id),
                                message,
                            },
                        ));
                    }
                    Action::Persist {
                        from,
                        through,
                        ticket,
                    } => {
                        let new = (from.0..=through.0).map(|at| node.entry(Index(at)).unwrap().clone());
                        disk.log.extend(new);
                        todo.push((id, Event::Persisted { ticket }));
                    }
                    Action::TruncateSuffix { from } => disk.log.retain(|e| e.stamp.index < from),
                    Action::PersistHardState(hard_state) => {
                        disk.hard_state = hard_state;
                        match self.slow.get(&id) {
                            Some(takes_us) => {
                                let busy = self.writing.iter().filter(|(_, of, _)| *of == id);
                                let free_us = busy.map(|(until_us, ..)| *until_us).max();
                                let done_us = free_us.unwrap_or(now_us) + takes_us;
                                self.writing.push((done_us, id, hard_state));
                            }
                            None => todo.push((id, Event::HardStatePersisted(hard_state))),
                        }
                    }
                    Action::SaveSnapshot(snapshot) => {
                        disk.log.retain(|e| e.stamp.index > snapshot.last.index);
                        todo.push((id, Event::SnapshotPersisted { last: snapshot.last }));
                        disk.snapshot = snapshot;
                    }
                    Action::InstallSnapshot(snapshot) => {
                        todo.push((id, Event::SnapshotTaken));
                        todo.push((
                            id,
                            Event::Applied {
                                through: snapshot.last.index,
                            },
                        ));
                    }
                    Action::Committed { through } => todo.push((id, Event::Applied { through })),
                    _ => {}
                }
            }
            todo.retain(|(to, _)| self.nodes.contains_key(to));
        }
    }

    pub fn run(&mut self, for_us: u64) {
        let until = self.now_us + for_us;
        loop {
            let next = self
                .nodes
                .iter()
                // A busy owner begins no campaign; what comes is heard all the same.
                .filter(|(id, _)| !self.down.contains(id) && !self.late.contains_key(id))
                .map(|(id, node)| (node.next_deadline_us().unwrap(), *id))
                .min();
            let written = self.writing.iter().min_by_key(|(at, ..)| *at);
            let written = written.map(|&(at, id, hard_state)| (at, id, Some(hard_state)));
            let both = next.map(|(at, id)| (at, id, None)).into_iter().chain(written);
            let next = both.min_by_key(|(at, ..)| *at);
            let Some((at, id, written)) = next.filter(|(at, ..)| *at <= until) else {
                break;
            };
            self.now_us = self.now_us.max(at);
            let Some(hard_state) = written else {
                self.step(id, Event::Tick);
                continue;
            };
            self.writing.retain(|one| *one != (at, id, hard_state));
            self.step(id, Event::HardStatePersisted(hard_state));
        }
        self.now_us = until;
    }

    pub fn leader(&self) -> Option<u8> {
        let mut leaders = self
            .nodes
            .iter()
            .filter(|(id, n)| n.role() == Role::Leader && !self.down.contains(id));
        let first = leaders.next().map(|(id, _)| *id);
        assert!(leaders.next().is_none(), "two leaders");
        first
    }

    pub fn elect(&mut self) -> u8 {
        self.run(300_000);
        self.leader().expect("no leader")
    }

    pub fn propose(&mut self, text: &str) -> Index {
        let leader = self.leader().expect("no leader");
        let index = self
            .nodes
            .get_mut(&leader)
            .unwrap()
            .propose(Bytes::copy_from_slice(text.as_bytes()))
            .unwrap();
        self.step(leader, Event::Flush);
        index
    }

    pub fn restart(&mut self, id: u8, durability: Durability) {
        let disk = self.disks[&id].clone();
        let memory = durability == Durability::Memory;
        let restored = Restored {
            hard_state: disk.hard_state,
            snapshot: disk.snapshot,
            log: if memory { Vec::new() } else { disk.log },
            lost_memory: memory,
        };
        let node = Consensus::new(self.config(id, durability), restored, self.now_us);
        self.nodes.insert(id, node);
        self.down.retain(|down| *down != id);
    }

    pub fn agreed(&self, id: u8) -> Vec<String> {
        let node = &self.nodes[&id];
        (node.first().0..=node.committed().0)
            .filter_map(|at| node.entry(Index(at)))
            .filter(|e| e.kind == EntryKind::Data)
            .map(|e| String::from_utf8(e.payload.to_vec()).unwrap())
            .collect()
    }
}

pub fn three() -> Vec<Member> {
    vec![Member::full(0), Member::full(1), Member::witness(2)]
}
