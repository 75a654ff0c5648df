//! Calls of cargo, with one way to fail: the command line that failed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

/// Runs cargo in the workspace, its output on the terminal.
pub fn run(arguments: &[&str]) -> Result<()> {
    run_with(arguments, &[])
}

/// The same with further variables in its environment.
pub fn run_with(arguments: &[&str], variables: &[(&str, &Path)]) -> Result<()> {
    run_in(&paths::workspace(), arguments, variables)
}

/// The same in another work tree.
fn run_in(tree: &Path, arguments: &[&str], variables: &[(&str, &Path)]) -> Result<()> {
    println!("xtask: cargo {}", arguments.join(" "));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // What `cargo xtask` was told about the package xtask: build scripts (ring's) watch these, and would build all anew.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    let status = command
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(tree)
        .status()
        .context("cargo is not here")?;
    if !status.success() {
        bail!("failed: cargo {}", arguments.join(" "));
    }
    Ok(())
}

/// Whether cargo knows a subcommand, such as `deny`.
pub fn has(subcommand: &str) -> bool {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([subcommand, "--version"])
        .current_dir(paths::workspace())
        .output();
    output.is_ok_and(|output| output.status.success())
}

/// Builds the `dunlin` executable and says where it is.
pub fn build_dunlin(release: bool) -> Result<PathBuf> {
    build_dunlin_of(&paths::workspace(), release)
}

/// The same of another work tree, in the same target folder: the next build takes its place there.
pub fn build_dunlin_of(tree: &Path, release: bool) -> Result<PathBuf> {
    let mut arguments = vec!["build", "--quiet", "--package", "dunlin-node", "--bin", "dunlin"];
    if release {
        arguments.push("--release");
    }
    let target = paths::target();
    run_in(tree, &arguments, &[("CARGO_TARGET_DIR", &target)])?;
    let binary = target
        .join(if release { "release" } else { "debug" })
        .join("dunlin");
    if !binary.is_file() {
        bail!("cargo built no {}", binary.display());
    }
    Ok(binary)
}
