//! The backup's side: looks for pages that have changed, and sends them.
//!
//! Invariants: 1. the thread has the least priority that there is, and rests as long as it took to send: a session has the link and the cores first;
//! 2. it keeps no VM's memory alive, and ends within a part of a round when it is dropped; 3. it says at its end whether the VM has ended for good,
//! whichever it sees first: that its owner has dropped it, or that the copy has gone.

use super::{PATIENCE, Terms, send};
use crate::config::Standby;
use crate::vm::connect::open;
use crate::vm::session::Broken;
use crate::vm::session::copies::Copies;
use crate::vm::session::reader::Reader;
use crate::vm::shared::{Host, Shared};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use dunlin_api::{CheckpointStatus, EventKind};
use dunlin_core::replica::sync::PAGES_AT_ONCE;
use dunlin_core::sync::compare::{Compare, DivergentPage, PAGE_BYTES};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::units::{Epoch, Term};
use dunlin_core::wire::sync::{HOLDS_SINCE, SyncMessage};
use dunlin_fabric::link::{Purpose, Stream, WriteHalf};
use dunlin_guest::memory::{Memory, hash};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// People hear no more reasons than so many.
const MOST_COMPLAINTS: usize = 8;

/// The copy has gone: whoever knows why says so, or drops this, within a second.
const OWNER_LOOKS: Duration = Duration::from_secs(2);

/// The standby hears at least so often that a round goes on.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Pages in one message: 1 MiB.
const PAGES_PER_MESSAGE: usize = 256;

/// What is fed to whom.
#[derive(Clone)]
pub struct Feeds {
    /// This host.
    pub host: Arc<Host>,
    /// The VM.
    pub vm: String,
    /// Whether it has ended for good.
    pub(in crate::vm) shared: Arc<Shared>,
    /// To whom, and how often.
    pub standby: Standby,
    /// How often.
    pub every: Duration,
    /// The copy's memory, as long as there is one.
    pub memory: Weak<Memory>,
}

/// A thread that feeds a checkpoint, until it is dropped.
pub struct Feeder {
    feeds: Feeds,
    status: Arc<Mutex<CheckpointStatus>>,
    /// Its loss says that this host has nothing more to feed.
    _ends: Sender<Infallible>,
}

/// Why a round is over before its end.
enum Over {
    /// Nobody wants it any more, or the copy has gone; the VM has ended for good.
    Dropped { vm_ended: bool },
    /// For a person.
    Broken(Broken),
}

impl From<Broken> for Over {
    fn from(broken: Broken) -> Self {
        Self::Broken(broken)
    }
}

impl Feeder {
    /// Begins to feed.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(feeds: Feeds) -> io::Result<Self> {
        let (ends, endings) = bounded(1);
        let status = Arc::new(Mutex::new(CheckpointStatus {
            host: feeds.standby.host.clone(),
            ..CheckpointStatus::default()
        }));
        let mut feeding = Feeding {
            feeds: feeds.clone(),
            status: status.clone(),
            ending: Ending {
                shared: feeds.shared.clone(),
                endings,
            },
            copies: Copies::default(),
            complaints: BTreeSet::new(),
            said: Instant::now(),
        };
        let work = move || feeding.go_on();
        std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(work)?;
        Ok(Self {
            feeds,
            status,
            _ends: ends,
        })
    }

    /// Whether it feeds that: the same copy to the same host.
    #[must_use]
    pub fn is_of(&self, standby: &Standby, memory: &Weak<Memory>) -> bool {
        self.feeds.standby == *standby && self.feeds.memory.ptr_eq(memory)
    }

    /// How far it is.
    #[must_use]
    pub fn status(&self) -> CheckpointStatus {
        self.status.lock().clone()
    }
}

struct Feeding {
    feeds: Feeds,
    status: Arc<Mutex<CheckpointStatus>>,
    ending: Ending,
    copies: Copies,
    /// Reasons that people have heard since a round came through.
    complaints: BTreeSet<String>,
    /// When the standby last heard of this round.
    said: Instant,
}

/// What tells a thread that it is to end, and why.
struct Ending {
    shared: Arc<Shared>,
    endings: Receiver<Infallible>,
}

