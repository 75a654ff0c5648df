//! What the consensus core promises, one promise a test; the sentences of the papers are in `paper.rs`, whole stories in
//! `testdata/consensus`, faults in the simulator.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // the scenarios are files

mod group;

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Entry, EntryKind, Event, HardState, MAX_MEMBERS, Member, Message,
    Refusal, Restored, Role, Snapshot, Stand,
};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use group::{Group, three};

#[test]
fn a_leader_is_elected_and_agrees_in_groups_of_one_to_a_hundred_and_twenty_seven() {
    for durability in [Durability::Memory, Durability::Disk] {
        for size in (1..=9).chain([15, 31, 63, 105, MAX_MEMBERS as u8]) {
            let members: Vec<_> = (0..size).map(Member::full).collect();
            let mut group = Group::new(durability, &members);
            group.elect();
            group.propose("one");
            group.propose("two");
            for id in 0..size {
                assert_eq!(
                    group.agreed(id),
                    ["one", "two"],
                    "{durability:?}, {size} members, replica {id}"
                );
            }
        }
    }
}

/// What a follower knows of an entry when it has got it, and nothing else: not even its leader knows more.
fn known_on_arrival(durability: Durability, size: u8) -> bool {
    let members: Vec<_> = (0..size).map(Member::full).collect();
    let mut group = Group::new(durability, &members);
    let leader = group.elect();
    let node = group.nodes.get_mut(&leader).unwrap();
    let before = node.entry(node.committed()).unwrap().stamp;
    let index = node.propose(Bytes::from_static(b"one")).unwrap();
    let message = node.append_message(before.term, before, index);
    assert!(node.committed() < index);
    let follower = group.nodes.get_mut(&((leader + 1) % size)).unwrap();
    let from = ReplicaId(leader);
    follower.step(group.now_us, Event::Received { from, message }, &mut Vec::new());
    assert_eq!(follower.appended().index, index);
    follower.committed() == index
}

#[test]
fn a_follower_counts_itself_and_its_leader_where_two_are_a_majority() {
    assert!(known_on_arrival(Durability::Memory, 2));
    assert!(known_on_arrival(Durability::Memory, 3));
    assert!(!known_on_arrival(Durability::Memory, 4));
    assert!(!known_on_arrival(Durability::Disk, 3));
}

#[test]
fn nothing_is_agreed_without_a_majority() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    group.down = (0..3).filter(|id| *id != leader).collect();
    let index = group.propose("alone");
    assert!(group.nodes[&leader].committed() < index);
}

#[test]
fn a_leader_without_a_majority_steps_down_and_commits_nothing() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    group.down = (0..3).filter(|id| *id != leader).collect();
    group.propose("alone");
    group.run(70_000);
    assert_ne!(group.nodes[&leader].role(), Role::Leader);
    assert_eq!(group.agreed(leader), Vec::<String>::new());
}

#[test]
fn a_lost_leader_is_replaced_and_its_agreed_entries_stay() {
    for durability in [Durability::Memory, Durability::Disk] {
        let mut group = Group::new(durability, &three());
        let old = group.elect();
        group.propose("one");
        group.down = vec![old];
        let new = group.elect();
        assert_ne!(new, old);
        assert_ne!(new, 2, "a witness never leads");
        group.propose("two");
        assert_eq!(group.agreed(new), ["one", "two"]);
        group.restart(old, durability);
        group.run(100_000);
        group.propose("three");
        assert_eq!(group.agreed(old), ["one", "two", "three"]);
    }
}

#[test]
fn a_lost_link_to_the_leader_elects_at_once() {
    let mut group = Group::new(Durability::Memory, &three());
    let old = group.elect();
    group.down = vec![old];
    let (heir, at) = (1 - old, group.now_us);
    for id in [2, heir] {
        let peer = ReplicaId(old);
        group.step(id, Event::LinkLost { peer, by_peer: true });
    }
    assert_eq!((group.leader(), group.now_us), (Some(heir), at));
}

