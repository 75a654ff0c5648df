//! What must hold for every commit. Reads only: `cargo xtask fix` is the one command that rewrites files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use dunlin_vmtest::paths;

use crate::{balance, cargo, fields, go, imports, licences, sizes};

/// A check by its name.
type Check = (&'static str, fn() -> Result<()>);

/// Links, sizes, who imports whom, fields, lines of tests, format, licences, lints, tests, the same of what is in Go: in the order in which they are quick. All are run, whatever fails. Returns the
/// tests that this machine cannot run, each with its reason: whoever calls tells them in the last line.
pub fn run() -> Result<Skipped> {
    let checks: [Check; 10] = [
        ("links", links),
        ("sizes", sizes::check),
        ("imports", imports::check),
        ("fields", fields::check),
        ("balance", balance::check),
        ("format", || cargo::run(&["fmt", "--all", "--", "--check"])),
        ("licences", licences),
        ("lints", || {
            cargo::run(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
        }),
        ("tests", tests),
        ("go", go::verify),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        if let Err(error) = check() {
            println!("verify: {name}: {error:#}");
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("not in order: {}", failed.join(", "));
    }
    Skipped::read()
}

/// The tests of the last run that could not run here.
pub struct Skipped(Vec<String>);

impl Skipped {
    /// Where tests tell it (`guest/tests/common/skipped.rs`).
    fn file() -> PathBuf {
        paths::target().join("skipped-tests")
    }

    /// With what cannot be played here.
    pub fn extend(&mut self, more: Vec<String>) {
        self.0.extend(more);
    }

    fn read() -> Result<Self> {
        Ok(Self(match fs::read_to_string(Self::file()) {
            Ok(text) => text.lines().map(str::to_owned).collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error.into()),
        }))
    }
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.len() {
            0 => write!(out, "no test skipped"),
            count => write!(out, "{count} tests SKIPPED here ({})", self.0.join("; ")),
        }
    }
}

fn tests() -> Result<()> {
    let skipped = Skipped::file();
    match fs::remove_file(&skipped) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let arguments = ["test", "--workspace", "--no-fail-fast"];
    cargo::run_with(&arguments, &[("DUNLIN_SKIPPED", &skipped)])
}

/// Rewrites what can be mended by a machine.
pub fn fix() -> Result<()> {
    cargo::run(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--fix",
        "--allow-dirty",
        "--allow-staged",
    ])?;
    cargo::run(&["fmt", "--all"])
}

/// The advisory database is a download from a host that not every machine reaches; the rest is in the lock file and
/// the registry's copies. So advisories are checked where the database is already here, and that is said.
fn licences() -> Result<()> {
    licences::check()?;
    if !cargo::has("deny") {
        println!(
            "verify: cargo-deny is not here: advisories not checked ('cargo install cargo-deny' mends that)"
        );
        return Ok(());
    }
    cargo::run(&["deny", "--offline", "check", "licenses", "bans", "sources"])?;
    if cargo::run(&["deny", "--offline", "check", "advisories"]).is_err() {
        println!("verify: advisories not checked, or not clean: see above");
    }
    Ok(())
}

/// Every relative link in the documents must lead to a file.
fn links() -> Result<()> {
    let root = paths::workspace();
    let mut documents = Vec::new();
    collect(&root, &mut documents)?;
    let mut broken = Vec::new();
    for document in &documents {
        let text = fs::read_to_string(document)?;
        for target in targets(&text) {
            let file = target.split('#').next().unwrap_or_default();
            let leads_to = document.parent().unwrap_or(&root).join(file);
            if !file.is_empty() && !leads_to.exists() {
                broken.push(format!(
                    "{}: {target}",
                    document.strip_prefix(&root).unwrap_or(document).display()
                ));
            }
        }
    }
    if !broken.is_empty() {
        bail!("links that lead nowhere:\n  {}", broken.join("\n  "));
    }
    println!("verify: links of {} documents lead somewhere", documents.len());
    Ok(())
}

fn collect(dir: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            let ignored = ["target", "work", "shared", "node_modules"]
                .iter()
                .any(|dir| name == *dir);
            if !ignored && !name.to_string_lossy().starts_with('.') {
                collect(&path, into)?;
            }
        } else if path.extension().is_some_and(|ext| ext == "md") {
            into.push(path);
        }
    }
    Ok(())
}

/// The relative targets of `[text](target)` outside of code.
fn targets(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let Some(end) = rest.find(')') else { continue };
            let target = &rest[..end];
            if !target.contains("://") && !target.starts_with("mailto:") {
                found.push(target);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Skipped, targets};

    #[test]
    fn the_last_line_names_what_was_skipped_and_why() {
        assert_eq!(Skipped(vec![]).to_string(), "no test skipped");
        let two = Skipped(vec!["a: no root".into(), "b: no KVM".into()]);
        assert_eq!(two.to_string(), "2 tests SKIPPED here (a: no root; b: no KVM)");
    }

    #[test]
    fn links_are_found_outside_of_code() {
        let text =
            "See [a](a.md), [b](docs/b.md#part) and [web](https://example.org).\n```\n[x](no.md)\n```\n";
        assert_eq!(targets(text), ["a.md", "docs/b.md#part"]);
    }
}
