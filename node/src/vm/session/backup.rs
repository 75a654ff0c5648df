//! The backup's side of a session, carried out: QEMU, memory, disks and the stream, for core's `replica::sync::backup`.
//!
//! Source: stock-QEMU COLO secondary, driven as in docs/guest.md. Not here: the order of the steps, what is waited for (the
//! machine); elections, frames, who may acknowledge (the loop).

use super::copies::Copies;
use super::drive::{Driver, drive};
use super::link::SyncLink;
use super::{Broken, hash_all, hash_copy, page_set, threads};
use crate::vm::event::{BackupStep, LoopEvent, LoopSender};
use crate::vm::fault_at::Line;
use crate::vm::machine::Machine;
use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use dunlin_core::replica::sync::backup::{self, Effect, Report, Setup, Word};
use dunlin_core::replica::sync::{Answer, PAGES_AT_ONCE, Point, UnfitState};
use dunlin_core::sync::compare::BLOCKS_PER_PAGE;
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::{PageDelta, Staged};
use dunlin_core::units::{Epoch, Term};
use dunlin_core::waits::Wait;
use dunlin_core::wire::sync::SyncMessage;
use dunlin_guest::colo::{Colo, ColoPhase};
use std::sync::Arc;
use std::time::Instant;

/// What a session needs.
pub struct Backup {
    /// The loop's name for this session.
    pub session: u64,
    /// The VM, waiting for its state.
    pub machine: Arc<Machine>,
    /// Its port for states.
    pub colo: Option<Colo>,
    /// The stream to the primary.
    pub link: SyncLink,
    /// The loop's words.
    pub words: Receiver<Word>,
    /// Reports.
    pub to_loop: LoopSender,
    /// Memory for copies of its own pages.
    pub copies: Copies,
    /// Memory for staging.
    pub staging_bytes: usize,
    /// Whether the primary sends audits.
    pub audit: bool,
    /// Whether the primary's build is to hear what the memory holds.
    pub says_held: bool,
}

impl Backup {
    /// Runs until the session has ended and its VM is taken over, or given up; `active`: the VM runs after the join.
    pub fn run(mut self, term: Term, active: bool) {
        let mut machine = backup::Backup::new(Setup {
            term,
            pages: self.machine.qemu.memory().pages() as u32,
            active,
            audit: self.audit,
            staging_bytes: self.staging_bytes,
            says_held: self.says_held,
        });
        drive(&mut machine, &mut self);
    }
}

impl Driver<backup::Backup> for Backup {
    fn carry_out(&mut self, effect: Effect) -> Result<Option<Answer>, Broken> {
        match effect {
            Effect::Send(message) => self.link.send(&message)?,
            Effect::Tell(message) => {
                // A primary that is dead now changes nothing.
                let _ = self.link.send(&message);
            }
            Effect::SendHeld { most_pages } => self.send_held(most_pages)?,
            Effect::WritePages(deltas) => self.write(&deltas),
            Effect::Stop => self.stop()?,
            Effect::Scan => return Ok(Some(Answer::Scanned(self.scan()?))),
            Effect::SendHashes { epoch, pages } => self.send_hashes(epoch, &pages)?,
            Effect::Hash(pages) => return Ok(Some(Answer::Hashed(self.hash(&pages)))),
            Effect::CheckState(state) => {
                let fits = self.colo()?.check(&state);
                return Ok(Some(Answer::StateChecked(
                    fits.map_err(|error| UnfitState(error.to_string())),
                )));
            }
            Effect::AwaitMirrors(epoch) => {
                let disks = &self.machine.disks;
                let waiting = &self.link.waiting;
                waiting.during(Wait::DiskMirrors, || disks.wait_marked(epoch))?;
            }
            Effect::Apply { staged, run, audit } => {
                let started = Instant::now();
                self.apply(&staged, run, audit)?;
                let took_us = started.elapsed().as_micros() as u64;
                return Ok(Some(Answer::Applied { took_us }));
            }
            Effect::TakeOverDisks(term) => {
                let disks = &self.machine.disks;
                let waiting = &self.link.waiting;
                waiting.during(Wait::TakesOver, || disks.take_over(term))?;
            }
            Effect::LoadKept(state) => self.load(&state, || Ok(()))?,
            Effect::FailOver => {
                self.fail_over()?;
                return Ok(Some(Answer::TookOver));
            }
            Effect::Report(report) => self.report(report)?,
            Effect::Pass(point) => self.pass(point),
        }
        Ok(None)
    }

