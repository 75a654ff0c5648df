//! `cargo xtask k8s`: Dunlin's resources, scheduler and operator against a real control plane of Kubernetes ([`tools`]). The operator's
//! tests run the redis guest under QEMU's translator, and redis as a bare program, which CRIU copies; all but these belong to every commit
//! ([`every_commit`]).
//!
//! Not here: what needs no control plane (`go.rs`, a part of `verify`).

mod images;
mod tools;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};
use dunlin_vmtest::{image, paths};

use crate::{cargo, setup};
use tools::{MODULE, succeeds};

/// No test of the module takes longer, on a machine however busy.
const PATIENCE: &str = "-timeout=60m";
/// The same of what is measured with as many nodes and tasks as somebody asks for.
const SCALE_PATIENCE: &str = "-timeout=3h";

/// Test, show and measure Dunlin on Kubernetes: resources, scheduler and operator, with a real API server.
#[derive(clap::Subcommand)]
pub enum K8s {
    /// Build kube-apiserver (once, several minutes) and run every test that talks to one.
    Test {
        /// Only the tests that are run for every commit: none with a guest.
        #[arg(long, conflicts_with_all = ["run", "verbose", "count"])]
        quick: bool,
        /// Only tests whose names match this regular expression.
        #[arg(long, value_name = "REGEX")]
        run: Option<String>,
        /// Show what the tests print.
        #[arg(long, short)]
        verbose: bool,
        /// How often each test runs.
        #[arg(long, default_value_t = 1)]
        count: u32,
    },
    /// Show four real nodes, each with a kubelet and a containerd, and a `ProtectedVM` that serves redis. Its primary's whole node is killed, and
    /// clients lose nothing.
    Demo {
        /// Then go on with such nodes: a drained node, another strength while the VM runs, a standby that gets a dead node's part, and a deletion.
        #[arg(long)]
        all: bool,
    },
    /// Make OCI images of the scheduler, the operator, and what runs in a Pod that stands for a copy. They are archives under `target/images` that
    /// 'ctr images import' takes.
    Images {
        /// Have Debian's containerd import and run them, in a place of its own (needs root).
        #[arg(long)]
        check: bool,
    },
    /// Measure how many Pods a second are bound, and how long each waits, beside the plain kube-scheduler in the same run.
    Scale {
        /// Nodes, which are objects: nothing runs on them.
        #[arg(long, default_value_t = 1000)]
        nodes: u32,
        /// Tasks in each course, with one to three Pods each.
        #[arg(long, default_value_t = 5000)]
        tasks: u32,
        /// What to measure between two courses of the plain kube-scheduler: tasks with R = 1, R = 3, or R from 1 to 3. Without it: all three.
        #[arg(long = "course", value_name = "COURSE", value_parser = ["single", "triple", "mixed"])]
        courses: Vec<String>,
    },
    /// Measure redis with copies beside redis alone, both placed by the same scheduler: throughput and response time, as in TRIPOD's own figure.
    Figure {
        /// What redis runs in. Without it: both.
        #[arg(long = "kind", value_name = "KIND", value_parser = ["program", "vm"])]
        kinds: Vec<String>,
        /// Pairs of windows, one with copies and one without, for each number of connections.
        #[arg(long, default_value_t = 5)]
        pairs: u32,
        /// Requests in a window with 50 connections. With one connection it is a tenth.
        #[arg(long, default_value_t = 20_000)]
        requests: u32,
        /// R of the side with copies. 3 is for a VM only: two copies, and a standby on another host, which runs no copy.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=3))]
        strength: u32,
    },
}

