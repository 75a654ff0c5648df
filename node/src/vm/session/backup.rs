//! The backup's side of a session: receives the join, then stages and applies one sync after the other.
//!
//! Invariants:
//! 1. The VM is untouched until a sync is staged whole; a sync that breaks before that is dropped whole.
//! 2. A sync that was acknowledged is applied, whatever happens to the primary afterwards.
//! 3. The dirty bits are cleared before the VM runs on: what it writes from then on is the next sync's.
//! 4. What was staged ahead of a page counts only if no later round looks at the page.
//! 5. From the first byte that an acknowledged sync changes until the VM's state is loaded whole the copy is *torn*: if that
//!    fails, it is nobody's VM any more.
//!
//! Source: stock-QEMU COLO secondary, driven as in docs/guest.md. Not here: elections, frames (the loop).

use super::link::SyncLink;
use super::primary::unexpected;
use super::{Broken, PAGES_AT_ONCE, copy_out, hash_all, hash_copy, page_set};
use crate::vm::Line;
use crate::vm::event::{BackupStep, LoopEvent, LoopSender};
use crate::vm::machine::Machine;
use bytes::Bytes;
use crossbeam_channel::{Receiver, select};
use dunlin_core::policy::Manner;
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::{PageDelta, Staged, Staging};
use dunlin_core::units::{Epoch, Term};
use dunlin_core::waits::Wait;
use dunlin_core::wire::sync::SyncMessage;
use dunlin_core::wire::sync::parts::Gathering;
use dunlin_guest::colo::{Colo, ColoPhase};
use std::sync::Arc;
use std::time::Instant;

/// What the loop asks of the session.
#[derive(Debug)]
pub enum BackupJob {
    /// The log says that `epoch` ends, and all inputs before that are with the VM.
    Stop {
        /// The epoch.
        epoch: Epoch,
    },
    /// The loop has taken the VM's last frames of the epoch: it may run on.
    LineDrawn,
    /// The sync that is here whole is not to be acknowledged: its primary's term is over. It is dropped whole.
    Drop,
    /// This host leads in this term: make the VM a primary's.
    TakeOver(Term),
}

/// What a session needs.
pub struct Backup {
    /// The loop's name for this session.
    pub session: u64,
    /// The term in which the primary asked.
    pub term: Term,
    /// The VM, waiting for its state.
    pub machine: Arc<Machine>,
    /// Its port for states.
    pub colo: Option<Colo>,
    /// The stream to the primary.
    pub link: SyncLink,
    /// Jobs.
    pub jobs: Receiver<BackupJob>,
    /// Reports.
    pub to_loop: LoopSender,
    /// Whether the VM runs, in this epoch.
    pub active: bool,
    /// Memory for staging.
    pub staging_bytes: usize,
    /// Whether the primary sends audits.
    pub audit: bool,
    /// For a backup that does not run: the newest state, not loaded yet.
    pub unloaded: Option<Bytes>,
    /// What the rounds of the sync under way have sent so far.
    pub staging: Option<Staging>,
    /// Invariant 5.
    pub torn: bool,
}

/// A sync that lies here whole.
struct Whole {
    staged: Staged,
    next: Manner,
    shadow: Bytes,
    /// The hash of all memory that the primary has after this sync, where it is asked for.
    audit: Option<u128>,
}

/// Why the wait for messages ended.
enum Wake {
    Message(SyncMessage),
    Job(BackupJob),
}

impl Backup {
    /// Runs until the session breaks, the VM is taken over, or the loop drops its jobs.
    pub fn run(mut self) {
        let outcome = self.join_and_sync();
        let (session, to_loop) = (self.session, self.to_loop.clone());
        match outcome {
            Ok(()) => {}
            Err(Broken(why)) => {
                let torn = self.torn;
                to_loop.send(LoopEvent::SessionEnded { session, why, torn });
                // The VM is whole, as of the last sync: the loop may still take it over.
                if !torn && let Ok(term) = self.wait_for_take_over() {
                    self.take_over(term);
                }
            }
        }
    }

