//! `cargo xtask k8s`: Dunlin's resources, scheduler and operator against a real control plane of Kubernetes: etcd is Debian's package, unpacked and not
//! installed; kube-apiserver is built from the module that `k8s/kube/go.mod` names. Both are kept under `target/tools`, by content. The operator's
//! tests run the redis guest under QEMU's translator, and redis as a bare program, which CRIU copies.
//!
//! Not here: what needs no control plane (`go.rs`, a part of `verify`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::{image, paths};
use sha2::{Digest, Sha256};

use crate::{cargo, setup};

/// Where the Go module is that needs Kubernetes' own.
const MODULE: &str = "k8s/kube";
/// The first Go that builds Kubernetes, as (major, minor).
const OLDEST_GO: (u32, u32) = (1, 24);
/// The same for the server and the tests, so that what both are made of is compiled once. The tree's own version control is none of Go's business.
const FLAGS: &str = "-buildvcs=false -trimpath";
/// No test of the module takes longer, on a machine however busy.
const PATIENCE: &str = "-timeout=20m";
/// The same of what is measured with as many nodes and tasks as somebody asks for.
const SCALE_PATIENCE: &str = "-timeout=3h";

/// Dunlin on Kubernetes: resources, scheduler and operator, with a real API server.
#[derive(clap::Subcommand)]
pub enum K8s {
    /// Build kube-apiserver (once, several minutes) and run every test that talks to one.
    Test {
        /// Only tests whose names match this regular expression.
        #[arg(long, value_name = "REGEX")]
        run: Option<String>,
        /// Show what the tests say.
        #[arg(long, short)]
        verbose: bool,
        /// How often each test runs.
        #[arg(long, default_value_t = 1)]
        count: u32,
    },
    /// Measure how many Pods a second are bound, and how long each waits, beside the plain kube-scheduler in the same run.
    Scale {
        /// Nodes, which are objects: nothing runs on them.
        #[arg(long, default_value_t = 1000)]
        nodes: u32,
        /// Tasks of each course, with one to three Pods each.
        #[arg(long, default_value_t = 5000)]
        tasks: u32,
        /// What to measure between two courses of the plain kube-scheduler: tasks with R = 1, R = 3, or from 1 to 3; all of it, if it is left out.
        #[arg(long = "course", value_name = "COURSE", value_parser = ["single", "triple", "mixed"])]
        courses: Vec<String>,
    },
    /// Measure redis with copies beside redis alone, both placed by the same scheduler: throughput and response time, as in TRIPOD's own figure.
    Figure {
        /// What redis runs in; both, if it is left out.
        #[arg(long = "kind", value_name = "KIND", value_parser = ["program", "vm"])]
        kinds: Vec<String>,
        /// Pairs of windows, one with copies and one without, for each number of connections.
        #[arg(long, default_value_t = 5)]
        pairs: u32,
        /// Requests of a window with 50 connections; with one it is a tenth.
        #[arg(long, default_value_t = 20_000)]
        requests: u32,
    },
}

