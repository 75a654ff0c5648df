//! Who serves a program: the beginning, the primary and its backup, the take-over.
//!
//! Invariants: 1. a lost backup is dropped from the complete set by an agreed entry before outputs leave without it; 2. a new primary
//! speaks when the group has agreed that it alone is complete.
//!
//! Not here: the copy itself (`copies`), frames (`frames`).

use super::frames::MISSED;
use super::state::{ProgramLoop, Role, Session, TakeOver};
use super::unmatched::Mismatch;
use crate::vm::connect::{ConnectError, open};
use crate::vm::event::LoopEvent;
use crate::vm::session::link::{Closer, SyncLink};
use crate::vm::session::talker::Talker;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind, FailoverStatus};
use dunlin_core::agreed::{Agreed, Life, ReplicaSet};
use dunlin_core::output::announcements::Announcements;
use dunlin_core::output::compare::Difference;
use dunlin_core::output::gate::Voice;
use dunlin_core::units::{Epoch, ReplicaId};
use dunlin_fabric::link::{Purpose, Stream};
use dunlin_guest::frames::GsoTap;
use std::io;

/// Why a program is not handed over.
#[derive(Debug, thiserror::Error)]
pub(super) enum SwitchoverError {
    /// Another host may.
    #[error("this host does not serve the program")]
    DoesNotServe,
    /// Nobody could take it.
    #[error("the program has no second copy to hand over to")]
    NoSecondCopy,
}

/// So long a program that never ran waits for the other host before it begins without it.
const BOTH_WITHIN_US: u64 = 10_000_000;
/// A backup whose host says nothing for so long is given up: it answers heartbeats many times as often.
const SILENCE_US: u64 = 400_000;
/// A word of the backup's copy that a client waits for, later than this: the copy does not get on.
const LATE_US: u64 = 3_000_000;
/// The same of acknowledgements alone. A copy that reads slowly may take some seconds for what a window holds, and a client that mends what the
/// copy alone has lost has had several of its own time-outs by then.
const ACKS_LATE_US: u64 = 15_000_000;
/// What the backup's copy may take to listen beyond the program's own time for that.
const SLACK_US: u64 = 5_000_000;

impl ProgramLoop {
    /// This host leads, and has applied everything that was agreed before.
    pub(super) fn leads(&mut self) {
        let state = &self.agreement.state();
        match self.role {
            // All that it was elected for; the order is carried out in this step.
            Role::None if self.leads_to_end() => {}
            Role::None if state.life == Life::Fresh => {
                self.own.begins_by_us = Some(self.now_us() + BOTH_WITHIN_US);
            }
            Role::None if self.has_mandate() => self.begin_again(),
            Role::Backup if state.complete.contains(self.me) => self.claim(),
            Role::Primary if state.complete.contains(self.me) => self.speak_again(state.complete),
            _ => {
                self.event(
                    EventKind::CannotLead,
                    "this host was elected without a copy of the program; it steps down",
                );
                self.drop_copy();
                self.group.step_down();
            }
        }
    }

    /// A program that never ran begins on both hosts, by one entry.
    pub(super) fn begin(&mut self) {
        let Some(until_us) = self.own.begins_by_us else {
            return;
        };
        let term = self.group.term();
        if !self.agreement.leads()
            || self.agreement.state().life != Life::Fresh
            || self.own.begun_in == Some(term)
        {
            return;
        }
        if let Some(why) = self.waits_for_an_upgrade() {
            let why = why.to_string();
            if self.backup.tries.is_news(&why) {
                self.event(EventKind::Waiting, why);
            }
            return;
        }
        if self.own.notes.is_some() {
            return self.ask_of_images();
        }
        let other = self.other().filter(|other| self.is_connected(*other));
        if other.is_none() && self.now_us() < until_us {
            return;
        }
        let mut set = ReplicaSet::one(self.me);
        if let Some(other) = other {
            set = set.with(other);
        }
        if self.say_first_time_and_seed() && self.propose(&Agreed::Complete { set, epoch: Epoch(1) }) {
            self.own.begun_in = Some(term);
        }
    }

    /// The same primary again: inputs that were lost with the old term were lost to both copies.
    fn speak_again(&mut self, complete: ReplicaSet) {
        self.answer_switchover(&Answer::failed("this host was elected itself; say it again"));
        self.event(EventKind::QuorumRegained, "a majority of the group answers again");
        self.backup.dropping = None;
        if complete == ReplicaSet::one(self.me) {
            self.set_agreed(complete);
        } else {
            self.net.output.set_voice(Voice::Protected);
            if self.backup.session.is_none() {
                self.backup_is_lost("the stream of its copy's words has ended");
            }
        }
    }

