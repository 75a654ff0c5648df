//! A VM's file, checked: one VM, and how it is replicated.

use super::error::{MemoryError, StandbyError, VerifyEveryError};
use super::{Cluster, ConfigError, ProgramSpec, parse, vm_spec};
use dunlin_api::files::{self, MemoryTable, SyncTable, VmFile};
use dunlin_core::agreed::{MOST_HOSTS, Part};
use dunlin_core::consensus::Member;
use dunlin_core::policy::{Mode, Policy};
use dunlin_core::sync::compare::Compare;
use dunlin_core::sync::trigger::Limits;
use dunlin_core::units::ReplicaId;
use dunlin_guest::VmSpec;
use dunlin_guest::disk::{Limits as BufferLimits, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// One VM's configuration.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// The name that people use.
    pub name: String,
    /// The file's text.
    pub text: Arc<str>,
    /// The group: hosts that can run the VM, in order of preference, then the witnesses.
    pub group: Vec<GroupHost>,
    /// Which number each host has, or had, in the group.
    pub numbers: BTreeMap<String, u8>,
    /// Who takes a copy's host's part when that host stays away.
    pub standby: Option<Standby>,
    /// How it is replicated.
    pub policy: Policy,
    /// Its TCP connections are acknowledged before they may leave, and sent by shadow sockets.
    pub speculative: bool,
    /// When to sync.
    pub sync: SyncConfig,
    /// How its disks are replicated.
    pub disks: DiskReplication,
    /// What its queues may take of a host's memory.
    pub memory: MemoryConfig,
    /// The VM itself. Of a program it has the name and the card, and nothing else of it is meant.
    pub spec: VmSpec,
    /// A bare program in the VM's place.
    pub program: Option<ProgramSpec>,
}

/// A host's part in a VM's group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupHost {
    /// The host's name in the cluster.
    pub name: String,
    /// Its part.
    pub member: Member,
}

/// A host without a part, which gets that of a copy's host that stays away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standby {
    /// Its name in the cluster.
    pub host: String,
    /// So long the other one has to be away.
    pub after: Duration,
    /// How often it gets a checkpoint of the VM's memory.
    pub checkpoint: Option<Duration>,
}

/// A host that is away for less may only stand still; one that is away for more is not waited for any better.
const STANDBY_AFTER: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);

impl Standby {
    fn new(host: String, after: &str, checkpoint: Option<Duration>) -> Result<Self, StandbyError> {
        match humantime::parse_duration(after) {
            Ok(after) if STANDBY_AFTER.contains(&after) => Ok(Self {
                host,
                after,
                checkpoint,
            }),
            _ => Err(StandbyError::After(after.to_owned())),
        }
    }

    fn checkpoint(file: &VmFile) -> Result<Option<Duration>, StandbyError> {
        let Some(every) = &file.standby_checkpoint else {
            return Ok(None);
        };
        if file.program.is_some() {
            return Err(StandbyError::CheckpointOfProgram);
        }
        match humantime::parse_duration(every) {
            Ok(every) if STANDBY_AFTER.contains(&every) => Ok(Some(every)),
            _ => Err(StandbyError::Checkpoint(every.clone())),
        }
    }

    /// Whether there can be one. Whether the host is in the cluster is asked when a VM starts and when it is needed: one that was taken out of
    /// the cluster's file, after it had left its part, is to keep no VM from starting again.
    fn check(&self, group: &[GroupHost], policy: Policy) -> Result<(), StandbyError> {
        let host = &self.host;
        if group.iter().any(|one| one.name == *host) {
            return Err(StandbyError::HasPart(host.clone()));
        }
        match policy.is_replicated() {
            true => Ok(()),
            false => Err(StandbyError::NoCopy(policy.name())),
        }
    }
}

/// How a VM's disks are replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskReplication {
    /// What a backup does with the primary's writes.
    pub storage: Storage,
    /// The first copy to a backup takes no more than this, over all disks; 0: as fast as it goes.
    pub copy_bytes_per_s: u64,
    /// What a backup may hold in memory, for each disk.
    pub limits: BufferLimits,
    /// Equal writes of both VMs leave a backup's memory between two syncs (the lightweight checkpoint).
    pub settle_when_idle: bool,
    /// How often both hosts' images are compared by themselves.
    pub verify_every: Option<Duration>,
    /// No more is compared in a second then, over all disks.
    pub verify_bytes_per_s: u64,
}

/// Comparisons are no closer than this, and no further apart.
const VERIFY_EVERY: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(366 * 86_400);

