//! What hosts say to the question whether they could run a VM: `dunlin check VM.TOML`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::ToSchema;

/// One finding: something that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Found {
    /// The host that it is about; empty if it is about two hosts together.
    pub host: String,
    /// This does not keep the VM from running.
    pub ok: bool,
    /// The topic, and what was found.
    pub what: String,
    /// What to do; empty if there is nothing to do.
    pub mend: String,
}

/// All that one host has found.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct Report {
    /// The host.
    pub host: String,
    /// Its findings.
    pub found: Vec<Found>,
    /// The facts that are compared with those of the other host; none for a witness.
    pub facts: Option<Facts>,
}

/// Facts that have to be, or should be, the same on both hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Facts {
    /// The version of the VM's QEMU, if that QEMU can be run.
    pub qemu: Option<String>,
    /// Whether the VM would run under KVM; none if it would not run at all.
    pub kvm: Option<bool>,
    /// The processor's maker, as it names itself.
    pub cpu_vendor: String,
    /// The processor's flags, as Linux names them.
    pub cpu_flags: BTreeSet<String>,
    /// The size of each disk, in the order of the VM's file; none for a disk that cannot be read.
    pub disk_bytes: Vec<Option<u64>>,
}
