//! `cargo xtask k8s images`: OCI images of what a cluster runs, without a registry and without a daemon (`k8s/images`, in Go).

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use dunlin_vmtest::{image, paths};

use super::tools::{self, go, succeeds};
use crate::{cargo, setup};

/// The Go module that makes them.
pub const MODULE: &str = "k8s/images";
/// The test that has containerd import and run them.
pub const IN_CONTAINERD: &str = "TestContainerdRunsThem";
/// The images' tag.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Modules, and the programs in them.
const PROGRAMS: [(&str, &str); 3] = [
    ("k8s", "dunlin-pause"),
    (tools::MODULE, "dunlin-operator"),
    (tools::MODULE, "dunlin-scheduler"),
];
/// What it says of Kubernetes when it is asked; without it, nothing that one could read.
const SCHEDULER_VERSION: &str = "k8s.io/component-base/version.gitVersion=v1.34.2-dunlin.";

/// Makes them, and has containerd run them if that is asked for.
///
/// # Errors
/// With the first command that failed.
pub fn run(check: bool) -> Result<()> {
    let images = make()?;
    if check {
        let tools = containerd()?;
        let mut go = tests(&["-count=1", "-v", "-run", IN_CONTAINERD]);
        go.env("DUNLIN_IMAGES", images).env("DUNLIN_CONTAINERD", tools);
        succeeds(go)?;
    }
    Ok(())
}

/// `go test` of the module, with these arguments.
pub fn tests(arguments: &[&str]) -> Command {
    go(MODULE, &[&["test"], arguments, &["./..."]].concat())
}

/// The folder of the archives.
pub fn make() -> Result<PathBuf> {
    let folder = paths::target().join("images");
    let flags = format!("-ldflags=-s -w -X main.version={VERSION} -X {SCHEDULER_VERSION}{VERSION}");
    let mut programs = Vec::new();
    for (module, name) in PROGRAMS {
        let path = folder.join("bin").join(name).to_string_lossy().into_owned();
        succeeds(go(
            module,
            &["build", &flags, "-o", &path, &format!("./cmd/{name}")],
        ))?;
        programs.push(path);
    }
    let commit = cargo::commit(&paths::workspace())?;
    let into = folder.to_string_lossy();
    let mut arguments = vec![
        "run",
        ".",
        "--into",
        &into,
        "--version",
        VERSION,
        "--revision",
        &commit,
    ];
    arguments.extend(programs.iter().map(String::as_str));
    succeeds(go(MODULE, &arguments))?;
    Ok(folder)
}

/// containerd, runc, and what gives Pods addresses: their packages are unpacked and not installed, since that would start a service. Returns the folder
/// with the programs.
pub fn containerd() -> Result<PathBuf> {
    setup::install(&[("libseccomp2", "what runc is linked with")])?;
    let all = paths::target().join("tools");
    for (package, program) in [
        ("containerd", "usr/bin/containerd"),
        ("runc", "usr/sbin/runc"),
        ("containernetworking-plugins", "usr/lib/cni/bridge"),
    ] {
        if !all.join(program).exists() {
            println!("k8s: will unpack {package}: nodes run images with it");
            image::unpack(package, &paths::guest_images(), &all)?;
        }
    }
    Ok(all.join("usr"))
}
