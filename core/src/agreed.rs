//! What it decides: what the group knows of its VM, and so who may run it.
//!
//! Flow: every committed entry of the log is applied here, on all members, in log order.
//!
//! Invariants:
//! 1. A host may win an election only if it is in the complete set and its copy of the VM is alive, or if the VM
//!    was never started.
//! 2. A host leaves the complete set by an agreed entry *before* anything is said to a client that its copy could
//!    not explain. So a primary without a backup may speak at once: nobody else can be elected any more.
//! 3. Nothing follows a VM's end. Its hosts apply that at different times, and one that still leads may have said meanwhile that it goes
//!    on without a backup that is gone: that must not start the VM again.
//!
//! Source: ARCHITECTURE.md, "Who may speak"; the rule itself is ours. Not here: the bytes (`wire::agreed`), elections
//! (`consensus::election`).

use crate::policy::Policy;
use crate::units::{Epoch, ReplicaId};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

/// A set of hosts that hold a copy of a VM. A group may be larger, but a VM's hosts have the first ids in all its life, and
/// whoever has a later one is in no such set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplicaSet(pub u64);

/// So many hosts may take part in a VM's group, one after the other: an id is never used again, or the old host's promises and
/// acknowledgements would count as the new one's.
pub const MOST_HOSTS: usize = u64::BITS as usize;

impl ReplicaSet {
    /// The set with one member.
    #[must_use]
    pub fn one(id: ReplicaId) -> Self {
        Self::default().with(id)
    }

    /// This set and `id`.
    #[must_use]
    pub fn with(self, id: ReplicaId) -> Self {
        assert!(
            usize::from(id.0) < MOST_HOSTS,
            "a VM's copies are on its first {MOST_HOSTS} hosts, not on {id:?}"
        );
        Self(self.0 | 1 << id.0)
    }

    /// Whether `id` is in the set.
    #[must_use]
    pub fn contains(self, id: ReplicaId) -> bool {
        1u64.checked_shl(id.0.into()).is_some_and(|bit| self.0 & bit != 0)
    }

    /// How many are in it.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether there is nobody in it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A host's part in a VM's group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostPart {
    /// Its number in the group.
    pub id: ReplicaId,
    /// Its name in the cluster, 1 to [`HostPart::LONGEST_NAME`] bytes.
    pub name: String,
    /// What it does there.
    pub part: Part,
}

/// What a host does in a VM's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// It can run the VM.
    Copy,
    /// It votes, and has no copy.
    Witness,
    /// Nothing any more. Its number stays with it.
    Gone,
    /// Nothing, and it gets the part of a copy's host that stays away. Its number stays with it.
    Standby,
}

impl Part {
    /// Whether such a host has none.
    #[must_use]
    pub fn is_none(self) -> bool {
        matches!(self, Self::Gone | Self::Standby)
    }
}

impl HostPart {
    /// Bytes of the longest name.
    pub const LONGEST_NAME: usize = 255;
}

/// All hosts that have, or had, a part in a VM's group, by their numbers.
pub type Hosts = Arc<[HostPart]>;

/// A frame for one of the VM's NICs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Which NIC, in the order of the VM's configuration.
    pub nic: u8,
    /// The Ethernet frame, without a checksum at its end.
    pub bytes: Bytes,
}

/// What time it is for a bare program, on all of its hosts; both in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AgreedTime {
    /// Since some moment in the past: what CLOCK_MONOTONIC says.
    pub monotonic_ns: u64,
    /// Since 1970: what CLOCK_REALTIME says.
    pub wall_ns: u64,
}

impl AgreedTime {
    /// Of each clock the later one: none goes back.
    #[must_use]
    pub fn or_later(self, other: Self) -> Self {
        Self {
            monotonic_ns: self.monotonic_ns.max(other.monotonic_ns),
            wall_ns: self.wall_ns.max(other.wall_ns),
        }
    }
}

/// Bytes of what a program's chance comes from.
pub const SEED_BYTES: usize = 32;

/// What an entry of the log says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Agreed {
    /// Inputs, in the order in which both VMs get them.
    Frames(Vec<Frame>),
    /// A bare program's time, and inputs that it gets then; there may be none.
    Timed {
        /// The time.
        time: AgreedTime,
        /// Behind it, in the order in which both copies get them.
        frames: Vec<Frame>,
    },
    /// What a bare program's copies draw their chance from. Said before they begin.
    Seed([u8; SEED_BYTES]),
    /// Epoch `epoch` ends here: both VMs stop after the inputs before this entry.
    Sync {
        /// The epoch that ends.
        epoch: Epoch,
    },
    /// Sync `epoch` is acknowledged: no input before its `Sync` entry is needed again.
    SyncDone {
        /// The epoch that has ended.
        epoch: Epoch,
    },
    /// These hosts hold a complete copy of the VM from now on.
    Complete {
        /// Who.
        set: ReplicaSet,
        /// The epoch that all of them have reached.
        epoch: Epoch,
    },
    /// The VM is replicated in this way from now on, whatever its file says.
    Policy(Policy),
    /// These hosts have a part in the VM's group from now on, whatever its file says. Who votes is the consensus' own (`Members`): a
    /// host that is new here becomes a member when it answers.
    Hosts(Hosts),
    /// The VM is shut down, on purpose.
    Down,
}

