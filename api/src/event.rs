//! What a daemon tells by itself.

use crate::word::words;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime};
use utoipa::ToSchema;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The event's number, which counts up on each host.
    pub seq: u64,
    /// When it happened, in milliseconds since 1970, by that host's clock.
    pub time_ms: u64,
    /// The host on which it happened.
    pub host: String,
    /// The VM or bare program that it is about, or `log/NAME` for a log; empty if it is about the host.
    pub vm: String,
    /// What happened, in one word.
    pub kind: EventKind,
    /// What happened, for people.
    pub text: String,
}

impl Event {
    /// When it happened, by its host's clock; up to a millisecond early.
    #[must_use]
    pub fn at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.time_ms)
    }
}

words! {
    /// What happened, in one word. docs/troubleshooting.md says what each word means, how serious it is, and what to do.
    #[expect(missing_docs, reason = "that page says it, and a test holds the two together")]
    EventKind {
        AuthorityChanged = "authority-changed",
        BackupLost = "backup-lost",
        BadInput = "bad-input",
        BeginsElsewhere = "begins-elsewhere",
        BegunAgain = "begun-again",
        ProtocolViolation = "protocol-violation" | "breach",
        CannotBeMatched = "cannot-be-matched",
        CannotLead = "cannot-lead",
        CertificateExpires = "certificate-expires",
        CertificatesRevoked = "certificates-revoked",
        ColdStart = "cold-start",
        Deposed = "deposed",
        DiskAlike = "disk-alike",
        DiskError = "disk-error",
        DiskFull = "disk-full",
        DisksDiffer = "disks-differ",
        DisksEqual = "disks-equal",
        DisksNotCompared = "disks-not-compared",
        Down = "down",
        DownByForce = "down-by-force",
        Dropped = "dropped",
        Elected = "elected",
        EndedHere = "ended-here",
        EndsHere = "ends-here",
        EndsLate = "ends-late",
        Exec = "exec",
        Failed = "failed",
        Fault = "fault",
        Forgotten = "forgotten",
        GuestNotAsked = "guest-not-asked",
        GuestPanicked = "guest-panicked",
        GuestReset = "guest-reset",
        GuestShutdown = "guest-shutdown",
        HandingOver = "handing-over",
        HasRoom = "has-room",
        HostBegins = "host-begins",
        HostEnds = "host-ends",
        Hosts = "hosts",
        JoinFailed = "join-failed",
        Joined = "joined",
        Joining = "joining",
        KeysRenewed = "keys-renewed",
        Left = "left",
        LeftToBackup = "left-to-backup",
        LinkLost = "link-lost",
        LinkRefused = "link-refused",
        LinkUp = "link-up",
        Listens = "listens",
        LoadFailed = "load-failed",
        LogDiskFailed = "log-disk-failed",
        LogDiskFull = "log-disk-full",
        LogDiskRoom = "log-disk-room",
        LogFailed = "log-failed",
        LogFull = "log-full",
        LogLeads = "log-leads",
        LogRefused = "log-refused",
        LogRoom = "log-room",
        LoopStandsStill = "loop-stands-still",
        QuorumRegained = "quorum-regained" | "majority",
        MirrorFailed = "mirror-failed",
        MirrorLost = "mirror-lost",
        QuorumLost = "quorum-lost" | "no-majority",
        NoPage = "no-page",
        NotBatched = "not-batched",
        NotHandedOver = "not-handed-over",
        NotRead = "not-read",
        OthersLost = "others-lost",
        OutputFull = "output-full",
        Overruled = "overruled",
        PoisonInput = "poison-input",
        Policy = "policy",
        PowerdownIgnored = "powerdown-ignored",
        PrimaryLost = "primary-lost",
        ProgramEnded = "program-ended",
        Protected = "protected",
        QemuDied = "qemu-died",
        Readmitted = "readmitted",
        Removed = "removed",
        Serves = "serves",
        Stalled = "stalled",
        Standby = "standby",
        StandingAlone = "standing-alone",
        Started = "started",
        StateLeft = "state-left",
        SteppedDown = "stepped-down",
        TakeOverFailed = "take-over-failed",
        TapGone = "tap-gone",
        TookOver = "took-over",
        Unprotected = "unprotected",
        Waiting = "waiting",
        WaitsForBackup = "waits-for-backup",
        WaitsForRoom = "waits-for-room",
    }
}
