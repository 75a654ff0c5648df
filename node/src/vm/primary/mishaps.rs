//! What QEMU tells of a VM that runs: it resets, its disk fails or is full, its process ends.
//!
//! Not here: a guest that switches itself off (`switched_off`).

use super::SILENCE_US;
use crate::vm::state::primary::PrimaryRole;
use crate::vm::state::{Role, VmLoop};
use dunlin_api::EventKind;
use dunlin_core::replica::enospc::Look;
use dunlin_core::units::ReplicaId;
use dunlin_guest::qemu::QemuEvent;
use std::time::Duration;

/// How often QEMU is asked what has happened, at the most.
const ASK_QEMU_US: u64 = 1000;
/// What QEMU printed so shortly before its end says why.
const LAST_WORDS: Duration = Duration::from_secs(2);
impl VmLoop {
    pub(in crate::vm) fn follow_qemu(&mut self) {
        let Some(machine) = self.machine().cloned() else {
            return;
        };
        let events = match self.qemu_is_to_be_asked() {
            true => machine.qemu.qmp().poll_events(),
            false => Ok(Vec::new()),
        };
        let events = match events {
            Ok(events) => events,
            Err(error) => return self.machine_died(&error.to_string()),
        };
        for event in events {
            match event {
                QemuEvent::Shutdown { guest: true, .. } => self.guest_switched_off(),
                QemuEvent::Reset { guest: true } => self.guest_reset(),
                QemuEvent::GuestPanicked => {
                    self.event(EventKind::GuestPanicked, "the guest's kernel panicked")
                }
                QemuEvent::BlockIoError { reason, stopped } => self.guest_disk_failed(&reason, stopped),
                _ => {}
            }
        }
        self.end_ignoring_guest();
        self.look_for_room();
    }

    /// Not for each frame: that is a system call, and events are rare.
    pub(in crate::vm) fn qemu_is_to_be_asked(&mut self) -> bool {
        let (ended, now_us) = (self.qemu_has_ended(), self.now_us());
        let due = |primary: &&mut PrimaryRole| ended || now_us >= primary.guest.ask_qemu_us;
        let Some(primary) = self.primary().filter(due) else {
            return false;
        };
        primary.guest.ask_qemu_us = now_us + ASK_QEMU_US;
        true
    }

    /// The guest boots anew. Both copies got the same input, but a boot is made of clocks: they are made one again at once.
    pub(in crate::vm) fn guest_reset(&mut self) {
        self.event(
            EventKind::GuestReset,
            "the guest has reset its machine and boots anew",
        );
        if let Some(primary) = self.primary() {
            primary.guest.was_reset = true;
        }
    }

    /// QEMU's answer to a request that failed. Where there is no room left it stops the VM, and tries the request again when the
    /// VM goes on.
    pub(in crate::vm) fn guest_disk_failed(&mut self, reason: &str, stopped: bool) {
        let now_us = self.now_us();
        let Some(primary) = self.primary().filter(|_| stopped) else {
            return self.event(EventKind::DiskError, reason);
        };
        if primary.guest.enospc_wait.stopped(now_us) {
            self.event(
                EventKind::WaitsForRoom,
                format!("the VM stands still until there is room on its disk ({reason}); nothing is lost"),
            );
        }
    }

    pub(in crate::vm) fn look_for_room(&mut self) {
        let now_us = self.now_us();
        let Some(primary) = self.primary() else { return };
        let may_run = primary.epochs.run().is_none() && !primary.epochs.is_handed();
        match primary.guest.enospc_wait.look(now_us, may_run) {
            Look::Nothing => {}
            Look::Retries => self.resume_vm("after its disk was full"),
            Look::HasRoom => self.event(
                EventKind::HasRoom,
                "the VM goes on: there is room on its disk again",
            ),
        }
    }

    /// This host's disk cannot serve the VM. A complete backup can: it has never seen the request that failed, and the VM here is
    /// not told of it either.
    pub(in crate::vm) fn leave_to_the_backup(&mut self, why: &str) {
        let protected = self.agreement.state().complete.len() > 1;
        let primary = self.primary();
        if protected && primary.is_some_and(|primary| primary.epochs.is_synced()) {
            self.event(
                EventKind::LeftToBackup,
                format!("{why}: the backup goes on with the VM"),
            );
            self.end_copy(why);
        }
    }

    /// QEMU has answered neither what a sync wanted of it nor `cont`: it hangs, or a disk of this host does that it waits for, and the VM
    /// would stand for good if its backup were dropped for that.
    pub(in crate::vm) fn qemu_is_silent(&mut self, id: u64) {
        if self.is_session(id) {
            self.leave_office("QEMU answers nothing");
        }
    }

    /// This host does not serve its VM as it should, and a backup that is heard can: this one gives its office up. It keeps its copy until the
    /// group has agreed that it is not needed: what ails it may pass, and the take-over may fail. False: nobody is there who could.
    pub(in crate::vm) fn leave_office(&mut self, why: &str) -> bool {
        let (now_us, complete) = (self.now_us(), self.agreement.state().complete);
        // Whoever ends the VM needs no backup to go on with it.
        if !self.agreement.leads() || self.ending.shutdown.is_ordered() {
            return false;
        }
        let heard = |peer: ReplicaId| {
            let heard_us = self.group.heard_us(peer);
            complete.contains(peer)
                && heard_us.is_some_and(|at_us| now_us.saturating_sub(at_us) <= SILENCE_US)
        };
        let Role::Primary(primary) = &mut self.role else {
            return false;
        };
        let peer = primary.session.as_ref().map(|session| session.peer);
        if !primary.epochs.is_synced() || !peer.is_some_and(heard) {
            return false;
        }
        primary.guest.leave_to_backup(now_us);
        self.event(
            EventKind::LeftToBackup,
            format!("{why}: the backup goes on with the VM"),
        );
        // It leads until the backup has all that was proposed, and no longer than a hand-over may take.
        self.group.step_down();
        true
    }

    /// The VM's process has ended, or cannot be talked to: the backup, if there is one, goes on.
    pub(in crate::vm) fn machine_died(&mut self, why: &str) {
        if self.has_switched_off() {
            return;
        }
        let last_words = self
            .machine()
            .and_then(|machine| machine.qemu.stderr().last_words(LAST_WORDS));
        let why = match last_words {
            Some(words) => format!("{why}; it said: {words}"),
            None => why.to_owned(),
        };
        self.event(EventKind::QemuDied, format!("QEMU: {why}"));
        self.end_copy(&why);
    }

    pub(in crate::vm) fn end_copy(&mut self, why: &str) {
        let was_primary = matches!(self.role, Role::Primary(_));
        let protected = self.agreement.state().complete.len() > 1;
        self.drop_machine();
        if was_primary {
            // Before it may lead no more, which ends the office at once: then there is none to hand over.
            if protected {
                self.group.step_down();
            } else {
                self.shown.failure = Some(format!("QEMU ended without a backup: {why}"));
            }
            self.group.may_lead(false);
        }
    }
}