/// Runs it.
///
/// # Errors
/// With the first command that failed, or what this machine lacks.
pub fn run(task: &K8s) -> Result<()> {
    let begun = Instant::now();
    setup::run()?;
    if let Some(why) = tools::go_is_too_old()? {
        bail!(why);
    }
    let what = match task {
        K8s::Test { quick: true, .. } => {
            let skipped = every_commit()?;
            println!("xtask: not run: {}", skipped.join("; "));
            "test"
        }
        K8s::Test {
            quick: false,
            run,
            verbose,
            count,
        } => {
            test(&tools::tools()?, run.as_deref(), *verbose, *count)?;
            "test"
        }
        K8s::Demo { all } => {
            print!("{}", demo(*all)?);
            return Ok(());
        }
        K8s::Images { check } => {
            images::run(*check)?;
            "images"
        }
        K8s::Scale {
            nodes,
            tasks,
            courses,
        } => {
            scale(&tools::tools()?, *nodes, *tasks, courses)?;
            "scale"
        }
        K8s::Figure {
            kinds,
            pairs,
            requests,
            strength,
        } => {
            let kinds = figure_kinds(kinds, *strength)?;
            figure(&tools::tools()?, &kinds, *pairs, *requests, *strength)?;
            "figure"
        }
    };
    println!(
        "xtask: k8s {what} passed in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

fn test(tools: &Path, run: Option<&str>, verbose: bool, count: u32) -> Result<()> {
    let dunlin = cargo::build_dunlin(false)?;
    let guest = image::ensure(&paths::guest_images(), &mut |line| println!("{line}"))?;
    let count = format!("-count={count}");
    // To vet, and to look at the format, belongs to every commit.
    let mut arguments = vec!["-vet=off", "-p=1", &count, PATIENCE];
    if verbose {
        arguments.push("-v");
    }
    if let Some(run) = run {
        arguments.extend(["-run", run]);
    }
    arguments.push("./...");
    let mut go = go_test(&arguments, tools, &dunlin);
    with_guest(&mut go, &guest);
    with_nodes(&mut go, tools)?;
    succeeds(go)
}

/// Returns the last lines.
fn demo(all: bool) -> Result<String> {
    let tools = tools::tools()?;
    let dunlin = cargo::build_dunlin(false)?;
    let guest = image::ensure(&paths::guest_images(), &mut |line| println!("{line}"))?;
    let parts = [
        ("TestANodeDiesAndClientsLoseNothing", "DUNLIN_DEMO_SAYS"),
        ("TestPersonsDrainChangeAndDelete", "DUNLIN_UPKEEP_SAYS"),
    ];
    let mut last = String::new();
    for (test, variable) in &parts[..if all { 2 } else { 1 }] {
        let says = paths::target().join("k8s-demo-says");
        fs::write(&says, "")?;
        let only = format!("^{test}$");
        let arguments = ["-vet=off", "-count=1", PATIENCE, "-run", &only, "-v", "./nodes"];
        let mut go = go_test(&arguments, &tools, &dunlin);
        with_guest(&mut go, &guest);
        with_nodes(&mut go, &tools)?;
        go.env(variable, &says);
        succeeds(go)?;
        let line = fs::read_to_string(&says)?;
        if line.is_empty() {
            bail!("{test} has ended, and says nothing");
        }
        last += &line;
    }
    Ok(last)
}

/// What real nodes need: a kubelet, a containerd, and images of what runs on them.
fn with_nodes(go: &mut Command, tools: &Path) -> Result<()> {
    tools::build("kubelet", tools)?;
    go.env("DUNLIN_IMAGES", images::make()?)
        .env("DUNLIN_VERSION", images::VERSION)
        .env("DUNLIN_CONTAINERD", images::containerd()?);
    Ok(())
}

/// What VMs and programs need: the redis guest, and what copies a running program.
fn with_guest(go: &mut Command, guest: &image::GuestImage) {
    go.env("DUNLIN_GUEST_KERNEL", &guest.kernel)
        .env("DUNLIN_GUEST_INITRD", &guest.initrd)
        .env("DUNLIN_GUEST_APPEND", &guest.append);
    if std::env::var_os("DUNLIN_CRIU").is_none() && paths::criu().exists() {
        go.env("DUNLIN_CRIU", paths::criu());
    }
}

fn scale(tools: &Path, nodes: u32, tasks: u32, courses: &[String]) -> Result<()> {
    let dunlin = cargo::build_dunlin(true)?;
    let arguments = ["-vet=off", "-count=1", SCALE_PATIENCE, "-v", "./scale"];
    let mut go = go_test(&arguments, tools, &dunlin);
    go.env("DUNLIN_SCALE_NODES", nodes.to_string())
        .env("DUNLIN_SCALE_TASKS", tasks.to_string())
        .env("DUNLIN_SCALE_COURSES", courses.join(","));
    succeeds(go)
}

/// What redis runs in where nothing is named, or why that cannot be.
fn figure_kinds(kinds: &[String], strength: u32) -> Result<String> {
    match strength {
        3 if kinds.iter().any(|kind| kind == "program") => {
            bail!("--strength 3 is of a VM: what a standby costs is not measured of a program")
        }
        3 => Ok("vm".to_owned()),
        _ if kinds.is_empty() => Ok("program,vm".to_owned()),
        _ => Ok(kinds.join(",")),
    }
}

fn figure(tools: &Path, kinds: &str, pairs: u32, requests: u32, strength: u32) -> Result<()> {
    let dunlin = cargo::build_dunlin(true)?;
    let guest = image::ensure(&paths::guest_images(), &mut |line| println!("{line}"))?;
    let arguments = [
        "-vet=off",
        "-count=1",
        SCALE_PATIENCE,
        "-run",
        "TestRedisWithCopiesBesideRedisAlone",
        "-v",
        "./operator",
    ];
    let mut go = go_test(&arguments, tools, &dunlin);
    with_guest(&mut go, &guest);
    go.env("DUNLIN_FIGURE_KINDS", kinds)
        .env("DUNLIN_FIGURE_STRENGTH", strength.to_string())
        .env("DUNLIN_FIGURE_PAIRS", pairs.to_string())
        .env("DUNLIN_FIGURE_REQUESTS", requests.to_string());
    succeeds(go)
}

fn go_test(arguments: &[&str], tools: &Path, dunlin: &Path) -> Command {
    let mut go = tools::go(MODULE, &[&["test"], arguments].concat());
    go.env("DUNLIN", dunlin).env("DUNLIN_KUBE_TOOLS", tools);
    go
}

/// What `cargo xtask test` runs: format, vet, and every test that needs no guest, with the race detector, also in the schedulers and operators that tests
/// start. Returns what was not run, each with its reason.
pub fn every_commit() -> Result<Vec<String>> {
    let begun = Instant::now();
    if let Some(why) = tools::go_is_too_old()? {
        return Ok(vec![format!("all of {MODULE}: {why}")]);
    }
    let tools = tools::tools()?;
    let dunlin = cargo::build_dunlin(false)?;
    let told = paths::target().join("skipped-kube-tests");
    fs::write(&told, "")?;
    for module in [images::MODULE, MODULE] {
        crate::go::format(&paths::workspace().join(module))?;
        succeeds(tools::go(module, &["vet", "./..."]))?;
    }
    succeeds(images::tests(&["-skip", images::IN_CONTAINERD]))?;
    let words = ["-vet=off", "-count=1", "-short", "-race", PATIENCE, "./..."];
    let mut go = go_test(&words, &tools, &dunlin);
    // The detector is in C.
    go.env("CGO_ENABLED", "1").env("DUNLIN_SKIPPED", &told);
    succeeds(go)?;
    println!(
        "xtask: {MODULE} was built and tested in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(fs::read_to_string(&told)?.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::figure_kinds;

    /// R = 3 is measured of a VM, named or not.
    #[test]
    fn a_standby_is_measured_of_a_vm() {
        let named = |kinds: &[&str], strength| {
            let kinds: Vec<String> = kinds.iter().map(|&kind| kind.to_owned()).collect();
            figure_kinds(&kinds, strength).map_err(|error| error.to_string())
        };
        assert_eq!(named(&[], 2).as_deref(), Ok("program,vm"));
        assert_eq!(named(&["vm"], 2).as_deref(), Ok("vm"));
        assert_eq!(named(&[], 3).as_deref(), Ok("vm"));
        assert_eq!(named(&["vm"], 3).as_deref(), Ok("vm"));
        let refused =
            named(&["vm", "program"], 3).expect_err("what a standby costs is not measured of a program");
        assert_eq!(
            refused,
            "--strength 3 is of a VM: what a standby costs is not measured of a program"
        );
    }
}