impl Ending {
    /// Invariant 3.
    fn dropped(&self) -> Over {
        Over::Dropped {
            vm_ended: self.shared.over.load(Ordering::SeqCst),
        }
    }

    /// Awaits the end, or that the time has passed.
    fn rest(&self, time: Duration) -> Result<(), Over> {
        match self.endings.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(never) => match never {},
            Err(RecvTimeoutError::Disconnected) => Err(self.dropped()),
        }
    }

    /// The copy, or why there is none.
    fn memory<T>(&self, memory: &Weak<T>) -> Result<Arc<T>, Over> {
        if let Some(memory) = memory.upgrade() {
            return Ok(memory);
        }
        self.rest(OWNER_LOOKS)?;
        Err(self.dropped())
    }
}

/// What the standby holds: a hash for each page, 0 where it has none.
struct Known(Vec<u128>);

impl Feeding {
    fn go_on(&mut self) {
        lowest_priority();
        loop {
            match self.feed() {
                Err(Over::Dropped { .. }) => return,
                Err(Over::Broken(Broken(why))) => self.complain(&why),
                Ok(never) => match never {},
            }
            if self.rest(self.feeds.every).is_err() {
                return;
            }
        }
    }

    /// People hear each reason once, until a round has come through.
    fn complain(&mut self, why: &str) {
        if self.complaints.len() >= MOST_COMPLAINTS || !self.complaints.insert(why.to_owned()) {
            return;
        }
        self.tell(format!(
            "no checkpoint of its memory at standby '{}': {why}",
            self.feeds.standby.host
        ));
    }

    fn tell(&self, words: String) {
        let events = &self.feeds.host.events;
        events.push(&self.feeds.vm, EventKind::Standby, words);
    }

    fn rest(&self, time: Duration) -> Result<(), Over> {
        self.ending.rest(time)
    }

    fn memory(&self) -> Result<Arc<Memory>, Over> {
        self.ending.memory(&self.feeds.memory)
    }

    /// Round after round over one stream.
    fn feed(&mut self) -> Result<Infallible, Over> {
        let (mut reader, mut writer, mut known) = self.begin()?;
        let mut round = 0;
        loop {
            let fed = self.round(round, &mut reader, &mut writer, &mut known);
            let rested = fed.and_then(|()| self.rest(self.feeds.every));
            if let Err(Over::Dropped { vm_ended: true }) = rested {
                let why = "the VM has ended".to_owned();
                // Whoever does not hear it holds the checkpoint until its time is over.
                let _ = send(&mut writer, &SyncMessage::Refused { why });
            }
            rested?;
            round += 1;
        }
    }

    fn begin(&self) -> Result<(Reader, WriteHalf, Known), Over> {
        let Feeds {
            host, vm, standby, ..
        } = &self.feeds;
        let terms = Terms::of(standby, self.feeds.every);
        let pages = self.memory()?.pages() as u32;
        let opened = open(
            host,
            vm,
            &standby.host,
            Purpose::Checkpoint,
            Term(0),
            terms.encode(),
        );
        let stream = opened.map_err(|error| Broken(error.to_string()))?;
        takes_checkpoints(&stream)?;
        let broken = |error: io::Error| Broken::new("the checkpoint's stream", error);
        stream.set_read_timeout(Some(PATIENCE)).map_err(broken)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(broken)?;
        let (half, mut writer) = stream.split();
        let mut reader = Reader::new(half);
        send(
            &mut writer,
            &SyncMessage::Join {
                term: Term(0),
                pages,
                active: false,
                compare: Compare::List,
            },
        )?;
        let mut known = Known(vec![0; pages as usize]);
        loop {
            match reader.wait()? {
                SyncMessage::Holds { pages, hashes } => known.learn(&pages, &hashes)?,
                SyncMessage::JoinReady => return Ok((reader, writer, known)),
                SyncMessage::Refused { why } => return Err(Broken(why).into()),
                other => return Err(Broken(format!("{} is not due", other.name())).into()),
            }
        }
    }

