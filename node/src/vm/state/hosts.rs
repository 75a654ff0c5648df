//! What a loop, of a VM or a bare program, knows of the hosts of its group beside the log: their links, those that are strangers, those that are to
//! leave, and those that have no part any more.
//!
//! Not here: what follows from a list of hosts (`vm::hosts`), how one leaves (`vm::replacing`).

use crate::vm::connect::Connector;
use crate::vm::keeper::Keeper;
use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::agreed::Hosts;
use dunlin_core::units::{Index, ReplicaId, Term};
use std::collections::{BTreeMap, BTreeSet};

/// Hosts that have no part any more, and whether they know.
#[derive(Default)]
pub struct Gone {
    /// They know, or have nothing of the VM.
    pub(in crate::vm) told: BTreeSet<ReplicaId>,
    pub(in crate::vm) under_way: bool,
    pub(in crate::vm) next_us: u64,
}

/// A member leaves.
pub(in crate::vm) struct Leaving {
    /// Since which entry that is so, and who said it: in another term that entry may have been replaced by another leader's.
    pub(in crate::vm) since: Index,
    pub(in crate::vm) term: Term,
    /// The hosts from then on, where another one comes in its place.
    pub(in crate::vm) hosts: Option<Hosts>,
    /// Nobody leaves: that list is said for the standby that it names.
    pub(in crate::vm) names_standby: bool,
    /// That list was proposed.
    pub(in crate::vm) said: bool,
    /// Who asked.
    pub(in crate::vm) reply: Sender<Answer>,
}

/// The hosts of a VM's group, beside what its log says of them.
#[derive(Default)]
pub struct Peers {
    /// Keeps a link to each.
    pub(in crate::vm) connectors: Vec<(ReplicaId, Connector)>,
    /// Connections of hosts that are not in the group, and when that was told of each (there are as many as hosts in the
    /// cluster: others get no link).
    pub(in crate::vm) strangers: u64,
    pub(in crate::vm) strangers_told_us: BTreeMap<String, u64>,
    /// Those whose last link ended for what they wrote: that is told by `protocol-violation`, once a minute.
    pub(in crate::vm) broke: BTreeSet<ReplicaId>,
    /// The group has not made this host a member yet.
    pub(in crate::vm) newcomer: bool,
    /// A member that a person wants out of the group.
    pub(in crate::vm) leaving: Option<Leaving>,
    /// Hosts that have no part in it any more.
    pub(in crate::vm) gone: Gone,
    /// Where a turn costs much: when it is looked at next who is gone and who may come.
    pub(in crate::vm) next_look_us: u64,
    /// Who was made a member last, and by which entry.
    pub(in crate::vm) readmitted: Option<(ReplicaId, Index)>,
    /// Writes the VM's file, since hosts have moved.
    pub(in crate::vm) keeper: Option<Keeper>,
}

impl Peers {
    /// The link to that host is lost: it is connected again, by whichever of the two that is for.
    pub(in crate::vm) fn link_lost(&self, peer: ReplicaId) {
        if let Some((_, connector)) = self.connectors.iter().find(|(id, _)| *id == peer) {
            connector.link_lost();
        }
    }
}
