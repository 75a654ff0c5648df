//! Writes the VM's file on this host when its hosts have moved: a thread of its own, since the VM's loop never waits for a disk.
//!
//! Invariant 1: a file that could not be written is written later; the newest text alone.
//!
//! Not here: what is in it (`config`), when it changes (`hosts`).

use super::shared::FILE;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A file that could not be written is written again after this time.
pub(in crate::vm) const WRITE_AGAIN: Duration = Duration::from_secs(5);

/// Invariant 3: writes a VM's file, beside the loop.
pub struct Keeper {
    pub(in crate::vm) texts: Sender<Arc<str>>,
    pub(in crate::vm) thread: Option<JoinHandle<()>>,
}

impl Keeper {
    pub(in crate::vm) fn start(folder: PathBuf, complain: impl Fn(&str) + Send + 'static) -> Self {
        let (texts, receiver) = unbounded();
        let work = move || write_all(&receiver, &complain, |text| rewrite(&folder, text));
        let thread = std::thread::Builder::new().name("keep-hosts".into()).spawn(work);
        Self {
            texts,
            thread: thread
                .inspect_err(|error| tracing::error!("a thread to write a VM's file: {error}"))
                .ok(),
        }
    }

    pub(in crate::vm) fn write(&self, text: Arc<str>) {
        // Without the thread nothing is written (invariant 3).
        let _ = self.texts.send(text);
    }

    /// Nothing is written after this.
    pub fn close(self) {
        drop(self.texts);
        if let Some(thread) = self.thread {
            // It has printed its panic already.
            let _ = thread.join();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "nothing is owed between two lists")]
pub(in crate::vm) fn write_all(
    texts: &Receiver<Arc<str>>,
    complain: &dyn Fn(&str),
    write: impl Fn(&str) -> io::Result<()>,
) {
    while let Ok(mut text) = texts.recv() {
        let mut told = false;
        while let Err(error) = write(&text) {
            if !std::mem::replace(&mut told, true) {
                complain(&error.to_string());
            }
            match texts.recv_timeout(WRITE_AGAIN) {
                Ok(newer) => text = newer,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Durably, in the old one's place.
pub(in crate::vm) fn rewrite(folder: &Path, text: &str) -> io::Result<()> {
    let path = folder.join(FILE);
    let new = path.with_extension("toml.new");
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_list_that_a_full_disk_refuses_is_told_once_and_the_newest_is_written() {
        let (texts, receiver) = unbounded::<Arc<str>>();
        for text in ["first", "second", "third"] {
            texts.send(text.into()).expect("it is read");
        }
        drop(texts);
        let (complaints, tries) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let written = Mutex::new(Vec::new());
        write_all(
            &receiver,
            &|_| {
                complaints.fetch_add(1, Ordering::Relaxed);
            },
            |text| match tries.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Err(io::ErrorKind::StorageFull.into()),
                _ => {
                    written.lock().expect("the list").push(text.to_owned());
                    Ok(())
                }
            },
        );
        assert_eq!(complaints.into_inner(), 1);
        assert_eq!(written.into_inner().expect("the list"), ["third"]);
    }
}
