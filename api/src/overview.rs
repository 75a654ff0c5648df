//! The whole cluster at a glance, as one host sees it.

use crate::{
    AnswerFigures, ComparedStatus, FailoverStatus, Mode, Progress, Reasons, Role, State, SyncFigures,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All hosts and all VMs, as the host that was asked sees them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// The cluster's name.
    pub cluster: String,
    /// The host that was asked.
    pub host: String,
    /// Its hosts, in the order of cluster.toml.
    pub hosts: Vec<HostView>,
    /// Its VMs, by name.
    pub vms: Vec<VmView>,
}

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// Its name.
    pub name: String,
    /// Where it listens for the others.
    pub address: String,
    /// It has answered lately.
    pub reached: bool,
    /// Why it was not reached.
    pub problem: Option<String>,
    /// Its program's version; empty while it is not known.
    pub version: String,
    /// How its links to others are protected.
    pub links: String,
    /// In how many VMs' groups it is, and how many logs'.
    pub vms: usize,
    /// See `vms`.
    pub logs: usize,
    /// VMs that it runs as primary.
    pub serves: Vec<String>,
    /// What is to be said of its certificates.
    pub words: Vec<String>,
}

/// How well a VM is protected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// A second complete copy exists, as agreed.
    Protected,
    /// It was not asked for.
    NotAsked,
    /// A copy is on its way.
    Joining,
    /// It is asked for, and there is none.
    #[default]
    Unprotected,
    /// Nobody runs the VM.
    NotServed,
}

/// One VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// It is a bare program.
    pub program: bool,
    /// How it is replicated.
    pub policy: String,
    /// How well it is protected.
    pub protection: Protection,
    /// Why, in a sentence.
    pub why: String,
    /// What a person can do about it; empty if nothing.
    pub todo: String,
    /// The host that runs it.
    pub primary: Option<String>,
    /// The host with the second copy, or on its way to one.
    pub backup: Option<String>,
    /// The host that only agrees.
    pub witness: Option<String>,
    /// Its state, as its primary says, or who knows most.
    pub state: State,
    /// Its group.
    pub hosts: Vec<VmHost>,
    /// Long work under way.
    pub progress: Option<Progress>,
    /// The last take-over by its primary.
    pub failover: Option<FailoverStatus>,
    /// What its primary counts; nothing while none is heard.
    pub figures: Option<Figures>,
}

/// A host's part in a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmHost {
    /// The host.
    pub host: String,
    /// It can run the VM; else it only agrees.
    pub can_run: bool,
    /// What it is.
    pub role: Role,
    /// How the VM is there; none while the host is not heard.
    pub state: Option<State>,
    /// The hosts that have a link with it in this VM's group, as far as they are heard.
    pub linked: Vec<String>,
}

/// What a primary counts of a VM. Rates are differences of two answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    /// The reign, and the running epoch.
    pub term: u64,
    /// See `term`.
    pub epoch: u64,
    /// Syncs, and those that were given up.
    pub syncs: u64,
    /// See `syncs`.
    pub aborted: u64,
    /// How often a protected VM did not get on.
    pub stalls: u64,
    /// Syncs by reason.
    pub reasons: Reasons,
    /// How the copies are kept now.
    #[serde(rename = "manner")]
    pub mode: Mode,
    /// Outputs of both copies, compared.
    pub compared: ComparedStatus,
    /// How long clients waited in the last second.
    pub answers: Option<AnswerFigures>,
    /// How long the VM stood still for all syncs, in microseconds.
    pub pause_us: u64,
    /// What all syncs sent.
    pub sent_bytes: u64,
    /// The medians of the last syncs.
    pub median: SyncFigures,
    /// Frames taken and let out, and those that wait.
    pub frames_in: u64,
    /// See `frames_in`.
    pub frames_out: u64,
    /// See `frames_in`.
    pub held_frames: u64,
    /// The fullest of its queues, in percent.
    pub fullest_queue_percent: u64,
    /// Disk writes that a peer may lack.
    pub dirty_disk_bytes: u64,
}
