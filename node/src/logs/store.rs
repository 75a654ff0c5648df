//! What a host keeps of its logs over restarts: for each a folder with `log.json` ([`LogRecord`]) and the group's own files.

use dunlin_api::log::LogRecord;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

const FILE: &str = "log.json";

/// Where a log is kept.
pub fn folder(state: &Path, log: &str) -> PathBuf {
    state.join("logs").join(log)
}

/// Keeps a log's record, durably.
pub fn keep(state: &Path, record: &LogRecord) -> io::Result<()> {
    let folder = folder(state, &record.name);
    if !folder.join(FILE).exists() {
        // What a removal left that was cut short is not this log's.
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::create_dir_all(&folder)?;
    let (new, path) = (folder.join("log.json.new"), folder.join(FILE));
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(&folder)?.sync_all()?;
    File::open(state.join("logs"))?.sync_all()
}

/// Forgets a log: its record first, so that a half-removed one is not started again.
pub fn forget(state: &Path, log: &str) -> io::Result<()> {
    let folder = folder(state, log);
    for removed in [
        std::fs::remove_file(folder.join(FILE)),
        std::fs::remove_dir_all(&folder),
    ] {
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Why a kept record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The system does not let it.
    #[error("{}: {error}", .path.display())]
    File {
        /// Its file, or the folder of all.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// It is none.
    #[error("{}: {error}", .path.display())]
    NoRecord {
        /// Its file.
        path: PathBuf,
        /// What and where.
        #[source]
        error: serde_json::Error,
    },
}

/// The kept records by their names, and why one cannot be read.
pub fn all(state: &Path) -> Vec<(String, Result<LogRecord, ReadError>)> {
    let logs = state.join("logs");
    let entries = match std::fs::read_dir(&logs) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![(String::new(), Err(ReadError::File { path: logs, error }))],
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path().join(FILE);
        let record = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => Err(ReadError::File { path, error }),
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| ReadError::NoRecord { path, error }),
        };
        found.push((entry.file_name().to_string_lossy().into_owned(), record));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_log_is_found_until_it_is_forgotten() {
        let state = tempfile::tempdir().expect("a folder");
        let record = LogRecord {
            name: "jobs".into(),
            id: "1".into(),
            hosts: vec!["a".into()],
        };
        assert!(all(state.path()).is_empty());
        keep(state.path(), &record).expect("kept");
        let found = all(state.path());
        assert!(
            matches!(&found[..], [(name, Ok(kept))] if name == "jobs" && *kept == record),
            "{found:?}"
        );
        forget(state.path(), "jobs").expect("forgotten");
        forget(state.path(), "jobs").expect("twice is the same");
        assert!(all(state.path()).is_empty());
        assert!(!folder(state.path(), "jobs").exists());
    }

    #[test]
    fn a_damaged_log_is_named_and_hides_no_other() {
        let state = tempfile::tempdir().expect("a folder");
        for name in ["good", "bad"] {
            let record = LogRecord {
                name: name.into(),
                id: "1".into(),
                hosts: vec!["a".into()],
            };
            keep(state.path(), &record).expect("kept");
        }
        let file = folder(state.path(), "bad").join(FILE);
        std::fs::write(&file, "{").expect("written");
        let mut found = all(state.path());
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        let [(bad, Err(why)), (good, Ok(_))] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((bad.as_str(), good.as_str()), ("bad", "good"));
        assert!(why.to_string().contains("bad/log.json"), "{why}");
    }
}
