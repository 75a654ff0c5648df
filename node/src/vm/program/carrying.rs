//! The threads that carry a running program from one host to the other.
//!
//! * **Decides:** nothing: each does one thing after the other, and tells its loop.
//! * **Flow:** `Join` -> the other host makes room, `JoinReady` -> the program is dumped and stands still -> the loop draws a line ->
//!   what it has written to files; it runs on -> all of that as `DeviceState`, the connections as `State` -> the other host restores
//!   it, and its loop says `Loaded`.
//! * **Invariants:** 1. whatever happens here, a program that was dumped runs on, or its copy is given up; 2. every wait is bounded; 3. the
//!   folder that it is carried in is gone afterwards; 4. it leaves the disk, which has all logs, room: on both hosts.
//! * **Source:** `dunlin_program::guard`. **Not here:** when (`joining`), what the new copy is for (`joined`).

use super::copies::{self, FileError, PrepareError};
use super::data::{self, DataError, Marks};
use crate::config::ProgramSpec;
use crate::vm::event::{LoopEvent, LoopSender};
use crate::vm::session::Broken;
use crate::vm::session::link::Ends;
use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use dunlin_core::agreed::AgreedTime;
use dunlin_core::policy::Mode;
use dunlin_core::sync::compare::Compare;
use dunlin_core::units::{Epoch, Index, Term};
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_program::answers::Answers;
use dunlin_program::chance::{Drawn, Seed};
use dunlin_program::copy::{Copy, CopyError};
use dunlin_program::data::Image;
use dunlin_program::guard::{self, Criu, GuardError, Place, Unpacking};
use dunlin_program::message::Adopted;
use dunlin_program::source::Source;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The other host makes namespaces: milliseconds, or as long as a busy host gets.
const ROOM_WITHIN: Duration = Duration::from_secs(30);
/// The loop's word, which waits for the last inputs to be read.
const WORD_WITHIN: Duration = Duration::from_secs(10);
/// The next part, while the other host dumps.
const PART_WITHIN: Duration = Duration::from_secs(130);
/// A restore, and the first turn of the loop after it.
const LOADED_WITHIN: Duration = Duration::from_secs(130);
/// In which its size is told.
const PAGE_BYTES: u64 = 4096;
/// What a copy needs besides its images.
const ABOUT: &str = "about.json";
/// Where its inputs stand.
const ORDER: &str = "order";

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

/// The loop's words.
pub(super) enum Word {
    /// The last input was read, and no more will come.
    Dump,
    /// All that the program has said is known.
    LineDrawn {
        /// The epoch that ends.
        epoch: Epoch,
        /// The newest entry whose inputs it has read.
        applied: Index,
        /// The connections that do not speak its own numbers.
        connections: Bytes,
        /// The order's own table.
        order: Bytes,
        /// What time it is for the program.
        time: AgreedTime,
        /// What it draws its chance from, and how far it has, where that is agreed.
        chance: Option<(Seed, Drawn)>,
    },
}

/// How far it is.
#[derive(Debug)]
pub enum JoinStep {
    /// The other host has made room.
    RoomIsMade,
    /// The program is dumped, and stands still.
    Stands,
    /// It runs on.
    RunsOn,
    /// The copy runs on the other host.
    Loaded {
        /// How much was sent.
        bytes: u64,
    },
    /// The program was stopped, and cannot be let run.
    StandsStill(String),
    /// It cannot be.
    Failed(String),
}

/// What lies beside the images.
#[derive(Serialize, Deserialize)]
struct About {
    applied: u64,
    prints_to: Option<String>,
    /// The life of its data's image.
    run: Option<u64>,
    monotonic_ns: u64,
    wall_ns: u64,
    chance: Option<(Seed, Drawn)>,
    adopted: Adopted,
}

