//! A primary and its backup: finding one, bringing it in, losing it.
//!
//! Invariant 1: (2 of `primary`) a lost backup is dropped from the complete set by an agreed entry.
//!
//! Not here: the copy itself (`session::primary`).

use super::{REJOIN_US, SILENCE_US};
use crate::vm::backup::NOT_READY;
use crate::vm::connect::{ConnectError, open};
use crate::vm::event::LoopEvent;
use crate::vm::session::jobs::Jobs;
use crate::vm::session::link::SyncLink;
use crate::vm::session::primary::Primary;
use crate::vm::session::talker::Talker;
use crate::vm::session::waiting::Waiting;
use crate::vm::state::VmLoop;
use crate::vm::state::primary::{Lingers, PrimaryRole, Session};
use dunlin_api::{Answer, EventKind, JoinProblem, Progress};
use dunlin_core::agreed::{Agreed, ReplicaSet};
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::primary::Phase;
use dunlin_core::sync::compare::Compare;
use dunlin_core::sync::compare::PAGE_BYTES;
use dunlin_core::units::ReplicaId;
use dunlin_core::wire::sync::{AHEAD_SINCE, TREE_SINCE};
use dunlin_fabric::link::{Purpose, Stream};
use dunlin_guest::disk::DiskEvent;
use std::io;

/// Why no session with a backup begins.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    /// It is not reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Its stream, or the session's thread.
    #[error(transparent)]
    Session(io::Error),
    /// The loop's words to it would be sent there.
    #[error("a thread to talk to the backup: {0}")]
    Talker(#[source] io::Error),
}

impl VmLoop {
    /// A backup that is cut off says nothing, and its stream breaks only much later.
    pub(super) fn miss_silent_backup(&mut self) {
        let now_us = self.now_us();
        let Some(peer) = self.session_peer() else { return };
        let heard_us = self.group.heard_us(peer);
        let Some(primary) = self.primary() else { return };
        let connecting = primary.epochs.session() == Some(Phase::Connecting);
        let Some(session) = &primary.session else { return };
        let silent = heard_us.is_none_or(|heard_us| now_us.saturating_sub(heard_us) > SILENCE_US);
        if silent && !connecting {
            let id = session.id;
            self.session_ended(id, "the backup is silent");
        }
    }

    pub(super) fn look_for_backup(&mut self) {
        let now_us = self.now_us();
        let lone = self.primary().is_some_and(|primary| {
            let is_left = primary.epochs.is_handed() || primary.guest.is_left(now_us);
            primary.session.is_none() && !is_left && now_us >= primary.rejoin_at_us
        });
        if lone && self.agreement.leads() && self.net.output.voice() == Voice::Protected {
            if !self
                .agreement
                .leadership
                .may_drop_backup(self.group.may_speak(now_us))
            {
                return;
            }
            // The lost backup is not dropped yet: nobody answered who could agree, or the entry was refused (invariant 2).
            if let Some(primary) = self.primary() {
                primary.rejoin_at_us = now_us + REJOIN_US;
            }
            self.drop_backup();
            return;
        }
        if !self.policy().is_replicated()
            || !self.agreement.leads()
            || self.net.output.voice() != Voice::Alone
        {
            return;
        }
        let members = self.group.members();
        let candidate = self.config.group.iter().map(|host| host.member).find(|member| {
            let follows = members.iter().any(|known| known.id == member.id);
            member.id != self.me && !member.witness && follows && self.is_connected(member.id)
        });
        let Some(peer) = candidate else { return };
        let session_id = self.inbox.next_session + 1;
        let Some(primary) = self.primary() else { return };
        let busy = primary.session.is_some() || primary.lingers.is_some() || primary.epochs.is_handed();
        if busy || primary.machine.is_none() || now_us < primary.rejoin_at_us {
            return;
        }
        primary.epochs.session_begins();
        primary.session = Some(Session {
            id: session_id,
            peer: peer.id,
            jobs: None,
            takes_ahead: false,
            closer: None,
            talker: None,
            lent: None,
            waiting: Waiting::default(),
        });
        primary.rejoin_at_us = now_us + REJOIN_US;
        let id = self.new_session();
        let (host, config, to_loop) = (self.host.clone(), self.config.clone(), self.inbox.to_loop.clone());
        let term = self.group.term();
        // Both sides begin in this policy's first mode.
        let policy = self.policy_name().as_bytes().to_vec();
        let work = move || {
            let result = open(
                &host,
                &config.name,
                config.host_name(peer.id),
                Purpose::Sync,
                term,
                policy,
            );
            to_loop.send(LoopEvent::SessionConnected { session: id, result });
        };
        if let Err(error) = std::thread::Builder::new()
            .name("sync-connect".into())
            .spawn(work)
        {
            self.session_ended(id, &format!("a thread to reach the backup: {error}"));
        }
    }

