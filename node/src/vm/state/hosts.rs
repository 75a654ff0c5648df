//! What a loop knows of the hosts of its group beside the log: their links, those that are strangers, and those that have no part any more.
//!
//! Not here: what follows from a list of hosts (`vm::hosts`).

use crate::vm::connect::Connector;
use crate::vm::keeper::Keeper;
use dunlin_core::units::ReplicaId;
use std::collections::{BTreeMap, BTreeSet};

/// Hosts that have no part any more, and whether they know.
#[derive(Default)]
pub struct Gone {
    /// They know, or have nothing of the VM.
    pub(in crate::vm) told: BTreeSet<ReplicaId>,
    pub(in crate::vm) under_way: bool,
    pub(in crate::vm) next_us: u64,
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
    /// Hosts that have no part in it any more.
    pub(in crate::vm) gone: Gone,
    /// Writes the VM's file, since hosts have moved.
    pub(in crate::vm) keeper: Option<Keeper>,
}
