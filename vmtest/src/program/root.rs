//! A program with a root directory of its own: it sees nothing of its host, and is kept alive as any other.
//!
//! * **Decides:** what passes: no file of the host's is there; it survives its host, gets a copy by CRIU, and survives the other host.
//! * **Flow:** redis and busybox with their libraries, and nothing else, in a directory -> `root` of both copies.
//! * **Not here:** how a view is put together (`dunlin_program`'s `inside::view`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, REDIS, count, down, path, up, whole};
use crate::cluster::Cluster;

const SERVER: &str = "/bin/redis-server";
const SHELL: &str = "/bin/busybox";

/// What is in it, with what the view itself brings.
const SEEN: [&str; 9] = ["bin", "dev", "lib", "lib64", "proc", "run", "sys", "tmp", "usr"];

/// Puts an executable there, with the libraries that it is linked to.
fn put(root: &Path, from: &str, to: &str) -> Result<()> {
    let place = |at: &Path| -> Result<PathBuf> {
        let place = root.join(at.strip_prefix("/")?);
        fs::create_dir_all(place.parent().context("a folder")?)?;
        Ok(place)
    };
    fs::copy(from, place(Path::new(to))?)?;
    let said = Command::new("ldd").arg(from).output().context("ldd")?.stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    // One that is static has none.
    for library in said.split_whitespace().filter(|word| word.starts_with('/')) {
        fs::copy(library, place(Path::new(library))?).with_context(|| library.to_owned())?;
    }
    Ok(())
}

pub(super) fn is_its_own(cluster: &mut Cluster<'_>) -> Result<()> {
    let root = cluster.testbed().dir().join("a-root");
    fs::create_dir_all(&root)?;
    let mut plan = Plan::redis(cluster.testbed())?;
    SERVER.clone_into(&mut plan.command[0]);
    plan.lines.push(format!("root = {root:?}"));
    let refused = cluster.output("a", &["up", path(&plan.write(cluster.testbed())?)?])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        refused.status.code() == Some(2)
            && said.lines().count() == 1
            && said.contains(&format!("{SERVER} in {}", root.display())),
        "a root without the program: {:?}: {said}",
        refused.status
    );
    put(&root, REDIS, SERVER)?;
    put(&root, "/bin/busybox", SHELL)?;
    let (primary, backup) = up(cluster, &plan)?;
    for host in [&primary, &backup] {
        let shown = cluster.output(host, &["exec", "--quiet", NAME, "--", SHELL, "ls", "/"])?;
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        let names: BTreeSet<&str> = shown.split_whitespace().collect();
        ensure!(
            !names.is_empty() && names.iter().all(|name| SEEN.contains(name)),
            "on host {host}: {names:?}"
        );
        let host_file = cluster.output(
            host,
            &["exec", "--quiet", NAME, "--", SHELL, "cat", "/etc/passwd"],
        )?;
        ensure!(
            host_file.status.code() == Some(1),
            "a file of host {host}: {host_file:?}"
        );
    }
    let counter = count(cluster, CONNECTIONS)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (primary, backup) = whole(cluster)?;
    cluster.kill_host(&primary)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the first kill")?;
    cluster.start_host(&primary)?;
    cluster
        .await_protected(NAME, PATIENCE)
        .context("a copy in the same root")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    whole(cluster)?;
    cluster.kill_host(&backup)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the second kill")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.start_host(&backup)?;
    let written = fs::read_dir(&root)?.flatten().count();
    ensure!(
        written <= 4,
        "a copy has written to its host's directory: {written} names"
    );
    down(cluster, "c")
}
