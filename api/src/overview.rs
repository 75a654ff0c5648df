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
    /// The cluster's hosts, in the order of cluster.toml.
    pub hosts: Vec<HostView>,
    /// The cluster's VMs, sorted by name.
    pub vms: Vec<VmView>,
}

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// Its name.
    pub name: String,
    /// Where it listens for the other hosts.
    pub address: String,
    /// It has answered lately.
    pub reached: bool,
    /// Why it was not reached.
    pub problem: Option<String>,
    /// The version of its daemon; empty while it is not known.
    pub version: String,
    /// How its links to other hosts are protected.
    pub links: String,
    /// The number of VMs in whose groups it is.
    pub vms: usize,
    /// The number of logs in whose groups it is.
    pub logs: usize,
    /// The VMs that it runs as primary.
    pub serves: Vec<String>,
    /// Remarks about its certificates.
    pub words: Vec<String>,
}

/// How well a VM is protected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// A second complete copy exists, as the group has agreed.
    Protected,
    /// Protection is not asked for.
    NotAsked,
    /// A second copy is being made.
    Joining,
    /// Protection is asked for, and there is no second copy.
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
    /// It is a bare program, not a VM.
    pub program: bool,
    /// How it is replicated.
    pub policy: String,
    /// How well it is protected.
    pub protection: Protection,
    /// Why its protection is as it is, in a sentence.
    pub why: String,
    /// What a person can do about that; empty if there is nothing to do.
    pub todo: String,
    /// The host that runs it.
    pub primary: Option<String>,
    /// The host that has the second copy, or is getting it.
    pub backup: Option<String>,
    /// The host that only votes.
    pub witness: Option<String>,
    /// Its state, as its primary says; without a primary, as the host says that knows most.
    pub state: State,
    /// The hosts of its group.
    pub hosts: Vec<VmHost>,
    /// Long work that is under way.
    pub progress: Option<Progress>,
    /// The last take-over by its primary.
    pub failover: Option<FailoverStatus>,
    /// What its primary counts; none while no primary is heard.
    pub figures: Option<Figures>,
}

/// A host's part in a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmHost {
    /// The host.
    pub host: String,
    /// It can run the VM. Otherwise it only votes.
    pub can_run: bool,
    /// Its part in the VM.
    pub role: Role,
    /// The VM's state there; none while the host is not heard.
    pub state: Option<State>,
    /// The hosts that have a link with it in this VM's group, as far as these hosts are heard.
    pub linked: Vec<String>,
}

/// What a primary counts for a VM. To get rates, subtract two answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    /// The consensus term.
    pub term: u64,
    /// The running epoch.
    pub epoch: u64,
    /// Acknowledged syncs.
    pub syncs: u64,
    /// Syncs that were given up.
    pub aborted: u64,
    /// How often the VM made no progress while it was protected.
    pub stalls: u64,
    /// Syncs by reason.
    pub reasons: Reasons,
    /// How the two copies are kept now.
    #[serde(rename = "manner")]
    pub mode: Mode,
    /// Outputs of both copies, compared.
    pub compared: ComparedStatus,
    /// How long clients waited in the last second.
    pub answers: Option<AnswerFigures>,
    /// Total time that the VM was paused for syncs, in microseconds.
    pub pause_us: u64,
    /// Bytes that all syncs sent, in total.
    pub sent_bytes: u64,
    /// The medians of the last syncs.
    pub median: SyncFigures,
    /// Frames that were given to the VM.
    pub frames_in: u64,
    /// Frames that were released to the network.
    pub frames_out: u64,
    /// Outbound frames that wait.
    pub held_frames: u64,
    /// How full its fullest queue is, in percent.
    pub fullest_queue_percent: u64,
    /// Disk writes that a peer may lack.
    pub dirty_disk_bytes: u64,
}
