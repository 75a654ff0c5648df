//! A cold start's verdict, for people.
//!
//! Not here: the verdict (core's `replica::cold_start`).

use super::AskError;
use crate::config::VmConfig;
use crate::events::utc;
use dunlin_core::replica::cold_start::{DiskMark, Verdict, Word};
use dunlin_core::units::ReplicaId;
use std::collections::BTreeMap;

/// What a host has found out: `disks` are its own, `silent` why others say nothing.
pub(super) struct Found<'a> {
    pub config: &'a VmConfig,
    pub verdict: &'a Verdict,
    pub disks: &'a [DiskMark],
    pub silent: &'a BTreeMap<ReplicaId, AskError>,
}

impl Found<'_> {
    /// In words.
    pub fn tell(&self) -> String {
        let name = |id: ReplicaId| self.config.host_name(id);
        let vm = &self.config.name;
        match self.verdict {
            Verdict::Boots => format!(
                "no host holds a living copy of the VM; it boots here, from the newest disk ({}); what was only in its memory is \
                 gone",
                describe(self.disks)
            ),
            Verdict::Silent(hosts) => {
                let said = |id: &ReplicaId| {
                    let why = self.silent.get(id).unwrap_or(&AskError::NoAnswer);
                    format!("host '{}' ({why})", name(*id))
                };
                format!(
                    "no copy of the VM is alive here, and {} may hold one; if it is dead for good, 'dunlin promote --force \
                     --from-disk {vm}' boots the VM from this host's disk ({})",
                    hosts.iter().map(said).collect::<Vec<_>>().join(", "),
                    describe(self.disks)
                )
            }
            Verdict::NewerElsewhere { host, recovering } => elsewhere(name(*host), vm, *recovering),
            Verdict::Superseded(word) => superseded(word, self.config),
            Verdict::Alive(host) => format!(
                "host '{}' holds a living copy of the VM, or knows who leads",
                name(*host)
            ),
            Verdict::Informs(host) => format!(
                "host '{}' holds a complete copy of the VM and has not heard that it is complete: this host stands for election to tell \
                 it, and gives the office back",
                name(*host)
            ),
            Verdict::Unfinished => "the VM's disk here is an unfinished copy".to_owned(),
        }
    }
}

/// Another host has the newest disk. It boots the VM by itself, unless it has forgotten what was agreed.
fn elsewhere(host: &str, vm: &str, waits: bool) -> String {
    let then = if waits {
        format!(
            "but does not know any more what was agreed (durability = \"memory\"), so it waits too: if no copy of the VM is alive \
             anywhere, 'dunlin promote --force --from-disk {vm}' said on host '{host}' boots it there"
        )
    } else {
        "and boots it".to_owned()
    };
    format!("no copy of the VM is alive here; host '{host}' has the newest disk, {then}")
}

/// Others went on without this host.
fn superseded(word: &Word, config: &VmConfig) -> String {
    let members = config
        .group
        .iter()
        .filter(|host| word.complete.contains(host.member.id));
    let names: Vec<String> = members.map(|host| format!("'{}'", host.name)).collect();
    let since = word
        .since_ms
        .map_or(String::new(), |since_ms| format!(" since {}", utc(since_ms)));
    format!(
        "host '{}' knows that host {} went on without this one{since}: the disk here lacks what clients were told since \
         then. Start host {}: it has the newest disk",
        config.host_name(word.by),
        names.join(" and "),
        names.join(" or "),
    )
}

fn describe(disks: &[DiskMark]) -> String {
    match disks.first() {
        Some(disk) => format!(
            "term {}, {}",
            disk.term.0,
            if disk.primary {
                "as primary".to_owned()
            } else {
                format!("as backup up to epoch {}", disk.epoch.0)
            }
        ),
        None => "it has none: it boots as at first".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_person_is_not_said_to_boot() {
        assert!(elsewhere("a", "shop", false).ends_with("has the newest disk, and boots it"));
        let waits = elsewhere("a", "shop", true);
        assert!(!waits.contains("and boots it") && waits.contains("--from-disk shop' said on host 'a'"));
    }
}
