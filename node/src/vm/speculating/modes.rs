//! Speculation where modes change (policy `dunlin`): before the backup's VM runs all connections are held, and while it runs they stay so.
//!
//! Decides:    nothing: when a mode may change core's `sync::way_out` says, what holding a connection means core's `speculation`.
//! Flow:       another mode is wished for -> all are held -> the sync after which the backup's VM runs -> ... -> the sync to a passive epoch is
//!             loaded -> connections come back.
//! Invariant:  at the line of a sync after which the backup's VM runs no connection is ahead of its client (asserted).
//! Not here:   which mode is wished for (`primary::syncing`).

use crate::vm::state::{Role, VmLoop};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::{Release, Rules};
use dunlin_core::speculation::Limits;
use dunlin_core::sync::way_out::Way;

impl VmLoop {
    /// Whether modes change, and with them who speaks: a new primary's VM may have other numbers than its clients know.
    pub(in crate::vm) fn translates_speculation(&self) -> bool {
        self.config.speculative && self.config.policy.changes_over()
    }

    /// What speculation may take.
    pub(in crate::vm) fn speculation_limits(&self) -> Limits {
        Limits {
            total_bytes: self.config.memory.outbound_bytes(),
            translated: self.translates_speculation(),
            ..Limits::default()
        }
    }

    /// Whether what the VM here says passes speculation. A backup whose VM runs says the same as the primary's; what one says that has just been
    /// woken for a take-over waits until this host speaks.
    pub(in crate::vm) fn speculates_on_ports(&self) -> bool {
        let plain = match &self.role {
            Role::Backup(backup) => backup.epochs.rules().backup_runs() || backup.take_over.is_none(),
            Role::Primary(_) | Role::None => false,
        };
        self.net.speculating.is_some() && !(plain && self.translates_speculation())
    }

    /// Whether this host's shadow sockets speak for the VM.
    pub(in crate::vm) fn has_driver(&self) -> bool {
        let speculating = self.net.speculating.as_ref();
        speculating.is_some_and(|speculating| speculating.speaks().is_some())
    }

    /// Whether the sync that begins now may bring `next`.
    pub(in crate::vm) fn speculation_allows(&self, from: Rules, next: Rules) -> bool {
        let speculating = self.net.speculating.as_ref();
        !from.needs_all_held(next)
            || speculating.is_some_and(|speculating| self.net.modes.free && speculating.all_are_held())
    }

    /// Looks whether connections are to be held, and whether they are.
    pub(in crate::vm) fn look_at_held_connections(&mut self) {
        if !self.translates_speculation() {
            return;
        }
        let now_us = self.now_us();
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let speculating = self.net.speculating.as_ref();
        let Some(driver) = speculating.and_then(|speculating| speculating.speaks()) else {
            return;
        };
        let (holds, all_are_held) = (driver.core().holds_all(), driver.core().all_are_held());
        let epochs = &primary.epochs;
        let runs = epochs.rules().backup_runs() || epochs.run().is_some_and(|run| run.next.backup_runs());
        let choice = primary.pace.change_over.as_mut().filter(|_| epochs.is_synced());
        let wished = !runs && choice.as_ref().is_some_and(|choice| choice.wish().backup_runs());
        let way = self.net.modes.way.look(now_us, wished, all_are_held);
        self.net.modes.free = way == Way::Free;
        if runs {
            self.net.modes.way.changed();
        }
        if let (Way::Closed, Some(choice)) = (way, choice) {
            tracing::debug!(
                mode = choice.wish().name(),
                "some clients do not take what is kept: not now"
            );
            choice.refused(now_us);
        }
        let hold = runs || matches!(way, Way::Holds | Way::Free);
        if hold != holds {
            self.with_driver(|driver, now_us, ports| {
                driver.hold_all(now_us, hold, ports)?;
                driver.flush(now_us, ports)
            });
        }
    }

    /// The mode is another one from now on.
    pub(in crate::vm) fn speculation_sees_mode(&mut self, now: Rules) {
        if self.translates_speculation() && now.release() == Release::Speculative {
            self.net.output.compares_no_more();
            self.look_at_held_connections();
        }
    }

    /// The line of a sync is about to be drawn, after which `next` holds.
    pub(in crate::vm) fn speculation_sees_line(&mut self, next: Rules) {
        if !self.translates_speculation() || !next.backup_runs() {
            return;
        }
        let speculating = self.net.speculating.as_ref();
        assert!(
            speculating.is_none_or(|speculating| speculating.all_are_held()),
            "the backup's VM is to run, and would lack what its clients were not sent yet"
        );
        if next.compares() && !self.net.output.compares() {
            self.net.output.compares_anew();
        }
    }

    /// What a sync tells of connections: the translation's table, and what speculation knows behind it.
    pub(in crate::vm) fn connections_told(&self, table: Bytes, known: Option<Bytes>) -> Bytes {
        match known {
            None => table,
            Some(known) if !self.translates_speculation() => known,
            Some(known) => {
                let mut told = BytesMut::with_capacity(4 + table.len() + known.len());
                told.put_u32(table.len() as u32);
                told.put_slice(&table);
                told.put_slice(&known);
                told.freeze()
            }
        }
    }

    /// Both again; nothing is known by speculation where there is none.
    pub(in crate::vm) fn connections_heard(&self, mut told: Bytes) -> (Bytes, Bytes) {
        match (self.net.speculating.is_some(), self.translates_speculation()) {
            (false, _) => (told, Bytes::new()),
            // None of them has numbers other than the VM's own.
            (true, false) => (Bytes::new(), told),
            (true, true) => {
                // What is too short neither of them can read.
                let length = if told.len() >= 4 {
                    told.get_u32() as usize
                } else {
                    0
                };
                let known = told.split_off(length.min(told.len()));
                (told, known)
            }
        }
    }

    /// What a shadow socket, or speculation itself, says to a client.
    pub(super) fn leaves_speculatively(&mut self, frame: Frame, offload: Offload) -> Frame {
        let now_us = self.now_us();
        let held_us = match self.net.output.voice() {
            Voice::Alone => 0,
            _ => self.net.modes.held_us(now_us),
        };
        self.net.output.leaves_speculatively(frame, offload, held_us)
    }
}
