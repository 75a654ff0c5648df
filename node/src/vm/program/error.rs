//! Why a bare program's copy is not there, or not brought: one type for each thing that is done with it.

use crate::vm::session::Broken;
use dunlin_program::copy::CopyError;
use dunlin_program::guard::GuardError;
use dunlin_program::limits::LimitsError;
use dunlin_program::options::CheckError;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A file or a folder of the program's here cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}", .path.display())]
pub struct FileError {
    pub(in crate::vm) path: PathBuf,
    #[source]
    pub(in crate::vm) error: io::Error,
}

impl FileError {
    /// Of the one at `path`.
    pub(in crate::vm) fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self { path, error }
    }
}

/// Why there are no namespaces for a copy.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The program's data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Whom the program is to run as.
    #[error(transparent)]
    User(#[from] CheckError),
    /// This host does not keep it within them.
    #[error("the program's limits: {0}")]
    Limits(#[from] LimitsError),
    /// The file for what it prints.
    #[error(transparent)]
    Printed(#[from] FileError),
    /// The namespaces themselves.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

/// Why nothing can be run beside a copy.
#[derive(Debug, thiserror::Error)]
pub enum VisitError {
    /// There is none here.
    #[error("no copy of program '{name}' runs on host '{host}'{hint}")]
    NoCopy {
        /// Of this program.
        name: String,
        /// This host.
        host: String,
        /// Where there is one, if that is known.
        hint: String,
    },
    /// It may be ending.
    #[error("the namespaces of '{name}': {error}")]
    Rooms {
        /// The program.
        name: String,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// Whom the program runs as.
    #[error(transparent)]
    User(#[from] CheckError),
}

/// Why a program's data are not here, or do not come or go.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// Its image, or the image's mark.
    #[error("its data: {0}")]
    Image(#[source] GuardError),
    /// Nothing begins from that.
    #[error("its data: {} is half of an image: a copy of the running program was on its way here", .0.display())]
    Torn(PathBuf),
    /// Nothing is made in its place.
    #[error(
        "its data: {} is not there, and the program has lived with it: mount what it is on, or bring it back. If it is lost, 'dunlin down' and \
         'dunlin up' begin the program from the other host's image, or with nothing",
        .0.display()
    )]
    Gone(PathBuf),
    /// Whose the image is to be.
    #[error(transparent)]
    Owner(#[from] CheckError),
    /// The two hosts' images are no two of one program.
    #[error("its data: the other host's image is of another size")]
    AnotherSize,
    /// No number of whole blocks.
    #[error("its data: half of a block came")]
    HalfBlock,
    /// Nothing usable came from the other host.
    #[error(transparent)]
    Heard(#[from] HeardError),
    /// The other host does not take it.
    #[error(transparent)]
    Unsent(#[from] Broken),
    /// What was written at the last moment.
    #[error("data.blocks: {0}")]
    Left(#[source] io::Error),
    /// Marks would be written in it.
    #[error("a thread for its data's marks: {0}")]
    Thread(#[source] io::Error),
}

/// Why nothing usable came from the other host.
#[derive(Debug, thiserror::Error)]
pub enum HeardError {
    /// It goes no further: its own words.
    #[error("{0}")]
    Refused(String),
    /// Its stream broke.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// It did not say anything in that time.
    #[error("the other host says nothing for {} s", .0.as_secs())]
    Silent(Duration),
    /// Nobody reads its stream any more.
    #[error("the stream to the other host has ended")]
    Ended,
    /// A message of that name.
    #[error("the other host says {0} where that has no place")]
    Unexpected(&'static str),
}

/// Why a running program was not carried to another host.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// It could not be copied here, or not be restored.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// Its data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing usable came from the other host.
    #[error(transparent)]
    Heard(#[from] HeardError),
    /// The other host does not take it.
    #[error(transparent)]
    Unsent(#[from] Broken),
    /// By the loop.
    #[error("it was given up")]
    GivenUp,
    /// Meanwhile.
    #[error("the copy has ended")]
    Ended,
    /// What a copy needs besides its images.
    #[error(transparent)]
    About(serde_json::Error),
    /// The same, as it came.
    #[error("about.json: {0}")]
    NotAbout(#[source] serde_json::Error),
    /// One of the files that are carried.
    #[error("{name}: {error}")]
    File {
        /// Which.
        name: &'static str,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// The folder that it is carried in.
    #[error(transparent)]
    Folder(#[from] FileError),
    /// Invariant 4.
    #[error("it is larger than this host's disk has room for")]
    TooLarge,
    /// Its namespaces here.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The copy that is to take it.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// It cannot be set here.
    #[error("the program's clock: {0}")]
    Clock(#[source] io::Error),
    /// Its threads would be answered in it.
    #[error("a thread for its chance: {0}")]
    Chance(#[source] io::Error),
}
