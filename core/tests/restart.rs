//! What a replica that was started again with its log on disk learns, though nothing is proposed.

mod group;

use dunlin_core::consensus::{Durability, Event};
use dunlin_core::units::ReplicaId;
use group::{Group, three};

#[test]
fn a_restarted_follower_learns_what_is_agreed_though_nothing_happens() {
    let mut group = Group::new(Durability::Disk, &three());
    let leader = group.elect();
    group.propose("one");
    let last = group.propose("two");
    let follower = 1 - leader;
    group.restart(follower, Durability::Disk);
    assert!(
        group.nodes[&follower].committed() < last,
        "the log on disk does not say what is agreed"
    );
    group.step(
        leader,
        Event::LinkUp {
            peer: ReplicaId(follower),
        },
    );
    group.run(20_000);
    assert_eq!(group.nodes[&follower].committed(), last);
    assert_eq!(group.agreed(follower), ["one", "two"]);
}