/// A copy that was brought here, and runs.
pub struct Brought {
    /// It.
    pub copy: Copy,
    /// The newest entry whose inputs it has read.
    pub applied: Index,
    /// The epoch that it ended.
    pub epoch: Epoch,
    /// The connections that do not speak its own numbers.
    pub connections: Bytes,
    /// The order's own table.
    pub order: Bytes,
    /// What time it is for it.
    pub time: AgreedTime,
    /// What answers its threads, where its chance is agreed.
    pub answers: Option<(Answers, Arc<Source>)>,
    /// How long the restore took.
    pub took: Duration,
}

/// The primary's.
pub(super) struct Carrier {
    pub(super) session: u64,
    pub(super) link: Ends,
    pub(super) words: Receiver<Word>,
    pub(super) to_loop: LoopSender,
    pub(super) place: Place,
    pub(super) folder: PathBuf,
    pub(super) term: Term,
    /// Of its data's image.
    pub(super) marks: Option<Marks>,
    /// Held while it is at work.
    pub(super) _busy: Arc<()>,
}

impl Carrier {
    pub(super) fn run(self) {
        let result = self.carry();
        // Invariant 3. What cannot be removed now is removed before the next one.
        let _ = fs::remove_dir_all(&self.folder);
        if let Err(why) = &result {
            // The other host may be gone.
            let why = why.to_string();
            let _ = self.send(&SyncMessage::Refused { why });
        }
        self.tell(match result {
            Ok(bytes) => JoinStep::Loaded { bytes },
            Err(why) => JoinStep::Failed(why.to_string()),
        });
    }

    fn tell(&self, step: JoinStep) {
        let session = self.session;
        self.to_loop.send(LoopEvent::ProgramJoin { session, step });
    }

    fn carry(&self) -> Result<u64, CarryError> {
        let criu = Criu::find()?;
        empty(&self.folder)?;
        let bytes = self.fits()?;
        let source = self.place.data();
        let join = SyncMessage::Join {
            term: self.term,
            // Rounded up: what does not fit into the number fits on no disk.
            pages: u32::try_from(bytes / PAGE_BYTES + 1).unwrap_or(u32::MAX),
            active: true,
            compare: Compare::List,
        };
        self.send(&join)?;
        let mut known = data::hear_room(&self.link, source, ROOM_WITHIN)?;
        if let Some(source) = source {
            data::send_ahead(&self.link, source, &mut known)?;
        }
        self.tell(JoinStep::RoomIsMade);
        match self.words.recv_timeout(WORD_WITHIN) {
            Ok(Word::Dump) => {}
            _ => return Err(CarryError::GivenUp),
        }
        // It may have grown meanwhile.
        self.fits()?;
        let taken = self.take(&criu, &mut known);
        // Invariant 1.
        let resumed = guard::resume(&self.place, &mut |why| {
            tracing::warn!("a program that stands still after a dump: {why}; it is tried again");
        });
        let last_pid = match resumed {
            Ok(Some(last_pid)) => last_pid,
            Ok(None) => return Err(CarryError::Ended),
            Err(error) => {
                self.tell(JoinStep::StandsStill(error.to_string()));
                return Err(error.into());
            }
        };
        let (about, epoch, connections, order) = taken?;
        self.tell(JoinStep::RunsOn);
        let about = About {
            adopted: Adopted {
                last_pid,
                ..about.adopted
            },
            ..about
        };
        let about = serde_json::to_vec(&about).map_err(CarryError::About)?;
        write(&self.folder, ABOUT, &about)?;
        write(&self.folder, ORDER, &order)?;
        let sent = self.send_folder(epoch)?;
        self.send(&SyncMessage::State {
            epoch,
            next: Mode::Match,
            connections,
            device_state: Bytes::new(),
        })?;
        match heard(&self.link, LOADED_WITHIN)? {
            SyncMessage::Loaded { epoch: loaded, .. } if loaded == epoch => Ok(sent),
            other => Err(unexpected(&other).into()),
        }
    }

