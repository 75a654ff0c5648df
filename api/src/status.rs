//! How a host and its VMs are, as `dunlin status --json` says it.

use crate::{
    AnswerFigures, Certificate, DiskRole, Mode, NotifyStatus, ProgramStatus, QueueFigures, Role,
    SpeculationFigures, State, SyncFigures, log, word,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A host and its VMs.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    /// The host.
    pub host: String,
    /// How its links to others are protected.
    pub links: String,
    /// Which build its daemon is; empty where that does not say it.
    #[serde(default)]
    pub version: String,
    /// The newest version of the protocol that it speaks with other hosts; 0 where it does not say it.
    #[serde(default)]
    pub protocol: u16,
    /// The oldest one.
    #[serde(default)]
    pub oldest_protocol: u16,
    /// Whether a VM that asks for KVM, and names no user of its own, gets it there; `false` also where its daemon does not say it.
    #[serde(default)]
    pub kvm: bool,
    /// The VMs in whose groups it is.
    pub vms: Vec<VmStatus>,
    /// The logs of which it is a host.
    #[serde(default)]
    pub logs: Vec<log::LogStatus>,
    /// Connections to this host that were refused, by what was wrong with them.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
    /// Events on their way to `notify_url`, if there is one.
    #[serde(default)]
    pub notify: Option<NotifyStatus>,
    /// How long its certificates are good.
    #[serde(default)]
    pub certificates: Vec<Certificate>,
}

/// One VM, as this host sees it.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// Its name.
    pub name: String,
    /// This host's part in it.
    pub role: Role,
    /// How it is here.
    pub state: State,
    /// Why, where its state has a reason: of `stalled` the wait's name, of `failed` and `restarting` a line for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Whether a second complete copy exists, as agreed by the group.
    pub protected: bool,
    /// Whether protection is asked for at all.
    pub wants_protection: bool,
    /// The policy.
    pub policy: String,
    /// The leader's host, if known.
    pub leader: Option<String>,
    /// The consensus term.
    pub term: u64,
    /// The running epoch.
    pub epoch: u64,
    /// Entries: committed, applied.
    pub committed: u64,
    /// See `committed`.
    pub applied: u64,
    /// Frames that wait for a sync.
    pub held_frames: usize,
    /// Agreed entries that this host holds: those since the log was cut.
    pub log_entries: u64,
    /// Inbound frames taken and outbound frames released.
    pub frames_in: u64,
    /// See `frames_in`.
    pub frames_out: u64,
    /// Primary: how long clients waited in the last second; none if nothing was asked, or where shadow sockets answer.
    #[serde(default)]
    pub answers: Option<AnswerFigures>,
    /// The peers of the group: name, and whether its log link stands.
    pub peers: Vec<PeerStatus>,
    /// The host that takes a copy's host's part when that host stays away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<String>,
    /// Backup: the checkpoint of the VM's memory that it makes on the standby's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointStatus>,
    /// The version of the protocol that all hosts of the group speak now; none while one of them is not linked.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// The last sync, and totals.
    pub sync: SyncStatus,
    /// What the last take-over on this host was made of.
    pub failover: Option<FailoverStatus>,
    /// Long work under way.
    pub progress: Option<Progress>,
    /// Primary: why no backup joins.
    #[serde(default)]
    pub join_problem: Option<JoinProblem>,
    /// QEMU's process on this host.
    pub qemu_pid: Option<u32>,
    /// How frames go between that QEMU's cards and the daemon: `stream` or `vhost-user`; none while it does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_backend: Option<String>,
    /// The disks, in the order of the VM's file; none while the VM is not on this host.
    #[serde(default)]
    pub disks: Vec<DiskFigures>,
    /// Comparisons of both hosts' disks.
    #[serde(default)]
    pub verify: VerifyStatus,
    /// What other hosts said that was not believed.
    #[serde(default)]
    pub bad_input: BadInput,
    /// How often a protected VM did not get on, and its session was ended for that (docs/waits.md).
    #[serde(default)]
    pub stalls: u64,
    /// What the thread between the two copies waits for now.
    pub waits: Option<WaitStatus>,
    /// What its queues hold, and may hold (docs/budgets.md).
    #[serde(default)]
    pub queues: Vec<QueueFigures>,
    /// Times that its log, or what its output is held in, was full, so that the network or the VM had to wait.
    #[serde(default)]
    pub full: u64,
    /// Times that the log began to refuse entries of its own, which are said again.
    #[serde(default)]
    pub unsaid: u64,
    /// A bare program in a VM's place: what was read and compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramStatus>,
    /// Of a VM whose file says `speculative = true`, where it is here.
    pub speculation: Option<SpeculationFigures>,
}

impl HostStatus {
    /// The VM of that name.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<&VmStatus> {
        self.vms.iter().find(|vm| vm.name == name)
    }
}

