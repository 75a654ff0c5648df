//! What a would-be candidate pulls from a voter that holds more, what a leader must know before it changes the members, and
//! whom it believes to have its memory back: found by seeds of the simulator as groups that stood still for ever, or that
//! drowned in their own words.

mod group;

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Event, Member, Message, Refusal, Restored, Role,
};
use dunlin_core::units::ReplicaId;
use group::{Group, three};

/// The old leader's log goes on behind an entry that the others have agreed on and cut away, but it does not know that it
/// is agreed. The voter's snapshot ends before the candidate's own log does; its log does not.
#[test]
fn a_candidate_with_a_longer_old_log_takes_a_voters_snapshot() {
    let mut group = Group::new(Durability::Memory, &three());
    let old = group.elect();
    let (heir, witness) = (1 - old, 2);
    group.propose("one");
    // The others agree on "two"; their words never reach the leader, which appends more.
    let leader = group.nodes.get_mut(&old).unwrap();
    let two = leader.propose(Bytes::from_static(b"two")).unwrap();
    let mut out = Vec::new();
    leader.step(group.now_us, Event::Flush, &mut out);
    for more in ["lost", "lost, too"] {
        leader.propose(Bytes::from_static(more.as_bytes())).unwrap();
    }
    let sent: Vec<_> = out
        .into_iter()
        .filter_map(|action| match action {
            Action::SendEntries {
                to,
                term,
                prev,
                through,
            } => Some((to, leader.append_message(term, prev, through))),
            _ => None,
        })
        .collect();
    group.down = vec![old];
    for (to, message) in sent {
        let from = ReplicaId(old);
        group.step(to.0, Event::Received { from, message });
    }
    let state = Bytes::new();
    group.step(witness, Event::Truncate { through: two, state });
    assert_eq!(group.elect(), heir);
    group.propose("three");
    // The heir loses its memory; the old leader comes back. Only the two of them and a witness: all must be found again.
    group.restart(heir, Durability::Memory);
    group.down.clear();
    group.run(1_000_000);
    assert_eq!(group.leader(), Some(old), "{:?}", group.nodes[&old].role());
    group.propose("four");
    assert!(group.agreed(old).ends_with(&["three".into(), "four".into()]));
    assert_ne!(group.nodes[&heir].role(), Role::Recovering);
}

#[test]
fn doubled_answers_to_a_pull_do_not_breed() {
    const ENTRIES: usize = 6;
    let mut group = Group::new(Durability::Memory, &three());
    for id in 0..3 {
        let cfg = Config {
            batch_entries: 1,
            ..Config::new(ReplicaId(id), Durability::Memory)
        };
        let node = Consensus::new(cfg, Restored::fresh(three()), u64::from(id) + 1);
        group.nodes.insert(id, node);
    }
    let old = group.elect();
    group.down = vec![1 - old];
    for _ in 0..ENTRIES {
        group.propose("seen by the witness");
        group.run(1_000);
    }
    group.down = vec![old];
    group.twice = true;
    group.events.clear();
    assert_eq!(group.elect(), 1 - old);
    assert_eq!(group.agreed(1 - old).len(), ENTRIES);
    let pull = |action: &Action| {
        matches!(
            action,
            Action::Send {
                message: Message::Pull { .. },
                ..
            }
        )
    };
    let pulls = group.events.iter().filter(|(_, action)| pull(action)).count();
    assert!(pulls <= ENTRIES + 2, "{pulls} pulls for {ENTRIES} entries");
}

/// A member that has said nothing in this term may have lost its memory while another led: to drop the others for it
/// could leave a group of two of which one has forgotten everything.
#[test]
fn members_are_not_dropped_for_one_that_has_not_acknowledged_in_this_term() {
    let members = [Member::full(0), Member::full(1), Member::full(2)];
    let mut group = Group::new(Durability::Memory, &members);
    let first = group.elect();
    let [second, silent] = [(first + 1) % 3, (first + 2) % 3];
    group.down = vec![silent];
    group.step(first, Event::TransferTo(ReplicaId(second)));
    assert_eq!(group.leader(), Some(second));
    let rest: Vec<_> = members
        .into_iter()
        .filter(|member| member.id != ReplicaId(first))
        .collect();
    let change = |group: &mut Group| group.nodes.get_mut(&second).unwrap().change_members(rest.clone());
    assert_eq!(change(&mut group), Err(Refusal::WouldLoseMajority));
    group.down.clear();
    group.run(30_000);
    assert!(change(&mut group).is_ok());
}

/// An acknowledgement of its earlier life arrives after a replica said that it lost its memory. The leader must not take
/// it for healed, nor its further words for old ones: it would not be brought up to date for as long as the term lasts.
#[test]
fn a_late_word_of_an_earlier_life_does_not_end_a_recovery() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    let reborn = 1 - leader;
    group.propose("one");
    group.run(20_000);
    let said = |event: &(u8, Action)| match event {
        (id, Action::Send { message, .. }) if *id == reborn && matches!(message, Message::Ack { .. }) => {
            Some(message.clone())
        }
        _ => None,
    };
    let late = group.events.iter().rev().find_map(said).unwrap();
    group.restart(reborn, Durability::Memory);
    // Its first word reaches the leader, whose answer is lost; then comes the word of the earlier life.
    let mut out = Vec::new();
    let now_us = group.now_us;
    group
        .nodes
        .get_mut(&reborn)
        .unwrap()
        .step(now_us, Event::Tick, &mut out);
    let from = ReplicaId(reborn);
    let first = out.into_iter().find_map(|action| match action {
        Action::Send { to, message } if to == ReplicaId(leader) => Some(message),
        _ => None,
    });
    let node = group.nodes.get_mut(&leader).unwrap();
    for message in [first.unwrap(), late] {
        node.step(now_us, Event::Received { from, message }, &mut Vec::new());
    }
    assert!(node.peer(from).unwrap().recovering);
    group.run(200_000);
    assert_eq!(group.leader(), Some(leader));
    assert_eq!(
        group.nodes[&reborn].role(),
        Role::Follower {
            leader: Some(ReplicaId(leader))
        }
    );
    assert_eq!(group.agreed(reborn), ["one"]);
}
