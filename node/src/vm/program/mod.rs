//! A bare program's loop: its part in what `run` is for a VM. One loop for each program on each host of its group.
//!
//! * **Decides:** when the copies begin, who serves, when the second copy counts no more. The order of reading is core's
//!   `program::order`, what may leave and what was said alike core's `output`.
//! * **Flow:** the primary's TAP -> `Agreed::Frames` -> on both hosts, in log order, through the order of reading into the copy's card;
//!   a copy's card -> held on the primary until the backup's copy has said the same, kept on the backup for a take-over.
//! * **Invariants:**
//!   1. Both copies get every agreed input: they begin by the same entry of the log, from nothing, or one is made of the other between
//!      two entries.
//!   2. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//!   3. A backup that is lost, says something else or does not get on is dropped from the complete set by an agreed entry before
//!      outputs leave without it.
//!   4. No input is taken before each copy that counts as complete listens: one that comes earlier would be refused by one and
//!      taken by the other.
//!   5. A program runs once: neither a restarted daemon nor an entry that was in its log before begins it again. What was lost on all
//!      hosts is begun again by a new entry, where it has data or its file says so.
//! * **Source:** APUS (SoCC'17): agree on inputs, compare outputs. docs/programs.md says how this differs.
//! * **Not here:** data that outlives the copies; the namespaces, and how a running program is copied (`dunlin_program`).

mod agreement;
mod backlog;
pub mod carrying;
mod clock;
pub mod copies;
pub mod data;
pub(crate) mod difference;
mod ending;
mod frames;
pub mod images;
mod joined;
mod joining;
mod poison;
mod restart;
mod serving;
mod status;
mod unmatched;

use super::agreement::{Agreement, Election};
use super::connect::Connector;
use super::event::{Command, LoopEvent, LoopSender};
use super::session::link::{Closer, SyncLink};
use super::session::talker::Talker;
use super::{Ended, Host, Shared, StartError, group};
use crate::config::{Durability, ProgramSpec, VmConfig};
use backlog::Backlog;
use crossbeam_channel::{Receiver, Sender};
use dunlin_api::{Answer, EventKind, FailoverStatus};
use dunlin_core::agreed::{AgreedTime, Life};
use dunlin_core::output::Output;
use dunlin_core::output::announcements::Announcements;
use dunlin_core::output::gate::Voice;
use dunlin_core::program::order::Gate;
use dunlin_core::program::pace::Pace;
use dunlin_core::program::time::Clock;
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_fabric::group::KeptGroup;
use dunlin_fabric::link::{Purpose, Stream};
use dunlin_guest::frames::{Announcer, GsoTap};
use dunlin_program::answers::Answers;
use dunlin_program::chance::Seed;
use dunlin_program::copy::Copy;
use dunlin_program::source::Source;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The longest sleep: a bound on what a forgotten deadline could cost.
const LONGEST_SLEEP_US: u64 = 100_000;
/// While a copy begins it is looked at so often.
const BEGINNING_LOOK_US: u64 = 5_000;
/// The status is brought up to date at least this often while something happens.
const SHOW_US: u64 = 20_000;
/// A file in the program's folder: it has run here.
const RAN: &str = "ran";
/// What the copy here prints.
pub const PRINTED: &str = "program.log";

/// This host's part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    None,
    Primary,
    Backup,
}

/// A copy that runs here.
struct Running {
    // First: the thread that made it must outlive it.
    copy: Copy,
    _keeper: Sender<()>,
    gate: Gate,
    /// What time it is for it, where that is agreed.
    time: AgreedTime,
    /// Answers what it asks for of chance, where that is agreed.
    answers: Option<Answers>,
    source: Option<Arc<Source>>,
    /// The newest entry of the log that it had applied when it was brought here; this host itself may be behind that.
    brought_at: Index,
    /// How long an unread socket is left alone before the next look, and when that is over.
    look_again_us: u64,
    look_at_us: u64,
    /// It was told why its inputs are not given to it in batches.
    told_unbatched: bool,
    /// It listens.
    ready: bool,
    until_us: u64,
}

/// The stream on which the backup tells the primary what its copy says.
struct Session {
    id: u64,
    link: SyncLink,
    closer: Closer,
    /// A backup's.
    talker: Option<Talker>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // The thread that reads the stream ends with it, here and on the other host.
        self.closer.close();
    }
}

