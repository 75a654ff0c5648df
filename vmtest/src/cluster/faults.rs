//! Hosts whose wall clock and state folder can go wrong, and that lack what they need.

use anyhow::{Context, Result};

use super::Cluster;
use crate::testbed::{Clock, SmallDisk};

impl Cluster<'_> {
    /// Each host goes by a wall clock of its own. Before any daemon starts.
    pub fn use_clocks(&mut self) -> Result<()> {
        for host in &self.hosts {
            let dir = self.testbed.dir().join(format!("clock-{host}"));
            std::fs::create_dir_all(&dir)?;
            self.clocks.insert(host.clone(), Clock::new(&dir)?);
        }
        Ok(())
    }

    /// Each host's state folder has so much room. Before any daemon starts.
    pub fn use_small_states(&mut self, mib: u64) -> Result<()> {
        for host in &self.hosts {
            let folder = self.dir.join(host).join("state");
            self.states.insert(host.clone(), SmallDisk::mount(&folder, mib)?);
        }
        Ok(())
    }

    /// A host's daemon finds no CRIU when it is started next.
    pub fn lacks_criu(&mut self, host: &str) {
        self.without_criu.insert(host.to_owned());
    }

    /// A host's wall clock.
    pub fn clock(&mut self, host: &str) -> Result<&mut Clock> {
        self.clocks
            .get_mut(host)
            .with_context(|| format!("host {host} has no wall clock of its own"))
    }

    /// A host's state folder.
    pub fn state_disk(&self, host: &str) -> Result<&SmallDisk> {
        self.states
            .get(host)
            .with_context(|| format!("host {host}'s state folder is not a small disk"))
    }
}
