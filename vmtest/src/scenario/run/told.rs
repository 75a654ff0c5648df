//! What hosts tell: their events.
//!
//! * **Decides:** whether one of a kind was told. * **Not here:** what that means for the clients (`verdict`).

use anyhow::{Result, ensure};
use dunlin_api::EventKind;

use super::{PATIENCE, Stage};
use crate::cluster::{Event, HostStatus};
use crate::scenario::Role;

impl Stage<'_, '_> {
    /// By whoever has that role, or by any host.
    pub(super) fn await_told(&self, role: Option<Role>, kind: &str) -> Result<()> {
        self.cluster.await_status(kind, PATIENCE, |hosts| {
            let has_it = |host: &&HostStatus, role: Role| {
                let vm = host.vm(&self.vm);
                vm.is_some_and(|vm| vm.role.as_str() == role.as_str())
            };
            let asked = hosts
                .iter()
                .filter(|host| role.is_none_or(|role| has_it(host, role)));
            let mut told = asked.map(|host| self.count_told(&host.host, kind).unwrap_or(0));
            told.any(|count| count > 0).then_some(())
        })
    }

    /// How many of a host's events are of that kind.
    pub(super) fn count_told(&self, host: &str, kind: &str) -> Result<usize> {
        let events = self.cluster.dunlin(host, &["events"])?;
        Ok(events
            .lines()
            .filter(|line| {
                line.split_whitespace()
                    .any(|word| word.trim_end_matches(':') == kind)
            })
            .count())
    }

    /// All events of that kind on the hosts that run, in the order of their times: who has served meanwhile does not matter.
    pub(super) fn told_by_all(&self, kind: &EventKind) -> Result<Vec<Event>> {
        let mut told = Vec::new();
        for host in self.cluster.running() {
            told.extend(self.cluster.events(&host)?);
        }
        told.retain(|event| event.kind == *kind);
        told.sort_by_key(Event::at);
        Ok(told)
    }

    pub(super) fn told(&self, host: &str, kind: &str) -> Result<()> {
        ensure!(
            self.count_told(host, kind)? > 0,
            "no event '{kind}' on host {host}: {}",
            self.cluster.dunlin(host, &["events"])?
        );
        Ok(())
    }
}
