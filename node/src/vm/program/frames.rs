//! Frames of a program: from the network into the log, from the log through the order of reading into the copy, and what it says.
//!
//! Invariants: 1. only a leader, as of an entry of its own term, takes inputs and releases outputs; 2. each copy gets the next input
//! when it has read the last one, or after its patience; 3. (memory) inputs that wait for a copy here stop the network at
//! [`MOST_WAITING_BYTES`] on the primary; what its backup has beyond core's own bound is lost to it alone. TCP sends that again; a copy
//! that has missed what nobody sends again is given up: where the program answers nothing to that, no difference would ever tell.
//!
//! Not here: what may leave and when (core's `output`), the order itself (core's `program::order`).

use super::backlog::Input;
use super::state::{ProgramLoop, Role, Running};
use crate::vm::session::reader::Lent;
use bytes::Bytes;
use dunlin_api::EventKind;
use dunlin_core::agreed::{Agreed, Frame};
use dunlin_core::offload::{MOST_CUT, MOST_HEADERS_BYTES, MOST_SEGMENTS, Offload};
use dunlin_core::output::gate::Voice;
use dunlin_core::output::packet::{Direction, Parsed, parse};
use dunlin_core::program::order::Next;
use dunlin_core::units::Epoch;
use dunlin_core::wire::agreed::MOST_FRAMES;
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_program::quiet::Quiet;
use dunlin_program::sockets;
use std::io::{ErrorKind, Read, Write};

/// No Ethernet frame with an MTU up to 64 KiB is larger.
pub(super) const FRAME_BYTES: usize = 65_600;

const BATCH_BYTES: usize = 1 << 20;
/// The most that a batch takes in the log.
const MOST_BATCH_BYTES: usize =
    BATCH_BYTES + FRAME_BYTES + MOST_CUT * MOST_HEADERS_BYTES + 8 * (MOST_FRAMES + MOST_CUT);
/// Entries under way to the group beyond which the network has to wait.
const INPUTS_UNDER_WAY: u64 = 1024;
/// What may wait for the copy here before the network has to.
const MOST_WAITING_BYTES: usize = 4 << 20;
/// Frames of the copy that are read in one turn.
const FRAMES_A_TURN: usize = 256;
/// A program that owes an answer gives it before that, as a rule, and is looked at then.
const LOOK_FIRST_US: u64 = 60;
/// The same where nothing waits for that.
const LOOK_IDLE_US: u64 = 1000;
/// So long is waited before an unread socket is looked at again, at first and at most.
const LOOK_AGAIN_US: (u64, u64) = (20, 500);
/// Inputs that were not read in time are told of once in this time.
const QUIET_US: u64 = 60_000_000;

/// Why the primary drops a backup.
pub(super) const MISSED: &str =
    "its copy has missed inputs that nobody sends again: more waited for it than its host keeps";

/// Whether nobody sends it again where it is lost.
fn comes_once(frame: &Frame) -> bool {
    matches!(
        parse(frame, Direction::ToVm),
        Parsed::Datagram(_) | Parsed::Piece(_)
    )
}

impl Running {
    /// Whether it is lost: more than that must not wait.
    fn loses(&self, frame: &Frame) -> bool {
        self.gate.waiting_bytes() + frame.bytes.len() > self.gate.most_waiting_bytes()
    }

    /// Something waits for the program to have read what it got, and it has answered all of that: it most likely has.
    fn is_worth_a_look(&self) -> bool {
        self.gate.has_more() && self.gate.owed() == 0
    }

    fn look_a_little_later(&mut self, now_us: u64) {
        self.look_at_us = now_us + self.look_again_us;
        self.look_again_us = (self.look_again_us * 2).min(LOOK_AGAIN_US.1);
    }

    /// A host that is short of something does not show what the program does. It is looked at again, and no longer than its patience lasts.
    fn was_not_seen(&mut self, what: &str, error: &std::io::Error) {
        if !std::mem::replace(&mut self.told_unseen, true) {
            tracing::warn!("{what}: {error}; it is looked at again");
        }
    }
}

/// Whether the kernel had no memory to answer with.
fn is_want_of_memory(error: &std::io::Error) -> bool {
    let wants = [rustix::io::Errno::NOBUFS, rustix::io::Errno::NOMEM];
    wants
        .iter()
        .any(|want| error.raw_os_error() == Some(want.raw_os_error()))
}