    /// What a copy takes on this host's disk, where it has room for that.
    fn fits(&self) -> Result<u64, CarryError> {
        let left = self.place.data().map_or(0, |_| data::MOST_LEFT_BYTES);
        let bytes = self.place.bytes()? + left;
        guard::room_for(&self.folder, bytes)?;
        Ok(bytes)
    }

    /// All that is taken while the program stands still.
    fn take(&self, criu: &Criu, known: &mut [u128]) -> Result<(About, Epoch, Bytes, Bytes), CarryError> {
        criu.dump(&self.place, &self.folder)?;
        self.tell(JoinStep::Stands);
        let Ok(Word::LineDrawn {
            epoch,
            applied,
            connections,
            order,
            time,
            chance,
        }) = self.words.recv_timeout(WORD_WITHIN)
        else {
            return Err(CarryError::GivenUp);
        };
        guard::save_written(&self.place, &self.folder)?;
        if let Some(source) = self.place.data() {
            data::save(source, known, &self.folder)?;
        }
        let neighbours = guard::neighbours(&self.place)?;
        let about = About {
            applied: applied.0,
            prints_to: self.place.prints_to().map(str::to_owned),
            run: self
                .marks
                .as_ref()
                .map_or(Ok(None), Marks::read)?
                .map(|mark| mark.run),
            monotonic_ns: time.monotonic_ns,
            wall_ns: time.wall_ns,
            chance,
            adopted: Adopted {
                neighbours,
                last_pid: 0,
            },
        };
        Ok((about, epoch, connections, order))
    }

    fn send_folder(&self, epoch: Epoch) -> Result<u64, CarryError> {
        let mut packing = guard::pack(&self.folder)?;
        let mut sent = 0;
        loop {
            let part = packing.piece(parts::PART_BYTES)?;
            if part.is_empty() {
                return Ok(sent);
            }
            sent += part.len() as u64;
            let part = Bytes::from(part);
            self.send(&SyncMessage::DeviceState { epoch, part })?;
        }
    }

    fn send(&self, message: &SyncMessage) -> Result<(), Broken> {
        self.link.writer.send(message)
    }
}

/// The other host's.
pub(super) struct Fetcher {
    pub(super) session: u64,
    pub(super) link: Ends,
    pub(super) to_loop: LoopSender,
    pub(super) folder: PathBuf,
    pub(super) program: ProgramSpec,
    /// What its copy prints goes there.
    pub(super) printed: PathBuf,
    /// Of its data's image.
    pub(super) marks: Option<Marks>,
    /// Ends when the copy is not needed any more: its processes die with this thread.
    pub(super) kept: Receiver<()>,
    pub(super) busy: Arc<()>,
}

impl Fetcher {
    pub(super) fn run(self) {
        let result = self.fetch();
        let Self {
            session,
            link,
            to_loop,
            folder,
            kept,
            busy,
            ..
        } = self;
        // Invariant 3.
        let _ = fs::remove_dir_all(&folder);
        if let Err(why) = &result {
            let refused = SyncMessage::Refused { why: why.to_string() };
            // The primary may be gone.
            let _ = link.writer.send(&refused);
        }
        to_loop.send(LoopEvent::ProgramBrought {
            session,
            result: result.map(Box::new),
        });
        drop((busy, link));
        kept.iter().for_each(drop);
    }
}