/// Where a VM is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Life {
    /// Never started in this group.
    #[default]
    Fresh,
    /// Some host runs it.
    Running,
    /// Shut down on purpose.
    Down,
}

/// What the group knows of its VM: the log's entries, folded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AgreedState {
    /// Where the VM is in its life.
    pub life: Life,
    /// Who holds a complete copy.
    pub complete: ReplicaSet,
    /// The last epoch that ended with an acknowledged sync.
    pub epoch: Epoch,
    /// How the VM is replicated, where a person has said otherwise than its file.
    pub policy: Option<Policy>,
    /// Who has a part in the group, where it is not as its file said at the beginning.
    pub hosts: Option<Hosts>,
    /// A bare program's time; zero where it was never agreed.
    pub time: AgreedTime,
}

impl AgreedState {
    /// Folds one committed entry in. False: it says nothing (invariant 3).
    #[must_use]
    pub fn apply(&mut self, entry: &Agreed) -> bool {
        if self.life == Life::Down {
            return false;
        }
        match entry {
            // Whoever gets a copy of a running program gets its seed with it.
            Agreed::Frames(_) | Agreed::Seed(_) | Agreed::Sync { .. } => {}
            Agreed::Timed { time, .. } => self.time = self.time.or_later(*time),
            Agreed::SyncDone { epoch } => self.epoch = self.epoch.max(*epoch),
            Agreed::Complete { set, epoch } => {
                self.life = Life::Running;
                self.complete = *set;
                self.epoch = self.epoch.max(*epoch);
            }
            Agreed::Policy(policy) => self.policy = Some(*policy),
            Agreed::Hosts(hosts) => self.hosts = Some(hosts.clone()),
            Agreed::Down => {
                self.life = Life::Down;
                self.complete = ReplicaSet::default();
            }
        }
        true
    }

    /// Invariant 1: whether `me` may win an election. `first` is the host that boots a VM that never ran.
    #[must_use]
    pub fn may_lead(&self, me: ReplicaId, vm_alive: bool, first: ReplicaId) -> bool {
        match self.life {
            Life::Fresh => me == first,
            Life::Running => vm_alive && self.complete.contains(me),
            Life::Down => false,
        }
    }
}

impl Agreed {
    /// Its name for people.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Frames(_) | Self::Timed { .. } => "inputs",
            Self::Seed(_) => "seed",
            Self::Sync { .. } => "sync",
            Self::SyncDone { .. } => "sync done",
            Self::Complete { .. } => "complete set",
            Self::Policy(_) => "policy",
            Self::Hosts(_) => "hosts",
            Self::Down => "down",
        }
    }
}

/// Entries that the log did not take, to be said again as soon as it does: nobody else would.
///
/// In the order in which they were said; a newer one stands for an older one of its kind. So there are five at most.
#[derive(Debug, Default)]
pub struct Unsaid {
    entries: VecDeque<Agreed>,
}

impl Unsaid {
    /// This entry was refused. Inputs are not kept (the network sends them again), nor the beginning of a sync (there may
    /// be no reason for it any more): false.
    pub fn keep(&mut self, entry: &Agreed) -> bool {
        if matches!(
            entry,
            Agreed::Frames(_) | Agreed::Timed { .. } | Agreed::Seed(_) | Agreed::Sync { .. }
        ) {
            return false;
        }
        let kind = std::mem::discriminant(entry);
        self.entries.retain(|kept| std::mem::discriminant(kept) != kind);
        self.entries.push_back(entry.clone());
        true
    }

    /// The same is agreed by now: said once more, it would come after what has been said since.
    pub fn agreed(&mut self, entry: &Agreed) {
        self.entries.retain(|kept| kept != entry);
    }

    /// What is to be said next.
    #[must_use]
    pub fn next(&self) -> Option<&Agreed> {
        self.entries.front()
    }