struct TakeOver {
    elected_us: u64,
    status: FailoverStatus,
}

/// The loop.
pub struct ProgramLoop {
    host: Arc<Host>,
    config: Arc<VmConfig>,
    program: ProgramSpec,
    me: ReplicaId,
    witness: bool,
    group: KeptGroup,
    agreement: Agreement,
    election: Election,
    /// What was in the log when this loop began (invariant 5).
    found: Index,
    /// It has run here in an earlier life of this daemon.
    ran: bool,
    /// This host leads a program that never ran, and waits until then for the other host.
    begins_by_us: Option<u64>,
    begun_in: Option<Term>,
    role: Role,
    starting: Option<Sender<()>>,
    running: Option<Running>,
    /// Primary: since when there is a backup.
    followed_us: u64,
    /// Primary: the backup's copy listens.
    backup_ready: bool,
    session: Option<Session>,
    next_session: u64,
    /// The group was asked to drop the backup, in that term.
    dropping: Option<Term>,
    /// Primary: a second copy is brought in.
    join: Option<joining::Join>,
    tries: joining::Tries,
    /// Second copies that did not say the same.
    drops: unmatched::Drops,
    /// Held by each thread that carries a copy.
    busy: Arc<()>,
    /// A copy is on its way here.
    expected: Option<joined::Expected>,
    /// What is known of its data's image here, if it has one.
    notes: Option<data::Notes>,
    images: images::Images,
    /// Agreed inputs that the copy here gets before any other.
    backlog: Backlog,
    /// The copy here has no primary, and the group has not taken it in: until when it is kept.
    untaken_at_us: Option<u64>,
    take_over: Option<TakeOver>,
    switchover: Option<Sender<Answer>>,
    door: Option<GsoTap>,
    announcer: Announcer,
    announcements: Announcements,
    clock: Clock,
    pace: Pace,
    seed: Seed,
    output: Output,
    /// What was compared with all second copies so far.
    compared: difference::Compared,
    frames_in: u64,
    frames_out: u64,
    /// Inputs that were not read in time, as far as that was told.
    impatient_told: (u64, Option<u64>),
    last_inputs: poison::LastInputs,
    failure: Option<String>,
    restart: restart::Restart,
    failover: Option<FailoverStatus>,
    orders: Vec<ending::Order>,
    down_proposed: Option<Term>,
    tells_end: bool,
    forgets_at_us: Option<u64>,
    ending: Option<Ended>,
    to_loop: LoopSender,
    events: Receiver<LoopEvent>,
    connectors: Vec<(ReplicaId, Connector)>,
    shared: Arc<Shared>,
    buffer: Vec<u8>,
    born: Instant,
    shown_us: u64,
    told: Cell<bool>,
}

impl ProgramLoop {
    /// A loop that is ready to run.
    pub fn new(
        host: Arc<Host>,
        config: Arc<VmConfig>,
        program: ProgramSpec,
        shared: Arc<Shared>,
        to_loop: LoopSender,
        events: Receiver<LoopEvent>,
    ) -> Result<Self, StartError> {
        let member = config.member(&host.name).ok_or(StartError::NotInProgram)?;
        let members = config.group.iter().map(|host| host.member).collect();
        let durability = match host.cluster.durability {
            Durability::Memory => dunlin_core::consensus::Durability::Memory,
            Durability::Disk => dunlin_core::consensus::Durability::Disk,
        };
        let folder = host.state.join("vms").join(&config.name);
        let group = group::open(&host, &config, member.id, members, durability)?;
        let first = config.group[0].member.id;
        let agreement = Agreement::found(&group, &member, first)?;
        let connectors = group::connectors(&host, &config, member.id, &to_loop);
        let marks = data::Marks::of(&program).filter(|_| !member.witness);
        let notes = marks.map(data::Notes::begin).transpose()?;
        let mut this = Self {
            me: member.id,
            witness: member.witness,
            found: group.appended().index,
            ran: folder.join(RAN).exists(),
            group,
            agreement,
            election: Election::default(),
            begins_by_us: None,
            begun_in: None,
            role: Role::None,
            starting: None,
            running: None,
            followed_us: 0,
            backup_ready: false,
            session: None,
            next_session: 0,
            dropping: None,
            join: None,
            tries: joining::Tries::default(),
            drops: unmatched::Drops::default(),
            busy: Arc::new(()),
            expected: None,
            notes,
            images: images::Images::default(),
            backlog: Backlog::default(),
            untaken_at_us: None,
            take_over: None,
            switchover: None,
            door: None,
            announcer: Announcer::new(program.mac),
            announcements: Announcements::default(),
            clock: Clock::default(),
            pace: Pace::default(),
            seed: Seed::default(),
            output: Output::new(Voice::Shut, Epoch(1)),
            compared: difference::Compared::default(),
            frames_in: 0,
            frames_out: 0,
            impatient_told: (0, None),
            last_inputs: poison::LastInputs::default(),
            failure: None,
            restart: restart::Restart::default(),
            failover: None,
            orders: Vec::new(),
            down_proposed: None,
            tells_end: false,
            forgets_at_us: None,
            ending: None,
            to_loop,
            events,
            connectors,
            shared,
            buffer: vec![0; frames::FRAME_BYTES],
            born: Instant::now(),
            shown_us: 0,
            told: Cell::new(false),
            host,
            config,
            program,
        };
        this.show(SHOW_US);
        Ok(this)
    }

