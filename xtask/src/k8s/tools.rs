//! What the tests at a real control plane need: Go, etcd (Debian's package, unpacked and not installed), and kube-apiserver and kubectl, which are built from the
//! module that `k8s/kube/go.mod` names. All of it is kept under `target/tools`, by content.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::{image, paths};
use sha2::{Digest, Sha256};

/// Where the Go module is that needs Kubernetes' own.
pub const MODULE: &str = "k8s/kube";
/// The first Go that builds Kubernetes, as (major, minor).
const OLDEST_GO: (u32, u32) = (1, 24);
/// The same for all that is built, so that what server, programs and tests are made of is compiled once. The tree's own version control is none of Go's
/// business.
pub const FLAGS: &str = "-buildvcs=false -trimpath";

/// `go` in a module. What it builds is static, as programs in an image have to be.
pub fn go(module: &str, arguments: &[&str]) -> Command {
    println!("xtask: go {} in {module}", arguments.join(" "));
    let mut go = Command::new("go");
    go.args(arguments)
        .current_dir(paths::workspace().join(module))
        .env("GOFLAGS", FLAGS)
        .env("CGO_ENABLED", "0");
    go
}

/// Runs it; it fails with its command line.
pub fn succeeds(mut go: Command) -> Result<()> {
    if !go
        .status()
        .context("go is not here: 'cargo xtask setup' installs it")?
        .success()
    {
        let words: Vec<_> = go.get_args().map(std::ffi::OsStr::to_string_lossy).collect();
        bail!("failed: go {}", words.join(" "));
    }
    Ok(())
}

/// Why this machine's Go does not build Kubernetes, if it does not: Debian 12 has an older one.
pub fn go_is_too_old() -> Result<Option<String>> {
    let text = go_output(&["env", "GOVERSION"])?;
    let text = text.trim();
    let mut numbers = text.trim_start_matches("go").split('.').map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => bail!("cannot read the version of Go: {text}"),
    };
    let (major, minor) = OLDEST_GO;
    Ok((version < OLDEST_GO).then(|| {
        format!("Kubernetes needs Go {major}.{minor} and this is {text}: take one from https://go.dev/dl or Debian 13")
    }))
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

/// The folder with etcd, kube-apiserver and kubectl. Its name is made of all that the server is built from.
pub fn tools() -> Result<PathBuf> {
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
    for program in ["kube-apiserver", "kubectl"] {
        build(program, &folder)?;
    }
    Ok(folder)
}

/// Has a program of Kubernetes' own in that folder.
pub fn build(program: &str, folder: &Path) -> Result<()> {
    let built = folder.join(program);
    if built.is_file() {
        return Ok(());
    }
    println!("k8s: building {program}");
    let begun = Instant::now();
    // One that was begun and not ended has no name that counts.
    let half_made = folder.join(format!("making-{}", std::process::id()));
    let half = half_made.to_string_lossy();
    let package = format!("k8s.io/kubernetes/cmd/{program}");
    let made = succeeds(go(MODULE, &["build", "-ldflags=-s -w", "-o", &half, &package]));
    if made.is_err() {
        let _ = fs::remove_file(&half_made);
    }
    made.with_context(|| format!("{program} could not be built"))?;
    fs::rename(&half_made, &built)?;
    println!(
        "k8s: {program} was built in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
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
