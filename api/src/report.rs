//! What hosts say to the question whether they could run a VM: `dunlin check VM.TOML`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::ToSchema;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Found {
    /// On which host; empty: it is about two hosts together.
    pub host: String,
    /// The VM can run as far as this goes.
    pub ok: bool,
    /// The topic, and what was found.
    pub what: String,
    /// What to do; empty when there is nothing to do.
    pub mend: String,
}

/// All that one host says.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct Report {
    /// Which host.
    pub host: String,
    /// What it found.
    pub found: Vec<Found>,
    /// What is compared with the other host's; none of a witness.
    pub facts: Option<Facts>,
}

/// What has to be alike on both hosts, or had better be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Facts {
    /// The version of the VM's QEMU, if it runs.
    pub qemu: Option<String>,
    /// Whether the VM would run under KVM; nothing if it would not run.
    pub kvm: Option<bool>,
    /// The processor's maker, as it names itself.
    pub cpu_vendor: String,
    /// The processor's flags, as Linux names them.
    pub cpu_flags: BTreeSet<String>,
    /// The size of each disk, in the order of the VM's file; nothing of one that cannot be read.
    pub disk_bytes: Vec<Option<u64>>,
}
