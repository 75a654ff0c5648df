//! What it decides: whether *every* order of messages, time-outs and restarts of a small group keeps the promises.
//!
//! Flow: stateright visits all states of three replicas that run the production `Consensus` (it is `Clone + Eq + Hash`; with
//! all time-outs zero it does not depend on the clock, so any replica may time out at any moment). A message once sent can
//! be delivered at any time, in any order, any number of times, or never. Bounds: terms, proposals, restarts.
//!
//! Invariants: C1, C2, C3, C6 by the simulator's checker, in every reachable state.
//!
//! Source: stateright.
//!
//! Not here: half-written disks and clocks (the simulator); a disk write is one step here. Heartbeats of a leader: nothing
//! hangs on their number.

use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Bug, Config, Consensus, Durability, Entry, Event, HardState, Member, Message, Restored, Role,
    Snapshot, Stand,
};
use dunlin_core::units::{Index, ReplicaId, Term};
use dunlin_core::wire::consensus::{decode, encode};
use dunlin_sim::check::{Checker, fold};
use stateright::{Checker as _, Model, Property};
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
struct Group {
    durability: Durability,
    members: Vec<Member>,
    terms: u64,
    proposals: usize,
    restarts: u32,
    bug: Option<Bug>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Replica {
    node: Consensus,
    hard_state: HardState,
    log: Vec<Entry>,
    applied: Index,
    chain: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    replicas: Vec<Replica>,
    /// Everything that was ever said, as bytes: sender, receiver, message. Of the cumulative words of one term only the newest.
    said: BTreeSet<(u8, u8, Vec<u8>)>,
    /// Words that raise no promise (pre-vote, pull): heard at once, by everybody, or the time-out did not happen.
    asides: Vec<(u8, u8, Message)>,
    proposals: usize,
    restarts: u32,
    checker: Checker,
    violation: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    TimeOut(u8),
    Deliver(u8, u8, Vec<u8>),
    Propose(u8),
    Restart(u8),
}

impl Group {
    fn start(&self, id: u8, hard_state: HardState, log: Vec<Entry>, restarts: u32) -> Consensus {
        let cfg = Config {
            heartbeat_us: 0,
            election_min_us: 0,
            election_max_us: 0,
            batch_entries: 1,
            window_entries: 2,
            ..Config::new(ReplicaId(id), self.durability)
        };
        let lost_memory = self.durability == Durability::Memory && restarts > 0;
        let snapshot = Snapshot {
            members: self.members.clone(),
            ..Snapshot::default()
        };
        let log = if self.durability == Durability::Memory {
            Vec::new()
        } else {
            log
        };
        let seed = u64::from(id) | u64::from(restarts) << 8;
        let mut node = Consensus::new(
            cfg,
            Restored {
                hard_state,
                snapshot,
                log,
                lost_memory,
            },
            seed,
        );
        node.put_back(self.bug);
        node
    }

