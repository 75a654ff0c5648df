//! What it decides: what an entry of a *shared log* says (docs/log-service.md), and whether it is news.
//!
//! Flow: a program's proposal -> [`Proposal::encode`] -> agreed -> [`Proposal::decode`] and [`Proposers::apply`] on every member, in
//! log order. The proposers' numbers go into the log's snapshot, as they were at the entry where it is cut.
//!
//! Invariants:
//! - G1 of each proposer the entries that are news have the numbers 1, 2, 3, ... in this order: what is said again is not news, and
//!   what would leave a gap is not either;
//! - G2 every member judges alike: nothing counts but the entries before;
//! - G3 decoding accepts exactly what encoding makes, and never panics.
//!
//! Source: Raft's client sessions (Ongaro 6.3), with numbers that leave no gap: a late copy of an old conversation must not
//! overtake what it was to follow. Not here: who proposes, who reads (`node`), how it is agreed (`consensus`).

use crate::units::Index;
use crate::wire::{Reader, WireError};
use bytes::{BufMut, Bytes, BytesMut};
use std::collections::BTreeMap;

/// The most bytes of one entry.
pub const MOST_ENTRY_BYTES: usize = 256 << 10;
/// The longest name of a proposer.
pub const MOST_NAME_BYTES: usize = 64;
/// So many proposers are remembered; of more the one that has been silent for the most entries is forgotten.
pub const MOST_PROPOSERS: usize = 1024;

const NAMELESS: u8 = 1;
const NAMED: u8 = 2;

/// What a program proposed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// The proposer's name and its number for this proposal, if it wants each to count once.
    pub by: Option<(String, u64)>,
    /// The entry itself.
    pub data: Bytes,
}

impl Proposal {
    /// Why this cannot be proposed, if it cannot.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if self.data.len() > MOST_ENTRY_BYTES {
            let bytes = self.data.len();
            return Some(format!(
                "an entry has at most {MOST_ENTRY_BYTES} bytes, this one has {bytes}"
            ));
        }
        let (name, number) = self.by.as_ref()?;
        if name.is_empty() || name.len() > MOST_NAME_BYTES {
            return Some(format!("a proposer's name has 1 to {MOST_NAME_BYTES} bytes"));
        }
        (*number == 0).then(|| "a proposer's numbers begin with 1".to_owned())
    }

    /// An entry's payload. Without a [`Self::fault`].
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(16 + MOST_NAME_BYTES + self.data.len());
        match &self.by {
            None => out.put_u8(NAMELESS),
            Some((name, number)) => {
                out.put_u8(NAMED);
                put_name(name, &mut out);
                out.put_u64(*number);
            }
        }
        out.put_slice(&self.data);
        out.freeze()
    }

    /// A proposal from its entry's payload, whose memory it shares.
    pub fn decode(payload: Bytes) -> Result<Self, WireError> {
        let mut reader = Reader::new(payload);
        let by = match reader.u8()? {
            NAMELESS => None,
            NAMED => Some((take_name(&mut reader)?, reader.u64()?)),
            _ => return Err(WireError::Invalid("kind of proposal")),
        };
        let this = Self {
            by,
            data: reader.rest(),
        };
        match this.fault() {
            None => Ok(this),
            Some(_) => Err(WireError::Invalid("proposal")),
        }
    }
}

fn put_name(name: &str, out: &mut BytesMut) {
    out.put_u8(name.len() as u8);
    out.put_slice(name.as_bytes());
}

fn take_name(reader: &mut Reader) -> Result<String, WireError> {
    let len = usize::from(reader.u8()?);
    let name = reader.take(len)?;
    match std::str::from_utf8(&name) {
        Ok(name) if !name.is_empty() && len <= MOST_NAME_BYTES => Ok(name.to_owned()),
        _ => Err(WireError::Invalid("proposer's name")),
    }
}

/// Whether an agreed proposal is news.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is, at its own index.
    New,
    /// It was agreed before; where, if it was that proposer's last.
    Repeated(Option<Index>),
    /// Its proposer's next number is another one: nothing happened.
    OutOfTurn {
        /// What is due.
        due: u64,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Last {
    number: u64,
    index: Index,
}

/// How far each proposer has come.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Proposers {
    known: BTreeMap<String, Last>,
}

impl Proposers {
    /// Folds an agreed proposal in (G1).
    pub fn apply(&mut self, index: Index, proposal: &Proposal) -> Verdict {
        let Some((name, number)) = &proposal.by else {
            return Verdict::New;
        };
        let number = *number;
        let last = self.known.get(name).copied();
        let due = last.map_or(1, |last| last.number + 1);
        match last {
            Some(last) if number <= last.number => {
                return Verdict::Repeated((number == last.number).then_some(last.index));
            }
            _ if number != due => return Verdict::OutOfTurn { due },
            None if self.known.len() >= MOST_PROPOSERS => self.forget_one(),
            _ => {}
        }
        self.known.insert(name.clone(), Last { number, index });
        Verdict::New
    }

    fn forget_one(&mut self) {
        let longest = self.known.iter().min_by_key(|(_, last)| last.index);
        if let Some(name) = longest.map(|(name, _)| name.clone()) {
            self.known.remove(&name);
        }
    }

    /// The next number of a proposer.
    #[must_use]
    pub fn due(&self, name: &str) -> u64 {
        self.known.get(name).map_or(1, |last| last.number + 1)
    }

