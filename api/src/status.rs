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
    /// How its links to other hosts are protected.
    pub links: String,
    /// The version of its daemon; empty if the daemon does not say it.
    #[serde(default)]
    pub version: String,
    /// The newest version of the protocol that it speaks with other hosts; 0 if it does not say it.
    #[serde(default)]
    pub protocol: u16,
    /// The oldest version of that protocol; 0 if it does not say it.
    #[serde(default)]
    pub oldest_protocol: u16,
    /// Whether a VM that asks for KVM, and names no user of its own, gets KVM there. Also `false` if the daemon does not say it.
    #[serde(default)]
    pub kvm: bool,
    /// The VMs in whose groups this host is.
    pub vms: Vec<VmStatus>,
    /// The logs in whose groups this host is.
    #[serde(default)]
    pub logs: Vec<log::LogStatus>,
    /// Connections to this host that were refused, by what was wrong with them.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
    /// Events for `notify_url`, if that is set.
    #[serde(default)]
    pub notify: Option<NotifyStatus>,
    /// When its certificates expire.
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
    /// Its state on this host.
    pub state: State,
    /// The reason for its state, if there is one: for `stalled` the wait's name, for `failed` and `restarting` a line for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Whether a second complete copy exists, as the group has agreed.
    pub protected: bool,
    /// Whether its policy asks for protection.
    pub wants_protection: bool,
    /// How it is replicated.
    pub policy: String,
    /// The leader's host, if known.
    pub leader: Option<String>,
    /// The consensus term.
    pub term: u64,
    /// The running epoch.
    pub epoch: u64,
    /// The index of the last agreed log entry.
    pub committed: u64,
    /// The index of the last log entry that was applied here.
    pub applied: u64,
    /// Outbound frames that wait for a sync.
    pub held_frames: usize,
    /// Agreed entries that this host holds, which are those since the log was cut.
    pub log_entries: u64,
    /// Frames that were given to the VM.
    pub frames_in: u64,
    /// Frames that were released to the network.
    pub frames_out: u64,
    /// Primary: how long clients waited in the last second; none if nobody waited, or if shadow sockets answer.
    #[serde(default)]
    pub answers: Option<AnswerFigures>,
    /// The other hosts of its group.
    pub peers: Vec<PeerStatus>,
    /// The standby: the host that gets the part of a copy's host if that host stays away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<String>,
    /// Backup: the checkpoint of the VM's memory that this host makes on the standby's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointStatus>,
    /// The version of the protocol that all hosts of the group speak now; none while one of them has no link.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// The last sync, and totals.
    pub sync: SyncStatus,
    /// The last take-over on this host, step by step.
    pub failover: Option<FailoverStatus>,
    /// Long work that is under way.
    pub progress: Option<Progress>,
    /// Primary: why no backup could join.
    #[serde(default)]
    pub join_problem: Option<JoinProblem>,
    /// The process id of QEMU on this host.
    pub qemu_pid: Option<u32>,
    /// How frames go between the cards of that QEMU and the daemon: `stream` or `vhost-user`. None while QEMU does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_backend: Option<String>,
    /// The disks, in the order of the VM's file; none while the VM is not on this host.
    #[serde(default)]
    pub disks: Vec<DiskFigures>,
    /// Comparisons of both hosts' disks.
    #[serde(default)]
    pub verify: VerifyStatus,
    /// What the VM's other hosts said that was not believed.
    #[serde(default)]
    pub bad_input: BadInput,
    /// How often the VM made no progress while it was protected, so that its session was ended (docs/waits.md).
    #[serde(default)]
    pub stalls: u64,
    /// What the thread between the two copies waits for now.
    pub waits: Option<WaitStatus>,
    /// Its queues: how much they hold, and may hold (docs/budgets.md).
    #[serde(default)]
    pub queues: Vec<QueueFigures>,
    /// Times that its log or its buffer of held output was full, so that the network or the VM had to wait.
    #[serde(default)]
    pub full: u64,
    /// Times that the log began to refuse this host's own entries. They are proposed again.
    #[serde(default)]
    pub unsaid: u64,
    /// For a bare program: what was read and compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramStatus>,
    /// For a VM with `speculative = true` that runs on this host: what speculation does.
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

