//! What the owner of a group looks at. Changes nothing.

use super::peer::{self, Peer};
use super::{Counters, Group, LinkState};
use crate::link::PROTOCOL_VERSION;
use dunlin_core::consensus::{Consensus, Entry, Role, Snapshot};
use dunlin_core::units::{Index, ReplicaId, Term};

/// What the owner looks at.
impl Group {
    /// An entry that is held; agreed only up to [`Self::committed`]. None while a snapshot is installed that [`Self::poll`] has still to
    /// tell of: what is held then does not follow on what the owner has applied.
    #[must_use]
    pub fn entry(&self, index: Index) -> Option<&Entry> {
        if self.core.awaits_owner() {
            return None;
        }
        self.core.entry(index)
    }

    /// Whether an input of so many bytes would be taken.
    #[must_use]
    pub fn has_input_room(&self, bytes: usize) -> bool {
        !self.disk_lags() && self.core.has_input_room(bytes)
    }

    /// More waits for the log's disk than the log may hold: the followers are quick enough for both, and it never ends.
    pub(super) fn disk_lags(&self) -> bool {
        self.writer.queued_bytes() > self.core.config().ring_bytes
    }

    /// What waits for the log's disk, and what may.
    #[must_use]
    pub fn disk_queue(&self) -> (usize, usize) {
        (self.writer.queued_bytes(), self.core.config().ring_bytes)
    }

    /// What waits for room in the rings of the other hosts, what may, and how many messages were given up for that.
    #[must_use]
    pub fn link_queue(&self) -> (usize, usize, u64) {
        let bytes = self.peers.iter().map(Peer::queued_bytes).sum();
        (
            bytes,
            peer::QUEUES_MAX_BYTES * self.peers.len(),
            self.counters.given_up,
        )
    }

    /// The consensus, to look at.
    #[must_use]
    pub fn core(&self) -> &Consensus {
        &self.core
    }

    /// Agreed up to here.
    #[must_use]
    pub fn committed(&self) -> Index {
        self.core.committed()
    }

    /// What this replica is.
    #[must_use]
    pub fn role(&self) -> Role {
        self.core.role()
    }

    /// Whether it leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.core.role() == Role::Leader
    }

    /// Whether this leader may let the world hear its VM at `now_us` without asking anyone (core's `lease`): the last look
    /// before something leaves. A group that has agreed that this host alone is complete needs no such look.
    #[must_use]
    pub fn may_speak(&self, now_us: u64) -> bool {
        self.core
            .speaks_until_us()
            .is_some_and(|until_us| now_us < until_us)
    }

    /// How long a silence may be before this replica believes that somebody died (core's `detector`).
    #[must_use]
    pub fn patience_us(&self) -> u64 {
        self.core.patience_us()
    }

    /// Its term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.core.hard_state().term
    }

    /// The leader, if known.
    #[must_use]
    pub fn leader(&self) -> Option<ReplicaId> {
        self.core.leader()
    }

    /// What stands for everything before the first entry (after a start: what was found on disk).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.core.snapshot()
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let torn = self.peers.iter().map(Peer::torn).sum::<u64>();
        Counters {
            torn: self.counters.torn + torn,
            ..self.counters
        }
    }

    /// The version of the protocol that all members speak now: the lowest of the links to the others. `None` while one of them has no
    /// link. What came with a version may be proposed only by a leader whose group speaks it (docs/upgrade.md).
    #[must_use]
    pub fn protocol(&self) -> Option<u16> {
        let others = self.core.members().iter().filter(|m| m.id != self.cfg.core.me);
        let mut spoken = others.map(|member| {
            let peer = self.peers.iter().find(|p| p.id == member.id && p.is_up())?;
            Some(peer.spoken.version)
        });
        // Alone, it speaks whatever it can.
        spoken.try_fold(PROTOCOL_VERSION, |lowest, one| Some(lowest.min(one?)))
    }

    /// When something was last heard from this host, by `poll`'s clock, on a link that stands.
    #[must_use]
    pub fn heard_us(&self, id: ReplicaId) -> Option<u64> {
        self.peers.iter().find(|p| p.id == id).and_then(Peer::heard_us)
    }

    /// The state of the links to all other members, and to hosts that are to be members (again).
    #[must_use]
    pub fn links(&self) -> Vec<LinkState> {
        let is_member = |id| self.core.members().iter().any(|m| m.id == id);
        let members = self.core.members().iter().map(|m| m.id);
        let guests = self.peers.iter().map(|p| p.id).filter(|id| !is_member(*id));
        members
            .filter(|id| *id != self.cfg.core.me)
            .chain(guests)
            .map(|id| {
                let peer = self.peers.iter().find(|p| p.id == id);
                LinkState {
                    peer: id,
                    fabric: peer.map(|p| p.transport.fabric()),
                    connected: peer.is_some_and(Peer::is_up),
                    acknowledged: self.core.peer(id).map(|p| p.acknowledged),
                    heard_us: peer.and_then(Peer::heard_us),
                    spoken: peer.map(|p| p.spoken.clone()),
                }
            })
            .collect()
    }
}
