//! The primary's side of a session: the join in rounds, then one sync after the other.
//!
//! The order of a sync is the one of ARCHITECTURE.md, "A sync"; each step's time is measured here. The VM stands
//! still from `stop` to `cont`: what can be done ahead is sent before, what can be done on a copy is done after it.
//!
//! Invariants:
//! 1. What a scan cleared is in a round of the same sync, and a sync that is not acknowledged ends the session.
//! 2. `cont` comes only after the loop has drawn the line between the epochs' frames.
//! 3. The primary's VM is stopped only when the backup's stands; from `stop` to `cont` nothing is waited for as long as a
//!    second (core's `waits`).
//! 4. Whoever stopped the VM lets it run on: this thread, whatever becomes of the session, until the VM is the backup's.
//!
//! Not here: when to sync, what leaves when (the loop, with core's `trigger` and `gate`).

use super::ahead::Rounds;
use super::link::SyncLink;
use super::{Broken, PAGES_AT_ONCE, copy_out, hash_all, hash_copy, page_set};
use crate::control::SyncFigures;
use crate::vm::Line;
use crate::vm::event::{LoopEvent, LoopSender, SyncStep};
use crate::vm::machine::Machine;
use bytes::Bytes;
use crossbeam_channel::Receiver;
use dunlin_core::policy::Manner;
use dunlin_core::sync::compare::tree::HashTree;
use dunlin_core::sync::compare::{BLOCK_BYTES, BLOCKS_PER_PAGE, DivergentPage, PAGE_BYTES, divergent};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::units::{Epoch, Term};
use dunlin_core::waits::Wait;
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_fabric::link::Stream;
use dunlin_guest::qemu::QmpError;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the loop asks of the session.
pub enum PrimaryJob {
    /// The sync that ends `epoch` is about to be agreed: do what can be done while the VMs run.
    WorkAhead {
        /// The epoch that is about to end.
        epoch: Epoch,
    },
    /// Sync, ending `epoch`. Inputs are drained.
    Sync {
        /// The epoch that ends.
        epoch: Epoch,
        /// Stay stopped afterwards: the backup takes over.
        hand_over: bool,
        /// Whether the log says so, too.
        agreed: bool,
        /// How the copies are kept in the next epoch.
        next: Manner,
    },
    /// The loop has drawn the line between this epoch's frames and the next one's.
    LineDrawn {
        /// The connections that do not speak the VM's own numbers.
        shadow: Bytes,
    },
    /// The group is asked to follow the backup: the loop answers for the VM that stands here.
    HandedOver,
}

/// What a session needs.
pub struct Primary {
    /// The loop's name for this session.
    pub session: u64,
    /// The VM.
    pub machine: Arc<Machine>,
    /// The stream to the backup.
    pub link: SyncLink,
    /// Jobs.
    pub jobs: Receiver<PrimaryJob>,
    /// Reports.
    pub to_loop: LoopSender,
    /// Opens a stream to the backup for a disk's mirror.
    pub connect_mirror: Box<dyn Fn(usize) -> Result<Stream, String> + Send>,
    /// Whether the backup's VM runs, in this epoch.
    pub active: Cell<bool>,
    /// The VM stands still for a sync, and nobody else will let it run on (invariant 4).
    pub stands: Cell<bool>,
    /// Whether every sync is followed by a hash of all memory on both sides.
    pub audit: bool,
    /// Memory of the backup for staging, which is the measure for what a sync may take here.
    pub staging_bytes: usize,
}

/// One sync.
struct Sync {
    epoch: Epoch,
    joining: bool,
    hand_over: bool,
    agreed: bool,
    next: Manner,
}

/// Rounds of the join stop when so little is left that a pause hardly shows, or when they no longer help.
const JOIN_REST_PAGES: usize = 2048;
const JOIN_ROUNDS: usize = 12;
/// How often a backup whose disks are being copied hears that they still are: it waits for pages.
const STILL_COPIES: Duration = Duration::from_secs(1);
/// What is compared is copied aside, and is more than what differs and is staged: so many times as much may be copied.
const COPY_FACTOR: usize = 4;
/// Pages in one message: 1 MiB.
const PAGES_PER_MESSAGE: u32 = 256;

impl Primary {
    /// Runs until the session breaks or the loop drops its jobs.
    pub fn run(self, term: Term) {
        let session = self.session;
        let to_loop = self.to_loop.clone();
        let why = match self.join_and_sync(term) {
            Ok(()) => "the session was ended here".to_owned(),
            Err(Broken(why)) => {
                self.resume();
                // What the backup said before it closed the stream is the reason; that it is closed is not.
                self.link.last_words().unwrap_or(why)
            }
        };
        to_loop.send(LoopEvent::SessionEnded {
            session,
            why,
            torn: false,
        });
    }

