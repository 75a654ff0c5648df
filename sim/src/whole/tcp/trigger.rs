//! When a sync is due: by a whim, or as the daemon's primary asks core's `sync::trigger`, with the same limits.

use super::machine::Machine;
use crate::whole::host::{Copy, Word};
use crate::whole::world::World;
use dunlin_core::consensus::Consensus;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::backup::Phase;
use dunlin_core::sync::trigger::{Decision, Limits, Reason, Sight, decide};
use dunlin_core::units::Index;

/// Of a thousand turns in which output waits, so many begin a sync by a whim: where outputs are compared, and where they wait for syncs alone.
const SYNCS_COMPARED: u64 = 4;
const SYNCS: u64 = 60;
/// Beyond this many entries the log asks for a sync.
const LOG_ENTRIES: u64 = 64;

/// What a primary knows of its last sync and of its backup, and what a backup has said of itself.
#[derive(Debug, Default)]
pub struct Syncs {
    last_us: u64,
    /// The backup's VM has nothing left to do of what was agreed up to here.
    pub backup_applied: Index,
    /// What this host, as a backup, has told of itself.
    idle_told: Index,
}

/// The defaults of a VM's file.
fn limits(mode: Mode) -> Limits {
    Limits {
        shortest_us: 1_000,
        longest_us: if mode == Mode::Match { 5_000_000 } else { 100_000 },
        quiet_us: 1_000_000,
    }
}

impl World {
    /// Whether a sync is due, where a backup follows.
    pub fn output_asks_for_sync(&mut self, id: u8) -> bool {
        let Some(net) = &self.net else { return false };
        match net.by_trigger {
            true => self.trigger_asks(id),
            false => self.whim_asks(id),
        }
    }

    fn whim_asks(&mut self, id: u8) -> bool {
        let Some(machine) = self.hosts[usize::from(id)].machine() else {
            return false;
        };
        let output = &machine.output;
        let (now, waits) = (output.differs() || output.is_half_full(), output.waits());
        let compares = output.counters().is_some();
        let Some(net) = &mut self.net else { return false };
        now || waits && net.happens(if compares { SYNCS_COMPARED } else { SYNCS })
    }

    fn trigger_asks(&mut self, id: u8) -> bool {
        let now_us = self.now_us;
        let host = self.host(id);
        let applied = host.applied;
        let entries = |node: &Consensus| node.appended().index.0.saturating_sub(node.first().0);
        let log_fills_up = host.node.as_ref().is_some_and(|node| entries(node) > LOG_ENTRIES);
        let Some(Copy::Primary(primary)) = &host.copy else {
            return false;
        };
        if !primary.epochs.is_synced() || !primary.epochs.may_begin() {
            return false;
        }
        let mode = primary.epochs.rules().mode();
        let (matches, runs) = (mode == Mode::Match, mode.backup_runs());
        let Some(machine) = host.machine() else {
            return false;
        };
        let output = &mut machine.output;
        let word_since_us = output.waits_for_word_since_us();
        let ends_waited_us = output.ends_waited_us(now_us);
        let output_waits = if matches {
            word_since_us.is_some() || ends_waited_us > 0
        } else {
            output.waits()
        };
        let acks_since_us = output.acks_wait_since_us();
        let backup_idle = !runs || machine.syncs.backup_applied >= applied;
        let sight = Sight {
            now_us,
            last_sync_us: machine.syncs.last_us,
            mode,
            output_waits,
            differs: output.differs(),
            primary_idle: backup_idle && !machine.guest.has_work() && machine.socket.is_empty(),
            backup_idle,
            disk_asks: false,
            change_over: false,
            waited_us: word_since_us.map_or(0, |since_us| now_us.saturating_sub(since_us)),
            acks_waited_us: acks_since_us.map_or(0, |since_us| now_us.saturating_sub(since_us)),
            ends_waited_us,
            overtaken_us: if matches { output.overtaken_us() } else { 0 },
            silent_us: now_us.saturating_sub(output.matched_us()),
            stall_us: output.stall_us(),
            cost_us: output.stall_us(),
            fills_us: u64::MAX,
            memory_asks: output.is_half_full() || log_fills_up && runs,
        };
        let Decision::Sync(reason) = decide(&limits(mode), &sight) else {
            return false;
        };
        machine.syncs.last_us = now_us;
        let late_us = Some(sight.waited_us).filter(|waited_us| *waited_us > 0);
        match reason {
            Reason::Differs | Reason::Idle if matches => output.sync_is_forced(None),
            Reason::Limit if matches && late_us.is_some() => output.sync_is_forced(late_us),
            _ => {}
        }
        true
    }

    /// The last sync was acknowledged now.
    pub fn synced_now(&mut self, id: u8) {
        let now_us = self.now_us;
        if let Some(machine) = self.host(id).machine() {
            machine.syncs.last_us = now_us;
        }
    }

    /// A backup whose VM has nothing left to do says so.
    pub fn tell_idle(&mut self, id: u8) {
        let host = self.host(id);
        let applied = host.applied;
        let Some(Copy::Backup(backup)) = &host.copy else {
            return;
        };
        let stream = backup.session;
        let follows = backup.epochs.phase() == Phase::Synced && backup.epochs.rules().backup_runs();
        let is_idle = |machine: &Machine| !machine.guest.has_work() && machine.socket.is_empty();
        if let Some(machine) = host.machine()
            && follows
            && is_idle(machine)
            && machine.syncs.idle_told < applied
        {
            machine.syncs.idle_told = applied;
            self.say(stream, id, Word::Idle(applied));
        }
    }
}
