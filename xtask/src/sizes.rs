//! No source file is longer than a person reads in one go.

use std::fs;

use anyhow::{Result, bail};
use dunlin_vmtest::paths;

/// Lines of a file in Rust or Go.
const MOST_LINES: usize = 600;

/// Every source file that git knows, or would take.
pub fn check() -> Result<()> {
    let root = paths::workspace();
    let listed = std::process::Command::new("git")
        .args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "*.rs",
            "*.go",
        ])
        .current_dir(&root)
        .output()?;
    if !listed.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim());
    }
    let (mut files, mut long) = (0, Vec::new());
    for name in String::from_utf8_lossy(&listed.stdout).lines() {
        // One that is removed and not yet committed is listed as well.
        let Ok(text) = fs::read_to_string(root.join(name)) else {
            continue;
        };
        // What a program has written nobody reads: by Go's own convention such a file says so.
        if text
            .lines()
            .any(|line| line.starts_with("// Code generated ") && line.ends_with(" DO NOT EDIT."))
        {
            continue;
        }
        files += 1;
        let lines = text.lines().count();
        if lines > MOST_LINES {
            long.push(format!("{name}: {lines} lines"));
        }
    }
    if files == 0 {
        bail!("git ls-files names no source file");
    }
    if !long.is_empty() {
        bail!("longer than {MOST_LINES} lines:\n  {}", long.join("\n  "));
    }
    println!("verify: none of {files} source files is longer than {MOST_LINES} lines");
    Ok(())
}
