//! A program's data: its image begins with a copy, and comes with the copy of a running program.
//!
//! * **Decides:** how often an image that is written to is sent ahead; when its mark changes.
//! * **Flow:** a start -> `open`; a join -> the backup's hashes -> `send_ahead` and `receive_ahead`, while the program runs -> it stands still,
//!   `save` -> with the rest of the join -> `load`; an agreed `Complete` -> `Notes::note`.
//! * **Invariants:** 1. an image is marked as torn before it is made for another host's or overwritten, and as whole when the group has agreed
//!   that its copy is complete; 2. (memory) a message holds 1 MiB; 3. what is read of an image while its program stands still has a bound; 4. a note
//!   that was made before an image was overwritten says nothing of it afterwards; 5. where a program has lived no empty image is made for it to
//!   begin from.
//! * **Source:** pre-copy, as in live migration (NSDI'05). **Not here:** images themselves (`dunlin_program::data`); whose image counts
//!   (`images`).

use crate::config::ProgramSpec;
use crate::vm::program::error::DataError;
use crate::vm::program::hearing::{heard, unexpected};
use crate::vm::session::link::Ends;
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, unbounded};
use dunlin_core::units::{Epoch, Index};
use dunlin_core::wire::sync::SyncMessage;
use dunlin_program::data::blocks::{BLOCK_BYTES, PART_BLOCKS, Source, Target, hashes_from};
use dunlin_program::data::mark::Mark;
use dunlin_program::data::{Data, Image};
use dunlin_program::guard::GuardError;
use dunlin_program::options::{self, CheckError};
use parking_lot::Mutex;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A block's number and its bytes.
const RECORD_BYTES: usize = size_of::<u64>() + BLOCK_BYTES;
/// Of one message.
const RECORDS: usize = 16;
/// What is left is read while the program stands still: so much is little.
const LITTLE_BYTES: u64 = 16 << 20;
/// A program that writes faster than this host sends is never through.
const PASSES: usize = 6;

/// What is written at the last moment lies for a while on both hosts' disks.
pub(super) const MOST_LEFT_BYTES: u64 = 256 << 20;

/// Where it lies.
const LEFT: &str = "data.blocks";
/// The program stands still, and its clients wait.
const AT_REST: Duration = Duration::from_secs(60);
/// The other host writes what was sent ahead to its disk.
const ON_DISK_WITHIN: Duration = Duration::from_secs(60);
/// The next piece of an image, which is read while others wait for the same disk.
pub(super) const PIECE_WITHIN: Duration = Duration::from_secs(130);

/// The image for a copy that begins, marked as a newer life than all before. `may_be_made`: the program never lived.
pub(super) fn open(program: &ProgramSpec, marks: &Marks, may_be_made: bool) -> Result<Image, DataError> {
    marks.may_begin(may_be_made)?;
    let image = marks.data.open(owner(program)?).map_err(DataError::Image)?;
    marks.change(|mark| {
        Some(Mark {
            run: mark.run + 1,
            index: 0,
            torn: false,
        })
    })?;
    Ok(image)
}

fn owner(program: &ProgramSpec) -> Result<Option<(u32, u32)>, CheckError> {
    program.user.as_deref().map(options::user).transpose()
}

// The primary's side.

/// The other host has made room: the hashes of its image, if the program has one here.
pub(super) fn hear_room(
    link: &Ends,
    source: Option<&Source>,
    within: Duration,
) -> Result<Vec<u128>, DataError> {
    let blocks = source.map_or(Ok(0), Source::blocks).map_err(DataError::Image)?;
    let mut known = Vec::new();
    loop {
        match heard(link, within)? {
            SyncMessage::Hashes { hashes, .. } if known.len() + hashes.len() <= blocks => {
                known.extend(hashes);
            }
            SyncMessage::JoinReady if known.len() == blocks => return Ok(known),
            SyncMessage::Hashes { .. } | SyncMessage::JoinReady => {
                return Err(DataError::AnotherSize);
            }
            other => return Err(unexpected(&other).into()),
        }
    }
}