impl ProgramLoop {
    /// Whether frames from the network are taken (invariant 1).
    pub(super) fn takes_inputs(&self) -> bool {
        self.role == Role::Primary
            && self.agreement.leads()
            && self.group.is_leader()
            && !self.is_quiet()
            && self.net.output.voice() != Voice::Shut
            && self.group.appended().index.0 - self.group.committed().0 < INPUTS_UNDER_WAY
            && self.group.has_input_room(MOST_BATCH_BYTES)
            && self
                .own
                .running
                .as_ref()
                .is_some_and(|running| running.gate.waiting_bytes() < MOST_WAITING_BYTES)
    }

    /// Takes what has come from the network; whether there was something.
    pub(super) fn read_door(&mut self) -> bool {
        if !self.is_door_due(self.now_us()).0 {
            return false;
        }
        let Some(door) = &mut self.net.door else {
            return false;
        };
        let (mut frames, mut bytes) = (Vec::new(), 0);
        // What is read at once is as many segments, as a rule.
        while frames.len() + MOST_SEGMENTS <= MOST_FRAMES && bytes < BATCH_BYTES {
            let read = door.read(|frame| {
                bytes += frame.len();
                if self.net.announcer.is_from_here(frame) {
                    self.net.announcements.old_source_seen();
                }
                let bytes = Bytes::copy_from_slice(frame);
                frames.push(Frame { nic: 0, bytes });
            });
            // A TAP that was taken down gives errors; it is as silent as an unplugged cable.
            let Ok(true) = read else { break };
        }
        if frames.is_empty() {
            return false;
        }
        let count = frames.len();
        // A large frame of small segments may make more than an entry holds.
        let (mut frames, mut entries) = (frames.into_iter().peekable(), Vec::with_capacity(1));
        while frames.peek().is_some() {
            let frames: Vec<Frame> = frames.by_ref().take(MOST_FRAMES).collect();
            entries.push(match self.time_with_inputs() {
                Some(time) => Agreed::Timed { time, frames },
                None => Agreed::Frames(frames),
            });
        }
        self.were_taken(count);
        for entry in &entries {
            self.propose(entry);
        }
        true
    }

    /// An agreed input, in log order.
    pub(super) fn input(&mut self, input: Input) {
        if self.own.backlog.is_empty() {
            return self.input_now(input);
        }
        if let Some(Input::Frame(frame)) = self.own.backlog.push(input)
            && comes_once(&frame)
        {
            self.has_missed();
        }
    }

    /// The copy here goes on, in case that the primary dies now; it counts as complete until the group has agreed that it does not.
    fn has_missed(&mut self) {
        if self.role != Role::Backup {
            return;
        }
        let Some(session) = self.backup.session.take() else {
            return;
        };
        if let Some(talker) = &session.talker {
            talker.say(SyncMessage::Refused {
                why: MISSED.to_owned(),
            });
        }
    }

    /// What was agreed while the copy was on its way here, as far as there is room.
    fn work_off(&mut self) {
        while let Some(running) = &self.own.running
            && running.gate.waiting_bytes() < MOST_WAITING_BYTES
            && let Some(input) = self.own.backlog.pop()
        {
            self.input_now(input);
        }
    }

    fn input_now(&mut self, input: Input) {
        let Some(running) = &mut self.own.running else {
            return;
        };
        let frame = match input {
            Input::Time(time) => return running.gate.time(time),
            Input::Frame(frame) => frame,
        };
        self.net.frames_in += 1;
        let lost = running.gate.counters().lost;
        let may_miss = running.loses(&frame) && comes_once(&frame);
        let passes = running.gate.arrived(frame);
        let misses = may_miss && running.gate.counters().lost > lost;
        if let Some(frame) = passes {
            self.deliver(&frame);
        }
        if misses {
            self.has_missed();
        }
    }

    fn deliver(&mut self, frame: &Frame) {
        let now_us = self.now_us();
        self.own.last_inputs.given(frame, now_us);
        let frame = self.net.output.heard(frame);
        let Some(running) = &self.own.running else { return };
        match running.copy.card().write(&frame.bytes) {
            Ok(_) => {}
            // What finds no room is lost, as on any wire, and TCP sends it again.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
            Err(error) => self.fails(&format!("the copy's card: {error}")),
        }
    }

