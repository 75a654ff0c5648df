//! What is known of an image: how new it is, and whether it is whole. A file beside it, which outlives the program and its daemon.
//!
//! Decides:    nothing.
//! Flow:       a copy begins, the group agrees that it is complete, a copy of a running program comes -> `Mark::write`; a start -> `read`.
//! Invariants: 1. a mark is the old one or the new one, whatever happens to the host; 2. an image is torn from before its first block is
//!             overwritten by another host's until all of them are on its disk.
//! Source:     rename(2), fsync(2). Not here: whose image counts (`node`).

use super::{Data, failed};
use crate::guard::GuardError;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};

/// How new an image is, and whether it is one at all. Ordered by age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mark {
    /// How often the program was begun from such an image: a later life is newer, whatever its log says.
    pub run: u64,
    /// The newest entry of that life's log by which this host was known to be complete.
    pub index: u64,
    /// It is half of one image and half of another.
    pub torn: bool,
}

impl Data {
    /// What is known of the image here. None: there is no image. One without a mark is older than any with one.
    ///
    /// # Errors
    /// Those of the files; a mark that nobody understands.
    pub fn mark(&self) -> Result<Option<Mark>, GuardError> {
        // A disk that does not answer, or a folder that nobody may look into, is another thing than no image.
        match fs::metadata(&self.image) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&self.image)(error)),
        }
        let path = self.beside("mark");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(failed(&path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(Mark::default())),
            Err(error) => Err(failed(&path)(error)),
        }
    }

    /// Replaces it; it is on disk afterwards.
    ///
    /// # Errors
    /// Those of the files.
    pub fn set_mark(&self, mark: Mark) -> Result<(), GuardError> {
        let (path, new) = (self.beside("mark"), self.beside("mark.new"));
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec(&mark)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(failed(&path))?;
        self.sync_folder()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_there_as_it_was_set_and_an_image_without_one_is_older_than_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let data = Data {
            image: folder.path().join("sessions.img"),
            at: "/var/lib/redis".into(),
            mib: 8,
        };
        assert_eq!(data.mark().expect("no image"), None);
        fs::write(&data.image, []).expect("written");
        assert_eq!(data.mark().expect("no mark"), Some(Mark::default()));
        let mark = Mark {
            run: 3,
            index: 70,
            torn: false,
        };
        data.set_mark(mark).expect("written");
        assert_eq!(data.mark().expect("a mark"), Some(mark));
        assert!(mark > Mark::default());
        assert!(
            Mark {
                run: 4,
                index: 0,
                torn: false
            } > mark,
            "a later life"
        );
        data.set_mark(Mark { torn: true, ..mark }).expect("written");
        assert!(data.mark().expect("a mark").is_some_and(|mark| mark.torn));
        fs::write(folder.path().join("sessions.img.mark"), "half a").expect("written");
        assert!(data.mark().is_err());
        let unseen = Data {
            image: data.image.join("sessions.img"),
            ..data
        };
        assert!(unseen.mark().is_err(), "whether it is there is not known");
    }
}
