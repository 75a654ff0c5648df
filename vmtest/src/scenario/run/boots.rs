//! Guests that boot anew: by themselves, or from a disk when all hosts were lost.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{PATIENCE, Stage, order_guest};
use crate::demo::service;

impl Stage<'_, '_> {
    /// The guest reboots. Returns the primary as soon as its machine was reset.
    pub(super) fn reboot(&self) -> Result<String> {
        let primary = self.with_role("primary")?;
        let before = self.count_told(&primary, "guest-reset")?;
        order_guest(self.cluster.lab(), service(), "reboot")?;
        self.cluster
            .await_status("a guest that resets its machine", PATIENCE, |_| {
                let after = self.count_told(&primary, "guest-reset").ok()?;
                (after > before).then_some(())
            })?;
        Ok(primary)
    }

    /// All hosts were lost, with all that was agreed. This host says what a person can do, refuses less than that, and
    /// does it.
    pub(super) fn boot_from_disk(&mut self) -> Result<()> {
        let at = Instant::now();
        let last = self.last_primary.clone().context("no host was lost before")?;
        self.cluster
            .await_status("a host that says what a person can do", PATIENCE, |_| {
                let events = self.cluster.events(&last).ok()?;
                events
                    .iter()
                    .any(|event| event.kind == "waiting" && event.text.contains("--from-disk"))
                    .then_some(())
            })?;
        let refused = self.cluster.output(&last, &["protect", "--alone", &self.vm])?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(
            refused.status.code() == Some(2) && words.contains("--from-disk"),
            "without a living copy and without --from-disk: {} ({words})",
            refused.status
        );
        self.cluster
            .dunlin(&last, &["protect", "--alone", "--from-disk", &self.vm])?;
        self.unprotected(at)?;
        let events = self.cluster.events(&last)?;
        let told = events.iter().filter(|event| event.kind == "cold-start").count();
        ensure!(told == 1, "{told} events tell of the cold start: {events:?}");
        Ok(())
    }
}
