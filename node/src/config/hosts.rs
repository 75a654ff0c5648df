//! Who has a part in a VM's group, in its file: as it was written, and as hosts have moved since.
//!
//! Flow: a file names hosts, whose numbers are their places in it -> `dunlin move` gives a part to another host ([`VmConfig::moved`]), or has another
//! standby ([`VmConfig::with_standby`]) -> the group agrees on that list -> each host writes its VM's file anew: [`VmConfig::with_hosts`].
//!
//! Invariants: 1. a number is never used again. 2. of two lists the one with the larger newest number is the later one. 3. what a person has
//! written in the file stays as it is, comments too, but for `members`, `witness`, `numbers` and `standby`. 4. a standby that has got a part leaves its place
//! to the host whose part that was. 5. a list that names a standby says who it is, whatever a file says. A group in which an older version of the protocol is
//! spoken knows no such list ([`readable_by`]): there each host goes by its own file, and by 4.
//!
//! Not here: how it is agreed (`vm::replacing`), and followed (`vm::hosts`).

use super::vm::GroupHost;
use super::{Cluster, ConfigError, MoveError, VmConfig};
use dunlin_core::agreed::{HostPart, Hosts, MOST_HOSTS, Part};
use dunlin_core::units::ReplicaId;
use toml_edit::{Array, DocumentMut, InlineTable, value};

impl VmConfig {
    /// The hosts that have a copy, in the file's order: the VM begins on the first.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        let members = self.group.iter().filter(|host| !host.member.witness);
        members.map(|host| host.name.as_str())
    }

    /// The file's text, in which that one of its members is the first.
    ///
    /// # Errors
    /// It is no TOML any more.
    pub fn begun_on(&self, first: &str) -> Result<String, ConfigError> {
        let mut file: DocumentMut = self
            .text
            .parse()
            .map_err(|error: toml_edit::TomlError| ConfigError::senseless(&self.name, error.to_string()))?;
        let others = self.members().filter(|host| *host != first);
        let members: Array = std::iter::once(first).chain(others).collect();
        file["members"] = value(members);
        Ok(file.to_string())
    }

    /// All hosts that have, or had, a part, by their numbers.
    #[must_use]
    pub fn hosts(&self) -> Hosts {
        let part = |name: &str| match self.member(name) {
            Some(member) if member.witness => Part::Witness,
            Some(_) => Part::Copy,
            None if self.standby_host() == Some(name) => Part::Standby,
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
        let mut hosts = self.hosts().to_vec();
        let Some(part) = hosts
            .iter_mut()
            .find(|host| host.name == leaves && !host.part.is_none())
        else {
            return Err(MoveError::NoPart {
                host: leaves.to_owned(),
                vm: self.name.clone(),
            });
        };
        // Invariant 4.
        let leaves_for = match self.standby_host() == Some(comes) {
            true => Part::Standby,
            false => Part::Gone,
        };
        let its_part = std::mem::replace(&mut part.part, leaves_for);
        self.with_part(hosts, comes, its_part)
    }

    /// The list in which that host is the standby, or none is.
    ///
    /// # Errors
    /// Which host that cannot be, and why.
    pub fn with_standby(&self, standby: Option<&str>, cluster: &Cluster) -> Result<Hosts, MoveError> {
        let mut hosts = self.hosts().to_vec();
        for host in hosts.iter_mut().filter(|host| host.part == Part::Standby) {
            host.part = Part::Gone;
        }
        // One that is gone by a number that nobody knew is no standby any more, whatever a file says.
        let Some((host, part)) = standby
            .map(|host| (host, Part::Standby))
            .or(self.standby_host().map(|host| (host, Part::Gone)))
        else {
            return Ok(hosts.into());
        };
        if standby.is_some() && cluster.host(host).is_none() {
            return Err(MoveError::NotInCluster(host.to_owned()));
        }
        if self.member(host).is_some() {
            return Err(MoveError::HasPart {
                host: host.to_owned(),
                vm: self.name.clone(),
            });
        }
        self.with_part(hosts, host, part)
    }

    /// Under a number that is new.
    fn with_part(&self, mut hosts: Vec<HostPart>, name: &str, part: Part) -> Result<Hosts, MoveError> {
        if name.len() > HostPart::LONGEST_NAME {
            return Err(MoveError::LongName);
        }
        let number = newest(&hosts) + 1;
        if usize::from(number) >= MOST_HOSTS {
            return Err(MoveError::NoNumber {
                vm: self.name.clone(),
            });
        }
        hosts.retain(|host| host.name != name);
        hosts.push(HostPart {
            id: ReplicaId(number),
            name: name.to_owned(),
            part,
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
        let ours = self.standby_host();
        let is_ours = |host: &&HostPart| Some(host.name.as_str()) == ours;
        let listed = hosts.iter().find(is_ours);
        if let Some(standby) = named(Part::Standby).next() {
            file["standby"] = value(standby); // invariant 5
        } else if listed.is_some_and(|host| host.part == Part::Gone && host.id.0 > self.newest_number()) {
            drop(file.remove("standby"));
        } else if listed.is_some_and(|host| !host.part.is_none()) {
            // Invariant 4. A host that slept over several lists takes the newest of those that have left.
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

/// Since this version of the protocol a list may name a standby.
pub const NAMES_STANDBY_SINCE: u16 = 5;

/// Invariant 5: the list as a group can read it that speaks this version.
#[must_use]
pub fn readable_by(hosts: &Hosts, protocol: Option<u16>) -> Hosts {
    if protocol.is_some_and(|version| version >= NAMES_STANDBY_SINCE) {
        return hosts.clone();
    }
    let older = hosts.iter().cloned().map(|mut host| {
        if host.part == Part::Standby {
            host.part = Part::Gone;
        }
        host
    });
    older.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "name = 't'\nid = '00112233445566778899aabbccddeeff'\n";
    const PROGRAM: &str = "name = 'p'\nmembers = ['a', 'b']\nwitness = 'c'\n[program] # a server\n\
                           command = ['/usr/bin/redis-server', '--save', '']\n\
                           [[program.nics]]\nmac = '52:54:00:12:34:57'\naddress = '10.0.0.57/24'\n";

    #[test]
    fn a_program_s_parts_move_and_its_file_keeps_its_words() {
        let hosts = ["a", "b", "c", "d"].iter().enumerate();
        let hosts = hosts
            .map(|(number, name)| format!("[[hosts]]\nname = '{name}'\naddress = '10.0.0.{number}:7700'\n"));
        let text = format!("{CLUSTER}{}", hosts.collect::<String>());
        let cluster = Cluster::parse(&text, "cluster.toml").expect("a good file");
        let program = VmConfig::parse(PROGRAM, "p.toml", &cluster).expect("a good file");
        let hosts = program.moved("b", "d", &cluster).expect("it can be");
        let moved = program.with_hosts(&hosts, &cluster).expect("a good file");
        let command = |config: &VmConfig| config.program.as_ref().map(|program| program.command.clone());
        assert_eq!(command(&moved), command(&program));
        assert!(moved.text.contains("# a server"), "{}", moved.text);
        assert_eq!(moved.member("d").map(|member| member.id.0), Some(3));
        assert_eq!(moved.member("b"), None);
        // A program that never ran does not begin on a host that came later.
        assert_eq!(&*moved.group[0].name, "a");
        let standby = program.with_standby(Some("d"), &cluster).expect("a list");
        let named = program.with_hosts(&standby, &cluster).expect("a good file");
        assert_eq!(named.standby_host(), Some("d"));
    }
}