    pub(in crate::vm) fn session_connected(&mut self, id: u64, result: Result<Stream, ConnectError>) {
        let term = self.group.term();
        self.shared.reigns(term, true);
        let to_loop = self.inbox.to_loop.clone();
        let active = self.first_rules().backup_runs();
        let (audit, staging_bytes) = (self.config.sync.audit, self.config.sync.staging_mib << 20);
        let compare = self.config.sync.compare;
        let Some(peer) = self.session_peer() else { return };
        let connect_mirror = {
            let (host, config, peer) = (self.host.clone(), self.config.clone(), peer);
            Box::new(move |disk: usize| {
                open(
                    &host,
                    &config.name,
                    config.host_name(peer),
                    Purpose::Mirror,
                    term,
                    vec![disk as u8],
                )
            })
        };
        let Some(primary) = self.primary() else { return };
        let (Some(machine), Some(session)) = (primary.machine.clone(), &mut primary.session) else {
            return;
        };
        if session.id != id {
            return;
        }
        let (jobs, receiver) = Jobs::pair();
        let started = result.map_err(BeginError::from).and_then(|stream| {
            let version = stream.spoken().version;
            let compare = known_to_both(compare, version);
            let link = SyncLink::open(stream, id, to_loop.clone(), true);
            let (link, closer) = link.map_err(BeginError::Session)?;
            let talker = Talker::start(link.writer.clone()).map_err(BeginError::Talker)?;
            let waiting = link.waiting.clone();
            let worker = Primary {
                session: id,
                machine,
                link,
                words: receiver,
                to_loop,
                connect_mirror,
                compare,
                audit,
                staging_bytes,
            };
            std::thread::Builder::new()
                .name("sync-primary".into())
                .spawn(move || worker.run(term, active))
                .map_err(BeginError::Session)?;
            Ok((closer, talker, waiting, version >= AHEAD_SINCE))
        });
        match started {
            Ok((closer, talker, waiting, takes_ahead)) => {
                primary.epochs.join_begins();
                session.talker = Some(talker);
                session.waiting = waiting;
                session.jobs = Some(jobs);
                session.takes_ahead = takes_ahead;
                session.closer = Some(closer);
                let host = self.session_host();
                self.join_begins(format!("host '{host}' is being brought in as backup"));
            }
            Err(why) => self.session_ended(id, &why.to_string()),
        }
    }

    pub(super) fn session_peer(&mut self) -> Option<ReplicaId> {
        self.primary()?.session.as_ref().map(|session| session.peer)
    }

    pub(super) fn session_host(&mut self) -> String {
        let peer = self.session_peer();
        peer.map_or(String::new(), |peer| self.config.host_name(peer).to_owned())
    }

    pub(super) fn is_session(&mut self, id: u64) -> bool {
        self.primary()
            .is_some_and(|primary| primary.session.as_ref().is_some_and(|session| session.id == id))
    }

    pub(in crate::vm) fn join_progress(&mut self, id: u64, what: &str, done: u64, total: u64) {
        if !self.is_session(id) {
            return;
        }
        let Some(primary) = self.primary() else { return };
        let now = Progress {
            what: what.into(),
            done,
            total,
        };
        let before = primary.progress.replace(now.clone());
        let goes_on = before.is_none_or(|before| before.what != now.what || before.tenth() != now.tenth());
        if goes_on {
            self.wake_followers();
        }
    }

    pub(in crate::vm) fn join_nearly_done(&mut self, id: u64) {
        if !self.is_session(id) {
            return;
        }
        if let Some(primary) = self.primary() {
            primary.epochs.join_copied();
        }
        self.begin_last_sync();
    }