    /// Invariant 4.
    fn resume(&self) {
        if !self.stands.replace(false) {
            return;
        }
        match self
            .link
            .waiting
            .during(Wait::VmResumes, || self.machine.qemu.cont())
        {
            Ok(()) => {}
            // It has been told, and obeys when it can.
            Err(QmpError::Timeout(..)) => tracing::warn!("QEMU is slow to resume the VM after a broken sync"),
            Err(error) => self.to_loop.send(LoopEvent::VmStands {
                session: self.session,
                why: error.to_string(),
            }),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "nothing is owed between two syncs")]
    fn join_and_sync(&self, term: Term) -> Result<(), Broken> {
        self.join(term)?;
        let mut last_stop = Instant::now();
        let mut joining = true;
        let mut rounds = Rounds::default();
        while let Ok(job) = self.jobs.recv() {
            let this = match job {
                PrimaryJob::Sync {
                    epoch,
                    hand_over,
                    agreed,
                    next,
                } => Sync {
                    epoch,
                    joining,
                    hand_over,
                    agreed,
                    next,
                },
                PrimaryJob::WorkAhead { epoch } => {
                    self.work_ahead(epoch, &mut rounds)?;
                    self.report(SyncStep::WorkedAhead);
                    continue;
                }
                PrimaryJob::LineDrawn { .. } | PrimaryJob::HandedOver => {
                    return Err(Broken("the loop speaks of a sync where there is none".into()));
                }
            };
            self.sync(&this, std::mem::take(&mut rounds), &mut last_stop)?;
            self.active.set(this.next.backup_runs());
            joining = false;
        }
        Ok(())
    }

    /// Copies memory while the VM runs, until the rest is small.
    fn join(&self, term: Term) -> Result<(), Broken> {
        let memory = self.machine.qemu.memory();
        self.link.send(&SyncMessage::Join {
            term,
            pages: memory.pages() as u32,
            active: self.active.get(),
        })?;
        match self.link.receive(Wait::BackupStarts)? {
            SyncMessage::JoinReady => {}
            other => return Err(unexpected("JoinReady", &other)),
        }
        let mut said = Instant::now();
        self.machine
            .disks
            .join(&self.link.waiting, &self.connect_mirror, |done, total| {
                self.report_copied("disk to the backup", done, total);
                if said.elapsed() > STILL_COPIES {
                    said = Instant::now();
                    // That the stream is broken is seen by whoever uses it next.
                    let _ = self.link.send(&SyncMessage::Pages(Vec::new()));
                }
            })?;
        // Cleared before the copy begins: what is written from now on is in a later round.
        self.scan()?;
        let populated = memory
            .populated()
            .map_err(|error| Broken::new("reading the guest's memory map", error))?;
        let mut round = page_set(&populated);
        let total = round.len();
        let mut sent = 0;
        for _ in 0..JOIN_ROUNDS {
            for chunk in round.parts(PAGES_PER_MESSAGE) {
                self.link.send(&SyncMessage::Pages(self.whole_pages(&chunk)))?;
                sent += chunk.len();
                self.report_progress(sent, total.max(sent));
            }
            let before = round.len();
            round = self.scan()?;
            if round.len() <= JOIN_REST_PAGES || round.len() > before * 9 / 10 {
                break;
            }
        }
        // What is left is sent in the last, stopped round, which starts with what this scan took.
        for chunk in round.parts(PAGES_PER_MESSAGE) {
            self.link.send(&SyncMessage::Pages(self.whole_pages(&chunk)))?;
        }
        self.to_loop.send(LoopEvent::JoinNearlyDone {
            session: self.session,
        });
        Ok(())
    }

    fn report_progress(&self, sent_pages: usize, total_pages: usize) {
        let bytes = |pages: usize| (pages * PAGE_BYTES) as u64;
        self.report_copied("memory to the backup", bytes(sent_pages), bytes(total_pages));
    }

    fn report_copied(&self, what: &'static str, done: u64, total: u64) {
        self.to_loop.send(LoopEvent::JoinProgress {
            session: self.session,
            what,
            done,
            total,
        });
    }

    fn scan(&self) -> Result<PageSet, Broken> {
        let dirty = self.machine.qemu.memory().scan_dirty();
        dirty
            .map(|dirty| page_set(&dirty))
            .map_err(|error| Broken::new("reading the dirty pages", error))
    }