    /// That was taken.
    pub fn said(&mut self) {
        self.entries.pop_front();
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Another host leads, or this one in a new term: whoever leads says what holds.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ReplicaId = ReplicaId(0);
    const B: ReplicaId = ReplicaId(1);

    fn complete(set: ReplicaSet, epoch: u64) -> Agreed {
        let epoch = Epoch(epoch);
        Agreed::Complete { set, epoch }
    }

    fn timed(monotonic_ns: u64, wall_ns: u64) -> Agreed {
        let time = AgreedTime {
            monotonic_ns,
            wall_ns,
        };
        let frames = Vec::new();
        Agreed::Timed { time, frames }
    }

    #[test]
    fn the_agreed_time_never_goes_back() {
        let mut state = AgreedState::default();
        assert!(state.apply(&timed(7, 900)));
        assert!(state.apply(&timed(6, 901)));
        assert_eq!((state.time.monotonic_ns, state.time.wall_ns), (7, 901));
    }

    #[test]
    fn only_the_first_host_boots_a_fresh_vm() {
        let state = AgreedState::default();
        assert!(state.may_lead(A, false, A));
        assert!(!state.may_lead(B, false, A));
    }

    #[test]
    fn a_host_that_was_dropped_from_the_complete_set_may_not_lead_though_its_vm_is_alive() {
        let mut state = AgreedState::default();
        assert!(state.apply(&complete(ReplicaSet::one(A).with(B), 1)));
        assert!(state.may_lead(B, true, A));
        assert!(!state.may_lead(B, false, A), "a dead copy is no copy");
        assert!(state.apply(&complete(ReplicaSet::one(A), 1)));
        assert!(!state.may_lead(B, true, A));
    }

    #[test]
    fn what_the_log_refused_is_said_again_in_order_and_the_newest_of_a_kind() {
        let done = |epoch| Agreed::SyncDone { epoch: Epoch(epoch) };
        let mut unsaid = Unsaid::default();
        assert!(!unsaid.keep(&Agreed::Frames(Vec::new())));
        assert!(!unsaid.keep(&timed(1, 1)));
        assert!(!unsaid.keep(&Agreed::Sync { epoch: Epoch(7) }));
        assert!(unsaid.is_empty());
        for entry in [
            complete(ReplicaSet::one(A).with(B), 7),
            done(7),
            Agreed::Down,
            // The backup was lost meanwhile: that it was complete must not be said after that.
            complete(ReplicaSet::one(A), 7),
        ] {
            assert!(unsaid.keep(&entry));
        }
        let mut said = Vec::new();
        while let Some(next) = unsaid.next().cloned() {
            unsaid.said();
            said.push(next);
        }
        assert_eq!(said, [done(7), Agreed::Down, complete(ReplicaSet::one(A), 7)]);
        for epoch in 0..1000 {
            for entry in [done(epoch), complete(ReplicaSet::one(B), epoch), Agreed::Down] {
                unsaid.keep(&entry);
            }
        }
        assert_eq!(unsaid.entries.len(), 3);
        unsaid.agreed(&complete(ReplicaSet::one(A), 999));
        assert_eq!(unsaid.entries.len(), 3, "that is another one");
        unsaid.agreed(&complete(ReplicaSet::one(B), 999));
        assert_eq!(unsaid.entries.len(), 2, "it is agreed already");
        unsaid.clear();
        assert!(unsaid.is_empty());
    }

    #[test]
    fn a_host_with_a_late_number_may_be_complete_and_its_name_is_agreed() {
        let last = ReplicaId(MOST_HOSTS as u8 - 1);
        let mut state = AgreedState::default();
        assert!(state.apply(&complete(ReplicaSet::one(A).with(last), 1)));
        assert!(state.may_lead(last, true, A) && !state.may_lead(B, true, A));
        assert_eq!(state.complete.len(), 2);
        assert!(!state.complete.contains(ReplicaId(u8::MAX)), "no such host");
        let host = HostPart {
            id: last,
            name: "d".into(),
            part: Part::Copy,
        };
        let hosts: Hosts = [host].into();
        assert!(state.apply(&Agreed::Hosts(hosts.clone())));
        assert_eq!(state.hosts, Some(hosts));
    }

    #[test]
    fn nobody_leads_a_vm_that_was_shut_down() {
        let mut state = AgreedState::default();
        assert!(state.apply(&complete(ReplicaSet::one(A), 0)));
        assert!(state.apply(&Agreed::Down));
        assert!(!state.may_lead(A, true, A));
    }

    #[test]
    fn invariant_3_what_a_leader_said_after_the_end_before_it_knew_of_it_starts_no_vm_again() {
        let mut state = AgreedState::default();
        assert!(state.apply(&complete(ReplicaSet::one(A).with(B), 7)));
        assert!(state.apply(&Agreed::Down));
        let ended = state.clone();
        // The backup ended its copy first: its primary took it for lost.
        for entry in [
            complete(ReplicaSet::one(A), 7),
            Agreed::Policy(Policy::None),
            Agreed::SyncDone { epoch: Epoch(8) },
            Agreed::Down,
        ] {
            assert!(!state.apply(&entry), "{}", entry.name());
            assert_eq!(state, ended, "{}", entry.name());
        }
        assert!(!state.may_lead(A, true, A));
    }
}