    fn link(&self) -> &SyncLink {
        &self.link
    }

    fn words(&self) -> &Receiver<Word> {
        &self.words
    }

    fn mirrored(&self) -> u64 {
        // The primary's figure.
        0
    }
}

impl Backup {
    fn stop(&mut self) -> Result<(), Broken> {
        self.machine.disks.expedite(true);
        let waiting = self.link.waiting.clone();
        let stopped = waiting.during(Wait::ColoAnswers, || {
            let stopped = self.colo()?.request().map(drop);
            stopped.map_err(|error| Broken::new("stopping the backup's VM", error))
        });
        self.machine.disks.expedite(false);
        stopped
    }

    fn scan(&self) -> Result<PageSet, Broken> {
        let dirty = self.machine.qemu.memory().scan_dirty();
        dirty
            .map(|dirty| page_set(&dirty))
            .map_err(|error| Broken::new("reading the dirty pages", error))
    }

    /// Of more than the primary takes nothing is left: it would count as never used.
    fn send_held(&self, most_pages: usize) -> Result<(), Broken> {
        let memory = self.machine.qemu.memory();
        let broken = |error| Broken::new("reading the memory's map", error);
        let held = page_set(&memory.populated().map_err(broken)?);
        let mut room = most_pages;
        for pages in held.parts(PAGES_AT_ONCE) {
            if pages.len() > room {
                room = 0;
                for (first, count) in pages
                    .runs()
                    .map(|(first, count)| (u64::from(first), u64::from(count)))
                {
                    memory.ram().clear(first..first + count).map_err(broken)?;
                }
                continue;
            }
            room -= pages.len();
            let list: Vec<u64> = pages.pages().map(u64::from).collect();
            let hashes = memory.hash_pages(&list, threads());
            self.link.send(&SyncMessage::Holds { pages, hashes })?;
        }
        Ok(())
    }

    fn send_hashes(&mut self, epoch: Epoch, pages: &PageSet) -> Result<(), Broken> {
        let hashes = self.hash_part(pages);
        self.link.send(&SyncMessage::Hashes { epoch, hashes })
    }

    /// Part by part: all of it would not be copied at once.
    fn hash(&mut self, pages: &PageSet) -> Vec<u128> {
        let mut hashes = Vec::with_capacity(pages.len() * BLOCKS_PER_PAGE);
        for part in pages.parts(PAGES_AT_ONCE) {
            hashes.extend(self.hash_part(&part));
        }
        hashes
    }

    fn hash_part(&mut self, pages: &PageSet) -> Vec<u128> {
        let copy = self.copies.copy(self.machine.qemu.memory(), pages);
        let hashes = hash_copy(&copy);
        self.copies.take_back(copy);
        hashes
    }

    fn write(&self, deltas: &[PageDelta]) {
        let memory = self.machine.qemu.memory();
        for delta in deltas {
            memory.write_blocks(u64::from(delta.at.page), delta.at.blocks, &delta.bytes);
        }
    }

    fn apply(&mut self, staged: &Staged, run: bool, audit: Option<u128>) -> Result<(), Broken> {
        let machine = Arc::clone(&self.machine);
        machine.disks.commit(staged.epoch)?;
        let memory = machine.qemu.memory();
        let write = || -> std::io::Result<()> {
            for delta in &staged.deltas {
                memory.write_blocks(u64::from(delta.at.page), delta.at.blocks, &delta.bytes);
            }
            // Also what a reset on the way to the load has written is the same on both sides now: what the VM writes from here on
            // is the next sync's.
            memory.scan_dirty().map(drop)?;
            machine.fault_at.pass(Line::BackupHalfApplied);
            if machine.fault_at.fails(Line::BackupHalfApplied) {
                return Err(std::io::Error::other("a fault was asked for"));
            }
            match audit {
                Some(expected) if hash_all(memory) != expected => Err(std::io::Error::other(
                    "audit: the two memories differ after the sync",
                )),
                _ => Ok(()),
            }
        };
        if run {
            return self.load(&staged.device_state, write);
        }
        let taken = self.colo()?.take_in(&staged.device_state);
        taken.map_err(|error| Broken::new("the state for the backup's VM", error))?;
        write().map_err(|error| Broken::new("writing the backup's memory", error))
    }

