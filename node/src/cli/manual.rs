//! `completions`, `manual`, `version`: what a package takes from the command line's own definition, so that it cannot lag behind.

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use dunlin_fabric::link::PROTOCOL_VERSION;
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
    serde_json::json!({ "version": env!("CARGO_PKG_VERSION"), "protocol": PROTOCOL_VERSION }).to_string()
}

/// Says which program this is: its version, and the protocol that it speaks with other hosts.
pub fn version(json: bool) -> ExitCode {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        println!("{}", version_json());
    } else {
        println!("dunlin {version} (protocol {PROTOCOL_VERSION})");
    }
    ExitCode::SUCCESS
}