    fn whole_pages(&self, pages: &PageSet) -> Vec<PageDelta> {
        let copy = Bytes::from(copy_out(self.machine.qemu.memory(), pages));
        pages
            .pages()
            .enumerate()
            .map(|(i, page)| PageDelta {
                at: DivergentPage {
                    page,
                    blocks: u16::MAX,
                },
                bytes: copy.slice(i * PAGE_BYTES..(i + 1) * PAGE_BYTES),
            })
            .collect()
    }

    /// A round of the sync that ends `epoch`, while the VMs run: what nobody writes afterwards needs no look at the stop.
    fn work_ahead(&self, epoch: Epoch, rounds: &mut Rounds) -> Result<(), Broken> {
        // What is written after this scan is in the next round.
        let ours = self.scan()?;
        let theirs = if self.active.get() {
            self.link
                .send_pages(&ours, |pages, more| SyncMessage::Ahead { epoch, pages, more })?;
            self.receive_dirty(epoch, Wait::BackupScans)?
        } else {
            PageSet::default()
        };
        let union = ours.union(&theirs);
        self.check_memory(
            union.len() * BLOCKS_PER_PAGE * size_of::<u128>(),
            self.staging_bytes,
        )?;
        let (mut differing, mut bytes) = (Vec::new(), 0);
        // All of it before the first page is sent: neither side must wait for the other to read.
        let their_hashes = match self.active.get() {
            true => self.receive_hashes(epoch, union.len() * BLOCKS_PER_PAGE)?,
            false => Vec::new(),
        };
        let mut theirs_of = their_hashes.chunks(PAGES_AT_ONCE as usize * BLOCKS_PER_PAGE);
        for part in union.parts(PAGES_AT_ONCE) {
            let copy = copy_out(self.machine.qemu.memory(), &part);
            let differs = match theirs_of.next() {
                Some(theirs) => compare(&part, &hash_copy(&copy), theirs)?,
                None => whole(&part),
            };
            bytes += self.send_deltas(epoch, &part, &copy.into(), &differs)?;
            differing.extend(differs);
        }
        rounds.add(&ours, &theirs, &differing, bytes);
        Ok(())
    }

