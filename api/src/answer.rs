//! What a daemon answers, one JSON object a line.

use crate::{Event, Found, HostStatus, Member, Progress, Report, keys, log};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One line of an answer; the last one is `Done` or `Failed`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// How everything is.
    Status(Box<HostStatus>),
    /// Something happened.
    Event(Event),
    /// Long work goes on.
    Progress(Progress),
    /// What this host holds of a VM.
    Standing(Standing),
    /// What a VM has left here.
    LastLife(LastLife),
    /// Something that was looked at for `Check`.
    Found(Found),
    /// How a host of the cluster is.
    Member(Box<Member>),
    /// What this host lacks for a VM.
    Report(Box<Report>),
    /// What a host shows, and whom it believes.
    Keys(Box<keys::HostKeys>),
    /// About a log.
    Log(log::LogAnswer),
    /// A program has printed this.
    Printed {
        /// What, line ends included.
        text: String,
    },
    /// The command is about to run: the standard streams may come.
    Entered {
        /// For a person: where, and what that means.
        text: String,
    },
    /// The command has ended.
    Exited {
        /// Its exit code; 128 and the signal's number where a signal ended it.
        code: i32,
    },
    /// Nothing happened: whoever follows is still listened to.
    Alive,
    /// It is done.
    Done {
        /// For a person.
        text: String,
    },
    /// It was not done.
    Failed {
        /// One line that says what to do.
        why: String,
        /// The exit code: 2 for bad input, 1 for the rest.
        code: i32,
    },
}

impl Answer {
    /// Done.
    pub fn done(text: impl Into<String>) -> Self {
        Self::Done { text: text.into() }
    }

    /// Bad input.
    pub fn refused(why: impl Into<String>) -> Self {
        Self::Failed {
            why: why.into(),
            code: 2,
        }
    }

    /// Anything else that went wrong.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::Failed {
            why: why.into(),
            code: 1,
        }
    }

    /// Whether nothing follows.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(
            self,
            Self::Done { .. }
                | Self::Exited { .. }
                | Self::Failed { .. }
                | Self::Standing(_)
                | Self::LastLife(_)
                | Self::Report(_)
                | Self::Keys(_)
        )
    }
}

/// What a host holds of a VM that nobody leads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Standing {
    /// A copy of it lives there, or will at once.
    pub alive: bool,
    /// It may be elected with that copy, as far as it knows; a host of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub may_lead: Option<bool>,
    /// It knows of a leader.
    pub led: bool,
    /// The newest entry of its log: term and index.
    pub last: (u64, u64),
    /// Who holds a complete copy, as far as its log says; a set of members.
    pub complete: u64,
    /// Its images, in the order of the configuration; a witness has none.
    pub disks: Vec<DiskStanding>,
    /// What it noted of who was complete, and since when.
    #[serde(default)]
    pub noted: Option<Note>,
    /// It does not know any more what was agreed.
    #[serde(default)]
    pub recovering: bool,
    /// The copy of a bare program has ended by itself, and these were the last inputs that it was given, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_after: Vec<String>,
    /// The copy of a bare program here has ended by itself, or could not begin.
    #[serde(default)]
    pub ended: bool,
    /// It is to be begun again when it has ended everywhere.
    #[serde(default)]
    pub begins_again: bool,
}

/// How new an image is: ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct DiskStanding {
    /// It is the disk at one moment.
    pub consistent: bool,
    /// The reign in which it was last written.
    pub term: u64,
    /// Written as that reign's primary.
    pub primary: bool,
    /// The last sync that it holds whole.
    pub epoch: u64,
}

/// What a host remembers of a VM's images since the VM that had them last has ended there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LastLife {
    /// Which life of these images that was: each `up` begins one more. None, where this host remembers none of that one's images.
    pub number: Option<u64>,
    /// How new they were, in the order of the configuration. Empty: one of them could not be read.
    pub disks: Vec<DiskStanding>,
    /// All of them are as that life has left them.
    pub untouched: bool,
    /// Whoever had written to them since would be noticed; nobody is who writes to a block device.
    pub sure: bool,
    /// There is something of them that cannot be read.
    #[serde(default)]
    pub unreadable: bool,
    /// Where `disks` is empty: none of them is newer than this. None, where that is not known either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<DiskStanding>,
}

/// Who held a complete copy, as a host has noted it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Note {
    /// Where the log says so: term and index.
    pub at: (u64, u64),
    /// A set of members.
    pub complete: u64,
    /// Since when, in milliseconds since 1970, by the clock of the host that noted it.
    pub since_ms: u64,
}