    /// Runs until the program is ended or the daemon ends.
    pub fn run(mut self) {
        while !self.is_over() {
            let (woken, group_is_readable) = self.wait();
            if woken {
                self.to_loop.clear();
            }
            self.group.woke(group_is_readable);
            while let Ok(event) = self.events.try_recv() {
                self.handle(event);
            }
            self.step();
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
        }
        self.drop_copy();
        self.answer_ended();
        if self.agreement.state().life == Life::Down {
            self.to_loop.vm_is_shut_down();
        }
        self.show(u64::MAX);
        if let Some(ended) = self.ending.take() {
            // The daemon may be ending as well.
            let _ = self.host.ended.send(ended);
        }
    }

    /// Everything that is not an event: descriptors and deadlines.
    fn step(&mut self) {
        self.read_card();
        self.read_door();
        self.tick();
        self.follow_group();
        self.apply_agreed_entries();
        self.agreement.propose_unsaid(&mut self.group);
        self.hear_copy();
        self.look_whether_it_listens();
        self.begin();
        self.look_after_loss();
        self.watch_backup();
        self.bring_in_backup();
        self.end_untaken_copy();
        self.open_door();
        self.end_by_order();
        // What the last steps proposed leaves now, not a wake-up later.
        self.follow_group();
        self.apply_agreed_entries();
        self.pass();
        self.release();
        self.compared.saw(self.output.counters());
        let now_us = self.now_us();
        if self.told.take() {
            self.shown_us = 0;
            self.show(now_us.max(SHOW_US));
            self.host.events.nudge();
        } else {
            self.show(now_us);
        }
    }

    /// Waits for what can happen; whether it was woken, and whether the group's descriptor is readable.
    fn wait(&mut self) -> (bool, bool) {
        // Armed: a peer's write after this rings a doorbell. What is there already must not be slept on.
        let idle = self.group.arm() && self.events.is_empty();
        let sleep_us = if idle { self.sleep_us() } else { 0 };
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: (sleep_us * 1000) as i64,
        };
        let mut fds = vec![
            PollFd::new(self.to_loop.waker(), PollFlags::IN),
            watch(self.group.as_fd()),
        ];
        if let Some(running) = &self.running {
            if !self.output.is_full() {
                fds.push(watch(running.copy.card().as_fd()));
            }
            if running.copy.ended().is_none() {
                fds.push(watch(running.copy.socket()));
            }
        }
        if let Some(door) = self.door.as_ref().filter(|_| self.takes_inputs()) {
            fds.push(watch(door.as_fd()));
        }
        // Interrupted: everything is looked at.
        if poll(&mut fds, Some(&timeout)).is_err() {
            return (true, true);
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        (is_ready(&fds[0]), is_ready(&fds[1]))
    }

    fn sleep_us(&self) -> u64 {
        let now_us = self.now_us();
        let copy_us = self.running.as_ref().map(|running| match running.ready {
            true => running.look_at_us,
            false => now_us + BEGINNING_LOOK_US,
        });
        let deadlines = [
            self.group.next_deadline_us(),
            copy_us,
            self.announcements.due_us(),
            self.tick_due_us(),
        ];
        let deadline_us = deadlines.into_iter().flatten().min().unwrap_or(u64::MAX);
        deadline_us.saturating_sub(now_us).min(LONGEST_SLEEP_US)
    }