    /// Lets the VM run on from a state: its first, or the next one.
    fn load(&mut self, state: &[u8], write: impl FnOnce() -> std::io::Result<()>) -> Result<(), Broken> {
        let waiting = self.link.waiting.clone();
        waiting.during(Wait::ColoAnswers, || self.load_now(state, write))
    }

    fn load_now(&mut self, state: &[u8], write: impl FnOnce() -> std::io::Result<()>) -> Result<(), Broken> {
        let broken = |error| Broken::new("loading the state into the backup's VM", error);
        let colo = self.colo()?;
        if colo.phase() == ColoPhase::Empty {
            write().map_err(|error| Broken::new("writing the backup's memory", error))?;
            colo.enable(state).map_err(broken)
        } else {
            colo.load(state, write).map_err(broken)
        }
    }

    fn report(&self, report: Report) -> Result<(), Broken> {
        let session = self.session;
        let step = match report {
            Report::Staged {
                epoch,
                next,
                connections,
            } => BackupStep::Staged {
                epoch,
                next,
                connections,
            },
            Report::ConnectionsAhead { epoch, part } => return self.hand_ahead(epoch, part),
            Report::Loaded { epoch, joining } => BackupStep::Loaded { epoch, joining },
            Report::TookOver(result) => {
                self.to_loop.send(LoopEvent::TookOver { session, result });
                return Ok(());
            }
            Report::Ended { why, torn } => {
                let why = why.to_string();
                self.to_loop.send(LoopEvent::SessionEnded { session, why, torn });
                return Ok(());
            }
        };
        self.to_loop.send(LoopEvent::BackupSync { session, step });
        Ok(())
    }

    /// One part is with the loop at a time: a primary that sends faster than the loop takes has to wait for its stream.
    fn hand_ahead(&self, epoch: Epoch, part: Bytes) -> Result<(), Broken> {
        let (taken, until_taken) = bounded(0);
        let step = BackupStep::ConnectionsAhead { epoch, part, taken };
        let session = self.session;
        self.to_loop.send(LoopEvent::BackupSync { session, step });
        let wait = Wait::AheadTaken;
        let waiting = &self.link.waiting;
        match waiting.during(wait, || until_taken.recv_timeout(wait.bound())) {
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(Broken(wait.said())),
        }
    }

    fn pass(&self, point: Point) {
        let fault_at = &self.machine.fault_at;
        match point {
            Point::BackupStops => fault_at.pass(Line::BackupStops),
            Point::Acknowledged => fault_at.pass(Line::BackupAcknowledged),
            Point::ModeChanges => fault_at.pass(Line::BackupChangesOver),
            Point::SwitchoverBegins | Point::Captured | Point::Released => {}
        }
    }

    /// Makes the VM an ordinary, running one.
    fn fail_over(&mut self) -> Result<(), Broken> {
        if matches!(self.colo()?.phase(), ColoPhase::Empty | ColoPhase::Broken) {
            return Err(Broken("the backup's VM is not whole".into()));
        }
        let colo = self.colo.take();
        let waiting = self.link.waiting.clone();
        let failed_over = waiting.during(Wait::TakesOver, || colo.map_or(Ok(()), Colo::failover));
        failed_over.map_err(|error| Broken::new("taking the VM over", error))
    }

    fn colo(&mut self) -> Result<&mut Colo, Broken> {
        self.colo
            .as_mut()
            .ok_or_else(|| Broken("the VM was taken over already".into()))
    }
}
