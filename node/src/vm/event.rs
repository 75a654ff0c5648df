//! Everything that can happen to a VM loop besides readable descriptors: one closed list.

use crate::vm::connect::ConnectError;
use crate::vm::machine::{MachineError, Started};
use crate::vm::program::error::{CarryError, PrepareError, VisitError};
use crate::vm::program::told::{Brought, Found, JoinStep, Visited};
use crate::vm::session::reader::Lent;
use crate::vm::state::cold::Inquest;
use crate::vm::state::ending::AskGuestError;
use crate::vm::verification::Compared;
use bytes::Bytes;
use crossbeam_channel::{Sender, unbounded};
use dunlin_api::{Answer, SyncFigures};
use dunlin_core::agreed::{Frame, Hosts};
use dunlin_core::policy::{Mode, Policy};
use dunlin_core::replica::sync::SessionError;
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_fabric::link::{Hello, Stream};
use dunlin_guest::disk::{DiskEvent, Fault};
use dunlin_program::copy::Copy;
use rustix::event::{EventfdFlags, eventfd};
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// What happened.
pub enum LoopEvent {
    /// Another host connected.
    Accepted(Hello, Stream),
    /// We connected to a peer's log.
    LogLink(ReplicaId, Stream),
    /// A person wants something.
    Command(Command, Sender<Answer>),
    /// The daemon ends.
    Shutdown,
    /// QEMU was started, or not.
    MachineStarted {
        /// Which start.
        session: u64,
        /// The machine, and for a backup its port for states.
        result: Result<Started, MachineError>,
    },
    /// The primary connected a stream for syncs, or could not.
    SessionConnected {
        /// Which session.
        session: u64,
        /// The stream.
        result: Result<Stream, ConnectError>,
    },
    /// Progress of a join.
    JoinProgress {
        /// Which session.
        session: u64,
        /// Of what.
        what: &'static str,
        /// Bytes so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A join: so many of the pages that the backup's host holds of an earlier copy are not sent.
    HeldCompared {
        /// Which session.
        session: u64,
        /// What it holds.
        pages: usize,
        /// How many of them are equal here.
        equal: usize,
    },
    /// The rounds of a join are over: the last sync may come.
    JoinNearlyDone {
        /// Which session.
        session: u64,
    },
    /// The primary's session got on with a sync.
    PrimarySync {
        /// Which session.
        session: u64,
        /// How far.
        step: SyncStep,
    },
    /// The backup's session got on with a sync.
    BackupSync {
        /// Which session.
        session: u64,
        /// How far.
        step: BackupStep,
    },
    /// The backup's VM has sent frames.
    BackupSaid {
        /// Which session.
        session: u64,
        /// In which epoch.
        epoch: Epoch,
        /// What.
        frames: Vec<Frame>,
    },
    /// The backup says that it has nothing to do.
    BackupIdle {
        /// Which session.
        session: u64,
        /// The newest entry that its VM got.
        applied: Index,
    },
    /// Something happened to a disk.
    Disk {
        /// Which, in the order of the configuration.
        number: usize,
        /// What.
        event: DiskEvent,
    },
    /// A session's thread has ended.
    SessionEnded {
        /// Which session.
        session: u64,
        /// Why.
        why: String,
        /// A backup's: a sync was applied to the copy here by half.
        torn: bool,
    },
    /// A session's thread cannot let the VM run on that it has stopped.
    VmStands {
        /// Which session.
        session: u64,
        /// Why.
        why: String,
    },
    /// QEMU has answered neither the primary's session that wanted a sync of it, nor the word that its VM is to run on.
    QemuSilent {
        /// Which session.
        session: u64,
    },
    /// The primary says that it leads in this term, and that the session goes on.
    SessionTerm {
        /// Which session.
        session: u64,
        /// The term.
        term: Term,
    },
    /// Tests only: a fault that was asked for has come.
    Fault(String),
    /// What the backup says next is for the loop: it reads the stream itself until something else comes.
    StreamLent {
        /// Which session.
        session: u64,
        /// The stream.
        stream: Lent,
    },
    /// A disk of this backup cannot take its primary's mirror.
    CannotFollow {
        /// Which session.
        session: u64,
        /// Why not.
        why: String,
    },
    /// The last part of a machine that had ended here is gone.
    NothingRemains,
    /// A session's stream has ended; its thread may be busy still.
    SessionStreamEnded {
        /// Which session.
        session: u64,
    },
    /// What this host's disks and the other hosts said of a VM that nobody leads.
    Inquest(Inquest),
    /// How new the images of a bare program's data are.
    ProgramImages(Found),
    /// A bare program's namespaces are there, or not.
    ProgramPrepared(Result<Box<Copy>, PrepareError>),
    /// A running program is copied to the other host.
    ProgramJoin {
        /// Which session.
        session: u64,
        /// How far.
        step: JoinStep,
    },
    /// A copy of a running program was brought here, or was not.
    ProgramBrought {
        /// Which session.
        session: u64,
        /// It.
        result: Result<Box<Brought>, CarryError>,
    },
    /// A comparison of the disks has ended.
    Verified {
        /// What it found.
        compared: Compared,
        /// It was the schedule's.
        scheduled: bool,
    },
    /// A person wants to run this in the copy of a bare program here.
    Visit(Vec<String>, Sender<Result<Box<Visited>, VisitError>>),
    /// The VM's end is agreed, and every other host that can be reached was told; those that cannot let go of it yet, in their words.
    EndTold(Vec<String>),
    /// Hosts that have no part in the VM's group any more, and know it.
    GoneTold(Vec<ReplicaId>),
    /// The guest of a VM that is to be ended was asked to switch itself off, or could not be.
    GuestAsked(Result<(), AskGuestError>),
    /// The backup's VM is an ordinary VM now, or is lost.
    TookOver {
        /// Which session.
        session: u64,
        /// Why not.
        result: Result<(), SessionError>,
    },
}

/// How far the primary's sync is.
pub enum SyncStep {
    /// What could be done while the VM ran is done: the sync may be agreed.
    WorkedAhead,
    /// The VM stands: draw the line between the epochs' frames, and say so.
    Stopped,
    /// The VM runs on, or is left to the backup.
    Resumed {
        /// It stood so long.
        stood_us: u64,
    },
    /// The sync is broken off, and QEMU was told to let the VM run on.
    RanOn {
        /// It stood so long.
        stood_us: u64,
    },
    /// The backup holds all of it.
    Acknowledged {
        /// The epoch that ended.
        epoch: Epoch,
        /// It was the last sync of a join.
        joining: bool,
        /// What it took.
        figures: SyncFigures,
    },
    /// The backup has applied it.
    Loaded {
        /// The epoch that ended.
        epoch: Epoch,
        /// How long that took.
        load_us: u64,
    },
}

/// How far the backup's sync is.
pub enum BackupStep {
    /// It is here, whole: may it be acknowledged? Draw the line, and say so.
    Staged {
        /// The epoch that ended.
        epoch: Epoch,
        /// How the copies are kept from now on.
        next: Mode,
        /// The connections that do not speak the VM's own numbers.
        connections: Bytes,
    },
    /// A part of what the connections need has come ahead of its sync. The session's thread waits until the loop has let go of `taken`.
    ConnectionsAhead {
        /// The running epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
        /// Dropped when the part is taken.
        taken: Sender<Infallible>,
    },
    /// It is applied; the VM runs on.
    Loaded {
        /// The epoch that ended.
        epoch: Epoch,
        /// It was the last sync of a join.
        joining: bool,
    },
}

/// What a person wants of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Hand over to the backup.
    Failover,
    /// Replicate the VM in another way.
    Policy(Policy),
    /// Look for a backup now.
    Protect,
    /// Serve without the others, who are dead.
    ProtectAlone {
        /// The VM is to boot from this host's disk.
        from_disk: bool,
        /// Even if another host's is known to be newer.
        force_stale: bool,
    },
    /// Say what this host holds of the VM.
    Standing,
    /// Compare the images of both hosts; progress comes before the answer.
    VerifyDisk {
        /// Send again what differs.
        repair: bool,
    },
    /// Tests only: a disk of this host misbehaves.
    Inject {
        /// Which.
        disk: usize,
        /// How.
        fault: Fault,
    },
    /// Shut down everywhere.
    Down {
        /// Do not wait for the guest.
        now: bool,
    },
    /// Forget the VM on this host alone, though nobody agrees to it.
    ForceDown,
    /// The group has forgotten this VM.
    Remove,
    /// The group is to go on without this member, whose machine is gone for good.
    RemoveMember(ReplicaId),
    /// The group is to go on without this member, and with that list of hosts.
    Move {
        /// Who leaves.
        leaves: ReplicaId,
        /// The hosts from then on.
        hosts: Hosts,
        /// Though it is the backup, and well.
        unprotected_meanwhile: bool,
    },
    /// The group is to go on with that list of hosts, which differs in who is the standby.
    Standby(Hosts),
    /// The list with this newest number has no part for this host.
    Left {
        /// The newest number in it.
        newest: u8,
    },
}

