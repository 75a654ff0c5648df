use super::*;
use crate::log::tests::Scratch;
use dunlin_core::consensus::Durability;
use std::time::Instant;

/// So long no thread of a busy machine is kept from its core.
const ELECTION_MIN_US: u64 = 2_000_000;
/// Several times what a silent leader is believed.
const BUSY: Duration = Duration::from_secs(10);

struct Three {
    groups: Vec<KeptGroup>,
    begun: Instant,
    _dir: Scratch,
}

impl Three {
    fn open(patience: Duration) -> Self {
        let dir = Scratch::new("kept");
        let open = |id: u8| {
            let members = (0..3).map(Member::full).collect();
            let path = dir.path().join(id.to_string());
            let mut cfg = GroupConfig::new(path, ReplicaId(id), members, Durability::Memory);
            cfg.core.heartbeat_us = 20_000;
            (cfg.core.election_min_us, cfg.core.election_max_us) = (ELECTION_MIN_US, 2 * ELECTION_MIN_US);
            KeptGroup::open(cfg, patience).unwrap()
        };
        let mut groups: Vec<KeptGroup> = (0..3).map(open).collect();
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            let (x, y) = Stream::pair().unwrap();
            groups[a].add_link(ReplicaId(b as u8), x).unwrap();
            groups[b].add_link(ReplicaId(a as u8), y).unwrap();
        }
        Self {
            groups,
            begun: Instant::now(),
            _dir: dir,
        }
    }

    /// A turn of every owner but `busy`. The terms in which somebody began to lead.
    fn turn(&mut self, busy: Option<usize>) -> Vec<Term> {
        let mut led = Vec::new();
        for (at, group) in self.groups.iter_mut().enumerate() {
            if busy == Some(at) {
                continue;
            }
            let now_us = self.begun.elapsed().as_micros() as u64;
            while let Some(event) = group.poll(now_us) {
                match event {
                    GroupEvent::BecameLeader { term, .. } => led.push(term),
                    GroupEvent::Committed { through } => group.applied(through),
                    _ => {}
                }
            }
        }
        // Their pace: other tests have things to do as well.
        std::thread::sleep(Duration::from_millis(1));
        led
    }

    /// Turns until one leads, everybody knows it, and what it said first is agreed everywhere.
    fn leader(&mut self) -> usize {
        let begun = Instant::now();
        loop {
            self.turn(None);
            let leaders: Vec<_> = self.groups.iter().map(KeptGroup::leader).collect();
            let settled = self.groups.iter().all(|group| group.committed() > Index(0));
            if let Some(leader) = leaders[0].filter(|_| settled)
                && leaders.iter().all(|other| *other == Some(leader))
            {
                return usize::from(leader.0);
            }
            assert!(begun.elapsed().as_secs() < 60, "nobody leads: {leaders:?}");
        }
    }
}

#[test]
fn a_leader_whose_owner_is_busy_keeps_its_office_and_a_follower_its_leader() {
    let mut three = Three::open(Duration::from_secs(60));
    let leader = three.leader();
    let term = three.groups[leader].term();
    for busy in [leader, (leader + 1) % 3] {
        let stood_in = three.groups[busy].stood_in();
        let begun = Instant::now();
        while begun.elapsed() < BUSY {
            assert_eq!(three.turn(Some(busy)), [], "an election though nobody died");
        }
        assert!(three.groups[busy].stood_in() > stood_in, "the keeper did nothing");
        // The owner comes back to a group in which nothing has happened.
        three.turn(None);
        let found: Vec<_> = three
            .groups
            .iter()
            .map(|group| (group.term(), group.leader()))
            .collect();
        let expected = (term, Some(ReplicaId(leader as u8)));
        assert_eq!(found, [expected; 3]);
    }
}

#[test]
fn what_is_proposed_is_agreed_while_a_follower_owner_is_busy_and_it_hears_of_it() {
    let mut three = Three::open(Duration::from_secs(60));
    let leader = three.leader();
    let busy = (leader + 1) % 3;
    let gone = (leader + 2) % 3;
    // Without the third, agreement needs the busy one's acknowledgement.
    three.groups[gone].remove_link(ReplicaId(leader as u8));
    three.groups[gone].remove_link(ReplicaId(busy as u8));
    three.groups[leader].remove_link(ReplicaId(gone as u8));
    three.groups[busy].remove_link(ReplicaId(gone as u8));
    let index = three.groups[leader]
        .propose(Bytes::from_static(b"while it is busy"))
        .unwrap();
    let begun = Instant::now();
    while three.groups[leader].committed() < index {
        three.turn(Some(busy));
        assert!(begun.elapsed().as_secs() < 60, "not agreed");
    }
    // Its descriptor wakes it, and it finds the entry.
    let mut poll = libc::pollfd {
        fd: three.groups[busy].as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor that lives across the call.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 20_000) }, 1);
    while three.groups[busy].committed() < index {
        three.turn(None);
        assert!(begun.elapsed().as_secs() < 60, "not heard of");
    }
    assert_eq!(
        three.groups[busy].entry(index).unwrap().payload,
        "while it is busy"
    );
}

#[test]
fn an_owner_that_hangs_loses_its_office() {
    let mut three = Three::open(Duration::from_millis(800));
    let leader = three.leader();
    let term = three.groups[leader].term();
    let begun = Instant::now();
    loop {
        let led = three.turn(Some(leader));
        if led.iter().any(|new| *new > term) {
            break;
        }
        assert!(
            begun.elapsed().as_secs() < 60,
            "nobody replaced a leader that hangs"
        );
    }
}

#[test]
fn a_busy_owner_is_asked_before_its_host_campaigns_though_the_leader_is_dead() {
    let mut three = Three::open(Duration::from_secs(60));
    let leader = three.leader();
    let busy = (leader + 1) % 3;
    // Nobody but the busy one may lead, and the leader's links break.
    three.groups[(leader + 2) % 3].may_lead(false);
    three.groups[leader].may_lead(false);
    let term = three.groups[busy].term();
    for id in 0..3 {
        three.groups[leader].remove_link(ReplicaId(id));
    }
    let begun = Instant::now();
    while begun.elapsed() < BUSY {
        assert_eq!(three.turn(Some(busy)), []);
        assert_eq!(
            three.groups[busy].term(),
            term,
            "a campaign without the owner's word"
        );
    }
    while !three.groups[busy].is_leader() {
        three.turn(None);
        assert!(
            begun.elapsed().as_secs() < 60,
            "the owner is back, and nobody leads"
        );
    }
}
