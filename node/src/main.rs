//! `dunlin`: the daemon and the command line.
#![forbid(unsafe_code)]

mod build;
mod certificates;
mod cli;
mod config;
mod control;
mod daemon;
mod events;
mod heartbeats;
mod import;
mod journal;
mod logs;
mod metrics;
mod notify;
#[cfg(test)]
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
mod vm;
mod web;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