    fn sync(&self, this: &Sync, mut rounds: Rounds, last_stop: &mut Instant) -> Result<(), Broken> {
        let &Sync {
            epoch,
            joining,
            hand_over,
            agreed,
            next,
        } = this;
        let qemu = &self.machine.qemu;
        let compared = self.active.get() && !joining;
        let mut figures = SyncFigures::default();
        if joining {
            self.link.send(&SyncMessage::JoinLast { epoch })?;
        } else if !self.active.get() {
            self.link.send(&SyncMessage::Ends { epoch, agreed })?;
        }
        let started = Instant::now();
        figures.interval_us = started.duration_since(*last_stop).as_micros() as u64;
        *last_stop = started;
        let mut lap = Lap::start();
        // Invariant 3.
        let theirs = if compared {
            self.receive_dirty(epoch, Wait::BackupStands)?
        } else {
            PageSet::default()
        };
        figures.wait_us = lap.us();
        if hand_over {
            self.machine.fault_at.pass(Line::PrimaryHandsOver);
        }
        let stopping = Instant::now();
        let device_state = self.stop(joining, &mut figures, &mut lap)?;
        let ours = self.scan()?;
        self.machine.disks.mark(epoch)?;
        figures.scan_us = lap.us();
        let union = ours.union(&theirs);
        let most_bytes = self.staging_bytes * if compared { COPY_FACTOR } else { 1 };
        self.check_memory(union.len() * PAGE_BYTES, most_bytes)?;
        let copy = copy_out(qemu.memory(), &union);
        let audit = self.audit.then(|| hash_all(qemu.memory()));
        figures.copy_us = lap.us();
        // Invariant 2.
        let shadow = match self.link.waiting.for_word(&self.jobs, Wait::LineDrawn)? {
            PrimaryJob::LineDrawn { shadow } => shadow,
            PrimaryJob::Sync { .. } | PrimaryJob::WorkAhead { .. } | PrimaryJob::HandedOver => {
                return Err(Broken("two syncs at once".into()));
            }
        };
        self.machine.fault_at.pass(Line::PrimaryCaptured);
        if !joining && self.active.get() != next.backup_runs() {
            self.machine.fault_at.pass(Line::PrimaryChangesOver);
        }
        if !hand_over {
            self.link
                .waiting
                .during(Wait::VmResumes, || qemu.cont())
                .map_err(|error| Broken::new("resuming the VM", error))?;
            self.stands.set(false);
        }
        figures.cont_us = lap.us();
        figures.pause_us = stopping.elapsed().as_micros() as u64;
        self.report(SyncStep::Resumed);
        figures.device_bytes = device_state.len() as u64;
        if compared {
            self.link
                .send_pages(&union, |pages, more| SyncMessage::Union { epoch, pages, more })?;
        }
        let our_hashes = if compared { hash_copy(&copy) } else { Vec::new() };
        figures.hash_us = lap.us();
        let differing = if compared {
            let their_hashes = self.receive_hashes(epoch, our_hashes.len())?;
            figures.list_hashes = our_hashes.len() as u64;
            if self.audit && !our_hashes.is_empty() {
                let (_, sent) = HashTree::build(&our_hashes).descend(&HashTree::build(&their_hashes));
                figures.tree_hashes = sent as u64;
                figures.tree_rounds = u64::from(our_hashes.len().next_power_of_two().ilog2()) + 1;
            }
            compare(&union, &our_hashes, &their_hashes)?
        } else {
            whole(&union)
        };
        let bytes = self.send_deltas(epoch, &union, &copy.into(), &differing)?;
        figures.ahead = rounds.pages()[2];
        rounds.add(&ours, &theirs, &differing, bytes);
        [
            figures.dirty_primary,
            figures.dirty_backup,
            figures.united,
            figures.divergent,
        ] = rounds.pages();
        figures.bytes = rounds.bytes();
        let (first, device_state) = parts::bytes(device_state);
        for part in first {
            self.link.send(&SyncMessage::DeviceState { epoch, part })?;
        }
        self.link.send(&SyncMessage::State {
            epoch,
            next,
            shadow,
            device_state,
        })?;
        // Before the acknowledgement: a backup that has acknowledged needs nothing more of us.
        if let Some(hash) = audit {
            self.link.send(&SyncMessage::Audit { epoch, hash })?;
        }
        // The backup waits for this epoch's disk writes, which may be many and its disk slow.
        let disks = &self.machine.disks;
        let answer = match hand_over {
            true => self.link.receive(Wait::HandOver)?,
            false => self
                .link
                .receive_unless_stuck(Wait::BackupHolds, || disks.mirrored())?,
        };
        match answer {
            SyncMessage::Staged { epoch: staged } if staged == epoch => {}
            other => return Err(unexpected("Staged", &other)),
        }
        figures.total_us = started.elapsed().as_micros() as u64;
        self.report(SyncStep::Acknowledged {
            epoch,
            joining,
            figures,
        });
        self.await_load(epoch, hand_over)
    }

    /// The VM stands, and its devices' state; in a join with all of its firmware.
    fn stop(&self, joining: bool, figures: &mut SyncFigures, lap: &mut Lap) -> Result<Bytes, Broken> {
        let qemu = &self.machine.qemu;
        // Whatever comes of the command: it may be obeyed yet (invariant 4).
        self.stands.set(true);
        // A write that is slowed down, because the backup's buffers fill, would keep the VM from stopping.
        self.machine.disks.expedite(true);
        let stopped = self.link.waiting.during(Wait::VmStops, || qemu.stop());
        self.machine.disks.expedite(false);
        stopped.map_err(|error| Broken::new("stopping the VM", error))?;
        self.machine.fault_at.pass(Line::PrimaryStopped);
        figures.stop_us = lap.us();
        self.report(SyncStep::Stopped);
        let saved = self
            .link
            .waiting
            .during(Wait::DevicesSave, || qemu.save_state(joining));
        let saved = saved.map_err(|error| Broken::new("saving the devices' state", error))?;
        figures.save_us = lap.us();
        Ok(saved.into())
    }

    /// The backup has acknowledged; it goes on from the sync, or takes the VM over.
    fn await_load(&self, epoch: Epoch, hand_over: bool) -> Result<(), Broken> {
        if self.machine.fault_at.is_deadly(Line::PrimaryReleased) {
            // The loop dies of it when it has let out what may leave.
            std::thread::park();
        }
        let wait = if hand_over {
            Wait::HandOver
        } else {
            Wait::BackupLoads
        };
        let load_us = match self.link.receive(wait)? {
            SyncMessage::Loaded {
                epoch: loaded,
                took_us,
            } if loaded == epoch => took_us,
            other => return Err(unexpected("Loaded", &other)),
        };
        self.report(SyncStep::Loaded { epoch, load_us });
        if !hand_over {
            return Ok(());
        }
        match self.link.waiting.for_word(&self.jobs, Wait::HandedOver)? {
            PrimaryJob::HandedOver => {
                self.stands.set(false);
                Ok(())
            }
            _ => Err(Broken("the loop speaks of another sync in a hand-over".into())),
        }
    }

