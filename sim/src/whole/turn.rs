//! A loop's turn: it hears what its consensus has told, applies what is agreed, works on its session, and lets out what may leave.

use super::host::{BackupCopy, Copy, Heard, Host, PrimaryCopy};
use super::world::{World, state_of};
use bytes::Bytes;
use dunlin_core::agreed::{Agreed, Frame, ReplicaSet};
use dunlin_core::consensus::{EntryKind, Event, Role};
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::Inputs;
use dunlin_core::replica::epoch::primary::Phase;
use dunlin_core::replica::leadership::{Lead, Part, Resumes, Settled, Step};
use dunlin_core::replica::log_cut::{Cut, LOG_PARTS};
use dunlin_core::units::{Epoch, Index, ReplicaId};
use dunlin_core::wire::agreed;

/// What a log is meant to hold: where nobody follows it is cut an eighth behind.
const LOG_LIMITS: (usize, usize) = (128, 64 << 10);
/// And so it has two parts of eight at most.
const MOST_UNCUT: usize = 2 * LOG_LIMITS.0 / LOG_PARTS;

impl World {
    pub(super) fn turn(&mut self, id: u8) {
        self.hear(id);
        self.look_at_appended(id);
        self.look_after_loss(id);
        self.set_may_lead(id);
        self.apply(id);
        self.propose_unsaid(id);
        self.vm_works(id);
        match self.host(id).leadership.part() {
            Part::Primary => self.primary_turn(id),
            Part::Backup => self.backup_turn(id),
            Part::None => self.hear_joins(id),
        }
        self.hear(id);
        self.apply(id);
        self.release(id);
        self.look_at_appended(id);
        self.readmit_hosts(id);
        self.end_by_order(id);
        self.set_may_lead(id);
    }

    pub(super) fn host(&mut self, id: u8) -> &mut Host {
        &mut self.hosts[usize::from(id)]
    }

    fn hear(&mut self, id: u8) {
        while let Some(heard) = self.host(id).heard.pop_front() {
            match heard {
                Heard::Leads => self.elected(id),
                Heard::Follows(leader) => self.follows(id, leader),
                Heard::Snapshot(snapshot) => {
                    self.note(|| format!("{id} gets a snapshot of {:?}", snapshot.last));
                    let host = self.host(id);
                    host.leadership.installed(state_of(&snapshot));
                    host.applied = snapshot.last.index;
                    host.log_cut.installed(snapshot.last.index);
                    host.alone_since = None;
                    // Its copy never saw the inputs below it.
                    self.end_copy(id);
                    let through = snapshot.last.index;
                    self.step(id, Event::SnapshotTaken);
                    self.step(id, Event::Applied { through });
                }
            }
        }
    }

    fn elected(&mut self, id: u8) {
        self.note(|| format!("{id} is elected"));
        let host = self.host(id);
        host.leadership.elected();
        host.unsaid.clear();
        let mut stream = None;
        match &mut host.copy {
            Some(Copy::Backup(backup)) => {
                stream = Some(backup.session);
                if backup.epochs.elected() {
                    host.log_cut.sync_lost();
                }
            }
            Some(Copy::Primary(primary)) => primary.epochs.elected(),
            None => {}
        }
        if let Some(stream) = stream {
            self.close(stream);
        }
    }

    fn follows(&mut self, id: u8, leader: Option<ReplicaId>) {
        let host = self.host(id);
        host.leadership.deposed();
        let over = match host.primary() {
            Some(primary) => primary.epochs.deposed(leader.is_some()),
            None => false,
        };
        if over {
            self.forget_cut(id);
        }
    }

    fn look_at_appended(&mut self, id: u8) {
        let host = self.host(id);
        let Some(node) = &host.node else { return };
        let entry = |index| node.entry(index).filter(|_| !node.awaits_owner()).cloned();
        host.leadership
            .look_at_appended(host.applied, node.appended(), entry);
    }

