//! `[program]` of a VM's file: a bare server program in the VM's place.
//!
//! **Decides**: which values make sense, before anything is started. **Not here**: who may run it (`vm`), whether this host can (the
//! daemon's `program`), the namespaces (`dunlin_program`).

use super::error::ProgramError;
use dunlin_api::files::{self, ProgramNicTable, ProgramTable, RestartPolicy, Source};
use dunlin_core::program::order::Order;
use dunlin_guest::{NicSpec, VmSpec};
use dunlin_program::data::Data;
use dunlin_program::limits::Limits;
use dunlin_program::message::Card;
use dunlin_program::options::network;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where a program is looked for, unless its file says otherwise. Not the daemon's: both hosts' copies have the same environment.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program that is run twice.
#[derive(Debug, Clone)]
pub struct ProgramSpec {
    /// The executable, by its whole path, and its arguments.
    pub command: Vec<String>,
    /// The directory of each host that it sees as its root.
    pub root: PathBuf,
    /// Where it starts.
    pub directory: PathBuf,
    /// All of its environment.
    pub environment: Vec<(String, String)>,
    /// The user that it runs as; root of its namespaces, if none is named.
    pub user: Option<String>,
    /// The TCP port at which it serves; any, if none is named.
    pub port: Option<u16>,
    /// How inputs wait for each other.
    pub reading: Reading,
    /// What else is the same in all copies.
    pub agreed: AgreedSources,
    /// What each copy may write, in memory, in MiB.
    pub scratch_mib: u32,
    /// Where what outlives the copies is, if there is such.
    pub data: Option<Data>,
    /// What each copy may take of its host.
    pub limits: Limits,
    /// How long it may take until it serves.
    pub start_within: Duration,
    /// Whether it is begun again when it has ended on all hosts.
    pub restart: RestartPolicy,
    /// Its network card.
    pub card: Card,
}

/// How inputs wait for each other.
#[derive(Clone, Debug)]
pub struct Reading {
    /// What the next input waits for.
    pub order: Order,
    /// Inputs go one at a time once they were read in another order: nobody has said that they are to be unread together.
    pub adapts: bool,
    /// How long the next one waits.
    pub patience: Duration,
}

/// What of a program is agreed besides its inputs.
#[derive(Debug, Clone, Copy)]
pub struct AgreedSources {
    /// Its clock.
    pub clock: bool,
    /// Its chance.
    pub chance: bool,
}

impl ProgramSpec {
    /// Whether it sees a directory of its host's as its root, and not the host's own.
    #[must_use]
    pub fn has_own_root(&self) -> bool {
        self.root != Path::new("/")
    }
}