/// What the backup's words may take on their way to the loop. All else that is sent to it is little: each of its senders
/// waits for an answer, or for the loop's next word, before it sends more.
pub const WORDS_BYTES: usize = 16 << 20;
/// Events that wait beyond which news of progress is left out: the next one says more.
const MOST_EVENTS: usize = 4096;

impl LoopEvent {
    /// Whether a later one of its kind says all that it says.
    fn is_superseded(&self) -> bool {
        matches!(
            self,
            Self::JoinProgress { .. }
                | Self::BackupIdle { .. }
                | Self::Disk {
                    event: DiskEvent::CopyProgress { .. },
                    ..
                }
        )
    }
}

#[derive(Default)]
struct Words {
    bytes: AtomicUsize,
    /// Frames that found no room: in all, and of these the ones that the loop was not told of.
    dropped: AtomicU64,
    untold: AtomicU64,
}

/// What it takes to have these frames on their way.
pub fn cost(frames: &[Frame]) -> usize {
    frames
        .iter()
        .map(|frame| frame.bytes.len() + size_of::<Frame>())
        .sum()
}

/// Where to send a loop's events. Cheap to clone.
#[derive(Clone)]
pub struct LoopSender {
    sender: Sender<LoopEvent>,
    waker: Arc<OwnedFd>,
    /// It rings already, and the loop has not looked since.
    rung: Arc<AtomicBool>,
    shut_down: Arc<AtomicBool>,
    words: Arc<Words>,
}