    fn round(
        &mut self,
        round: u64,
        reader: &mut Reader,
        writer: &mut WriteHalf,
        known: &mut Known,
    ) -> Result<(), Over> {
        let begun = Instant::now();
        let populated = self.memory()?.populated();
        let populated = populated.map_err(|error| Broken::new("reading the guest's memory map", error))?;
        let populated = PageSet::from_runs(populated.iter().map(|page| (page as u32, 1)));
        let mut sent_bytes = 0;
        for part in populated.parts(PAGES_AT_ONCE) {
            sent_bytes += self.part(&part, writer, known)?;
        }
        send(writer, &SyncMessage::JoinLast { epoch: Epoch(round) })?;
        match reader.wait()? {
            SyncMessage::Staged { epoch } if epoch == Epoch(round) => {}
            other => return Err(Broken(format!("{} is not due", other.name())).into()),
        }
        let whole_bytes = (populated.len() * PAGE_BYTES) as u64;
        {
            let mut status = self.status.lock();
            status.at_ms = Some(now_ms());
            status.rounds += 1;
            status.memory_bytes = whole_bytes;
            status.sent_bytes = sent_bytes;
            status.sent_bytes_total += sent_bytes;
            status.took_ms = begun.elapsed().as_millis() as u64;
        }
        if round == 0 {
            self.complaints.clear();
            self.tell(format!(
                "a checkpoint of its memory is at standby '{}': {} MiB, of which {} MiB were sent",
                self.feeds.standby.host,
                whole_bytes >> 20,
                sent_bytes >> 20
            ));
        }
        Ok(())
    }

    /// Sends what has changed of a part; its bytes.
    fn part(&mut self, part: &PageSet, writer: &mut WriteHalf, known: &mut Known) -> Result<u64, Over> {
        let memory = self.memory()?;
        let copy = self.copies.copy(&memory, part);
        drop(memory);
        let (contents, _) = copy.as_chunks::<PAGE_BYTES>();
        let mut changed = Vec::new();
        for (i, page) in part.pages().enumerate() {
            if known.changes(page, hash::page(&contents[i])) {
                changed.push(PageDelta {
                    at: DivergentPage {
                        page,
                        blocks: u16::MAX,
                    },
                    bytes: copy.slice(i * PAGE_BYTES..(i + 1) * PAGE_BYTES),
                });
            }
        }
        let sent_bytes = (changed.len() * PAGE_BYTES) as u64;
        // Also none: where nothing changes, a round of a large VM is long.
        while !changed.is_empty() || self.said.elapsed() > HEARTBEAT {
            let rest = changed.split_off(changed.len().min(PAGES_PER_MESSAGE));
            self.said = Instant::now();
            send(writer, &SyncMessage::Pages(std::mem::replace(&mut changed, rest)))?;
            self.rest(self.said.elapsed())?;
        }
        self.copies.take_back(copy);
        self.rest(Duration::ZERO)?;
        Ok(sent_bytes)
    }
}

impl Known {
    /// It holds these.
    fn learn(&mut self, pages: &PageSet, hashes: &[u128]) -> Result<(), Broken> {
        for (page, hash) in pages.pages().zip(hashes) {
            let known = self.0.get_mut(page as usize);
            *known.ok_or_else(|| Broken("a page that is none of the VM's".into()))? = *hash;
        }
        Ok(())
    }

    /// Whether the page has to be sent; it counts as held from now on.
    fn changes(&mut self, page: u32, hash: u128) -> bool {
        let known = &mut self.0[page as usize];
        std::mem::replace(known, hash) != hash
    }
}

fn takes_checkpoints(stream: &Stream) -> Result<(), Broken> {
    let version = stream.spoken().version;
    if version >= HOLDS_SINCE {
        return Ok(());
    }
    Err(Broken(format!(
        "its build speaks protocol {version}, and a checkpoint needs {HOLDS_SINCE}: upgrade it"
    )))
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// Invariant 1. Where it cannot be had, the thread is only more of a bother.
fn lowest_priority() {
    const LAST: i32 = 19;
    if let Err(error) = rustix::process::setpriority_process(None, LAST) {
        tracing::debug!("the checkpoint's thread keeps its priority: {error}");
    }
}

#[cfg(test)]
mod tests;
