//! What a daemon answers, one JSON object a line.

use crate::{Event, Found, HostStatus, Member, Progress, Report, keys, log};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One line of an answer; the last one is `Done` or `Failed`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// The state of this host and its VMs.
    Status(Box<HostStatus>),
    /// Something happened.
    Event(Event),
    /// How far long work is.
    Progress(Progress),
    /// What this host holds of a VM.
    Standing(Standing),
    /// What a VM has left on this host.
    LastLife(LastLife),
    /// One finding of `Check`.
    Found(Found),
    /// The state of a host of the cluster.
    Member(Box<Member>),
    /// What this host lacks for a VM.
    Report(Box<Report>),
    /// The certificate that a host shows, and the authorities that it believes.
    Keys(Box<keys::HostKeys>),
    /// An answer about a log.
    Log(log::LogAnswer),
    /// A program has printed something.
    Printed {
        /// What it has printed, with the ends of lines.
        text: String,
    },
    /// The command is about to run: the client may now send its standard streams.
    Entered {
        /// For people: where the command runs, and what that means.
        text: String,
    },
    /// The command has ended.
    Exited {
        /// Its exit code; 128 plus the signal's number if a signal ended it.
        code: i32,
    },
    /// Nothing happened. It keeps the conversation alive while a client follows.
    Alive,
    /// It is done.
    Done {
        /// What was done, for people.
        text: String,
    },
    /// It was not done.
    Failed {
        /// One line that says what to do.
        why: String,
        /// The exit code: 2 for bad input, 1 for anything else.
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
    /// A copy of it runs on this host, or will at once.
    pub alive: bool,
    /// The host may be elected with that copy, as far as it knows. A host of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub may_lead: Option<bool>,
    /// The host knows of a leader.
    pub led: bool,
    /// The newest entry of its log: term and index.
    pub last: (u64, u64),
    /// The members that hold a complete copy, as far as its log says: one bit for each member's number.
    pub complete: u64,
    /// Its images, in the order of the configuration; a witness has none.
    pub disks: Vec<DiskStanding>,
    /// What it has noted about which members were complete, and since when.
    #[serde(default)]
    pub noted: Option<Note>,
    /// It no longer knows what was agreed.
    #[serde(default)]
    pub recovering: bool,
    /// If the copy of a bare program has ended by itself: the last inputs that it was given, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_after: Vec<String>,
    /// The copy of a bare program on this host has ended by itself, or could not start.
    #[serde(default)]
    pub ended: bool,
    /// The program is to be restarted when it has ended on all hosts.
    #[serde(default)]
    pub begins_again: bool,
}

/// How new an image is. Images are compared by these fields, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct DiskStanding {
    /// The image is the state of the disk at one moment.
    pub consistent: bool,
    /// The consensus term in which it was last written.
    pub term: u64,
    /// It was written by the primary of that term.
    pub primary: bool,
    /// The last sync that it holds completely.
    pub epoch: u64,
}

/// What a host remembers of a VM's images after the last VM that used them has ended there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LastLife {
    /// The number of that life of the images: each `up` begins another life. None if this host remembers none of the images.
    pub number: Option<u64>,
    /// How new the images were, in the order of the configuration. Empty if one of them could not be read.
    pub disks: Vec<DiskStanding>,
    /// All images are as that life has left them.
    pub untouched: bool,
    /// If somebody had written to the images since, that would be noticed. Nobody notices writes to a block device.
    pub sure: bool,
    /// Some of what is remembered of them cannot be read.
    #[serde(default)]
    pub unreadable: bool,
    /// If `disks` is empty: no image is newer than this. None if that is not known either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<DiskStanding>,
    /// What is remembered of each image, in the order of the configuration. Empty if an older build answers.
    #[serde(default)]
    pub images: Vec<ImageLife>,
}

/// What a host remembers of one image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageLife {
    /// A VM has used it here. One that none has used is new.
    pub known: bool,
    /// How new it was. None if that could not be read, or if it is not known.
    pub standing: Option<DiskStanding>,
}

/// Which members held a complete copy, as a host has noted it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Note {
    /// The log entry that says so: term and index.
    pub at: (u64, u64),
    /// The members that held one: one bit for each member's number.
    pub complete: u64,
    /// Since when, in milliseconds since 1970, by the clock of the host that noted it.
    pub since_ms: u64,
}