    /// Until the loop takes it over or drops it.
    #[expect(clippy::disallowed_methods, reason = "nothing else is owed to this thread")]
    fn wait_for_take_over(&self) -> Result<Term, Broken> {
        loop {
            match self.jobs.recv() {
                Ok(BackupJob::TakeOver(term)) => return Ok(term),
                Ok(_) => {}
                Err(_) => return Err(Broken("the VM loop has gone".into())),
            }
        }
    }

    fn wake(&self) -> Result<Wake, Broken> {
        select! {
            recv(self.link.incoming()) -> message => match message {
                Ok(Ok(message)) => Ok(Wake::Message(message)),
                Ok(Err(broken)) => Err(broken),
                Err(_) => Err(Broken("the sync's stream ended".into())),
            },
            recv(self.jobs) -> job => match job {
                Ok(job) => Ok(Wake::Job(job)),
                Err(_) => Err(Broken("the VM loop has gone".into())),
            },
        }
    }

    fn join_and_sync(&mut self) -> Result<(), Broken> {
        self.agree_on_join()?;
        let epoch = self.receive_join()?;
        let staged = self.receive_staged(epoch)?;
        self.acknowledge_and_apply(staged, true)?;
        loop {
            match self.wake()? {
                Wake::Job(BackupJob::Stop { epoch }) if self.active => self.sync_active(epoch)?,
                Wake::Job(BackupJob::Stop { epoch }) => {
                    self.receive_end(epoch)?;
                    self.sync_passive(epoch)?;
                }
                Wake::Job(BackupJob::TakeOver(term)) => {
                    self.take_over(term);
                    return Ok(());
                }
                Wake::Job(BackupJob::LineDrawn | BackupJob::Drop) => {}
                Wake::Message(SyncMessage::Ends { epoch, agreed }) if !self.active => {
                    // What the log says about the epoch's end may still be on its way.
                    let waiting = &self.link.waiting;
                    match agreed
                        .then(|| waiting.for_word(&self.jobs, Wait::EndAgreed))
                        .transpose()?
                    {
                        None => self.sync_passive(epoch)?,
                        Some(BackupJob::Stop { epoch: got }) if got == epoch => {
                            self.sync_passive(epoch)?;
                        }
                        Some(BackupJob::TakeOver(term)) => {
                            self.take_over(term);
                            return Ok(());
                        }
                        Some(other) => return Err(Broken(format!("{other:?} where an epoch ends"))),
                    }
                }
                Wake::Message(SyncMessage::Ahead { epoch, pages, more }) if self.active => {
                    let pages = self.receive_ahead(epoch, pages, more)?;
                    self.compare_ahead(epoch, &pages)?;
                }
                Wake::Message(SyncMessage::Delta { epoch, deltas }) => self.stage(epoch, deltas)?,
                Wake::Message(other) => return Err(unexpected("the next sync", &other)),
            }
        }
    }

    /// Both sides have to speak of the same VM in the same term.
    fn agree_on_join(&self) -> Result<(), Broken> {
        let (term, pages, active) = match self.link.receive(Wait::JoinArrives)? {
            SyncMessage::Join { term, pages, active } => (term, pages, active),
            other => return Err(unexpected("Join", &other)),
        };
        let ours = self.machine.qemu.memory().pages();
        if term != self.term || u64::from(pages) != ours || active != self.active {
            let why = format!(
                "the hosts disagree on the VM: {pages} pages and active {active}, here {ours} and {}",
                self.active
            );
            // Best effort: the primary hears why, or sees the stream end.
            let _ = self.link.send(&SyncMessage::Refused { why: why.clone() });
            return Err(Broken(why));
        }
        self.link.send(&SyncMessage::JoinReady)
    }

