//! Faults that stop a part of a host and not all of it: a thread that hangs, a load that fails half-way, an office that is
//! lost and won back.

use dunlin_api::Role;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{PATIENCE, Stage, with_role};
use crate::cluster::Event;

/// What the primary's VM may stand for a sync, with what a busy machine adds to the bound; less than a backup may.
const LONGEST_PAUSE: Duration = Duration::from_millis(1400);

impl Stage<'_, '_> {
    fn inject(&self, host: &str, fault: &str) -> Result<()> {
        self.cluster.dunlin(host, &["inject", &self.vm, fault]).map(drop)
    }

    /// Waits until somebody has told of `kind` once more than `before` times.
    fn await_another(&self, host: &str, kind: &str, before: usize) -> Result<()> {
        self.cluster.await_status(kind, PATIENCE, |_| {
            let told = self.count_told(host, kind).ok()?;
            (told > before).then_some(())
        })
    }

    /// The primary goes on without its backup, and says so; the backup may be brought in anew before anybody looks.
    fn goes_on_alone(&mut self, primary: &str, before: usize, at: Instant) -> Result<()> {
        self.await_another(primary, "unprotected", before)?;
        self.counter.await_more(50, PATIENCE)?;
        self.moments.push((at, Instant::now()));
        Ok(())
    }

    /// What was told of `kind` since then: a busy machine may have cost a backup before.
    fn events_since(&self, since: SystemTime, host: &str, kind: &str) -> Result<Vec<Event>> {
        // By their clock, events are up to a millisecond early.
        let since = since - Duration::from_millis(1);
        let mut events = self.cluster.events(host)?;
        events.retain(|event| event.kind.as_str() == kind && event.at() >= since);
        Ok(events)
    }

    fn stalls(&self, primary: &str) -> Result<u64> {
        let status = self.cluster.status(primary)?;
        let stalls = status.vm(&self.vm).map(|vm| vm.stalls);
        stalls.context("the primary knows the VM no more")
    }

    /// The longest that the primary's VM has stood for a sync.
    fn longest_pause(&self, primary: &str) -> Result<Duration> {
        let status = self.cluster.status(primary)?;
        let stood_us = status.vm(&self.vm).map(|vm| vm.sync.longest_pause_us);
        Ok(Duration::from_micros(
            stood_us.context("the primary knows the VM no more")?,
        ))
    }

    /// The backup's session hangs where it is to stop its VM. The primary's VM does not wait for it.
    pub(super) fn hang_backup(&mut self) -> Result<()> {
        let (primary, backup) = self.protected()?;
        let before = self.count_told(&backup, "fault")?;
        let alone = self.count_told(&primary, "unprotected")?;
        let had_stood = self.longest_pause(&primary)?;
        let (at, since) = (Instant::now(), SystemTime::now());
        self.inject(&backup, "hang-at=backup-stops")?;
        self.await_another(&backup, "fault", before)?;
        self.goes_on_alone(&primary, alone, at)?;
        // It may be brought in anew, and lost for another reason, before anybody looks.
        let lost = self.events_since(since, &primary, "backup-lost")?;
        ensure!(
            lost.iter().any(|event| event.text.contains("backup-stands")),
            "it is not said what was waited for: {lost:?}"
        );
        let stood = self.longest_pause(&primary)?;
        ensure!(
            !stood.is_zero() && (stood < LONGEST_PAUSE || stood == had_stood),
            "the primary's VM stood for {stood:?}"
        );
        self.inject(&backup, "go-on")
    }

    /// The primary's session hangs between the VM's stop and its going on: nobody in particular waits too long, and the VM
    /// stands. The watchdog ends that.
    pub(super) fn hang_primary(&mut self) -> Result<()> {
        let (primary, _) = self.protected()?;
        let before = self.count_told(&primary, "fault")?;
        let alone = self.count_told(&primary, "unprotected")?;
        let counted_before = self.stalls(&primary)?;
        let (at, since) = (Instant::now(), SystemTime::now());
        self.inject(&primary, "hang-at=primary-captured")?;
        self.await_another(&primary, "fault", before)?;
        self.goes_on_alone(&primary, alone, at)?;
        let stalled = self.events_since(since, &primary, "stalled")?;
        let told = |words: &str| stalled.iter().filter(|event| event.text.contains(words)).count();
        ensure!(told("-leaves)") + told("-applied)") > 0, "{stalled:?}");
        let (counted, told) = (self.stalls(&primary)? - counted_before, told("does not get on"));
        ensure!(
            told > 0 && counted == told as u64,
            "status counts {counted} stalls, and events tell of {told}: {stalled:?}"
        );
        self.inject(&primary, "go-on")
    }

