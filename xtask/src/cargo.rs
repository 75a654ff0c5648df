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
    build(&paths::workspace(), release, &[])
}

/// The same for a package, of that work tree and in the same target folder, where the next build takes its place: it names the commit that it is
/// of. For nothing else, or each commit would build all anew.
pub fn build_dunlin_of(tree: &Path, release: bool) -> Result<PathBuf> {
    let commit = commit(tree)?;
    build(tree, release, &[("DUNLIN_COMMIT", Path::new(&commit))])
}

/// The commit of a work tree; with `-dirty`, if something in it was changed since.
pub fn commit(tree: &Path) -> Result<String> {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
        .current_dir(tree)
        .output()
        .context("git is not here")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("git does not know the commit of {}: {words}", tree.display());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn build(tree: &Path, release: bool, more: &[(&str, &Path)]) -> Result<PathBuf> {
    let mut arguments = vec!["build", "--quiet", "--package", "dunlin-node", "--bin", "dunlin"];
    if release {
        arguments.push("--release");
    }
    let target = paths::target();
    let mut variables = vec![("CARGO_TARGET_DIR", target.as_path())];
    variables.extend_from_slice(more);
    run_in(tree, &arguments, &variables)?;
    let binary = target
        .join(if release { "release" } else { "debug" })
        .join("dunlin");
    if !binary.is_file() {
        bail!("cargo built no {}", binary.display());
    }
    Ok(binary)
}
