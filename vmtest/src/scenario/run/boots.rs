//! Guests that boot anew: by themselves, or from a disk when all hosts were lost.

use dunlin_api::EventKind;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{PATIENCE, Stage, ask_guest, ask_guest_within, order_guest};
use crate::client::Answer;
use crate::demo::service;

/// Where the guest says which variables it has.
const VARIABLES: &str = "dunlin:variables";

impl Stage<'_, '_> {
    /// The guest reboots: until its machine was reset, on whichever host serves it then.
    pub(super) fn reboot(&self) -> Result<()> {
        let resets = || -> Result<usize> {
            let logged = self.cluster.logged()?;
            let reset = logged.iter().filter(|event| event.kind == EventKind::GuestReset);
            Ok(reset.count())
        };
        let before = resets()?;
        order_guest(self.cluster.testbed(), service(), "reboot")?;
        self.cluster
            .await_status("a guest that resets its machine", PATIENCE, |_| {
                (resets().ok()? > before).then_some(())
            })
    }

    /// The primary's host dies in the midst of a boot.
    pub(super) fn reboot_and_kill(&mut self) -> Result<()> {
        self.reboot()?;
        // It may have been late for a sync in the midst of that.
        let (primary, _) = self.protected()?;
        self.cluster.kill_host(&primary)?;
        self.dead.insert(primary.clone());
        self.counter.await_more(100, PATIENCE)?;
        self.cluster
            .await_take_over(&self.vm, &primary, PATIENCE)
            .map(drop)
    }

    /// The guest makes a variable in its UEFI, and says so.
    pub(super) fn remember(&self, name: &str) -> Result<()> {
        order_guest(self.cluster.testbed(), service(), &format!("remember-{name}"))?;
        self.await_variables(|names| names.contains(&name))
    }

    /// What is in the flash is read at a boot only.
    pub(super) fn reboot_and_recall(&self, names: &[String]) -> Result<()> {
        self.reboot()?;
        self.recall(names)
    }

    /// The guest says that it has these variables, and they are in the image on its host.
    pub(super) fn recall(&self, names: &[String]) -> Result<()> {
        self.counter.await_more(100, PATIENCE)?;
        self.await_variables(|found| found == names)?;
        let primary = self.with_role("primary")?;
        let image = self
            .cluster
            .state(&primary)
            .join("variables")
            .join(format!("{}.fd", self.vm));
        let bytes = std::fs::read(&image).with_context(|| image.display().to_string())?;
        for name in names {
            let text: Vec<u8> = format!("dunlin_{name}")
                .encode_utf16()
                .flat_map(u16::to_le_bytes)
                .collect();
            ensure!(
                bytes.windows(text.len()).any(|part| part == text),
                "no variable {name} in {}",
                image.display()
            );
        }
        Ok(())
    }

    fn await_variables(&self, are: impl Fn(&[&str]) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = ask_guest_within(
                self.cluster.testbed(),
                service(),
                &["GET", VARIABLES],
                Duration::from_secs(5),
            );
            if let Ok(Answer::Bulk(Some(bytes))) = &said {
                let text = String::from_utf8_lossy(bytes);
                let names: Vec<&str> = text.split(',').filter(|name| !name.is_empty()).collect();
                if are(&names) {
                    // Whoever looks again wants to hear it from a later boot.
                    return ask_guest(self.cluster.testbed(), service(), &["DEL", VARIABLES]).map(drop);
                }
            }
            ensure!(
                Instant::now() < deadline,
                "the guest does not say that it has the variables: {said:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
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
                    .any(|event| event.kind == EventKind::Waiting && event.text.contains("--from-disk"))
                    .then_some(())
            })?;
        let refused = self.cluster.output(&last, &["promote", "--force", &self.vm])?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(
            refused.status.code() == Some(2) && words.contains("--from-disk"),
            "without a living copy and without --from-disk: {} ({words})",
            refused.status
        );
        self.cluster
            .dunlin(&last, &["promote", "--force", "--from-disk", &self.vm])?;
        self.unprotected(at)?;
        let events = self.cluster.events(&last)?;
        let told = events
            .iter()
            .filter(|event| event.kind == EventKind::ColdStart)
            .count();
        ensure!(told == 1, "{told} events tell of the cold start: {events:?}");
        Ok(())
    }

    /// After the loss of all hosts: whoever served the VM last boots it, and tells so.
    pub(super) fn boots_on_last(&mut self) -> Result<()> {
        let at = Instant::now();
        let last = self.last_primary.clone().context("no host was lost before")?;
        let primary = self.with_role("primary")?;
        ensure!(
            primary == last,
            "host {primary} boots the VM, and {last} served it last"
        );
        let events = self.cluster.dunlin(&primary, &["events"])?;
        let told = events.lines().filter(|line| line.contains("cold-start")).count();
        // It is told again where it waited for another host's disk in between.
        ensure!(told >= 1, "no event tells of the cold start: {events}");
        self.counter.await_more(50, PATIENCE)?;
        self.moments.push((at, Instant::now()));
        Ok(())
    }
}
