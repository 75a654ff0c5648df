//! How each fault is made and mended.

use dunlin_api::EventKind;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::super::run::order_guest;
use super::flood::Flood;
use super::plan::{Fault, Kind, Role};
use super::speaker::Queue;
use super::{PATIENCE, Stage};
use crate::cluster::Cluster;

/// A fault of at least this length must not be noticed by clients for as long as it lasts.
const LONG: Duration = Duration::from_millis(2000);
/// Answers that show that clients are served.
const SERVED: u64 = 20;
/// Pauses of a host that stutters.
const STUTTERS: u32 = 8;

impl Stage<'_, '_> {
    /// Makes it, lets it last, mends it. What it was, for a person.
    pub(super) fn play(&mut self, fault: &Fault) -> Result<String> {
        let mut host = self.host_of(fault.role)?;
        let lasts = Duration::from_millis(fault.for_ms);
        let role = fault.role.name();
        let seconds = lasts.as_secs_f64();
        let what = match fault.kind {
            Kind::Kill | Kind::KillDaemon => {
                if fault.kind == Kind::KillDaemon {
                    self.cluster.kill_daemon(&host)?;
                } else if fault.role == Role::Primary {
                    host = self.cluster.kill_primary(&[&self.vm], None, PATIENCE)?.0;
                } else {
                    self.cluster.kill_host(&host)?;
                }
                self.gone(fault.role, &host, lasts)?;
                format!("SIGKILL, back after {seconds:.1} s")
            }
            Kind::Stop => {
                self.cluster.stop_host(&host, Signal::SIGTERM)?;
                self.gone(fault.role, &host, lasts)?;
                format!("told to end, back after {seconds:.1} s")
            }
            Kind::Pause => {
                self.cluster.freeze(&host)?;
                let served = self.last(lasts);
                self.goes_on(&host);
                served?;
                format!("stands still for {seconds:.1} s")
            }
            Kind::Stutter => {
                for _ in 0..STUTTERS {
                    self.cluster.freeze(&host)?;
                    std::thread::sleep(lasts);
                    self.goes_on(&host);
                    self.loads.await_answers(1, PATIENCE)?;
                }
                format!("stands still {STUTTERS} times for {} ms", fault.for_ms)
            }
            Kind::Cut | Kind::OneWay | Kind::Mute | Kind::Between => self.cut(fault, &host, lasts)?,
            Kind::SlowLink => {
                let kbit = [5_000, 20_000, 100_000][(fault.variant % 3) as usize];
                let queue_ms = if fault.variant & 8 == 0 { 50 } else { 300 };
                let from = SystemTime::now();
                let holds = self.cluster.testbed().slow_link(&host, kbit, queue_ms)?;
                let served = self.last(lasts);
                self.cluster.testbed().mend_link(&host)?;
                self.queues.push(Queue {
                    host: host.clone(),
                    from,
                    until: SystemTime::now(),
                    holds,
                    frames: u64::MAX,
                });
                served?;
                format!("its cable carries {kbit} kbit/s, {queue_ms} ms of queue, for {seconds:.1} s")
            }
            Kind::SlowDisk | Kind::FailingDisk | Kind::FullDisk => self.disk(fault, &host, lasts)?,
            Kind::FullState => {
                self.cluster.state_disk(&host)?.fill()?;
                let served = self.last(lasts);
                self.cluster.state_disk(&host)?.free()?;
                served?;
                format!("its state folder is full for {seconds:.1} s")
            }
            Kind::Clock => {
                let by_ms = [1_000, 3_600_000, 86_400_000, 34_560_000_000][(fault.variant % 4) as usize];
                let by_ms: i64 = if fault.variant & 8 == 0 { by_ms } else { -by_ms };
                self.cluster.clock(&host)?.jump_ms(by_ms)?;
                let served = self.last(lasts);
                self.cluster.clock(&host)?.set_right()?;
                served?;
                format!("its wall clock jumps by {} s, and back", by_ms / 1000)
            }
            Kind::Flood => {
                let flood = Flood::of(fault.variant);
                let client = self.cluster.testbed().node("client");
                let sent = flood.run(client, self.loads.target(), lasts)?;
                format!("{flood:?}: {sent} for {seconds:.1} s")
            }
            Kind::Switchover => {
                let (from, _) = self.cluster.switch_over(&self.vm, PATIENCE)?;
                self.cluster.await_take_over(&self.vm, &from, PATIENCE)?;
                "a switchover".to_owned()
            }
            Kind::Reboot => self.reboot(&host, lasts, fault.variant & 1 == 1)?,
        };
        Ok(format!("{role} {host}: {what}"))
    }