/// A wait; docs/waits.md lists all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitStatus {
    /// Its name in docs/waits.md.
    pub name: String,
    /// What is waited for.
    pub for_what: String,
    /// How long it has lasted, in microseconds.
    pub us: u64,
}

/// What other hosts of a VM's group said that was not believed: it is counted, reported once per host and minute, and dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BadInput {
    /// Messages that ended too early.
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
    /// Records whose checksum was wrong when they were looked at. A write that is under way looks the same, so a few
    /// are usual.
    pub torn: u64,
}

/// One disk on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskFigures {
    /// What it is for on this host.
    pub role: DiskRole,
    /// Bytes of the disk that a peer may lack.
    pub dirty_bytes: u64,
    /// Primary: bytes of writes that wait to be sent to the backup.
    pub queued_bytes: u64,
    /// Bytes that the backup's buffers hold in memory, as far as this host knows.
    pub held_bytes: u64,
    /// Backup: of `held_bytes`, the primary's writes since the last sync.
    pub pvm_bytes: u64,
    /// Backup: of `held_bytes`, the writes of its own VM.
    pub svm_bytes: u64,
    /// Backup: the most bytes that the buffers ever held.
    pub peak_bytes: u64,
    /// Backup: bytes compared when idle (the lightweight checkpoint).
    pub compared_bytes: u64,
    /// Backup: of these, bytes found equal and written to the image.
    pub settled_bytes: u64,
    /// Backup: bytes written to the image by syncs.
    pub committed_bytes: u64,
    /// Disk requests of the VM on this host.
    pub requests: u64,
    /// How long these requests took in total, in nanoseconds.
    pub request_ns: u64,
    /// Backup: syncs that reached the image.
    pub settles: u64,
    /// Backup: how long these took in total, from their commit, in nanoseconds.
    pub settle_ns: u64,
    /// Backup: syncs asked for because its buffers filled up.
    #[serde(default)]
    pub asked_syncs: u64,
    /// Backup: writes of its VM that were delayed because its buffers were nearly full.
    #[serde(default)]
    pub delayed_writes: u64,
    /// Backup: how long the lightweight checkpoint compared and wrote, in nanoseconds.
    #[serde(default)]
    pub light_ns: u64,
    /// How new the image is: the term in which it was last written, whether the primary of that term wrote it, and the epoch.
    pub generation: (u64, bool, u64),
    /// The image is the state of the disk at one moment.
    pub consistent: bool,
}

/// Comparisons of both hosts' disks, as this host made them while it was the primary.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifyStatus {
    /// How often they are made automatically, in seconds; none if never.
    pub every_s: Option<u64>,
    /// Primary with a backup: when the next one is due, in milliseconds since 1970.
    pub due_ms: Option<u64>,
    /// The comparison that is under way.
    pub under_way: Option<Progress>,
    /// The last comparison that was completed.
    pub last: Option<Verified>,
    /// Why a later comparison was not completed.
    pub problem: Option<String>,
}

/// A comparison of all disks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verified {
    /// When it began, in milliseconds since 1970 by this host's clock.
    pub began_ms: u64,
    /// When it ended.
    pub ended_ms: u64,
    /// It was made by the schedule in the VM's file. Otherwise a person asked for it.
    pub scheduled: bool,
    /// Pieces of 1 MiB that were compared.
    pub extents: u64,
    /// Of these, those that differed.
    pub differing: u64,
    /// What differed was sent again.
    pub repaired: bool,
    /// The result in words, with the first places that differ.
    pub text: String,
}

