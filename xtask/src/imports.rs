//! No knot of files in core and node: whoever reads one file needs another one, and not all of them.
//!
//! # What it decides
//!
//! Whether the files of a crate use each other in a cycle of more than two.
//!
//! # Flow
//!
//! `names` reads what each module says, `resolve` finds the files that this leads to, `cycles` looks for knots in that.
//! [`check`] tells the shortest cycle of each knot, with what is used along it.
//!
//! # Not here
//!
//! Tests: they may use whatever they like.

mod cycles;
mod names;
mod resolve;

use anyhow::{Result, bail};
use dunlin_vmtest::paths;

use crate::source::Source;

/// Crates that have no knot.
const FOLDERS: [&str; 2] = ["core/src", "node/src"];

/// No cycle of more than two files.
pub fn check() -> Result<()> {
    let root = paths::workspace();
    let (mut files, mut found) = (0, Vec::new());
    for folder in FOLDERS {
        let graph = resolve::graph(&Source::read(&root, folder)?.modules(folder)?);
        files += graph.len();
        found.extend(told(&graph, folder));
    }
    if !found.is_empty() {
        bail!("cycles of more than two files:\n{}", found.join("\n"));
    }
    println!("verify: no cycle of more than two among {files} files");
    Ok(())
}

/// Each knot in lines.
fn told(graph: &resolve::Graph, folder: &str) -> Vec<String> {
    let short = |file: &str| {
        file.strip_prefix(folder)
            .map_or(file.into(), |rest| rest[1..].to_owned())
    };
    cycles::knots(graph)
        .iter()
        .map(|cycle| {
            let mut lines = format!("  in {folder}:");
            for (at, file) in cycle.iter().enumerate() {
                let next = cycle[(at + 1) % cycle.len()];
                let what: Vec<&str> = graph[*file][next].iter().map(String::as_str).collect();
                lines += &format!("\n    {} uses {} ({})", short(file), short(next), what.join(", "));
            }
            lines
        })
        .collect()
}

#[cfg(test)]
mod tests;
