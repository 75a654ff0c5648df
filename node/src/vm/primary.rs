//! The primary's part of the loop: it takes inputs, holds outputs, brings a backup in and syncs with it.
//!
//! Invariants:
//! 1. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//! 2. A backup that is lost is dropped from the complete set by an agreed entry before outputs leave without it.
//! 3. One sync at a time; the next one begins when the backup has applied the last.
//! 4. One session's thread at a time: who stopped the VM lets it run on, and not into another session's sync.
//!
//! `booting` starts the VM, `mishaps` follows what QEMU tells of it, `joining` finds and loses backups, `syncing` drives the syncs, `commands` does what people ask, `policy` changes how the VM is
//! replicated, `alone` serves by a person's order, `replacing` makes room for a new machine in a dead one's place. Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

mod alone;
mod booting;
mod commands;
mod joining;
mod mishaps;
mod policy;
mod replacing;
mod switched_off;
mod syncing;
mod watched;
use super::fault_at::Line;
use super::held_memory::AFTER_A_COPY;
use super::machine::Machine;
use super::state::primary::PrimaryRole;
use super::state::{Role, VmLoop};
use dunlin_api::{EventKind, State};
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::primary::Phase;
use dunlin_core::replica::leadership::{Lead, Mandate, Resumes};
use dunlin_core::units::Epoch;
use std::sync::{Arc, Weak};

/// How long to wait before a backup is looked for again.
const REJOIN_US: u64 = 500_000;
/// A backup whose host says nothing for this long (it answers heartbeats many times as often) is given up.
const SILENCE_US: u64 = 400_000;
/// How often a socket that QEMU has not emptied yet is looked at: there is no event for "the peer has read".
const DRAIN_LOOK_US: u64 = 100;
/// How often it is looked at what the mode in use brings.
const OBSERVE_US: u64 = 50_000;
/// An epoch that lasted at least this long has many dirty pages: they are worked on before the VM stops.
const AHEAD_AFTER_US: u64 = 200_000;

impl VmLoop {
    /// The machine, in whichever role.
    pub(super) fn machine(&self) -> Option<&Arc<Machine>> {
        match &self.role {
            Role::Primary(primary) => primary.machine.as_ref(),
            Role::Backup(backup) => backup.machine(),
            Role::None => None,
        }
    }

    /// Ends the copy of the VM here, and every session around it. Waits for neither: what the machine's end has to wait for is a
    /// thread's own (`machine`), and whoever starts the next one waits for that.
    pub(super) fn drop_machine(&mut self) {
        if let Role::Primary(PrimaryRole {
            session: Some(session),
            ..
        }) = &self.role
            && let Some(closer) = &session.closer
        {
            closer.close();
        }
        if let Some(machine) = self.machine()
            && let Err(error) = machine.qemu.end()
        {
            tracing::warn!(vm = self.config.name, "ending QEMU: {error}");
        }
        if let Some(machine) = self.machine() {
            // Nobody is left to be told.
            machine.disks.hold_errors(false);
            self.hold_memory(machine);
        }
        self.close_backup_session();
        self.role = Role::None;
        self.ending.shutdown.copy_ended();
        self.agreement.leadership.ends();
        self.net.speculating = None;
        self.net.nics = None;
        self.net.output = self.new_output(Voice::Shut, self.agreement.state().epoch.next());
        self.forget_cut();
    }

    /// A copy that is made anew here begins with it. (Its QEMU, which may write still, is gone by then: `Remains`.)
    pub(super) fn hold_memory(&self, machine: &Machine) {
        *self.shared.copy.lock() = Weak::new();
        let name = &self.config.name;
        let held = &self.host.held_memory;
        match machine.qemu.memory().ram().try_clone() {
            Ok(ram) => {
                if let Err(error) = held.keep(name, ram, AFTER_A_COPY) {
                    tracing::debug!(vm = name, "an ended copy's memory is not held: {error}");
                }
            }
            Err(error) => tracing::debug!(vm = name, "an ended copy's memory is not held: {error}"),
        }
    }

