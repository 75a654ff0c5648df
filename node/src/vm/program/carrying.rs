//! The threads that carry a running program from one host to the other.
//!
//! * **Decides:** nothing: each does one thing after the other, and tells its loop.
//! * **Flow:** `Join` -> the other host makes room, `JoinReady` -> what the program has in memory goes ahead (`ahead`) -> it is dumped and
//!   stands still -> the loop draws a line -> what has changed in memory, what it has written to files; it runs on -> all of that as
//!   `DeviceState`, the connections as `State` -> the other host restores it, and its loop says `Loaded`.
//! * **Invariants:** 1. whatever happens here, a program that was dumped runs on, or its copy is given up; 2. every wait is bounded; 3. the
//!   folder that it is carried in is gone afterwards; 4. it leaves the disk, which has all logs, room: on both hosts.
//! * **Source:** `dunlin_program::guard`. **Not here:** when (`joining`), what the new copy is for (`joined`).

use super::ahead::{self, Dumped, How, Prepared, Stood};
use super::data::{self, Marks};
use super::preparing;
use crate::config::ProgramSpec;
use crate::vm::event::{LoopEvent, LoopSender};
use crate::vm::program::error::{CarryError, FileError};
use crate::vm::program::hearing::{heard, unexpected};
use crate::vm::program::state::Word;
use crate::vm::program::told::{Brought, JoinStep};
use crate::vm::session::Broken;
use crate::vm::session::link::Ends;
use bytes::Bytes;
use crossbeam_channel::Receiver;
use dunlin_core::agreed::AgreedTime;
use dunlin_core::policy::Mode;
use dunlin_core::sync::compare::Compare;
use dunlin_core::units::{Epoch, Index, Term};
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_program::answers::Answers;
use dunlin_program::chance::{Drawn, Seed};
use dunlin_program::copy::Copy;
use dunlin_program::data::Image;
use dunlin_program::guard::{self, Criu, GuardError, Place, Unpacking};
use dunlin_program::message::Adopted;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

/// The other host makes namespaces: milliseconds, or as long as a busy host gets.
const ROOM_WITHIN: Duration = Duration::from_secs(30);
/// What may be short for a moment (descriptors) is there again after one of these; meanwhile the program stands still.
const MEND_AGAIN_MS: [u64; 4] = [10, 50, 200, 800];
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
    /// A primary of an earlier version does not say it.
    #[serde(default)]
    one_at_a_time: bool,
}

type Taken = (About, Epoch, Bytes, Bytes);

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
    /// Why nothing is to go ahead this time.
    pub(super) whole: Option<String>,
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
        let within = source.map_or(ROOM_WITHIN, |_| data::PIECE_WITHIN);
        let mut known = data::hear_room(&self.link, source, within)?;
        if let Some(source) = source {
            data::send_ahead(&self.link, source, &mut known)?;
        }
        let prepared = self.prepare(&criu, bytes)?;
        self.tell(JoinStep::RoomIsMade);
        match self.words.recv_timeout(WORD_WITHIN) {
            Ok(Word::Dump) => {}
            _ => return Err(CarryError::GivenUp),
        }
        // It may have grown meanwhile.
        self.fits()?;
        let stopped = guard::stopped(&self.place)?;
        let begun = Instant::now();
        let taken = self.take(&criu, prepared, &mut known);
        // A CRIU that was killed has let go of nothing: the program's connections would be mute.
        if taken.is_err() {
            self.mend();
        }
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
        let stood_for = begun.elapsed();
        guard::stop_again(&self.place, &stopped)?;
        let (how, dumped, (about, epoch, connections, order)) = taken?;
        self.tell(JoinStep::RunsOn(Stood {
            how,
            for_us: stood_for.as_micros() as u64,
        }));
        // The kernel forgets what it was to notice.
        drop(dumped);
        let about = About {
            adopted: Adopted {
                last_pid,
                stopped,
                ..about.adopted
            },
            ..about
        };
        let about = serde_json::to_vec(&about).map_err(CarryError::About)?;
        write(&self.folder, ABOUT, &about)?;
        write(&self.folder, ORDER, &order)?;
        let sent = self.send_folder(&self.folder, epoch)?;
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

    /// All that is done before the program stands still.
    fn prepare(&self, criu: &Criu, bytes: u64) -> Result<Prepared, CarryError> {
        let room = || guard::room_for(&self.folder, 2 * bytes).map_err(|error| error.to_string());
        if let Err(why) = self.whole.clone().map_or_else(room, Err) {
            return Ok(Prepared::Whole(why));
        }
        let prepared = Prepared::of(criu, &self.place, &self.folder);
        if let Some(folder) = prepared.folder() {
            // Its epoch is not known yet; none is asked for.
            self.send_folder(folder, Epoch(0))?;
        }
        Ok(prepared)
    }

    /// What a CRIU that was killed has left mute. Nobody else does it later.
    fn mend(&self) {
        for pause_ms in MEND_AGAIN_MS {
            let Err(why) = guard::mend(&self.place) else {
                return;
            };
            tracing::warn!("after a dump that has failed: {why}; it is tried again");
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
        if let Err(why) = guard::mend(&self.place) {
            tracing::error!(
                "after a dump that has failed: {why}: its connections stay mute until the next copy is made"
            );
        }
    }

    /// All that is taken while the program stands still.
    fn take(
        &self,
        criu: &Criu,
        prepared: Prepared,
        known: &mut [u128],
    ) -> Result<(How, Dumped, Taken), CarryError> {
        let dumped = ahead::dump(criu, prepared, &self.place, &self.folder)?;
        self.tell(JoinStep::Stands);
        // Another process does most of the second.
        let (how, saved) = std::thread::scope(|scope| {
            let saving = scope.spawn(|| guard::save_written(&self.place, &self.folder));
            let how = dumped.finish(&self.folder);
            (how, saving.join())
        });
        let how = how?;
        saved.map_err(|_| GuardError::of("what the program has written", &"its thread has ended"))??;
        let Ok(Word::LineDrawn {
            epoch,
            applied,
            connections,
            order,
            one_at_a_time,
            time,
            chance,
        }) = self.words.recv_timeout(WORD_WITHIN)
        else {
            return Err(CarryError::GivenUp);
        };
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
                stopped: Vec::new(),
            },
            one_at_a_time,
        };
        Ok((how, dumped, (about, epoch, connections, order)))
    }

    fn send_folder(&self, folder: &Path, epoch: Epoch) -> Result<u64, CarryError> {
        let mut packing = guard::pack(folder, ahead::FOLDER)?;
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
            one_at_a_time: about.one_at_a_time,
            time,
            answers,
            took: begun.elapsed(),
        })
    }

    /// The namespaces for it, with nothing in them.
    fn room(&self, image: Option<Image>) -> Result<Copy, CarryError> {
        let copy = preparing::prepare(
            &self.program,
            [0; 32],
            preparing::printed(&self.printed, false),
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