    /// The fault lasts; if that is long, clients are served meanwhile.
    fn last(&self, lasts: Duration) -> Result<()> {
        // The fault itself is a length of time; nothing is waited for here.
        std::thread::sleep(lasts);
        if lasts >= LONG {
            self.loads
                .await_answers(SERVED, PATIENCE)
                .context("while the fault lasts")?;
        }
        Ok(())
    }

    fn goes_on(&mut self, host: &str) {
        self.queues.push(Queue::of_a_standstill(host, SystemTime::now()));
        self.cluster.thaw(host);
    }

    /// A host's daemon is gone. Whoever is left serves; then it comes back.
    fn gone(&mut self, role: Role, host: &str, lasts: Duration) -> Result<()> {
        self.loads
            .await_answers(SERVED, PATIENCE)
            .context("while the host is gone")?;
        if role == Role::Primary {
            self.cluster.await_take_over(&self.vm, host, PATIENCE)?;
        }
        std::thread::sleep(lasts);
        self.cluster.start_host(host)
    }

    /// The guest boots anew. With `killed`, its host dies at some moment of that, and comes back.
    fn reboot(&mut self, host: &str, lasts: Duration, killed: bool) -> Result<String> {
        let booting = self.loads.boots().begin();
        let resets = |cluster: &Cluster<'_>| -> Result<usize> {
            let logged = cluster.logged()?;
            Ok(logged
                .iter()
                .filter(|event| event.kind == EventKind::GuestReset)
                .count())
        };
        let before = resets(self.cluster)?;
        let order = order_guest(self.cluster.testbed(), self.loads.target(), "reboot")?;
        self.cluster
            .await_status("a guest that resets its machine", PATIENCE, |_| {
                (resets(self.cluster).ok()? > before).then_some(())
            })
            .with_context(|| format!("the order was {order}; served since: {}", self.loads.so_far()))?;
        let mut what = "its guest reboots".to_owned();
        if killed {
            std::thread::sleep(lasts);
            // It may have been late for a sync in the midst of that, and lost its backup.
            self.is_protected()?;
            self.cluster.kill_host(host)?;
            what.push_str(&format!(", SIGKILL after {:.1} s", lasts.as_secs_f64()));
        }
        self.loads
            .await_progress(PATIENCE)
            .context("after the guest's reboot")?;
        if killed {
            self.cluster.start_host(host)?;
        }
        drop(booting);
        Ok(what)
    }

    fn cut(&self, fault: &Fault, host: &str, lasts: Duration) -> Result<String> {
        let testbed = self.cluster.testbed();
        let other = self.host_of(fault.other)?;
        let seconds = lasts.as_secs_f64();
        let (one, all) = ([host], self.everybody_but(host));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let by_cable = fault.kind == Kind::Cut && fault.variant & 1 == 0;
        let what = match fault.kind {
            Kind::Cut if by_cable => {
                testbed.cut_link(host)?;
                "its cable is pulled".to_owned()
            }
            Kind::Cut => {
                testbed.partition(&one, &all)?;
                "cut off silently".to_owned()
            }
            Kind::Mute => {
                testbed.lose(&[(&one, &all)])?;
                "heard by nobody".to_owned()
            }
            Kind::OneWay => {
                testbed.lose(&[(&[&other], &one)])?;
                format!("does not hear the {}", fault.other.name())
            }
            _ => {
                testbed.partition(&one, &[&other])?;
                format!("cut off from the {}", fault.other.name())
            }
        };
        let served = self.last(lasts);
        if by_cable {
            testbed.restore_link(host)?;
        } else {
            testbed.heal()?;
        }
        served?;
        Ok(format!("{what} for {seconds:.1} s"))
    }

    fn disk(&self, fault: &Fault, host: &str, lasts: Duration) -> Result<String> {
        let injected = match fault.kind {
            Kind::SlowDisk => ["bytes-per-s=524288", "bytes-per-s=4194304"][(fault.variant % 2) as usize],
            Kind::FullDisk => "full=on",
            _ => ["write-error=on", "flush-error=on"][(fault.variant % 2) as usize],
        };
        self.cluster.dunlin(host, &["inject", &self.vm, injected])?;
        let served = self.last(lasts);
        self.cluster.dunlin(host, &["inject", &self.vm, "none"])?;
        served?;
        Ok(format!("its disk: {injected} for {:.1} s", lasts.as_secs_f64()))
    }

    fn everybody_but(&self, host: &str) -> Vec<String> {
        let nodes = self.cluster.testbed().nodes().map(|node| node.name().to_owned());
        nodes.filter(|name| name != host).collect()
    }
}