    pub(super) fn primary_state(&self, primary: &PrimaryRole) -> State {
        match (
            &primary.machine,
            primary.epochs.session(),
            self.net.output.voice(),
        ) {
            (None, _, _) => State::Starting,
            (_, _, Voice::Shut) => State::QuorumLost,
            _ if primary.guest.enospc_wait.waits() => State::DiskFull,
            (_, Some(Phase::Synced), _) => State::Running,
            (_, Some(_), _) => State::Joining,
            (_, None, _) if self.policy().is_replicated() => State::Alone,
            (_, None, _) if self.config.policy.is_replicated() => State::ProtectionPaused,
            (_, None, _) => State::Running,
        }
    }

    /// This host has just been elected.
    pub(super) fn elected(&mut self) {
        match &mut self.role {
            Role::Backup(_) => self.prepare_take_over(),
            // A switchover that ends so: the entry that makes this host lead must not be held back.
            Role::Primary(primary) => primary.epochs.elected(),
            Role::None => {}
        }
    }

    /// This host leads, and has applied everything that was agreed before.
    pub(super) fn leads(&mut self) {
        let candidacy = self.candidacy();
        match self.agreement.leadership.leads_now(candidacy) {
            // The order is carried out in this step.
            Lead::Ends => {}
            Lead::Boots => {
                // Known now: what is said next is agreed of a VM that never ran, too.
                self.cold.has_lived = candidacy.mandate != Mandate::None;
                self.say_it_is_alone();
            }
            Lead::TakesOver => self.go_on_taking_over(),
            Lead::GoesOn => self.speak_again(),
            Lead::StepsDown => {
                self.event(
                    EventKind::CannotLead,
                    "this host was elected without a complete copy of the VM; it steps down",
                );
                self.drop_machine();
                self.cold.end_mandate();
                self.group.step_down();
            }
        }
    }

    fn speak_again(&mut self) {
        // A switchover that ended with this host's own election.
        self.transfer_failed();
        self.event(EventKind::QuorumRegained, "a majority of the group answers again");
        let session = self.session_survives();
        if let Some((id, false)) = session {
            self.session_ended(
                id,
                "the group has begun a new term, and the session cannot go on in it",
            );
        }
        let survives = session.is_some_and(|(_, survives)| survives);
        match self.agreement.leadership.resumes(survives) {
            Resumes::Alone => self.is_alone(),
            Resumes::Protected => {}
            Resumes::DropsBackup => self.drop_backup(),
        }
        self.speaks_as_it_may();
    }

    /// The group has agreed that nobody else is complete.
    pub(super) fn is_alone(&mut self) {
        if let Some(machine) = self.machine() {
            machine.disks.hold_errors(false);
        }
        self.speaks_as_it_may();
        self.stands_alone();
        self.policy_settled();
        if self.policy().is_replicated() {
            self.event(
                EventKind::Unprotected,
                "the VM runs without a backup: if this host dies now, it is lost",
            );
        }
    }

    /// The group has agreed that the backup is complete since `epoch`.
    pub(super) fn is_protected(&mut self, epoch: Epoch) {
        self.speaks_as_it_may();
        if self.net.output.epoch() > epoch {
            self.net.output.acknowledged(epoch);
        }
        let now_us = self.now_us();
        if let Some(primary) = self.primary() {
            primary.progress = None;
            primary.pace.last_sync_us = now_us;
            primary.epochs.backup_is_complete();
            if let Some(machine) = &primary.machine {
                machine.disks.hold_errors(true);
            }
        }
        self.event(EventKind::Protected, "a complete second copy of the VM follows");
        self.leave_with_ill_log();
    }

    /// The primary's turn: QEMU's own events, the backup, the sync.
    pub(super) fn run_primary(&mut self) {
        if !matches!(self.role, Role::Primary(_)) {
            return;
        }
        if self.shared.fault_at.steps_down(Line::PrimaryLeads) {
            self.group.step_down();
        }
        self.boot_again();
        self.follow_qemu();
        self.membership().tell_who_is_gone();
        self.membership().readmit_hosts();
        self.miss_silent_backup();
        self.observe_output();
        self.look_at_held_connections();
        self.look_for_backup();
        self.begin_last_sync();
        self.begin_refused_sync();
        self.start_due_sync();
        self.start_drained_sync();
    }
}
