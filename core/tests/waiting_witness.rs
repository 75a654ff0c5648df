//! A witness that gets inputs with the next heartbeat (`Config::witness_waits`): what it saves, and that nothing rests on it.

use bytes::Bytes;
use dunlin_core::consensus::{Action, Durability, Event, Member};
use dunlin_core::units::{Index, ReplicaId};
use group::{Group, three};

mod group;

const BOTH: [Durability; 2] = [Durability::Memory, Durability::Disk];
const HEARTBEAT_US: u64 = 5_000;
const WITNESS: u8 = 2;

/// A group that agrees on something, with its leader.
fn settled(durability: Durability) -> (Group, u8) {
    let mut group = Group::with_waiting_witness(durability, &three());
    let leader = group.elect();
    group.propose("before");
    group.run(4 * HEARTBEAT_US);
    assert_eq!(group.agreed(WITNESS), ["before"]);
    group.events.clear();
    (group, leader)
}

/// How often entries were sent to that host.
fn sent_to(group: &Group, host: u8) -> usize {
    let to_it = |action: &Action| matches!(action, Action::SendEntries { to, .. } if *to == ReplicaId(host));
    group.events.iter().filter(|(_, action)| to_it(action)).count()
}

#[test]
fn while_the_backup_keeps_up_the_witness_gets_one_batch_a_heartbeat() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        for number in 0..50 {
            let index = group.propose(&number.to_string());
            assert!(group.nodes[&leader].committed() >= index, "agreed without it");
        }
        let held = group.nodes[&WITNESS].committed();
        assert_eq!(sent_to(&group, WITNESS), 0, "{durability:?}");
        assert!(sent_to(&group, 1 - leader) >= 50, "{durability:?}");
        group.run(2 * HEARTBEAT_US);
        assert!(group.nodes[&WITNESS].committed() > held);
        assert_eq!(group.agreed(WITNESS).len(), 51, "{durability:?}");
        assert!(
            sent_to(&group, WITNESS) <= 2,
            "{durability:?}: one batch, not fifty"
        );
    }
}

#[test]
fn inputs_wait_two_heartbeats_at_most_for_a_backup_that_has_died() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        group.down.push(1 - leader);
        let index = group.propose("nobody but the witness can agree to it");
        group.run(HEARTBEAT_US);
        assert!(
            group.nodes[&leader].committed() >= index,
            "{durability:?}: by the next heartbeat"
        );
        group.run(HEARTBEAT_US);
        // It is known now that the backup does not keep up: the witness is asked at once.
        for number in 0..5 {
            let index = group.propose(&number.to_string());
            assert!(
                group.nodes[&leader].committed() >= index,
                "{durability:?}: {number}"
            );
        }
    }
}

#[test]
fn what_steers_does_not_wait() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        group.propose("an input");
        let node = group.nodes.get_mut(&leader).unwrap();
        let index = node.propose_control(Bytes::from_static(b"down")).unwrap();
        group.step(leader, Event::Flush);
        assert_eq!(
            sent_to(&group, WITNESS),
            1,
            "{durability:?}: with what came before it"
        );
        let known = |id: u8| group.nodes[&id].entry(index).is_some();
        assert!((0..3).all(known), "{durability:?}");
    }
}

#[test]
fn a_witness_alone_with_its_leader_is_asked_at_once() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        let node = group.nodes.get_mut(&leader).unwrap();
        let members = vec![Member::full(leader), Member::witness(WITNESS)];
        node.change_members(members).unwrap();
        group.step(leader, Event::Flush);
        for number in 0..5 {
            let index = group.propose(&number.to_string());
            assert!(
                group.nodes[&leader].committed() >= index,
                "{durability:?}: {number}"
            );
            assert!(
                group.nodes[&WITNESS].entry(index).is_some(),
                "{durability:?}: {number}"
            );
        }
    }
}

#[test]
fn the_backup_leads_with_all_that_was_agreed_and_tells_the_witness() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        let index = group.propose("the witness has not heard of it");
        assert!(group.nodes[&leader].committed() >= index);
        assert!(group.nodes[&WITNESS].entry(index).is_none(), "{durability:?}");
        group.down.push(leader);
        assert_eq!(group.elect(), 1 - leader, "{durability:?}");
        group.propose("after");
        group.run(2 * HEARTBEAT_US);
        let all = ["before", "the witness has not heard of it", "after"];
        assert_eq!(group.agreed(1 - leader), all, "{durability:?}");
        assert_eq!(group.agreed(WITNESS), all, "{durability:?}");
    }
}

#[test]
fn a_log_that_is_cut_meanwhile_reaches_the_witness_as_its_snapshot() {
    for durability in BOTH {
        let (mut group, leader) = settled(durability);
        let through: Index = group.propose("in the snapshot");
        let state = Bytes::from_static(b"all until here");
        group.step(leader, Event::Truncate { through, state });
        group.propose("behind it");
        group.run(4 * HEARTBEAT_US);
        assert_eq!(
            group.nodes[&WITNESS].committed(),
            group.nodes[&leader].committed()
        );
        assert_eq!(
            group.agreed(WITNESS).last().unwrap(),
            "behind it",
            "{durability:?}"
        );
    }
}

#[test]
fn a_batch_that_is_full_leaves_before_the_heartbeat() {
    let (mut group, leader) = settled(Durability::Memory);
    // More than one batch takes.
    let node = group.nodes.get_mut(&leader).unwrap();
    for _ in 0..5 {
        node.propose(Bytes::from(vec![0; 300 << 10])).unwrap();
    }
    group.step(leader, Event::Flush);
    assert!(
        sent_to(&group, WITNESS) >= 1,
        "the witness falls behind by a batch at most"
    );
}