impl DiskReplication {
    /// `weekly`, or a time such as `12h`.
    fn verify_every(text: &str) -> Result<Option<Duration>, VerifyEveryError> {
        let days = |days: u64| Ok(Some(Duration::from_secs(days * 86_400)));
        match text {
            "never" => Ok(None),
            "daily" => days(1),
            "weekly" => days(7),
            "monthly" => days(30),
            text => match humantime::parse_duration(text) {
                Ok(every) if VERIFY_EVERY.contains(&every) => Ok(Some(every)),
                _ => Err(VerifyEveryError(text.to_owned())),
            },
        }
    }

    /// Whether the lightweight checkpoint is to run.
    #[must_use]
    pub fn settles_when_idle(&self) -> bool {
        self.settle_when_idle && self.storage == Storage::Gannet
    }

    /// A sync is asked for at an eighth of the limit, writers are slowed down from a quarter on.
    fn limits(memory_mib: u64) -> BufferLimits {
        BufferLimits {
            sync_at_bytes: (memory_mib << 20) / 8,
            throttle_at_bytes: (memory_mib << 20) / 4,
            most_bytes: memory_mib << 20,
        }
    }
}

/// When to sync, and how much may pile up.
#[derive(Debug, Clone)]
pub struct SyncConfig {
    /// No sync sooner than this after the last.
    pub shortest_ms: f64,
    /// A sync at the latest this long after the last: while output waits for syncs 100 ms; while outputs are compared
    /// 5,000 ms.
    pub longest_ms: Option<f64>,
    /// A sync even of a silent VM.
    pub quiet_ms: f64,
    /// Fixed period instead of idle moments; `str` and `colo` have one of their own.
    pub period_ms: Option<f64>,
    /// Memory for a sync on its way into the backup.
    pub staging_mib: usize,
    /// How the two sides find out what differs.
    pub compare: Compare,
    /// Dates of HTTP answers that are up to two seconds apart are no difference.
    pub ignore_http_date: bool,
    /// After every sync hash all of both memories and give up the backup if they differ. For tests: slow.
    pub audit: bool,
}

/// The longest interval while output waits for syncs, and while outputs are compared.
const LONGEST_WAITING_MS: f64 = 100.0;
const LONGEST_MATCHING_MS: f64 = 5_000.0;

impl SyncConfig {
    fn of(table: SyncTable) -> Self {
        Self {
            shortest_ms: table.shortest_ms,
            longest_ms: table.longest_ms,
            quiet_ms: table.quiet_ms,
            period_ms: table.period_ms,
            staging_mib: table.staging_mib,
            compare: match table.compare {
                files::Compare::List => Compare::List,
                files::Compare::Tree => Compare::Tree,
            },
            ignore_http_date: table.ignore_http_date,
            audit: table.audit,
        }
    }

    /// The trigger's limits. A fixed period is a shortest interval that is also the longest; where outputs are
    /// compared a difference does not wait for it.
    #[must_use]
    pub fn limits(&self, policy: Policy, mode: Mode) -> Limits {
        let us = |ms: f64| (ms * 1000.0) as u64;
        let matches = mode == Mode::Match;
        let longest_ms = self.longest_ms.unwrap_or(if matches {
            LONGEST_MATCHING_MS
        } else {
            LONGEST_WAITING_MS
        });
        let (shortest_ms, longest_ms, quiet_ms) = match policy.period_ms(self.period_ms) {
            Some(period_ms) if matches => (self.shortest_ms, period_ms, period_ms),
            Some(period_ms) => (period_ms, period_ms, self.quiet_ms),
            None => (self.shortest_ms, longest_ms, self.quiet_ms),
        };
        Limits {
            shortest_us: us(shortest_ms),
            longest_us: us(longest_ms),
            quiet_us: us(quiet_ms),
        }
    }
}

/// What the queues of one VM may take of each host's memory, beside the VM's own and its disks' (docs/budgets.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Agreed inputs that a sync has not made superfluous yet; a follower may hold twice as much.
    pub log_mib: usize,
    /// Frames for the VM that it has not read yet, over all its NICs.
    pub inbound_mib: usize,
    /// Frames of the VM that wait for a sync, for the backup's word or for a majority.
    pub outbound_mib: usize,
}

impl MemoryConfig {
    /// A batch of inputs has to fit several times.
    const LEAST_MIB: usize = 8;
    const MOST_MIB: usize = 1 << 14;

    /// What frames for the VM may take.
    #[must_use]
    pub fn inbound_bytes(&self) -> usize {
        self.inbound_mib << 20
    }

    /// What frames of the VM may take.
    #[must_use]
    pub fn outbound_bytes(&self) -> usize {
        self.outbound_mib << 20
    }

