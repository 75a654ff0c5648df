//! What it decides: how long each wait of a VM's loop and of its sessions may take, and what follows then.
//!
//! Flow: whoever waits asks [`Wait::bound_us`]; when the bound is reached, what is said of it comes from [`Wait::said`].
//!
//! Invariants:
//! 1. Nothing that a protected VM waits for is waited for without a bound.
//! 2. Between the primary's `stop` and `cont` no wait is as long as a second, nor are all of them together.
//!
//! The table for people is docs/waits.md; a test compares the two. Not here: waiting itself; what a session waits for
//! when nothing is owed to it (its next job), which has no bound by its nature.

/// Something that is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Wait {
    /// The loop: the group's agreement on a sync.
    SyncAgreed = 1,
    /// Both loops: one card, to take anything at all of what was sent to it.
    CardTakes,
    /// Both loops: all cards, to take what was sent before a sync.
    Drain,
    /// The primary's session: the backup's QEMU.
    BackupStarts,
    /// The primary's session: a disk's copy to get on.
    DiskCopies,
    /// The primary's session: the backup's disk to introduce itself.
    MirrorGreets,
    /// The primary's session: what the backup's running VM has written.
    BackupScans,
    /// The primary's session: the backup's VM to stand. The primary's own runs meanwhile.
    BackupStands,
    /// The primary's session: all of what is done from `stop` until the VM is told to go on.
    VmStands,
    /// The primary's session: `stop`.
    VmStops,
    /// The primary's session: the devices' state.
    DevicesSave,
    /// The primary's session: the loop's word that the VM's last frames of the epoch are taken.
    LineDrawn,
    /// The primary's session: `cont`.
    VmResumes,
    /// The primary's session: the backup's hashes.
    BackupHashes,
    /// The primary's session: the backup's word that it holds the sync.
    BackupHolds,
    /// The primary's session: the backup's word that it goes on from the sync.
    BackupLoads,
    /// The primary's session, where a person asked for a switchover: the backup to hold and load what the VM stands for.
    Switchover,
    /// The primary's session: the loop's word that the VM is the backup's now.
    HandedOver,
    /// The primary's loop: `cont` for a VM that nobody else lets run on.
    VmGoesOn,
    /// The primary's loop: QEMU's word that the guest is asked to switch itself off.
    GuestAsked,
    /// The primary's loop: the thread of a session that has ended.
    SessionEnds,
    /// The backup's session: the next piece of a join.
    JoinArrives,
    /// The backup's session: the next message of a sync.
    SyncArrives,
    /// The backup's session: the log's word that the epoch ends.
    EndAgreed,
    /// The backup's session: the mirrored writes of the epoch.
    DiskMirrors,
    /// The backup's session: the loop's word that the sync may be acknowledged.
    LeaveGiven,
    /// The backup's session: its loop to take what came ahead of a sync.
    AheadTaken,
    /// The backup's loop: the leader's word that a session goes on in a new term.
    TermTold,
    /// Both sessions: the stream to take a message.
    StreamTakes,
    /// Whoever starts the VM again, or ends it: its last copy here to end.
    MachineEnds,
    /// Anybody: QEMU's answer to a command.
    QemuAnswers,
    /// The backup's session: QEMU's answer to a stop or a load.
    ColoAnswers,
    /// The watchdog: any input to reach a VM while some wait.
    InputApplied,
    /// The watchdog: a sync that has begun to end.
    SyncEnds,
    /// The watchdog: any output to leave while some waits.
    OutputLeaves,
    /// The watchdog: a backup's disks, while a sync is on its way to them.
    DiskSettles,
    /// The watchdog: a copy that is being taken over, its disks above all.
    TakesOver,
}

/// What is to be known of a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Its name in events, metrics and status.
    pub name: &'static str,
    /// Who waits.
    pub who: &'static str,
    /// For what.
    pub for_what: &'static str,
    /// How long.
    pub bound_us: u64,
    /// What follows.
    pub then: &'static str,
}