    /// Pages straight into the memory of a VM that does not run yet, until the last sync of the join.
    fn receive_join(&self) -> Result<Epoch, Broken> {
        loop {
            match self.link.receive(Wait::JoinArrives)? {
                SyncMessage::Pages(deltas) => self.write(&deltas)?,
                SyncMessage::JoinLast { epoch } => return Ok(epoch),
                other => return Err(unexpected("Pages", &other)),
            }
        }
    }

    fn sync_active(&mut self, epoch: Epoch) -> Result<(), Broken> {
        self.machine.fault_at.pass(Line::BackupStops);
        self.machine.disks.expedite(true);
        let waiting = self.link.waiting.clone();
        let stopped = waiting.during(Wait::ColoAnswers, || Ok::<_, Broken>(self.colo()?.request()))?;
        self.machine.disks.expedite(false);
        stopped.map_err(|error| Broken::new("stopping the backup's VM", error))?;
        let dirty = self.scan()?;
        self.send_dirty(epoch, &dirty)?;
        let union = self.receive_union(epoch)?;
        self.compare(epoch, &union)?;
        let staged = self.receive_staged(epoch)?;
        self.acknowledge_and_apply(staged, false)
    }

    /// The VM here does not run: what the primary has written is all that differs.
    fn sync_passive(&mut self, epoch: Epoch) -> Result<(), Broken> {
        let staged = self.receive_staged(epoch)?;
        self.acknowledge_and_apply(staged, false)
    }

    fn send_dirty(&self, epoch: Epoch, pages: &PageSet) -> Result<(), Broken> {
        self.link
            .send_pages(pages, |pages, more| SyncMessage::Dirty { epoch, pages, more })
    }

    /// The rest of what begins with `pages`, if there is `more`.
    fn receive_ahead(&self, epoch: Epoch, pages: PageSet, more: bool) -> Result<PageSet, Broken> {
        let guest_pages = self.machine.qemu.memory().pages();
        let first = Some((pages, more));
        self.link
            .receive_pages(Wait::SyncArrives, guest_pages, first, |message| match message {
                SyncMessage::Ahead {
                    epoch: got,
                    pages,
                    more,
                } if got == epoch => Ok((pages, more)),
                other => Err(unexpected("Ahead", &other)),
            })
    }

    /// A round while both VMs run.
    fn compare_ahead(&mut self, epoch: Epoch, theirs: &PageSet) -> Result<(), Broken> {
        // What is written after this scan is in the next round.
        let ours = self.scan()?;
        self.send_dirty(epoch, &ours)?;
        self.compare(epoch, &theirs.union(&ours))
    }

    /// Says what these pages hold here; what differs will come, in place of what came before.
    fn compare(&mut self, epoch: Epoch, union: &PageSet) -> Result<(), Broken> {
        self.staging(epoch).look_again(union);
        self.send_hashes(epoch, union)
    }

    fn scan(&self) -> Result<PageSet, Broken> {
        let dirty = self.machine.qemu.memory().scan_dirty();
        dirty
            .map(|dirty| page_set(&dirty))
            .map_err(|error| Broken::new("reading the dirty pages", error))
    }

    /// The pages of the last round; what an earlier one has sent may come before.
    fn receive_union(&mut self, epoch: Epoch) -> Result<PageSet, Broken> {
        let mut gathering = Gathering::new(self.machine.qemu.memory().pages());
        loop {
            match self.link.receive(Wait::SyncArrives)? {
                SyncMessage::Union {
                    epoch: got,
                    pages,
                    more,
                } if got == epoch => {
                    if let Some(union) = gathering.add(pages, more)? {
                        return Ok(union);
                    }
                }
                SyncMessage::Delta { epoch, deltas } => self.stage(epoch, deltas)?,
                other => return Err(unexpected("Union", &other)),
            }
        }
    }

