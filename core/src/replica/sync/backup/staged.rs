//! A sync on the backup, from the union to the VM that goes on from it.

use super::gathered::Whole;
use super::{
    Backup, Bug, Bytes, Effect, Epoch, Mode, Next, PageSet, Point, Report, State, SyncMessage, refuse,
};
use crate::replica::sync::PAGES_AT_ONCE;

impl Backup {
    /// Says what these pages hold here, as a list.
    pub(super) fn send_hashes(&mut self, epoch: Epoch, union: &PageSet, effects: &mut Vec<Effect>) {
        self.look_again(epoch, union);
        let asks = |pages| Effect::SendHashes { epoch, pages };
        effects.extend(union.parts(PAGES_AT_ONCE).map(asks));
    }

    pub(super) fn awaits_state(&mut self, epoch: Epoch) -> State {
        // There is no staging yet if nothing was written.
        self.staging(epoch);
        State::AwaitsDevices { epoch }
    }

    /// The last piece is here.
    pub(super) fn state_arrived(
        &mut self,
        epoch: Epoch,
        next: Mode,
        connections: Bytes,
        rest: Bytes,
        effects: &mut Vec<Effect>,
    ) -> Next {
        let staging = self.staging.take().expect("a sync that is awaited is staged");
        let staged = staging
            .complete(epoch, connections, rest)
            .map_err(|error| refuse(error, effects))?;
        let whole = Whole {
            staged,
            next,
            audit: None,
            joining: self.applied.is_none(),
        };
        match self.setup.audit {
            true => Ok(State::AwaitsAudit(whole)),
            false => Ok(Self::check_state(whole, effects)),
        }
    }

    pub(super) fn check_state(whole: Whole, effects: &mut Vec<Effect>) -> State {
        effects.push(Effect::CheckState(whole.staged.device_state.clone()));
        State::Checking(whole)
    }

    /// It is whole, and QEMU would take it. The loop refuses if it is in a later term, of somebody else meanwhile: the old
    /// primary must not hear an acknowledgement then.
    pub(super) fn may_it_be_acknowledged(&self, whole: Whole, effects: &mut Vec<Effect>) -> State {
        let epoch = whole.staged.epoch;
        if !self.bugs.has(Bug::AcknowledgesBeforeDisk) {
            effects.push(Effect::AwaitMirrors(epoch));
        }
        if self.bugs.has(Bug::AcknowledgesUnasked) {
            effects.push(Effect::Tell(SyncMessage::Staged { epoch }));
        }
        effects.push(Effect::Report(Report::Staged {
            epoch,
            next: whole.next,
            connections: whole.staged.connections.clone(),
        }));
        State::AwaitsLeave(whole)
    }

    /// The loop has given leave. A primary that is dead now is no reason not to apply: it may have heard us (invariant 2).
    pub(super) fn acknowledge(&mut self, whole: Whole, effects: &mut Vec<Effect>) -> State {
        let Whole {
            staged,
            next,
            audit,
            joining,
            ..
        } = whole;
        let (epoch, run) = (staged.epoch, next.backup_runs());
        assert!(
            self.applied.is_none_or(|applied| applied < epoch),
            "sync {} is acknowledged after sync {:?}",
            epoch.0,
            self.applied
        );
        if !self.bugs.has(Bug::AcknowledgesUnasked) {
            effects.push(Effect::Tell(SyncMessage::Staged { epoch }));
        }
        effects.push(Effect::Pass(Point::Acknowledged));
        if !joining && self.active != run {
            effects.push(Effect::Pass(Point::ModeChanges));
        }
        let state = staged.device_state.clone();
        effects.push(Effect::Apply { staged, run, audit });
        State::Applying {
            epoch,
            next,
            state,
            joining,
        }
    }

    pub(super) fn sync_applied(
        &mut self,
        epoch: Epoch,
        next: Mode,
        state: Bytes,
        joining: bool,
        took_us: u64,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.active = next.backup_runs();
        self.kept = (!self.active).then_some(state);
        self.applied = Some(epoch);
        effects.push(Effect::Report(Report::Loaded { epoch, joining }));
        effects.push(Effect::Tell(SyncMessage::Loaded { epoch, took_us }));
        State::Idle
    }
}
