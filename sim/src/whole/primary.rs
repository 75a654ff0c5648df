//! A primary's turn: its session with a backup, and its syncs.

use super::host::{Copy, Staged, Stream, Word};
use super::world::{WITNESS, World};
use dunlin_core::agreed::{Agreed, ReplicaSet};
use dunlin_core::output::gate::Voice;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::primary::{Loaded, Phase};
use dunlin_core::replica::sync::bugs::Bug;
use dunlin_core::sync::tenure::Standing;
use dunlin_core::units::{Epoch, ReplicaId};

const REJOIN_US: u64 = 30_000;

impl World {
    pub(super) fn primary_turn(&mut self, id: u8) {
        self.boot(id);
        let stream = self.host(id).primary().and_then(|primary| primary.session);
        if let Some(stream) = stream {
            while let Some(word) = self.arrived(stream, id) {
                self.primary_hears(id, stream, word);
            }
            if self.is_closed(stream) {
                self.session_ended(id);
            }
        }
        self.drop_lost_backup(id);
        self.look_for_backup(id);
        self.begin_due_sync(id);
        self.start_drained(id);
    }

    fn boot(&mut self, id: u8) {
        let now_us = self.now_us;
        let host = self.host(id);
        let due = |primary: &mut super::host::PrimaryCopy| {
            primary.boots_at_us.take_if(|at_us| *at_us <= now_us).is_some()
        };
        if host.primary().is_some_and(due) {
            host.leadership.booted();
        }
    }

    fn may_speak(&mut self, id: u8) -> bool {
        let clock_us = self.clock_us(id);
        let node = self.host(id).node.as_ref();
        let until_us = node.and_then(|node| node.speaks_until_us());
        until_us.is_some_and(|until_us| clock_us < until_us)
    }

    fn primary_hears(&mut self, id: u8, stream: u64, word: Word) {
        let copied_at_us = self.now_us + self.random.between(1_000, 30_000);
        let Some(primary) = self.host(id).primary() else {
            return;
        };
        if primary.session != Some(stream) {
            return;
        }
        if !matches!(word, Word::Said(..) | Word::Frames(..) | Word::Idle(_)) {
            self.note(|| format!("{id} hears {word:?}"));
        }
        if matches!(word, Word::Loaded) {
            self.backup_has_loaded(id);
        }
        let Some(primary) = self.host(id).primary() else {
            return;
        };
        match word {
            Word::Ready => {
                primary.epochs.join_begins();
                primary.copied_at_us = copied_at_us;
            }
            Word::Said(epoch, word) => {
                if epoch == primary.epoch && primary.epochs.rules().compares() {
                    primary.matched.push_back(word);
                }
            }
            Word::Frames(epoch, frames) => {
                if let Some(machine) = self.host(id).machine() {
                    machine.output.backup_said(epoch, frames);
                }
            }
            Word::Idle(applied) => {
                if let Some(machine) = self.host(id).machine() {
                    machine.syncs.backup_applied = applied;
                }
            }
            Word::Acknowledged(epoch) => {
                let joins = primary.epochs.run().is_some_and(|run| run.joins);
                let agreed = primary.epochs.acknowledged(epoch);
                self.sync_acknowledged(id, stream, epoch, joins, agreed);
            }
            Word::Loaded => match primary.epochs.loaded() {
                Loaded::NextEpoch { .. } => primary.matched.clear(),
                Loaded::Switchover | Loaded::Nothing => {}
            },
            Word::Join(_) | Word::Sync(_) | Word::NewTerm(_) => {}
        }
    }

    fn sync_acknowledged(&mut self, id: u8, stream: u64, epoch: Epoch, joins: bool, agreed: bool) {
        self.tally.syncs += 1;
        self.may_die_soon(id, 10_000);
        let backup = self
            .streams
            .iter()
            .find(|known| known.id == stream)
            .map(|known| known.backup);
        let Some(backup) = backup else { return };
        self.output_is_covered(id, epoch, joins);
        if joins {
            let set = ReplicaSet::one(ReplicaId(id)).with(ReplicaId(backup));
            self.propose(id, &Agreed::Complete { set, epoch });
            return;
        }
        if let Some(primary) = self.host(id).primary() {
            primary.acknowledged = primary.acknowledged.max(epoch);
        }
        if agreed {
            self.propose(id, &Agreed::SyncDone { epoch });
        }
    }

    /// The session with the backup is over.
    fn session_ended(&mut self, id: u8) {
        let now_us = self.now_us;
        let answered = self.may_speak(id);
        let host = self.host(id);
        let complete = host.leadership.state().complete;
        let Some(primary) = host.primary() else { return };
        let Some(stream) = primary.session.take() else {
            return;
        };
        let Some(ended) = primary.epochs.session_ended() else {
            return;
        };
        primary.rejoin_at_us = now_us + REJOIN_US;
        primary.matched.clear();
        self.note(|| format!("{id}: the session ends at {ended:?}"));
        self.forget_cut(id);
        self.close(stream);
        let was_complete = complete.len() > 1;
        let host = self.host(id);
        let drops = was_complete || ended.phase == Phase::LastSync;
        if drops && host.leadership.may_drop_backup(answered) {
            self.say_it_is_alone(id);
        } else if drops && let Some(primary) = host.primary() {
            primary.rejoin_at_us = now_us;
        }
    }

    /// What could not be said at once, or was lost with a term.
    fn drop_lost_backup(&mut self, id: u8) {
        let now_us = self.now_us;
        let answered = self.may_speak(id);
        let host = self.host(id);
        let leadership = &host.leadership;
        let due = leadership.leads()
            && leadership.voice() == Voice::Protected
            && leadership.may_drop_backup(answered);
        let Some(primary) = host.primary() else { return };
        if due && primary.session.is_none() && now_us >= primary.rejoin_at_us {
            primary.rejoin_at_us = now_us + REJOIN_US;
            self.say_it_is_alone(id);
        }
    }

