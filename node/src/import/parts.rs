//! What an import is made of: what a person chose, what is known of the VM so far, and what came of it.
//!
//! **Decides**: nothing; whoever reads a part of the domain says what is left out, and what is refused.

use dunlin_api::files::{Accel, DiskTable, Firmware, Machine, NicTable};
use std::collections::HashMap;
use std::path::PathBuf;

/// What a person chose.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The hosts that can run the VM, the first preferred.
    pub members: Vec<String>,
    /// The third host.
    pub witness: Option<String>,
    /// The bridge for network cards that the domain has on none.
    pub bridge: Option<String>,
    /// Disks and network cards of other kinds become virtio.
    pub virtio: bool,
}

/// A VM made of a domain.
#[derive(Debug)]
pub struct Imported {
    /// The VM's name.
    pub name: String,
    /// What of it lies in another file, one line each.
    pub carried: Vec<String>,
    /// What is not in it, one line each.
    pub left_out: Vec<String>,
    /// A UEFI's variables, of which no line says anything yet.
    pub nvram: Option<Nvram>,
    /// The VM's file, without these lines.
    pub table: String,
}

/// Why there is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ImportError {
    /// Not a domain.
    #[error("{0}")]
    NoDomain(String),
    /// A domain that would not work, one line for each reason.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
}

/// The file with a domain's variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvram {
    pub path: PathBuf,
    /// As libvirt's newer versions have it.
    pub is_qcow2: bool,
}

/// What is known of the VM so far.
#[derive(Default)]
pub struct Import {
    pub name: String,
    pub accel: Accel,
    pub machine: Machine,
    pub firmware: Firmware,
    pub nvram: Option<Nvram>,
    pub memory_mib: u64,
    pub vcpus: u32,
    pub cpu: Option<String>,
    pub kernel: Option<PathBuf>,
    pub initrd: Option<PathBuf>,
    pub append: Option<String>,
    pub disks: Vec<DiskTable>,
    pub nics: Vec<NicTable>,
    pub left_out: Lines,
    pub refused: Lines,
}

/// Lines in the order in which they came; one that comes again is counted.
#[derive(Default)]
pub struct Lines {
    lines: Vec<(String, usize)>,
    places: HashMap<String, usize>,
}

impl Lines {
    pub fn push(&mut self, line: impl Into<String>) {
        let line = line.into();
        match self.places.get(&line) {
            Some(&place) => self.lines[place].1 += 1,
            None => {
                self.places.insert(line.clone(), self.lines.len());
                self.lines.push((line, 1));
            }
        }
    }

    pub fn into_vec(self) -> Vec<String> {
        let shown = |(line, count)| match count {
            1 => line,
            more => format!("{line} ({more} times)"),
        };
        self.lines.into_iter().map(shown).collect()
    }
}

impl Import {
    /// The VM will not have it, and works.
    pub fn leave_out(&mut self, what: impl std::fmt::Display, why: &str) {
        self.left_out.push(format!("{what}: {why}"));
    }

    /// A VM without it would not work.
    pub fn refuse(&mut self, what: impl std::fmt::Display, why: impl std::fmt::Display) {
        self.refused.push(format!("{what}: {why}"));
    }
}