    fn report(&self, step: SyncStep) {
        self.to_loop.send(LoopEvent::PrimarySync {
            session: self.session,
            step,
        });
    }

    fn receive_dirty(&self, epoch: Epoch, wait: Wait) -> Result<PageSet, Broken> {
        let guest_pages = self.machine.qemu.memory().pages();
        self.link
            .receive_pages(wait, guest_pages, None, |message| match message {
                SyncMessage::Dirty {
                    epoch: got,
                    pages,
                    more,
                } if got == epoch => Ok((pages, more)),
                other => Err(unexpected("Dirty", &other)),
            })
    }

    /// How much a guest writes is its own choice, and this host's memory is not the guest's: the VM goes on, and what would
    /// not fit ends the session.
    fn check_memory(&self, needed_bytes: usize, most_bytes: usize) -> Result<(), Broken> {
        if needed_bytes <= most_bytes {
            return Ok(());
        }
        Err(Broken(format!(
            "the VM wrote so much that its sync needs {} MiB here, more than {}: raise sync.staging_mib",
            needed_bytes >> 20,
            most_bytes >> 20
        )))
    }

    fn receive_hashes(&self, epoch: Epoch, count: usize) -> Result<Vec<u128>, Broken> {
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            match self.link.receive(Wait::BackupHashes)? {
                SyncMessage::Hashes { epoch: got, hashes }
                    if got == epoch && !hashes.is_empty() && all.len() + hashes.len() <= count =>
                {
                    all.extend(hashes);
                }
                other => return Err(unexpected("Hashes", &other)),
            }
        }
        Ok(all)
    }

    /// Sends the differing blocks out of the copy; returns their bytes.
    fn send_deltas(
        &self,
        epoch: Epoch,
        union: &PageSet,
        copy: &Bytes,
        differing: &[DivergentPage],
    ) -> Result<u64, Broken> {
        let mut positions = union.pages().enumerate();
        let mut bytes = 0;
        for chunk in differing.chunks(PAGES_PER_MESSAGE as usize) {
            let mut deltas = Vec::with_capacity(chunk.len());
            for &at in chunk {
                let (position, _) = positions
                    .find(|(_, page)| *page == at.page)
                    .expect("divergent pages are pages of the union, in its order");
                let page = copy.slice(position * PAGE_BYTES..(position + 1) * PAGE_BYTES);
                deltas.push(PageDelta {
                    at,
                    bytes: blocks_of(&page, at.blocks),
                });
            }
            bytes += deltas.iter().map(|delta| delta.bytes.len() as u64).sum::<u64>();
            self.link.send(&SyncMessage::Delta { epoch, deltas })?;
        }
        Ok(bytes)
    }
}

/// Which of these pages the backup has otherwise.
fn compare(pages: &PageSet, ours: &[u128], theirs: &[u128]) -> Result<Vec<DivergentPage>, Broken> {
    divergent(pages, ours, theirs)
        .ok_or_else(|| Broken("the backup hashed other pages than the union".into()))
}

/// All of these pages: the backup has no own words to compare.
fn whole(pages: &PageSet) -> Vec<DivergentPage> {
    let whole = |page| DivergentPage {
        page,
        blocks: u16::MAX,
    };
    pages.pages().map(whole).collect()
}

/// The blocks of `page` in the mask, one after the other.
fn blocks_of(page: &Bytes, mask: u16) -> Bytes {
    if mask == u16::MAX {
        return page.clone();
    }
    let mut out = Vec::with_capacity(mask.count_ones() as usize * BLOCK_BYTES);
    for block in (0..BLOCKS_PER_PAGE).filter(|block| mask & (1 << block) != 0) {
        out.extend_from_slice(&page[block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES]);
    }
    out.into()
}

pub(super) fn unexpected(expected: &str, got: &SyncMessage) -> Broken {
    Broken(format!(
        "the other host said {} where {expected} was due",
        got.name()
    ))
}

/// Times consecutive steps.
struct Lap(Instant);

impl Lap {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn us(&mut self) -> u64 {
        let now = Instant::now();
        let took = now.duration_since(std::mem::replace(&mut self.0, now));
        took.as_micros() as u64
    }
}
