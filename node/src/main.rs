//! `dunlin`: the daemon and the command line.
#![forbid(unsafe_code)]

mod cli;
mod config;
mod control;
mod daemon;
mod events;
mod metrics;
mod vm;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
