//! `cluster person`: a key and a certificate for somebody who uses the API over the network.
//!
//! **Decides**: what a person gets. **Flow**: said on the host with the authority's key -> one file, readable by its owner alone, to be brought to the person
//! -> their browser or program shows it (`web::door`). **Invariants**: 1. no certificate is given out that is not on record (`issued`), so that each can be
//! revoked. 2. what is there is never written over. **Not here**: revoking one (`keys`), what is in it (`dunlin_fabric::keys::person`).

use super::cluster::First;
use super::issued::Issued;
use crate::daemon::BadInput;
use crate::events::now_ms;
use anyhow::{Context, Result};
use dunlin_fabric::keys::person::{self, PersonRole};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const DAY_S: u64 = 86_400;

/// Who it is for.
#[derive(clap::Args)]
pub struct For {
    /// The person's name: a-z, 0-9 and '-'
    name: String,
    /// What the person may do, as on the control socket
    #[arg(long, value_parser = role, value_name = "viewer|operator")]
    role: PersonRole,
    /// How many days the certificate is valid
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
    /// The file to write. Without it: NAME.pem in the current folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// No role that a person can have.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a person is a viewer or an operator")]
struct NoRole;

fn role(word: &str) -> Result<PersonRole, NoRole> {
    let known = PersonRole::ALL.into_iter().find(|role| role.word() == word);
    known.ok_or(NoRole)
}

/// Makes it.
pub fn make(dir: &Path, whom: &For) -> Result<ExitCode> {
    let For {
        name,
        role,
        days,
        out,
    } = whom;
    let first = First::load(dir)?;
    let path = out.clone().unwrap_or_else(|| format!("{name}.pem").into());
    let made = person::make(&first.authority, name, *role, now_ms() / 1000 + days * DAY_S)
        .map_err(|error| BadInput(error.to_string().replace("host name", "a person's name")))?;
    let open = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    let mut file = open.map_err(|error| BadInput(format!("{}: {error}", path.display())))?;
    Issued::beside_key(dir).note(&made.cert_pem)?;
    let authority = &first.authority.keys.cert_pem;
    let text: String = [&made.key_pem, &made.cert_pem, authority]
        .into_iter()
        .map(|pem| format!("{}\n", pem.trim_end()))
        .collect();
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| path.display().to_string())?;
    println!(
        "{0}: key and certificate of {name}, {1} for {days} days, and the cluster's authority. Bring it to them, and keep no copy; 'dunlin cluster revoke \
         --person {name}' ends it",
        path.display(),
        role.word()
    );
    Ok(ExitCode::SUCCESS)
}
