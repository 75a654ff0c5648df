//! Licences of all libraries, checked against `deny.toml` without needing cargo-deny or a network.
//!
//! cargo-deny does more (it reads licence files and knows advisories); this is the part that must never be skipped.

use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

/// Every library must have a licence expression that the list in `deny.toml` satisfies.
pub fn check() -> Result<()> {
    let root = paths::workspace();
    let policy: toml::Table = std::fs::read_to_string(root.join("deny.toml"))?.parse()?;
    let allowed: Vec<&str> = policy
        .get("licenses")
        .and_then(|table| table.get("allow")?.as_array())
        .context("deny.toml has no licenses.allow")?
        .iter()
        .filter_map(toml::Value::as_str)
        .collect();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--format-version=1",
            "--filter-platform=x86_64-unknown-linux-gnu",
        ])
        .current_dir(&root)
        .output()
        .context("cargo is not here")?;
    if !output.status.success() {
        bail!(
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata names no packages")?;
    let mut wrong = Vec::new();
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("");
        if !satisfied(licence, &allowed) {
            wrong.push(format!("{} {}: '{licence}'", package["name"], package["version"]));
        }
    }
    if !wrong.is_empty() {
        bail!(
            "licences that deny.toml does not allow:\n  {}",
            wrong.join("\n  ")
        );
    }
    println!("verify: licences of {} packages are allowed", packages.len());
    Ok(())
}

/// Whether an SPDX expression holds when exactly `allowed` hold. Old manifests write `/` for OR.
fn satisfied(expression: &str, allowed: &[&str]) -> bool {
    let words = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut at = 0;
    !words.is_empty() && any(&words, &mut at, allowed) && at == words.len()
}

fn any(words: &[&str], at: &mut usize, allowed: &[&str]) -> bool {
    let mut holds = all(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        // Both sides must be read, whatever the first one is.
        holds |= all(words, at, allowed);
    }
    holds
}

fn all(words: &[&str], at: &mut usize, allowed: &[&str]) -> bool {
    let mut holds = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= one(words, at, allowed);
    }
    holds
}

fn one(words: &[&str], at: &mut usize, allowed: &[&str]) -> bool {
    let Some(&word) = words.get(*at) else { return false };
    *at += 1;
    if word == "(" {
        let holds = any(words, at, allowed);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return holds && closed;
    }
    if words.get(*at) == Some(&"WITH") {
        let exception = words.get(*at + 1).copied().unwrap_or("");
        *at += 2;
        return allowed.contains(&format!("{word} WITH {exception}").as_str());
    }
    allowed.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::satisfied;

    #[test]
    fn licence_expressions_are_judged() {
        let allowed = [
            "MIT",
            "Apache-2.0",
            "Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception",
        ];
        let cases = [
            ("MIT", true),
            ("MIT OR GPL-3.0", true),
            ("MIT/Apache-2.0", true),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("GPL-3.0 OR Apache-2.0 WITH LLVM-exception", true),
            ("MIT AND GPL-3.0", false),
            ("(MIT AND GPL-3.0) OR LGPL-2.1", false),
            ("GPL-3.0", false),
            ("(MIT", false),
            ("", false),
        ];
        for (expression, holds) in cases {
            assert_eq!(satisfied(expression, &allowed), holds, "{expression}");
        }
    }
}
