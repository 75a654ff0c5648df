//! What is seen of a primary's session from outside: what it waits for, and whether it goes on in a new term.
//!
//! Not here: how long anything may be waited for (core's `waits`), the rule of the terms (core's `tenure`).

use crate::vm::machine::Machine;
use crate::vm::session::talker::Talker;
use crate::vm::state::VmLoop;
use crate::vm::state::primary::PrimaryRole;
use dunlin_core::agreed::ReplicaSet;
use dunlin_core::replica::epoch::primary::{Phase, Stage};
use dunlin_core::sync::tenure::Standing;
use dunlin_core::waits::Wait;
use dunlin_core::watchdog::Flow;
use dunlin_core::wire::sync::SyncMessage;
use dunlin_guest::qemu::QmpError;
use std::sync::Arc;
use std::time::Duration;

impl PrimaryRole {
    /// The session with a backup.
    pub fn session_id(&self) -> Option<u64> {
        self.session.as_ref().map(|session| session.id)
    }

    /// What its thread waits for.
    pub fn waiting(&self) -> Option<(Wait, Duration)> {
        self.session.as_ref().and_then(|session| session.waiting.now())
    }

    /// When the sync under way began, and at which stage it is.
    fn sync_step(&self) -> Option<(u64, u8)> {
        self.epochs.run().map(|run| (run.began_us, run.stage as u8))
    }

    /// How long the group has not agreed on a sync that was proposed.
    pub fn waits_for_agreement_us(&self, now_us: u64) -> u64 {
        let proposed = self.epochs.run().filter(|run| run.stage == Stage::Proposed);
        proposed.map_or(0, |run| now_us.saturating_sub(run.began_us))
    }

    /// Since when the thread of an ended session has not ended, where that is too long; once.
    pub fn thread_is_late(&mut self, now_us: u64) -> Option<u64> {
        let lingers = self.lingers.as_mut().filter(|lingers| !lingers.told)?;
        let late = now_us.saturating_sub(lingers.since_us) >= Wait::SessionEnds.bound_us();
        lingers.told = late;
        late.then_some(lingers.since_us)
    }

    /// The sync under way, for the watchdog.
    pub fn sync_flow(&self) -> Flow {
        let (progress, waits) = match self.sync_step() {
            Some((began_us, stage)) => (began_us ^ (u64::from(stage) << 56), true),
            None => (0, false),
        };
        Flow { waits, progress }
    }
}

impl VmLoop {
    /// This host leads in a new term. Its session, if there is one, and whether that goes on; then its backup is told.
    pub(super) fn session_survives(&mut self) -> Option<(u64, bool)> {
        let (term, complete, me) = (self.group.term(), self.agreement.state().complete, self.me);
        let primary = self.primary()?;
        let epochs = &primary.epochs;
        let session = primary.session.as_ref()?;
        let standing = Standing {
            complete: epochs.is_synced() && complete.contains(session.peer),
            copying: matches!(epochs.session(), Some(Phase::Joining | Phase::Copied))
                && complete == ReplicaSet::one(me),
            sync_lost: epochs.is_proposed(),
            handed: epochs.is_handed(),
        };
        let told = |talker: &Talker| talker.say(SyncMessage::NewTerm { term });
        let survives = standing.survives() && session.talker.as_ref().is_some_and(told);
        Some((session.id, survives))
    }

    /// Lets the VM run on that stands here, by nobody else's hand.
    pub(in crate::vm) fn resume_vm(&mut self, when: &str) {
        let resumed = |machine: &Arc<Machine>| machine.qemu.cont_within(Wait::VmGoesOn.bound());
        match self.machine().map(resumed) {
            None | Some(Ok(())) => {}
            // It has been told, and obeys when it can.
            Some(Err(QmpError::Timeout(..))) => {
                tracing::warn!(vm = self.config.name, "QEMU is slow to resume the VM {when}");
            }
            Some(Err(error)) => self.machine_died(&format!("it does not go on {when}: {error}")),
        }
    }
}