/// Runs it.
///
/// # Errors
/// With the first command that failed, or what this machine lacks.
pub fn run(task: &K8s) -> Result<()> {
    let begun = Instant::now();
    setup::run()?;
    go_is_new_enough()?;
    let tools = tools()?;
    let what = match task {
        K8s::Test { run, verbose, count } => {
            test(&tools, run.as_deref(), *verbose, *count)?;
            "test"
        }
        K8s::Scale {
            nodes,
            tasks,
            courses,
        } => {
            scale(&tools, *nodes, *tasks, courses)?;
            "scale"
        }
        K8s::Figure {
            kinds,
            pairs,
            requests,
        } => {
            figure(&tools, kinds, *pairs, *requests)?;
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
    crate::go::format(&paths::workspace().join(MODULE))?;
    let count = format!("-count={count}");
    // To vet is to look at all that is imported, too: the whole of Kubernetes.
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
    succeeds(go)
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

fn figure(tools: &Path, kinds: &[String], pairs: u32, requests: u32) -> Result<()> {
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
    let kinds = if kinds.is_empty() {
        "program,vm".to_owned()
    } else {
        kinds.join(",")
    };
    go.env("DUNLIN_FIGURE_KINDS", kinds)
        .env("DUNLIN_FIGURE_PAIRS", pairs.to_string())
        .env("DUNLIN_FIGURE_REQUESTS", requests.to_string());
    succeeds(go)
}

fn go_test(arguments: &[&str], tools: &Path, dunlin: &Path) -> Command {
    println!("xtask: go test {} in {MODULE}", arguments.join(" "));
    let mut go = Command::new("go");
    go.arg("test")
        .args(arguments)
        .current_dir(paths::workspace().join(MODULE))
        .env("DUNLIN", dunlin)
        .env("DUNLIN_KUBE_TOOLS", tools)
        .env("GOFLAGS", FLAGS);
    go
}

fn succeeds(mut go: Command) -> Result<()> {
    if !go.status()?.success() {
        bail!("failed: go test in {MODULE}");
    }
    Ok(())
}

/// Debian 12 has an older one.
fn go_is_new_enough() -> Result<()> {
    let text = go_output(&["env", "GOVERSION"])?;
    let mut numbers = text
        .trim()
        .trim_start_matches("go")
        .split('.')
        .map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => bail!("cannot read the version of Go: {}", text.trim()),
    };
    if version < OLDEST_GO {
        bail!(
            "Kubernetes needs Go {}.{} and this is {}: take one from https://go.dev/dl or Debian 13",
            OLDEST_GO.0,
            OLDEST_GO.1,
            text.trim()
        );
    }
    Ok(())
}

fn go_output(arguments: &[&str]) -> Result<String> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(paths::workspace().join(MODULE))
        .env("GOTOOLCHAIN", "local")
        .output()
        .context("go is not here: 'cargo xtask setup' installs it")?;
    if !output.status.success() {
        bail!(
            "go {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The folder with etcd and kube-apiserver. Its name is made of all that the server is built from.
fn tools() -> Result<PathBuf> {
    let all = paths::target().join("tools");
    let module = paths::workspace().join(MODULE);
    let mut hash = Sha256::new();
    for file in ["go.mod", "go.sum"] {
        hash.update(fs::read(module.join(file))?);
    }
    hash.update(go_output(&["version"])?);
    let sum = hash.finalize();
    let key: String = sum.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let folder = all.join(format!("kubernetes-{key}"));
    fs::create_dir_all(&folder)?;
    etcd(&all, &folder)?;
    let server = folder.join("kube-apiserver");
    if server.is_file() {
        return Ok(folder);
    }
    println!("k8s: building kube-apiserver");
    let begun = Instant::now();
    // One that was begun and not ended has no name that counts.
    let half_made = folder.join(format!("making-{}", std::process::id()));
    let status = Command::new("go")
        .args(["build", "-ldflags=-s -w", "-o"])
        .arg(&half_made)
        .arg("k8s.io/kubernetes/cmd/kube-apiserver")
        .current_dir(&module)
        .env("GOFLAGS", FLAGS)
        .status()?;
    if !status.success() {
        let _ = fs::remove_file(&half_made);
        bail!("kube-apiserver could not be built");
    }
    fs::rename(&half_made, &server)?;
    println!(
        "k8s: kube-apiserver was built in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(folder)
}

/// Its package is unpacked and not installed, since that would start a server.
fn etcd(all: &Path, folder: &Path) -> Result<()> {
    let unpacked = all.join("usr/bin/etcd");
    if !unpacked.exists() {
        println!("k8s: will unpack etcd-server: what Kubernetes keeps its objects in");
        image::unpack("etcd-server", &paths::guest_images(), all)?;
    }
    let linked = folder.join("etcd");
    if !linked.exists() {
        let _ = fs::remove_file(&linked);
        std::os::unix::fs::symlink("../usr/bin/etcd", &linked)?;
    }
    Ok(())
}