/// Sends what differs while the program runs, again and again, until little is left; the other host then has it on its disk.
pub(super) fn send_ahead(link: &Ends, source: &Source, known: &mut [u128]) -> Result<(), DataError> {
    for _ in 0..PASSES {
        source.sync().map_err(DataError::Image)?;
        let mut message = Vec::with_capacity(RECORDS * RECORD_BYTES);
        let (mut sent, mut first) = (0, 0);
        for part in known.chunks_mut(PART_BLOCKS) {
            let differing = source.differing_from(first, part, &mut |number, bytes| {
                put(&mut message, number, bytes);
                if message.len() < RECORDS * RECORD_BYTES {
                    return Ok(());
                }
                send(link, std::mem::take(&mut message))
            });
            sent += differing.map_err(DataError::Image)?;
            first += part.len();
            // An empty one as well: the other host hears that this one is at work.
            send(link, std::mem::take(&mut message)).map_err(DataError::Image)?;
        }
        if sent <= LITTLE_BYTES {
            break;
        }
    }
    let last = SyncMessage::JoinLast { epoch: Epoch(0) };
    link.writer.send(&last)?;
    match heard(link, ON_DISK_WITHIN)? {
        SyncMessage::JoinReady => Ok(()),
        other => Err(unexpected(&other).into()),
    }
}

/// Puts the rest beside the images of a program that stands still, which then is its data at this moment.
pub(super) fn save(source: &Source, known: &mut [u128], folder: &Path) -> Result<(), DataError> {
    let failed = |error: io::Error| GuardError::of(LEFT, &error);
    let file = File::create(folder.join(LEFT)).map_err(|error| DataError::Image(failed(error)))?;
    let mut file = BufWriter::new(file);
    let (mut left, mut record) = (MOST_LEFT_BYTES, Vec::with_capacity(RECORD_BYTES));
    let saved = source.at_rest(known, AT_REST, &mut |number, bytes| {
        left = left
            .checked_sub(BLOCK_BYTES as u64)
            .ok_or_else(|| GuardError::of("the image", &"it is written to faster than it can be copied"))?;
        record.clear();
        put(&mut record, number, bytes);
        file.write_all(&record).map_err(failed)
    });
    saved
        .and_then(|_| file.flush().map_err(failed))
        .map_err(DataError::Image)
}

fn put(message: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(bytes);
}

fn send(link: &Ends, message: Vec<u8>) -> Result<(), GuardError> {
    let message = SyncMessage::DeviceState {
        epoch: Epoch(0),
        part: Bytes::from(message),
    };
    let sent = link.writer.send(&message);
    sent.map_err(|error| GuardError::of("the image's way", &error))
}

// The backup's side.

/// The image of a host that gets a copy.
pub(super) struct Receiving {
    target: Target,
    marks: Marks,
}

/// Says what this host has, and takes what differs. Afterwards the primary may stop its program.
pub(super) fn receive_ahead(
    link: &Ends,
    program: &ProgramSpec,
    marks: &Marks,
) -> Result<Receiving, DataError> {
    let image = marks.open_for_another(owner(program)?)?;
    // As they come: to look at a large image takes longer than who waits is patient.
    let mut first = 0;
    loop {
        let hashes = hashes_from(&image, first).map_err(DataError::Image)?;
        if hashes.is_empty() {
            break;
        }
        first += hashes.len();
        link.writer.send(&SyncMessage::Hashes {
            epoch: Epoch(0),
            hashes,
        })?;
    }
    let target = Target::new(image).map_err(DataError::Image)?;
    // Invariant 1.
    marks.change(|mark| Some(Mark { torn: true, ..mark }))?;
    let ready = || link.writer.send(&SyncMessage::JoinReady);
    ready()?;
    loop {
        match heard(link, PIECE_WITHIN)? {
            SyncMessage::DeviceState { part, .. } => {
                if part.len() % RECORD_BYTES != 0 {
                    return Err(DataError::HalfBlock);
                }
                part.chunks(RECORD_BYTES)
                    .try_for_each(|record| take(&target, record))?;
            }
            SyncMessage::JoinLast { .. } => break,
            other => return Err(unexpected(&other).into()),
        }
    }
    target.sync().map_err(DataError::Image)?;
    ready()?;
    Ok(Receiving {
        target,
        marks: marks.clone(),
    })
}

