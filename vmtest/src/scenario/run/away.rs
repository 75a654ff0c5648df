//! Hosts that live and are away for a while, and what may leave meanwhile.

use dunlin_api::{EventKind, Role, State};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};

use super::super::{Action, Away};
use super::{PATIENCE, Stage, with_role};

impl Stage<'_, '_> {
    /// When the host is back, a snapshot is all that it can get: the entries that it lacks are nowhere any more.
    pub(super) fn lose_primary(&mut self, away: Away) -> Result<()> {
        let (primary, _) = self.protected()?;
        let at = Instant::now();
        match away {
            Away::Frozen => self.cluster.freeze(&primary)?,
            Away::Mute => self.cluster.testbed().cut_link(&primary)?,
        }
        self.taken_over(&primary, at)?;
        let mut known = None;
        self.cluster
            .await_status("a log that was cut", PATIENCE, |hosts| {
                // Cut off, the old one still takes itself for the primary.
                let mut others = hosts.iter().filter(|host| host.host != primary);
                let vm = others.find_map(|host| host.vm(&self.vm).filter(|vm| vm.role == Role::Primary))?;
                let known = *known.get_or_insert(vm.committed);
                (vm.committed > known + vm.log_entries).then_some(())
            })?;
        match away {
            Away::Frozen => self.cluster.thaw(&primary),
            Away::Mute => self.cluster.testbed().restore_link(&primary)?,
        }
        Ok(())
    }

    /// A primary without a majority says so, in its state, its events and its exit code, and no client hears more of it.
    pub(super) fn falls_silent(&self) -> Result<()> {
        let primary = self
            .cluster
            .await_status("a primary without a majority", PATIENCE, |hosts| {
                let host = with_role(hosts, &self.vm, "primary")?;
                let vm = hosts.iter().find(|status| status.host == host)?.vm(&self.vm)?;
                (vm.state == State::QuorumLost && !vm.protected).then_some(host)
            })?;
        let before = self.counter.acknowledged();
        let code = self.cluster.output(&primary, &["status"])?.status.code();
        ensure!(
            code == Some(3),
            "status ends with {code:?} on a host without a majority"
        );
        let events = self.cluster.dunlin(&primary, &["events"])?;
        ensure!(events.contains("quorum-lost"), "no event tells of it: {events}");
        // What left before may not have been read yet: one answer for each client, who says nothing more before it has that.
        let (told, clients) = (self.counter.acknowledged() - before, self.counter.connections());
        ensure!(
            told <= clients,
            "{told} answers without a majority, to {clients} clients"
        );
        Ok(())
    }

    /// What a client sends just then may all be agreed, or come when the next host serves already: then one more host dies.
    pub(super) fn has_overheard(&mut self) -> Result<()> {
        const TIMES: usize = 5;
        for _ in 0..TIMES {
            if self.is_overheard().is_ok() {
                return Ok(());
            }
            for action in [
                Action::KillPrimary,
                Action::Answers,
                Action::Restart,
                Action::AwaitProtected,
                Action::Answers,
            ] {
                self.act(&action)?;
            }
        }
        self.is_overheard()
    }

    /// Events outlive daemons, so those of dead hosts count, too.
    fn is_overheard(&self) -> Result<()> {
        let mut told = Vec::new();
        for status in self.cluster.statuses() {
            let events = self.cluster.events(&status.host)?;
            told.extend(
                events
                    .into_iter()
                    .filter(|event| event.kind == EventKind::TookOver),
            );
        }
        let overheard = told.iter().any(|event| event.text.contains("it had heard"));
        ensure!(overheard, "nobody has overheard anything: {told:?}");
        Ok(())
    }

    /// The primary goes on, and nobody may believe that it is protected.
    pub(super) fn unprotected(&mut self, at: Instant) -> Result<()> {
        self.counter.await_more(50, PATIENCE)?;
        self.moments.push((at, Instant::now()));
        self.cluster
            .await_status("an unprotected primary that says so", PATIENCE, |hosts| {
                let host = with_role(hosts, &self.vm, "primary")?;
                let vm = hosts.iter().find(|status| status.host == host)?.vm(&self.vm)?;
                (!vm.protected).then_some(())
            })
    }

    /// The backup was frozen: what needs its word waits until the group has agreed to go on without it, and that is said
    /// before anything leaves.
    pub(super) fn dropped(&mut self) -> Result<()> {
        let at = Instant::now();
        self.unprotected(at)?;
        let primary = self.with_role("primary")?;
        let agreed = self.unprotected_since_freeze(&primary)?.with_context(|| {
            format!("host {primary} goes on without its backup, and no event tells that it was agreed")
        })?;
        self.silences.push((self.frozen_at, agreed));
        Ok(())
    }

    /// The frozen ones go on, and the backup takes over.
    pub(super) fn kill_primary_and_thaw(&mut self) -> Result<()> {
        let primary = self.with_role("primary")?;
        let at = self.kill_and_thaw(&primary)?;
        self.taken_over(&primary, at)
    }

    /// The frozen backup goes on, and may not take over: the primary has served without it.
    pub(super) fn kill_unprotected_and_thaw(&mut self) -> Result<()> {
        let primary = self.with_role("primary")?;
        self.kill_and_thaw(&primary)?;
        self.last_primary = Some(primary);
        Ok(())
    }

    fn kill_and_thaw(&mut self, host: &str) -> Result<Instant> {
        let at = self.cluster.kill_host(host)?;
        self.dead.insert(host.to_owned());
        for host in self.cluster.frozen() {
            self.cluster.thaw(&host);
        }
        Ok(at)
    }

    /// When the primary was allowed to speak alone, if it was since the backup was frozen.
    pub(super) fn unprotected_since_freeze(&self, primary: &str) -> Result<Option<SystemTime>> {
        let events = self.cluster.events(primary)?;
        let unprotected = events.iter().filter(|event| event.kind == EventKind::Unprotected);
        Ok(unprotected
            .map(|event| event.at())
            .find(|at| *at > self.frozen_at))
    }

    /// A backup that is late again and again; each time nothing leaves meanwhile.
    pub(super) fn stutter(&mut self, times: usize, pause: Duration) -> Result<()> {
        for _ in 0..times {
            let (primary, backup) = self.protected()?;
            self.cluster.freeze(&backup)?;
            self.frozen_at = SystemTime::now();
            // The fault itself is a length of time; nothing is waited for here.
            std::thread::sleep(pause);
            let until = SystemTime::now();
            self.cluster.thaw(&backup);
            // On a busy machine it may have been long enough.
            let until = self
                .unprotected_since_freeze(&primary)?
                .map_or(until, |agreed| agreed.min(until));
            self.silences.push((self.frozen_at, until));
            self.counter.await_more(5, PATIENCE)?;
        }
        Ok(())
    }
}