    /// QEMU answers nothing, and its daemon lives: the healthy copy goes on, and the one that hangs is ended.
    pub(super) fn hang_qemu(&mut self) -> Result<()> {
        let (primary, _) = self.protected()?;
        let status = self.cluster.status(&primary)?;
        let pid = status.vm(&self.vm).and_then(|vm| vm.qemu_pid);
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.context("the primary does not say which process its QEMU is")?;
        let ended = self.count_told(&primary, "ended-here")?;
        let (at, since) = (Instant::now(), SystemTime::now());
        kill(Pid::from_raw(pid), Signal::SIGSTOP).context("stopping QEMU")?;
        self.taken_over(&primary, at)?;
        self.told(&primary, "left-to-backup")?;
        self.await_another(&primary, "ended-here", ended)?;
        let lost = self.events_since(since, &primary, "backup-lost")?;
        ensure!(lost.is_empty(), "the healthy backup was given up: {lost:?}");
        Ok(())
    }

    /// A switchover whose backup dies before the VM is stopped for it. The VM goes on where it is.
    pub(super) fn break_switchover(&mut self) -> Result<()> {
        let (primary, backup) = self.protected()?;
        let (before, lost) = (
            self.count_told(&primary, "fault")?,
            self.count_told(&primary, "backup-lost")?,
        );
        self.inject(&primary, "hang-at=primary-switches-over")?;
        let mut command = self.cluster.command(&primary, &["switchover", &self.vm])?;
        let failover = command
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()?;
        self.await_another(&primary, "fault", before)?;
        let at = self.cluster.kill_host(&backup)?;
        self.dead.insert(backup);
        self.await_another(&primary, "backup-lost", lost)?;
        // Only now does the session's thread come to stop the VM.
        self.inject(&primary, "go-on")?;
        self.unprotected(at)?;
        let answer = failover.wait_with_output()?;
        let words = String::from_utf8_lossy(&answer.stderr).into_owned();
        ensure!(
            !answer.status.success() && words.contains("not handed over"),
            "the switchover ends with {} ({words})",
            answer.status
        );
        Ok(())
    }

    /// The backup has acknowledged a sync and fails to apply it, half-way, while its primary stands still: it is the only one
    /// whom the group could elect. It must not serve; the primary goes on when it can.
    pub(super) fn half_load(&mut self) -> Result<()> {
        let (primary, backup) = self.protected()?;
        let before = self.count_told(&backup, "fault")?;
        let alone = self.count_told(&primary, "unprotected")?;
        self.inject(&backup, "hang-at=backup-acknowledged")?;
        self.await_another(&backup, "fault", before)?;
        self.inject(&backup, "fail-at=backup-half-applied")?;
        let at = Instant::now();
        self.cluster.freeze(&primary)?;
        self.inject(&backup, "go-on")?;
        self.cluster
            .await_status("a copy that is ended, or serves", PATIENCE, |hosts| {
                let host = hosts.iter().find(|host| host.host == backup)?;
                let vm = host.vm(&self.vm)?;
                (vm.role != Role::Backup).then_some(())
            })?;
        let serves = with_role(&self.cluster.statuses(), &self.vm, "primary");
        ensure!(
            serves.is_none(),
            "host {serves:?} serves from a copy to which a sync was applied by half"
        );
        self.told(&backup, "load-failed")?;
        self.cluster.thaw(&primary);
        self.goes_on_alone(&primary, alone, at)
    }

    /// The leader loses its office and wins it back, again and again: its backup follows all the time.
    pub(super) fn new_terms(&mut self, times: usize) -> Result<()> {
        let (primary, backup) = self.protected()?;
        // Else it would be elected first.
        self.inject(&backup, "fail-at=backup-campaigns")?;
        let joined = self.count_told(&backup, "joined")?;
        let since = SystemTime::now();
        for _ in 0..times {
            let before = self.count_told(&primary, "quorum-regained")?;
            let at = Instant::now();
            self.inject(&primary, "step-down-at=primary-leads")?;
            self.await_another(&primary, "quorum-regained", before)?;
            self.counter.await_more(50, PATIENCE)?;
            self.moments.push((at, Instant::now()));
        }
        let lost = self.events_since(since, &primary, "backup-lost")?;
        ensure!(lost.is_empty(), "the session did not survive a term: {lost:?}");
        let joins = self.count_told(&backup, "joined")? - joined;
        ensure!(joins == 0, "the backup was brought in anew {joins} times");
        self.inject(&backup, "go-on")
    }
}
