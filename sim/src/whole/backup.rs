//! A backup's turn: it is brought in, acknowledges and applies syncs, and takes over.

use super::host::{BackupCopy, Copy, Staged, Word};
use super::world::World;
use dunlin_core::consensus::Consensus;
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::backup::{BackupEpochs, Phase};
use dunlin_core::replica::leadership::Invited;
use dunlin_core::replica::sync::bugs::Bugs;
use dunlin_core::sync::tenure::{Leave, Tenure};
use dunlin_core::units::{ReplicaId, Term};

impl World {
    pub(super) fn backup_turn(&mut self, id: u8) {
        let Some(stream) = self.host(id).backup().map(|backup| backup.session) else {
            return;
        };
        while let Some(word) = self.arrived(stream, id) {
            let takes_over = self.host(id).leadership.takes_over();
            let Some(backup) = self.host(id).backup() else {
                return;
            };
            match word {
                Word::Sync(staged) if !takes_over => backup.staged = Some(staged),
                Word::NewTerm(term) => backup.tenure.told(term),
                _ => {}
            }
        }
        self.drain(id);
        self.load(id);
        self.give_leave(id);
        if self.is_closed(stream) {
            self.backup_session_ended(id);
        }
        self.finish_take_over(id);
        if self.host(id).leadership.leads() {
            self.go_on_taking_over(id);
        }
        if self
            .host(id)
            .backup()
            .is_some_and(|backup| backup.epochs.phase() == Phase::Orphaned)
        {
            self.hear_joins(id);
        }
    }

    /// Who wants this host as a backup.
    pub(super) fn hear_joins(&mut self, id: u8) {
        let streams: Vec<(u64, u8)> = self
            .streams
            .iter()
            .filter(|stream| stream.backup == id && !stream.closed)
            .map(|stream| (stream.id, stream.primary))
            .collect();
        for (stream, primary) in streams {
            match self.arrived(stream, id) {
                Some(Word::Join(term)) => self.accept_join(id, stream, primary, term),
                Some(_) => self.close(stream),
                None => {}
            }
        }
    }

    fn accept_join(&mut self, id: u8, stream: u64, primary: u8, term: Term) {
        let (first, bug) = (self.first, self.bug);
        let host = self.host(id);
        let primary = ReplicaId(primary);
        let leader = host.node.as_ref().and_then(Consensus::leader);
        let follows = term == host.term() && leader == Some(primary);
        let orphaned = host
            .backup()
            .is_some_and(|backup| backup.epochs.phase() == Phase::Orphaned);
        match host.leadership.invited(follows, orphaned) {
            Invited::Joins => {}
            Invited::EndsStaleCopy => {
                self.end_copy(id);
                return self.close(stream);
            }
            Invited::Refuses => return self.close(stream),
        }
        let epoch = self.host(id).leadership.state().epoch;
        let machine = self.new_machine(Voice::Backup, epoch.next());
        let host = self.host(id);
        host.leadership.joins();
        host.leadership.keeps_output();
        host.copy = Some(Copy::Backup(Box::new(BackupCopy {
            vm: Default::default(),
            machine,
            epochs: BackupEpochs::new(first).with_bugs(Bugs::with(bug)),
            epoch,
            session: stream,
            tenure: Tenure::new(primary, term),
            staged: None,
            loading: None,
            ordinary_at_us: None,
        })));
        self.image_is_copied_anew(id);
        self.say(stream, id, Word::Ready);
    }

    /// The VM has what was agreed before the sync: a model VM has taken it at once.
    fn drain(&mut self, id: u8) {
        if let Some(backup) = self.host(id).backup()
            && matches!(backup.epochs.phase(), Phase::Draining(_))
        {
            backup.epochs.drained();
        }
    }

    /// May the sync that lies here whole be acknowledged?
    fn give_leave(&mut self, id: u8) {
        let (now_us, loads_at_us) = (self.now_us, self.now_us + self.random.between(100, 10_000));
        let host = self.host(id);
        let (term, leader) = (host.term(), host.node.as_ref().and_then(Consensus::leader));
        let takes_over = host.leadership.takes_over();
        let Some(backup) = host.backup() else { return };
        let Some(staged) = &backup.staged else { return };
        let next = Rules::of(staged.next, false);
        let waits_for_log =
            staged.agreed && backup.epochs.is_whole() && backup.epochs.phase() != Phase::Syncing;
        if backup.epochs.awaits_entry(next) || (waits_for_log && !takes_over) || backup.loading.is_some() {
            return;
        }
        let leave = match takes_over {
            true => Leave::Refused,
            false => backup.tenure.leave(now_us, term, leader),
        };
        let stream = backup.session;
        match leave {
            Leave::Waits => {}
            Leave::Refused => {
                backup.staged = None;
                self.close(stream);
            }
            Leave::Given => {
                let Some(staged) = backup.staged.take() else {
                    return;
                };
                backup.epochs.acknowledges(next);
                let epoch = staged.epoch;
                self.output_is_replaced(id, epoch, staged.line.as_deref());
                let Some(backup) = self.host(id).backup() else {
                    return;
                };
                backup.loading = Some((loads_at_us, staged));
                self.say(stream, id, Word::Acknowledged(epoch));
            }
        }
    }

    /// An acknowledged sync is applied.
    fn load(&mut self, id: u8) {
        let now_us = self.now_us;
        let Some(backup) = self.host(id).backup() else {
            return;
        };
        let due = backup.loading.take_if(|(at_us, _)| *at_us <= now_us);
        let Some((_, Staged { epoch, vm, line, .. })) = due else {
            return;
        };
        backup.vm = vm;
        backup.epoch = epoch.next();
        let stream = backup.session;
        backup.epochs.loaded();
        self.vm_is_replaced(id, epoch, line);
        self.image_moves_on(id);
        self.drain(id);
        self.say(stream, id, Word::Loaded);
    }

    /// The stream to the primary has ended: what is being applied is applied first.
    fn backup_session_ended(&mut self, id: u8) {
        let Some(backup) = self.host(id).backup() else {
            return;
        };
        if backup.loading.is_some() || backup.epochs.phase() == Phase::Orphaned {
            return;
        }
        backup.staged = None;
        let whole = backup.epochs.session_ended();
        self.forget_cut(id);
        if !whole {
            self.end_copy(id);
        }
    }

    fn finish_take_over(&mut self, id: u8) {
        let now_us = self.now_us;
        let Some(backup) = self.host(id).backup() else {
            return;
        };
        if backup.ordinary_at_us.take_if(|at_us| *at_us <= now_us).is_some() {
            self.image_is_taken_over(id);
            self.host(id).leadership.took_over();
        }
    }
}
