//! What is in Go (`k8s`): format, vet and tests, also under the race detector, against the `dunlin` of this tree. Not here: what the
//! Rust tests run of it themselves (`node/tests/shared_log.rs`), and what is made of Kubernetes' own or belongs in a cluster (`k8s.rs`).

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

use crate::cargo;

/// Go modules, by folder.
const MODULES: [&str; 2] = ["k8s/log", "k8s"];
/// No module's tests take longer, on a machine however busy.
const PATIENCE: &str = "-timeout=8m";

/// Checks all of it; changes nothing.
///
/// # Errors
/// With the first command that failed.
pub fn verify() -> Result<()> {
    let dunlin = cargo::build_dunlin(false)?;
    for module in MODULES {
        let folder = paths::workspace().join(module);
        format(&folder)?;
        go(&folder, &dunlin, &["vet", "./..."])?;
        go(&folder, &dunlin, &["test", "-count=1", PATIENCE, "./..."])?;
        // Slower by ten: with fewer seeds.
        go(
            &folder,
            &dunlin,
            &["test", "-count=1", "-race", "-short", PATIENCE, "./..."],
        )?;
    }
    Ok(())
}

/// Whether `gofmt` has nothing to say of a module.
///
/// # Errors
/// With what they say.
pub fn format(folder: &Path) -> Result<()> {
    let unformatted = Command::new("gofmt")
        .args(["-l", "."])
        .current_dir(folder)
        .output()
        .context("gofmt is not here: apt-get install golang-go (or 'cargo xtask setup')")?;
    if !unformatted.stdout.is_empty() {
        let files = String::from_utf8_lossy(&unformatted.stdout);
        bail!(
            "{}: 'gofmt -w' would change {}",
            shown(folder),
            files.trim().replace('\n', ", ")
        );
    }
    Ok(())
}

fn shown(folder: &Path) -> String {
    let inside = folder.strip_prefix(paths::workspace()).unwrap_or(folder);
    inside.display().to_string()
}

fn go(folder: &Path, dunlin: &Path, arguments: &[&str]) -> Result<()> {
    let shown = shown(folder);
    println!("xtask: go {} in {shown}", arguments.join(" "));
    let status = Command::new("go")
        .args(arguments)
        .current_dir(folder)
        .env("DUNLIN", dunlin)
        // The tree's own version control is none of Go's business.
        .env("GOFLAGS", "-buildvcs=false")
        .status()
        .context("go is not here: apt-get install golang-go (or 'cargo xtask setup')")?;
    if !status.success() {
        bail!("failed: go {} in {shown}", arguments.join(" "));
    }
    Ok(())
}