#[test]
fn a_follower_that_hears_its_leader_refuses_a_pre_vote() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    let term = group.nodes[&leader].term();
    let other = 1 - leader;
    group.step(
        other,
        Event::LinkLost {
            peer: ReplicaId(leader),
            by_peer: true,
        },
    );
    assert_eq!(group.leader(), Some(leader));
    assert_eq!(group.nodes[&2].term(), term);
}

#[test]
fn entries_that_only_the_witness_holds_reach_the_candidate() {
    for durability in [Durability::Memory, Durability::Disk] {
        let mut group = Group::new(durability, &three());
        let old = group.elect();
        let heir = 1 - old;
        group.down = vec![heir];
        group.propose("seen by the witness");
        group.down = vec![old];
        assert_eq!(group.elect(), heir);
        assert_eq!(group.agreed(heir), ["seen by the witness"]);
    }
}

#[test]
fn a_deposed_leader_that_wakes_commits_nothing_and_follows() {
    let mut group = Group::new(Durability::Disk, &three());
    let old = group.elect();
    group.propose("one");
    group.down = vec![old];
    let new = group.elect();
    group.propose("two");
    group.down = vec![];
    group
        .nodes
        .get_mut(&old)
        .unwrap()
        .propose(Bytes::from_static(b"stale"))
        .unwrap();
    group.step(old, Event::Flush);
    group.run(100_000);
    assert_eq!(group.leader(), Some(new));
    assert_eq!(group.agreed(old), ["one", "two"]);
    assert!(
        !group.disks[&old].log.iter().any(|e| &e.payload[..] == b"stale"),
        "the stale end is cut on disk"
    );
}

#[test]
fn only_who_may_lead_wins() {
    let mut group = Group::new(Durability::Memory, &three());
    group.step(0, Event::MayLead(false));
    assert_eq!(group.elect(), 1);
    group.step(1, Event::MayLead(false));
    group.run(500_000);
    assert_eq!(group.leader(), None);
    group.step(0, Event::MayLead(true));
    assert_eq!(group.elect(), 0);
}

#[test]
fn truncation_snapshot_and_a_late_joiner() {
    for durability in [Durability::Memory, Durability::Disk] {
        let mut group = Group::new(durability, &three());
        let leader = group.elect();
        let late = 1 - leader;
        group.down = vec![late];
        let index = group.propose("one");
        group.step(
            leader,
            Event::Truncate {
                through: index,
                state: Bytes::from_static(b"sync 1"),
            },
        );
        assert_eq!(group.nodes[&leader].first(), index.next());
        group.propose("two");
        group.down = vec![];
        group.run(200_000);
        assert_eq!(group.agreed(late), ["two"]);
        assert_eq!(&group.nodes[&late].snapshot().state[..], b"sync 1");
        assert!(
            group
                .events
                .iter()
                .any(|(id, a)| *id == late && matches!(a, Action::InstallSnapshot(_)))
        );
        group.restart(late, durability);
        group.run(200_000);
        group.propose("three");
        assert_eq!(group.agreed(late), ["two", "three"]);
    }
}

#[test]
fn a_replica_that_lost_its_memory_neither_votes_nor_acknowledges() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    group.propose("one");
    group.restart(2, Durability::Memory);
    group.down = vec![leader];
    group.run(1_000_000);
    assert_eq!(
        group.leader(),
        None,
        "the empty witness must not help a candidate"
    );
    assert_eq!(group.nodes[&2].role(), Role::Recovering);
    group.down = vec![];
    group.run(300_000);
    assert!(group.leader().is_some());
    assert_eq!(group.agreed(2), ["one"]);
    assert!(matches!(
        group.nodes[&2].role(),
        Role::Follower { leader: Some(_) }
    ));
}

