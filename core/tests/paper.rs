//! The papers' sentences, each beside the test that holds it to be true of this code.

mod group;

/// Consensus: GAIA (APUS), FALCON-in-KVM, PLOVER's slides.
mod consensus {
    use super::group::{Group, three};
    use dunlin_core::consensus::{Action, Durability, Event, Member, Message, Role};
    use dunlin_core::units::{Index, ReplicaId};

    /// FALCON 3.1: "The last step is the leader collecting the ACKs from the replicas, once it reaches Quorum, it means the
    /// consensus is completed."
    #[test]
    fn once_it_reaches_quorum_the_consensus_is_completed() {
        let members: Vec<_> = (0..5).map(Member::full).collect();
        let mut group = Group::new(Durability::Memory, &members);
        let leader = group.elect();
        group.down = (0..5).filter(|id| *id != leader).collect();
        let index = group.propose("x");
        let node = group.nodes.get_mut(&leader).unwrap();
        let (term, now_us) = (node.term(), group.now_us);
        let peers: Vec<u8> = (0..5).filter(|id| *id != leader).collect();
        for (nth, peer) in peers.iter().enumerate() {
            let message = Message::Ack {
                term,
                durable: index,
                beat: 1,
            };
            node.step(
                now_us,
                Event::Received {
                    from: ReplicaId(*peer),
                    message,
                },
                &mut Vec::new(),
            );
            assert_eq!(
                node.committed() >= index,
                nth + 2 >= 3,
                "{} of 5 hold it",
                nth + 2
            );
        }
    }

    /// GAIA 2.1.2: "both leader and backups participate in consensus, making it possible to reach consensus with only one
    /// round".
    #[test]
    fn one_round() {
        let mut group = Group::new(Durability::Memory, &three());
        let leader = group.elect();
        group.events.clear();
        let index = group.propose("x");
        let commit = group
            .events
            .iter()
            .position(|e| *e == (leader, Action::Committed { through: index }))
            .unwrap();
        let before = &group.events[..commit];
        let out = before
            .iter()
            .filter(|(id, a)| *id == leader && matches!(a, Action::SendEntries { .. }))
            .count();
        let acks = |(id, a): &&(u8, Action)| {
            *id != leader
                && matches!(
                    a,
                    Action::Send {
                        message: Message::Ack { .. },
                        ..
                    }
                )
        };
        assert_eq!(
            (out, before.iter().filter(acks).count()),
            (2, 2),
            "one word out to each, one word back"
        );
    }

    /// GAIA 2.1.2: "To handle replica failures, all replicas store inputs to local SSD (L2, B1)." Here an acknowledgement says
    /// so (durability = disk), and the leader sends before it writes: both happen at once.
    #[test]
    fn all_replicas_store_inputs_to_local_ssd() {
        let mut group = Group::new(Durability::Disk, &three());
        let leader = group.elect();
        group.events.clear();
        group.propose("x");
        for id in 0..3 {
            assert_eq!(
                &group.disks[&id].log.last().unwrap().payload[..],
                b"x",
                "replica {id}"
            );
        }
        let mine: Vec<_> = group
            .events
            .iter()
            .filter(|(id, _)| *id == leader)
            .map(|(_, a)| a)
            .collect();
        assert!(matches!(mine[0], Action::SendEntries { .. }) && matches!(mine[2], Action::Persist { .. }));
    }

    /// GAIA 2.1.2: "In abnormal cases (e.g., the leader fails), APUS uses an existing algorithm \[54\] to elect a new leader."
    #[test]
    fn the_leader_fails() {
        let mut group = Group::new(Durability::Memory, &three());
        let old = group.elect();
        group.propose("x");
        group.down = vec![old];
        let new = group.elect();
        assert_eq!((new, group.agreed(new)), (1 - old, vec!["x".to_string()]));
    }

    /// FALCON 3.1: "a set of 2f+1 machines (nodes)": f of them may fail.
    #[test]
    fn two_f_plus_one() {
        for f in 1..=3u8 {
            let members: Vec<_> = (0..=2 * f).map(Member::full).collect();
            let mut group = Group::new(Durability::Memory, &members);
            let first = group.elect();
            group.propose("x");
            group.down = (0..=2 * f)
                .filter(|id| *id != first)
                .take(usize::from(f) - 1)
                .chain([first])
                .collect();
            let leader = group.elect();
            group.propose("y");
            assert_eq!(group.agreed(leader), ["x", "y"], "f = {f}");
        }
    }

    /// PLOVER: "Primary: propose request and execute; Backup: agree on request and execute; Witness: agree on request and
    /// ignore".
    #[test]
    fn the_witness_agrees_and_never_leads() {
        let mut group = Group::new(Durability::Memory, &three());
        let old = group.elect();
        group.down = vec![1 - old];
        let index = group.propose("x");
        assert!(
            group.nodes[&old].committed() >= index,
            "the witness's acknowledgement counts"
        );
        group.down = vec![0, 1];
        group.run(2_000_000);
        assert!(matches!(group.nodes[&2].role(), Role::Follower { .. }));
    }

    /// GAIA 2.3.1: "letting one backup act as the *major backup* with a high priority to become a new leader if current leader
    /// fails": of several that may lead the first in the list goes first.
    #[test]
    fn the_major_backup_goes_first() {
        let members: Vec<_> = (0..5).map(Member::full).collect();
        let mut group = Group::new(Durability::Memory, &members);
        let old = group.elect();
        group.down = vec![old];
        for id in (0..5).rev().filter(|id| *id != old) {
            let peer = ReplicaId(old);
            group.step(id, Event::LinkLost { peer, by_peer: true });
        }
        assert_eq!(group.leader(), Some(u8::from(old == 0)));
    }

    /// GAIA 2.3.1: "the leader and standby backup still form a majority and agree on requests rapidly" while the major backup is
    /// busy.
    #[test]
    fn leader_and_standby_form_a_majority() {
        let mut group = Group::new(Durability::Memory, &three());
        let leader = group.elect();
        group.down = vec![1 - leader];
        let before = group.now_us;
        let index = group.propose("x");
        assert!(group.nodes[&leader].committed() >= index);
        assert_eq!(group.now_us, before, "no time-out is waited for");
    }

    /// PLOVER: "Step 1: Use Paxos to ensure the same total order of requests for replicas".
    #[test]
    fn the_same_total_order() {
        let mut group = Group::new(Durability::Memory, &three());
        for round in 0..6 {
            let leader = group.elect();
            group.propose(&format!("{round}a"));
            group.propose(&format!("{round}b"));
            group.step(leader, Event::TransferTo(ReplicaId(1 - leader)));
        }
        let order = group.agreed(0);
        assert_eq!(
            (order.len(), &group.agreed(1), &group.agreed(2)),
            (12, &order, &order)
        );
        assert!(group.nodes[&0].entry(Index(1)).is_some());
    }
}
