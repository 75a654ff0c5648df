//! Errors that are whole sentences: they say what is to be done, and nothing is put before them that blames something else.

use std::{error::Error, fmt, io, path::Path};

#[derive(Debug)]
struct Sentence(String);

impl fmt::Display for Sentence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Error for Sentence {}

/// An error with these words.
pub(super) fn sentence(kind: io::ErrorKind, words: String) -> io::Error {
    io::Error::new(kind, Sentence(words))
}

/// Journals, marks and superblocks are in the state folder, which may be full while the disk has room.
pub(super) fn of_state_folder(file: &Path, error: io::Error) -> io::Error {
    sentence(
        error.kind(),
        format!(
            "the state folder of this host cannot be written ({}: {error}): make room there, or give the host another one \
             ('state' in its host.toml)",
            file.display()
        ),
    )
}

/// `error` behind `blame`, unless it says all by itself.
pub(super) fn behind(blame: &str, error: &io::Error) -> String {
    match error.get_ref() {
        Some(inner) if inner.is::<Sentence>() => error.to_string(),
        _ => format!("{blame}: {error}"),
    }
}