#[test]
fn members_change_one_at_a_time() {
    let mut group = Group::new(Durability::Disk, &three());
    let leader = group.elect();
    group.propose("one");
    group.add(Durability::Disk, 3, vec![]);
    let node = group.nodes.get_mut(&leader).unwrap();
    let mut more = three();
    more.push(Member::full(3));
    let mut two_more = more.clone();
    two_more.push(Member::full(4));
    assert_eq!(node.change_members(two_more), Err(Refusal::BadChange));
    assert_eq!(
        node.change_members(vec![Member::witness(2)]),
        Err(Refusal::BadChange)
    );
    node.change_members(more.clone()).unwrap();
    assert_eq!(node.change_members(three()), Err(Refusal::ChangePending));
    group.step(leader, Event::Flush);
    group.run(100_000);
    assert_eq!(group.agreed(3), ["one"]);
    let gone = 1 - leader;
    let rest: Vec<_> = more.into_iter().filter(|m| m.id.0 != gone).collect();
    let without_me: Vec<_> = rest.iter().copied().filter(|m| m.id.0 != leader).collect();
    let node = group.nodes.get_mut(&leader).unwrap();
    node.change_members(rest.clone()).unwrap();
    group.step(leader, Event::Flush);
    let node = group.nodes.get_mut(&leader).unwrap();
    assert_eq!(node.change_members(without_me), Err(Refusal::WouldRemoveLeader));
    group.down = vec![gone, leader];
    assert_eq!(group.elect(), 3);
    group.propose("two");
    assert_eq!(group.agreed(3), ["one", "two"]);
}

#[test]
fn leadership_is_handed_over() {
    let mut group = Group::new(Durability::Disk, &three());
    let old = group.elect();
    let term = group.nodes[&old].term();
    group.step(old, Event::TransferTo(ReplicaId(2)));
    assert_eq!(
        group.events.last().unwrap().1,
        Action::TransferFailed { to: ReplicaId(2) }
    );
    group.step(old, Event::TransferTo(ReplicaId(1 - old)));
    assert_eq!(group.leader(), Some(1 - old), "without waiting for a time-out");
    assert_eq!(group.nodes[&2].term(), Term(term.0 + 1));
    group.step(1 - old, Event::StepDown);
    assert_eq!(group.leader(), Some(old));
}

#[test]
fn a_leader_that_may_lead_no_more_hands_over_before_it_goes() {
    let mut group = Group::new(Durability::Disk, &three());
    let old = group.elect();
    let heir = 1 - old;
    group.propose("one");
    let now_us = group.now_us;
    let node = group.nodes.get_mut(&old).unwrap();
    let mut out = Vec::new();
    node.step(now_us, Event::StepDown, &mut out);
    node.step(now_us, Event::MayLead(false), &mut out);
    assert_eq!(
        node.role(),
        Role::Follower { leader: None },
        "it is out of office at once"
    );
    let words: Vec<Message> = out
        .into_iter()
        .filter_map(|action| match action {
            Action::Send { to, message } if to == ReplicaId(heir) => Some(message),
            _ => None,
        })
        .collect();
    assert!(matches!(words[..], [Message::Campaign { .. }]), "{words:?}");
    for message in words {
        let from = ReplicaId(old);
        group.step(heir, Event::Received { from, message });
    }
    assert_eq!(group.leader(), Some(heir), "without waiting for a time-out");
    assert_eq!(group.now_us, now_us);
    group.propose("two");
    assert_eq!(group.agreed(heir), ["one", "two"]);
}

#[test]
fn a_failed_transfer_leaves_the_leader_in_office_or_makes_it_go() {
    let mut group = Group::new(Durability::Memory, &three());
    let old = group.elect();
    group.step(1 - old, Event::MayLead(false));
    group.step(old, Event::TransferTo(ReplicaId(1 - old)));
    assert_eq!(
        group.nodes.get_mut(&old).unwrap().propose(Bytes::new()),
        Err(Refusal::Transferring)
    );
    group.run(250_000);
    assert!(group.events.contains(&(
        old,
        Action::TransferFailed {
            to: ReplicaId(1 - old)
        }
    )));
    assert_eq!(group.leader(), Some(old));
    group.propose("still here");
    group.step(old, Event::StepDown);
    group.run(246_000);
    assert_eq!(group.leader(), None);
}

