//! Room in the log: it is cut where core's `replica::log_cut` says, and what is said when it is full (`agreement`'s invariant 4).

use super::Agreement;
use crate::vm::nics::MOST_BATCH_BYTES;
use crate::vm::state::{Role, VmLoop};
use dunlin_api::EventKind;
use dunlin_core::replica::log_cut::Cut;

/// A log that is full and has room in turn is told of once in this time.
const QUIET_US: u64 = 60_000_000;

impl VmLoop {
    /// Whether the agreed log is half full: a sync cuts it.
    pub(in crate::vm) fn log_is_half_full(&self) -> bool {
        let (entries, bytes) = self.group.log_size();
        let (most_entries, most_bytes) = self.group.log_limits();
        bytes > most_bytes / 2 || entries > most_entries / 2
    }

    /// A follower whose log is full takes nothing more, and nobody hears of that: its leader takes it for slow. A leader whose
    /// log is full leaves to the network what the network has.
    pub(in crate::vm) fn tell_full_log(&mut self) {
        let leads = self.group.is_leader();
        let full = match leads {
            true => !self.group.has_input_room(MOST_BATCH_BYTES),
            false => self.group.log_is_full(),
        };
        if std::mem::replace(&mut self.agreement.log_is_full, full) == full {
            return;
        }
        let (now_us, told_us) = (self.now_us(), self.agreement.log_full_told_us);
        if !full {
            if std::mem::take(&mut self.agreement.log_full_is_last) {
                self.event(EventKind::LogRoom, "the log here has room again");
            }
            return;
        }
        self.agreement.log_waits += 1;
        if told_us.is_some_and(|told_us| now_us - told_us < QUIET_US) {
            return;
        }
        self.agreement.log_full_told_us = Some(now_us);
        self.agreement.log_full_is_last = true;
        let (entries, bytes) = self.group.log_size();
        let mib = bytes >> 20;
        let text = match leads {
            true => format!(
                "the log is full ({entries} entries, {mib} MiB): the network waits until a sync cuts it, or until its disk has \
                 taken it; 'memory.log_mib' in the VM's file sets its size"
            ),
            false => format!(
                "the log here is full ({entries} entries, {mib} MiB): this host agrees to nothing more until a sync cuts it; if \
                 none does ('log_entries' in 'dunlin status --json'), start this host's daemon again"
            ),
        };
        self.event(EventKind::LogFull, text);
    }

    /// What is agreed does not reach this host's disk: it would soon take no inputs any more. A backup goes on with the VM, whose disk holds
    /// what the witness's does. One that is alone keeps its office: the others' disks are a majority without its own.
    pub(in crate::vm) fn leave_with_ill_log(&mut self) {
        if !self.agreement.log_is_ill {
            self.agreement.left_for_log = false;
        } else if !self.agreement.left_for_log {
            self.agreement.left_for_log = self.leave_office("the log's disk of this host takes nothing");
        }
    }

    /// Whether inputs wait in the network for this host's own disk.
    pub(in crate::vm) fn log_disk_lags(&self) -> bool {
        let (waits, most) = self.group.disk_queue();
        waits > most
    }

    pub(in crate::vm) fn cut_log(&mut self, cut: Option<Cut>) {
        if let Some(Cut { through, state }) = cut {
            self.group.truncate(through, state);
        }
    }

    /// Where no backup executes the inputs, applied entries are not needed again.
    pub(in crate::vm) fn cut_log_where_nothing_syncs(&mut self, entry_bytes: usize) {
        let limits = self.group.log_limits();
        let Agreement {
            leadership,
            log_cut,
            applied,
            ..
        } = &mut self.agreement;
        let cut = log_cut.applied(*applied, entry_bytes, limits, leadership.state());
        self.cut_log(cut);
    }

    /// A broken sync will never be done: the log is cut at the next one.
    pub(in crate::vm) fn forget_cut(&mut self) {
        self.agreement.log_cut.sync_lost();
        match &mut self.role {
            Role::Primary(primary) => primary.let_log_go(),
            Role::Backup(backup) => backup.let_log_go(),
            Role::None => {}
        }
    }

    /// Whether a sync holds back the entries after it.
    pub(in crate::vm) fn log_is_held(&self) -> bool {
        match &self.role {
            Role::Primary(primary) => primary.epochs().holds_log(),
            Role::Backup(backup) => backup.epochs().holds_log(),
            Role::None => false,
        }
    }
}
