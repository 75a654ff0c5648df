//! What a person's order "the others are dead" promises (`consensus::alone`), and what it does when they were not.

mod group;

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Event, HardState, Member, Message, Refusal, Restored, Role,
    Snapshot, Stand,
};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use group::{Group, three};

const BOTH: [Durability; 2] = [Durability::Memory, Durability::Disk];

/// Two hosts die; the third is told to stand alone. Returns the group and the lone one.
fn lone(durability: Durability) -> (Group, u8) {
    let mut group = Group::new(durability, &three());
    let lone = group.elect();
    group.propose("before");
    group.down = (0..3).filter(|id| *id != lone).collect();
    group.run(200_000);
    assert_eq!(group.leader(), None, "no majority, no leader");
    group.step(lone, Event::StandAlone);
    (group, lone)
}

/// The lone one takes the others back, one at a time, as far as they are up.
fn take_back(group: &mut Group, lone: u8) {
    for member in three() {
        let mut members = group.nodes[&lone].members().to_vec();
        if members.iter().all(|known| known.id != member.id) {
            members.push(member);
            members.sort_by_key(|member| member.id);
            let changed = group.nodes.get_mut(&lone).unwrap().change_members(members);
            assert!(changed.is_ok(), "{changed:?}");
            group.step(lone, Event::Flush);
            group.run(200_000);
        }
    }
}

#[test]
fn a_lone_replica_agrees_by_itself_and_keeps_what_was_agreed() {
    for durability in BOTH {
        let (mut group, lone) = lone(durability);
        assert_eq!(group.leader(), Some(lone));
        group.propose("alone");
        assert_eq!(group.agreed(lone), ["before", "alone"], "{durability:?}");
    }
}

#[test]
fn the_order_is_on_disk_before_the_lone_one_leads() {
    let mut node = Consensus::new(
        Config::new(ReplicaId(0), Durability::Memory),
        Restored::fresh(three()),
        1,
    );
    let mut out = Vec::new();
    node.step(1, Event::StandAlone, &mut out);
    let [.., Action::PersistHardState(hard_state)] = out[..] else {
        panic!("no hard state in {out:?}")
    };
    assert!(hard_state.voted_for == Some(ReplicaId(0)) && node.role() != Role::Leader);
    node.step(2, Event::HardStatePersisted(hard_state), &mut out);
    assert_eq!(node.role(), Role::Leader);
}

#[test]
fn an_order_is_not_for_leaders_witnesses_or_hosts_without_a_copy() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    let term = group.nodes[&leader].term();
    group.step(leader, Event::StandAlone);
    group.step(2, Event::StandAlone);
    group.step(1 - leader, Event::MayLead(false));
    group.step(1 - leader, Event::StandAlone);
    assert_eq!(
        (group.leader(), group.nodes[&leader].term()),
        (Some(leader), term)
    );
}

#[test]
fn who_returns_follows_the_lone_one_and_can_lead_after_it() {
    for durability in BOTH {
        let (mut group, lone) = lone(durability);
        group.propose("alone");
        for id in (0..3).filter(|id| *id != lone) {
            group.restart(id, durability);
            // Its copy of the VM is gone: the owner's own veto, until a leader has brought it in.
            group.step(id, Event::MayLead(false));
        }
        take_back(&mut group, lone);
        group.propose("together");
        for id in 0..3 {
            assert_eq!(
                group.agreed(id),
                ["before", "alone", "together"],
                "{durability:?}, {id}"
            );
        }
        group.step(1 - lone, Event::MayLead(true));
        group.down = vec![lone];
        assert_eq!(group.elect(), 1 - lone);
        group.propose("without it");
        assert_eq!(group.agreed(2).last().unwrap(), "without it");
    }
}