impl LoopSender {
    /// A channel whose receiver can be polled: by the waker.
    pub fn channel() -> std::io::Result<(Self, crossbeam_channel::Receiver<LoopEvent>)> {
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, receiver) = unbounded();
        let shut_down = Arc::new(AtomicBool::new(false));
        Ok((
            Self {
                sender,
                waker,
                rung: Arc::default(),
                shut_down,
                words: Arc::default(),
            },
            receiver,
        ))
    }

    /// Sends; a loop that has ended no longer cares.
    pub fn send(&self, event: LoopEvent) {
        if self.sender.len() >= MOST_EVENTS && event.is_superseded() {
            return;
        }
        // What is sent while it rings is seen by the look that ends the ringing.
        if self.sender.send(event).is_ok() && !self.rung.swap(true, Ordering::AcqRel) {
            // A full counter means that the loop is woken already.
            let _ = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes());
        }
    }

    /// What a backup's VM has said, if there is room for it: a primary that misses words releases less, never wrongly.
    pub fn send_words(&self, session: u64, epoch: Epoch, frames: Vec<Frame>) {
        let (cost, count) = (cost(&frames), frames.len() as u64);
        if self.words.bytes.fetch_add(cost, Ordering::AcqRel) + cost > WORDS_BYTES {
            self.words.bytes.fetch_sub(cost, Ordering::AcqRel);
            self.words.dropped.fetch_add(count, Ordering::Relaxed);
            self.words.untold.fetch_add(count, Ordering::Release);
            return;
        }
        self.send(LoopEvent::BackupSaid {
            session,
            epoch,
            frames,
        });
    }

    /// The loop has got these words. How many were dropped since it last asked.
    pub fn words_taken(&self, frames: &[Frame]) -> u64 {
        self.words.bytes.fetch_sub(cost(frames), Ordering::AcqRel);
        self.words.untold.swap(0, Ordering::AcqRel)
    }

    /// What words take on their way, what they may take, and how many frames that has cost.
    #[must_use]
    pub fn words(&self) -> (usize, usize, u64) {
        let words = &self.words;
        let bytes = words.bytes.load(Ordering::Relaxed);
        (bytes, WORDS_BYTES, words.dropped.load(Ordering::Relaxed))
    }

    /// The loop's last word, before nobody receives any more: the VM is shut down everywhere.
    pub fn vm_is_shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
    }

    /// Whether the loop has ended because the VM is shut down everywhere.
    #[must_use]
    pub fn is_vm_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    /// The waker, for poll.
    #[must_use]
    pub fn waker(&self) -> &OwnedFd {
        &self.waker
    }

    /// Stops the ringing; look at the channel afterwards.
    pub fn clear(&self) {
        // Not ringing is as good.
        let _ = rustix::io::read(&*self.waker, &mut [0_u8; 8]);
        // Last: else a ring in between would be taken away, and nobody would ring again.
        self.rung.swap(false, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waker_wakes_once_until_the_loop_looks_and_then_again() {
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        let rings = || {
            let mut count = [0_u8; 8];
            let rung = rustix::io::read(to_loop.waker(), &mut count).is_ok();
            (rung, u64::from_ne_bytes(count))
        };
        for _ in 0..3 {
            to_loop.send(LoopEvent::Shutdown);
            to_loop.send(LoopEvent::Shutdown);
            assert_eq!(rings(), (true, 1), "once for both");
            to_loop.send(LoopEvent::Shutdown);
            assert!(!rings().0, "the loop has not looked yet");
            to_loop.clear();
            assert_eq!(events.try_iter().count(), 3);
        }
    }

    #[test]
    fn news_of_progress_does_not_pile_up_while_the_loop_is_busy() {
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        for applied in 0..3 * MOST_EVENTS as u64 {
            to_loop.send(LoopEvent::BackupIdle {
                session: 1,
                applied: Index(applied),
            });
            to_loop.send(LoopEvent::Disk {
                number: 0,
                event: DiskEvent::CopyProgress {
                    done_bytes: applied,
                    total_bytes: u64::MAX,
                },
            });
        }
        assert_eq!(events.len(), MOST_EVENTS);
        to_loop.send(LoopEvent::Shutdown);
        assert_eq!(
            events.len(),
            MOST_EVENTS + 1,
            "what happens once is never left out"
        );
    }

    #[test]
    fn a_backup_that_talks_faster_than_the_loop_listens_is_cut_short_and_the_loop_hears_of_it() {
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        let frames = || {
            let frame = Frame {
                nic: 0,
                bytes: vec![1; 1000].into(),
            };
            vec![frame; 100]
        };
        let (fit, more) = (WORDS_BYTES / cost(&frames()), 7);
        for _ in 0..fit + more {
            to_loop.send_words(1, Epoch(1), frames());
            assert!(to_loop.words().0 <= WORDS_BYTES, "beyond its budget");
        }
        assert_eq!(events.len(), fit);
        assert_eq!(to_loop.words().2, 100 * more as u64);
        let mut told = 0;
        for event in events.try_iter() {
            let LoopEvent::BackupSaid { frames, .. } = event else {
                panic!("something else was sent");
            };
            told += to_loop.words_taken(&frames);
        }
        assert_eq!((told, to_loop.words().0), (100 * more as u64, 0));
        to_loop.send_words(1, Epoch(1), frames());
        assert_eq!(events.len(), 1, "there is room again");
    }
}