    /// Applies what is agreed, as far as no sync holds it back.
    fn apply(&mut self, id: u8) {
        self.look_at_appended(id);
        loop {
            let host = self.host(id);
            let Some(node) = &host.node else { return };
            if host.holds_log() || host.applied >= node.committed() {
                return;
            }
            let index = host.applied.next();
            if node.awaits_owner() {
                return;
            }
            let Some(entry) = node.entry(index).cloned() else {
                return;
            };
            let leads = entry.stamp.term == node.term() && node.role() == Role::Leader;
            host.applied = index;
            let bytes = entry.payload.len();
            match entry.kind {
                EntryKind::Members => {}
                EntryKind::Barrier if leads => self.leads(id),
                EntryKind::Barrier => {}
                EntryKind::Data => {
                    let entry = agreed::decode(entry.payload).expect("this world's own");
                    self.apply_entry(id, index, entry);
                }
            }
            self.step(id, Event::Applied { through: index });
            self.cut_alone(id, bytes);
        }
    }

    fn apply_entry(&mut self, id: u8, index: Index, entry: Agreed) {
        let host = self.host(id);
        if !host.leadership.apply(index, &entry) {
            return;
        }
        if matches!(entry, Agreed::Complete { set, .. } if host.leadership.appended_complete() == set) {
            host.unsaid.agreed(&entry);
        }
        match entry {
            Agreed::Frames(frames) => {
                for frame in frames {
                    self.frame_is_agreed(id, &frame);
                    let input = frame.bytes.as_ref().try_into().map_or(0, u64::from_be_bytes);
                    self.takes_input(id, input);
                }
            }
            Agreed::Sync { epoch } => {
                let host = self.host(id);
                host.log_cut.sync_agreed(index, host.leadership.state());
                host.alone_since = None;
                self.sync_agreed(id, epoch);
            }
            Agreed::SyncDone { .. } => {
                let cut = self.host(id).log_cut.sync_done();
                self.cut_log(id, cut);
            }
            Agreed::Complete { set, epoch } => {
                self.host(id).alone_since = (set.len() == 1).then_some(index);
                let cut = self.host(id).log_cut.complete_agreed(set);
                self.cut_log(id, cut);
                self.complete_agreed(id, epoch);
            }
            Agreed::Timed { .. } | Agreed::Seed(_) | Agreed::Policy(_) | Agreed::Hosts(_) => {}
            Agreed::Down => self.end_is_agreed(id, index),
        }
    }

    /// Its VM takes an input, and says a word.
    pub(super) fn takes_input(&mut self, id: u8, input: u64) {
        let whim = match self.random.chance(self.whims) {
            true => self.random.draw(),
            false => 0,
        };
        let (mut said, mut written) = (None, None);
        match &mut self.host(id).copy {
            Some(Copy::Primary(primary)) if primary.boots_at_us.is_none() => {
                let word = primary.vm.input(input, whim);
                primary.held.push_back((primary.epoch, word));
                written = Some(word);
            }
            Some(Copy::Backup(backup)) if backup.epochs.executes_inputs() => {
                let word = backup.vm.input(input, whim);
                said = backup
                    .epochs
                    .tells_output()
                    .then_some((backup.session, backup.epoch, word));
            }
            Some(Copy::Primary(_) | Copy::Backup(_)) | None => {}
        }
        self.host(id).image.said.extend(written);
        if let Some((stream, epoch, word)) = said {
            self.say(stream, id, super::host::Word::Said(epoch, word));
        }
    }

    fn complete_agreed(&mut self, id: u8, epoch: Epoch) {
        let host = self.host(id);
        let joins = host
            .primary()
            .is_some_and(|primary| primary.epochs.session() == Some(Phase::LastSync));
        let settled = host.leadership.complete_agreed(joins);
        self.note(|| format!("{id}: {settled:?}"));
        match settled {
            Settled::Nothing | Settled::Follows => {}
            Settled::Boots => self.boots(id),
            Settled::Speaks => self.speaks(id),
            Settled::Alone => self.tally.drops += 1,
            Settled::Protected => {
                self.tally.joins += 1;
                self.output_is_protected(id, epoch);
                if let Some(primary) = self.host(id).primary() {
                    primary.acknowledged = primary.acknowledged.max(epoch);
                    primary.epochs.backup_is_complete();
                }
            }
            Settled::Dropped => {
                if self
                    .host(id)
                    .backup()
                    .is_some_and(|backup| backup.epochs.is_whole())
                {
                    self.end_copy(id);
                }
            }
            Settled::EndedHere => self.end_copy(id),
        }
    }