    /// The group has agreed on who holds a complete copy; this host leads.
    pub(super) fn set_agreed(&mut self, set: ReplicaSet) {
        if set != ReplicaSet::one(self.me) {
            if self.role == Role::Primary && set.contains(self.me) {
                self.backup_is_in();
            }
            return;
        }
        self.net.compared.saw(self.net.output.counters());
        self.backup.dropping = None;
        self.backup.ready = false;
        self.rests();
        match self.role {
            Role::Backup => self.speak_after_take_over(),
            Role::Primary => {
                self.backup.session = None;
                self.backup.join = None;
                self.net.output.set_voice(Voice::Alone);
                self.event(
                    EventKind::Unprotected,
                    "the program runs without a second copy: if this host dies now, what it knows is lost",
                );
            }
            Role::None => {}
        }
    }

    /// Opens the way from and to the network, when every copy that counts listens.
    pub(super) fn open_door(&mut self) {
        let listens = self.own.running.as_ref().is_some_and(|running| running.ready);
        let voice = self.net.output.voice();
        let is_backed = self.backup.ready && self.backup.ended.is_none();
        let due = voice == Voice::Alone || (voice == Voice::Protected && is_backed);
        if self.net.door.is_some()
            || self.role != Role::Primary
            || !self.agreement.leads()
            || !listens
            || !due
        {
            return;
        }
        if !self.make_door() {
            return;
        }
        self.event(
            EventKind::Serves,
            format!(
                "the program serves at {} from this host",
                self.program.card.address
            ),
        );
        if voice == Voice::Protected {
            self.event(
                EventKind::Protected,
                "a second copy of the program runs on the same inputs",
            );
        }
    }

    fn make_door(&mut self) -> bool {
        let card = &self.config.spec.nics[0];
        match GsoTap::open(card.tap.as_deref().unwrap_or("dunlin%d"), card.bridge.as_deref()) {
            Ok(door) => {
                // What a segment floods is not the program's: its card has one address.
                if let Err(error) = door.set_rx_filter(&[self.program.card.mac]) {
                    self.fails(&format!("TAP {:?}: its filter: {error}", door.name()));
                    return false;
                }
                self.net.door = Some(door);
                self.net.announcer.add(self.program.card.address.into());
                self.announce();
                true
            }
            Err(error) => {
                self.fails(&error.to_string());
                false
            }
        }
    }

    // The backup, seen from its primary.

    /// Opens the stream on which its copy's words come.
    pub(super) fn connect_session(&mut self, extra: &'static [u8]) {
        let Some(other) = self.other() else { return };
        self.inbox.next_session += 1;
        let id = self.inbox.next_session;
        let (host, config, to_loop) = (self.host.clone(), self.config.clone(), self.inbox.to_loop.clone());
        let term = self.group.term();
        let work = move || {
            let peer = config.host_name(other);
            let result = open(&host, &config.name, peer, Purpose::Sync, term, extra.to_vec());
            to_loop.send(LoopEvent::SessionConnected { session: id, result });
        };
        if let Err(error) = std::thread::Builder::new()
            .name("words-connect".into())
            .spawn(work)
        {
            self.backup_cannot_be_reached(&format!("a thread to reach it: {error}"));
        }
    }

    pub(super) fn session_connected(&mut self, id: u64, result: Result<Stream, ConnectError>) {
        if id != self.inbox.next_session || self.role != Role::Primary {
            return;
        }
        let opened = match result {
            Ok(stream) => self.opened(id, stream, true).map_err(|error| error.to_string()),
            Err(why) => Err(why.to_string()),
        };
        match opened {
            Ok((link, closer)) => {
                self.join_connected(&link);
                self.backup.session = Some(Session {
                    id,
                    link,
                    closer,
                    talker: None,
                    lent: None,
                });
            }
            Err(why) => self.backup_cannot_be_reached(&why),
        }
    }

    fn backup_cannot_be_reached(&mut self, why: &str) {
        match self.backup.join {
            Some(_) => self.join_fails(why),
            None => self.backup_is_lost(why),
        }
    }