#[test]
fn a_read_waits_for_a_majority() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    let index = group.propose("one");
    group.step(leader, Event::Read { id: 7 });
    assert!(
        group
            .events
            .contains(&(leader, Action::ReadReady { id: 7, index }))
    );
    group.down = (0..3).filter(|id| *id != leader).collect();
    group.step(leader, Event::Read { id: 8 });
    group.run(200_000);
    assert!(
        !group
            .events
            .iter()
            .any(|(_, a)| matches!(a, Action::ReadReady { id: 8, .. }))
    );
    assert!(group.events.contains(&(leader, Action::ReadRefused { id: 8 })));
}

#[test]
fn a_full_ring_pushes_back_until_a_truncation() {
    let members = vec![Member::full(0)];
    let mut group = Group::new(Durability::Memory, &members);
    let cfg = Config {
        ring_entries: 4,
        ..Config::new(ReplicaId(0), Durability::Memory)
    };
    group
        .nodes
        .insert(0, Consensus::new(cfg, Restored::fresh(members), 1));
    group.elect();
    for _ in 0..3 {
        group.propose("x");
    }
    assert_eq!(
        group.nodes.get_mut(&0).unwrap().propose(Bytes::new()),
        Err(Refusal::RingFull)
    );
    let through = group.nodes[&0].applied();
    group.step(
        0,
        Event::Truncate {
            through,
            state: Bytes::new(),
        },
    );
    assert_eq!(group.propose("y"), through.next());
}

/// A group of one whose ring is full of inputs, to the last byte.
fn full_of_inputs() -> Group {
    let members = vec![Member::full(0)];
    let mut group = Group::new(Durability::Memory, &members);
    let cfg = Config {
        ring_bytes: 300,
        ..Config::new(ReplicaId(0), Durability::Memory)
    };
    group
        .nodes
        .insert(0, Consensus::new(cfg, Restored::fresh(members), 1));
    group.elect();
    let core = group.nodes.get_mut(&0).unwrap();
    for bytes in [100, 100, 99, 1] {
        assert!(core.has_input_room(bytes));
        core.propose(vec![0; bytes].into()).unwrap();
    }
    assert!(!core.has_input_room(1));
    group
}

#[test]
fn a_ring_full_of_inputs_takes_the_entries_that_empty_it() {
    let mut group = full_of_inputs();
    let core = group.nodes.get_mut(&0).unwrap();
    assert_eq!(core.propose(Bytes::from_static(b"i")), Err(Refusal::RingFull));
    let sync = core
        .propose_control(Bytes::from_static(b"sync"))
        .expect("room is kept for it");
    group.step(0, Event::Flush);
    assert_eq!(group.nodes[&0].committed(), sync);
    group.step(0, Event::Applied { through: sync });
    group.step(
        0,
        Event::Truncate {
            through: sync,
            state: Bytes::new(),
        },
    );
    assert_eq!(
        (group.nodes[&0].log_entries(), group.nodes[&0].log_bytes()),
        (0, 0)
    );
    assert!(
        group
            .nodes
            .get_mut(&0)
            .unwrap()
            .propose(vec![0; 300].into())
            .is_ok()
    );
}

#[test]
fn the_room_for_control_entries_is_bounded_and_inputs_get_none_of_it() {
    let mut group = full_of_inputs();
    let core = group.nodes.get_mut(&0).unwrap();
    let reserve = core.config().reserve_entries as u64;
    let mut taken = 0;
    while core.propose_control(vec![0; 64].into()).is_ok() {
        taken += 1;
        assert_eq!(core.propose(Bytes::from_static(b"i")), Err(Refusal::RingFull));
        assert!(taken <= reserve, "its limit");
    }
    assert_eq!(core.propose_control(vec![0; 64].into()), Err(Refusal::RingFull));
    assert_eq!(taken, reserve.min(core.config().reserve_bytes as u64 / 64));
}