#[test]
fn hosts_that_were_not_dead_give_way_when_they_meet_the_lone_one() {
    for durability in BOTH {
        let mut group = Group::new(durability, &three());
        let lone = group.elect();
        group.propose("before");
        // Cut off, and a person errs. Meanwhile the others go on by themselves.
        group.down = vec![lone];
        let other = group.elect();
        group.propose("told to clients, and lost by the order");
        group.down = (0..3).filter(|id| *id != lone).collect();
        group.run(200_000);
        group.step(lone, Event::StandAlone);
        group.propose("alone");
        group.down.clear();
        take_back(&mut group, lone);
        assert_eq!(group.leader(), Some(lone));
        assert!(group.nodes[&other].role() != Role::Leader);
        group.propose("together");
        for id in 0..3 {
            assert_eq!(
                group.agreed(id),
                ["before", "alone", "together"],
                "{durability:?}, {id}"
            );
        }
        let told = group.events.iter().any(|(id, action)| {
            *id == other && matches!(action, Action::InstallSnapshot(snapshot) if snapshot.last.index.0 == 0)
        });
        assert!(told, "the owner is told that its state counts no more");
    }
}

#[test]
fn a_lone_one_that_is_outvoted_by_the_dead_still_wins_over_any_number_of_elections() {
    let (mut group, lone) = lone(Durability::Disk);
    let term = group.nodes[&lone].term();
    for id in (0..3).filter(|id| *id != lone) {
        group.restart(id, Durability::Disk);
    }
    // They elect each other again and again while the lone one is away.
    group.down = vec![lone];
    for _ in 0..5 {
        let leader = group.elect();
        group.step(leader, Event::StepDown);
        group.run(400_000);
    }
    assert!(group.nodes[&2].term() < term);
}

#[test]
fn a_lone_one_that_loses_its_lead_before_a_host_holds_its_log_is_elected_again() {
    for durability in BOTH {
        let (mut group, lone) = lone(durability);
        group.propose("alone");
        let (other, members) = (1 - lone, three()[..2].to_vec());
        let changed = group.nodes.get_mut(&lone).unwrap().change_members(members);
        assert!(changed.is_ok(), "{changed:?}");
        group.step(lone, Event::Flush);
        // The other one is not heard in time.
        group.run(400_000);
        assert_eq!(group.leader(), None, "{durability:?}");
        group.down = vec![2];
        assert_eq!(group.elect(), lone, "{durability:?}: nobody else holds anything");
        group.run(400_000);
        assert_eq!(
            group.nodes[&other].role(),
            Role::Follower {
                leader: Some(ReplicaId(lone))
            }
        );
        group.propose("together");
        assert_eq!(group.agreed(other), ["before", "alone", "together"]);
    }
}

#[test]
fn a_host_that_was_declared_dead_votes_for_nobody_without_the_orders_log() {
    let (mut group, lone) = lone(Durability::Disk);
    let other = 1 - lone;
    group.down = vec![2];
    let members = three()[..2].to_vec();
    assert!(
        group
            .nodes
            .get_mut(&lone)
            .unwrap()
            .change_members(members)
            .is_ok()
    );
    group.step(lone, Event::Flush);
    // It has met the order, and holds nothing of it.
    let (term, from) = (group.nodes[&lone].term(), ReplicaId(2));
    let node = group.nodes.get_mut(&other).unwrap();
    let asks = |last: Term| Message::RequestVote {
        term: Term(term.0 + 1),
        last: Viewstamp {
            term: last,
            index: Index(1_000),
        },
        why: Stand::Silence,
    };
    let mut votes = |last: Term| {
        let mut out = Vec::new();
        let message = asks(last);
        node.step(u64::MAX / 4, Event::Received { from, message }, &mut out);
        assert_eq!(node.role(), Role::Recovering);
        out.iter().any(|action| matches!(action, Action::PersistHardState(hard_state) if hard_state.voted_for == Some(from)))
    };
    assert!(!votes(Term(7)), "of the dead ones' own history");
    assert!(votes(term), "of the order's");
}

#[test]
fn two_orders_never_make_one_term() {
    let term_after = |me: u8, term: u64| {
        let restored = Restored {
            hard_state: HardState {
                term: Term(term),
                voted_for: Some(ReplicaId(me)),
            },
            ..Restored::fresh(three())
        };
        let mut node = Consensus::new(Config::new(ReplicaId(me), Durability::Memory), restored, 1);
        node.step(1, Event::StandAlone, &mut Vec::new());
        node.term()
    };
    assert_ne!(term_after(0, 7), term_after(1, 7));
    assert!(term_after(0, term_after(1, 7).0) > term_after(1, 7));
}