    /// A fresh QEMU holds a few pages of its firmware: nobody need hear of those.
    pub(in crate::vm) fn held_compared(&mut self, id: u64, pages: usize, equal: usize) {
        const WORTH_A_WORD: usize = (4 << 20) / PAGE_BYTES;
        if !self.is_session(id) || pages < WORTH_A_WORD {
            return;
        }
        let mib = |pages: usize| (pages * PAGE_BYTES) >> 20;
        let words = format!(
            "the host that joins holds {} MiB of an earlier copy, of which {} MiB are as they are here: these are not sent",
            mib(pages),
            mib(equal)
        );
        self.event(EventKind::Joining, words);
    }

    /// The group may not take the sync's entry at once: then it is tried again.
    pub(super) fn begin_last_sync(&mut self) {
        let leads = self.agreement.leads();
        let copied = |primary: &mut PrimaryRole| primary.epochs.session() == Some(Phase::Copied);
        if leads && self.primary().is_some_and(copied) {
            self.begin_sync(false);
        }
    }

    /// A disk has something to say.
    pub(in crate::vm) fn disk_event(&mut self, number: usize, event: DiskEvent) {
        match event {
            DiskEvent::NeedSync => {
                if let Some(primary) = self.primary() {
                    primary.disk_asks = true;
                }
            }
            DiskEvent::BackupLost { reason } => {
                // The sync cannot cover this disk any more: the session is over.
                if let Some(primary) = self.primary()
                    && let Some(closer) = primary
                        .session
                        .as_ref()
                        .and_then(|session| session.closer.as_ref())
                {
                    closer.close();
                    self.event(EventKind::MirrorLost, format!("disk {number}: {reason}"));
                }
            }
            DiskEvent::BackupFailed { reason } => {
                self.event(
                    EventKind::MirrorFailed,
                    format!("disk {number} on this backup: {reason}"),
                );
                self.close_backup_session();
            }
            DiskEvent::ImageFailed { reason, full } => {
                let kind = if full {
                    EventKind::DiskFull
                } else {
                    EventKind::DiskError
                };
                self.event(kind, format!("disk {number}: {reason}"));
                self.leave_to_the_backup(&format!("disk {number} of this host fails"));
            }
            DiskEvent::Alike { bytes } => {
                let mib = bytes >> 20;
                self.event(
                    EventKind::DiskAlike,
                    format!("disk {number}: the backup had {mib} MiB of it already, which were not sent"),
                );
            }
            DiskEvent::CopyStarted { .. }
            | DiskEvent::CopyProgress { .. }
            | DiskEvent::Copied
            | DiskEvent::AttachFailed { .. }
            | DiskEvent::Marked { .. }
            | DiskEvent::Committed { .. }
            | DiskEvent::PrimaryLost { .. }
            | DiskEvent::Disconnected { .. } => {}
        }
    }

    /// The log's link to a host broke: if it is the backup's, so will the session.
    pub(in crate::vm) fn peer_link_lost(&mut self, peer: ReplicaId) {
        if let Some(primary) = self.primary()
            && let Some(session) = &primary.session
            && session.peer == peer
            && let Some(closer) = &session.closer
        {
            closer.close();
        }
    }

    pub(in crate::vm) fn session_stream_ended(&mut self, id: u64) {
        // The session's own thread reports with its reason; an idle one has to be woken.
        if let Some(primary) = self.primary()
            && let Some(session) = &mut primary.session
            && session.id == id
        {
            session.jobs = None;
            if primary.epochs.is_synced() && primary.epochs.run().is_none() {
                self.session_ended(id, "the backup closed the stream");
            }
        } else {
            self.backup_stream_ended(id);
        }
    }

    /// A session's thread has ended, of itself or because the loop has ended the session.
    pub(in crate::vm) fn session_thread_ended(&mut self, id: u64, why: &str, torn: bool) {
        if self.is_session(id) {
            self.session_ended(id, why);
        } else {
            self.backup_session_ended(id, why, torn);
        }
        if let Some(primary) = self.primary() {
            primary.lingers.take_if(|lingers| lingers.id == id);
        }
    }

    /// A VM that its session's thread has stopped, and that QEMU does not let run on.
    pub(in crate::vm) fn vm_stands(&mut self, id: u64, why: &str) {
        let lingers =
            |primary: &PrimaryRole| primary.lingers.as_ref().is_some_and(|lingers| lingers.id == id);
        if self.is_session(id) || self.primary().is_some_and(|primary| lingers(primary)) {
            self.machine_died(&format!("it does not resume after a broken sync: {why}"));
        }
    }

