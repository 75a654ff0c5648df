//! `completions`, `manual`, `version`: what a package takes from the command line's own definition, so that it cannot lag behind.

use crate::build;
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use dunlin_fabric::link::{OLDEST_PROTOCOL, PROTOCOL_VERSION};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Writes a shell's completions to standard output.
pub fn completions<C: CommandFactory>(shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut C::command(), "dunlin", &mut script);
    // A pager that was closed is no error worth a trace.
    std::io::stdout()
        .write_all(&script)
        .context("writing the completions")?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a manual page for `dunlin` and for each of its commands into a folder.
pub fn pages<C: CommandFactory>(folder: &Path) -> Result<ExitCode> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    clap_mangen::generate_to(C::command(), folder)
        .with_context(|| format!("writing manual pages to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Which program this is, for programs.
pub fn version_json() -> String {
    which(build::COMMIT).to_string()
}

fn which(commit: Option<&str>) -> serde_json::Value {
    let mut which = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": PROTOCOL_VERSION,
        "oldest_protocol": OLDEST_PROTOCOL,
    });
    if let Some(commit) = commit {
        which["commit"] = commit.into();
    }
    which
}

/// Says which program this is: its version, and the versions of the protocol that it speaks with other hosts.
pub fn version(json: bool) -> ExitCode {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        println!("{}", version_json());
    } else {
        println!("dunlin {version} (protocol {OLDEST_PROTOCOL} to {PROTOCOL_VERSION})");
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_told_only_where_it_is_known() {
        assert_eq!(which(Some("83e80c1"))["commit"], "83e80c1");
        let unknown = which(None);
        assert!(unknown.get("commit").is_none() && unknown["version"] == env!("CARGO_PKG_VERSION"));
    }
}
