//! What it decides: whether a host stands for election to boot a VM of which no copy is alive anywhere, from its disk.
//!
//! Flow: nobody leads, and the log says that the VM has lived -> an *inquest*: how new are the disks here, and what do the other hosts
//! hold? -> [`ColdStart::judge`] -> the host with the newest whole disk has a *mandate* -> elected, it has "I alone am complete" agreed, and boots
//! (`leadership`).
//!
//! Invariants:
//! 1. Nobody boots while a copy may be alive that may be led from: every host that can run the VM has said that it holds none, or a
//!    person has said that those who say nothing are dead (`promote --force --from-disk`). A copy that may not be led from as far as its host knows
//!    waits for a leader: to be ended, where others went on without it, and then it keeps nobody from booting; or to hear that it is complete, and
//!    then who knows that is elected to tell it.
//! 2. All judge by the same answers and the same order, so at most one host has a mandate. If the answers changed in between and two have it,
//!    the election makes it one, as always.
//! 3. A mandate ends with the first leader: it is not good for a later loss.
//! 4. What a host knows of who was complete counts, though it has no disk (a witness) or its log is lost (its note): a disk that is known to be
//!    older boots only where a person says that it is to (`--force-stale`).
//!
//! Source: ARCHITECTURE.md, "Who may speak": the persisted log says who was last. Not here: asking, and how new an image is (`node`); what a leader
//! may do (`leadership`).

#[cfg(test)]
mod tests;

use crate::agreed::ReplicaSet;
use crate::consensus::Member;
use crate::replica::leadership::Mandate;
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::{Epoch, ReplicaId, Term, Viewstamp};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Nobody leads for this long: an election takes a tenth of it.
pub const LEADERLESS_US: u64 = 1_000_000;
/// Between two inquests.
pub const AGAIN_US: u64 = 2_000_000;

/// How new an image is: ordered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct DiskMark {
    /// It is the disk at one moment.
    pub consistent: bool,
    /// The term in which it was last written.
    pub term: Term,
    /// Written as that term's primary.
    pub primary: bool,
    /// The last sync that it holds whole.
    pub epoch: Epoch,
}

/// Who held a complete copy, as a host has noted it beside its log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Noted {
    /// Where the log says so.
    pub at: Viewstamp,
    /// Who.
    pub complete: ReplicaSet,
    /// Since when, in milliseconds since 1970, by the clock of who noted it.
    pub since_ms: u64,
}

/// A living copy of the VM, or one that will be there at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LivingCopy {
    /// There is none.
    #[default]
    None,
    /// Its host stands for election.
    Stands,
    /// Its host may not be elected, as far as it knows.
    Waits,
}

/// What a host holds of a VM that nobody leads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Holding {
    /// Its copy.
    pub copy: LivingCopy,
    /// It knows of a leader.
    pub led: bool,
    /// The newest entry of its log.
    pub last: Viewstamp,
    /// Who is complete, as far as its log says.
    pub complete: ReplicaSet,
    /// Its images, in the VM's order; a witness has none.
    pub disks: Vec<DiskMark>,
    /// What it has noted.
    pub noted: Option<Noted>,
    /// Its log was in memory only, and is gone.
    pub recovering: bool,
}

/// What a host knows of who was complete, by its log or its note.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word {
    /// How new it is.
    pub at: Viewstamp,
    /// Who was complete.
    pub complete: ReplicaSet,
    /// Since when, if that was noted.
    pub since_ms: Option<u64>,
    /// Whose word it is.
    pub by: ReplicaId,
}

/// What follows from the answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// This host boots the VM.
    Boots,
    /// It would, if these hosts, which say nothing, were dead.
    Silent(Vec<ReplicaId>),
    /// Another host has the newest disk.
    NewerElsewhere {
        /// Which.
        host: ReplicaId,
        /// It does not know any more what was agreed, and so boots nothing by itself.
        recovering: bool,
    },
    /// Others went on without this host, and none of them has answered.
    Superseded(Word),
    /// This host has a copy that may be led from, or knows who leads.
    Alive(ReplicaId),
    /// This host has a complete copy, and does not know that it is complete: it has to be brought the log.
    Informs(ReplicaId),
    /// The disk here is an unfinished copy.
    Unfinished,
}