#[test]
fn a_host_that_died_between_the_hard_state_and_the_loss_of_its_log_recovers_as_one_without_a_log() {
    let (mut group, lone) = lone(Durability::Disk);
    let other = 1 - lone;
    let term = group.nodes[&lone].term();
    group.disks.get_mut(&other).unwrap().hard_state = HardState {
        term,
        voted_for: None,
    };
    group.restart(other, Durability::Disk);
    assert_eq!(group.nodes[&other].role(), Role::Recovering);
    group.restart(2, Durability::Disk);
    group.step(2, Event::MayLead(false));
    take_back(&mut group, lone);
    group.propose("together");
    assert_eq!(group.agreed(other), ["before", "together"]);
}

#[test]
fn the_lone_one_itself_keeps_its_log_over_a_crash() {
    let (mut group, lone) = lone(Durability::Disk);
    group.propose("alone");
    group.restart(lone, Durability::Disk);
    assert_eq!(group.elect(), lone);
    assert_eq!(group.agreed(lone), ["before", "alone"]);
    // Also when only the hard state had reached the disk.
    let (mut group, lone) = crate::lone(Durability::Disk);
    let disk = group.disks.get_mut(&lone).unwrap();
    disk.log.retain(|entry| entry.stamp.term < disk.hard_state.term);
    group.restart(lone, Durability::Disk);
    assert_ne!(group.nodes[&lone].role(), Role::Recovering);
}

#[test]
fn members_come_back_one_at_a_time() {
    let (mut group, lone) = lone(Durability::Memory);
    let all: Vec<Member> = three();
    let changed = group.nodes.get_mut(&lone).unwrap().change_members(all);
    assert_eq!(changed, Err(Refusal::BadChange));
}

/// A replica's owner runs beside it: it hears of a snapshot after the log was forgotten for a newer order, and speaks of a state that is gone.
#[test]
fn what_an_owner_says_of_a_log_that_is_gone_is_not_heard() {
    let snapshot = |term, index| Snapshot {
        last: Viewstamp {
            term: Term(term),
            index: Index(index),
        },
        members: three(),
        state: Bytes::from(format!("state of {index}")),
    };
    let says = |term, snapshot| Event::Received {
        from: ReplicaId(0),
        message: Message::Snapshot {
            term: Term(term),
            snapshot,
            leads: true,
        },
    };
    let mut node = Consensus::new(
        Config::new(ReplicaId(1), Durability::Memory),
        Restored::fresh(three()),
        1,
    );
    let mut out = Vec::new();
    node.step(1, says(2, snapshot(2, 176)), &mut out);
    assert_eq!(node.committed(), Index(176));
    let newer_order = {
        let mut lone = Consensus::new(
            Config::new(ReplicaId(0), Durability::Memory),
            Restored::fresh(three()),
            1,
        );
        lone.step(1, Event::StandAlone, &mut Vec::new());
        lone.term().0
    };
    node.step(2, says(newer_order, snapshot(newer_order, 150)), &mut out);
    let installed: Vec<Index> = out
        .iter()
        .filter_map(|action| match action {
            Action::InstallSnapshot(snapshot) => Some(snapshot.last.index),
            _ => None,
        })
        .collect();
    assert_eq!(installed, [Index(176), Index(0), Index(150)]);
    let through = Index(176);
    // The first is taken, the others are under way to the owner.
    node.step(3, Event::SnapshotTaken, &mut out);
    let state = Bytes::from_static(b"state of 176");
    node.step(3, Event::Applied { through }, &mut out);
    node.step(3, Event::Released { through }, &mut out);
    node.step(3, Event::Truncate { through, state }, &mut out);
    assert!(node.awaits_owner());
    assert_eq!((node.applied(), node.released()), (Index(0), Index(0)));
    assert_eq!(node.snapshot().state, Bytes::from_static(b"state of 150"));
    node.step(3, Event::SnapshotTaken, &mut out);
    node.step(3, Event::SnapshotTaken, &mut out);
    assert!(!node.awaits_owner());
    node.step(3, Event::Applied { through: Index(150) }, &mut out);
    assert_eq!(node.applied(), Index(150));
}