    /// `lent`: the loop itself reads what the other host's copy says, a wake-up less for each word.
    pub(super) fn opened(&self, id: u64, stream: Stream, lent: bool) -> io::Result<(SyncLink, Closer)> {
        SyncLink::open(stream, id, self.inbox.to_loop.clone(), lent)
    }

    pub(super) fn backup_listens(&mut self, id: u64) {
        let is_current = self
            .backup
            .session
            .as_ref()
            .is_some_and(|session| session.id == id);
        self.backup.ready |= is_current && self.role == Role::Primary;
    }

    pub(super) fn session_ended(&mut self, id: u64) {
        if self.is_bringing() {
            return;
        }
        let Some(session) = self.backup.session.take_if(|session| session.id == id) else {
            return;
        };
        if self.role != Role::Primary {
            return;
        }
        match session.link.last_words() {
            // One that the group has not taken in yet is not waited for.
            Some(why) if why != MISSED && self.backup.join.is_none() => {
                self.backup.has_ended(self.now_us(), why);
            }
            why => self.backup_is_lost(
                why.as_deref()
                    .unwrap_or("the stream of its copy's words has ended"),
            ),
        }
    }

    /// A backup that is cut off, says something else, or does not get on (invariant 3 of the loop).
    pub(super) fn watch_backup(&mut self) {
        if self.role != Role::Primary || self.net.output.voice() != Voice::Protected || self.is_bringing() {
            return;
        }
        let now_us = self.now_us();
        if self.backup.may_end_alike(now_us) {
            return;
        }
        if let Some((_, why)) = self.backup.ended.take() {
            return self.backup_is_lost(&why);
        }
        let other = self.other();
        let heard_us = self
            .group
            .links()
            .iter()
            .find(|link| Some(link.peer) == other)
            .and_then(|link| link.heard_us);
        // A link may stand for a moment before anything is heard on it.
        let heard_us = heard_us.unwrap_or(0).max(self.backup.followed_us);
        if now_us.saturating_sub(heard_us) > SILENCE_US {
            return self.backup_is_lost("its host is silent");
        }
        // No sync comes for an end that differs, either.
        let ends = (self.net.output.ends_waited_us(now_us) > 0).then_some(Difference::Ends);
        if let Some(difference) = self.net.output.difference().or(ends) {
            // Told once: the group may take a while to agree.
            if self.backup.dropping != Some(self.group.term()) {
                self.net.compared.saw(self.net.output.counters());
                match Mismatch::by(difference) {
                    Some(mismatch) => {
                        let why = self.tell_difference();
                        self.backup_is_lost(&why);
                        self.second_copy_did_not_match(mismatch);
                    }
                    None => self.backup_is_lost("not all that the two copies said found room to be compared"),
                }
            }
            return;
        }
        // What was said while a copy was on its way waits for its word since it runs.
        let output = &self.net.output;
        let acks_us = output
            .acks_wait_since_us()
            .map_or(0, |since_us| now_us.saturating_sub(since_us));
        let waited = [
            (output.waited_for_word_us(now_us), LATE_US),
            (acks_us, ACKS_LATE_US),
        ];
        let followed_us = now_us - self.backup.followed_us;
        let late = waited
            .into_iter()
            .find(|(waited_us, most_us)| followed_us.min(*waited_us) > *most_us);
        if let Some((_, most_us)) = late {
            if self.backup.dropping != Some(self.group.term()) {
                let who = self.told_who_waits();
                self.backup_is_lost(&format!(
                    "its copy has not said within {} s what the one here has{who}",
                    most_us / 1_000_000
                ));
                self.second_copy_did_not_match(Mismatch::Late);
            }
            return;
        }
        let listens_by_us = self
            .own
            .running
            .as_ref()
            .map(|running| running.until_us + SLACK_US);
        if !self.backup.ready && listens_by_us.is_some_and(|by_us| now_us > by_us) {
            self.backup_is_lost("its copy does not listen");
        }
    }

    /// Invariant 1. What it has not matched stays held until that is agreed.
    pub(super) fn backup_is_lost(&mut self, why: &str) {
        let term = self.group.term();
        let is_followed = self.role == Role::Primary && self.net.output.voice() == Voice::Protected;
        if !is_followed || self.is_bringing() || !self.agreement.leads() || self.backup.dropping == Some(term)
        {
            return;
        }
        let other = self.other().map_or("?", |other| self.config.host_name(other));
        let text = format!("host '{other}' is dropped as the backup: {why}");
        self.event(EventKind::BackupLost, text);
        self.backup.give_up(why);
        let entry = Agreed::Complete {
            set: ReplicaSet::one(self.me),
            epoch: self.agreement.state().epoch,
        };
        if self.propose(&entry) {
            self.backup.dropping = Some(term);
        }
    }

