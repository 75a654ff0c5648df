//! What a leader knows of its followers, and of what it has begun. Nothing is decided here but where a peer is found.
//!
//! Flow: `propose` fills it when a leader begins, `follow` empties it when it ends; what moves a peer's marks tells the
//! tallies (`tally`).
//!
//! Not here: what is sent and when (`propose`), what is agreed (`quorum`), until when a leader may speak (`lease`).

use super::tally::{FEW, Tally};
use crate::units::{Index, ReplicaId};

/// Beats whose send time is remembered: many more than fit into an election time-out.
pub(super) const BEATS: usize = 32;

/// What the leader knows of a follower.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Peer {
    pub(super) id: ReplicaId,
    pub(super) witness: bool,
    /// It holds everything up to here (P2).
    pub(super) matched: Index,
    /// The next entry to send.
    pub(super) next: Index,
    /// One batch at a time until the logs are known to meet; else as many as the window allows.
    pub(super) probing: bool,
    pub(super) probe_sent: bool,
    /// Where the last batch began.
    pub(super) probed: Index,
    /// The newest beat that it echoed, and when that one was sent.
    pub(super) beat: u64,
    pub(super) heard_us: u64,
    /// When that echo came, by `awake_us`; known to be the end of a mere silence unless the link broke meanwhile.
    pub(super) answered_us: u64,
    pub(super) answers: bool,
    /// Echoes up to this beat came over a link that is no more: they count for no lease (X2 in `lease`).
    pub(super) unheard: u64,
    /// When `matched` rose last, or something was sent again.
    pub(super) moved_us: u64,
    pub(super) recovering: bool,
    /// Of its last recovery.
    pub(super) nonce: u64,
    /// The newest beat when that recovery was first heard of: what echoes no later one was said in an earlier life.
    pub(super) reborn: u64,
}

impl Peer {
    /// When the newest beat that counts for a lease was sent; 0: none.
    pub(super) fn echoed_us(&self) -> u64 {
        if self.beat > self.unheard {
            self.heard_us
        } else {
            0
        }
    }
}

/// A leadership transfer under way.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Transfer {
    pub(super) to: ReplicaId,
    pub(super) until_us: u64,
    /// Step down when it fails.
    pub(super) must_go: bool,
    pub(super) told: bool,
}

/// The leader's state; empty in other roles.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Leading {
    pub(super) peers: Vec<Peer>,
    /// By id: where in `peers` it is, plus one; 0 is nowhere. An acknowledgement must not look through many members.
    pub(super) places: Vec<u8>,
    /// What a majority holds; told of every change of a peer's `matched`.
    pub(super) held: Tally,
    /// Which beat a majority has echoed; told of every change of a peer's `beat`.
    pub(super) echoed: Tally,
    pub(super) beat: u64,
    pub(super) beat_sent_us: [u64; BEATS],
    pub(super) barrier: Index,
    pub(super) transfer: Option<Transfer>,
    /// The last entry at the newest beat, and at the one before (`witness`).
    pub(super) at_beats: [Index; 2],
    /// Nobody waits for the next beat with entries up to here (W2 in `witness`).
    pub(super) pressing: Index,
    /// Who was told to stand for election in this term, at which beat (X3 in `lease`).
    pub(super) heirs: Vec<(ReplicaId, u64)>,
    /// Since when one of them is waited for though no transfer is under way any more, by `awake_us` (X3).
    pub(super) heir_silent_since_us: Option<u64>,
    /// Reads that wait: id, index to apply, and the beat that a majority must echo (0: not asked yet).
    pub(super) reads: Vec<(u64, Index, u64)>,
}

impl Leading {
    pub(super) fn peer(&self, id: ReplicaId) -> Option<&Peer> {
        self.position(id).map(|at| &self.peers[at])
    }
    /// Somebody is told to stand: at which beat.
    pub(super) fn tell_heir(&mut self, heir: ReplicaId) -> u64 {
        self.heirs.retain(|(told, _)| *told != heir);
        self.heirs.push((heir, self.beat));
        self.beat
    }
    pub(super) fn position(&self, id: ReplicaId) -> Option<usize> {
        if self.peers.len() < FEW {
            return self.peers.iter().position(|peer| peer.id == id);
        }
        let place = self.places.get(usize::from(id.0))?;
        usize::from(*place).checked_sub(1)
    }
    /// Other members are in force.
    pub(super) fn find_places(&mut self) {
        self.places.clear();
        for (at, peer) in self.peers.iter().enumerate() {
            let id = usize::from(peer.id.0);
            if self.places.len() <= id {
                self.places.resize(id + 1, 0);
            }
            self.places[id] = at as u8 + 1;
        }
        self.held.forget();
        self.echoed.forget();
    }
}
