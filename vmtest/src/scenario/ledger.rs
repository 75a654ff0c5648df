//! The ledger: a database on a replicated disk, clients that move money, and the primary's host killed again and again.
//!
//! * **Decides:** what passes: no commit lost that a client was told of, every balance right, PostgreSQL's own `pg_amcheck`
//!   content with every table and index, the two hosts' images equal after each re-protection.
//! * **Flow:** VM up and protected -> clients -> (SIGKILL to the primary's whole host -> take-over -> commits go on -> the host
//!   returns -> protected -> `dunlin verify-disk`), as often as asked for -> the ledger is read and compared.
//! * **Invariants:** the clients write from before the first kill until after the last; they keep their connections.
//! * **Source:** GANNET VII-D does this with two kills; PostgreSQL's documentation of `pg_amcheck`.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dunlin_api::files::{SyncTable, VmFile};
use serde::Serialize;

use super::run::no_oops;
use crate::client::Boots;
use crate::client::ledger::{self, Ledger, LedgerReport};
use crate::cluster::{Cluster, VmPlan, in_a_testbed};
use crate::demo;
use crate::image::{self, GuestImage};
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(150);
/// Commits before and after each kill.
const COMMITS: u64 = 40;
const SERVICE: &str = "postgresql";

/// What to play with.
#[derive(Clone, Debug)]
pub struct LedgerSpec {
    /// The executable.
    pub dunlin: std::path::PathBuf,
    /// PostgreSQL's guest.
    pub image: GuestImage,
    /// Where `pg_amcheck` is: a Debian tree.
    pub clients: std::path::PathBuf,
    /// How often the primary's host dies.
    pub kills: u32,
    /// Clients.
    pub connections: u64,
    /// `gannet`, `colo` or `sync`.
    pub storage: String,
    /// Size of the disk.
    pub disk_mib: u64,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct LedgerOutcome {
    /// How often a host died.
    pub kills: u32,
    /// What the ledger says.
    pub ledger: LedgerReport,
    /// The longest time that any client had no commit around each kill, in milliseconds.
    pub gaps_ms: Vec<u64>,
    /// From the host's return until protected again, in milliseconds.
    pub reprotected_ms: Vec<u64>,
    /// How often both images were compared and equal.
    pub equal_images: u32,
    /// How often a comparison was begun again because a busy host had been taken for dead.
    pub moves: u32,
    /// What `pg_amcheck` said.
    pub amcheck: String,
}

/// Plays it in a testbed of its own. `say` gets a line for each kill.
///
/// # Errors
/// When anything is not as it should be; the daemons' logs are kept, and the error says where.
pub fn run(spec: &LedgerSpec, say: &mut dyn FnMut(&str)) -> Result<LedgerOutcome> {
    in_a_testbed("ledger", &TestbedSpec::three_hosts(), &spec.dunlin, |cluster| {
        play(cluster, spec, say)
    })
}

fn play(cluster: &mut Cluster<'_>, spec: &LedgerSpec, say: &mut dyn FnMut(&str)) -> Result<LedgerOutcome> {
    let testbed = cluster.testbed();
    cluster.start_hosts()?;
    let service = image::service(SERVICE)?;
    let plan = VmPlan {
        name: "ledger".to_owned(),
        memory_mib: service.memory_mib,
        disk_mib: Some(spec.disk_mib),
        file: VmFile {
            storage: spec.storage.clone(),
            sync: SyncTable {
                // A database that starts writes much of its memory while the first copy of it is made.
                staging_mib: 768,
                ..SyncTable::default()
            },
            ..VmPlan::file()
        },
        ..VmPlan::redis("plover")
    };
    let file = plan.write(testbed, &spec.image)?;
    cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
    let client = testbed.node("client");
    let target = SocketAddr::new(demo::service().ip(), service.port);
    ledger::set_up(client, target, PATIENCE)?;
    let (mut primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let load = Ledger::start(client, target, spec.connections, PATIENCE, &Boots::never())?;
    load.await_more(COMMITS, PATIENCE)?;
    say(&format!(
        "ledger: {} clients write, storage {}, {primary} is the primary",
        spec.connections, spec.storage
    ));
    let (mut moments, mut reprotected_ms, mut equal_images, mut moves) = (Vec::new(), Vec::new(), 0, 0);
    for kill in 1..=spec.kills {
        let (before, killed_at) = (load.told(), Instant::now());
        cluster.kill_host(&primary)?;
        load.await_more(COMMITS, PATIENCE)
            .with_context(|| format!("after kill {kill}, of host {primary}"))?;
        moments.push((killed_at, Instant::now()));
        let (next, _) = cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
        let died = std::mem::replace(&mut primary, next);
        let returned = Instant::now();
        cluster.start_host(&died)?;
        cluster
            .await_protected(&plan.name, PATIENCE)
            .with_context(|| format!("after kill {kill}, of host {died}"))?;
        let took = returned.elapsed();
        reprotected_ms.push(millis(took));
        load.await_more(COMMITS, PATIENCE)?;
        let moved;
        (primary, moved) =
            equal_images_on(cluster, &plan.name).with_context(|| format!("after kill {kill}"))?;
        moves += moved;
        equal_images += 1;
        say(&format!(
            "ledger: kill {kill}: {died} died after {before} commits, protected again after {:.1} s, images equal, {primary} serves",
            took.as_secs_f64()
        ));
    }
    load.await_more(COMMITS, PATIENCE)?;
    let (ledger, times) = load.finish(client)?;
    let gaps_ms = moments
        .iter()
        .map(|&(from, to)| longest_gap_ms(&times, from, to))
        .collect();
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let amcheck = amcheck(client, &spec.clients, target)?;
    no_oops(testbed)?;
    cluster.end(&primary, &plan.name)?;
    ensure!(ledger.is_clean(), "the ledger is not right: {ledger:?}");
    Ok(LedgerOutcome {
        kills: spec.kills,
        ledger,
        gaps_ms,
        reprotected_ms,
        equal_images,
        moves,
        amcheck,
    })
}

/// Compares both images while the VM runs. Where two cores play three hosts, a busy host may be taken for dead in the middle of
/// it: then the VM is protected again first, and the comparison is made once more. Returns who serves, and how often it was so.
pub(crate) fn equal_images_on(cluster: &Cluster<'_>, vm: &str) -> Result<(String, u32)> {
    for moved in 0..8 {
        let (primary, _) = cluster.await_protected(vm, PATIENCE)?;
        let output = cluster.output(&primary, &["verify-disk", vm])?;
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => {
                ensure!(said.contains("the disks are equal"), "verify-disk said: {said}");
                return Ok((primary, moved));
            }
            Some(1) => {}
            _ => bail!("verify-disk: {said}"),
        }
    }
    bail!("the VM never kept its hosts for as long as a comparison takes")
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn longest_gap_ms(times: &[Vec<Instant>], from: Instant, to: Instant) -> u64 {
    let pairs = times.iter().flat_map(|times| times.windows(2));
    pairs
        .filter(|pair| pair[1] >= from && pair[0] <= to)
        .map(|pair| millis(pair[1] - pair[0]))
        .max()
        .unwrap_or(0)
}

/// Every table and index of the database, pages and order, and that each row is in its indexes.
fn amcheck(client: &crate::testbed::Node, tree: &Path, target: SocketAddr) -> Result<String> {
    let bin = tree.join("usr/lib/postgresql/15/bin/pg_amcheck");
    let output = client
        .command(&bin)?
        .env("LD_LIBRARY_PATH", tree.join("usr/lib/x86_64-linux-gnu"))
        .args([
            "--host",
            &target.ip().to_string(),
            "--port",
            &target.port().to_string(),
        ])
        .args([
            "--username",
            "service",
            "--heapallindexed",
            "--rootdescend",
            "--verbose",
            "bench",
        ])
        .output()
        .with_context(|| format!("cannot run {}", bin.display()))?;
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pg_amcheck found: {said}");
    let checked = said.lines().filter(|line| line.contains("checking ")).count();
    ensure!(checked > 10, "pg_amcheck looked at {checked} relations: {said}");
    Ok(format!("{checked} relations checked, no fault"))
}
