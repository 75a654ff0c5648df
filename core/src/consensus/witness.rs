//! What it decides: whether a witness gets an entry at once, or with the next beat (`Config::witness_waits`).
//!
//! Flow: `propose`'s `Flush` and acknowledgements ask for each peer; a beat asks nobody and sends all.
//!
//! Invariants:
//! - W1 a witness waits only while entries are agreed without it: this replica and the full members that keep up are a
//!   majority. A member that has not acknowledged what was appended two beats ago does not keep up, so an entry waits for a
//!   dead backup and for its witness no longer than that;
//! - W2 what steers (a term's barrier, members, control entries) waits for nothing.
//!
//! Agreement does not rest on it: to wait is to be a message that is late. What it saves is a message each way and a wake-up
//! at both ends for each input; and the witness's host is one that has other things to do.
//!
//! Source: Cheap Paxos (Lamport and Massa, DSN 2004): a machine that is only there to make a majority does nothing
//! while the others are well. There it is idle; here it holds the log up to a beat ago, so it can take part at once.
//!
//! Not here: sending (`propose`).

use super::Consensus;
use super::leading::Peer;
use super::tally::majority;

impl Consensus {
    /// Whether that peer may get what it lacks with the next beat.
    pub(super) fn may_wait(&self, peer: &Peer) -> bool {
        // Asked for each peer at each entry and acknowledgement: of large groups, which have no witness, nothing more is looked at.
        if !self.cfg.witness_waits || !peer.witness || peer.probing {
            return false;
        }
        let (leading, last) = (&self.leading, self.log.last().index);
        let may = peer.next > leading.pressing && peer.next > self.log.base().index;
        may && self.agrees_without_witnesses()
            && (peer.next > last || {
                let (entries, bytes) = (self.cfg.batch_entries, self.cfg.batch_bytes);
                self.log.batch_end(peer.next, entries, bytes) == last
            })
    }

    /// W1: whether this replica and the full members that keep up are a majority.
    fn agrees_without_witnesses(&self) -> bool {
        let since = self.leading.at_beats[1];
        let keeps_up = |peer: &&Peer| !peer.witness && !peer.recovering && peer.matched >= since;
        let others = self.leading.peers.iter().filter(keeps_up).count();
        1 + others >= majority(self.log.members().len())
    }
}
