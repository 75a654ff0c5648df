//! `cargo xtask book`: the pages of `docs/` as a book, in the order of `docs/SUMMARY.md`.
//!
//! **Decides**: which mdBook. It is installed by cargo into `target/tools` the first time, a pinned version, without its web server.
//! **Not here**: whether each page is in the table of contents, and each command exists (the executable's tests).

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::paths;

use crate::cargo;

/// As cargo and the program itself name it.
const VERSION: &str = "0.5.4";

/// Makes it, and says where it is.
///
/// # Errors
/// mdBook's own words, where a page is missing or cannot be read.
pub fn run() -> Result<()> {
    let tool = mdbook()?;
    let output = Command::new(&tool)
        .arg("build")
        .current_dir(paths::workspace())
        .output()
        .with_context(|| tool.display().to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mdbook: {said}");
    let warned: Vec<&str> = said.lines().filter(|line| line.contains("WARN")).collect();
    ensure!(warned.is_empty(), "mdbook warns: {}", warned.join("; "));
    let first = paths::target().join("book/index.html");
    ensure!(first.is_file(), "mdbook made no {}", first.display());
    println!("book: {}", first.display());
    Ok(())
}

fn mdbook() -> Result<PathBuf> {
    let root = paths::target().join("tools/mdbook");
    let tool = root.join("bin/mdbook");
    let version = Command::new(&tool).arg("--version").output();
    if version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(VERSION)) {
        return Ok(tool);
    }
    println!(
        "book: will install mdbook {VERSION} into {}: some minutes, once",
        root.display()
    );
    let install = [
        "install",
        "mdbook",
        "--locked",
        "--version",
        VERSION,
        "--debug",
        "--force",
    ];
    let features = ["--no-default-features", "--features", "search", "--root"];
    let folder = root.to_string_lossy();
    cargo::run(&[&install[..], &features[..], &[&*folder]].concat())?;
    Ok(tool)
}
