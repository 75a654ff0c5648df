//! A guest that switches itself off ends its VM: that is no failure, though its process is gone before anybody reads why.
//!
//! Not here: an end that a person orders (`vm::ending`), a process that dies (`primary`).

use crate::vm::state::VmLoop;
use dunlin_api::EventKind;
use dunlin_core::agreed::Agreed;
use dunlin_guest::qemu::QemuEvent;

impl VmLoop {
    /// The VM's end, if the group agrees. Its process ends by itself, which is no failure then.
    pub(super) fn guest_switched_off(&mut self) {
        self.event(EventKind::GuestShutdown, "the guest switched itself off");
        let said = self.propose(&Agreed::Down);
        self.ending.shutdown.guest_left(said);
    }

    /// Whether the process has ended because the guest switched itself off. Its ports close before anybody reads what it said of
    /// that.
    pub(super) fn has_switched_off(&mut self) -> bool {
        if self.ending.shutdown.has_guest_left() {
            return self.agreement.leads();
        }
        let Some(machine) = self.machine().cloned() else {
            return false;
        };
        let said = |events: Vec<QemuEvent>| {
            let mut events = events.into_iter();
            events.any(|event| matches!(event, QemuEvent::Shutdown { guest: true, .. }))
        };
        if !machine.qemu.qmp().poll_events().is_ok_and(said) || self.primary().is_none() {
            return false;
        }
        self.guest_switched_off();
        self.ending.shutdown.has_guest_left()
    }
}
