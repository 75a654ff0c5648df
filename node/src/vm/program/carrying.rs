//! The threads that carry a running program from one host to the other.
//!
//! * **Decides:** nothing: each does one thing after the other, and tells its loop.
//! * **Flow:** `Join` -> the other host makes room, `JoinReady` -> the program is dumped and stands still -> the loop draws a line ->
//!   what it has written to files; it runs on -> all of that as `DeviceState`, the connections as `State` -> the other host restores
//!   it, and its loop says `Loaded`.
//! * **Invariants:** 1. whatever happens here, a program that was dumped runs on, or its copy is given up; 2. every wait is bounded; 3. the
//!   folder that it is carried in is gone afterwards; 4. it leaves the disk, which has all logs, room: on both hosts.
//! * **Source:** `dunlin_program::guard`. **Not here:** when (`joining`), what the new copy is for (`joined`).

use super::copies;
use super::data::{self, Marks};
use crate::config::ProgramSpec;
use crate::vm::event::{LoopEvent, LoopSender};
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
use dunlin_program::copy::Copy;
use dunlin_program::data::Image;
use dunlin_program::guard::{self, Criu, Place, Unpacking};
use dunlin_program::message::Adopted;
use dunlin_program::source::Source;
use serde::{Deserialize, Serialize};
use std::fs;
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
            let _ = self.send(&SyncMessage::Refused { why: why.clone() });
        }
        self.tell(match result {
            Ok(bytes) => JoinStep::Loaded { bytes },
            Err(why) => JoinStep::Failed(why),
        });
    }

    fn tell(&self, step: JoinStep) {
        let session = self.session;
        self.to_loop.send(LoopEvent::ProgramJoin { session, step });
    }

    fn carry(&self) -> Result<u64, String> {
        let criu = Criu::find().map_err(|error| error.to_string())?;
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
            _ => return Err("it was given up".to_owned()),
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
            Ok(None) => return Err("the copy has ended".to_owned()),
            Err(error) => {
                self.tell(JoinStep::StandsStill(error.to_string()));
                return Err(error.to_string());
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
        let about = serde_json::to_vec(&about).map_err(|error| error.to_string())?;
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
            other => Err(unexpected(&other)),
        }
    }

    /// What a copy takes on this host's disk, where it has room for that.
    fn fits(&self) -> Result<u64, String> {
        let told = |error: guard::GuardError| error.to_string();
        let left = self.place.data().map_or(0, |_| data::MOST_LEFT_BYTES);
        let bytes = self.place.bytes().map_err(told)? + left;
        guard::room_for(&self.folder, bytes).map_err(told)?;
        Ok(bytes)
    }

    /// All that is taken while the program stands still.
    fn take(&self, criu: &Criu, known: &mut [u128]) -> Result<(About, Epoch, Bytes, Bytes), String> {
        criu.dump(&self.place, &self.folder)
            .map_err(|error| error.to_string())?;
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
            return Err("it was given up".to_owned());
        };
        guard::save_written(&self.place, &self.folder).map_err(|error| error.to_string())?;
        if let Some(source) = self.place.data() {
            data::save(source, known, &self.folder)?;
        }
        let neighbours = guard::neighbours(&self.place).map_err(|error| error.to_string())?;
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

    fn send_folder(&self, epoch: Epoch) -> Result<u64, String> {
        let mut packing = guard::pack(&self.folder).map_err(|error| error.to_string())?;
        let mut sent = 0;
        loop {
            let part = packing
                .piece(parts::PART_BYTES)
                .map_err(|error| error.to_string())?;
            if part.is_empty() {
                return Ok(sent);
            }
            sent += part.len() as u64;
            let part = Bytes::from(part);
            self.send(&SyncMessage::DeviceState { epoch, part })?;
        }
    }

    fn send(&self, message: &SyncMessage) -> Result<(), String> {
        self.link.writer.send(message).map_err(|error| error.to_string())
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
            let refused = SyncMessage::Refused { why: why.clone() };
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
    fn fetch(&self) -> Result<Brought, String> {
        let (link, folder) = (&self.link, self.folder.as_path());
        let told = |error: guard::GuardError| error.to_string();
        let bytes = match heard(link, WORD_WITHIN)? {
            SyncMessage::Join { pages, .. } => u64::from(pages) * PAGE_BYTES,
            other => return Err(unexpected(&other)),
        };
        let criu = Criu::find().map_err(told)?;
        // A copy with data begins with all of them.
        let copy = match self.marks {
            Some(_) => None,
            None => Some(self.room(None)?),
        };
        empty(folder)?;
        let room = guard::room_for(folder, bytes).map_err(told)?;
        let receiving = match &self.marks {
            Some(marks) => Some(data::receive_ahead(link, &self.program, marks)?),
            None => {
                let ready = link.writer.send(&SyncMessage::JoinReady);
                ready.map_err(|error| error.to_string())?;
                None
            }
        };
        let (epoch, connections) = self.receive(room)?;
        let begun = Instant::now();
        let read = |name: &str| fs::read(folder.join(name)).map_err(|error| format!("{name}: {error}"));
        let about: About =
            serde_json::from_slice(&read(ABOUT)?).map_err(|error| format!("{ABOUT}: {error}"))?;
        let order = Bytes::from(read(ORDER)?);
        let image = receiving.map(|receiving| receiving.load(folder, about.run.unwrap_or(0)));
        let mut copy = match copy {
            Some(copy) => copy,
            None => self.room(image.transpose()?)?,
        };
        let place = Place::of(&copy).map_err(told)?;
        guard::load_written(&place, folder).map_err(told)?;
        criu.restore(&place, folder, about.prints_to.as_deref())
            .map_err(told)?;
        let time = AgreedTime {
            monotonic_ns: about.monotonic_ns,
            wall_ns: about.wall_ns,
        };
        if let Some(page) = copy.clock() {
            page.set(time)
                .map_err(|error| format!("the program's clock: {error}"))?;
            guard::lead_clocks(&place, copy.leads()).map_err(told)?;
        }
        let source = about.chance.and_then(|(seed, drawn)| copy.draws(seed, &drawn));
        let answers = source.map(|source| {
            let source = Arc::new(source);
            let listeners = guard::listen(&place).map_err(told)?;
            let answers = Answers::of_a_service(listeners, Arc::clone(&source));
            let answers = answers.map_err(|error| format!("a thread for its chance: {error}"))?;
            Ok::<_, String>((answers, source))
        });
        let answers = answers.transpose()?;
        copy.adopt(about.adopted).map_err(|error| error.to_string())?;
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
    fn room(&self, image: Option<Image>) -> Result<Copy, String> {
        let copy = copies::prepare(
            &self.program,
            [0; 32],
            copies::printed(&self.printed, false),
            image,
        )?;
        copy.vacate().map_err(|error| error.to_string())?;
        Ok(copy)
    }

    /// What is carried, into the folder, which has so much room.
    fn receive(&self, mut room: u64) -> Result<(Epoch, Bytes), String> {
        let told = |error: guard::GuardError| error.to_string();
        let mut unpacking = Unpacking::into(&self.folder).map_err(told)?;
        loop {
            match heard(&self.link, PART_WITHIN)? {
                SyncMessage::DeviceState { part, .. } => {
                    room = room
                        .checked_sub(part.len() as u64)
                        .ok_or("it is larger than this host's disk has room for")?;
                    unpacking.piece(&part).map_err(told)?;
                }
                SyncMessage::State {
                    epoch, connections, ..
                } => {
                    unpacking.end().map_err(told)?;
                    return Ok((epoch, connections));
                }
                other => return Err(unexpected(&other)),
            }
        }
    }
}

pub(super) fn heard(link: &Ends, within: Duration) -> Result<SyncMessage, String> {
    match link.incoming.recv_timeout(within) {
        Ok(Ok(SyncMessage::Refused { why })) => Err(why),
        Ok(Ok(message)) => Ok(message),
        Ok(Err(error)) => Err(error.to_string()),
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("the other host says nothing for {} s", within.as_secs()))
        }
        Err(RecvTimeoutError::Disconnected) => Err("the stream to the other host has ended".to_owned()),
    }
}

pub(super) fn unexpected(message: &SyncMessage) -> String {
    format!("the other host says {} where that has no place", message.name())
}

/// What an earlier one has left goes.
fn empty(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", folder.display()))
        }
        _ => fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display())),
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    fs::write(folder.join(name), bytes).map_err(|error| format!("{name}: {error}"))
}
