//! What a host's loop does with its `Output`, as the daemon does it (node's `vm/frames.rs`, and what its joins, syncs and take-overs call).
//!
//! Each function does nothing in a world without clients.

use super::machine::{Line, Machine};
use super::net::Net;
use crate::tcp::guest::Guest;
use crate::whole::host::{BackupCopy, Copy, Host, Word};
use crate::whole::next::Next;
use crate::whole::world::{WITNESS, World};
use dunlin_core::agreed::{Agreed, Frame};
use dunlin_core::output::gate::Voice;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::backup::Phase;
use dunlin_core::replica::epoch::{Inputs, Rules};
use dunlin_core::replica::sync::bugs::Bug;
use dunlin_core::units::{Epoch, ReplicaId};

impl Host {
    /// The copy here, with the voice that this host has.
    pub fn machine(&mut self) -> Option<&mut Machine> {
        let voice = self.leadership.voice();
        let machine = match &mut self.copy {
            Some(Copy::Primary(primary)) => primary.machine.as_deref_mut(),
            Some(Copy::Backup(backup)) => backup.machine.as_deref_mut(),
            None => None,
        }?;
        if machine.output.voice() != voice {
            machine.output.set_voice(voice);
        }
        Some(machine)
    }

    fn vm_runs(&self) -> bool {
        match &self.copy {
            Some(Copy::Primary(primary)) => primary.boots_at_us.is_none(),
            Some(Copy::Backup(backup)) => {
                let is_taken_over = self.leadership.take_over_is().1;
                is_taken_over || backup.epochs.executes_inputs() && !stands_for_sync(backup)
            }
            None => false,
        }
    }

    /// The VM that explains what another host says while this one is complete.
    fn heir(&self) -> Option<&Guest> {
        let Some(Copy::Backup(backup)) = &self.copy else {
            return None;
        };
        // What is acknowledged is always applied.
        let loading = backup.loading.as_ref();
        let line = loading.and_then(|(_, staged)| staged.line.as_deref());
        match line {
            Some(line) => Some(&line.guest),
            None if backup.epochs.is_whole() => backup.machine.as_deref().map(|machine| &machine.guest),
            None => None,
        }
    }
}

fn stands_for_sync(backup: &BackupCopy) -> bool {
    !matches!(backup.epochs.phase(), Phase::Synced | Phase::Orphaned)
}

impl World {
    /// The same world with clients.
    #[must_use]
    pub fn with_clients(mut self) -> Self {
        let mut net = Box::new(Net::new(self.random.draw()));
        if net.happens(500) {
            // Where outputs are compared there is most to be wrong.
            self.first = Rules::of(Mode::Match, false);
        }
        self.net = Some(net);
        self
    }

    /// Clients and network do what is due.
    pub fn net_turn(&mut self) {
        let now_us = self.now_us;
        let Some(net) = &mut self.net else { return };
        let worked = net.works(now_us);
        match worked {
            Ok(frames) => frames.iter().for_each(|frame| self.frame_arrives(frame)),
            Err(what) => self.verdict(what),
        }
        self.plan_net();
    }

    pub fn plan_net(&mut self) {
        let now_us = self.now_us;
        let Some(net) = &mut self.net else { return };
        let Some(next_us) = net.next_us().map(|at_us| at_us.max(now_us)) else {
            return;
        };
        if net.wakes_us <= now_us || next_us < net.wakes_us {
            net.wakes_us = next_us;
            self.plan(next_us - now_us, Next::Net);
        }
    }

    /// A frame from the network reaches whoever takes inputs.
    fn frame_arrives(&mut self, frame: &Frame) {
        let now_us = self.now_us;
        for id in 0..WITNESS {
            let Some(how) = self.takes_inputs(id) else {
                self.overhears(id, frame);
                continue;
            };
            self.tally.inputs += 1;
            if let Some(machine) = self.host(id).machine() {
                machine.output.asked(frame, now_us);
            }
            self.take_in(id, how, frame);
        }
    }

    fn take_in(&mut self, id: u8, how: Inputs, frame: &Frame) {
        match how {
            Inputs::Direct => self.takes_frame(id, frame),
            Inputs::Agreed => {
                self.propose(id, &Agreed::Frames(vec![frame.clone()]));
            }
        }
    }

    /// A host that does not speak for the VM keeps what the network brings to it as well.
    fn overhears(&mut self, id: u8, frame: &Frame) {
        let now_us = self.now_us;
        let floods = self.net.as_ref().is_some_and(|net| net.floods);
        let host = self.host(id);
        let hears = floods && host.asleep_until_us <= now_us && host.backup().is_some();
        if let Some(machine) = host.machine().filter(|_| hears) {
            machine.overheard.heard(frame.clone(), now_us);
        }
    }