    /// A person's order, or the daemon's end.
    pub(super) fn begin_switchover(&mut self, reply: &Sender<Answer>) -> Result<(), SwitchoverError> {
        let serves = self.role == Role::Primary && self.agreement.leads() && self.net.door.is_some();
        let is_backed = self.net.output.voice() == Voice::Protected
            && self.backup.ready
            && self.backup.ended.is_none()
            && self.backup.dropping.is_none()
            && self.backup.join.is_none();
        match self.other() {
            Some(other) if serves && is_backed && self.backup.switchover.is_none() => {
                self.backup.switchover = Some(reply.clone());
                self.group.transfer_to(other);
                Ok(())
            }
            _ if !serves => Err(SwitchoverError::DoesNotServe),
            _ => Err(SwitchoverError::NoSecondCopy),
        }
    }

    pub(super) fn answer_switchover(&mut self, answer: &Answer) {
        if let Some(reply) = self.backup.switchover.take() {
            // Whoever asked may have gone.
            let _ = reply.send(answer.clone());
        }
    }

    // The backup itself.

    /// The primary wants to hear what the copy here says.
    pub(super) fn accept_session(&mut self, primary: ReplicaId, stream: Stream) {
        if self.is_witness() || Some(primary) != self.other() || self.role == Role::Primary {
            return;
        }
        self.inbox.next_session += 1;
        let id = self.inbox.next_session;
        let talking = self.opened(id, stream, false).and_then(|(link, closer)| {
            let talker = Talker::start(link.writer.clone())?;
            Ok(Session {
                id,
                link,
                closer,
                talker: Some(talker),
                lent: None,
            })
        });
        match talking {
            Ok(session) => {
                self.backup.session = Some(session);
                self.tell_listening();
            }
            Err(why) => tracing::warn!(program = self.config.name, "a stream to the primary: {why}"),
        }
    }

    /// Elected: no word of the old primary counts any more.
    pub(super) fn elected(&mut self) {
        let now_us = self.now_us();
        if self.role != Role::Backup {
            return;
        }
        self.backup.session = None;
        if self.backup.take_over.is_none() {
            let campaign_us = self.agreement.election.campaign_us.unwrap_or(now_us);
            let status = FailoverStatus {
                detected_us: campaign_us.saturating_sub(self.agreement.election.leader_heard_us),
                elected_us: now_us.saturating_sub(campaign_us),
                ..FailoverStatus::default()
            };
            self.backup.take_over = Some(TakeOver {
                elected_us: now_us,
                status,
            });
        }
    }

    /// Every agreed input is with the copy here: nobody else is complete now.
    fn claim(&mut self) {
        let now_us = self.now_us();
        let entry = Agreed::Complete {
            set: ReplicaSet::one(self.me),
            epoch: self.agreement.state().epoch,
        };
        if self.propose(&entry)
            && let Some(take_over) = &mut self.backup.take_over
        {
            take_over.status.applied_us = now_us - take_over.elected_us;
        }
    }

    /// Invariant 2.
    fn speak_after_take_over(&mut self) {
        let now_us = self.now_us();
        self.role = Role::Primary;
        let mut status = self
            .backup
            .take_over
            .take()
            .map_or_else(FailoverStatus::default, |take_over| FailoverStatus {
                announced_us: now_us - take_over.elected_us - take_over.status.applied_us,
                ..take_over.status
            });
        if self.own.running.as_ref().is_some_and(|running| running.ready) && !self.make_door() {
            return;
        }
        status.announced_us += self.now_us() - now_us;
        self.net.announcements = Announcements::after_take_over(now_us);
        self.rests();
        self.net.output.take_over(now_us);
        self.net.output.set_voice(Voice::Alone);
        self.release();
        self.event(
            EventKind::TookOver,
            format!(
                "this host serves the program now: detected {:.1} ms, elected {:.1} ms, applied {:.1} ms, announced {:.1} ms; it has no \
                 second copy until the other host is there",
                status.detected_us as f64 / 1e3,
                status.elected_us as f64 / 1e3,
                status.applied_us as f64 / 1e3,
                status.announced_us as f64 / 1e3,
            ),
        );
        self.shown.failover = Some(status);
    }
}