    /// The log has said that the epoch is over; so does the primary.
    fn receive_end(&mut self, epoch: Epoch) -> Result<(), Broken> {
        loop {
            match self.link.receive(Wait::SyncArrives)? {
                SyncMessage::Ends {
                    epoch: got,
                    agreed: true,
                } if got == epoch => return Ok(()),
                SyncMessage::Delta { epoch, deltas } => self.stage(epoch, deltas)?,
                other => return Err(unexpected("Ends", &other)),
            }
        }
    }

    fn send_hashes(&self, epoch: Epoch, union: &PageSet) -> Result<(), Broken> {
        for part in union.parts(PAGES_AT_ONCE) {
            self.link.send(&SyncMessage::Hashes {
                epoch,
                hashes: hash_copy(&copy_out(self.machine.qemu.memory(), &part)),
            })?;
        }
        Ok(())
    }

    /// Where the sync that ends `epoch` is gathered.
    fn staging(&mut self, epoch: Epoch) -> &mut Staging {
        let pages = self.machine.qemu.memory().pages() as u32;
        let limit_bytes = self.staging_bytes;
        self.staging
            .get_or_insert_with(|| Staging::new(epoch, pages, limit_bytes))
    }

    fn stage(&mut self, epoch: Epoch, deltas: Vec<PageDelta>) -> Result<(), Broken> {
        let staged = self.staging(epoch).add(epoch, deltas);
        staged.map_err(|error| self.refuse(&error))
    }

    fn refuse(&self, error: &dyn std::fmt::Display) -> Broken {
        // Best effort: the primary hears why, or sees the stream end.
        let _ = self.link.send(&SyncMessage::Refused {
            why: error.to_string(),
        });
        Broken(error.to_string())
    }

    fn receive_staged(&mut self, epoch: Epoch) -> Result<Whole, Broken> {
        // There is none yet if nothing was written.
        self.staging(epoch);
        loop {
            match self.link.receive(Wait::SyncArrives)? {
                SyncMessage::Delta { epoch, deltas } => self.stage(epoch, deltas)?,
                SyncMessage::DeviceState { epoch, part } => {
                    let staged = self.staging(epoch).add_device_state(epoch, part);
                    staged.map_err(|error| self.refuse(&error))?;
                }
                SyncMessage::State {
                    epoch,
                    next,
                    shadow,
                    device_state,
                } => {
                    let audit = match self.audit {
                        true => Some(self.receive_audit(epoch)?),
                        false => None,
                    };
                    // While nothing has changed and the primary can still be told.
                    let fits = self.colo()?.check(&device_state);
                    fits.map_err(|error| self.refuse(&error))?;
                    let disks = &self.machine.disks;
                    self.link
                        .waiting
                        .during(Wait::DiskMirrors, || disks.wait_marked(epoch))?;
                    let staging = self.staging.take().expect("it was just made");
                    return Ok(Whole {
                        staged: staging
                            .complete(epoch, device_state)
                            .map_err(|error| self.refuse(&error))?,
                        next,
                        shadow,
                        audit,
                    });
                }
                other => return Err(unexpected("Delta or State", &other)),
            }
        }
    }

    fn acknowledge_and_apply(&mut self, whole: Whole, joining: bool) -> Result<(), Broken> {
        let Whole {
            staged,
            next,
            shadow,
            audit,
        } = whole;
        let epoch = staged.epoch;
        // The loop refuses if it has promised a later term to somebody else meanwhile: the old primary must not hear an
        // acknowledgement then.
        self.report(BackupStep::Staged { epoch, next, shadow });
        match self.link.waiting.for_word(&self.jobs, Wait::LeaveGiven)? {
            BackupJob::LineDrawn => {}
            BackupJob::TakeOver(term) => {
                // Elected before the acknowledgement left: this sync is dropped whole (invariant 1).
                self.take_over(term);
                return Err(Broken("taken over in the middle of a sync".into()));
            }
            BackupJob::Drop => return Err(Broken("the primary's term is over".into())),
            BackupJob::Stop { .. } => return Err(Broken("two syncs at once".into())),
        }
        // A primary that is dead now is no reason not to apply: it may have heard us (invariant 2).
        let _ = self.link.send(&SyncMessage::Staged { epoch });
        self.machine.fault_at.pass(Line::BackupAcknowledged);
        if !joining && self.active != next.backup_runs() {
            self.machine.fault_at.pass(Line::BackupChangesOver);
        }
        let started = Instant::now();
        self.torn = true;
        self.apply(staged, next.backup_runs(), audit)?;
        self.torn = false;
        let took_us = started.elapsed().as_micros() as u64;
        self.report(BackupStep::Loaded { epoch, joining });
        let _ = self.link.send(&SyncMessage::Loaded { epoch, took_us });
        Ok(())
    }

