//! Why a part of the bundle is not to be had: each is a line in the part's place.

use crate::control::client::ClientError;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A part that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The daemon hangs; it had so long.
    #[error("the daemon does not answer within {} s", .0.as_secs())]
    TooLate(Duration),
    /// It is not there, or broke off.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It does not say how it is.
    #[error(transparent)]
    Status(#[from] anyhow::Error),
    /// Its own words.
    #[error("{0}")]
    Refused(String),
    /// What it says is nothing that can be written.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Its threads.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    /// Nobody knows where things are.
    #[error("host.toml cannot be used")]
    NoHost,
    /// There are none to be read.
    #[error("host.toml names no address for metrics")]
    NoMetrics,
    /// Nobody serves them.
    #[error("metrics at {address}: {error}")]
    Metrics {
        /// Where.
        address: SocketAddr,
        /// Why not.
        #[source]
        error: ureq::Error,
    },
    /// A file cannot be read.
    #[error("{}: {error}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// Where it breaks off is not told: a secret may be there.
    #[error("it is not TOML")]
    NotToml,
    /// What is left of it is nothing that can be written.
    #[error(transparent)]
    Toml(#[from] toml::ser::Error),
    /// Nothing is to be run.
    #[error("no command")]
    NoCommand,
    /// A command cannot be run.
    #[error("{program}: {error}")]
    Command {
        /// Which.
        program: String,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// A command's words broke off.
    #[error("{0}: what it says cannot be read")]
    Unreadable(String),
    /// A command is stuck.
    #[error("{program} does not end within {} s", .patience.as_secs())]
    Stuck {
        /// Which.
        program: String,
        /// It had so long.
        patience: Duration,
    },
}

impl PartError {
    pub(super) fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { path, error }
    }
}

/// Why nothing is known of the daemon's threads.
#[derive(Debug, thiserror::Error)]
pub enum ThreadsError {
    /// Nobody listens.
    #[error("no daemon answers at {}: {error}", .socket.display())]
    NoDaemon {
        /// Where.
        socket: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// It has ended since, or is somebody else's.
    #[error("{}: {error}", .tasks.display())]
    Tasks {
        /// Where its threads are shown.
        tasks: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
}