impl Receiving {
    /// Takes the rest, which has come beside the images. The image is then the primary's, but it does not count before the group agrees.
    pub(super) fn load(self, folder: &Path, run: u64) -> Result<Image, DataError> {
        let mut file = BufReader::new(File::open(folder.join(LEFT)).map_err(DataError::Left)?);
        let mut record = vec![0; RECORD_BYTES];
        loop {
            match file.read_exact(&mut record) {
                Ok(()) => take(&self.target, &record)?,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(DataError::Left(error)),
            }
        }
        self.target.sync().map_err(DataError::Image)?;
        self.marks.change(|_| {
            Some(Mark {
                run,
                index: 0,
                torn: true,
            })
        })?;
        Ok(self.target.end())
    }
}

fn take(target: &Target, record: &[u8]) -> Result<(), DataError> {
    let (number, bytes) = record.split_at(size_of::<u64>());
    let number = number
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte));
    target.write(number, bytes).map_err(DataError::Image)
}

// What is known of the image here.

/// The mark of the image here, which several threads change.
#[derive(Clone)]
pub(super) struct Marks {
    data: Data,
    alone: Arc<Mutex<()>>,
    /// How often another host's image has come over the one here (invariant 4).
    images: Arc<AtomicU64>,
}

impl Marks {
    /// Of a program that has data.
    pub(super) fn of(program: &ProgramSpec) -> Option<Self> {
        Some(Self {
            data: program.data.clone()?,
            alone: Arc::default(),
            images: Arc::default(),
        })
    }

    /// What was noted so far is of another image than the one that comes now.
    pub(super) fn another_image(&self) {
        self.images.fetch_add(1, Ordering::Relaxed);
    }

    /// What it says; none where there is no image.
    pub(super) fn read(&self) -> Result<Option<Mark>, DataError> {
        self.data.mark().map_err(DataError::Image)
    }

    /// Whether a copy may begin with the image here; one that is not there is made where that may be.
    fn may_begin(&self, may_be_made: bool) -> Result<(), DataError> {
        match self.read()? {
            Some(mark) if mark.torn => Err(DataError::Torn(self.data.image.clone())),
            None if !may_be_made => Err(self.gone()),
            _ => Ok(()),
        }
    }

    /// The program has lived with the image, and it is not there.
    pub(super) fn gone(&self) -> DataError {
        DataError::Gone(self.data.image.clone())
    }

    /// The image that another host's is to come over. One that is not here is made, empty: the mark of one that somebody has taken away is not its own.
    fn open_for_another(&self, owner: Option<(u32, u32)>) -> Result<Image, DataError> {
        if self.read()?.is_none() {
            self.change(|mark| Some(Mark { torn: true, ..mark }))?;
        }
        self.data.open(owner).map_err(DataError::Image)
    }

    fn change(&self, change: impl FnOnce(Mark) -> Option<Mark>) -> Result<(), DataError> {
        let _alone = self.alone.lock();
        let mark = self.data.mark().map_err(DataError::Image)?.unwrap_or_default();
        change(mark).map_or(Ok(()), |mark| self.data.set_mark(mark).map_err(DataError::Image))
    }

    /// The copy whose image this is is complete by this entry.
    fn is_complete(&self, index: u64, image: u64) -> Result<(), DataError> {
        self.change(|mark| {
            let is_of_it = self.images.load(Ordering::Relaxed) == image;
            is_of_it.then_some(Mark {
                index: mark.index.max(index),
                torn: false,
                ..mark
            })
        })
    }
}

/// An entry, and which image was here when it was noted.
type Note = (u64, u64);

/// Writes marks in a thread of its own: the program's loop never waits for the disk.
pub(super) struct Notes {
    marks: Marks,
    writer: Option<(Sender<Note>, JoinHandle<()>)>,
}