    /// A frame is agreed.
    pub fn frame_is_agreed(&mut self, id: u8, frame: &Frame) {
        let now_us = self.now_us;
        let host = self.host(id);
        let is_backup = host.backup().is_some();
        if let Some(machine) = host.machine().filter(|_| is_backup) {
            machine.overheard.agreed(frame, now_us);
        }
        self.takes_frame(id, frame);
    }

    /// The VM gets an input, in its own numbers.
    pub fn takes_frame(&mut self, id: u8, frame: &Frame) {
        let bug = self.bug;
        let host = self.host(id);
        let takes = match &host.copy {
            Some(Copy::Primary(primary)) => primary.boots_at_us.is_none(),
            Some(Copy::Backup(backup)) => backup.epochs.executes_inputs(),
            None => false,
        };
        if let Some(machine) = host.machine().filter(|_| takes) {
            let own = match bug {
                Some(Bug::HearsOthersNumbers) if machine.output.voice() == Voice::Backup => frame.clone(),
                _ => machine.output.heard(frame),
            };
            machine.guest.queue(own);
        }
    }

    /// A turn's part of the VM: the loop reads what it has said, and it says more.
    pub fn vm_works(&mut self, id: u8) {
        let Some(net) = &mut self.net else { return };
        let (now_us, drop_percent, idles) = (self.now_us, net.drop_percent(), net.idles());
        self.read_socket(id);
        self.tell_idle(id);
        let host = self.host(id);
        let runs = host.vm_runs() && !idles;
        let Some(machine) = host.machine().filter(|_| runs) else {
            return;
        };
        // One that has to wait before it says more: its socket is full.
        let worked = match machine.socket.is_empty() {
            true => machine.works(now_us, drop_percent),
            false => Ok(()),
        };
        if let Err(what) = worked {
            self.verdict(format!("the VM on {id}: {what}"));
        }
    }

    /// What the VM has said: held on a primary, kept on a backup, which tells the primary too.
    pub fn read_socket(&mut self, id: u8) {
        let (now_us, late) = (self.now_us, self.bug == Some(Bug::SaysOldWordsAnew));
        let host = self.host(id);
        if late && host.backup().is_some_and(|backup| stands_for_sync(backup)) {
            return;
        }
        let (told_to, stops) = match &host.copy {
            Some(Copy::Primary(primary)) => (None, primary.epochs.is_stopping()),
            Some(Copy::Backup(backup)) => (backup.epochs.tells_output().then_some(backup.session), false),
            None => return,
        };
        let Some(machine) = host.machine() else { return };
        let (epoch, mut told) = (machine.output.epoch(), Vec::new());
        let before = machine.output.held().0;
        while (stops || !machine.output.is_full())
            && let Some(frame) = machine.socket.pop_front()
        {
            told.extend(told_to.map(|_| frame.clone()));
            machine.output.said(frame, now_us);
        }
        let within = machine.is_within_budgets(before, stops);
        if let Err(what) = within {
            self.verdict(format!("the output on {id}: {what}"));
        }
        let lost = self.net.as_mut().is_some_and(|net| net.loses_words());
        if let Some(stream) = told_to.filter(|_| !told.is_empty() && !lost) {
            self.say(stream, id, Word::Frames(epoch, told));
        }
    }

    /// A machine for a copy that begins here.
    pub fn new_machine(&mut self, voice: Voice, epoch: Epoch) -> Option<Box<Machine>> {
        let net = self.net.as_mut()?;
        let seed = net.seed();
        Some(Box::new(Machine::new(voice, epoch, net.budget_bytes, seed)))
    }

    // The primary.

    /// The VM stands at the end of its epoch.
    pub fn draws_line(&mut self, id: u8, last_of_join: bool) -> Option<Box<Line>> {
        self.net.as_ref()?;
        self.read_socket(id);
        let (now_us, compares) = (self.now_us, last_of_join && self.first.compares());
        let early = self.bug == Some(Bug::ReleasesAtTheLine) && !last_of_join;
        let machine = self.host(id).machine()?;
        let epoch = machine.output.epoch();
        let line = machine.line(now_us, compares);
        if early {
            machine.output.acknowledged(epoch);
        }
        Some(Box::new(line))
    }

    /// The backup holds the sync; at a join the group's word comes after that.
    pub fn output_is_covered(&mut self, id: u8, epoch: Epoch, joins: bool) {
        if let Some(machine) = self.host(id).machine() {
            match joins {
                true => machine.output.line_is_covered(),
                false => machine.output.acknowledged(epoch),
            }
        }
        self.synced_now(id);
    }

