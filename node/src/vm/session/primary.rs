//! The primary's side of a session, carried out: QEMU, memory, disks and the stream, for core's `replica::sync::primary`.
//!
//! Each step's time is measured here. Not here: the order of the steps, what is waited for (the machine); when to sync, what
//! leaves when (the loop, with core's `trigger` and `gate`).

use super::copies::Copies;
use super::drive::{Driver, drive};
use super::link::SyncLink;
use super::{Broken, hash_all, hash_copy, page_set, threads};
use crate::vm::connect::ConnectError;
use crate::vm::event::{LoopEvent, LoopSender, SyncStep};
use crate::vm::fault_at::Line;
use crate::vm::machine::Machine;
use bytes::Bytes;
use crossbeam_channel::Receiver;
use dunlin_api::SyncFigures;
use dunlin_core::policy::Mode;
use dunlin_core::replica::sync::primary::{self, Counts, Effect, Report, Setup, Word};
use dunlin_core::replica::sync::{Answer, Event, Point, SessionError};
use dunlin_core::sync::compare::{BLOCK_BYTES, BLOCKS_PER_PAGE, Compare, DivergentPage, PAGE_BYTES};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::units::{Epoch, Term};
use dunlin_core::waits::Wait;
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_fabric::link::Stream;
use dunlin_guest::qemu::QmpError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a session needs.
pub struct Primary {
    /// The loop's name for this session.
    pub session: u64,
    /// The VM.
    pub machine: Arc<Machine>,
    /// The stream to the backup.
    pub link: SyncLink,
    /// The loop's words.
    pub words: Receiver<Word>,
    /// Reports.
    pub to_loop: LoopSender,
    /// Opens a stream to the backup for a disk's mirror.
    pub connect_mirror: Box<dyn Fn(usize) -> Result<Stream, ConnectError> + Send>,
    /// How the session compares: as the VM's file says, if the backup's build knows it.
    pub compare: Compare,
    /// Whether every sync is followed by a hash of all memory on both sides.
    pub audit: bool,
    /// Memory of the backup for staging, which is the measure for what a sync may take here.
    pub staging_bytes: usize,
}

/// A session's primary at work.
struct Worker {
    its: Primary,
    term: Term,
    copies: Copies,
    capture: Capture,
    figures: SyncFigures,
    lap: Lap,
    /// When the last sync began, and when the VM was to be stopped in this one.
    last_sync: Instant,
    stopping: Instant,
    /// QEMU did not answer what this sync wanted of it last.
    unanswered: bool,
    /// A join, and when its backup was last told that disks are still copied.
    said: Instant,
}

/// What was taken of the VM while it stood.
#[derive(Default)]
struct Capture {
    /// Pages copied aside.
    pages: Bytes,
    device_state: Bytes,
    audit: Option<u128>,
}

/// How often a backup whose disks are being copied hears that they still are: it waits for pages.
const STILL_COPIES: Duration = Duration::from_secs(1);
/// A backup is not dropped because QEMU, told in time to let the VM run on, says so a moment late.
const LEAST_FOR_CONT: Duration = Duration::from_millis(100);
/// Pages in one message: 1 MiB.
const PAGES_PER_MESSAGE: usize = 256;

impl Primary {
    /// Runs until the session breaks or the loop drops its words; `active`: the backup's VM runs after the join.
    pub fn run(self, term: Term, active: bool) {
        let mut machine = primary::Primary::new(Setup {
            term,
            pages: self.machine.qemu.memory().pages() as u32,
            active,
            compare: self.compare,
            audit: self.audit,
            staging_bytes: self.staging_bytes,
        });
        let now = Instant::now();
        let mut worker = Worker {
            its: self,
            term,
            copies: Copies::default(),
            capture: Capture::default(),
            figures: SyncFigures::default(),
            lap: Lap(now),
            last_sync: now,
            stopping: now,
            unanswered: false,
            said: now,
        };
        drive(&mut machine, &mut worker);
    }
}

impl Driver<primary::Primary> for Worker {
    fn notice(&mut self, event: &Event<Word>) {
        match event {
            Event::Word(Word::Sync(_)) => {
                let now = Instant::now();
                let before = std::mem::replace(&mut self.last_sync, now);
                self.lap = Lap(now);
                self.figures = SyncFigures {
                    interval_us: now.duration_since(before).as_micros() as u64,
                    ..SyncFigures::default()
                };
            }
            Event::Answer(Answer::Hashed(_)) => self.figures.hash_us = self.lap.us(),
            _ => {}
        }
    }

