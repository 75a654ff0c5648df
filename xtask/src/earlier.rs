//! Builds of earlier commits, from work trees of their own.
//!
//! * **Decides:** nothing. * **Flow:** a commit -> a work tree under the target directory -> whatever is made of it; the tree goes.
//! * **Invariants:** an executable that was built once for a commit is kept under the commit's name, and not built again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

use crate::cargo;

/// Makes something of a commit's work tree, which is there as long as that takes.
pub fn with_tree<T>(commit: &str, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let root = paths::workspace();
    let commit = named(commit)?;
    let tree = paths::target().join("package-from");
    forget_tree(&root, &tree)?;
    git(
        &root,
        &["worktree", "add", "--detach", &tree.to_string_lossy(), &commit],
    )?;
    let made = make(&tree);
    forget_tree(&root, &tree)?;
    made
}

/// The debug executable of a commit. It is built in the same target folder as everything else, some minutes, the first time only.
pub fn dunlin(commit: &str) -> Result<PathBuf> {
    let kept = paths::target().join("earlier").join(named(commit)?);
    let binary = kept.join("dunlin");
    if binary.is_file() {
        return Ok(binary);
    }
    fs::create_dir_all(&kept)?;
    with_tree(commit, |tree| {
        let built = cargo::build_dunlin_of(tree, false)?;
        // Under its name only when it is whole.
        let whole = kept.join("copy");
        fs::copy(built, &whole)?;
        Ok(fs::rename(whole, &binary)?)
    })?;
    Ok(binary)
}

/// A commit by its whole name.
fn named(commit: &str) -> Result<String> {
    git(
        &paths::workspace(),
        &["rev-parse", "--verify", &format!("{commit}^{{commit}}")],
    )
    .with_context(|| format!("there is no commit {commit} here: name another one with --from"))
}

/// Whatever is left of a work tree, an earlier run's too.
fn forget_tree(root: &Path, tree: &Path) -> Result<()> {
    match fs::remove_dir_all(tree) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| tree.display().to_string());
        }
        _ => {}
    }
    git(root, &["worktree", "prune"]).map(drop)
}

/// What git says in a work tree.
pub fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root)
        .output()
        .context("git is not here")?;
    if !output.status.success() {
        bail!(
            "git {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
