//! Who has a part in a VM's group, in its file: as it was written, and as hosts have moved since.
//!
//! Flow: a file names hosts, whose numbers are their places in it -> `dunlin move` gives a part to another host: [`VmConfig::moved`] -> the group
//! agrees on that list -> each host writes its VM's file anew: [`VmConfig::with_hosts`].
//!
//! Invariants: 1. a number is never used again. 2. of two lists the one with the larger newest number is the later one. 3. what a person has
//! written in the file stays as it is, comments too, but for `members`, `witness`, `numbers` and `standby`. 4. a standby that has got a part leaves its place
//! to the host whose part that was.
//!
//! Not here: how it is agreed (`vm::primary::moving`), and followed (`vm::hosts`).

use super::vm::GroupHost;
use super::{Cluster, ConfigError, MoveError, VmConfig};
use dunlin_core::agreed::{HostPart, Hosts, MOST_HOSTS, Part};
use dunlin_core::units::ReplicaId;
use toml_edit::{Array, DocumentMut, InlineTable, value};

impl VmConfig {
    /// All hosts that have, or had, a part, by their numbers.
    #[must_use]
    pub fn hosts(&self) -> Hosts {
        let part = |name: &str| match self.member(name) {
            Some(member) if member.witness => Part::Witness,
            Some(_) => Part::Copy,
            None => Part::Gone,
        };
        let parts = self.numbers.iter().map(|(name, number)| HostPart {
            id: ReplicaId(*number),
            name: name.clone(),
            part: part(name),
        });
        let mut parts: Vec<HostPart> = parts.collect();
        parts.sort_by_key(|host| host.id);
        parts.into()
    }

    /// The list in which a host that has no part takes that of `leaves`.
    ///
    /// # Errors
    /// Which host that cannot be, and why.
    pub fn moved(&self, leaves: &str, comes: &str, cluster: &Cluster) -> Result<Hosts, MoveError> {
        if cluster.host(comes).is_none() {
            return Err(MoveError::NotInCluster(comes.to_owned()));
        }
        if self.member(comes).is_some() {
            return Err(MoveError::HasPart {
                host: comes.to_owned(),
                vm: self.name.clone(),
            });
        }
        if comes.len() > HostPart::LONGEST_NAME {
            return Err(MoveError::LongName);
        }
        let mut hosts = self.hosts().to_vec();
        let number = newest(&hosts) + 1;
        if usize::from(number) >= MOST_HOSTS {
            return Err(MoveError::NoNumber {
                vm: self.name.clone(),
            });
        }
        let Some(part) = hosts
            .iter_mut()
            .find(|host| host.name == leaves && host.part != Part::Gone)
        else {
            return Err(MoveError::NoPart {
                host: leaves.to_owned(),
                vm: self.name.clone(),
            });
        };
        let its_part = std::mem::replace(&mut part.part, Part::Gone);
        hosts.retain(|host| host.name != comes);
        hosts.push(HostPart {
            id: ReplicaId(number),
            name: comes.to_owned(),
            part: its_part,
        });
        Ok(hosts.into())
    }

    /// This VM with these hosts, and its file's text.
    ///
    /// # Errors
    /// A host that is not in the cluster's file, as this host has it.
    pub fn with_hosts(&self, hosts: &Hosts, cluster: &Cluster) -> Result<Self, ConfigError> {
        let origin = format!("VM '{}' on its new hosts", self.name);
        let mut file: DocumentMut = self
            .text
            .parse()
            .map_err(|error| ConfigError::senseless(&origin, format!("{error}")))?;
        let named = |part: Part| {
            hosts
                .iter()
                .filter(move |host| host.part == part)
                .map(|host| host.name.as_str())
        };
        file["members"] = value(named(Part::Copy).collect::<Array>());
        match named(Part::Witness).next() {
            Some(witness) => file["witness"] = value(witness),
            None => drop(file.remove("witness")),
        }
        // Invariant 4. A host that slept over several lists takes the newest of those that have left.
        if let Some(standby) = &self.standby
            && hosts
                .iter()
                .any(|host| host.name == standby.host && host.part != Part::Gone)
        {
            let has_left = |host: &&GroupHost| {
                let mut gone = hosts.iter().filter(|one| one.part == Part::Gone);
                gone.any(|one| one.name == host.name)
            };
            let left = self.group.iter().filter(has_left);
            match left.max_by_key(|host| host.member.id) {
                Some(left) => file["standby"] = value(left.name.as_str()),
                None => drop(file.remove("standby")),
            }
        }
        let numbers: InlineTable = hosts
            .iter()
            .map(|host| (host.name.as_str(), i64::from(host.id.0)))
            .collect();
        file["numbers"] = value(numbers);
        Self::parse(&file.to_string(), &origin, cluster)
    }

    /// The newest number in the group.
    #[must_use]
    pub fn newest_number(&self) -> u8 {
        self.numbers.values().copied().max().unwrap_or(0)
    }
}

/// The newest number of a list.
#[must_use]
pub fn newest(hosts: &[HostPart]) -> u8 {
    hosts.iter().map(|host| host.id.0).max().unwrap_or(0)
}
