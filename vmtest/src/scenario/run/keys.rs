//! Keys that are exchanged, and a machine that is refused, while clients count.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use super::{PATIENCE, Stage};

/// The host with the authority's key.
const AUTHORITY: &str = "a";
/// So often keys are exchanged anew where the VM did not keep its two hosts.
const TIMES: usize = 3;

impl Stage<'_, '_> {
    /// Every host's keys, and then the authority and every host's keys again. The VM keeps its two hosts all the while.
    pub(super) fn rotate_keys(&mut self) -> Result<()> {
        if self.cluster.dir().join("ca-key.pem").exists() {
            self.cluster.give_authority()?;
        }
        // A machine that stands still for a moment may cost the backup as well, but not each time.
        let mut moved = None;
        for _ in 0..TIMES {
            moved = self.rotate_keys_once()?;
            if moved.is_none() {
                return Ok(());
            }
        }
        bail!("{TIMES} times, the last one: {}", moved.unwrap_or_default())
    }

    /// How the VM lost a host meanwhile, if it did.
    fn rotate_keys_once(&mut self) -> Result<Option<String>> {
        let hosts = self.protected()?;
        let lost = self.count_told(&hosts.0, "unprotected")?;
        for words in [&["rotate"][..], &["rotate", "--authority"]] {
            self.cluster.keys(words)?;
            self.counter.await_more(50, PATIENCE)?;
        }
        let now = self.protected()?;
        let lost = self.count_told(&hosts.0, "unprotected")? - lost;
        if now == hosts && lost == 0 {
            return Ok(None);
        }
        let events = self.cluster.dunlin(&hosts.0, &["events"])?;
        Ok(Some(format!(
            "the VM was on {hosts:?} and is on {now:?}, and lost its backup {lost} times: {events}"
        )))
    }

    /// The backup's machine is of the cluster no more, though it runs: it is cut off, and the VM is served without it. Then a machine of
    /// its name comes in with other keys.
    pub(super) fn revoke_backup(&mut self) -> Result<()> {
        // The authority's host stays.
        self.cluster.serve_on(&self.vm, AUTHORITY, PATIENCE)?;
        let (primary, backup) = self.protected()?;
        ensure!(
            primary == AUTHORITY,
            "the authority's host is not {primary}: mend the story"
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
