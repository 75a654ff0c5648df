//! Faults: hosts die and come back, and in cold worlds QEMU alone; they sleep, and are cut off; streams break; leaders step down.
//!
//! Invariant: but in cold worlds a fault never takes the last copy that may lead, nor what a majority knows where logs are in memory only: that is beyond what is
//! promised.

use super::host::Host;
use super::next::Next;
use super::world::{WITNESS, World};
use dunlin_core::consensus::{Durability, Event, Role};
use dunlin_core::units::ReplicaId;

impl World {
    pub(super) fn strike(&mut self) {
        let after_us = self.random.between(5_000, 120_000);
        // A client's TCP has to come to its words between two of them.
        let times = if self.net.is_some() { 3 } else { 1 };
        self.plan(times * after_us, Next::Strike);
        let id = self.random.below(self.hosts.len() as u64) as u8;
        let speaker = (0..WITNESS).find(|id| self.hosts[usize::from(*id)].leadership.leads());
        let whom = match self.random.chance(500_000) {
            true => speaker.unwrap_or(id),
            false => id,
        };
        if self.cold && self.random.chance(30_000) {
            self.note(|| "a power cut".to_owned());
            return (0..=WITNESS).for_each(|id| self.dies(id, 1_500_000));
        }
        if self.cold && self.random.chance(60_000) {
            return self.qemu_dies(whom);
        }
        match self.random.below(10) {
            0..=2 => self.kill(whom),
            3..=4 => {
                let for_us = self.random.between(1_000, 300_000);
                self.note(|| format!("{whom} sleeps for {for_us} us"));
                let until_us = self.now_us + for_us;
                self.host(whom).asleep_until_us = until_us;
            }
            5..=6 => {
                let to = self.random.below(self.hosts.len() as u64) as u8;
                let heal_us = self.random.between(1_000, 300_000);
                if whom != to && self.cut.insert((whom, to)) {
                    self.note(|| format!("{whom} -> {to} is cut for {heal_us} us"));
                    self.plan(heal_us, Next::Heal(whom, to));
                    if self.random.chance(500_000) {
                        self.break_streams(whom, to);
                    }
                }
            }
            7 => {
                self.note(|| "streams break".to_owned());
                self.break_streams(0, 1);
            }
            8 => self.step(whom, Event::StepDown),
            _ => {
                let to = ReplicaId(self.random.below(u64::from(WITNESS)) as u8);
                self.step(whom, Event::TransferTo(to));
            }
        }
    }

    pub(super) fn break_streams(&mut self, from: u8, to: u8) {
        let of = |primary: u8, backup: u8| (primary, backup) == (from, to) || (backup, primary) == (from, to);
        let open: Vec<u64> = self
            .streams
            .iter()
            .filter(|stream| !stream.closed && of(stream.primary, stream.backup))
            .map(|stream| stream.id)
            .collect();
        for stream in open {
            self.close(stream);
        }
    }

    /// Now and then a host dies just when it has said something that others have not heard.
    pub(super) fn may_die_soon(&mut self, id: u8, per_million: u64) {
        if !self.calm && self.random.chance(per_million) {
            let after_us = self.random.between(10, 5_000);
            self.plan(after_us, Next::Kill(id));
        }
    }

    /// A host's copy ends, and the host lives. A primary without a backup would have failed for good.
    fn qemu_dies(&mut self, id: u8) {
        let host = self.host(id);
        let is_protected = host.leadership.state().complete.len() > 1;
        let was_primary = host.primary().is_some();
        if host.node.is_none() || host.copy.is_none() || was_primary && !is_protected {
            return;
        }
        self.note(|| format!("the QEMU of {id} dies"));
        self.end_copy(id);
        if was_primary {
            self.step(id, Event::StepDown);
        }
        self.set_may_lead(id);
    }

    pub(super) fn kill(&mut self, id: u8) {
        let others = |host: &&Host| host.id != ReplicaId(id) && host.node.is_some();
        let left: Vec<&Host> = self.hosts.iter().filter(others).collect();
        let well = left
            .iter()
            .filter(|host| {
                host.node
                    .as_ref()
                    .is_some_and(|node| node.role() != Role::Recovering)
            })
            .count();
        let knows = self.durability == Durability::Disk || well == self.hosts.len() - 1;
        // A VM that never ran is booted by its first host, which has to know that it never did.
        let young =
            self.durability == Durability::Disk && self.hosts.iter().all(|host| host.leadership.is_fresh());
        let copy_left = young || left.iter().any(|host| host.is_heir());
        if knows && copy_left {
            self.dies(id, 400_000);
        }
    }

    /// It is back after so long at most.
    pub(super) fn dies(&mut self, id: u8, most_us: u64) {
        if self.hosts[usize::from(id)].node.is_none() {
            return;
        }
        self.note(|| format!("{id} dies"));
        self.tally.deaths += 1;
        let host = &mut self.hosts[usize::from(id)];
        host.node = None;
        let died = host.incarnation;
        host.disk.crash(&mut self.random);
        // Their connection breaks, and they ask again.
        let orders = host.shutdown.take_orders();
        self.answered(&orders, None);
        self.end_copy(id);
        for other in 0..self.hosts.len() as u8 {
            self.break_streams(id, other);
            if other != id && self.random.chance(700_000) {
                let after_us = self.random.between(50, 20_000);
                self.plan(after_us, Next::LinkLost(other, id, died));
            }
        }
        let after_us = self.random.between(10_000, most_us);
        self.plan(after_us, Next::Start(id));
    }
}