    pub(in crate::vm) fn session_ended(&mut self, id: u64, why: &str) {
        if !self.is_session(id) {
            return;
        }
        let host = self.session_host();
        let complete = self.agreement.state().complete;
        let now_us = self.now_us();
        let Some(primary) = self.primary() else { return };
        let (Some(session), Some(ended)) = (primary.session.take(), primary.epochs.session_ended()) else {
            return;
        };
        if ended.phase != Phase::Connecting {
            // It lets the VM run on if it has stopped it, and says when it has ended.
            primary.lingers = Some(Lingers {
                id,
                since_us: now_us,
                told: false,
            });
        }
        if let Some(closer) = &session.closer {
            closer.close();
        }
        if let Some(machine) = &primary.machine {
            machine.disks.detach();
        }
        primary.progress = None;
        primary.rejoin_at_us = now_us + REJOIN_US;
        if ended.handed {
            // As it should be: the backup has closed the stream because it was elected. The group says the rest.
            return;
        }
        primary.sync_status.aborted += u64::from(ended.broken);
        let is_left = primary.guest.is_left(now_us);
        if let Some(reply) = primary.switchover.take() {
            let why = match is_left {
                true => "the VM is left to the backup, without a last sync".to_owned(),
                false => format!("the backup was lost ({why})"),
            };
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(format!("not handed over: {why}")));
        }
        if is_left {
            // The backup is to go on, so it is neither lost nor dropped: the group says the rest.
            return self.forget_cut();
        }
        self.forget_cut();
        if ended.phase == Phase::Connecting {
            tracing::debug!(vm = self.config.name, "host '{host}' cannot be brought in: {why}");
        } else {
            self.say_backup_lost(&host, why, complete.contains(session.peer));
        }
        if complete.contains(session.peer) || ended.phase == Phase::LastSync {
            self.drop_backup_once_answered();
        }
    }

    /// Now, or as soon as somebody answers who could agree.
    fn drop_backup_once_answered(&mut self) {
        let now_us = self.now_us();
        let answered = self.group.may_speak(now_us);
        if self.agreement.leadership.may_drop_backup(answered) {
            return self.drop_backup();
        }
        if let Some(primary) = self.primary() {
            primary.rejoin_at_us = now_us; // `look_for_backup` drops it then.
        }
    }

    fn say_backup_lost(&mut self, host: &str, why: &str, was_complete: bool) {
        let text = format!("host '{host}': {why}");
        if was_complete {
            self.event(EventKind::BackupLost, text);
        } else {
            self.join_failed(text);
        }
    }

    /// A join that is tried again because the last one failed is not worth a word.
    pub(in crate::vm) fn join_begins(&self, text: impl Into<String>) {
        if self.shown.join_complaint.is_none() {
            self.event(EventKind::Joining, text);
        }
    }

    /// A join that fails again and again for the same reason is told of once, and counted.
    pub(in crate::vm) fn join_failed(&mut self, why: impl Into<String>) {
        let why = why.into();
        if let Some(known) = self
            .shown
            .join_complaint
            .as_mut()
            .filter(|known| known.why == why)
        {
            known.times = known.times.saturating_add(1);
            return self.wake_followers();
        }
        self.event(EventKind::JoinFailed, &*why);
        let passes = why.ends_with(NOT_READY);
        self.shown.join_complaint = Some(JoinProblem {
            why,
            times: 1,
            passes,
        });
    }

    /// Invariant 2: outputs wait until this is agreed.
    pub(super) fn drop_backup(&mut self) {
        self.say_it_is_alone();
    }

    /// Proposes that nobody else is complete.
    pub(in crate::vm) fn say_it_is_alone(&mut self) -> bool {
        self.propose(&Agreed::Complete {
            set: ReplicaSet::one(self.me),
            epoch: self.agreement.state().epoch,
        })
    }
}

/// A backup of an earlier build knows the list alone.
fn known_to_both(compare: Compare, version: u16) -> Compare {
    if compare == Compare::Tree && version < TREE_SINCE {
        tracing::warn!(
            "the backup speaks protocol {version}, and sync.compare = \"tree\" needs {TREE_SINCE}: this session compares lists"
        );
        return Compare::List;
    }
    compare
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_of_an_earlier_build_is_not_asked_for_trees() {
        for version in 2..=5 {
            let tree = known_to_both(Compare::Tree, version);
            assert_eq!(tree == Compare::Tree, version >= 4, "protocol {version}");
            assert_eq!(known_to_both(Compare::List, version), Compare::List);
        }
    }
}
