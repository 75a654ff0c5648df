//! Hosts of other names in a VM's group.
//!
//! * **Decides:** that a move is refused where it would cost protection in silence, and that the old host has nothing left.
//! * **Flow:** the new host gets empty disks -> `dunlin move`, said on the witness's host -> the status names it.
//! * **Not here:** that nothing is lost meanwhile: the clients say that, as in every scenario.

use super::{PATIENCE, Stage, with_role};
use crate::cluster::Cluster;
use crate::scenario::{Action, Scenario};
use anyhow::{Context, Result, bail, ensure};
use dunlin_api::files::VmFile;
use dunlin_api::{EventKind, HostStatus};
use std::time::Instant;

/// Hosts that have no part in the VM at first.
pub const SPARE_HOSTS: [&str; 2] = ["d", "e"];

/// Whether the story needs them.
pub fn are_in(scenario: &Scenario) -> bool {
    let moves = |action: &Action| matches!(action, Action::MoveBackup(_) | Action::MoveWitness(_));
    scenario.steps.iter().any(moves) || has_standby(scenario)
}

fn has_standby(scenario: &Scenario) -> bool {
    let awaits = |action: &Action| matches!(action, Action::AwaitBackup(_) | Action::AwaitCheckpoint);
    scenario.steps.iter().any(awaits)
}

fn has_checkpoint(scenario: &Scenario) -> bool {
    scenario.steps.contains(&Action::AwaitCheckpoint)
}

/// Of the VM's file: the first spare host is its standby, if the story has one.
pub fn with_standby(scenario: &Scenario, file: VmFile) -> VmFile {
    match has_standby(scenario) {
        true => VmFile {
            standby: Some(SPARE_HOSTS[0].to_owned()),
            standby_after: "5s".to_owned(),
            standby_checkpoint: has_checkpoint(scenario).then(|| "1s".to_owned()),
            ..file
        },
        false => file,
    }
}

/// A standby has disks for the VM before it is started.
pub fn make_ready(cluster: &Cluster<'_>, scenario: &Scenario) -> Result<()> {
    match has_standby(scenario) {
        true => cluster.give_empty_disks(SPARE_HOSTS[0], "a"),
        false => Ok(()),
    }
}

/// What became of a backup that was to be moved in silence.
#[derive(PartialEq, Eq)]
enum Seen {
    /// It is well, and the order was refused.
    Kept,
    /// There is none.
    Absent,
    /// It was lost in the moment of the order, and the other host has its part.
    Moved,
}

impl Stage<'_, '_> {
    pub(super) fn move_backup(&mut self, host: &str) -> Result<()> {
        let (primary, witness) = (self.with_role("primary")?, self.with_role("witness")?);
        if self.dead.remove(host) {
            // Named already, and lost with all that it had before it was complete, or after: it is named again.
            self.cluster.renew_host(host)?;
            self.cluster.start_host(host)?;
        } else {
            self.cluster.give_empty_disks(host, &primary)?;
        }
        let mut said = vec!["move", &self.vm, "--backup", host];
        let at = Instant::now();
        let seen = self.is_kept(&witness, &said)?;
        if seen == Seen::Kept {
            said.push("--unprotected-meanwhile");
        }
        if seen != Seen::Moved {
            // It ends when the VM is protected.
            self.cluster.order(&witness, &said)?;
        }
        self.moments.push((at, Instant::now()));
        self.is_backup(host)
    }

    /// A backup that is well is not moved in silence.
    fn is_kept(&self, witness: &str, said: &[&str]) -> Result<Seen> {
        const TIMES: usize = 3;
        let mut told = String::new();
        for _ in 0..TIMES {
            // Where all hosts run, there is one that is well, though perhaps not at this moment.
            let backup = match self.dead.is_empty() {
                true => Some(self.protected()?.1),
                false => with_role(&self.cluster.statuses(), &self.vm, "backup"),
            };
            let Some(backup) = backup else {
                return Ok(Seen::Absent);
            };
            let lost = self.losses()?;
            let output = self.cluster.output(witness, said)?;
            told = format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
            let is_named = told.contains(&format!("host '{backup}' is the VM's backup, and well"));
            if output.status.code() == Some(2) && is_named {
                return Ok(Seen::Kept);
            }
            if output.status.success() && self.losses()? > lost {
                return Ok(Seen::Moved);
            }
            ensure!(
                !output.status.success(),
                "a backup that is well was moved in silence"
            );
        }
        bail!("a backup that is well: {told}")
    }