const MS: u64 = 1_000;
const S: u64 = 1_000_000;

const PRIMARY: &str = "primary's session";
const BACKUP: &str = "backup's session";
const ENDS: &str = "the session ends";
const RUNS_ON: &str = "the sync is broken off, the VM runs on, the backup is dropped";

const fn terms(
    name: &'static str,
    who: &'static str,
    for_what: &'static str,
    bound_us: u64,
    then: &'static str,
) -> Terms {
    Terms {
        name,
        who,
        for_what,
        bound_us,
        then,
    }
}

/// A bound, for a person: those that are no tenths of a second to the hundredth.
fn said_us(us: u64) -> String {
    match us % (100 * MS) {
        0 => seconds(us),
        _ => format!("{:.2} s", us as f64 / S as f64),
    }
}

impl Wait {
    /// All of them, in the table's order.
    pub const ALL: [Self; 37] = [
        Self::SyncAgreed,
        Self::CardTakes,
        Self::Drain,
        Self::BackupStarts,
        Self::DiskCopies,
        Self::MirrorGreets,
        Self::BackupScans,
        Self::BackupStands,
        Self::VmStands,
        Self::VmStops,
        Self::DevicesSave,
        Self::LineDrawn,
        Self::VmResumes,
        Self::BackupHashes,
        Self::BackupHolds,
        Self::BackupLoads,
        Self::Switchover,
        Self::HandedOver,
        Self::VmGoesOn,
        Self::GuestAsked,
        Self::SessionEnds,
        Self::JoinArrives,
        Self::SyncArrives,
        Self::EndAgreed,
        Self::DiskMirrors,
        Self::LeaveGiven,
        Self::AheadTaken,
        Self::TermTold,
        Self::StreamTakes,
        Self::MachineEnds,
        Self::QemuAnswers,
        Self::ColoAnswers,
        Self::InputApplied,
        Self::SyncEnds,
        Self::OutputLeaves,
        Self::DiskSettles,
        Self::TakesOver,
    ];

