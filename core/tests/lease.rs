//! Until when a leader may speak (`consensus::lease`), and how long a silence has to be before somebody is believed dead
//! (`consensus::detector`): their sentences. Random worlds are the simulator's.

mod group;

use dunlin_core::consensus::{Action, Durability, Event, Member, Message, Role, Stand, Standby};
use dunlin_core::units::{ReplicaId, Term};
use group::{Group, three};

const BOTH: [Durability; 2] = [Durability::Memory, Durability::Disk];
/// The shortest election time-out.
const ELECTION_US: u64 = 30_000;

impl Group {
    fn may_speak(&self, id: u8) -> bool {
        let until_us = self.nodes[&id].speaks_until_us();
        until_us.is_some_and(|until_us| self.now_us < until_us)
    }

    fn lose_link(&mut self, id: u8, peer: u8, by_peer: bool) {
        let peer = ReplicaId(peer);
        self.step(id, Event::LinkLost { peer, by_peer });
    }

    /// Asks for a vote in the next term; whether it was given.
    fn is_voted_for(&mut self, by: u8, candidate: u8, why: Stand) -> bool {
        let term = Term(self.nodes[&by].term().0 + 1);
        let last = self.nodes[&by].appended();
        let message = Message::RequestVote { term, last, why };
        let from = ReplicaId(candidate);
        self.down = vec![candidate];
        self.step(by, Event::Received { from, message });
        self.down.clear();
        self.nodes[&by].hard_state().voted_for == Some(from) && self.nodes[&by].term() == term
    }
}

/// A group of three at work; who leads, and who else can.
fn at_work(durability: Durability) -> (Group, u8, u8) {
    let mut group = Group::new(durability, &three());
    let leader = group.elect();
    group.propose("one");
    group.run(20_000);
    assert!(group.may_speak(leader));
    (group, leader, 1 - leader)
}

#[test]
fn a_leader_that_is_cut_off_falls_silent_before_another_is_elected() {
    for durability in BOTH {
        let (mut group, old, heir) = at_work(durability);
        group.down = vec![old];
        let mut silent_us = None;
        for _ in 0..500 {
            group.run(250);
            if !group.may_speak(old) {
                silent_us.get_or_insert(group.now_us);
            }
            if group.nodes[&heir].role() == Role::Leader {
                break;
            }
        }
        assert_eq!(group.nodes[&heir].role(), Role::Leader);
        assert!(
            silent_us.is_some_and(|since_us| since_us < group.now_us),
            "{durability:?}"
        );
    }
}

#[test]
fn nobody_speaks_by_what_came_before_it_led() {
    let mut group = Group::new(Durability::Memory, &three());
    let leader = group.elect();
    group.down = (0..3).filter(|id| *id != leader).collect();
    let mut out = Vec::new();
    // Led again with nobody there: no echo, no lease, however fresh its peers' marks are.
    group.run(500_000);
    let node = group.nodes.get_mut(&leader).unwrap();
    node.step(group.now_us, Event::Tick, &mut out);
    assert_eq!(node.speaks_until_us(), None);
}

#[test]
fn who_hears_a_leader_votes_for_nobody_but_its_heir() {
    for (why, given) in [
        (Stand::Silence, false),
        (Stand::Asks, false),
        (Stand::HandedOver, true),
    ] {
        let (mut group, _, heir) = at_work(Durability::Memory);
        assert_eq!(group.is_voted_for(2, heir, why), given, "{why:?}");
    }
    let (mut group, old, heir) = at_work(Durability::Memory);
    group.down = vec![old, heir];
    group.run(ELECTION_US);
    assert!(
        group.is_voted_for(2, heir, Stand::Silence),
        "a silent leader's time is over"
    );
}

#[test]
fn a_voter_whose_owner_is_late_counts_its_silence_from_when_it_heard_the_leader() {
    // Its owner read its clock, was kept from its core, and drives it by that for a while. Then it reads its clock anew, and a
    // candidate's word comes that was on its way for long.
    for by_old_time in [true, false] {
        let (mut group, leader, heir) = at_work(Durability::Memory);
        let mut standby = Standby::new(2_500, 1_000_000);
        standby.owner_drives(group.now_us, group.now_us);
        group.late.insert(2, (40_000, (!by_old_time).then_some(standby)));
        group.run(40_000);
        group.late.clear();
        assert!(group.may_speak(leader));
        let given = group.is_voted_for(2, heir, Stand::Silence);
        assert_eq!(
            given, by_old_time,
            "a vote while the leader speaks: driven by an old time: {by_old_time}"
        );
    }
}