/// A peer of a group.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct PeerStatus {
    /// Its host.
    pub host: String,
    /// Whether the log's link to it stands.
    pub connected: bool,
    /// It only votes, and cannot run the VM.
    #[serde(default)]
    pub witness: bool,
    /// The version of the protocol that this host speaks with it; none without a link.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// The version of its daemon; none without a link, and none from builds of protocol 2.
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
    /// How the two copies are kept now.
    #[serde(rename = "manner")]
    pub mode: Mode,
    /// How often another mode was chosen because it costs less.
    pub change_overs: u64,
    /// The comparison of outputs since the backup joined.
    pub compared: ComparedStatus,
    /// How many were given up.
    pub aborted: u64,
    /// The longest pause of the VM for a sync since this host became primary, in microseconds. Syncs that were given up count, too.
    #[serde(default)]
    pub longest_pause_us: u64,
    /// The last sync.
    pub last: SyncFigures,
    /// Medians over the last 1,000 syncs.
    pub median: SyncFigures,
    /// How many pauses of each length there were since this host became primary, without joins. Subtract two answers to get the percentiles
    /// between them.
    #[serde(default)]
    pub pauses: Pauses,
    /// The sum of each figure over all syncs. Subtract two answers to get what syncs cost between them.
    pub sum: SyncFigures,
}

/// How many pauses there were of each length, the shortest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Pauses(pub Vec<PausesOf>);

/// Pauses of one length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PausesOf {
    /// The length in microseconds: each pause was at least this long, and less than 1/16 longer.
    pub us: u64,
    /// How many pauses.
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
    /// Frames that left because both VMs had sent them.
    pub matched: u64,
    /// Frames that left because they told nothing new.
    pub free: u64,
    /// Frames that left because a sync covered them.
    pub by_sync: u64,
    /// Times that the outputs of the two VMs differed.
    pub differences: u64,
    /// All frames that left.
    pub released: u64,
    /// Total time that these frames were held, in microseconds.
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
    /// The disk's buffers filled up.
    pub disk: u64,
    /// The backup's output differed.
    pub differs: u64,
    /// Another mode was chosen.
    pub change_over: u64,
    /// The log or the buffer of held output was half full.
    #[serde(default)]
    pub memory: u64,
}

/// A take-over, step by step. Times are in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailoverStatus {
    /// From the last message of the old primary to this host's candidacy.
    pub detected_us: u64,
    /// From there to the won election.
    pub elected_us: u64,
    /// From there until the agreed inputs were applied and the complete set was agreed.
    pub applied_us: u64,
    /// From there to the first frame out: disk, QEMU's switch, announcement.
    pub announced_us: u64,
    /// Frames for the VM that had also reached this host from the network, were not agreed before the old primary died, and were then given to
    /// the VM.
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
    /// The other host, and what it or this host says.
    pub why: String,
    /// How often in a row a join has failed: a VM's for this reason, a program's for whatever reason.
    pub times: u32,
    /// The problem goes away by itself.
    pub passes: bool,
}

impl JoinProblem {
    /// A join that failed so often in a row fails for good.
    pub const FOR_GOOD: u32 = 3;

    /// Whether it is not to be waited for.
    #[must_use]
    pub fn is_for_good(&self) -> bool {
        self.times >= Self::FOR_GOOD && !self.passes
    }
}

/// A checkpoint of a VM's memory on the standby's host, as the host that makes it sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointStatus {
    /// The standby.
    pub host: String,
    /// When the last round was completed, in milliseconds since 1970; none before the first.
    pub at_ms: Option<u64>,
    /// Rounds so far.
    pub rounds: u64,
    /// The size of the VM's memory in the last round.
    pub memory_bytes: u64,
    /// Bytes that the last round sent.
    pub sent_bytes: u64,
    /// Bytes that all rounds sent.
    pub sent_bytes_total: u64,
    /// How long the last round took, in milliseconds.
    pub took_ms: u64,
}

/// How far long work is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// What is being done.
    pub what: String,
    /// How much is done so far, in bytes.
    pub done: u64,
    /// How much there is to do in total, in bytes.
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