    /// Its row.
    #[must_use]
    pub const fn terms(self) -> Terms {
        match self {
            Self::SyncAgreed => terms(
                "sync-agreed",
                "primary's loop",
                "the group's agreement on a sync",
                5 * S,
                ENDS,
            ),
            Self::CardTakes => terms(
                "card-takes",
                "both loops",
                "a card of the VM to take anything of what was sent to it",
                100 * MS,
                "nobody waits for this card until it has taken something",
            ),
            Self::Drain => terms(
                "drain",
                "both loops",
                "all cards of the VM to take what was sent before a sync",
                500 * MS,
                "the sync goes on, and the VM gets the rest after it",
            ),
            Self::BackupStarts => terms(
                "backup-starts",
                PRIMARY,
                "the backup's QEMU to start",
                20 * S,
                ENDS,
            ),
            Self::DiskCopies => terms(
                "disk-copies",
                PRIMARY,
                "the copy of a disk to get on",
                20 * S,
                ENDS,
            ),
            Self::MirrorGreets => terms(
                "mirror-greets",
                PRIMARY,
                "the backup's disk to introduce itself",
                10 * S,
                "its stream is broken, and the join fails",
            ),
            Self::BackupScans => terms(
                "backup-scans",
                PRIMARY,
                "what the backup's running VM has written",
                10 * S,
                ENDS,
            ),
            Self::BackupStands => terms(
                "backup-stands",
                PRIMARY,
                "the backup's VM to stand; the primary's runs meanwhile",
                1500 * MS,
                RUNS_ON,
            ),
            Self::VmStands => terms(
                "vm-stands",
                PRIMARY,
                "all of a sync from `stop` to `cont`",
                950 * MS,
                RUNS_ON,
            ),
            Self::VmStops => terms("vm-stops", PRIMARY, "QEMU to stop the VM", 900 * MS, RUNS_ON),
            Self::DevicesSave => terms(
                "devices-save",
                PRIMARY,
                "QEMU to save the devices' state",
                900 * MS,
                RUNS_ON,
            ),
            Self::LineDrawn => terms(
                "line-drawn",
                PRIMARY,
                "the loop to take the VM's last frames of the epoch",
                900 * MS,
                RUNS_ON,
            ),
            Self::VmResumes => terms(
                "vm-resumes",
                PRIMARY,
                "QEMU to let the VM run on",
                900 * MS,
                RUNS_ON,
            ),
            Self::BackupHashes => terms("backup-hashes", PRIMARY, "the backup's hashes", 10 * S, ENDS),
            Self::BackupHolds => terms(
                "backup-holds",
                PRIMARY,
                "the backup to hold the sync, its disk writes getting on",
                10 * S,
                ENDS,
            ),
            Self::BackupLoads => terms(
                "backup-loads",
                PRIMARY,
                "the backup to go on from the sync",
                10 * S,
                ENDS,
            ),
            Self::Switchover => terms(
                "switchover",
                PRIMARY,
                "the backup to hold, or to load, the sync of a switchover; the VM stands",
                5 * S,
                RUNS_ON,
            ),
            Self::HandedOver => terms(
                "handed-over",
                PRIMARY,
                "the loop's word that the VM is the backup's now",
                900 * MS,
                RUNS_ON,
            ),
            Self::VmGoesOn => terms(
                "vm-goes-on",
                "primary's loop",
                "QEMU to let the VM run on after a switchover, a stall or a full disk",
                400 * MS,
                "it is told all the same, and obeys when it can",
            ),
            Self::GuestAsked => terms(
                "guest-asked",
                "primary's loop",
                "QEMU to ask the guest to switch itself off; the loop goes on meanwhile",
                3 * S,
                "the VM is ended without its guest",
            ),
            Self::SessionEnds => terms(
                "session-ends",
                "primary's loop",
                "the thread of a session that was ended",
                60 * S,
                "it is told, and waited for on: no other session begins",
            ),
            Self::JoinArrives => terms(
                "join-arrives",
                BACKUP,
                "the next piece of a join, or that disks are still copied",
                20 * S,
                ENDS,
            ),
            Self::SyncArrives => terms("sync-arrives", BACKUP, "the next message of a sync", 10 * S, ENDS),
            Self::EndAgreed => terms(
                "end-agreed",
                BACKUP,
                "the log's word that the epoch ends",
                10 * S,
                ENDS,
            ),
            Self::DiskMirrors => terms(
                "disk-mirrors",
                BACKUP,
                "the disk writes of the epoch",
                20 * S,
                ENDS,
            ),
            Self::LeaveGiven => terms(
                "leave-given",
                BACKUP,
                "the loop's word that the sync may be acknowledged",
                5 * S,
                "the sync is dropped whole, and the session ends",
            ),
            Self::AheadTaken => terms(
                "ahead-taken",
                BACKUP,
                "its loop to take what came ahead of a sync",
                5 * S,
                ENDS,
            ),
            Self::TermTold => terms(
                "term-told",
                "backup's loop",
                "the leader's word that a session goes on in a new term",
                3 * S,
                "the sync that waits is dropped whole, and the session ends",
            ),
            Self::StreamTakes => terms(
                "stream-takes",
                "both sessions",
                "the stream to take a message",
                10 * S,
                ENDS,
            ),
            Self::MachineEnds => terms(
                "machine-ends",
                "whoever starts or ends the VM here",
                "its last copy here to end and to let go of its disks",
                10 * S,
                "the start fails, and a join is tried again; an end says so and goes on",
            ),
            Self::QemuAnswers => terms(
                "qemu-answers",
                "anybody",
                "QEMU's answer to a command",
                20 * S,
                "the command has failed",
            ),
            Self::ColoAnswers => terms(
                "colo-answers",
                BACKUP,
                "QEMU's answer to a stop or a load",
                20 * S,
                ENDS,
            ),
            Self::InputApplied => terms(
                "input-applied",
                "watchdog",
                "any input to reach the VM, while agreed ones wait",
                10 * S,
                ENDS,
            ),
            Self::SyncEnds => terms(
                "sync-ends",
                "watchdog",
                "a sync that has begun to end",
                15 * S,
                ENDS,
            ),
            Self::OutputLeaves => terms(
                "output-leaves",
                "watchdog",
                "any output to leave, while some waits",
                10 * S,
                ENDS,
            ),
            Self::DiskSettles => terms(
                "disk-settles",
                "watchdog",
                "the backup's disks to take anything of a sync",
                60 * S,
                ENDS,
            ),
            Self::TakesOver => terms(
                "takes-over",
                "watchdog",
                "a copy that is being taken over to get on",
                30 * S,
                "another host may lead; this one may again when its copy is taken over",
            ),
        }
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.terms().name
    }