impl ProgramSpec {
    /// What is meant, with the card as a VM has one.
    pub(super) fn of(table: ProgramTable, name: &str) -> Result<(VmSpec, Self), ProgramError> {
        let range = |key, range, usual| Err(ProgramError::Range { key, range, usual });
        match table.command.first() {
            Some(executable) if executable.starts_with('/') => {}
            _ => return Err(ProgramError::NoExecutable),
        }
        let plain = |part| !matches!(part, std::path::Component::ParentDir);
        if !table.root.is_absolute() || !table.root.components().all(plain) {
            return Err(ProgramError::NoWholePath {
                key: "root",
                path: table.root,
            });
        }
        if ["/proc", "/sys", "/dev"]
            .iter()
            .any(|taken| table.root.starts_with(taken))
        {
            return Err(ProgramError::Kernels {
                key: "root",
                path: table.root,
            });
        }
        if table.root.to_string_lossy().contains([',', ':', '\\']) {
            return Err(ProgramError::Character(table.root));
        }
        if !table.directory.is_absolute() {
            return Err(ProgramError::NoWholePath {
                key: "directory",
                path: table.directory,
            });
        }
        if !(1..=10_000).contains(&table.patience_ms) {
            return range("patience_ms", "1 to 10000", "500");
        }
        if !(1..=1 << 20).contains(&table.scratch_mib) {
            return range("scratch_mib", "1 to 1048576", "256");
        }
        if table.memory_mib.is_some_and(|mib| !(16..=1 << 24).contains(&mib)) {
            return range("memory_mib", "16 to 16777216", "no limit");
        }
        if table.cpus.is_some_and(|cpus| !(0.01..=4096.0).contains(&cpus)) {
            return range("cpus", "0.01 to 4096, such as 1.5", "no limit");
        }
        if table.tasks.is_some_and(|tasks| !(1..=1 << 22).contains(&tasks)) {
            return range("tasks", "1 to 4194304", "no limit");
        }
        if !(1..=3600).contains(&table.start_within_s) {
            return range("start_within_s", "1 to 3600", "30");
        }
        let data = data_of(table.data, table.data_at, table.data_mib)?;
        let Ok([nic]) = <[ProgramNicTable; 1]>::try_from(table.nics) else {
            return Err(ProgramError::OneCard);
        };
        let (address, prefix) = network(&nic.address).map_err(ProgramError::Address)?;
        let card = NicSpec {
            mac: nic.mac,
            bridge: nic.bridge,
            tap: nic.tap,
            promiscuous: false,
        };
        let mac = card.mac_bytes().map_err(ProgramError::Mac)?;
        if !(576..=1500).contains(&nic.mtu) {
            return range("nics.mtu", "576 to 1500", "1500");
        }
        for (key, name) in [("bridge", &card.bridge), ("tap", &card.tap)] {
            if let Some(name) = name.as_deref().filter(|name| name.is_empty() || name.len() > 15) {
                return Err(ProgramError::DeviceName {
                    key,
                    name: name.to_owned(),
                });
            }
        }
        let mut environment = table.environment;
        environment
            .entry("PATH".to_owned())
            .or_insert_with(|| PATH.to_owned());
        let program = Self {
            command: table.command,
            root: table.root,
            directory: table.directory,
            environment: environment.into_iter().collect(),
            user: table.user,
            port: table.port,
            reading: Reading {
                order: match table.order {
                    files::Order::Delivery => Order::Delivery,
                    files::Order::Read => Order::Read,
                    files::Order::Auto | files::Order::Batch => Order::Batch,
                    files::Order::Answer => Order::Answer,
                },
                adapts: table.order == files::Order::Auto,
                patience: Duration::from_millis(table.patience_ms),
            },
            agreed: AgreedSources {
                clock: table.clock == Source::Agreed,
                chance: table.chance == Source::Agreed,
            },
            scratch_mib: table.scratch_mib,
            data,
            limits: Limits {
                memory_mib: table.memory_mib,
                cpus: table.cpus,
                tasks: table.tasks,
            },
            start_within: Duration::from_secs(table.start_within_s),
            restart: table.restart,
            card: Card {
                address,
                prefix,
                gateway: nic.gateway,
                mtu: nic.mtu,
                mac,
            },
        };
        Ok((only_a_card(name, card), program))
    }
}

fn data_of(
    image: Option<PathBuf>,
    at: Option<PathBuf>,
    mib: Option<u32>,
) -> Result<Option<Data>, ProgramError> {
    /// ext4 wants some for itself; the first copy of a large one would not be through in time.
    const SIZES: std::ops::RangeInclusive<u32> = 8..=65_536;
    /// The copy's own: nothing can be there.
    const TAKEN: [&str; 3] = ["/proc", "/sys", "/dev"];
    let (image, at) = match (image, at) {
        (Some(image), Some(at)) => (image, at),
        (None, None) if mib.is_none() => return Ok(None),
        (None, _) => return Err(ProgramError::NoImage),
        (Some(_), None) => return Err(ProgramError::NoPlace),
    };
    for (key, path) in [("data", &image), ("data_at", &at)] {
        let plain = path
            .components()
            .all(|part| !matches!(part, std::path::Component::ParentDir));
        if !path.is_absolute() || !plain || path.file_name().is_none() {
            return Err(ProgramError::NoWholePath {
                key,
                path: path.clone(),
            });
        }
    }
    if TAKEN.iter().any(|taken| at.starts_with(taken)) {
        return Err(ProgramError::Kernels {
            key: "data_at",
            path: at,
        });
    }
    if image.starts_with(&at) {
        return Err(ProgramError::ImageThere);
    }
    let mib = mib.unwrap_or(256);
    if !SIZES.contains(&mib) {
        return Err(ProgramError::Range {
            key: "data_mib",
            range: "8 to 65536",
            usual: "256",
        });
    }
    Ok(Some(Data { image, at, mib }))
}

/// What a program has of a VM.
fn only_a_card(name: &str, card: NicSpec) -> VmSpec {
    VmSpec {
        nics: vec![card],
        ..VmSpec::new(name, 0)
    }
}
