//! A member of the group that says anything at any time: the replica may refuse, never panic, and never break its order.

use crate::script::Script;
use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Entry, EntryKind, Event, HardState, Member, Message, Restored,
    Snapshot, Stand,
};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use dunlin_core::wire::consensus::{decode, encode_members};
use std::collections::VecDeque;

fn stamp(script: &mut Script<'_>) -> Viewstamp {
    Viewstamp {
        term: Term(script.number()),
        index: Index(script.number()),
    }
}

fn members(script: &mut Script<'_>) -> Vec<Member> {
    let mut members: Vec<Member> = Vec::new();
    for _ in 0..script.byte() % 8 {
        let (id, flags) = (script.byte() % 8, script.byte());
        if !members.iter().any(|member| member.id.0 == id) {
            members.push(Member {
                id: ReplicaId(id),
                witness: flags & 1 != 0,
            });
        }
    }
    members.truncate(7);
    members
}

/// As the wire gives them: consecutive after `prev`, terms of any kind.
fn entries(script: &mut Script<'_>, prev: Viewstamp) -> Vec<Entry> {
    let mut entries = Vec::new();
    for nth in 1..=u64::from(script.byte() % 6) {
        let Some(index) = prev.index.0.checked_add(nth).filter(|index| *index < u64::MAX) else {
            break;
        };
        let (kind, term) = (script.byte(), Term(script.number()));
        let (kind, payload) = match kind % 8 {
            0 => (EntryKind::Barrier, Bytes::new()),
            1 => (EntryKind::Members, encode_members(&members(script))),
            2 => {
                let n = usize::from(script.byte());
                (EntryKind::Members, Bytes::copy_from_slice(script.bytes(n)))
            }
            _ => (EntryKind::Data, Bytes::from(vec![kind; usize::from(kind)])),
        };
        let stamp = Viewstamp {
            term,
            index: Index(index),
        };
        entries.push(Entry { stamp, kind, payload });
    }
    entries
}

fn message(script: &mut Script<'_>) -> Option<Message> {
    let kind = script.byte();
    let term = Term(script.number());
    Some(match kind % 14 {
        0 | 12 => {
            let prev = stamp(script);
            let entries = entries(script, prev);
            Message::Append { term, prev, entries }
        }
        1 => Message::Lead {
            term,
            commit: Index(script.number()),
            beat: script.number(),
        },
        2 => Message::Ack {
            term,
            durable: Index(script.number()),
            beat: script.number(),
        },
        3 => Message::Reject {
            term,
            hint: Index(script.number()),
        },
        4 => Message::RequestVote {
            term,
            last: stamp(script),
            why: [Stand::Silence, Stand::Asks, Stand::HandedOver][usize::from(script.byte() % 3)],
        },
        5 => Message::Vote {
            term,
            granted: script.byte() & 1 != 0,
            pre: script.byte() & 1 != 0,
            last: stamp(script),
        },
        6 => Message::Snapshot {
            term,
            snapshot: Snapshot {
                last: stamp(script),
                members: members(script),
                state: Bytes::from_static(b"state"),
            },
            leads: script.byte() & 1 != 0,
        },
        7 => Message::Pull {
            term,
            at: stamp(script),
            committed: Index(script.number()),
        },
        8 => {
            let prev = stamp(script);
            Message::Pulled {
                term,
                prev,
                entries: entries(script, prev),
                last: stamp(script),
            }
        }
        9 => Message::Recover {
            term,
            nonce: script.number(),
            held: Index(script.number()),
        },
        10 => Message::Recovery {
            term,
            nonce: script.number(),
            last: Index(script.number()),
        },
        11 => Message::Campaign {
            term,
            beat: script.number(),
        },
        _ => {
            let n = usize::from(script.u16());
            decode(script.bytes(n)).ok()?
        }
    })
}

/// A shell that obeys, and whose disk is quick or never done, as the script says.
struct Shell {
    core: Consensus,
    now_us: u64,
    actions: Vec<Action>,
    ticket: u64,
    hard_state: Option<HardState>,
    saved: Option<Viewstamp>,
    /// What the owner has still to hear: it runs beside the core.
    heard: VecDeque<Heard>,
    applied: Index,
}

enum Heard {
    Snapshot(Index),
    Committed(Index),
}