    /// How often a backup was lost, and not because it was to go.
    fn losses(&self) -> Result<usize> {
        let told = self.told_by_all(&EventKind::BackupLost)?;
        let by_itself = |event: &&crate::cluster::Event| !event.text.contains("its host leaves");
        Ok(told.iter().filter(by_itself).count())
    }

    /// It has the part. A busy machine may have cost the other one its office since: then it is the primary.
    fn is_backup(&self, host: &str) -> Result<()> {
        let (primary, backup) = self.protected()?;
        ensure!(
            backup == host || primary == host,
            "the backup is on host {backup}, not on {host}, and {primary} is the primary"
        );
        Ok(())
    }

    pub(super) fn move_witness(&mut self, host: &str) -> Result<()> {
        let primary = self.with_role("primary")?;
        self.cluster
            .order(&primary, &["move", &self.vm, "--witness", host])?;
        let vm = self.vm.clone();
        self.cluster
            .await_status("the new witness takes part", PATIENCE, |hosts| {
                let status = hosts.iter().find(|status| status.host == primary)?.vm(&vm)?;
                let mut peers = status.peers.iter();
                peers
                    .any(|peer| peer.host == host && peer.connected && peer.witness)
                    .then_some(())
            })
            .map(drop)
    }

    /// Nobody orders it.
    pub(super) fn await_backup(&mut self, host: &str) -> Result<()> {
        let vm = self.vm.clone();
        self.cluster
            .await_status(&format!("host {host} is the backup"), PATIENCE, |hosts| {
                (with_role(hosts, &vm, "backup")? == host).then_some(())
            })?;
        self.is_backup(host)?;
        let told = self.told_by_all(&EventKind::Standby)?;
        ensure!(
            told.iter()
                .any(|event| event.text.contains(&format!("standby '{host}' takes its part"))),
            "nobody says that standby {host} takes a part: {told:?}"
        );
        Ok(())
    }

    pub(super) fn await_checkpoint(&mut self) -> Result<()> {
        let vm = self.vm.clone();
        let rounds = |hosts: &[HostStatus]| {
            let backup = with_role(hosts, &vm, "backup")?;
            let status = hosts.iter().find(|status| status.host == backup)?.vm(&vm)?;
            status.checkpoint.as_ref().map(|checkpoint| checkpoint.rounds)
        };
        let what = "the standby has a checkpoint";
        let begun = self.cluster.await_status(what, PATIENCE, rounds)?;
        // The one under way may have begun before.
        let later = |hosts: &[HostStatus]| rounds(hosts).filter(|rounds| *rounds > begun + 1);
        self.cluster.await_status(what, PATIENCE, later).map(drop)
    }

    pub(super) fn memory_was_held(&mut self, percent: u64) -> Result<()> {
        let told = self.told_by_all(&EventKind::Joining)?;
        let mut told = told.iter().rev();
        let compared = told.find(|event| event.text.contains("of an earlier copy"));
        let text = &compared.context("no host that joined held anything")?.text;
        let mut numbers = text
            .split_whitespace()
            .filter_map(|word| word.parse::<u64>().ok());
        let (held, equal) = numbers.next().zip(numbers.next()).context("two figures")?;
        ensure!(equal * 100 >= held * percent, "{text}");
        Ok(())
    }

    pub(super) fn restart(&mut self, host: &str) -> Result<()> {
        ensure!(self.dead.remove(host), "host {host} is not dead: mend the story");
        self.cluster.start_host(host)
    }

    pub(super) fn await_gone(&mut self, host: &str) -> Result<()> {
        let vm = self.vm.clone();
        self.cluster
            .await_status("the old host has let go of the VM", PATIENCE, |hosts| {
                let status = hosts.iter().find(|status| status.host == host)?;
                status.vm(&vm).is_none().then_some(())
            })?;
        let folder = self.cluster.state(host).join("vms").join(&self.vm);
        ensure!(!folder.exists(), "host {host}: {} is left", folder.display());
        let told = self.cluster.events(host)?;
        ensure!(
            told.iter().any(|event| event.kind == EventKind::Left),
            "host {host} does not say that it has left: {told:?}"
        );
        Ok(())
    }
}
