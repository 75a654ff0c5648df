//! What a loop knows of its group's log: how far it is applied, what the log says of the VM, and what waits to be said.
//!
//! Not here: what follows from an entry (`vm::agreement`).

use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::agreed::{AgreedState, Unsaid};
use dunlin_core::consensus::Member;
use dunlin_core::replica::leadership::Leadership;
use dunlin_core::replica::log_cut::LogCut;
use dunlin_core::units::{Index, ReplicaId};
use dunlin_core::wire::{WireError, agreed};
use dunlin_fabric::group::KeptGroup;

/// Where this host is in the log.
pub struct Agreement {
    /// What the log says of the VM, and this host's place in that: who leads, and who speaks.
    pub leadership: Leadership,
    /// The newest applied entry.
    pub applied: Index,
    /// Where the log is cut.
    pub(in crate::vm) log_cut: LogCut,
    /// There is no room for more entries, and when that was told.
    pub(in crate::vm) log_is_full: bool,
    pub(in crate::vm) log_full_told_us: Option<u64>,
    pub(in crate::vm) log_full_is_last: bool,
    /// Its disk here takes nothing, as far as it has told: it is full, or has failed.
    pub(in crate::vm) log_is_ill: bool,
    /// The VM was left to a backup for that: once is enough, or it would go on without an end where no backup can take it over.
    pub(in crate::vm) left_for_log: bool,
    /// Times that there was none.
    pub log_waits: u64,
    /// Another policy was agreed: whoever is complete by an older entry is about to be dropped.
    pub another_policy: bool,
    /// Invariant 5; whether the last one was refused, and how often that began.
    pub(in crate::vm) unsaid: Unsaid,
    pub(in crate::vm) refuses: bool,
    pub refused: u64,
    /// Who ordered another policy, until it is agreed.
    pub(in crate::vm) policy_ordered: Option<Sender<Answer>>,
    /// The times of an election.
    pub(in crate::vm) election: Election,
}

impl Agreement {
    /// Of a member that finds this in its log.
    pub fn found(group: &KeptGroup, member: &Member, first: ReplicaId) -> Result<Self, WireError> {
        let snapshot = group.snapshot();
        let state = agreed::decode_state(snapshot.state)?;
        let leadership = Leadership::new(member.id, member.witness, first, state);
        Ok(Self::at(snapshot.last.index, leadership))
    }

    /// A snapshot stands in for all entries up to `index`: what is known of the log begins anew.
    pub(in crate::vm) fn installed(&mut self, index: Index, leadership: Leadership) {
        let (policy_ordered, election) = (self.policy_ordered.take(), std::mem::take(&mut self.election));
        let (log_is_ill, left_for_log) = (self.log_is_ill, self.left_for_log);
        *self = Self {
            policy_ordered,
            election,
            log_is_ill,
            left_for_log,
            ..Self::at(index, leadership)
        };
    }

    fn at(index: Index, leadership: Leadership) -> Self {
        Self {
            leadership,
            applied: index,
            log_cut: LogCut::new(index),
            log_is_full: false,
            log_full_told_us: None,
            log_full_is_last: false,
            log_is_ill: false,
            left_for_log: false,
            log_waits: 0,
            another_policy: false,
            unsaid: Unsaid::default(),
            refuses: false,
            refused: 0,
            policy_ordered: None,
            election: Election::default(),
        }
    }

    /// What the group knows of the VM.
    pub fn state(&self) -> &AgreedState {
        self.leadership.state()
    }

    /// Whether this host leads, and what it knows is up to date.
    pub fn leads(&self) -> bool {
        self.leadership.leads()
    }

    /// What is appended here, agreed or not.
    pub(in crate::vm) fn look_at_appended(&mut self, group: &KeptGroup) {
        let entry = |index| group.entry(index);
        self.leadership
            .look_at_appended(self.applied, group.appended(), entry);
    }

    /// Never started, as far as this host can know.
    pub fn is_fresh(&self) -> bool {
        self.leadership.is_fresh()
    }
}

/// The times of an election, by the loop's clock.
#[derive(Default)]
pub struct Election {
    /// The last word of the leader that was followed.
    pub leader_heard_us: u64,
    /// This host began to campaign.
    pub campaign_us: Option<u64>,
}
