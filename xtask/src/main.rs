//! One entry point for people and CI: `cargo xtask --help`.

mod accel;
mod balance;
mod bench;
mod book;
mod cargo;
mod criu;
mod demo;
mod earlier;
mod fields;
mod fuzz;
mod go;
mod imports;
mod k8s;
mod licences;
mod package;
mod page;
mod record;
mod room;
mod scenarios;
mod setup;
mod sizes;
mod source;
mod verify;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Everything that one does with Dunlin's source tree. Each command does its own set-up.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install missing Debian packages (as root or with sudo) and build the guest image.
    Setup {
        /// Also build the guest images of these services and fetch their clients: names separated by commas, or `all`.
        #[arg(long, value_delimiter = ',', value_name = "NAMES")]
        services: Vec<String>,
    },
    /// Check format, lints, links, licences, the source's shape (long files, import cycles, large structures) and unit tests. Changes nothing.
    Verify,
    /// Let rustfmt and clippy rewrite what they can.
    Fix,
    /// Run what CI runs: setup, verify, the quick scenarios on real QEMU, and some of them under KVM if that can run a guest here.
    Test,
    /// Run the consensus core under simulated time, network and crashes. Further arguments go to the simulator.
    Sim {
        /// How many seeds to try.
        #[arg(long, default_value_t = 1000)]
        seeds: u64,
        /// Any other options of the simulator (`cargo xtask sim -- --help`).
        #[arg(last = true)]
        more: Vec<String>,
    },
    Fuzz(fuzz::Fuzz),
    Demo(demo::Demo),
    Package(package::Package),
    /// Make a book of `docs/` in `target/book`; installs mdBook into `target/tools` the first time.
    Book,
    #[command(subcommand)]
    Page(page::Page),
    #[command(subcommand)]
    K8s(k8s::K8s),
    Scenarios(scenarios::Scenarios),
    Record(record::Record),
    /// A server that misbehaves as it is told; the scenario `program` runs it.
    #[command(hide = true, name = dunlin_vmtest::program::server::COMMAND)]
    ProgramServer {
        /// How.
        kind: String,
        /// Where it listens.
        port: u16,
    },
    /// Measure what Dunlin costs, and what it is compared with, in one run.
    #[command(subcommand)]
    Bench(bench::Bench),
}

/// Worlds from seeds taken from the clock in each run of the test command.
const FRESH_SEEDS: &str = "3000";
/// The same, of a primary and its backup.
const FRESH_SESSIONS: &str = "3000";
/// Worlds of a VM's three hosts that nobody has seen.
const FRESH_WHOLE: &str = "1000";
/// The same with large groups: how many members, and how many seeds.
const FRESH_LARGE: [(&str, &str); 5] = [("9", "60"), ("15", "30"), ("31", "10"), ("63", "4"), ("105", "2")];

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Setup { services } => {
            setup::run()?;
            setup::services(&services)
        }
        Task::Verify => {
            let skipped = verify::run()?;
            println!("xtask: all in order, {skipped}");
            Ok(())
        }
        Task::Fix => verify::fix(),
        Task::Test => {
            let begun = std::time::Instant::now();
            room::check()?;
            setup::run()?;
            let mut skipped = verify::run()?;
            skipped.extend(k8s::every_commit()?);
            // The workspace's tests play the worlds that are known; these nobody has seen.
            cargo::run(&[
                "run",
                "--package",
                "dunlin-sim",
                "--",
                "--fresh",
                "--seeds",
                FRESH_SEEDS,
            ])?;
            for (members, seeds) in FRESH_LARGE {
                let simulator = ["run", "--package", "dunlin-sim", "--", "--fresh"];
                cargo::run(&[&simulator[..], &["--members", members, "--seeds", seeds]].concat())?;
            }
            let sessions = ["run", "--package", "dunlin-sim", "--", "--sessions", "--fresh"];
            cargo::run(&[&sessions[..], &["--seeds", FRESH_SESSIONS]].concat())?;
            let whole = ["run", "--package", "dunlin-sim", "--", "--whole", "--fresh"];
            cargo::run(&[&whole[..], &["--seeds", FRESH_WHOLE]].concat())?;
            // Three real replicas, one killed (SIGKILL) and started again every second.
            dunlin_vmtest::bench_consensus::run(&["crash".into(), "--entries".into(), "16000".into()])?;
            skipped.extend(scenarios::run(&scenarios::Scenarios::quick())?);
            skipped.extend(scenarios::run_under_kvm()?);
            println!(
                "xtask: all of it passed in {:.0} s, {} left on the disks, {skipped}",
                begun.elapsed().as_secs_f64(),
                room::left()
            );
            Ok(())
        }
        Task::Sim { seeds, more } => {
            let seeds = seeds.to_string();
            let mut arguments = vec![
                "run",
                "--release",
                "--package",
                "dunlin-sim",
                "--",
                "--seeds",
                &seeds,
            ];
            arguments.extend(more.iter().map(String::as_str));
            cargo::run(&arguments)
        }
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Book => book::run(),
        Task::Package(arguments) => package::run(&arguments),
        Task::Page(task) => page::run(&task),
        Task::K8s(task) => k8s::run(&task),
        Task::Scenarios(arguments) => scenarios::run(&arguments).map(drop),
        Task::Record(arguments) => record::run(&arguments),
        Task::ProgramServer { kind, port } => dunlin_vmtest::program::server::run(&kind, port).map(drop),
        Task::Bench(what) => bench::run(&what),
    }
}

/// Set-up and build for a command that runs VMs in the testbed. The testbed needs root: an ordinary user's build is handed
/// over to sudo here, so that nothing root-owned gets into the target directory but what the testbed itself keeps.
fn ready(release: bool) -> Result<PathBuf> {
    /// Set when this process is the one that sudo started: all is built.
    const BUILT: &str = "DUNLIN_XTASK_BUILT";
    if let Some(binary) = std::env::var_os(BUILT) {
        return Ok(PathBuf::from(binary));
    }
    setup::run()?;
    let binary = cargo::build_dunlin(release)?;
    if dunlin_vmtest::is_root() {
        return Ok(binary);
    }
    println!("xtask: hosts are network namespaces, which needs root: going on with sudo");
    let mut assignment = std::ffi::OsString::from(format!("{BUILT}="));
    assignment.push(&binary);
    let error = Command::new("sudo")
        .arg("env")
        .arg(assignment)
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .exec();
    Err(error).context("sudo is not here: run this command as root")
}
