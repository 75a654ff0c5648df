//! A UEFI's variables of a domain: which boot loader it starts, keys of secure boot, and what else its guest has written there.
//!
//! **Decides**: whether they are carried over. **Flow**: the XML -> [`Nvram`] -> [`carry`], which copies the file to where the daemon keeps variables and looks for
//! them in `up`; on the VM's other host the first protection copies them. **Invariants**: 1. variables that Dunlin has are not replaced. 2. what does not fit
//! is not copied, and a line says why. **Source**: libvirt's formatdomain.html, "BIOS bootloader". **Not here**: what fits (`dunlin_guest::uefi`).

use super::parts::{Import, Nvram};
use super::xml::{attribute, child, is_path, shown};
use crate::vm::disks::variables;
use dunlin_guest::uefi::{self, UefiError};
use roxmltree::Node;
use std::path::{Path, PathBuf};

/// Of `<os>`.
pub fn read(os: Node<'_, '_>, import: &mut Import) {
    let Some(nvram) = child(os, "nvram") else { return };
    let kind = nvram.attribute("type").unwrap_or("file");
    // In words, or as disks have it.
    let words = nvram.text().map(str::trim).filter(|text| !text.is_empty());
    let path = match kind {
        "file" => words.or_else(|| attribute(nvram, "source", "file")),
        _ => {
            let why = "the VM begins with fresh variables, since these are in no file of this machine, and its UEFI looks for a boot loader";
            return import.leave_out(format_args!("nvram ({})", shown(kind)), why);
        }
    };
    // A domain that was never started has none yet.
    let Some(path) = path else { return };
    if !is_path(path) {
        let why = "it is no absolute path of one line: the VM begins with fresh variables, and its UEFI looks for a boot loader";
        return import.leave_out(format_args!("nvram {}", shown(path)), why);
    }
    let format = nvram.attribute("format").or(attribute(os, "loader", "format"));
    import.nvram = Some(Nvram {
        path: PathBuf::from(path),
        is_qcow2: format == Some("qcow2"),
    });
}

/// Why a UEFI's variables were not copied.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The VM does not have them yet.
    #[error(
        "nvram {path}: {why}; unless variables/{name}.fd is in the state folder of host '{first}' before 'dunlin up', the VM begins with fresh \
         variables, and its UEFI looks for a boot loader"
    )]
    Left {
        /// The file that they are in.
        path: String,
        /// Why they stay there.
        #[source]
        why: Left,
        /// The VM's.
        name: String,
        /// On which it starts.
        first: String,
    },
    /// It has some.
    #[error(
        "nvram {path}: {raw} is there already, and the VM goes on with that; remove it first if it is not this VM's"
    )]
    IsThere {
        /// The file that they are in.
        path: String,
        /// Where it has them.
        raw: String,
    },
}

/// Why variables stay where they are.
#[derive(Debug, thiserror::Error)]
pub enum Left {
    /// Of another format.
    #[error(
        "it is a qcow2 image, and Dunlin keeps variables raw ('qemu-img convert -O raw {path} {raw}' makes them so)"
    )]
    Qcow2 {
        /// The file that they are in.
        path: String,
        /// Where they belong.
        raw: String,
    },
    /// They belong to that host.
    #[error(
        "it was not copied, since this is not host '{0}', on which the VM starts, or --config names no host.toml of it: if it is as large as \
         OVMF_VARS_4M.fd, copy it there"
    )]
    Elsewhere(String),
    /// What is in the file does not do, or cannot be copied.
    #[error(transparent)]
    Uefi(#[from] UefiError),
    /// Nothing is written at all: they belong there.
    #[error("it is copied to {0} where a file is written (-o)")]
    NotAsked(String),
}

/// Copies them for the VM of that name: into this host's `state` folder, if `first`, on which the VM starts, is this host and a file is written. Whether it was
/// done is a line; of what was done also the copy.
pub fn carry(
    nvram: &Nvram,
    name: &str,
    first: &str,
    state: Option<&Path>,
    is_written: bool,
) -> Result<(String, PathBuf), CarryError> {
    let path = shown(&nvram.path.display().to_string());
    let left = |why: Left| CarryError::Left {
        path: path.clone(),
        why,
        name: name.to_owned(),
        first: first.to_owned(),
    };
    let to = state.map(|state| variables(state, name));
    let raw = to
        .as_ref()
        .map_or_else(|| format!("variables/{name}.fd"), |to| to.display().to_string());
    if nvram.is_qcow2 {
        let path = path.clone();
        return Err(left(Left::Qcow2 { path, raw }));
    }
    let Some(to) = to else {
        return Err(left(Left::Elsewhere(first.to_owned())));
    };
    uefi::fits(&nvram.path).map_err(|why| left(why.into()))?;
    if to.exists() {
        return Err(CarryError::IsThere { path, raw });
    }
    if !is_written {
        return Err(left(Left::NotAsked(raw)));
    }
    uefi::take_variables(&nvram.path, &to).map_err(|why| left(why.into()))?;
    let line = format!(
        "nvram {path}: copied to {raw}, with which the VM begins on this host; its first protection copies it to the other one"
    );
    Ok((line, to))
}
