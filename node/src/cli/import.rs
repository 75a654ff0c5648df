//! `import`: where the XML is, who runs the VM, and where its file goes.

use crate::config::HostConfig;
use crate::daemon::BadInput;
use crate::import::{self, ImportError, Imported, Options, source};
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What `import` takes.
#[derive(clap::Args)]
pub struct Import {
    /// A domain that libvirt knows, or a file with its XML
    #[arg(long, value_name = "NAME|FILE.XML")]
    libvirt: String,
    /// The file to write, which must not exist yet. Without it, the text is printed
    #[arg(short, long, value_name = "VM.TOML")]
    output: Option<PathBuf>,
    /// The hosts that can run the VM, the preferred one first. Without it: this host and the first other host of its cluster
    #[arg(long, value_delimiter = ',', value_name = "HOST,HOST")]
    members: Vec<String>,
    /// The third host, which only votes. Without it: the cluster's first host that is no member
    #[arg(long, value_name = "HOST")]
    witness: Option<String>,
    /// The bridge for network cards that are on no bridge in the domain, such as those of libvirt's own networks
    #[arg(long, value_name = "BRIDGE")]
    bridge: Option<String>,
    /// Carry over disks and network cards of other kinds as virtio. The guest needs virtio drivers
    #[arg(long)]
    virtio: bool,
    /// This host's configuration, which names its cluster
    #[arg(long, default_value = "/etc/dunlin/host.toml", value_name = "HOST.TOML")]
    config: PathBuf,
}

/// Writes the file, or says all that stands against it.
pub fn run(import: &Import) -> Result<ExitCode> {
    if let Some(output) = import.output.as_deref().filter(|output| output.exists()) {
        return Err(BadInput(format!(
            "{}: it is there already; name another file",
            output.display()
        ))
        .into());
    }
    let (members, witness) = hosts(import)?;
    let xml = source::read(&import.libvirt).map_err(|error| BadInput(error.to_string()))?;
    let options = Options {
        members,
        witness,
        bridge: import.bridge.clone(),
        virtio: import.virtio,
    };
    let mut imported = match import::domain(&xml, &options) {
        Ok(imported) => imported,
        Err(ImportError::Refused(reasons)) => {
            for reason in &reasons {
                eprintln!("REFUSED  {reason}");
            }
            let count = match reasons.len() {
                1 => "1 thing has".to_owned(),
                more => format!("{more} things have"),
            };
            return Err(BadInput(format!("{count} to be changed first; nothing was written")).into());
        }
        Err(error) => return Err(BadInput(format!("{}: {error}", import.libvirt)).into()),
    };
    let variables = carry_variables(import, &options, &mut imported);
    for line in &imported.carried {
        eprintln!("CARRIED  {line}");
    }
    for line in &imported.left_out {
        eprintln!("LEFT OUT {line}");
    }
    match &import.output {
        Some(path) => {
            write(path, &imported.text()).inspect_err(|_| {
                // Of a VM that there is not.
                variables.as_ref().map(std::fs::remove_file);
            })?;
            let path = path.display();
            eprintln!("{path} is written; 'dunlin check {path}' says what the hosts lack for it");
        }
        None => {
            let mut out = std::io::stdout().lock();
            out.write_all(imported.text().as_bytes())
                .and_then(|()| out.flush())
                .context("printing the VM's file")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Copies a UEFI's variables, if there are any and this host is the one that the VM starts on. Returns the copy.
fn carry_variables(import: &Import, options: &Options, imported: &mut Imported) -> Option<PathBuf> {
    let nvram = imported.nvram.take()?;
    let first = options.members.first()?;
    let host = HostConfig::load(&import.config)
        .ok()
        .filter(|host| host.name == *first);
    let state = host.as_ref().map(|host| host.state.as_path());
    match import::carry(&nvram, &imported.name, first, state, import.output.is_some()) {
        Ok((line, copy)) => {
            imported.carried.push(line);
            Some(copy)
        }
        Err(why) => {
            imported.left_out.push(why.to_string());
            None
        }
    }
}

/// Who runs the VM: as said, or as the cluster's file has them.
fn hosts(import: &Import) -> Result<(Vec<String>, Option<String>)> {
    let mut named: Vec<&String> = import.members.iter().chain(&import.witness).collect();
    let all = named.len();
    named.sort_unstable();
    named.dedup();
    if import.members.len() > 2 || named.len() < all {
        return Err(BadInput(
            "--members names two hosts that can run the VM, and --witness a third host".into(),
        )
        .into());
    }
    if import.members.len() == 2 && import.witness.is_some() {
        return Ok((import.members.clone(), import.witness.clone()));
    }
    let config = HostConfig::load(&import.config).map_err(|error| {
        BadInput(format!(
            "who is to run the VM? Say --members A,B --witness C, or --config: {error}"
        ))
    })?;
    // This host has the domain, most likely: it is preferred.
    let mut names: Vec<String> = config.cluster.hosts.into_iter().map(|host| host.name).collect();
    names.sort_by_key(|name| *name != config.name);
    let mut members = import.members.clone();
    let free: Vec<String> = names
        .into_iter()
        .filter(|name| !members.contains(name) && import.witness.as_ref() != Some(name))
        .collect();
    let mut free = free.into_iter();
    while members.len() < 2 {
        match free.next() {
            Some(name) => members.push(name),
            None => {
                return Err(BadInput("the cluster has not two hosts that could run the VM".into()).into());
            }
        }
    }
    let witness = import.witness.clone().or_else(|| free.next());
    Ok((members, witness))
}

/// A file of its own: one that came to be meanwhile is not written over.
fn write(path: &Path, text: &str) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|error| BadInput(format!("{}: {error}", path.display())))?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        // Half a file is none.
        let _ = std::fs::remove_file(path);
    }
    written.with_context(|| path.display().to_string())
}
