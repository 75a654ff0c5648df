//! Daemons that are told to end, and hosts that all die.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;

use super::{Stage, with_role};

impl Stage<'_, '_> {
    /// A daemon that is told to end hands its VM over first, and leaves nothing.
    pub(super) fn stop_primary(&mut self, signal: Signal) -> Result<()> {
        let primary = self.with_role("primary")?;
        let at = Instant::now();
        let log = self.cluster.log(&primary);
        let before = std::fs::read_to_string(&log)?.len();
        self.cluster.stop_host(&primary, signal)?;
        self.nothing_runs_on(&primary)?;
        self.dead.insert(primary.clone());
        let log = std::fs::read_to_string(log)?.split_off(before);
        // An election in that moment may have been first.
        let has = |kind: &str| log.contains(kind);
        ensure!(
            (has("handing-over") || has("deposed")) && has("ended-here"),
            "host {primary}'s daemon ended without handing the VM over"
        );
        self.taken_over(&primary, at)
    }

    /// Nobody is left who could take the VM: it ends with its host, which says so and does not wait for what cannot come.
    pub(super) fn stop_alone(&mut self) -> Result<()> {
        let primary = self.with_role("primary")?;
        self.cluster.stop_host(&primary, Signal::SIGTERM)?;
        self.nothing_runs_on(&primary)?;
        self.dead.insert(primary.clone());
        let log = std::fs::read_to_string(self.cluster.log(&primary))?;
        ensure!(
            log.contains("ends-here") && !log.contains("not-handed-over"),
            "host {primary}'s daemon asked for a switchover that nobody could take"
        );
        self.last_primary = Some(primary);
        Ok(())
    }

    pub(super) fn kill_all(&mut self) -> Result<()> {
        let primary = self.with_role("primary")?;
        let witness = with_role(&self.cluster.statuses(), &self.vm, "witness");
        // One after the other, though within milliseconds: in this order nobody can take over in between. A host without a role just then, as a
        // backup that was lost and is brought in anew, dies with them.
        let mut order = self.cluster.running();
        order.sort_by_key(|host| (*host == primary, Some(host) != witness.as_ref()));
        for host in order {
            self.cluster.kill_host(&host)?;
            self.dead.insert(host);
        }
        self.last_primary = Some(primary);
        Ok(())
    }

    pub(super) fn nothing_runs_on(&self, host: &str) -> Result<()> {
        let node = self.cluster.testbed().node(host);
        let deadline = Instant::now() + Duration::from_secs(30);
        // A process that is being killed is still listed for a moment.
        while !node.pids().is_empty() {
            if Instant::now() > deadline {
                bail!("host {host}: processes {:?} outlived the daemon", node.pids());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = node.traces()?;
        ensure!(left.is_empty(), "left after a daemon's end: {}", left.join(", "));
        Ok(())
    }
}