impl Verdict {
    /// Whether the disk here is known to be older than another one.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Self::NewerElsewhere { .. } | Self::Superseded(_))
    }
}

/// Who was complete, by the newest log or note.
fn newest_word<'a>(known: impl Iterator<Item = (ReplicaId, &'a Holding)> + Clone) -> Option<Word> {
    let logs = known.clone().map(|(by, said)| Word {
        at: said.last,
        complete: said.complete,
        since_ms: None,
        by,
    });
    let notes = known.filter_map(|(by, said)| {
        said.noted.map(|note| Word {
            at: note.at,
            complete: note.complete,
            since_ms: Some(note.since_ms),
            by,
        })
    });
    let newest = logs.chain(notes.clone()).max_by_key(|word| word.at)?;
    let since_ms = notes
        .filter(|note| note.complete == newest.complete)
        .max_by_key(|note| note.at)
        .and_then(|note| note.since_ms);
    Some(Word { since_ms, ..newest })
}

/// What a host's loop sees.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// Now.
    pub now_us: u64,
    /// It could run the VM, has no copy of it, and knows of no other host that leads.
    pub lost: bool,
    /// It leads.
    pub leads: bool,
    /// The VM has lived, as far as this host knows.
    pub has_lived: bool,
    /// Its log was in memory only, and is gone: it does not know what became of the VM, nor does it vote.
    pub recovering: bool,
}

/// What follows from that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// Nothing now.
    Nothing,
    /// There is nothing to find out any more; whoever ordered something is answered.
    Over,
    /// The disks here are looked at, and the other hosts are asked.
    Inquires,
    /// It waits for a host that knows what was agreed, or for a person.
    Recovering,
}

/// What follows from a verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answered {
    /// It comes too late.
    Late,
    /// This host stands for election, by itself.
    Mandated,
    /// It does not.
    Waits,
    /// This host serves alone, by a person's order.
    Obeys,
    /// A person's order is refused.
    Refuses,
}

/// How far this host is with it.
#[derive(Clone, Debug, Default)]
pub struct ColdStart {
    leaderless_since_us: Option<u64>,
    next_us: u64,
    asking: bool,
    mandate: Mandate,
    /// A person wants the VM to boot here; from an older disk, too.
    ordered: Option<bool>,
    bugs: Bugs,
}

impl ColdStart {
    /// With a fault put back on purpose.
    #[must_use]
    pub fn with_bugs(bugs: Bugs) -> Self {
        Self {
            bugs,
            ..Self::default()
        }
    }

    /// Why this host may be elected without a living copy.
    #[must_use]
    pub fn mandate(&self) -> Mandate {
        self.mandate
    }

    /// What is agreed contradicts it, or it came to nothing.
    pub fn end_mandate(&mut self) {
        self.mandate = Mandate::None;
    }

    /// A person wants the VM to boot from this host's disk; from one that is known to be older, too, with `force_stale`.
    pub fn order(&mut self, force_stale: bool) {
        self.ordered = Some(force_stale);
        self.next_us = 0;
    }

    /// No copy here and nobody leads: is that so everywhere?
    pub fn look(&mut self, sight: &Sight) -> Look {
        if !sight.lost {
            if self.leaderless_since_us.is_none() {
                return Look::Nothing;
            }
            let kept = match self.bugs.has(Bug::KeepsMandate) {
                true => self.mandate,
                false => Mandate::None,
            };
            // Invariant 3.
            *self = Self {
                mandate: kept,
                ..Self::with_bugs(self.bugs)
            };
            return Look::Over;
        }
        let since_us = *self.leaderless_since_us.get_or_insert(sight.now_us);
        if self.asking || sight.now_us < self.next_us || sight.leads {
            return Look::Nothing;
        }
        let is_long = sight.now_us - since_us > LEADERLESS_US;
        if is_long && sight.has_lived && !sight.recovering || self.ordered.is_some() {
            self.asking = true;
            return Look::Inquires;
        }
        match is_long && sight.recovering {
            true => Look::Recovering,
            false => Look::Nothing,
        }
    }

