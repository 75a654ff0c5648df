//! The VM's file of what was carried over, looked at by the parser that `dunlin up` has.

use super::parts::{Import, ImportError, Imported, Options};
use super::xml::shown;
use crate::config::{Cluster, VmConfig};
use dunlin_api::files::{Accel, ClusterHost, DiskTable, Firmware, Machine, NicTable};
use dunlin_core::consensus::Durability;
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

#[derive(Serialize)]
struct File<'a> {
    name: &'a str,
    members: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    witness: Option<&'a String>,
    vm: Vm,
}

/// The keys of `[vm]` that a domain says something of.
#[derive(Serialize)]
struct Vm {
    memory_mib: u64,
    vcpus: u32,
    machine: Machine,
    firmware: Firmware,
    accel: Accel,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    initrd: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    append: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    disks: Vec<DiskTable>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nics: Vec<Nic>,
}

#[derive(Serialize)]
struct Nic {
    mac: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bridge: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tap: Option<String>,
}

impl From<NicTable> for Nic {
    fn from(nic: NicTable) -> Self {
        Self {
            mac: nic.mac,
            bridge: nic.bridge,
            tap: nic.tap,
        }
    }
}

/// The file's text, or all that stands against it.
pub fn finish(mut import: Import, options: &Options) -> Result<Imported, ImportError> {
    let file = File {
        name: &import.name,
        members: &options.members,
        witness: options.witness.as_ref(),
        vm: Vm {
            memory_mib: import.memory_mib,
            vcpus: import.vcpus,
            machine: import.machine,
            firmware: import.firmware,
            accel: import.accel,
            cpu: import.cpu.take(),
            kernel: import.kernel.take(),
            initrd: import.initrd.take(),
            append: import.append.take(),
            disks: std::mem::take(&mut import.disks),
            nics: std::mem::take(&mut import.nics)
                .into_iter()
                .map(Nic::from)
                .collect(),
        },
    };
    let table = toml::to_string(&file);
    let mut refused = std::mem::take(&mut import.refused).into_vec();
    let table = match table {
        Ok(table) => table,
        Err(error) => {
            refused.push(shown(&error.to_string()));
            return Err(ImportError::Refused(refused));
        }
    };
    // What was refused already may be the reason for more.
    if refused.is_empty()
        && let Err(error) = VmConfig::parse(&table, "the VM", &cluster_of(options))
    {
        refused.push(shown(&error.to_string()));
    }
    if !refused.is_empty() {
        return Err(ImportError::Refused(refused));
    }
    Ok(Imported {
        name: import.name,
        carried: Vec::new(),
        left_out: import.left_out.into_vec(),
        nvram: import.nvram,
        table,
    })
}

impl Imported {
    /// The VM's file.
    pub fn text(&self) -> String {
        let mut text = format!("# Made by 'dunlin import' of the libvirt domain {}.\n", self.name);
        for (title, lines) in [
            ("Carried over beside this file", &self.carried),
            ("Not carried over", &self.left_out),
        ] {
            if !lines.is_empty() {
                text.push_str(&format!("# {title}:\n"));
            }
            for line in lines {
                text.push_str(&format!("# - {line}\n"));
            }
        }
        text.push('\n');
        text.push_str(&self.table);
        text
    }
}

/// A cluster of the hosts that the file names: it is looked at for itself, not for where it will run.
fn cluster_of(options: &Options) -> Cluster {
    let hosts = options.members.iter().chain(&options.witness);
    let host = |(number, name): (usize, &String)| ClusterHost {
        name: name.clone(),
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, number as u16 + 1)),
    };
    Cluster {
        name: "import".into(),
        id: [0; 16],
        durability: Durability::Memory,
        election_ms: 60,
        hosts: hosts.enumerate().map(host).collect(),
    }
}
