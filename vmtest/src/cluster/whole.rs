//! VMs and programs with both of their copies, and the death of a primary whose backup can take over.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_api::{EventKind, HostStatus, Role};

use super::Cluster;
use super::log::{kind_of, vm_of};

/// The hosts of the primary and of the backup, where both know that the other is complete.
pub fn both_copies(hosts: &[HostStatus], vm: &str) -> Option<(String, String)> {
    let complete = |role: Role| {
        let with_role = |host: &&HostStatus| host.vm(vm).is_some_and(|vm| vm.role == role && vm.protected);
        hosts.iter().find(with_role).map(|host| host.host.clone())
    };
    Some((complete(Role::Primary)?, complete(Role::Backup)?))
}

/// Whether the primary hears everybody, and the witness may vote: it has the log again, which is in memory alone where nothing else was asked for.
pub fn all_take_part(hosts: &[HostStatus], vm: &str) -> bool {
    let with_role = |role: Role| {
        let mut vms = hosts.iter().filter_map(|host| host.vm(vm));
        vms.find(|vm| vm.role == role)
    };
    let (Some(serves), Some(witness)) = (with_role(Role::Primary), with_role(Role::Witness)) else {
        return false;
    };
    let is_heard = serves.peers.iter().all(|peer| peer.connected);
    is_heard && witness.leader.is_some() && witness.applied >= serves.committed
}

impl Cluster<'_> {
    /// Power off at `host`, or at the primary of the first of these VMs, at a moment when each of them has a backup. A busy machine may cost a backup
    /// after any look: so the host stands still first, and by its own log nothing was lost before it did. Returns which it was, and when.
    ///
    /// # Errors
    /// When there is no such moment.
    pub fn kill_primary(
        &mut self,
        vms: &[&str],
        host: Option<&str>,
        at_most: Duration,
    ) -> Result<(String, Instant)> {
        const TIMES: usize = 10;
        for _ in 0..TIMES {
            let serves = self.await_status(&format!("{vms:?} protected"), at_most, |hosts| {
                let both: Option<Vec<_>> = vms.iter().map(|vm| both_copies(hosts, vm)).collect();
                both?.into_iter().next().map(|(primary, _)| primary)
            })?;
            let host = host.map_or(serves, str::to_owned);
            self.freeze(&host)?;
            let log = std::fs::read_to_string(self.log(&host));
            let log = log.with_context(|| format!("the log of host {host}"))?;
            if vms.iter().all(|vm| is_whole(&log, vm)) {
                let at = self.kill_host(&host)?;
                self.thaw(&host);
                return Ok((host, at));
            }
            self.thaw(&host);
        }
        bail!("{vms:?}: a backup was lost at each of {TIMES} looks")
    }
}

/// Whether a host's log says last that the VM has both copies: a loss is told before the group is asked to go on without the backup.
fn is_whole(log: &str, vm: &str) -> bool {
    let kinds = log
        .lines()
        .filter(|line| vm_of(line) == Some(vm))
        .filter_map(kind_of);
    let mut whole = true;
    for kind in kinds.map(EventKind::from) {
        match kind {
            // A host that comes back as the backup has lost its own before.
            EventKind::Protected | EventKind::Joined => whole = true,
            EventKind::BackupLost | EventKind::Unprotected | EventKind::EndedHere => whole = false,
            _ => {}
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::is_whole;

    #[test]
    fn the_last_word_on_a_vm_s_backup_counts() {
        let line = |vm: &str, kind: &str| {
            format!("2026-11-22T15:16:00.123456Z  INFO dunlin::events: x vm=\"{vm}\" kind=\"{kind}\"\n")
        };
        let mut log = line("left", "protected") + &line("right", "backup-lost");
        assert!(is_whole(&log, "left") && !is_whole(&log, "right"));
        log += &line("left", "unprotected");
        assert!(!is_whole(&log, "left"));
        log += &line("left", "protected");
        assert!(is_whole(&log, "left"));
        log += &line("left", "unprotected");
        log += &line("left", "joined");
        assert!(is_whole(&log, "left"));
        log += &line("left", "ended-here");
        assert!(!is_whole(&log, "left"), "another host serves it");
        assert!(
            is_whole(&log, "other"),
            "of one that was never lost nothing is told"
        );
    }
}