    /// No thread could be had that asks.
    pub fn could_not_ask(&mut self) {
        self.asking = false;
    }

    /// Who boots the VM, by what this host holds and by what the others of its `group` have said (invariants 1, 2 and 4).
    #[must_use]
    pub fn judge(
        &self,
        group: &[Member],
        me: ReplicaId,
        mine: &Holding,
        answers: &BTreeMap<ReplicaId, Holding>,
    ) -> Verdict {
        let counts_all = self.bugs.has(Bug::CountsDroppedCopies);
        let stands = |said: &Holding| match said.copy {
            LivingCopy::None => false,
            LivingCopy::Stands => true,
            LivingCopy::Waits => counts_all,
        };
        let alive = answers.iter().find(|(_, said)| said.led || stands(said));
        if let Some((host, _)) = alive {
            return Verdict::Alive(*host);
        }
        let known = || std::iter::once((me, mine)).chain(answers.iter().map(|(id, said)| (*id, said)));
        let word = newest_word(known());
        let complete = word.map_or(ReplicaSet::default(), |word| word.complete);
        let waits =
            |(id, said): &(&ReplicaId, &Holding)| said.copy == LivingCopy::Waits && complete.contains(**id);
        if let Some((host, _)) = answers.iter().find(waits) {
            return Verdict::Informs(*host);
        }
        let is_witness = |id: ReplicaId| group.iter().any(|member| member.id == id && member.witness);
        let able = || known().filter(|(id, _)| !is_witness(*id));
        if let Some(word) = word.filter(|word| !word.complete.is_empty() && !word.complete.contains(me)) {
            return match able().find(|(id, _)| complete.contains(*id)) {
                Some((host, said)) => Verdict::NewerElsewhere {
                    host,
                    recovering: said.recovering,
                },
                None => Verdict::Superseded(word),
            };
        }
        // In the complete set, then the newest whole disks, then the first in the VM's list.
        let rank =
            |(id, said): &(ReplicaId, &Holding)| (complete.contains(*id), said.disks.clone(), Reverse(id.0));
        if let Some((host, said)) = able().max_by_key(rank).filter(|(host, _)| *host != me) {
            return Verdict::NewerElsewhere {
                host,
                recovering: said.recovering,
            };
        }
        if mine.disks.iter().any(|disk| !disk.consistent) {
            return Verdict::Unfinished;
        }
        // A witness has no copy: without its word the others' has to do.
        let silent = group
            .iter()
            .filter(|member| member.id != me && !member.witness && !answers.contains_key(&member.id));
        match silent.map(|member| member.id).collect::<Vec<_>>() {
            silent if silent.is_empty() => Verdict::Boots,
            silent => Verdict::Silent(silent),
        }
    }

    /// The answers are here, and were judged; none where the disk here could not be read.
    pub fn answered(&mut self, now_us: u64, verdict: Option<&Verdict>) -> Answered {
        self.asking = false;
        self.next_us = now_us + AGAIN_US;
        if self.leaderless_since_us.is_none() {
            return Answered::Late;
        }
        self.mandate = Mandate::None;
        let (mandate, answered) = match (self.ordered.take(), verdict) {
            (None, Some(Verdict::Boots)) => (Mandate::Newest, Answered::Mandated),
            (None, Some(Verdict::Informs(_))) => (Mandate::Informs, Answered::Mandated),
            (None, Some(Verdict::Silent(_))) if self.bugs.has(Bug::BootsUnheard) => {
                (Mandate::Newest, Answered::Mandated)
            }
            (None, _) => (Mandate::None, Answered::Waits),
            (Some(_), Some(Verdict::Boots | Verdict::Silent(_))) => (Mandate::Newest, Answered::Obeys),
            (Some(true), Some(verdict)) if verdict.is_stale() => (Mandate::Stale, Answered::Obeys),
            (Some(_), _) => (Mandate::None, Answered::Refuses),
        };
        self.mandate = mandate;
        answered
    }
}