    fn carry_out(&mut self, effect: Effect) -> Result<Option<Answer>, Broken> {
        match effect {
            Effect::Send(message) => self.its.link.send(&message)?,
            Effect::CopyDisks => {
                self.copy_disks()?;
                return Ok(Some(Answer::DisksCopied));
            }
            Effect::MapMemory => {
                let populated = self.its.machine.qemu.memory().populated();
                let populated =
                    populated.map_err(|error| Broken::new("reading the guest's memory map", error))?;
                return Ok(Some(Answer::Mapped(page_set(&populated))));
            }
            Effect::Scan => {
                let pages = self.scan()?;
                self.figures.scan_us = self.lap.us();
                return Ok(Some(Answer::Scanned(pages)));
            }
            Effect::HashPages(pages) => {
                let list: Vec<u64> = pages.pages().map(u64::from).collect();
                let hashes = self.its.machine.qemu.memory().hash_pages(&list, threads());
                return Ok(Some(Answer::PagesHashed(hashes)));
            }
            Effect::SendPages(pages) => {
                self.send_pages(&pages)?;
            }
            Effect::SendZeros(pages) => self.send_zeros(&pages)?,
            Effect::Progress { sent, total } => {
                let bytes = |pages: usize| (pages * PAGE_BYTES) as u64;
                self.report_copied("memory to the backup", bytes(sent), bytes(total));
            }
            Effect::Stop => self.stop()?,
            Effect::Save { firmware } => self.save(firmware)?,
            Effect::MarkDisks(epoch) => {
                self.its.machine.disks.mark(epoch)?;
                self.figures.scan_us += self.lap.us();
            }
            Effect::Copy(pages) => {
                self.capture.pages = self.copies.copy(self.its.machine.qemu.memory(), &pages);
                self.figures.copy_us = self.lap.us();
            }
            Effect::Audit => {
                self.capture.audit = Some(hash_all(self.its.machine.qemu.memory()));
                self.figures.copy_us += self.lap.us();
            }
            Effect::Resume => {
                let resumed = self.cont(self.left_for(Wait::VmResumes).max(LEAST_FOR_CONT));
                self.unanswered = resumed.as_ref().is_err_and(is_unanswered);
                resumed.map_err(|error| Broken::new("resuming the VM", error))?;
                return Ok(Some(Answer::Resumed));
            }
            Effect::RunOn => self.run_on()?,
            Effect::Hash => return Ok(Some(Answer::Hashed(hash_copy(&self.capture.pages)))),
            Effect::SendDeltas {
                epoch,
                pages,
                differing,
            } => {
                let bytes = self.send_deltas(epoch, &pages, &differing)?;
                return Ok(Some(Answer::DeltasSent { bytes }));
            }
            Effect::SendState {
                epoch,
                next,
                connections,
            } => {
                self.send_state(epoch, next, connections)?;
                let mirrored = self.mirrored();
                return Ok(Some(Answer::StateSent { mirrored }));
            }
            Effect::Report(report) => self.report(report),
            Effect::Pass(point) => self.pass(point),
            Effect::End { why, broken } => self.end(why, broken),
        }
        Ok(None)
    }

    fn link(&self) -> &SyncLink {
        &self.its.link
    }

    fn words(&self) -> &Receiver<Word> {
        &self.its.words
    }

    fn mirrored(&self) -> u64 {
        self.its.machine.disks.mirrored()
    }
}

impl Worker {
    fn copy_disks(&mut self) -> Result<(), Broken> {
        let its = &self.its;
        let said = &mut self.said;
        let copied = |done, total| {
            its.report_copied("disk to the backup", done, total);
            if said.elapsed() > STILL_COPIES {
                *said = Instant::now();
                // That the stream is broken is seen by whoever uses it next.
                let _ = its.link.send(&SyncMessage::Pages(Vec::new()));
            }
        };
        its.machine
            .disks
            .join(self.term, &its.link.waiting, &its.connect_mirror, copied)
    }

    fn scan(&self) -> Result<PageSet, Broken> {
        let dirty = self.its.machine.qemu.memory().scan_dirty();
        dirty
            .map(|dirty| page_set(&dirty))
            .map_err(|error| Broken::new("reading the dirty pages", error))
    }

    fn send_pages(&mut self, pages: &PageSet) -> Result<(), Broken> {
        let copy = self.copies.copy(self.its.machine.qemu.memory(), pages);
        let of = |(i, page): (usize, u32)| whole(page, copy.slice(i * PAGE_BYTES..(i + 1) * PAGE_BYTES));
        let whole = pages.pages().enumerate().map(of).collect();
        self.its.link.send(&SyncMessage::Pages(whole))?;
        self.copies.take_back(copy);
        Ok(())
    }