impl Shell {
    /// The owner hears of one thing, and answers.
    fn hear(&mut self) {
        match self.heard.pop_front() {
            Some(Heard::Snapshot(last)) => {
                self.step(Event::SnapshotTaken);
                self.applied = last;
            }
            Some(Heard::Committed(through)) if !self.core.awaits_owner() => self.applied = through,
            _ => {}
        }
        let through = self.applied;
        self.step(Event::Applied { through });
    }

    fn step(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.core.step(self.now_us, event, &mut actions);
        for action in actions.drain(..) {
            match action {
                Action::SendEntries { prev, through, .. } => {
                    for index in prev.index.0 + 1..=through.0 {
                        assert!(
                            self.core.entry(Index(index)).is_some(),
                            "an entry to send is held"
                        );
                    }
                }
                Action::Persist {
                    from,
                    through,
                    ticket,
                } => {
                    for index in from.0..=through.0 {
                        assert!(
                            self.core.entry(Index(index)).is_some(),
                            "an entry to keep is held"
                        );
                    }
                    self.ticket = ticket;
                }
                Action::PersistHardState(hard_state) => self.hard_state = Some(hard_state),
                Action::SaveSnapshot(snapshot) => self.saved = Some(snapshot.last),
                Action::Committed { through } => {
                    assert!(through <= self.core.appended().index);
                    self.heard.push_back(Heard::Committed(through));
                }
                Action::InstallSnapshot(snapshot) => {
                    self.heard.push_back(Heard::Snapshot(snapshot.last.index));
                }
                _ => {}
            }
        }
        self.actions = actions;
        let core = &self.core;
        assert!(core.released() <= core.applied() && core.applied() <= core.committed());
        assert!(core.committed() <= core.appended().index);
    }
}

/// First byte: durability, whether memory was lost. Then events, most of them words of the other two members.
pub fn step(bytes: &[u8]) {
    let mut script = Script(bytes);
    let how = script.byte();
    let durability = if how & 1 == 0 {
        Durability::Memory
    } else {
        Durability::Disk
    };
    let all = vec![Member::full(0), Member::full(1), Member::witness(2)];
    let restored = Restored {
        lost_memory: how & 2 != 0,
        ..Restored::fresh(all)
    };
    let mut shell = Shell {
        core: Consensus::new(Config::new(ReplicaId(0), durability), restored, 42),
        now_us: 1,
        actions: Vec::new(),
        ticket: 0,
        hard_state: None,
        saved: None,
        heard: VecDeque::new(),
        applied: Index(0),
    };
    while !script.is_over() {
        let event = script.byte();
        match event % 16 {
            0..=7 => {
                let from = ReplicaId(1 + event / 16 % 3);
                if let Some(message) = message(&mut script) {
                    shell.step(Event::Received { from, message });
                }
            }
            8 => {
                shell.now_us += u64::from(script.u16()) * 4;
                shell.step(Event::Tick);
            }
            9 => {
                if let Some(hard_state) = shell.hard_state.take() {
                    shell.step(Event::HardStatePersisted(hard_state));
                }
            }
            10 => {
                let ticket = shell.ticket;
                shell.step(Event::Persisted { ticket });
            }
            11 => {
                if let Some(last) = shell.saved.take() {
                    shell.step(Event::SnapshotPersisted { last });
                }
            }
            12 => {
                let _led = shell.core.propose(Bytes::from(vec![1; usize::from(event)]));
                shell.step(Event::Flush);
            }
            13 => {
                // Without a word of the core's it says again what it has applied, which may be of a log that is gone.
                if event & 32 == 0 {
                    shell.hear();
                }
                let through = shell.applied;
                shell.step(Event::Applied { through });
                if event & 16 != 0 {
                    let state = Bytes::from_static(b"state");
                    shell.step(Event::Truncate { through, state });
                }
            }
            14 => {
                let peer = ReplicaId(1 + event / 16 % 2);
                shell.step(if event & 128 == 0 {
                    Event::LinkUp { peer }
                } else {
                    Event::LinkLost {
                        peer,
                        by_peer: event & 64 == 0,
                    }
                });
            }
            _ => match event / 16 % 4 {
                0 => shell.step(Event::Read { id: 7 }),
                1 => shell.step(Event::StepDown),
                2 => shell.step(Event::TransferTo(ReplicaId(1))),
                _ => {
                    let members = members(&mut script);
                    let _led = shell.core.change_members(members);
                    shell.step(Event::Flush);
                }
            },
        }
    }
}