    /// For the log's snapshot.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_u16(self.known.len() as u16);
        for (name, last) in &self.known {
            put_name(name, &mut out);
            out.put_u64(last.number);
            out.put_u64(last.index.0);
        }
        out.freeze()
    }

    /// From a snapshot; one that is empty is of a log that was never cut.
    pub fn decode(state: Bytes) -> Result<Self, WireError> {
        if state.is_empty() {
            return Ok(Self::default());
        }
        let mut reader = Reader::new(state);
        let count = usize::from(reader.u16()?);
        if count > MOST_PROPOSERS {
            return Err(WireError::Invalid("number of proposers"));
        }
        let mut known = BTreeMap::new();
        for _ in 0..count {
            let name = take_name(&mut reader)?;
            let last = Last {
                number: reader.u64()?,
                index: Index(reader.u64()?),
            };
            let in_order = known.last_key_value().is_none_or(|(before, _)| *before < name);
            if !in_order || last.number == 0 || last.number == u64::MAX {
                return Err(WireError::Invalid("proposer"));
            }
            known.insert(name, last);
        }
        reader.end()?;
        Ok(Self { known })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by(name: &str, number: u64) -> Proposal {
        Proposal {
            by: Some((name.to_owned(), number)),
            data: Bytes::from_static(b"x"),
        }
    }

    #[test]
    fn each_number_of_a_proposer_counts_once_and_in_order() {
        let mut proposers = Proposers::default();
        let mut apply = |index, proposal: Proposal| proposers.apply(Index(index), &proposal);
        assert_eq!(apply(1, by("a", 1)), Verdict::New);
        assert_eq!(apply(2, by("b", 1)), Verdict::New);
        assert_eq!(apply(3, by("a", 1)), Verdict::Repeated(Some(Index(1))));
        assert_eq!(apply(4, by("a", 3)), Verdict::OutOfTurn { due: 2 });
        assert_eq!(apply(5, by("a", 2)), Verdict::New);
        assert_eq!(apply(6, by("a", 1)), Verdict::Repeated(None));
        let nameless = Proposal {
            by: None,
            data: Bytes::new(),
        };
        assert_eq!(
            (apply(7, nameless.clone()), apply(8, nameless)),
            (Verdict::New, Verdict::New)
        );
    }

    #[test]
    fn the_longest_silent_of_too_many_proposers_is_forgotten_and_skips_nothing() {
        let mut proposers = Proposers::default();
        for nth in 0..MOST_PROPOSERS as u64 {
            proposers.apply(Index(nth + 1), &by(&format!("p{nth}"), 1));
        }
        proposers.apply(Index(5000), &by("p0", 2));
        assert_eq!(proposers.apply(Index(5001), &by("new", 1)), Verdict::New);
        assert_eq!((proposers.due("p0"), proposers.due("p1")), (3, 1));
        let again = proposers.apply(Index(5002), &by("p1", 2));
        assert_eq!(
            again,
            Verdict::OutOfTurn { due: 1 },
            "it is refused, not taken for new"
        );
        assert_eq!(proposers.known.len(), MOST_PROPOSERS);
        assert_eq!(Proposers::decode(proposers.encode()), Ok(proposers));
    }

    #[test]
    fn what_is_too_large_or_nameless_is_told() {
        let large = |bytes| Proposal {
            by: None,
            data: Bytes::from(vec![0; bytes]),
        };
        assert_eq!(large(MOST_ENTRY_BYTES).fault(), None);
        assert!(
            large(MOST_ENTRY_BYTES + 1)
                .fault()
                .is_some_and(|why| why.contains("262144"))
        );
        assert!(by("", 1).fault().is_some() && by("a", 0).fault().is_some());
        assert!(by(&"n".repeat(MOST_NAME_BYTES + 1), 1).fault().is_some());
    }

    proptest! {
        /// G3.
        #[test]
        fn proposals_survive_the_log_and_other_bytes_are_refused_or_understood_exactly(
            name in "[a-zä-ü]{1,20}", number in 1..u64::MAX, data: Vec<u8>, noise: Vec<u8>, named: bool
        ) {
            let proposal = Proposal { by: named.then_some((name, number)), data: data.into() };
            prop_assert_eq!(Proposal::decode(proposal.encode()), Ok(proposal));
            let noise = Bytes::from(noise);
            if let Ok(understood) = Proposal::decode(noise.clone()) {
                prop_assert_eq!(understood.encode(), noise.clone());
            }
            if let Ok(understood) = Proposers::decode(noise.clone()) {
                prop_assert!(noise.is_empty() || understood.encode() == noise);
            }
        }

        /// G2: whoever begins with a snapshot judges as whoever saw all.
        #[test]
        fn a_snapshot_judges_as_the_entries_that_it_stands_for(
            said in prop::collection::vec((0..4u8, 1..6u64), 0..80), cut in 0..80usize
        ) {
            let (mut all, mut cut_off) = (Proposers::default(), Proposers::default());
            for (at, (who, number)) in said.into_iter().enumerate() {
                if at == cut {
                    cut_off = Proposers::decode(all.encode()).unwrap();
                }
                let (index, proposal) = (Index(at as u64 + 1), by(&who.to_string(), number));
                let verdict = all.apply(index, &proposal);
                if at >= cut {
                    prop_assert_eq!(cut_off.apply(index, &proposal), verdict);
                }
            }
        }
    }
}
