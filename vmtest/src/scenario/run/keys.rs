//! Keys that are exchanged, and a machine that is refused, while clients count.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::{PATIENCE, Stage};

impl Stage<'_, '_> {
    /// Every host's keys, and then the authority and every host's keys again. The VM keeps its two hosts all the while.
    pub(super) fn rotate_keys(&mut self) -> Result<()> {
        if self.cluster.dir().join("ca-key.pem").exists() {
            self.cluster.give_authority()?;
        }
        let hosts = self.cluster.await_protected(&self.vm, PATIENCE)?;
        let lost = self.count_told(&hosts.0, "unprotected")?;
        for words in [&["rotate"][..], &["rotate", "--authority"]] {
            self.cluster.keys(words)?;
            self.counter.await_more(50, PATIENCE)?;
        }
        let now = self.cluster.await_protected(&self.vm, PATIENCE)?;
        ensure!(now == hosts, "the VM was on {hosts:?}, and is on {now:?}");
        let lost = self.count_told(&hosts.0, "unprotected")? - lost;
        ensure!(
            lost == 0,
            "the VM lost its backup {lost} times: {}",
            self.cluster.dunlin(&hosts.0, &["events"])?
        );
        Ok(())
    }

    /// The backup's machine is of the cluster no more, though it runs: it is cut off, and the VM is served without it. Then a machine of
    /// its name comes in with other keys.
    pub(super) fn revoke_backup(&mut self) -> Result<()> {
        let (primary, backup) = self.cluster.await_protected(&self.vm, PATIENCE)?;
        ensure!(
            primary == "a",
            "the authority's host is {primary}: mend the story"
        );
        let at = Instant::now();
        self.cluster.keys(&["revoke", &backup])?;
        self.unprotected(at)?;
        self.cluster
            .refuses(&primary, &backup, "the peer's certificate was revoked")?;
        self.cluster
            .refuses(&backup, &primary, "this host's certificate was revoked")?;
        self.counter.await_more(50, PATIENCE)?;
        self.cluster.kill_host(&backup)?;
        self.cluster.let_in(&backup)?;
        self.cluster.start_host(&backup)
    }
}