#[test]
fn a_voter_that_was_started_again_remembers_that_it_may_have_heard_somebody() {
    let (mut group, _, heir) = at_work(Durability::Disk);
    group.restart(2, Durability::Disk);
    group.step(2, Event::Tick);
    assert!(!group.is_voted_for(2, heir, Stand::Silence));
    group.down = vec![0, 1];
    group.run(ELECTION_US);
    assert!(group.is_voted_for(2, heir, Stand::Silence));
}

#[test]
fn a_link_that_its_leader_has_closed_frees_the_voter_and_takes_the_lease() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    group.lose_link(2, leader, false);
    assert!(
        !group.is_voted_for(2, heir, Stand::Silence),
        "this host's own doing proves nothing"
    );
    let (mut group, leader, heir) = at_work(Durability::Memory);
    group.lose_link(leader, 2, false);
    assert!(group.may_speak(leader), "the other still echoes");
    group.lose_link(leader, heir, false);
    assert!(!group.may_speak(leader));
    group.lose_link(2, leader, true);
    assert!(group.is_voted_for(2, heir, Stand::Silence));
    group.run(20_000);
    assert!(
        group.leader().is_none_or(|id| group.may_speak(id)),
        "new beats, new lease"
    );
}

#[test]
fn a_transfer_ends_the_lease_before_the_heir_is_told() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    group.down = vec![heir];
    group.step(leader, Event::TransferTo(ReplicaId(heir)));
    let told = |(id, action): &(u8, Action)| match action {
        Action::Send { message, .. } if *id == leader && matches!(message, Message::Campaign { .. }) => {
            Some(message.clone())
        }
        _ => None,
    };
    let word = group.events.iter().find_map(told).expect("the heir is told");
    assert!(!group.may_speak(leader));
    // The word is on its way for long. The heir hears later ones, which it may not follow, until the leader gives up and may speak again.
    group.down.clear();
    group.step(heir, Event::MayLead(false));
    group.run(100_000);
    assert!(!group.may_speak(leader), "it tells its heir with each beat");
    group.run(250_000);
    assert!(group.may_speak(leader));
    group.step(heir, Event::MayLead(true));
    let term = group.nodes[&heir].term();
    let from = ReplicaId(leader);
    group.step(heir, Event::Received { from, message: word });
    assert_eq!((group.leader(), group.nodes[&heir].term()), (Some(leader), term));
}

#[test]
fn a_leader_whose_heir_died_before_it_stood_speaks_again_in_a_newer_term() {
    for durability in BOTH {
        let (mut group, leader, heir) = at_work(durability);
        let term = group.nodes[&leader].term();
        group.down = vec![heir];
        group.step(leader, Event::TransferTo(ReplicaId(heir)));
        assert!(!group.may_speak(leader));
        group.run(2_000_000);
        assert_eq!(group.leader(), Some(leader));
        assert!(group.nodes[&leader].term() > term, "the old word counts no more");
        assert!(group.may_speak(leader), "{durability:?}");
        // The heir is back, with a word of the old term.
        group.down.clear();
        let from = ReplicaId(leader);
        let message = Message::Campaign {
            term,
            beat: 1_000_000,
        };
        group.step(heir, Event::Received { from, message });
        group.run(20_000);
        assert!(group.leader() == Some(leader) && group.may_speak(leader));
    }
}

#[test]
fn an_heir_that_is_agreed_to_be_no_member_is_not_waited_for() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    let term = group.nodes[&leader].term();
    group.down = vec![heir];
    group.step(leader, Event::TransferTo(ReplicaId(heir)));
    let failed = Action::TransferFailed { to: ReplicaId(heir) };
    while !group.events.contains(&(leader, failed.clone())) {
        group.run(1_000);
    }
    let mut members = three();
    members.retain(|member| member.id != ReplicaId(heir));
    let change = |group: &mut Group, members: &[Member]| {
        let node = group.nodes.get_mut(&leader).unwrap();
        node.change_members(members.to_vec()).unwrap();
        group.step(leader, Event::Flush);
    };
    group.down = vec![heir, 2];
    change(&mut group, &members);
    assert!(!group.may_speak(leader), "it is not agreed");
    group.down = vec![heir];
    group.run(30_000);
    assert!(group.may_speak(leader));
    group.add(Durability::Memory, 3, vec![]);
    members.push(Member::full(3));
    change(&mut group, &members);
    group.run(1_000_000);
    assert!(group.may_speak(leader));
    assert_eq!(group.nodes[&leader].term(), term, "in the same term");
}

