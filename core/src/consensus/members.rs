//! What it decides: which changes of the group's members a leader takes.
//!
//! Flow: `change_members` judges and appends -> in force at once -> agreed like any entry.
//!
//! Invariants:
//! - P4 at most one change of members is under way, and none before the term's barrier is agreed;
//! - P5 after it a majority answers and has its memory, and this leader is one that may lead.
//!
//! Source: Ongaro 4.1 (one at a time), and his correction of 2015 (the barrier).
//!
//! Not here: which members are in force (`log`), who is told (`propose`).

use super::leading::Peer;
use super::tally::majority;
use super::{Bug, Consensus, EntryKind, MAX_MEMBERS, Member, Refusal};
use crate::units::{Index, ReplicaId};
use crate::wire::consensus::encode_members;

impl Consensus {
    /// Appends a change of members (in force at once, even before it is agreed): one member more, less, or changed
    /// between witness and full; any `complete` flags along with it. Sent with the next `Event::Flush`.
    pub fn change_members(&mut self, members: Vec<Member>) -> Result<Index, Refusal> {
        self.ready_to_propose()?;
        let committed = self.order.committed();
        let pending = self.log.members_index() > committed || committed < self.leading.barrier;
        if pending && !self.bugged(Bug::ChangesTwoAtOnce) {
            return Err(Refusal::ChangePending);
        }
        let old = self.log.members();
        let named_twice =
            (1..members.len()).any(|at| members[..at].iter().any(|member| member.id == members[at].id));
        if members.is_empty() || members.len() > MAX_MEMBERS || named_twice {
            return Err(Refusal::BadChange);
        }
        let differs = |one: &Member, other: &[Member]| {
            !other
                .iter()
                .any(|member| member.id == one.id && member.witness == one.witness)
        };
        let gone = old
            .iter()
            .filter(|member| differs(member, &members))
            .map(|member| member.id);
        let came = members
            .iter()
            .filter(|member| differs(member, old))
            .map(|member| member.id);
        let mut touched: Vec<ReplicaId> = gone.chain(came).collect();
        touched.dedup();
        if touched.len() > 1 && !self.bugged(Bug::ChangesTwoAtOnce) {
            return Err(Refusal::BadChange);
        }
        if !members
            .iter()
            .any(|member| member.id == self.cfg.me && member.electable())
        {
            return Err(Refusal::WouldRemoveLeader);
        }
        // A new member cannot be known to be well yet; of the others enough must be.
        let ill = members
            .iter()
            .filter(|member| self.leading.peer(member.id).is_some_and(|p| !self.is_well(p)));
        if members.len() - ill.count() < majority(members.len()) {
            return Err(Refusal::WouldLoseMajority);
        }
        let index = self.append_own(EntryKind::Members, encode_members(&members));
        self.leading.pressing = index;
        self.meet_peers();
        Ok(index)
    }

    /// It has acknowledged in this term, so it had its memory, and it answered within an election time-out. (Before it
    /// has said anything in this term it may be one that lost its memory while another led.)
    fn is_well(&self, peer: &Peer) -> bool {
        peer.matched > Index(0)
            && !peer.recovering
            && peer.heard_us.saturating_add(self.cfg.election_max_us) >= self.now_us
    }
}