impl Notes {
    /// Begins.
    ///
    /// # Errors
    /// Where there is no thread to be had.
    pub(super) fn begin(marks: Marks) -> Result<Self, DataError> {
        let (sender, notes) = unbounded();
        let its = marks.clone();
        let writer = std::thread::Builder::new()
            .name("program-marks".into())
            .spawn(move || write_all(&its, &notes))
            .map_err(DataError::Thread)?;
        Ok(Self {
            marks,
            writer: Some((sender, writer)),
        })
    }

    /// The copy here is complete by this entry.
    pub(super) fn note(&self, index: Index) {
        if let Some((notes, _)) = &self.writer {
            // A thread that has ended could not write.
            let _ = notes.send((index.0, self.marks.images.load(Ordering::Relaxed)));
        }
    }

    pub(super) fn marks(&self) -> &Marks {
        &self.marks
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        if let Some((notes, thread)) = self.writer.take() {
            drop(notes);
            // It has printed its panic already.
            let _ = thread.join();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "nothing is owed between two notes")]
fn write_all(marks: &Marks, notes: &Receiver<Note>) {
    while let Ok(note) = notes.recv() {
        let (index, image) = notes.try_iter().last().unwrap_or(note);
        if let Err(error) = marks.is_complete(index, image) {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(folder: &Path) -> Marks {
        Marks {
            data: Data {
                image: folder.join("sessions.img"),
                at: "/var/lib/redis".into(),
                mib: 8,
            },
            alone: Arc::default(),
            images: Arc::default(),
        }
    }

    #[test]
    fn what_a_program_has_lived_with_is_not_made_anew_and_half_of_an_image_is_not_begun_from() {
        let folder = tempfile::tempdir().expect("a folder");
        let marks = marks(folder.path());
        assert!(marks.may_begin(true).is_ok(), "it never lived");
        assert!(
            matches!(marks.may_begin(false), Err(DataError::Gone(_))),
            "its disk is not mounted"
        );
        std::fs::write(&marks.data.image, []).expect("written");
        assert!(marks.may_begin(false).is_ok());
        let torn = Mark {
            torn: true,
            ..Mark::default()
        };
        marks.change(|_| Some(torn)).expect("written");
        assert!(matches!(marks.may_begin(true), Err(DataError::Torn(_))));
    }

    #[test]
    fn an_image_that_is_made_for_another_hosts_does_not_count_as_the_one_that_was_here() {
        let folder = tempfile::tempdir().expect("a folder");
        let marks = marks(folder.path());
        let was_here = Mark {
            run: 5,
            index: 900,
            torn: false,
        };
        marks.change(|_| Some(was_here)).expect("written");
        let Ok(made) = marks.open_for_another(None) else {
            assert_eq!(marks.read().expect("none"), None, "mkfs.ext4 is not here");
            return;
        };
        let mark = marks.read().expect("a mark").expect("an image");
        assert!(mark.torn && mark.run == 0, "{mark:?}");
        drop(made);
        // One that is here counts until the other one comes.
        marks.change(|_| Some(was_here)).expect("written");
        marks.open_for_another(None).expect("it is free");
        assert_eq!(marks.read().expect("a mark"), Some(was_here));
    }

    #[test]
    fn an_image_counts_when_its_copy_is_complete_and_no_note_of_the_one_before_makes_it_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let marks = marks(folder.path());
        std::fs::write(&marks.data.image, []).expect("written");
        let whole = |run, index| Mark {
            run,
            index,
            torn: false,
        };
        marks.change(|_| Some(whole(3, 0))).expect("written");
        let notes = Notes::begin(marks.clone()).expect("a thread");
        notes.note(Index(70));
        drop(notes);
        assert_eq!(marks.read().expect("a mark"), Some(whole(3, 70)));
        // Another host's comes.
        let before = marks.images.load(Ordering::Relaxed);
        marks.another_image();
        let torn = Mark {
            run: 4,
            index: 0,
            torn: true,
        };
        marks.change(|_| Some(torn)).expect("written");
        marks.is_complete(80, before).expect("written");
        assert_eq!(
            marks.read().expect("a mark"),
            Some(torn),
            "that was the one before"
        );
        let notes = Notes::begin(marks.clone()).expect("a thread");
        notes.note(Index(90));
        drop(notes);
        assert_eq!(marks.read().expect("a mark"), Some(whole(4, 90)));
    }
}