    /// A take-over is agreed: the VM has to explain all that clients were told.
    fn speaks(&mut self, id: u8) {
        let first = self.first;
        let host = self.host(id);
        let Some(Copy::Backup(backup)) = host.copy.take() else {
            return self.verdict(format!("{id} speaks without a backup's copy"));
        };
        let BackupCopy {
            vm, epoch, machine, ..
        } = *backup;
        host.copy = Some(Copy::Primary(Box::new(PrimaryCopy {
            machine,
            ..PrimaryCopy::new(vm, first, epoch)
        })));
        self.output_takes_over(id);
        self.tally.take_overs += 1;
        self.check_explains(id, "that took over");
    }

    pub(super) fn check_explains(&mut self, id: u8, which: &str) {
        let Some(Copy::Primary(primary)) = &self.hosts[usize::from(id)].copy else {
            return;
        };
        if let Some(why) = self.unexplained_frames(id) {
            return self.verdict(format!("the VM {which}, on {id}, does not explain: {why}"));
        }
        let unexplained = self.released.difference(&primary.vm.said).count();
        if unexplained > 0 {
            self.verdict(format!(
                "the VM {which}, on {id}, does not explain {unexplained} words that clients were told"
            ));
        }
    }

    fn leads(&mut self, id: u8) {
        let host = self.host(id);
        let candidacy = host.candidacy();
        let lead = host.leadership.leads_now(candidacy);
        self.note(|| format!("{id} leads: {lead:?}"));
        match lead {
            Lead::Ends => {}
            Lead::Boots => {
                self.say_it_is_alone(id);
            }
            Lead::TakesOver => self.go_on_taking_over(id),
            Lead::GoesOn => self.speak_again(id),
            Lead::StepsDown => {
                self.end_copy(id);
                self.host(id).cold.end_mandate();
                self.step(id, Event::StepDown);
            }
        }
    }

    fn speak_again(&mut self, id: u8) {
        let survives = self.session_survives(id);
        let resumes = self.host(id).leadership.resumes(survives);
        self.note(|| format!("{id} goes on: {resumes:?}"));
        match resumes {
            Resumes::Alone | Resumes::Protected => self.tally.resumed += 1,
            Resumes::DropsBackup => {
                self.say_it_is_alone(id);
                self.may_die_soon(id, 300_000);
            }
        }
    }

    pub(super) fn go_on_taking_over(&mut self, id: u8) {
        let work_us = self.random.between(100, 20_000);
        let now_us = self.now_us;
        let host = self.host(id);
        let term = host.term();
        let all_applied = !host.holds_log()
            && host
                .node
                .as_ref()
                .is_some_and(|node| host.applied >= node.committed());
        let Some(backup) = host.backup() else { return };
        let settled = all_applied && backup.epochs.is_settled();
        match self.host(id).leadership.take_over_step(settled, term) {
            Step::Nothing => {}
            Step::Begins => {
                if let Some(backup) = self.host(id).backup() {
                    backup.ordinary_at_us = Some(now_us + work_us);
                }
            }
            Step::Claims => {
                if self.say_it_is_alone(id) {
                    self.host(id).leadership.claimed(term);
                }
                self.may_die_soon(id, 50_000);
            }
        }
    }

    /// Proposes that nobody else is complete.
    pub(super) fn say_it_is_alone(&mut self, id: u8) -> bool {
        let epoch = self.host(id).leadership.state().epoch;
        let set = ReplicaSet::one(ReplicaId(id));
        self.propose(id, &Agreed::Complete { set, epoch })
    }

    pub(super) fn end_copy(&mut self, id: u8) {
        let host = self.host(id);
        let stream = match host.copy.take() {
            Some(Copy::Backup(backup)) => Some(backup.session),
            Some(Copy::Primary(primary)) => primary.session,
            None => None,
        };
        host.leadership.ends();
        host.log_cut.sync_lost();
        if let Some(stream) = stream {
            self.close(stream);
        }
    }