    fn step(&self, state: &mut State, id: u8, event: Event) -> Result<(), String> {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let replica = &mut state.replicas[usize::from(id)];
            let mut out = Vec::new();
            replica.node.step(0, event, &mut out);
            for action in out {
                let replica = &mut state.replicas[usize::from(id)];
                let mut say = |to: ReplicaId, message: Message| {
                    if is_aside(&message) {
                        state.asides.push((id, to.0, message));
                        return;
                    }
                    let mut bytes = Vec::new();
                    encode(&message, &mut bytes);
                    // Kind and term are the first nine bytes; a word that says the same or more replaces it.
                    if matches!(message, Message::Lead { .. } | Message::Ack { .. }) {
                        let older = |(from, peer, word): &(u8, u8, Vec<u8>)| {
                            (*from, *peer, &word[..9]) == (id, to.0, &bytes[..9])
                        };
                        state.said.retain(|word| !older(word));
                    }
                    state.said.insert((id, to.0, bytes));
                };
                match action {
                    Action::Send { to, message } => say(to, message),
                    Action::SendEntries {
                        to,
                        term,
                        prev,
                        through,
                    } => {
                        say(to, replica.node.append_message(term, prev, through));
                    }
                    Action::Persist {
                        from,
                        through,
                        ticket,
                    } => {
                        replica.log.extend(
                            (from.0..=through.0).filter_map(|i| replica.node.entry(Index(i)).cloned()),
                        );
                        events.push(Event::Persisted { ticket });
                    }
                    Action::TruncateSuffix { from } => replica.log.retain(|entry| entry.stamp.index < from),
                    Action::PersistHardState(hard_state) => {
                        replica.hard_state = hard_state;
                        events.push(Event::HardStatePersisted(hard_state));
                    }
                    Action::Committed { through } => {
                        while replica.applied < through {
                            let next = replica.applied.next();
                            let entry = replica.node.entry(next).ok_or("C3: an agreed entry is gone")?;
                            state
                                .checker
                                .on_committed(ReplicaId(id), replica.node.term(), entry)?;
                            replica.chain = fold(replica.chain, entry);
                            replica.applied = next;
                        }
                        state.checker.on_state(ReplicaId(id), through, replica.chain)?;
                        events.push(Event::Applied { through });
                    }
                    Action::BecameLeader { .. } => state.checker.on_leader(&replica.node, true)?,
                    Action::ProtocolViolation { from, what } => {
                        return Err(format!("{id} on {}: {what}", from.0));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// One step and the asides that it causes.
    fn happen(&self, state: &mut State, id: u8, event: Event) -> Result<(), String> {
        self.step(state, id, event)?;
        while !state.asides.is_empty() {
            let (from, to, message) = state.asides.remove(0);
            self.step(
                state,
                to,
                Event::Received {
                    from: ReplicaId(from),
                    message,
                },
            )?;
        }
        Ok(())
    }

    /// As in the simulator: the memory of a majority is never lost, nor of all that may lead.
    fn may_restart(&self, state: &State, id: u8) -> bool {
        let well = |member: &&Member| {
            member.id.0 != id && state.replicas[usize::from(member.id.0)].node.role() != Role::Recovering
        };
        self.durability == Durability::Disk
            || (self.members.iter().filter(well).count() > self.members.len() / 2
                && self.members.iter().filter(well).any(|member| member.electable()))
    }
}

impl Model for Group {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let replica = |id| Replica {
            node: self.start(id, HardState::default(), Vec::new(), 0),
            hard_state: HardState::default(),
            log: Vec::new(),
            applied: Index(0),
            chain: 0,
        };
        let mut state = State {
            replicas: (0..self.members.len() as u8).map(replica).collect(),
            said: BTreeSet::new(),
            asides: Vec::new(),
            proposals: 0,
            restarts: 0,
            checker: Checker::default(),
            violation: None,
        };
        // Replica 0 leads term 1 with the witness's vote; nobody has heard of it yet.
        assert_eq!(self.happen(&mut state, 0, Event::Tick), Ok(()));
        for way in [(0, 2), (2, 0)] {
            let of = |word: &&(u8, u8, Vec<u8>)| (word.0, word.1) == way;
            let Some((from, to, bytes)) = state.said.iter().find(of).cloned() else {
                continue;
            };
            let Ok(message) = decode(&bytes) else { continue };
            let event = Event::Received {
                from: ReplicaId(from),
                message,
            };
            assert_eq!(self.happen(&mut state, to, event), Ok(()));
        }
        assert_eq!(state.replicas[0].node.role(), Role::Leader);
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        if state.violation.is_some() {
            return;
        }
        for (id, replica) in state.replicas.iter().enumerate() {
            let id = id as u8;
            match replica.node.role() {
                Role::Leader if state.proposals < self.proposals => actions.push(Step::Propose(id)),
                Role::Leader => {}
                Role::Recovering => actions.push(Step::TimeOut(id)),
                _ if replica.node.term().0 < self.terms => actions.push(Step::TimeOut(id)),
                _ => {}
            }
            if state.restarts < self.restarts && self.may_restart(state, id) {
                actions.push(Step::Restart(id));
            }
        }
        actions.extend(
            state
                .said
                .iter()
                .cloned()
                .map(|(from, to, bytes)| Step::Deliver(from, to, bytes)),
        );
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let done = match step {
            Step::TimeOut(id) => self.happen(&mut state, id, Event::Tick),
            Step::Deliver(from, to, bytes) => {
                let message = decode(&bytes).ok()?;
                self.step(
                    &mut state,
                    to,
                    Event::Received {
                        from: ReplicaId(from),
                        message,
                    },
                )
            }
            Step::Propose(id) => {
                state.proposals += 1;
                let payload = Bytes::from(vec![state.proposals as u8]);
                state.replicas[usize::from(id)].node.propose(payload).ok()?;
                self.happen(&mut state, id, Event::Flush)
            }
            Step::Restart(id) => {
                state.restarts += 1;
                let restarts = state.restarts;
                let replica = &mut state.replicas[usize::from(id)];
                replica.node = self.start(id, replica.hard_state, replica.log.clone(), restarts);
                replica.applied = Index(0);
                replica.chain = 0;
                Ok(())
            }
        };
        state.violation = done.err();
        (state != *last).then_some(state)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state
            .replicas
            .iter()
            .all(|replica| replica.node.term() <= Term(self.terms))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no promise is broken", |_, state: &State| {
                state.violation.is_none()
            }),
            Property::sometimes(
                "something is agreed in the last term",
                |model: &Self, state: &State| {
                    let leads = |r: &Replica| r.node.role() == Role::Leader && r.node.term().0 == model.terms;
                    state
                        .replicas
                        .iter()
                        .any(|r| leads(r) && r.node.committed() == r.node.appended().index)
                },
            ),
        ]
    }
}

fn is_aside(message: &Message) -> bool {
    matches!(
        message,
        Message::RequestVote { why: Stand::Asks, .. }
            | Message::Vote { pre: true, .. }
            | Message::Pull { .. }
            | Message::Pulled { .. }
    )
}

fn three() -> Vec<Member> {
    vec![Member::full(0), Member::full(1), Member::witness(2)]
}

/// Visits every state within the group's bounds that can be reached in up to `depth` steps (`None`: all of them).
fn check(group: Group, depth: Option<usize>) -> Option<String> {
    let name = format!("{group:?}");
    let must_agree = depth.is_none();
    // With two a state may be met first by a longer way, and its shorter one given up with what lies behind it.
    let threads = if depth.is_some() { 1 } else { 2 };
    let checker = group
        .checker()
        .threads(threads)
        .target_max_depth(depth.unwrap_or(1_000))
        .spawn_bfs()
        .join();
    let states = checker.unique_state_count();
    let path = checker.discovery("no promise is broken");
    let violation = path.map(|path| path.last_state().violation.clone().unwrap_or_default());
    println!(
        "{states} states, depth {}, violation {violation:?}: {name}",
        checker.max_depth()
    );
    if violation.is_none() && must_agree {
        assert!(
            checker
                .discovery("something is agreed in the last term")
                .is_some(),
            "{name} agrees on nothing"
        );
    }
    violation
}

fn group(durability: Durability, terms: u64, proposals: usize, restarts: u32) -> Group {
    Group {
        durability,
        members: three(),
        terms,
        proposals,
        restarts,
        bug: None,
    }
}

const BOTH: [Durability; 2] = [Durability::Memory, Durability::Disk];

/// One term, whole: every order of everything that the leader and its followers can say to each other.
#[test]
fn one_term_in_every_order() {
    for durability in BOTH {
        assert_eq!(check(group(durability, 1, 1, 0), None), None);
    }
}

/// A second election, a restart anywhere, a proposal: every behaviour of up to `MODEL_DEPTH` steps (8 by default) from there.
#[test]
fn two_terms_and_a_restart_in_every_order() {
    let depth = std::env::var("MODEL_DEPTH")
        .ok()
        .and_then(|depth| depth.parse().ok())
        .unwrap_or(8);
    for durability in BOTH {
        assert_eq!(check(group(durability, 2, 1, 1), Some(depth)), None);
    }
}

/// The model counts only because it finds what is put back on purpose.
#[test]
fn put_back_bugs_are_found() {
    for (bug, durability) in [
        (Bug::VotesForShorterLog, Durability::Disk),
        (Bug::SkipsRecovery, Durability::Memory),
        (Bug::CommitsUnmatched, Durability::Disk),
    ] {
        let group = Group {
            bug: Some(bug),
            ..group(durability, 2, 1, 1)
        };
        assert!(check(group, Some(9)).is_some(), "{bug:?} was not found");
    }
}
