//! What a person writes: one file for the cluster, one for each host, one for each VM.
//!
//! Every unknown key is an error, every relative path is relative to the file that it stands in, and every message
//! names the file. Which keys there are is in `dunlin_api::files`; here is which values make sense, and what the daemon makes of them.

mod cluster;
mod error;
mod host;
mod hosts;
mod machine;
mod program;
mod vm;

pub use cluster::Cluster;
pub use error::MoveError;
pub use host::{HostConfig, PageAt, Trust, file_with_keys};
pub use hosts::{NAMES_STANDBY_SINCE, newest, readable_by};
pub use machine::vm_spec;
pub use program::ProgramSpec;
pub use vm::{DiskReplication, Standby, VmConfig};

use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// Why a configuration cannot be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or has unknown or missing keys.
    #[error("{origin}: {why}")]
    Malformed {
        /// Which file.
        origin: String,
        /// What and where, on one line.
        why: String,
    },
    /// The values do not make sense.
    #[error("{origin}: {why}")]
    Senseless {
        /// Which file.
        origin: String,
        /// What, and what to do.
        why: String,
    },
}

impl ConfigError {
    fn senseless(origin: &str, why: impl std::fmt::Display) -> Self {
        Self::Senseless {
            origin: origin.to_owned(),
            why: why.to_string(),
        }
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
        path: path.to_owned(),
        source,
    })
}

/// Parses `text`; the error is one line, with the place.
pub fn parse<T: DeserializeOwned>(text: &str, origin: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| {
            let before = &text.as_bytes()[..span.start.min(text.len())];
            1 + before.iter().filter(|&&byte| byte == b'\n').count()
        });
        let why = format!(
            "line {line}: {}",
            error.message().lines().collect::<Vec<_>>().join(" ")
        );
        ConfigError::Malformed {
            origin: origin.to_owned(),
            why,
        }
    })
}

/// `path` as seen from the folder of the file that names it.
fn beside(file: &Path, path: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new(".")).join(path)
}

#[cfg(test)]
mod tests;
