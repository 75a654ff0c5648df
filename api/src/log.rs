//! What is said about shared logs (docs/log-service.md): on the control socket, and between daemons.

use crate::word::{self, words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum LogRequest {
    /// Make a log on these hosts.
    Create {
        /// Its name.
        log: String,
        /// Its hosts, all of which have to answer.
        hosts: Vec<String>,
    },
    /// How the logs of this host are.
    Status {
        /// Only this one.
        #[serde(default)]
        log: Option<String>,
    },
    /// Proposals follow, one [`LogLine`] a line, once this was answered by [`LogAnswer::Open`].
    Write {
        /// To which log.
        log: String,
        /// The proposer's name, if each of its numbers is to count once.
        #[serde(default)]
        by: Option<String>,
    },
    /// The agreed entries.
    Read {
        /// Of which log.
        log: String,
        /// The first index wanted; 0 is the oldest that is there.
        #[serde(default)]
        from: u64,
        /// Go on with what will be agreed.
        #[serde(default)]
        follow: bool,
        /// Not more entries than these.
        #[serde(default)]
        most: Option<u64>,
    },
    /// Take the log away from all its hosts, with what is in it.
    Remove {
        /// Which.
        log: String,
    },
    /// Daemon to daemon: could you have a part in this log?
    Prepare {
        /// The log.
        record: LogRecord,
    },
    /// Daemon to daemon: have a part in it.
    Install {
        /// The log.
        record: LogRecord,
    },
    /// Daemon to daemon: forget it.
    Forget {
        /// Which.
        log: String,
        /// Only the one of this creation.
        id: String,
    },
}

impl LogRequest {
    /// Whether a daemon takes this from another daemon.
    #[must_use]
    pub fn is_for_peers(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::Prepare { .. } | Self::Install { .. } | Self::Forget { .. }
        )
    }
}

/// What a host keeps of a log beside the log itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRecord {
    /// Its name.
    pub name: String,
    /// Drawn when it was made: a later log of the same name is another one.
    pub id: String,
    /// Its hosts; the place of each is its member's id.
    pub hosts: Vec<String>,
}

/// A proposal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogLine {
    /// Comes back with the answer. Of a proposer with a name: 1, 2, 3, ..., and each counts once.
    pub number: u64,
    /// The entry, in base64.
    pub data: String,
}

/// What is answered.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "said", rename_all = "kebab-case")]
pub enum LogAnswer {
    /// Proposals may now be sent.
    Open {
        /// The host that takes them.
        leader: String,
    },
    /// The proposal is agreed: it is on the disks of a majority, and in the log for good.
    Agreed {
        /// The proposal's number.
        number: u64,
        /// Its index in the log; 0 if it was agreed long ago.
        index: u64,
        /// The proposal had already been agreed before.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        repeated: bool,
    },
    /// The proposal was not taken, or it is not known yet whether it was. Nothing that followed it was taken either, and the conversation ends.
    Refused {
        /// The proposal's number.
        number: u64,
        /// One line that says what to do.
        why: String,
        /// The same proposal may be sent again, with the same number, to any of the log's hosts.
        again: bool,
    },
    /// An agreed entry.
    Entry {
        /// Its index. Indexes rise, with gaps.
        index: u64,
        /// The consensus term in which it was proposed.
        term: u64,
        /// Its proposer's name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        /// Its proposer's number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        number: Option<u64>,
        /// The entry, in base64.
        data: String,
    },
    /// The entries that were asked for are no longer kept.
    Compacted {
        /// The oldest index that is still kept.
        first: u64,
    },
    /// The state of a log.
    Status(Box<LogStatus>),
}

words! {
    /// How a log is on a host.
    #[derive(Default)]
    LogState {
        /// Proposals are taken here.
        Leads = "leads",
        /// Another host takes them.
        #[default]
        Follows = "follows",
        /// No majority of its hosts has chosen one.
        NoLeader = "no-leader",
        /// Nothing is taken until this host's disk has room.
        DiskFull = "disk-full",
        /// It does not run on this host any more.
        Failed = "failed",
    }
}

/// One log, as this host sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogStatus {
    /// Its name.
    pub name: String,
    /// Its state on this host.
    pub state: LogState,
    /// The reason for its state, if there is one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// The leader's host, if known.
    pub leader: Option<String>,
    /// The consensus term.
    pub term: u64,
    /// The oldest index that can be read here.
    pub first: u64,
    /// The newest index.
    pub last: u64,
    /// How many entries can be read here.
    pub entries: u64,
    /// How many bytes these entries have.
    pub bytes: u64,
    /// Its hosts.
    pub hosts: Vec<LogHost>,
}

impl LogStatus {
    /// Its state for people: the word, and why.
    #[must_use]
    pub fn state_in_words(&self) -> String {
        word::with_reason(&self.state, &self.why)
    }
}

/// A host of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogHost {
    /// Its name.
    pub host: String,
    /// It is this host, or this host is connected with it.
    pub connected: bool,
}