    /// What this host keeps of the program.
    fn folder(&self) -> PathBuf {
        self.host.state.join("vms").join(&self.config.name)
    }

    fn marks(&self) -> Option<data::Marks> {
        self.notes.as_ref().map(|notes| notes.marks().clone())
    }

    /// Microseconds since the loop began.
    fn now_us(&self) -> u64 {
        self.born.elapsed().as_micros() as u64
    }

    fn event(&self, kind: EventKind, text: impl Into<String>) {
        self.told.set(true);
        self.host.events.push(&self.config.name, kind, text);
    }

    fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Accepted(hello, stream) => {
                match self.config.member(&hello.from).map(|member| member.id) {
                    Some(peer) if hello.purpose == Purpose::Log => self.add_log_link(peer, stream),
                    Some(peer) if hello.purpose == Purpose::Sync && hello.extra == joining::FOR_A_JOIN => {
                        self.accept_join(peer, stream);
                    }
                    Some(peer) if hello.purpose == Purpose::Sync => self.accept_session(peer, stream),
                    Some(_) => {}
                    None => self.event(
                        EventKind::LinkRefused,
                        format!("host '{}' is not in this program's group", hello.from),
                    ),
                }
            }
            LoopEvent::LogLink(peer, stream) => self.add_log_link(peer, stream),
            LoopEvent::Command(command, reply) => self.command(command, reply),
            LoopEvent::Shutdown => {
                self.ending.get_or_insert(Ended {
                    vm: self.config.name.clone(),
                    forget: false,
                });
            }
            LoopEvent::ProgramPrepared(result) => self.prepared(result),
            LoopEvent::SessionConnected { session, result } => self.session_connected(session, result),
            LoopEvent::SessionStreamEnded { session } => self.session_ended(session),
            LoopEvent::BackupSaid {
                session,
                epoch,
                frames,
            } => self.backup_said(session, epoch, frames),
            LoopEvent::BackupIdle { session, .. } => self.backup_listens(session),
            LoopEvent::ProgramJoin { session, step } => self.join_step(session, step),
            LoopEvent::ProgramImages(found) => self.images_found(found),
            LoopEvent::ProgramBrought { session, result } => self.brought(session, result),
            LoopEvent::Visit(command, reply) => {
                // Whoever asked may have gone.
                let _ = reply.send(self.visited(command).map(Box::new));
            }
            LoopEvent::EndTold(_) => self.forget(),
            // What only a VM's threads tell.
            _ => {}
        }
    }

    fn command(&mut self, command: Command, reply: Sender<Answer>) {
        let answer = match command {
            Command::Remove => {
                self.agreement.leadership.is_told_of_the_end();
                self.forget();
                Answer::done("removed")
            }
            Command::Standing => Answer::Standing(self.standing()),
            Command::Down { .. } => return self.order_down(reply),
            Command::ForceDown => self.force_down(),
            Command::Failover => match self.begin_switchover(&reply) {
                Ok(()) => return,
                Err(why) => Answer::failed(why.to_string()),
            },
            Command::Policy(_)
            | Command::Protect
            | Command::ProtectAlone { .. }
            | Command::VerifyDisk { .. }
            | Command::Inject { .. }
            | Command::RemoveMember(_)
            | Command::Move { .. }
            | Command::Left { .. } => Answer::refused(
                "this is for VMs: a program that runs gets its second copy by itself, as soon as its other host is there",
            ),
        };
        // Whoever asked may have gone.
        let _ = reply.send(answer);
    }

    fn add_log_link(&mut self, peer: ReplicaId, stream: Stream) {
        if let Err(error) = self.group.add_link(peer, stream) {
            let host = self.config.host_name(peer);
            self.event(EventKind::LinkRefused, format!("host '{host}': {error}"));
            self.connect_again(peer);
        }
    }

    fn connect_again(&self, peer: ReplicaId) {
        if let Some((_, connector)) = self.connectors.iter().find(|(id, _)| *id == peer) {
            connector.link_lost();
        }
    }

    fn is_connected(&self, peer: ReplicaId) -> bool {
        group::is_connected(&self.group, peer)
    }

    /// The other host that can run it.
    fn other(&self) -> Option<ReplicaId> {
        let members = self.config.group.iter().map(|host| host.member);
        members
            .filter(|member| !member.witness && member.id != self.me)
            .map(|member| member.id)
            .next()
    }
}

fn watch(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}
