//! What one agreed 64-byte proposal costs the leader and a follower in CPU time, without any transport; and what it costs the
//! leader as the group grows, when all followers acknowledge each entry.
//! `cargo run --release -p dunlin-core --example consensus_cost`
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // it measures

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Event, HardState, MAX_MEMBERS, Member, Message, Restored, Role,
    Snapshot,
};
use dunlin_core::units::{Index, ReplicaId, Term};
use std::time::Instant;

const ROUNDS: usize = 200;
const EACH: usize = 2_000;

/// The leader of a group of this size.
fn leader_of(size: u8) -> Consensus {
    let members = (0..size).map(Member::full).collect();
    let cfg = Config::new(ReplicaId(0), Durability::Memory);
    let mut leader = Consensus::new(cfg, Restored::fresh(members), 1);
    let mut out = Vec::new();
    let hard_state = HardState {
        term: Term(1),
        voted_for: Some(ReplicaId(0)),
    };
    leader.step(1, Event::Tick, &mut out);
    leader.step(100_000, Event::Tick, &mut out);
    for pre in [true, false] {
        for id in 1..size {
            let message = Message::Vote {
                term: Term(1),
                granted: true,
                pre,
                last: Snapshot::default().last,
            };
            let from = ReplicaId(id);
            leader.step(100_000, Event::Received { from, message }, &mut out);
        }
        leader.step(100_000, Event::HardStatePersisted(hard_state), &mut out);
    }
    assert_eq!(leader.role(), Role::Leader);
    leader
}

/// One entry outstanding, acknowledged by everybody: nanoseconds of the leader's, the median and the least of the rounds.
fn large(size: u8) -> (u64, u64) {
    let (mut leader, mut out) = (leader_of(size), Vec::new());
    let payload = Bytes::from(vec![7; 64]);
    let (rounds, each) = (40, 40_000 / usize::from(size));
    let mut ns = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        for _ in 0..each {
            let index = leader.propose(payload.clone()).expect("ring");
            out.clear();
            leader.step(100_000, Event::Flush, &mut out);
            for id in 1..size {
                out.clear();
                let message = Message::Ack {
                    term: Term(1),
                    durable: index,
                    beat: 1,
                };
                let from = ReplicaId(id);
                leader.step(100_000, Event::Received { from, message }, &mut out);
            }
        }
        ns.push(began.elapsed().as_nanos() as u64 / each as u64);
        let (through, state) = (leader.committed(), Bytes::new());
        leader.step(100_000, Event::Applied { through }, &mut out);
        leader.step(100_000, Event::Truncate { through, state }, &mut out);
    }
    ns.sort_unstable();
    (ns[rounds / 2], ns[0])
}

fn main() {
    for size in [3, 5, 7, 9, 15, 31, 63, 105] {
        if usize::from(size) <= MAX_MEMBERS {
            let (median, least) = large(size);
            println!("leader of {size}, all acknowledge: {median} ns p50, {least} ns best");
        }
    }
    let members = vec![Member::full(0), Member::full(1), Member::witness(2)];
    let new = |id| {
        let cfg = Config::new(ReplicaId(id), Durability::Memory);
        Consensus::new(cfg, Restored::fresh(members.clone()), u64::from(id) + 1)
    };
    let (mut leader, mut out) = (new(0), Vec::new());
    leader.step(1, Event::Tick, &mut out);
    leader.step(100_000, Event::Tick, &mut out);
    let vote = |term, pre, last| Event::Received {
        from: ReplicaId(1),
        message: Message::Vote {
            term,
            granted: true,
            pre,
            last,
        },
    };
    let last = Snapshot::default().last;
    leader.step(100_000, vote(Term(1), true, last), &mut out);
    let hard_state = HardState {
        term: Term(1),
        voted_for: Some(ReplicaId(0)),
    };
    leader.step(100_000, Event::HardStatePersisted(hard_state), &mut out);
    leader.step(100_000, vote(Term(1), false, last), &mut out);
    assert_eq!(leader.role(), Role::Leader);
    let mut follower = new(1);
    let payload = Bytes::from(vec![7; 64]);
    let (mut lead_ns, mut follow_ns) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut messages = Vec::with_capacity(EACH);
        let began = Instant::now();
        for _ in 0..EACH {
            let index = leader.propose(payload.clone()).expect("ring");
            out.clear();
            leader.step(100_000, Event::Flush, &mut out);
            out.clear();
            let message = Message::Ack {
                term: Term(1),
                durable: index,
                beat: 1,
            };
            leader.step(
                100_000,
                Event::Received {
                    from: ReplicaId(1),
                    message,
                },
                &mut out,
            );
        }
        lead_ns.push(began.elapsed().as_nanos() as u64 / EACH as u64);
        let through = leader.committed();
        for at in follower.appended().index.0 + 1..=through.0 {
            let prev = leader
                .entry(Index(at - 1))
                .map_or(leader.snapshot().last, |entry| entry.stamp);
            messages.push(leader.append_message(Term(1), prev, Index(at)));
        }
        let count = messages.len() as u64;
        let began = Instant::now();
        for message in messages {
            out.clear();
            follower.step(
                100_000,
                Event::Received {
                    from: ReplicaId(0),
                    message,
                },
                &mut out,
            );
            for action in &out {
                if let Action::PersistHardState(hard_state) = action {
                    follower.step(100_000, Event::HardStatePersisted(*hard_state), &mut Vec::new());
                }
            }
        }
        follow_ns.push(began.elapsed().as_nanos() as u64 / count);
        let message = Message::Lead {
            term: Term(1),
            commit: through,
            beat: 1,
        };
        follower.step(
            100_000,
            Event::Received {
                from: ReplicaId(0),
                message,
            },
            &mut out,
        );
        for node in [&mut leader, &mut follower] {
            node.step(100_000, Event::Applied { through }, &mut out);
            node.step(
                100_000,
                Event::Truncate {
                    through,
                    state: Bytes::new(),
                },
                &mut out,
            );
        }
    }
    for (what, ns) in [
        ("leader: propose, flush, one acknowledgement, commit", lead_ns),
        ("follower: append, acknowledge", follow_ns),
    ] {
        let mut ns = ns;
        ns.sort_unstable();
        println!(
            "{what}: {} ns p50, {} ns best of {ROUNDS} rounds of {EACH}",
            ns[ns.len() / 2],
            ns[0]
        );
    }
}