    fn of(table: MemoryTable) -> Result<Self, MemoryError> {
        for (name, mib) in [
            ("log_mib", table.log_mib),
            ("inbound_mib", table.inbound_mib),
            ("outbound_mib", table.outbound_mib),
        ] {
            if !(Self::LEAST_MIB..=Self::MOST_MIB).contains(&mib) {
                let (least, most) = (Self::LEAST_MIB, Self::MOST_MIB);
                return Err(MemoryError { name, least, most });
            }
        }
        Ok(Self {
            log_mib: table.log_mib,
            inbound_mib: table.inbound_mib,
            outbound_mib: table.outbound_mib,
        })
    }
}

impl VmConfig {
    /// Checks a file's text; `origin` stands in messages.
    pub fn parse(text: &str, origin: &str, cluster: &Cluster) -> Result<Self, ConfigError> {
        Self::parse_in(text, origin, Some(cluster))
    }

    /// The same where no cluster is known: its hosts may have any names.
    pub fn parse_alone(text: &str, origin: &str) -> Result<Self, ConfigError> {
        Self::parse_in(text, origin, None)
    }

    fn parse_in(text: &str, origin: &str, cluster: Option<&Cluster>) -> Result<Self, ConfigError> {
        let file: VmFile = parse(text, origin)?;
        let senseless = |why: String| Err(ConfigError::senseless(origin, why));
        let name_is_plain = |name: &str| {
            name.chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.')
        };
        if file.name.is_empty()
            || file.name.len() > 64
            || !name_is_plain(&file.name)
            || file.name.starts_with('.')
        {
            return senseless("name has to be 1 to 64 letters, digits, '-', '_' or '.'".into());
        }
        let policy: Policy = file
            .policy
            .parse()
            .map_err(|error| ConfigError::senseless(origin, format!("policy: {error}")))?;
        let named = file
            .members
            .iter()
            .map(|name| (name, false))
            .chain(file.witness.iter().map(|name| (name, true)));
        let mut group: Vec<GroupHost> = Vec::new();
        for (name, witness) in named {
            if let Some(cluster) = cluster.filter(|cluster| cluster.host(name).is_none()) {
                let hosts: Vec<&str> = cluster.hosts.iter().map(|host| host.name.as_str()).collect();
                return senseless(format!(
                    "host '{name}' is not in the cluster, whose hosts are {}",
                    hosts.join(", ")
                ));
            }
            if group.iter().any(|host| host.name == *name) {
                return senseless(format!("host '{name}' is named twice"));
            }
            let place = group.len() as u8;
            let Some(&number) = file
                .numbers
                .get(name)
                .or(Some(&place).filter(|_| file.numbers.is_empty()))
            else {
                return senseless(format!(
                    "host '{name}' is not in numbers, which 'dunlin move' writes"
                ));
            };
            let member = Member {
                id: ReplicaId(number),
                witness,
            };
            group.push(GroupHost {
                name: name.clone(),
                member,
            });
        }
        match (policy.is_replicated(), file.members.len(), group.len()) {
            (false, 1.., _) => {}
            (true, 2, 3) => {}
            _ => {
                return senseless(format!(
                    "policy '{}' needs {}",
                    policy.name(),
                    if policy.is_replicated() {
                        "two hosts in members, and a witness"
                    } else {
                        "a host in members"
                    }
                ));
            }
        }
        let checkpoint = Standby::checkpoint(&file).map_err(|why| ConfigError::senseless(origin, why))?;
        let mut numbers = file.numbers;
        if numbers.is_empty() {
            numbers.extend(group.iter().map(|host| (host.name.clone(), host.member.id.0)));
        }
        let known: BTreeSet<u8> = numbers.values().copied().collect();
        if known.len() < numbers.len() || known.last().is_some_and(|last| usize::from(*last) >= MOST_HOSTS) {
            return senseless(format!(
                "numbers: each host has its own, from 0 to {}",
                MOST_HOSTS - 1
            ));
        }
        let standby = file
            .standby
            .map(|host| Standby::new(host, &file.standby_after, checkpoint));
        let standby = standby
            .transpose()
            .map_err(|why| ConfigError::senseless(origin, why))?;
        if let Some(standby) = &standby {
            let checked = standby.check(&group, policy);
            checked.map_err(|why| ConfigError::senseless(origin, why))?;
        }
        if file.speculative && !matches!(policy, Policy::Remus | Policy::Dunlin) {
            return senseless(format!(
                "speculative = true goes with policies 'remus' and 'dunlin', and here it is '{}'",
                policy.name()
            ));
        }
        let sync = &file.sync;
        let times = [
            sync.shortest_ms,
            sync.longest_ms.unwrap_or(LONGEST_WAITING_MS),
            sync.quiet_ms,
            sync.period_ms.unwrap_or(1.0),
        ];
        if times.iter().any(|ms| !(0.1..=60_000.0).contains(ms))
            || sync.shortest_ms > sync.longest_ms.unwrap_or(LONGEST_WAITING_MS)
        {
            return senseless(
                "sync: times are from 0.1 to 60000 ms, and shortest_ms at most longest_ms".into(),
            );
        }
        if sync.staging_mib == 0 {
            return senseless("sync.staging_mib has to be at least 1".into());
        }
        let memory = MemoryConfig::of(file.memory).map_err(|why| ConfigError::senseless(origin, why))?;
        let storage: Storage = file
            .storage
            .parse()
            .map_err(|error| ConfigError::senseless(origin, format!("storage: {error}")))?;
        if file.copy_mib_per_s > 1 << 20 {
            return senseless("copy_mib_per_s is from 1 to 1048576, or 0 for no limit".into());
        }
        if !(8..=1 << 20).contains(&file.disk_memory_mib) {
            return senseless("disk_memory_mib is from 8 to 1048576 (512 if it is left out)".into());
        }
        if !(1..=1 << 20).contains(&file.verify_mib_per_s) {
            return senseless("verify_mib_per_s is from 1 to 1048576 (16 if it is left out)".into());
        }
        let verify_every = DiskReplication::verify_every(&file.verify_disks)
            .map_err(|why| ConfigError::senseless(origin, why))?;
        let disks = DiskReplication {
            storage,
            copy_bytes_per_s: file.copy_mib_per_s << 20,
            limits: DiskReplication::limits(file.disk_memory_mib),
            settle_when_idle: file.settle_when_idle,
            verify_every,
            verify_bytes_per_s: file.verify_mib_per_s << 20,
        };
        let (spec, program) = match (file.vm, file.program) {
            (Some(vm), None) => {
                let spec = vm_spec(&file.name, vm);
                spec.validate()
                    .map_err(|error| ConfigError::senseless(origin, error.to_string()))?;
                (spec, None)
            }
            (None, Some(program)) if policy == Policy::Dunlin => {
                let checked = ProgramSpec::of(program, &file.name);
                let (spec, program) = checked.map_err(|why| ConfigError::senseless(origin, why))?;
                (spec, Some(program))
            }
            (None, Some(_)) => return senseless("a program has policy 'dunlin'".into()),
            _ => return senseless("either [vm] or [program] is needed".into()),
        };
        Ok(Self {
            name: file.name,
            text: text.into(),
            group,
            numbers,
            standby,
            policy,
            speculative: file.speculative,
            sync: SyncConfig::of(file.sync),
            disks,
            memory,
            spec,
            program,
        })
    }

