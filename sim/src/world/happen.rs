//! What each thing to come does when its time has come.

use super::{Next, World};
use crate::owner::{self, Driver};
use dunlin_core::consensus::{Event, Role};
use dunlin_core::units::ReplicaId;

impl World {
    /// Something happens.
    pub fn happen(&mut self, next: Next) -> Result<(), String> {
        match next {
            Next::Mail(from, to, serial) => {
                let wakes_us = self.hosts[usize::from(to)].asleep_until_us;
                if wakes_us > self.now_us {
                    // The order of what waited is not kept either.
                    let after_us = wakes_us - self.now_us + self.random.below(300);
                    self.plan(after_us, Next::Mail(from, to, serial));
                    return Ok(());
                }
                let Some(message) = self.mail.remove(&serial) else {
                    return Ok(());
                };
                if self.cut.contains(&(from, to)) {
                    return Ok(());
                }
                let from = ReplicaId(from);
                match owner::driver(self, to) {
                    Driver::Owner => self.step(to, Event::Received { from, message }),
                    Driver::Keeper(time_us) => self.step_at(to, time_us, Event::Received { from, message }),
                    Driver::Nobody(after_us) => {
                        self.mail.insert(serial, message);
                        self.plan(after_us, Next::Mail(from.0, to, serial));
                        Ok(())
                    }
                }
            }
            Next::Tick(id, incarnation) => {
                let host = &mut self.hosts[usize::from(id)];
                if host.incarnation != incarnation || host.node.is_none() {
                    return Ok(());
                }
                if host.tick_us != self.now_us {
                    return Ok(()); // An earlier one took its place.
                }
                host.tick_us = u64::MAX;
                let wakes_us = host.asleep_until_us;
                if wakes_us > self.now_us {
                    let after_us = wakes_us - self.now_us + self.random.below(300);
                    self.hosts[usize::from(id)].tick_us = self.now_us + after_us;
                    self.plan(after_us, Next::Tick(id, incarnation));
                    return Ok(());
                }
                let leads = self.hosts[usize::from(id)]
                    .node
                    .as_ref()
                    .is_some_and(|node| node.role() == Role::Leader);
                match owner::driver(self, id) {
                    Driver::Owner => self.step(id, Event::Tick),
                    Driver::Keeper(time_us) if leads => self.step_at(id, time_us, Event::Tick),
                    // The keeper begins no campaign.
                    Driver::Keeper(_) => self.plan_tick_again(id, incarnation, owner::PERIOD_US),
                    Driver::Nobody(after_us) => self.plan_tick_again(id, incarnation, after_us),
                }
            }
            Next::HardStatePersisted(id, incarnation) => {
                let host = &mut self.hosts[usize::from(id)];
                if host.incarnation != incarnation || host.node.is_none() {
                    return Ok(());
                }
                if host.asleep_until_us > self.now_us {
                    let after_us = host.asleep_until_us - self.now_us;
                    self.plan(after_us, Next::HardStatePersisted(id, incarnation));
                    return Ok(());
                }
                let Some((report, more)) = host.disk.finish_hard_state() else {
                    return Ok(());
                };
                if more {
                    let after_us = self.disk_us(id);
                    self.plan(after_us, Next::HardStatePersisted(id, incarnation));
                }
                self.step(id, report)
            }
            Next::Written(id, incarnation) => self.finish_writes(id, incarnation),
            // Once there is a newer link to it, nothing of the old one is noticed any more.
            Next::LinkLost(_, peer, died) if self.hosts[usize::from(peer)].incarnation != died => Ok(()),
            // The end of a link is the owner's to hear.
            Next::LinkLost(id, peer, died) if !matches!(owner::driver(self, id), Driver::Owner) => {
                self.plan(1_000, Next::LinkLost(id, peer, died));
                Ok(())
            }
            Next::LinkLost(id, peer, _) => self.step(
                id,
                Event::LinkLost {
                    peer: ReplicaId(peer),
                    by_peer: true,
                },
            ),
            Next::Nap(id) => crate::busy::nap(self, id),
            Next::Turn(id) => {
                owner::turn(self, id);
                Ok(())
            }
            Next::Drive(id, read_us) => owner::drive(self, id, read_us),
            Next::Release(id, read_us) => owner::release(self, id, read_us),
            Next::Chaos => crate::chaos::strike(self),
            Next::Client => crate::client::operate(self),
        }
    }

    fn finish_writes(&mut self, id: u8, incarnation: u32) -> Result<(), String> {
        let (most, drop_old) = (self.random.between(1, 4) as usize, self.random.chance(500_000));
        let host = &mut self.hosts[usize::from(id)];
        if host.incarnation != incarnation || host.node.is_none() {
            return Ok(());
        }
        if host.asleep_until_us > self.now_us {
            let after_us = host.asleep_until_us - self.now_us;
            self.plan(after_us, Next::Written(id, incarnation));
            return Ok(());
        }
        let (reports, more) = host.disk.finish_writes(most, drop_old);
        if more {
            let after_us = self.disk_us(id);
            self.plan(after_us, Next::Written(id, incarnation));
        }
        for report in reports {
            self.step(id, report)?;
        }
        Ok(())
    }
}