    /// A page that the guest has never used is made by whoever reads it.
    fn send_zeros(&self, pages: &PageSet) -> Result<(), Broken> {
        let zeros = |page| whole(page, Bytes::from_static(&[0; PAGE_BYTES]));
        let whole = pages.pages().map(zeros).collect();
        self.its.link.send(&SyncMessage::Pages(whole))?;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), Broken> {
        let machine = &self.its.machine;
        self.figures.wait_us = self.lap.us();
        self.stopping = Instant::now();
        // A write that is slowed down, because the backup's buffers fill, would keep the VM from stopping.
        machine.disks.expedite(true);
        let bound = self.left_for(Wait::VmStops);
        let stopped = self
            .its
            .link
            .waiting
            .during(Wait::VmStops, || machine.qemu.stop_within(bound));
        machine.disks.expedite(false);
        self.unanswered = stopped.as_ref().is_err_and(is_unanswered);
        stopped.map_err(|error| Broken::new("stopping the VM", error))?;
        machine.fault_at.pass(Line::PrimaryStopped);
        self.figures.stop_us = self.lap.us();
        Ok(())
    }

    fn save(&mut self, firmware: bool) -> Result<(), Broken> {
        let qemu = &self.its.machine.qemu;
        let waiting = &self.its.link.waiting;
        let bound = self.left_for(Wait::DevicesSave);
        let saved = waiting.during(Wait::DevicesSave, || qemu.save_state_within(firmware, bound));
        self.unanswered = saved.as_ref().is_err_and(is_unanswered);
        let saved = saved.map_err(|error| Broken::new("saving the devices' state", error))?;
        self.figures.save_us = self.lap.us();
        self.figures.device_bytes = saved.len() as u64;
        self.capture.device_state = saved.into();
        Ok(())
    }

    /// How long a step may take while the VM stands: all of them together have a bound, too. (The machine sees to it where nobody
    /// waits for QEMU.)
    fn left_for(&self, wait: Wait) -> Duration {
        if self.its.audit {
            return wait.bound();
        }
        let left = Wait::VmStands.bound().saturating_sub(self.stopping.elapsed());
        wait.bound().min(left)
    }

    fn cont(&self, bound: Duration) -> Result<(), QmpError> {
        let qemu = &self.its.machine.qemu;
        let waiting = &self.its.link.waiting;
        waiting.during(Wait::VmResumes, || qemu.cont_within(bound))
    }

    fn stood_us(&self) -> u64 {
        self.stopping.elapsed().as_micros() as u64
    }

    fn run_on(&self) -> Result<(), Broken> {
        let done = self.cont(Wait::VmResumes.bound());
        let step = SyncStep::RanOn {
            stood_us: self.stood_us(),
        };
        let session = self.its.session;
        self.its.to_loop.send(LoopEvent::PrimarySync { session, step });
        match done {
            Ok(()) => Ok(()),
            // It has been told, and obeys when it can.
            Err(QmpError::Timeout(..)) => {
                tracing::warn!("QEMU is slow to resume the VM after a broken sync");
                if self.unanswered {
                    // Before the session's end: there is a backup as long as the loop has not heard of that.
                    self.its.to_loop.send(LoopEvent::QemuSilent { session });
                }
                Ok(())
            }
            Err(error) => Err(Broken(error.to_string())),
        }
    }

    /// Sends the differing blocks out of the copy; returns their bytes.
    fn send_deltas(
        &mut self,
        epoch: Epoch,
        pages: &PageSet,
        differing: &[DivergentPage],
    ) -> Result<u64, Broken> {
        let copy = std::mem::take(&mut self.capture.pages);
        let mut positions = pages.pages().enumerate();
        let mut bytes = 0;
        for chunk in differing.chunks(PAGES_PER_MESSAGE) {
            let mut deltas = Vec::with_capacity(chunk.len());
            for &at in chunk {
                let (position, _) = positions
                    .find(|(_, page)| *page == at.page)
                    .expect("divergent pages are pages of the copy, in its order");
                let page = copy.slice(position * PAGE_BYTES..(position + 1) * PAGE_BYTES);
                deltas.push(PageDelta {
                    at,
                    bytes: blocks_of(&page, at.blocks),
                });
            }
            bytes += deltas.iter().map(|delta| delta.bytes.len() as u64).sum::<u64>();
            self.its.link.send(&SyncMessage::Delta { epoch, deltas })?;
        }
        self.copies.take_back(copy);
        Ok(bytes)
    }

