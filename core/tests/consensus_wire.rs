//! Property tests of the consensus codec (W1 to W3 of `wire::consensus`) from seeded random messages; a failure prints the
//! seed, and `SEED=n cargo test -p dunlin-core --test consensus_wire` repeats it.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a seed may be given

use bytes::Bytes;
use dunlin_core::consensus::{Entry, EntryKind, MAX_MEMBERS, Member, Message, Snapshot, Stand};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use dunlin_core::wire::consensus::{
    decode, decode_entry, decode_members, decode_snapshot, encode, encode_entry, encode_members,
    encode_snapshot,
};

struct Random(u64);

impl Random {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 1
    }
    fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
    /// Small, large and at the edges.
    fn number(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(4),
            1 => u64::MAX - self.below(3),
            _ => self.draw(),
        }
    }
    fn flag(&mut self) -> bool {
        self.below(2) == 1
    }
    fn stamp(&mut self) -> Viewstamp {
        Viewstamp {
            term: Term(self.number()),
            index: Index(self.number()),
        }
    }
    fn bytes(&mut self) -> Bytes {
        let len = self.below(40) * self.below(40);
        (0..len).map(|_| self.draw() as u8).collect::<Vec<_>>().into()
    }
    fn members(&mut self) -> Vec<Member> {
        // Now and then the largest group.
        let most = if self.below(16) == 0 { 128 } else { 8 };
        let first = self.below(128) as u8;
        (0..self.below(most) as u8)
            .map(|nth| Member {
                id: ReplicaId(first + nth),
                witness: self.flag(),
            })
            .collect()
    }
    fn entry(&mut self, index: u64) -> Entry {
        let kind = [EntryKind::Barrier, EntryKind::Data, EntryKind::Members][self.below(3) as usize];
        Entry {
            stamp: Viewstamp {
                term: Term(self.number()),
                index: Index(index),
            },
            kind,
            payload: self.bytes(),
        }
    }
    fn entries(&mut self) -> (Viewstamp, Vec<Entry>) {
        let prev = Viewstamp {
            term: Term(self.number()),
            index: Index(self.draw() >> 1),
        };
        (
            prev,
            (1..=self.below(6))
                .map(|nth| self.entry(prev.index.0 + nth))
                .collect(),
        )
    }
    fn snapshot(&mut self) -> Snapshot {
        Snapshot {
            last: self.stamp(),
            members: self.members(),
            state: self.bytes(),
        }
    }
    fn message(&mut self) -> Message {
        let term = Term(self.number());
        match self.below(12) {
            0 => {
                let (prev, entries) = self.entries();
                Message::Append { term, prev, entries }
            }
            1 => Message::Lead {
                term,
                commit: Index(self.number()),
                beat: self.number(),
            },
            2 => Message::Ack {
                term,
                durable: Index(self.number()),
                beat: self.number(),
            },
            3 => Message::Reject {
                term,
                hint: Index(self.number()),
            },
            4 => Message::RequestVote {
                term,
                last: self.stamp(),
                why: [Stand::Silence, Stand::Asks, Stand::HandedOver][(self.number() % 3) as usize],
            },
            5 => Message::Vote {
                term,
                granted: self.flag(),
                pre: self.flag(),
                last: self.stamp(),
            },
            6 => Message::Snapshot {
                term,
                snapshot: self.snapshot(),
                leads: self.flag(),
            },
            7 => Message::Pull {
                term,
                at: self.stamp(),
                committed: Index(self.number()),
            },
            8 => {
                let (prev, entries) = self.entries();
                Message::Pulled {
                    term,
                    prev,
                    entries,
                    last: self.stamp(),
                }
            }
            9 => Message::Recover {
                term,
                nonce: self.number(),
                held: Index(self.number()),
            },
            10 => Message::Recovery {
                term,
                nonce: self.number(),
                last: Index(self.number()),
            },
            _ => Message::Campaign {
                term,
                beat: self.number(),
            },
        }
    }
}

fn for_seeds(test: impl Fn(&mut Random)) {
    let only = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse::<u64>().ok());
    for seed in only.map_or(0..5_000, |seed| seed..seed + 1) {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&mut Random(seed))));
        assert!(
            run.is_ok(),
            "seed {seed}: repeat with SEED={seed} cargo test -p dunlin-core --test consensus_wire"
        );
    }
}

#[test]
fn every_message_survives_the_wire() {
    for_seeds(|random| {
        let message = random.message();
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        assert_eq!(decode(&bytes).as_ref(), Ok(&message));
    });
}

#[test]
fn entries_members_and_snapshots_survive_the_disk() {
    for_seeds(|random| {
        let (entry, members, snapshot) = (random.entry(7), random.members(), random.snapshot());
        let mut bytes = Vec::new();
        encode_entry(&entry, &mut bytes);
        assert_eq!(decode_entry(&bytes), Ok(entry));
        assert_eq!(decode_members(&encode_members(&members)), Ok(members));
        bytes.clear();
        encode_snapshot(&snapshot, &mut bytes);
        assert_eq!(decode_snapshot(&bytes), Ok(snapshot));
    });
}

#[test]
fn every_cut_and_every_tail_is_refused() {
    for_seeds(|random| {
        let mut bytes = Vec::new();
        encode(&random.message(), &mut bytes);
        let cut = random.below(bytes.len() as u64) as usize;
        assert!(decode(&bytes[..cut]).is_err());
        bytes.push(random.draw() as u8);
        assert!(decode(&bytes).is_err());
    });
}

/// W2 and W3: whatever the bytes, no panic; what is understood is written the same way again.
#[test]
fn damaged_and_random_bytes_are_refused_or_understood_exactly() {
    for_seeds(|random| {
        let mut bytes = Vec::new();
        encode(&random.message(), &mut bytes);
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.draw() as u8;
        }
        let noise: Vec<u8> = (0..random.below(64)).map(|_| random.draw() as u8 & 15).collect();
        for bytes in [bytes, noise] {
            if let Ok(message) = decode(&bytes) {
                let mut again = Vec::new();
                encode(&message, &mut again);
                assert_eq!(again, bytes);
            }
            let _ = (
                decode_members(&bytes),
                decode_snapshot(&bytes),
                decode_entry(&bytes),
            );
        }
    });
}

#[test]
fn one_member_too_many_is_refused() {
    let members = |count| (0..count).map(Member::full).collect::<Vec<_>>();
    let most = MAX_MEMBERS as u8;
    assert_eq!(decode_members(&encode_members(&members(most))), Ok(members(most)));
    assert!(decode_members(&encode_members(&members(most + 1))).is_err());
}

#[test]
fn a_huge_count_is_refused_before_anything_is_allocated() {
    let mut bytes = Vec::new();
    let prev = Viewstamp {
        term: Term(1),
        index: Index(1),
    };
    encode(
        &Message::Append {
            term: Term(1),
            prev,
            entries: Vec::new(),
        },
        &mut bytes,
    );
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&60_000u32.to_le_bytes());
    assert!(decode(&bytes).is_err());
    bytes[at..].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(decode(&bytes).is_err());
}
