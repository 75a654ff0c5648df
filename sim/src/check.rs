//! What it decides: whether a run kept the promises, seen from outside the code under test.
//!
//! Flow: the world reports every commit, election, word and answer here; the first violation ends the run.
//!
//! Invariants: the ones of `dunlin_core::consensus`, by number: C1 one leader per term, C2 agreement, C3 no agreed entry
//! is lost, C5 a word rests on a hard state (and an entry) that is on disk, C6 who may lead. Linearizable answers: `linear`.
//!
//! Source: Raft's five properties (figure 3).
//!
//! Not here: C4, which the core asserts itself (a panic ends a run, too); C7, whose violation shows as C2 or C3.

use dunlin_core::consensus::{Consensus, Entry, Member};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use std::collections::BTreeMap;

/// What the group has agreed on, as the first replica to say so saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Checker {
    agreed: Vec<(Viewstamp, u64)>,
    chain: Vec<u64>,
    /// The term in which somebody first said so.
    agreed_in: Vec<Term>,
    leaders: BTreeMap<Term, ReplicaId>,
}

/// A number for an entry's content.
#[must_use]
pub fn digest(entry: &Entry) -> u64 {
    let seed = entry
        .stamp
        .term
        .0
        .wrapping_mul(31)
        .wrapping_add(entry.kind as u64);
    entry
        .payload
        .iter()
        .fold(mix(seed), |hash, &byte| mix(hash ^ u64::from(byte)))
}

/// The state machine of a run: a number that depends on every entry in order.
#[must_use]
pub fn fold(chain: u64, entry: &Entry) -> u64 {
    mix(chain ^ digest(entry) ^ entry.stamp.index.0.rotate_left(32))
}

fn mix(value: u64) -> u64 {
    let z = (value ^ (value >> 30))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .wrapping_add(0x9e37_79b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (z >> 31)
}

impl Checker {
    /// The newest agreed index.
    #[must_use]
    pub fn agreed(&self) -> u64 {
        self.agreed.len() as u64
    }

    /// The newest term that anybody led, and who.
    #[must_use]
    pub fn newest_leader(&self) -> Option<(Term, ReplicaId)> {
        self.leaders.last_key_value().map(|(term, who)| (*term, *who))
    }

    /// C2: a replica in `term` says that this entry is agreed.
    pub fn on_committed(&mut self, who: ReplicaId, term: Term, entry: &Entry) -> Result<(), String> {
        let at = entry.stamp.index.0 as usize;
        let saw = (entry.stamp, digest(entry));
        match self.agreed.get(at - 1) {
            Some(known) if *known == saw => Ok(()),
            Some(known) => Err(format!(
                "C2 agreement: replica {} agreed on {:?}, others on {:?}",
                who.0, saw.0, known.0
            )),
            None if at == self.agreed.len() + 1 => {
                let chain = self.chain.last().copied().unwrap_or(0);
                self.agreed.push(saw);
                self.agreed_in.push(term);
                self.chain.push(fold(chain, entry));
                Ok(())
            }
            None => Err(format!(
                "C2 agreement: replica {} agreed on {at} with a gap",
                who.0
            )),
        }
    }

    /// C2: a replica's state after `through` (by snapshot or by entries).
    pub fn on_state(&self, who: ReplicaId, through: Index, chain: u64) -> Result<(), String> {
        let known = if through.0 == 0 {
            Some(0)
        } else {
            self.chain.get(through.0 as usize - 1).copied()
        };
        if known == Some(chain) {
            return Ok(());
        }
        Err(format!(
            "C2 agreement: the state of replica {} at {} is not the agreed one",
            who.0, through.0
        ))
    }

    /// C1, C3, C6: a replica says that it leads.
    pub fn on_leader(&mut self, node: &Consensus, willing: bool) -> Result<(), String> {
        let (me, term) = (node.me(), node.term());
        if let Some(other) = self.leaders.insert(term, me)
            && other != me
        {
            return Err(format!(
                "C1 one leader per term: {} and {} lead term {}",
                other.0, me.0, term.0
            ));
        }
        // A candidate may win its old term late, when a newer leader has agreed on more: that is no violation.
        let before = self
            .agreed
            .iter()
            .zip(&self.agreed_in)
            .filter(|(_, agreed_in)| **agreed_in < term);
        for ((stamp, _), _) in before {
            if stamp.index >= node.first() && node.entry(stamp.index).map(|entry| entry.stamp) != Some(*stamp)
            {
                return Err(format!(
                    "C3 durability: {stamp:?} was agreed, but is not in the log of replica {}, leader of term {}",
                    me.0, term.0
                ));
            }
        }
        let electable = node
            .members()
            .iter()
            .any(|member| member.id == me && Member::electable(member));
        if electable && willing {
            Ok(())
        } else {
            Err(format!(
                "C6: replica {} leads term {} (electable: {electable}, willing: {willing})",
                me.0, term.0
            ))
        }
    }
}