impl VmStatus {
    /// Its state for people: the word, and why.
    #[must_use]
    pub fn state_in_words(&self) -> String {
        word::with_reason(&self.state, &self.why)
    }
}

/// A wait of docs/waits.md.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitStatus {
    /// Its name there.
    pub name: String,
    /// For what.
    pub for_what: String,
    /// How long it has lasted.
    pub us: u64,
}

/// What a VM's group heard that was counted, told once per host and minute, and dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BadInput {
    /// Messages that end too early.
    pub too_short: u64,
    /// Messages with bytes left over.
    pub too_long: u64,
    /// Messages with an unknown tag or an impossible count.
    pub unknown: u64,
    /// Messages that the protocol forbids.
    pub forbidden: u64,
    /// Links that were ended for a frame of impossible length, or for a checksum that stayed wrong.
    pub links_broken: u64,
    /// Connections from hosts that are not in the VM's group.
    pub unknown_members: u64,
    /// Records whose checksum did not fit when they were looked at. A write that is under way looks the same: a few
    /// are usual.
    pub torn: u64,
}

/// One disk on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskFigures {
    /// What it is for on this host.
    pub role: DiskRole,
    /// What a peer may lack.
    pub dirty_bytes: u64,
    /// Primary: waits to be sent to the backup.
    pub queued_bytes: u64,
    /// What the backup's buffers hold in memory, as this host knows it.
    pub held_bytes: u64,
    /// Backup: of it, the primary's writes since the last sync.
    pub pvm_bytes: u64,
    /// Backup: of it, its own VM's.
    pub svm_bytes: u64,
    /// Backup: the most that the buffers ever held.
    pub peak_bytes: u64,
    /// Backup: compared when idle (the lightweight checkpoint).
    pub compared_bytes: u64,
    /// Backup: of these, found equal and brought to the image.
    pub settled_bytes: u64,
    /// Backup: brought to the image by syncs.
    pub committed_bytes: u64,
    /// Requests of the VM on this host.
    pub requests: u64,
    /// How long they took in all.
    pub request_ns: u64,
    /// Backup: syncs that reached the image, and how long that took in all, from the commit.
    pub settles: u64,
    /// See `settles`.
    pub settle_ns: u64,
    /// Backup: syncs asked for because its buffers filled up.
    #[serde(default)]
    pub asked_syncs: u64,
    /// Backup: writes of its VM that were delayed because its buffers were nearly full.
    #[serde(default)]
    pub delayed_writes: u64,
    /// Backup: how long the lightweight checkpoint compared and wrote.
    #[serde(default)]
    pub light_ns: u64,
    /// How new the image is: term, written as its primary, epoch.
    pub generation: (u64, bool, u64),
    /// The image is the state of one moment.
    pub consistent: bool,
}

/// Comparisons of both hosts' disks, as this host made them while it was the primary.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifyStatus {
    /// How often they are made by themselves, in seconds; nothing: never.
    pub every_s: Option<u64>,
    /// Primary with a backup: when the next one is due, in milliseconds since 1970.
    pub due_ms: Option<u64>,
    /// One that is under way.
    pub under_way: Option<Progress>,
    /// The last one that was whole.
    pub last: Option<Verified>,
    /// Why a later one was not.
    pub problem: Option<String>,
}

/// A comparison of all disks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verified {
    /// When it began, in milliseconds since 1970 by this host's clock.
    pub began_ms: u64,
    /// When it ended.
    pub ended_ms: u64,
    /// By the schedule of the VM's file; else a person asked for it.
    pub scheduled: bool,
    /// Pieces of 1 MiB that were compared.
    pub extents: u64,
    /// Of these, those that differed.
    pub differing: u64,
    /// What differed was sent again.
    pub repaired: bool,
    /// The same in words, with the first places that differ.
    pub text: String,
}

/// A peer of a group.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct PeerStatus {
    /// Its host.
    pub host: String,
    /// Whether the log link stands.
    pub connected: bool,
    /// It only agrees, and cannot run the VM.
    #[serde(default)]
    pub witness: bool,
    /// The version of the protocol that is spoken with it; none without a link.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// Which build it is; none without a link, or from builds of protocol 2.
    #[serde(default)]
    pub version: Option<String>,
}

/// Syncs on this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SyncStatus {
    /// How many were acknowledged since this host became primary.
    pub count: u64,
    /// Of these, by reason.
    pub reasons: Reasons,
    /// How the copies are kept now.
    #[serde(rename = "manner")]
    pub mode: Mode,
    /// How often another mode was chosen because it paid.
    pub change_overs: u64,
    /// The comparison of outputs since the backup joined.
    pub compared: ComparedStatus,
    /// How many were given up.
    pub aborted: u64,
    /// The longest that the VM has stood for one since this host became primary, also one that was given up. Microseconds.
    #[serde(default)]
    pub longest_pause_us: u64,
    /// The last one.
    pub last: SyncFigures,
    /// Medians over the last 1,000.
    pub median: SyncFigures,
    /// The pauses by length since this host became primary, joins aside: the difference of two answers has the percentiles in between.
    #[serde(default)]
    pub pauses: Pauses,
    /// Each figure summed up over all of them: the difference of two answers says what syncs cost in between.
    pub sum: SyncFigures,
}

