//! What it decides: how the rivals are started and asked, each in the way its own makers would.
//!
//! * **Flow:** etcd (Debian's `etcd`, three nodes, our Go client under `bench/rivals/etcd`) and dragonboat v3 (three processes of
//!   our small program under `bench/rivals/dragonboat`), each on disk and on a tmpfs. **Invariants:** (1) what is missing is said,
//!   with what to install. **Not here:** tuning beyond heartbeats: defaults, as a user meets them.

use super::child::{Running, Scratch};
use super::{Figure, Series};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// All rivals' series, or why there is none.
pub(super) fn all(scratch: &Scratch, seconds: f64) -> Vec<Result<Series>> {
    let memory = Path::new("/dev/shm").join(format!("dunlin-bench-{}", std::process::id()));
    let mut all = Vec::new();
    for (where_, tmpfs) in [("disk", false), ("tmpfs", true)] {
        let dir = |name: &str| -> Result<PathBuf> {
            if !tmpfs {
                return scratch.sub(name);
            }
            let dir = memory.join(name);
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).context("a directory in /dev/shm")?;
            Ok(dir)
        };
        all.push(dir("dragonboat").and_then(|d| dragonboat(&d, where_, seconds)));
        all.push(dir("etcd").and_then(|d| etcd(&d, where_, seconds)));
    }
    let _ = std::fs::remove_dir_all(memory);
    all
}

/// Builds one of our Go programs.
fn go(name: &str) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../bench/rivals")
        .join(name);
    let out = std::env::temp_dir().join(format!("dunlin-rival-{name}-{}", std::process::id()));
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&out)
        .arg(".")
        .current_dir(&source)
        .output();
    let built = built
        .with_context(|| format!("{name}: no Go compiler: install Go 1.20 or newer to compare with it"))?;
    if !built.status.success() {
        bail!(
            "{name}: go build failed: {}",
            String::from_utf8_lossy(&built.stderr).trim()
        );
    }
    Ok(out)
}

fn ports<const N: usize>() -> Result<[u16; N]> {
    let listeners: Vec<_> = (0..N)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<std::io::Result<_>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

fn read(name: &str, child: std::process::Child) -> Result<Vec<Figure>> {
    let mut running = Running(child);
    let out = running.0.stdout.take().context("the output")?;
    let figures: Vec<Figure> = (BufReader::new(out).lines().map_while(Result::ok))
        .filter_map(|line| serde_json::from_str(&line).ok())
        .take(9)
        .filter(|f: &Figure| f.per_s > 0.0)
        .collect();
    if figures.is_empty() {
        bail!("{name}: it printed no figures");
    }
    Ok(figures)
}

fn dragonboat(dir: &Path, place: &str, seconds: f64) -> Result<Series> {
    let program = go("dragonboat")?;
    let ports = ports::<3>()?.map(|p| p.to_string()).join(",");
    let child = Command::new(&program)
        .args([
            "-dir",
            &dir.display().to_string(),
            "-ports",
            &ports,
            "-seconds",
            &seconds.to_string(),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .current_dir(dir)
        .spawn()
        .context("dragonboat: starting it")?;
    let figures = read("dragonboat", child);
    let _ = std::fs::remove_file(program);
    Ok(Series {
        what: format!("dragonboat {place}"),
        wait: "Go's".into(),
        figures: figures?,
    })
}

fn etcd(dir: &Path, place: &str, seconds: f64) -> Result<Series> {
    let program = go("etcd")?;
    let (clients, peers) = (ports::<3>()?, ports::<3>()?);
    let cluster = (0..3)
        .map(|i| format!("n{i}=http://127.0.0.1:{}", peers[i]))
        .collect::<Vec<_>>()
        .join(",");
    let mut nodes = Vec::new();
    for i in 0..3 {
        let (client, peer) = (
            format!("http://127.0.0.1:{}", clients[i]),
            format!("http://127.0.0.1:{}", peers[i]),
        );
        let mut command = Command::new("etcd");
        command.args([
            "--name",
            &format!("n{i}"),
            "--data-dir",
            &dir.join(i.to_string()).display().to_string(),
        ]);
        command.args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ]);
        command.args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ]);
        command.args([
            "--initial-cluster",
            &cluster,
            "--initial-cluster-state",
            "new",
            "--log-level",
            "error",
        ]);
        let node = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        nodes.push(Running(
            node.context("etcd: not installed (Debian: etcd-server)")?,
        ));
    }
    let endpoints = clients.map(|p| format!("127.0.0.1:{p}")).join(",");
    let child = Command::new(&program)
        .args(["-endpoints", &endpoints, "-seconds", &seconds.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("etcd's client: starting it")?;
    let figures = read("etcd", child);
    let _ = std::fs::remove_file(program);
    Ok(Series {
        what: format!("etcd {place}"),
        wait: "Go's".into(),
        figures: figures?,
    })
}
