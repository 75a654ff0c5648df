//! What a daemon keeps over restarts: the configurations of the VMs in whose groups it is.

use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::vm::{FILE, NEWCOMER};

/// Why this daemon may not have the state folder.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Its lock cannot be made.
    #[error("{}: {error}", .path.display())]
    File {
        /// Its file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// Somebody has it.
    #[error("{}: another daemon uses this state folder; stop it first", .0.display())]
    InUse(PathBuf),
}

/// Keeps a second daemon out of the state folder, for as long as the file is open.
pub fn lock(state: &Path) -> Result<File, LockError> {
    let path = state.join("lock");
    let file = File::create(&path).map_err(|error| LockError::File { path, error })?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(_) => Err(LockError::InUse(state.to_owned())),
    }
}

/// Where a VM is kept.
pub fn folder(state: &Path, vm: &str) -> PathBuf {
    state.join("vms").join(vm)
}

/// Which life of its images it is.
const LIFE: &str = "life";

/// Keeps a VM's configuration, durably; which life of its images begins; and whether this host came to its group later.
pub fn keep(state: &Path, vm: &str, text: &str, life: u64, newcomer: bool) -> io::Result<()> {
    let folder = folder(state, vm);
    if !folder.join(FILE).exists() {
        // What a removal left that was cut short is not this VM's.
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::create_dir_all(&folder)?;
    if newcomer {
        File::create(folder.join(NEWCOMER))?.sync_all()?;
    }
    let mut file = File::create(folder.join(LIFE))?;
    write!(file, "{life}")?;
    file.sync_all()?;
    let (new, path) = (folder.join("vm.toml.new"), folder.join(FILE));
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(&folder)?.sync_all()
}

/// A VM's configuration.
pub fn text(state: &Path, vm: &str) -> io::Result<String> {
    std::fs::read_to_string(folder(state, vm).join(FILE))
}

/// Which life of its images it is; 0 for one that an earlier version has started.
pub fn life(state: &Path, vm: &str) -> u64 {
    let text = std::fs::read_to_string(folder(state, vm).join(LIFE));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Forgets a VM: its configuration first, so that a half-removed one is not started again.
pub fn forget(state: &Path, vm: &str) -> io::Result<()> {
    let folder = folder(state, vm);
    match std::fs::remove_file(folder.join(FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A file that is there and cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct ReadError {
    path: PathBuf,
    source: io::Error,
}

/// The kept configurations: name, and text or why it cannot be read. What is no folder is not the daemon's.
pub fn all(state: &Path) -> io::Result<Vec<(String, Result<String, ReadError>)>> {
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(state.join("vms")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path().join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            text => text.map_err(|source| ReadError { path, source }),
        };
        found.push((entry.file_name().to_string_lossy().into_owned(), text));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_kept_vm_is_found_until_it_is_forgotten() {
        let state = tempfile::tempdir().expect("a folder");
        let all = |state| -> Vec<(String, String)> {
            let found = all(state).expect("a folder").into_iter();
            found
                .map(|(name, text)| (name, text.expect("readable")))
                .collect()
        };
        assert_eq!(all(state.path()), []);
        keep(state.path(), "v", "text", 3, false).expect("kept");
        assert_eq!(life(state.path(), "v"), 3);
        assert_eq!(all(state.path()), [("v".to_owned(), "text".to_owned())]);
        forget(state.path(), "v").expect("forgotten");
        forget(state.path(), "v").expect("twice is the same");
        assert_eq!(all(state.path()), []);
        let left_over = folder(state.path(), "v").join("log");
        std::fs::create_dir_all(&left_over).expect("a removal that was cut short");
        keep(state.path(), "v", "text", 1, false).expect("kept again");
        assert!(!left_over.exists(), "an old VM's log is not the new one's");
    }

    #[test]
    fn what_cannot_be_read_is_named_and_hides_no_other() {
        let state = tempfile::tempdir().expect("a folder");
        keep(state.path(), "good", "text", 1, false).expect("kept");
        keep(state.path(), "bad", "text", 1, false).expect("kept");
        std::fs::write(folder(state.path(), "bad").join(FILE), [0xff]).expect("no text");
        std::fs::write(state.path().join("vms/notes.txt"), "a person's").expect("a stray file");
        let mut found = all(state.path()).expect("all the same");
        found.sort_by(|one, other| one.0.cmp(&other.0));
        let [(bad, why), (good, text)] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((bad.as_str(), good.as_str()), ("bad", "good"));
        assert_eq!(text.as_deref().ok(), Some("text"));
        let why = why.as_ref().expect_err("it is no text").to_string();
        assert!(why.contains("vms/bad/vm.toml: "), "{why}");
    }

    #[test]
    fn a_second_daemon_is_kept_out() {
        let state = tempfile::tempdir().expect("a folder");
        let first = lock(state.path()).expect("the first");
        assert!(lock(state.path()).is_err());
        drop(first);
        // A child of a test beside this one holds what it inherited until it executes its program.
        let until = Instant::now() + Duration::from_secs(20);
        while let Err(error) = lock(state.path()) {
            assert!(Instant::now() < until, "after the first has ended: {error}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