    fn receive_audit(&self, epoch: Epoch) -> Result<u128, Broken> {
        match self.link.receive(Wait::SyncArrives)? {
            SyncMessage::Audit { epoch: got, hash } if got == epoch => Ok(hash),
            other => Err(unexpected("Audit", &other)),
        }
    }

    fn apply(&mut self, staged: Staged, runs: bool, audit: Option<u128>) -> Result<(), Broken> {
        let machine = Arc::clone(&self.machine);
        machine.disks.commit(staged.epoch)?;
        let memory = machine.qemu.memory();
        let write = || -> std::io::Result<()> {
            for delta in &staged.deltas {
                memory.write_blocks(u64::from(delta.at.page), delta.at.blocks, &delta.bytes);
            }
            // Invariant 3: also what a reset on the way to the load has written is the same on both sides now.
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
        if runs {
            self.unloaded = None;
            self.load(&staged.device_state, write)?;
        } else {
            let taken = self.colo()?.take_in(&staged.device_state);
            taken.map_err(|error| Broken::new("the state for the backup's VM", error))?;
            write().map_err(|error| Broken::new("writing the backup's memory", error))?;
            self.unloaded = Some(staged.device_state);
        }
        self.active = runs;
        Ok(())
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

    fn write(&self, deltas: &[PageDelta]) -> Result<(), Broken> {
        let memory = self.machine.qemu.memory();
        for delta in deltas {
            if u64::from(delta.at.page) >= memory.pages() {
                return Err(Broken(
                    "the primary names pages outside the guest's memory".into(),
                ));
            }
            memory.write_blocks(u64::from(delta.at.page), delta.at.blocks, &delta.bytes);
        }
        Ok(())
    }

    fn report(&self, step: BackupStep) {
        self.to_loop.send(LoopEvent::BackupSync {
            session: self.session,
            step,
        });
    }

    /// Makes the VM an ordinary, running one.
    fn take_over(&mut self, term: Term) {
        let outcome = self.machine.disks.take_over(term).and_then(|()| self.free_vm());
        let result = outcome.map_err(|Broken(why)| why);
        self.to_loop.send(LoopEvent::TookOver {
            session: self.session,
            result,
        });
    }

    fn free_vm(&mut self) -> Result<(), Broken> {
        if self.torn {
            return Err(Broken("a sync was applied to it by half".into()));
        }
        let broken = |error| Broken::new("taking the VM over", error);
        if let Some(state) = self.unloaded.take() {
            // The memory is that of this state already.
            self.load(&state, || Ok(()))?;
        }
        if matches!(self.colo()?.phase(), ColoPhase::Empty | ColoPhase::Broken) {
            return Err(Broken("the backup's VM is not whole".into()));
        }
        let Some(colo) = self.colo.take() else {
            return Err(Broken("the VM was taken over already".into()));
        };
        colo.failover().map_err(broken)
    }

    fn colo(&mut self) -> Result<&mut Colo, Broken> {
        self.colo
            .as_mut()
            .ok_or_else(|| Broken("the VM was taken over already".into()))
    }
}