    fn look_for_backup(&mut self, id: u8) {
        let (now_us, next) = (self.now_us, self.next_stream + 1);
        let host = self.host(id);
        let alone = host.leadership.leads() && host.leadership.voice() == Voice::Alone;
        let term = host.term();
        let Some(primary) = host.primary() else { return };
        let busy =
            primary.session.is_some() || primary.boots_at_us.is_some() || now_us < primary.rejoin_at_us;
        if !alone || busy {
            return;
        }
        primary.epochs.session_begins();
        primary.session = Some(next);
        self.next_stream = next;
        let backup = (0..WITNESS).find(|other| *other != id).unwrap_or(id);
        self.streams
            .retain(|stream| !stream.closed || stream.primary != id);
        self.streams.push(Stream {
            id: next,
            primary: id,
            backup,
            to_primary: Default::default(),
            to_backup: Default::default(),
            closed: self.hosts[usize::from(backup)].node.is_none(),
        });
        self.marks_image(id);
        self.say(next, id, Word::Join(term));
    }

    /// Syncs begin when a copy is done, and now and then.
    fn begin_due_sync(&mut self, id: u8) {
        let now_us = self.now_us;
        let now_and_then = self.random.chance(60_000);
        let output_asks = self.output_asks_for_sync(id);
        let host = self.host(id);
        let leads = host.leadership.leads();
        let voice = host.leadership.voice();
        let Some(primary) = host.primary() else { return };
        if primary.epochs.session() == Some(Phase::Joining) && now_us >= primary.copied_at_us {
            primary.epochs.join_copied();
        }
        let joins = primary.epochs.session() == Some(Phase::Copied);
        let refused = primary.epochs.take_refused(leads).is_some();
        let waits = primary
            .held
            .front()
            .is_some_and(|(epoch, _)| *epoch == primary.epoch);
        let is_due =
            voice == Voice::Protected && primary.epochs.is_synced() && (now_and_then && waits || output_asks);
        if leads && primary.epochs.may_begin() && (joins || refused || is_due) {
            self.begin_sync(id);
        }
    }

    fn begin_sync(&mut self, id: u8) {
        let (now_us, first) = (self.now_us, self.first);
        let drawn = self.random.pick(&Mode::ALL).map(|mode| Rules::of(mode, false));
        // With clients it is as with policies: only where outputs are compared at first does the mode change.
        let changes = self.random.chance(200_000) && (self.net.is_none() || first.compares());
        let Some(primary) = self.host(id).primary() else {
            return;
        };
        let next = match primary.epochs.is_synced() {
            true if changes => drawn.unwrap_or(first),
            true => primary.epochs.rules(),
            false => first,
        };
        let epoch = primary.epoch;
        let asks_log = primary.epochs.begin(now_us, epoch, false, next);
        if asks_log
            && !self.propose(id, &Agreed::Sync { epoch })
            && let Some(primary) = self.host(id).primary()
        {
            primary.epochs.log_refused();
        }
    }

    /// `Sync(epoch)` is agreed.
    pub(super) fn sync_agreed(&mut self, id: u8, epoch: Epoch) {
        let host = self.host(id);
        let deposes = host.leadership.takes_over() || host.leadership.leads();
        match &mut host.copy {
            Some(Copy::Primary(primary)) => {
                primary.epochs.sync_agreed(epoch);
            }
            Some(Copy::Backup(backup)) => {
                backup.epochs.sync_agreed(epoch, deposes);
            }
            None => {}
        }
    }

    /// The VM has its inputs: it stops, its state is copied, and it goes on.
    fn start_drained(&mut self, id: u8) {
        let host = self.host(id);
        let Some(primary) = host.primary() else { return };
        if !primary.epochs.is_draining() {
            return;
        }
        let run = primary.epochs.drained();
        let line = self.draws_line(id, run.joins);
        let speaks_on = self.bug == Some(Bug::SpeaksOnAfterTheLine);
        let host = self.host(id);
        let Some(primary) = host.primary() else { return };
        let last_of_join = primary.epochs.line_drawn();
        primary.epoch = primary.epoch.next();
        primary.epochs.resumed();
        let (vm, session) = (primary.vm.clone(), primary.session);
        if last_of_join && !speaks_on {
            host.leadership.join_line_drawn();
        }
        let staged = Staged {
            epoch: run.epoch,
            vm,
            line,
            next: run.next.mode(),
            agreed: run.agreed,
        };
        if let Some(stream) = session {
            self.say(stream, id, Word::Sync(staged));
        }
    }

    /// Whether the session goes on in a term in which this host leads again.
    pub(super) fn session_survives(&mut self, id: u8) -> bool {
        let host = self.host(id);
        let (term, complete) = (host.term(), host.leadership.state().complete);
        let Some(primary) = host.primary() else {
            return false;
        };
        let Some(stream) = primary.session else {
            return false;
        };
        let epochs = &primary.epochs;
        let standing = Standing {
            complete: epochs.is_synced() && complete.len() > 1,
            copying: matches!(epochs.session(), Some(Phase::Joining | Phase::Copied)) && complete.len() == 1,
            sync_lost: epochs.is_proposed(),
            handed: false,
        };
        if standing.survives() && !self.is_closed(stream) {
            self.say(stream, id, Word::NewTerm(term));
            return true;
        }
        self.session_ended(id);
        false
    }
}
