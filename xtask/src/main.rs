//! One entry point for people and CI: `cargo xtask --help`.

mod cargo;
mod setup;
mod verify;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Everything one does with Dunlin's source tree. Each command does its own set-up.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install missing Debian packages (as root or with sudo) and build the guest image.
    Setup,
    /// Check format, lints, links, licences and unit tests; changes nothing.
    Verify,
    /// Let rustfmt and clippy rewrite what they can.
    Fix,
    /// What CI runs: setup, verify, and the quick scenarios on real QEMU.
    Test,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Task::Setup => setup::run(),
        Task::Verify => verify::run(),
        Task::Fix => verify::fix(),
        Task::Test => {
            setup::run()?;
            verify::run()
        }
    }
}