/// How many pauses there were of each length, the shortest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Pauses(pub Vec<PausesOf>);

/// Pauses of one length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PausesOf {
    /// At least so long, and less than 1/16 longer.
    pub us: u64,
    /// How many.
    pub count: u64,
}

impl Pauses {
    /// One more. Lengths are kept with five binary digits, so there are at most sixteen for each doubling.
    pub fn add(&mut self, pause_us: u64) {
        let digits_off = (u64::BITS - pause_us.leading_zeros()).saturating_sub(5);
        let us = pause_us >> digits_off << digits_off;
        match self.0.binary_search_by_key(&us, |of| of.us) {
            Ok(at) => self.0[at].count += 1,
            Err(at) => self.0.insert(at, PausesOf { us, count: 1 }),
        }
    }
}

/// Outputs of both VMs, compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ComparedStatus {
    /// Frames that left because both VMs had said them.
    pub matched: u64,
    /// Frames that left because they told nothing new.
    pub free: u64,
    /// Frames that left by a sync.
    pub by_sync: u64,
    /// Times that the two said something else.
    pub differences: u64,
    /// All frames that left, and how long they were held together.
    pub released: u64,
    /// In microseconds.
    pub held_us: u64,
}

/// Why syncs were started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reasons {
    /// Both VMs were idle.
    pub idle: u64,
    /// Output had waited for the longest interval.
    pub limit: u64,
    /// The epoch had grown old.
    pub quiet: u64,
    /// The disk's buffers asked.
    pub disk: u64,
    /// The backup said something else.
    pub differs: u64,
    /// Another mode was taken up.
    pub change_over: u64,
    /// The log, or what output is held in, was half full.
    #[serde(default)]
    pub memory: u64,
}

/// A take-over, step by step. Microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailoverStatus {
    /// From the last word of the old primary to this host's candidacy.
    pub detected_us: u64,
    /// To the won election.
    pub elected_us: u64,
    /// Applying the agreed inputs and the complete set's agreement.
    pub applied_us: u64,
    /// To the first frame out: disk, QEMU's switch, announcement.
    pub announced_us: u64,
    /// Frames for the VM that had reached this host as well, were not agreed on before the old primary died, and were given to the VM.
    #[serde(default)]
    pub overheard: u64,
}

impl FailoverStatus {
    /// The steps by name.
    #[must_use]
    pub fn steps(&self) -> [(&'static str, u64); 4] {
        [
            ("detection", self.detected_us),
            ("election", self.elected_us),
            ("apply", self.applied_us),
            ("announce", self.announced_us),
        ]
    }
}

/// Why a join fails.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinProblem {
    /// The other host, and what it or this one says.
    pub why: String,
    /// How often in a row.
    pub times: u32,
    /// It goes by itself.
    pub passes: bool,
}

/// A checkpoint of a VM's memory on the standby's host, as the host that makes it sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointStatus {
    /// The standby.
    pub host: String,
    /// When the last round was through, in milliseconds since 1970; none before the first.
    pub at_ms: Option<u64>,
    /// Rounds so far.
    pub rounds: u64,
    /// How much the VM's memory was in the last one.
    pub memory_bytes: u64,
    /// What the last one sent.
    pub sent_bytes: u64,
    /// What all of them sent.
    pub sent_bytes_total: u64,
    /// How long the last one took.
    pub took_ms: u64,
}

/// Long work.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// What.
    pub what: String,
    /// So far, in bytes.
    pub done: u64,
    /// In all, in bytes.
    pub total: u64,
}

impl Progress {
    /// How far it is, in tenths.
    #[must_use]
    pub fn tenth(&self) -> u64 {
        self.done.saturating_mul(10) / self.total.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_counted_by_length_and_there_are_few_lengths() {
        let mut pauses = Pauses::default();
        for us in [3000, 20, 3010, 3100, 20, 21] {
            pauses.add(us);
        }
        let found: Vec<(u64, u64)> = pauses.0.iter().map(|of| (of.us, of.count)).collect();
        assert_eq!(found, [(20, 2), (21, 1), (2944, 2), (3072, 1)]);
        for us in (0..100_000).chain([u64::MAX]) {
            pauses.add(us);
        }
        assert!(pauses.0.len() < 16 * 14, "{}", pauses.0.len());
        assert!(pauses.0.windows(2).all(|two| two[0].us < two[1].us));
    }
}
