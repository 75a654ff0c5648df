//! Who held a complete copy of the VM, since when: kept beside the log, and over a daemon's restart even where the log is not.
//!
//! Flow: an agreed `Complete`, or a snapshot -> [`Notebook::note`] -> a thread writes the file -> after a restart the inquest
//! (`cold`) of this host or of another one asks for it.
//!
//! Invariants:
//! 1. A note is never replaced by an older one.
//! 2. It only warns: nobody boots, leads or speaks because of a note. One that was not written in time costs a warning.
//! 3. The VM's loop never waits for the disk.
//!
//! Not here: what follows from it (`cold`).

use crossbeam_channel::{Receiver, Sender, unbounded};
use dunlin_api::Note;
use dunlin_core::agreed::ReplicaSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

const FILE: &str = "complete.json";

/// One VM's note on this host.
pub struct Notebook {
    newest: Option<Note>,
    writer: Option<(Sender<Note>, JoinHandle<()>)>,
}

impl Notebook {
    /// What was noted, and where to go on. `folder` is the VM's.
    pub fn open(folder: &Path) -> Self {
        let path = folder.join(FILE);
        let newest = std::fs::read(&path)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let (notes, receiver) = unbounded();
        let work = move || write_all(&path, &receiver);
        let writer = std::thread::Builder::new()
            .name("note-complete".into())
            .spawn(work);
        Self {
            newest,
            // Without the thread nothing is kept over a restart (invariant 2).
            writer: writer.ok().map(|thread| (notes, thread)),
        }
    }

    /// The newest note.
    pub fn newest(&self) -> Option<Note> {
        self.newest
    }

    /// The log says at `at` that these are complete.
    pub fn note(&mut self, at: (u64, u64), set: ReplicaSet, now_ms: u64) {
        // A log that is read again after a restart says nothing new.
        if self.newest.is_some_and(|newest| newest.at >= at) {
            return;
        }
        let same = self.newest.filter(|newest| newest.complete == set.0);
        let note = Note {
            at,
            complete: set.0,
            since_ms: same.map_or(now_ms, |same| same.since_ms),
        };
        self.newest = Some(note);
        if let Some((notes, _)) = &self.writer {
            // A thread that has ended could not write.
            let _ = notes.send(note);
        }
    }

    /// Nothing is written after this.
    pub fn close(&mut self) {
        if let Some((notes, thread)) = self.writer.take() {
            drop(notes);
            // It has printed its panic already.
            let _ = thread.join();
        }
    }
}

impl Drop for Notebook {
    fn drop(&mut self) {
        self.close();
    }
}

#[expect(clippy::disallowed_methods, reason = "nothing is owed between two notes")]
fn write_all(path: &Path, notes: &Receiver<Note>) {
    while let Ok(note) = notes.recv() {
        let newest = notes.try_iter().last().unwrap_or(note);
        if let Err(error) = write(path, &newest) {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

fn write(path: &Path, note: &Note) -> io::Result<()> {
    let new: PathBuf = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(note)?)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_core::units::ReplicaId;

    #[test]
    fn a_note_outlives_the_daemon_and_no_older_one_replaces_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (ReplicaSet::one(ReplicaId(0)), ReplicaSet::one(ReplicaId(1)));
        let mut notebook = Notebook::open(folder.path());
        assert_eq!(notebook.newest(), None);
        notebook.note((3, 70), a.with(ReplicaId(1)), 1000);
        notebook.note((3, 90), a, 2000);
        drop(notebook);
        let mut again = Notebook::open(folder.path());
        let kept = Note {
            at: (3, 90),
            complete: a.0,
            since_ms: 2000,
        };
        assert_eq!(again.newest(), Some(kept));
        again.note((3, 70), b, 9000);
        again.note((3, 90), a, 9000);
        assert_eq!(again.newest(), Some(kept), "the log is read again");
        again.note((4, 91), a, 9000);
        assert_eq!(
            again.newest().map(|note| note.since_ms),
            Some(2000),
            "still the same host"
        );
        again.note((5, 95), b, 9500);
        assert_eq!(again.newest().map(|note| note.since_ms), Some(9500));
    }
}