    /// Delivers what may be delivered (invariant 2).
    pub(super) fn pass(&mut self) {
        let now_us = self.now_us();
        loop {
            self.work_off();
            let Some(running) = &mut self.own.running else {
                return;
            };
            match running.gate.next(now_us) {
                Next::Idle => {
                    running.look_at_us = u64::MAX;
                    break;
                }
                Next::Wait(until_us) => {
                    running.look_at_us = until_us;
                    break;
                }
                Next::Deliver(frame) => {
                    running.look_again_us = LOOK_AGAIN_US.0;
                    running.look_at_us = u64::MAX;
                    self.deliver(&frame);
                }
                Next::Set(time) => {
                    running.look_again_us = LOOK_AGAIN_US.0;
                    if let Err(error) = running.set_clock(time) {
                        return self.fails(&format!("the program's clock: {error}"));
                    }
                }
                Next::AskForRest | Next::AskForQuiet | Next::Ask(_)
                    if now_us < running.look_at_us && !running.is_worth_a_look() =>
                {
                    let look_us = match running.gate.has_more() {
                        true => LOOK_FIRST_US,
                        false => LOOK_IDLE_US,
                    };
                    running.look_at_us = running.look_at_us.min(now_us + look_us);
                    break;
                }
                Next::AskForRest => match running.copy.is_at_rest() {
                    Ok(true) => running.gate.are_at_rest(now_us),
                    Ok(false) => {
                        running.look_a_little_later(now_us);
                        break;
                    }
                    Err(error) => {
                        running.was_not_seen("whether the program is at rest", &error);
                        running.look_a_little_later(now_us);
                        break;
                    }
                },
                Next::AskForQuiet => match running.copy.is_quiet() {
                    Quiet::Yes => running.gate.are_quiet(),
                    Quiet::NotYet => {
                        running.look_a_little_later(now_us);
                        break;
                    }
                    Quiet::Unknown(why) => {
                        running.gate.cannot_be_quiet(now_us);
                        self.tell_unbatched(&why);
                    }
                },
                Next::Ask(questions) => {
                    let mut told = false;
                    match sockets::look(running.copy.queues(), &questions) {
                        Ok(found) => {
                            for (question, found) in questions.iter().zip(found) {
                                told |= running.gate.told(question, found);
                            }
                        }
                        Err(error) if is_want_of_memory(&error) => running.was_not_seen("sock_diag", &error),
                        Err(error) => return self.fails(&format!("sock_diag: {error}")),
                    }
                    if !told {
                        running.look_a_little_later(now_us);
                        break;
                    }
                }
            }
        }
        if let Some(running) = &mut self.own.running {
            running.waits_for_several(now_us);
        }
        self.tell_unread(now_us);
    }

    /// Once for each copy: it may be so for a while (a child that saves) or always.
    fn tell_unbatched(&mut self, why: &str) {
        let is_new = self
            .own
            .running
            .as_mut()
            .is_some_and(|running| !std::mem::replace(&mut running.told_unbatched, true));
        // Who has not asked for it misses nothing.
        if is_new && !self.program.reading.adapts {
            self.event(
                EventKind::NotBatched,
                format!(
                    "the program's inputs are given to the copy here one at a time, as by order = \"read\": {why} (order = \"batch\" is \
                     for one thread that waits for its connections in one epoll)"
                ),
            );
        }
    }

    fn tell_unread(&mut self, now_us: u64) {
        let Some(running) = &self.own.running else { return };
        let impatient = running.gate.counters().impatient;
        let (told, at_us) = self.net.impatient_told;
        if impatient > told && at_us.is_none_or(|at_us| now_us - at_us > QUIET_US) {
            self.net.impatient_told = (impatient, Some(now_us));
            self.event(
                EventKind::NotRead,
                format!(
                    "the program did not read an input within {} ms ({impatient} so far): the next one was delivered all the same, so \
                     the copies may read in another order ('patience_ms' in the program's file)",
                    self.program.reading.patience.as_millis()
                ),
            );
        }
    }

    /// What the copy here has sent: held on a primary, kept on a backup, which tells the primary too.
    pub(super) fn read_card(&mut self) {
        if self.inbox.ready.card {
            self.read_frames(FRAMES_A_TURN);
        }
    }

    /// All that it has sent so far: it stands still.
    pub(super) fn read_all_of_card(&mut self) {
        self.read_frames(usize::MAX);
    }