    fn send_state(&mut self, epoch: Epoch, next: Mode, connections: Bytes) -> Result<(), Broken> {
        let link = &self.its.link;
        let (first, device_state) = parts::bytes(std::mem::take(&mut self.capture.device_state));
        for part in first {
            link.send(&SyncMessage::DeviceState { epoch, part })?;
        }
        let (first, connections) = parts::bytes(connections);
        for part in first {
            link.send(&SyncMessage::Connections { epoch, part })?;
        }
        link.send(&SyncMessage::State {
            epoch,
            next,
            connections,
            device_state,
        })?;
        // Before the acknowledgement: a backup that has acknowledged needs nothing more of us.
        match self.capture.audit.take() {
            Some(hash) => link.send(&SyncMessage::Audit { epoch, hash }),
            None => Ok(()),
        }
    }

    fn report(&mut self, report: Report) {
        let its = &self.its;
        let session = its.session;
        let step = match report {
            Report::Held { pages, equal } => {
                let told = LoopEvent::HeldCompared {
                    session,
                    pages,
                    equal,
                };
                return its.to_loop.send(told);
            }
            Report::Copied => return its.to_loop.send(LoopEvent::JoinNearlyDone { session }),
            Report::VmStands { why } => return its.to_loop.send(LoopEvent::VmStands { session, why }),
            Report::PreCopied => SyncStep::WorkedAhead,
            Report::Stopped => SyncStep::Stopped,
            Report::Resumed => {
                self.figures.cont_us = self.lap.us();
                self.figures.pause_us = self.stood_us();
                SyncStep::Resumed {
                    stood_us: self.figures.pause_us,
                }
            }
            Report::Acknowledged {
                epoch,
                joining,
                counts,
            } => {
                self.figures.total_us = self.last_sync.elapsed().as_micros() as u64;
                SyncStep::Acknowledged {
                    epoch,
                    joining,
                    figures: with_counts(std::mem::take(&mut self.figures), &counts),
                }
            }
            Report::Loaded { epoch, load_us } => SyncStep::Loaded { epoch, load_us },
        };
        its.to_loop.send(LoopEvent::PrimarySync { session, step });
    }

    fn pass(&self, point: Point) {
        let fault_at = &self.its.machine.fault_at;
        match point {
            Point::SwitchoverBegins => fault_at.pass(Line::PrimarySwitchesOver),
            Point::Captured => fault_at.pass(Line::PrimaryCaptured),
            Point::ModeChanges => fault_at.pass(Line::PrimaryChangesOver),
            // The loop dies of it when it has let out what may leave.
            Point::Released if fault_at.is_deadly(Line::PrimaryReleased) => std::thread::park(),
            Point::Released | Point::BackupStops | Point::Acknowledged => {}
        }
    }

    fn end(&self, why: SessionError, broken: bool) {
        // What the backup said before it closed the stream is the reason; that it is closed is not.
        let told = broken.then(|| self.its.link.last_words()).flatten();
        self.its.to_loop.send(LoopEvent::SessionEnded {
            session: self.its.session,
            why: told.unwrap_or_else(|| why.to_string()),
            torn: false,
        });
    }

    fn report_copied(&self, what: &'static str, done: u64, total: u64) {
        self.its.report_copied(what, done, total);
    }
}

impl Primary {
    fn report_copied(&self, what: &'static str, done: u64, total: u64) {
        self.to_loop.send(LoopEvent::JoinProgress {
            session: self.session,
            what,
            done,
            total,
        });
    }
}

/// Whether QEMU said nothing at all.
fn is_unanswered(error: &QmpError) -> bool {
    matches!(error, QmpError::Timeout(..) | QmpError::NotTold(..))
}

/// A page in all its blocks.
fn whole(page: u32, bytes: Bytes) -> PageDelta {
    let at = DivergentPage {
        page,
        blocks: u16::MAX,
    };
    PageDelta { at, bytes }
}

fn with_counts(figures: SyncFigures, counts: &Counts) -> SyncFigures {
    let [dirty_primary, dirty_backup, united, divergent] = counts.pages;
    let (tree_hashes, tree_rounds) = counts.tree;
    SyncFigures {
        dirty_primary,
        dirty_backup,
        united,
        divergent,
        pre_copied: counts.pre_copied,
        bytes: counts.bytes,
        list_hashes: counts.list_hashes,
        tree_hashes,
        tree_rounds,
        ..figures
    }
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

/// Times consecutive steps.
struct Lap(Instant);

impl Lap {
    fn us(&mut self) -> u64 {
        let now = Instant::now();
        let took = now.duration_since(std::mem::replace(&mut self.0, now));
        took.as_micros() as u64
    }
}
