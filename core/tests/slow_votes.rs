//! Elections where votes come from slow disks (E5): each term is written by all before its vote is given.

mod group;

use dunlin_core::consensus::Durability;
use group::{Group, three};

/// Of virtual time.
const SECOND_US: u64 = 1_000_000;

/// The leader dies, and disks take so long each time that a vote is written.
fn elects(slow: &[(u8, u64)], within_us: u64) {
    let mut group = Group::new(Durability::Memory, &three());
    let old = group.elect();
    group.slow = slow.iter().copied().collect();
    group.down.push(old);
    group.run(within_us);
    let leader = group.leader();
    assert!(
        leader.is_some_and(|leader| leader != old),
        "{slow:?}: nobody leads after {within_us} us"
    );
    // It stays so.
    group.run(10 * SECOND_US);
    assert_eq!(group.leader(), leader, "{slow:?}");
    group.propose("afterwards");
}

#[test]
fn a_group_whose_disks_are_slower_than_its_elections_elects() {
    for takes_us in [10_000, 130_000, 500_000, 1_500_000] {
        let all = [0, 1, 2].map(|id| (id, takes_us));
        elects(&all, 8 * SECOND_US + 10 * takes_us);
    }
}

#[test]
fn a_slow_witness_alone_is_waited_for() {
    for takes_us in [130_000, 500_000] {
        elects(&[(2, takes_us)], 8 * SECOND_US + 10 * takes_us);
    }
}