impl Fetcher {
    fn fetch(&self) -> Result<Brought, CarryError> {
        let (link, folder) = (&self.link, self.folder.as_path());
        let bytes = match heard(link, WORD_WITHIN)? {
            SyncMessage::Join { pages, .. } => u64::from(pages) * PAGE_BYTES,
            other => return Err(unexpected(&other).into()),
        };
        let criu = Criu::find()?;
        // A copy with data begins with all of them.
        let copy = match self.marks {
            Some(_) => None,
            None => Some(self.room(None)?),
        };
        empty(folder)?;
        let room = guard::room_for(folder, bytes)?;
        let receiving = match &self.marks {
            Some(marks) => Some(data::receive_ahead(link, &self.program, marks)?),
            None => {
                link.writer.send(&SyncMessage::JoinReady)?;
                None
            }
        };
        let (epoch, connections) = self.receive(room)?;
        let begun = Instant::now();
        let read = |name: &'static str| {
            let read = fs::read(folder.join(name));
            read.map_err(|error| CarryError::File { name, error })
        };
        let about: About = serde_json::from_slice(&read(ABOUT)?).map_err(CarryError::NotAbout)?;
        let order = Bytes::from(read(ORDER)?);
        let image = receiving.map(|receiving| receiving.load(folder, about.run.unwrap_or(0)));
        let mut copy = match copy {
            Some(copy) => copy,
            None => self.room(image.transpose()?)?,
        };
        let place = Place::of(&copy)?;
        guard::load_written(&place, folder)?;
        criu.restore(&place, folder, about.prints_to.as_deref())?;
        let time = AgreedTime {
            monotonic_ns: about.monotonic_ns,
            wall_ns: about.wall_ns,
        };
        if let Some(page) = copy.clock() {
            page.set(time).map_err(CarryError::Clock)?;
            guard::lead_clocks(&place, copy.leads())?;
        }
        let source = about.chance.and_then(|(seed, drawn)| copy.draws(seed, &drawn));
        let answers = source.map(|source| {
            let source = Arc::new(source);
            let listeners = guard::listen(&place)?;
            let answers = Answers::of_a_service(listeners, Arc::clone(&source));
            let answers = answers.map_err(CarryError::Chance)?;
            Ok::<_, CarryError>((answers, source))
        });
        let answers = answers.transpose()?;
        copy.adopt(about.adopted)?;
        Ok(Brought {
            copy,
            applied: Index(about.applied),
            epoch,
            connections,
            order,
            time,
            answers,
            took: begun.elapsed(),
        })
    }

    /// The namespaces for it, with nothing in them.
    fn room(&self, image: Option<Image>) -> Result<Copy, CarryError> {
        let copy = copies::prepare(
            &self.program,
            [0; 32],
            copies::printed(&self.printed, false),
            image,
        )?;
        copy.vacate()?;
        Ok(copy)
    }

    /// What is carried, into the folder, which has so much room.
    fn receive(&self, mut room: u64) -> Result<(Epoch, Bytes), CarryError> {
        let mut unpacking = Unpacking::into(&self.folder)?;
        loop {
            match heard(&self.link, PART_WITHIN)? {
                SyncMessage::DeviceState { part, .. } => {
                    room = room.checked_sub(part.len() as u64).ok_or(CarryError::TooLarge)?;
                    unpacking.piece(&part)?;
                }
                SyncMessage::State {
                    epoch, connections, ..
                } => {
                    unpacking.end()?;
                    return Ok((epoch, connections));
                }
                other => return Err(unexpected(&other).into()),
            }
        }
    }
}

pub(super) fn heard(link: &Ends, within: Duration) -> Result<SyncMessage, HeardError> {
    match link.incoming.recv_timeout(within) {
        Ok(Ok(SyncMessage::Refused { why })) => Err(HeardError::Refused(why)),
        Ok(Ok(message)) => Ok(message),
        Ok(Err(error)) => Err(error.into()),
        Err(RecvTimeoutError::Timeout) => Err(HeardError::Silent(within)),
        Err(RecvTimeoutError::Disconnected) => Err(HeardError::Ended),
    }
}

pub(super) fn unexpected(message: &SyncMessage) -> HeardError {
    HeardError::Unexpected(message.name())
}

/// What an earlier one has left goes.
fn empty(folder: &Path) -> Result<(), FileError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileError::of(folder)(error)),
        _ => fs::create_dir_all(folder).map_err(FileError::of(folder)),
    }
}

fn write(folder: &Path, name: &'static str, bytes: &[u8]) -> Result<(), CarryError> {
    fs::write(folder.join(name), bytes).map_err(|error| CarryError::File { name, error })
}