    /// The group counts the backup as complete since `epoch`.
    pub fn output_is_protected(&mut self, id: u8, epoch: Epoch) {
        if let Some(machine) = self.host(id).machine()
            && machine.output.epoch() > epoch
        {
            machine.output.acknowledged(epoch);
        }
        self.synced_now(id);
    }

    /// The backup's words count from the sync under way on.
    pub fn backup_has_loaded(&mut self, id: u8) {
        let host = self.host(id);
        let Some(Copy::Primary(primary)) = &host.copy else {
            return;
        };
        let epoch = primary.epochs.run().map(|run| run.epoch);
        if let (Some(epoch), Some(machine)) = (epoch, host.machine()) {
            machine.output.backup_loaded(epoch);
        }
    }

    // The backup.

    /// A sync is acknowledged: what the VM has said up to its stop is of the epoch that ends.
    pub fn output_is_replaced(&mut self, id: u8, epoch: Epoch, line: Option<&Line>) {
        let Some(line) = line else { return };
        self.read_socket(id);
        let table = match self.bug {
            Some(Bug::ForgetsNumbers) => Default::default(),
            _ => line.table.clone(),
        };
        let Some(machine) = self.host(id).machine() else {
            return;
        };
        if let Err(error) = machine.output.applied(epoch, &table) {
            self.verdict(format!("{id} cannot read the numbers of connections: {error}"));
        }
    }

    /// It is applied.
    pub fn vm_is_replaced(&mut self, id: u8, epoch: Epoch, line: Option<Box<Line>>) {
        let Some(line) = line else { return };
        let Some(machine) = self.host(id).machine() else {
            return;
        };
        machine.becomes(*line);
        assert_eq!(
            machine.output.epoch(),
            epoch.next(),
            "the output's epoch is its own"
        );
    }

    /// The backup's copy is the primary's from here on.
    pub fn output_takes_over(&mut self, id: u8) {
        let (now_us, bug) = (self.now_us, self.bug);
        // Before leadership's voice is given to it: it is a backup's still.
        if let Some(Copy::Primary(primary)) = &mut self.host(id).copy
            && let Some(machine) = primary.machine.as_deref_mut()
            && bug != Some(Bug::TakesOverSilently)
        {
            machine.output.take_over(now_us);
        }
        let how = self.first.inputs();
        let Some(machine) = self.host(id).machine() else {
            return;
        };
        let overheard = machine.overheard.take(how == Inputs::Agreed, now_us);
        self.tally.overheard += overheard.len() as u64;
        overheard.iter().for_each(|frame| self.take_in(id, how, frame));
    }

    // Outside.

    /// What the output of a host that may speak lets out.
    pub fn take_released(&mut self, id: u8) -> Vec<Frame> {
        let now_us = self.now_us;
        let Some(machine) = self.host(id).machine() else {
            return Vec::new();
        };
        let before = *machine.output.tally();
        let frames: Vec<Frame> = std::iter::from_fn(|| machine.output.release(now_us)).collect();
        let after = *machine.output.tally();
        let (released, by_sync) = (after.released - before.released, after.by_sync - before.by_sync);
        self.tally.matched += released - by_sync;
        self.tally.partial_acks += frames.len() as u64 - released;
        frames
    }

    /// They leave.
    pub fn frames_leave(&mut self, id: u8, frames: &[Frame]) {
        let now_us = self.now_us;
        self.tally.released += frames.len() as u64;
        let Some(mut net) = self.net.take() else { return };
        let host = &self.hosts[usize::from(id)];
        let other = (0..WITNESS).find(|other| *other != id).unwrap_or(id);
        let complete = host.leadership.state().complete.contains(ReplicaId(other));
        let protected = host.leadership.voice() == Voice::Protected && complete;
        let heir = self.hosts[usize::from(other)].heir().filter(|_| protected);
        let left = frames
            .iter()
            .try_for_each(|frame| net.leaves(frame, heir, now_us));
        self.net = Some(net);
        if let Err(what) = left {
            self.verdict(format!("{what}; said by {id}"));
        }
        self.plan_net();
    }

    /// Why a VM that begins to speak does not explain what clients were told.
    pub fn unexplained_frames(&self, id: u8) -> Option<String> {
        let Some(Copy::Primary(primary)) = &self.hosts[usize::from(id)].copy else {
            return None;
        };
        let (net, machine) = (self.net.as_ref()?, primary.machine.as_deref()?);
        net.is_explained_by(&machine.guest).err()
    }
}