    pub(super) fn forget_cut(&mut self, id: u8) {
        let host = self.host(id);
        host.log_cut.sync_lost();
        match &mut host.copy {
            Some(Copy::Primary(primary)) => primary.epochs.let_log_go(),
            Some(Copy::Backup(backup)) => backup.epochs.let_log_go(),
            None => {}
        }
    }

    /// Where nobody follows.
    fn cut_alone(&mut self, id: u8, bytes: usize) {
        let host = self.host(id);
        let (index, state) = (host.applied, host.leadership.state());
        let cut = host.log_cut.applied(index, bytes, LOG_LIMITS, state);
        self.cut_log(id, cut);
        let host = self.host(id);
        let uncut = |from: Index| index.0.saturating_sub(from.0) as usize;
        let first = host.node.as_ref().map_or(index, |node| node.first());
        if host.alone_since.is_some_and(|since| uncut(since) > MOST_UNCUT) && uncut(first) > MOST_UNCUT {
            self.verdict(format!("the log of {id} is not cut, though nobody needs it"));
        }
    }

    fn cut_log(&mut self, id: u8, cut: Option<Cut>) {
        if let Some(Cut { through, state }) = cut {
            self.step(id, Event::Truncate { through, state });
        }
    }

    /// Whether this host takes what clients say, and how it goes on to the VM.
    pub(super) fn takes_inputs(&mut self, id: u8) -> Option<Inputs> {
        let now_us = self.now_us;
        let host = self.host(id);
        let takes = host.leadership.leads()
            && host.leadership.voice() != Voice::Shut
            && host.asleep_until_us <= now_us
            && host.node.as_ref().is_some_and(|node| node.role() == Role::Leader);
        let primary = host.primary()?;
        (takes && primary.boots_at_us.is_none()).then(|| primary.epochs.inputs())
    }

    /// A client's input reaches whoever speaks for the VM.
    pub(super) fn input_arrives(&mut self) {
        for id in 0..self.hosts.len() as u8 {
            let Some(how) = self.takes_inputs(id) else {
                continue;
            };
            self.inputs += 1;
            self.tally.inputs += 1;
            let input = self.inputs;
            match how {
                Inputs::Direct => self.takes_input(id, input),
                Inputs::Agreed => {
                    let bytes = Bytes::copy_from_slice(&input.to_be_bytes());
                    self.propose(id, &Agreed::Frames(vec![Frame { nic: 0, bytes }]));
                }
            }
        }
    }

    /// What may leave, leaves.
    fn release(&mut self, id: u8) {
        let clock_us = self.clock_us(id);
        let host = self.host(id);
        let (voice, leads) = (host.leadership.voice(), host.leadership.leads());
        let Some(node) = &host.node else { return };
        let leased = node.speaks_until_us().is_some_and(|until_us| clock_us < until_us);
        // The daemon asks its group as well whether it leads; here leadership has to know.
        let may_speak = match voice {
            Voice::Alone => leads,
            Voice::Protected => leads && leased,
            Voice::Backup | Voice::Shut => false,
        };
        let term = node.term();
        if !may_speak {
            return;
        }
        let frames = self.take_released(id);
        let mut words = Vec::new();
        if let Some(primary) = self.host(id).primary() {
            while let Some((epoch, word)) = primary.held.front().copied() {
                let matched = primary.epochs.rules().compares()
                    && epoch == primary.epoch
                    && primary.matched.front() == Some(&word);
                if voice == Voice::Protected && epoch > primary.acknowledged && !matched {
                    break;
                }
                if matched {
                    primary.matched.pop_front();
                }
                primary.held.pop_front();
                words.push(word);
            }
        }
        if words.is_empty() && frames.is_empty() {
            return;
        }
        // Not when it begins to lead: one that stood still may have been deposed meanwhile, and says nothing any more.
        if self.speaker != (id, term) {
            self.speaker = (id, term);
            self.check_explains(id, "that speaks");
        }
        if term < self.spoken_in {
            let newer = self.spoken_in.0;
            self.verdict(format!(
                "{id} speaks in term {} after term {newer} has spoken",
                term.0
            ));
        }
        self.check_silence(id, term);
        self.spoken_in = self.spoken_in.max(term);
        self.tally.released += words.len() as u64;
        self.released.extend(words);
        self.frames_leave(id, &frames);
    }
}