    /// The longest that it may take.
    #[must_use]
    pub const fn bound_us(self) -> u64 {
        self.terms().bound_us
    }

    /// The same, for whoever waits.
    #[must_use]
    pub const fn bound(self) -> core::time::Duration {
        core::time::Duration::from_micros(self.bound_us())
    }

    /// By its number, as it is kept where threads see it.
    #[must_use]
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|wait| *wait as u8 == number)
    }

    /// That it was in vain, for a person.
    #[must_use]
    pub fn said(self) -> String {
        self.said_of(self.bound())
    }

    /// The same, of somebody who waited for another time than the usual one.
    #[must_use]
    pub fn said_of(self, bound: core::time::Duration) -> String {
        let Terms { name, for_what, .. } = self.terms();
        let bound_us = u64::try_from(bound.as_micros()).unwrap_or(u64::MAX);
        format!("waited {} in vain for {for_what} ({name})", said_us(bound_us))
    }

    /// How long, for a person.
    #[must_use]
    pub fn bound_said(self) -> String {
        said_us(self.bound_us())
    }
}

/// For a person.
#[must_use]
pub fn seconds(us: u64) -> String {
    format!("{:.1} s", us as f64 / S as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../docs/waits.md");

    fn row(wait: Wait) -> String {
        let Terms {
            name,
            who,
            for_what,
            then,
            ..
        } = wait.terms();
        format!(
            "| `{name}` | {who} | {for_what} | {} | {then} |",
            wait.bound_said()
        )
    }

    #[test]
    fn the_table_for_people_is_the_codes() {
        let rows: Vec<&str> = PAGE.lines().filter(|line| line.starts_with("| `")).collect();
        let expected: Vec<String> = Wait::ALL.map(row).to_vec();
        assert_eq!(
            rows,
            expected,
            "docs/waits.md should say:\n{}\n",
            expected.join("\n")
        );
    }

    #[test]
    fn names_and_numbers_are_each_ones_own() {
        for (number, wait) in Wait::ALL.into_iter().enumerate() {
            assert_eq!(
                wait as usize,
                number + 1,
                "{wait:?} is not where it stands in the list"
            );
            assert_eq!(Wait::of(wait as u8), Some(wait));
            let same = Wait::ALL.into_iter().filter(|other| other.name() == wait.name());
            assert_eq!(same.count(), 1, "{}", wait.name());
        }
        assert_eq!(Wait::of(0), None);
    }

    #[test]
    fn invariant_2_nothing_between_stop_and_cont_waits_for_a_second() {
        for wait in [
            Wait::VmStands,
            Wait::VmStops,
            Wait::DevicesSave,
            Wait::LineDrawn,
            Wait::VmResumes,
            Wait::HandedOver,
            Wait::Drain,
            Wait::CardTakes,
        ] {
            assert!(wait.bound_us() < S, "{wait:?}");
        }
    }

    #[test]
    fn whoever_waited_in_vain_says_for_what() {
        assert_eq!(
            Wait::VmStops.said(),
            "waited 0.9 s in vain for QEMU to stop the VM (vm-stops)"
        );
    }
}