    fn read_frames(&mut self, most: usize) {
        let now_us = self.now_us();
        let mut told = Vec::new();
        for _ in 0..most {
            let Some(running) = self.own.running.as_mut().filter(|_| !self.net.output.is_full()) else {
                break;
            };
            let length = match running.copy.card().read(&mut self.net.buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return self.fails(&format!("the copy's card: {error}")),
            };
            let bytes = Bytes::copy_from_slice(&self.net.buffer[..length]);
            self.net.announcer.learn(&bytes);
            let frame = Frame { nic: 0, bytes };
            match parse(&frame, Direction::FromVm) {
                Parsed::Tcp(segment) if !segment.is_pure_ack() && !segment.syn() => {
                    running.gate.said(0, &segment);
                }
                Parsed::Datagram(datagram) => running.gate.answered(0, &datagram.key),
                _ => {}
            }
            if self.role == Role::Backup {
                told.push(frame.clone());
            }
            self.net.output.said(frame, now_us);
        }
        let epoch = self.net.output.epoch();
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        if let (Some(talker), false) = (talker, told.is_empty()) {
            for frames in parts::frames(told) {
                // Dropped where the primary does not read: it misses them, and drops this copy.
                talker.say(SyncMessage::Said { epoch, frames });
            }
        }
    }

    /// The stream of the backup's words is the loop's to read; one of an earlier session goes back at once.
    pub(super) fn stream_lent(&mut self, id: u64, stream: Lent) {
        let session = self.backup.session.as_mut();
        if let Some(session) = session.filter(|session| session.id == id) {
            session.lent = Some(stream);
            self.inbox.ready.words = true;
        }
    }

    /// What the backup's copy has said.
    pub(super) fn hear_words(&mut self) {
        let session = self.backup.session.as_mut().filter(|_| self.inbox.ready.words);
        let Some((id, lent)) = session.and_then(|session| Some((session.id, session.lent.as_mut()?))) else {
            return;
        };
        let mut heard = Vec::new();
        lent.hear(|message| heard.push(message));
        if lent.fd().is_none()
            && let Some(session) = &mut self.backup.session
        {
            session.lent = None;
        }
        for message in heard {
            match message {
                SyncMessage::Said { epoch, frames } if self.role == Role::Primary => {
                    self.net.output.backup_said(epoch, frames);
                }
                SyncMessage::Idle { .. } => self.backup_listens(id),
                // All others are the session's thread's.
                _ => {}
            }
        }
    }

    /// The backup's copy has said these.
    pub(super) fn backup_said(&mut self, session: u64, epoch: Epoch, frames: Vec<Frame>) {
        let lost = self.inbox.to_loop.words_taken(&frames);
        if lost > 0 {
            self.net.output.backup_was_not_heard(lost);
        }
        let is_current = self
            .backup
            .session
            .as_ref()
            .is_some_and(|current| current.id == session);
        if is_current && self.role == Role::Primary {
            self.net.output.backup_said(epoch, frames);
        }
    }

    /// Whether the network may hear this host now (invariant 1): while another complete copy could be elected, only as long as a
    /// majority has promised to elect nobody.
    fn may_speak(&self, now_us: u64) -> bool {
        self.group.is_leader()
            && self.agreement.leads()
            && match self.net.output.voice() {
                Voice::Alone => true,
                Voice::Protected => self.group.may_speak(now_us),
                Voice::Backup | Voice::Shut => false,
            }
    }

    /// Lets out what may leave.
    pub(super) fn release(&mut self) {
        while self.take_released() {
            self.send_released();
        }
    }

    /// Takes what may leave, up to what leaves as one large frame. False: there was nothing.
    fn take_released(&mut self) -> bool {
        for taken in 0..MOST_SEGMENTS {
            let now_us = self.now_us();
            if self.net.door.is_none() || !self.may_speak(now_us) {
                return taken > 0;
            }
            if self.net.announcements.take_due(now_us) {
                self.announce();
            }
            let Some(frame) = self.net.output.release(now_us) else {
                return taken > 0;
            };
            self.net.frames_out += 1;
            if let Some(door) = &mut self.net.door {
                door.queue(frame.bytes);
            }
        }
        true
    }

    /// The host may have stood still since, for longer than its promise lasts: then frames are lost, as are those that the kernel has no room for, as on any
    /// wire.
    fn send_released(&mut self) {
        loop {
            let may_speak = self.may_speak(self.now_us());
            match &mut self.net.door {
                Some(door) if !door.has_queued() => return,
                Some(door) if may_speak => drop(door.send_next()),
                Some(door) => door.lose_queued(),
                None => return,
            }
        }
    }

    /// Tells the network's switches that the program is here now.
    pub(super) fn announce(&self) {
        if let Some(door) = &self.net.door {
            for frame in self.net.announcer.frames() {
                let _ = door.write(&frame, Offload::default());
            }
        }
    }
}