    /// Itself, unless a file of the hosts' is named by half: each daemon would look for it where it happened to be started. That is asked
    /// of what a person brings, and not of what a host has kept: a VM that runs starts again.
    pub fn with_whole_paths(self, origin: &str) -> Result<Self, ConfigError> {
        let spec = &self.spec;
        let disks = spec.disks.iter().map(|disk| ("disks.path", &disk.path));
        let others = [
            ("kernel", &spec.kernel),
            ("initrd", &spec.initrd),
            ("serial_log", &spec.serial_log),
        ];
        let others = others
            .into_iter()
            .filter_map(|(key, path)| Some((key, path.as_ref()?)));
        let half = disks.chain(others).find(|(_, path)| !path.is_absolute());
        match half {
            Some((key, path)) => Err(ConfigError::senseless(
                origin,
                format!("vm.{key}: {path:?} is no whole path: each host opens it by itself"),
            )),
            None => Ok(self),
        }
    }

    /// What people call it.
    #[must_use]
    pub fn noun(&self) -> &'static str {
        match self.program {
            Some(_) => "program",
            None => "VM",
        }
    }

    /// This host's part in the group, if it has one.
    #[must_use]
    pub fn member(&self, host: &str) -> Option<Member> {
        self.group
            .iter()
            .find(|member| member.name == host)
            .map(|host| host.member)
    }

    /// What that host has to be able to do for the VM. A standby is asked for what a copy's host is.
    #[must_use]
    pub fn wanted_of(&self, host: &str) -> Part {
        match self.member(host) {
            Some(member) if member.witness => Part::Witness,
            None if self.standby_host() != Some(host) => Part::Gone,
            _ => Part::Copy,
        }
    }

    /// The host that has to be able to run a copy, and does not.
    #[must_use]
    pub fn standby_host(&self) -> Option<&str> {
        self.standby.as_ref().map(|standby| standby.host.as_str())
    }

    /// The name of a member's host, or of one that was.
    #[must_use]
    pub fn host_name(&self, id: ReplicaId) -> &str {
        let known = self.numbers.iter().find(|(_, number)| **number == id.0);
        known.map_or("?", |(name, _)| name)
    }
}