#[test]
fn a_vote_waits_for_the_disk() {
    let mut voter = Consensus::new(
        Config::new(ReplicaId(2), Durability::Memory),
        Restored::fresh(three()),
        1,
    );
    let mut out = Vec::new();
    let message = Message::RequestVote {
        term: Term(1),
        last: Viewstamp::default(),
        why: Stand::Silence,
    };
    voter.step(
        1,
        Event::Received {
            from: ReplicaId(0),
            message,
        },
        &mut out,
    );
    let hard_state = HardState {
        term: Term(1),
        voted_for: Some(ReplicaId(0)),
    };
    assert!(out.contains(&Action::PersistHardState(hard_state)));
    assert!(!out.iter().any(|a| matches!(a, Action::Send { .. })), "{out:?}");
    out.clear();
    voter.step(
        1,
        Event::HardStatePersisted(HardState {
            term: Term(1),
            voted_for: None,
        }),
        &mut out,
    );
    assert!(out.is_empty(), "an older hard state does not release it: {out:?}");
    voter.step(1, Event::HardStatePersisted(hard_state), &mut out);
    assert!(matches!(
        out[0],
        Action::Send {
            message: Message::Vote { granted: true, .. },
            ..
        }
    ));
}

#[test]
fn an_old_log_is_not_attached_to_a_newer_snapshot() {
    let stamp = |term, index| Viewstamp {
        term: Term(term),
        index: Index(index),
    };
    let entry = |term, index| Entry {
        stamp: stamp(term, index),
        kind: EntryKind::Data,
        payload: Bytes::new(),
    };
    let restored = Restored {
        snapshot: Snapshot {
            last: stamp(3, 2),
            members: three(),
            state: Bytes::new(),
        },
        log: vec![entry(1, 1), entry(1, 2), entry(1, 3)],
        ..Restored::default()
    };
    let node = Consensus::new(Config::new(ReplicaId(0), Durability::Disk), restored, 1);
    assert_eq!(node.appended(), stamp(3, 2));
    assert_eq!(node.term(), Term(3), "an entry's term counts");
}

/// `testdata/consensus/*.txt`: one word a line, see the files.
#[test]
fn scenarios() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/consensus");
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for durability in [Durability::Memory, Durability::Disk] {
            play(&text, durability, &file.display().to_string());
        }
    }
}

fn play(text: &str, durability: Durability, name: &str) {
    let mut group = Group::new(durability, &three());
    for (nth, line) in text.lines().enumerate() {
        let at = format!("{name}:{} ({durability:?})", nth + 1);
        let words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
        let id = |nth: usize| {
            words[nth]
                .parse::<u8>()
                .unwrap_or_else(|_| panic!("{at}: not a replica"))
        };
        match words.first().copied() {
            None => {}
            Some("run") => group.run(u64::from(id(1)) * 1000),
            Some("campaign") => {
                group.run(100_000);
                group.step(id(1), Event::Tick);
                group.step(id(1), Event::MayLead(true));
                group.run(300_000);
                assert_eq!(group.leader(), Some(id(1)), "{at}");
            }
            Some("unwilling") => group.step(id(1), Event::MayLead(false)),
            Some("willing") => group.step(id(1), Event::MayLead(true)),
            Some("propose") => drop(group.propose(words[1])),
            Some("down") => group.down.push(id(1)),
            Some("up") => group.down.retain(|down| *down != id(1)),
            Some("restart") => group.restart(id(1), durability),
            Some("transfer") => {
                let leader = group.leader().unwrap_or_else(|| panic!("{at}: nobody leads"));
                group.step(leader, Event::TransferTo(ReplicaId(id(1))));
            }
            Some("leader") => {
                group.run(500_000);
                let want = (words[1] != "none").then(|| id(1));
                assert_eq!(group.leader(), want, "{at}");
            }
            Some("agreed") => assert_eq!(group.agreed(id(1)), words[2..], "{at}"),
            Some(word) => panic!("{at}: unknown word {word}"),
        }
    }
}