#[test]
fn an_heir_that_may_not_lead_yet_or_misses_the_word_takes_over_with_a_later_beat() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    group.step(heir, Event::MayLead(false));
    group.step(leader, Event::TransferTo(ReplicaId(heir)));
    assert_eq!(group.leader(), Some(leader));
    group.step(heir, Event::MayLead(true));
    group.run(20_000);
    assert_eq!(group.leader(), Some(heir));

    let (mut group, leader, heir) = at_work(Durability::Memory);
    group.down = vec![heir];
    group.step(leader, Event::TransferTo(ReplicaId(heir)));
    group.down.clear();
    group.run(20_000);
    assert_eq!(group.leader(), Some(heir));
}

#[test]
fn a_silence_that_meant_nothing_makes_the_next_one_longer() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    let term = group.nodes[&leader].term();
    assert_eq!(
        group.nodes[&heir].patience_us(),
        ELECTION_US,
        "never below the time-out"
    );
    for pause_us in [20_000, 35_000, 60_000, 100_000] {
        group.down = vec![leader];
        group.run(pause_us);
        group.down.clear();
        group.run(20_000);
        assert_eq!(group.leader(), Some(leader), "after {pause_us} us");
        assert!(group.nodes[&heir].patience_us() >= pause_us);
    }
    assert_eq!(group.nodes[&heir].term(), term, "and nobody asked for more");
    group.run(9_000_000);
    assert_eq!(
        group.nodes[&heir].patience_us(),
        ELECTION_US,
        "what is long ago is forgotten"
    );
    group.down = vec![leader];
    assert_eq!(group.elect(), heir, "a dead one is missed all the same");
}

#[test]
fn who_was_late_itself_listens_before_it_believes_that_others_died() {
    let (mut group, leader, heir) = at_work(Durability::Memory);
    let term = group.nodes[&leader].term();
    // The follower oversleeps; its own tick comes before what has arrived meanwhile.
    group.down = vec![heir];
    group.run(500_000);
    group.down.clear();
    group.step(heir, Event::Tick);
    assert_eq!(group.nodes[&heir].leader(), Some(ReplicaId(leader)));
    // The leader oversleeps; nobody else is able to lead.
    group.step(heir, Event::MayLead(false));
    group.down = vec![leader];
    group.run(300_000);
    group.down.clear();
    group.step(leader, Event::Tick);
    group.run(20_000);
    assert_eq!(
        (group.leader(), group.nodes[&leader].term()),
        (Some(leader), term)
    );
    assert!(group.may_speak(leader));
    // And one that is always late still finds that it is alone.
    group.down = (0..3).filter(|id| *id != leader).collect();
    for _ in 0..40 {
        group.now_us += 50_000;
        group.step(leader, Event::Tick);
    }
    assert_ne!(group.nodes[&leader].role(), Role::Leader);
}

#[test]
fn entries_that_arrive_are_a_sign_of_life_though_their_beats_come_late() {
    for durability in BOTH {
        for acknowledges in [true, false] {
            let (mut group, leader, heir) = at_work(durability);
            // Bulk goes before the beats on their way: no new one is echoed from here on.
            let [term, beat] = [group.nodes[&leader].term().0, 1];
            group.down = (0..3).filter(|id| *id != leader).collect();
            for _ in 0..2_000 {
                if group.nodes[&leader].role() != Role::Leader {
                    break;
                }
                group.propose("bulk");
                group.run(250);
                let message = Message::Ack {
                    term: Term(term),
                    durable: group.nodes[&leader].appended().index,
                    beat,
                };
                let from = ReplicaId(heir);
                if acknowledges {
                    group.step(leader, Event::Received { from, message });
                }
            }
            let leads = group.nodes[&leader].role() == Role::Leader;
            assert_eq!(leads, acknowledges, "{durability:?}");
            assert!(!group.may_speak(leader), "it is no licence to speak");
        }
    }
}

#[test]
fn who_says_at_every_turn_that_it_may_lead_is_elected_all_the_same() {
    let mut group = Group::new(Durability::Memory, &three());
    let old = group.elect();
    group.step(1 - old, Event::MayLead(false));
    // Nobody can take its place: it goes, and is willing again at once.
    group.step(old, Event::MayLead(false));
    assert_eq!(group.leader(), None);
    for _ in 0..1_000 {
        group.step(old, Event::MayLead(true));
        group.run(1_000);
    }
    assert_eq!(group.leader(), Some(old), "a second is long enough");
}
