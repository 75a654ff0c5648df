//! A client that uploads far more than the agreed log has room for, into a protected and into an unprotected VM.
//!
//! * **Decides:** that the log is cut by bytes as well as by entries, wherever the VM's inputs are agreed: by syncs while it
//!   is protected, by what is applied while it is not. No value may be lost, and none may wait for ever.
//! * **Flow:** protected -> upload -> the backup's host killed -> upload -> the host returns -> protected -> the primary's
//!   host killed -> the last acknowledged value is there.
//! * **Invariants:** (1) no host's log ever holds more than its limit (asked of `status` all along); (2) bulk is no reason for
//!   an election, also beside busy loops: heartbeats do not wait behind it.

use dunlin_api::{EventKind, Reasons, Role};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use dunlin_api::files::{MemoryTable, VmFile};

use super::World;
use super::overload::Busy;
use crate::client::Upload;
use crate::cluster::{Cluster, HostStatus, VmPlan, VmStatus, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(120);
/// The longest that a value may take: a megabyte into two emulated guests on a busy machine, and a sync.
const GIVE_UP: Duration = Duration::from_secs(60);
/// A machine whose cores stand still for longer than `election_ms` costs an office, whatever is uploaded: then it is uploaded again, so often. One that
/// falls to bulk falls each time.
const UPLOADS: usize = 3;
/// The log's limit in this VM's file: small, so that a short upload exceeds it several times over.
const LOG_MIB: u64 = 8;
/// How often over.
const TIMES: u64 = 4;
/// Values between two looks at the logs.
const SOME: u64 = 2;

/// What an upload showed.
pub struct Outcome {
    /// While protected, and while not.
    pub uploaded_mib: [u64; 2],
    /// The log's limit.
    pub log_mib: u64,
    /// The most that any host's log held.
    pub peak_log_bytes: u64,
    /// The longest that a value took.
    pub longest_ms: u128,
}

/// Plays it; each upload takes at least so long, beside so many busy loops.
///
/// # Errors
/// When a value was lost or stuck, a log grew beyond its limit, or somebody was elected meanwhile; the daemons' logs are kept.
pub fn run(world: &World, at_least: Duration, loops: usize) -> Result<Outcome> {
    in_a_testbed(
        "long-upload",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| play(cluster, world, at_least, loops),
    )
}

fn play(cluster: &mut Cluster<'_>, world: &World, at_least: Duration, loops: usize) -> Result<Outcome> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        file: VmFile {
            memory: MemoryTable {
                log_mib: LOG_MIB as usize,
                ..MemoryTable::default()
            },
            ..VmPlan::file()
        },
        ..VmPlan::redis("dunlin")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, service(), PATIENCE)?;
    let mut peak = 0;
    cluster.await_protected(&plan.name, PATIENCE)?;
    let busy = Busy::start(loops);
    let first = upload_calmly(cluster, &plan, true, at_least, &mut peak).context("into a protected VM")?;
    let (primary, backup) = cluster.await_protected(&plan.name, PATIENCE)?;
    let asked = reason(&cluster.status(&primary)?, &plan.name, |reasons| reasons.memory);
    ensure!(asked > 0, "no sync was made because the log was half full");
    cluster.kill_host(&backup)?;
    cluster.await_status("an unprotected primary", PATIENCE, |hosts| {
        let mut vms = hosts.iter().filter_map(|host| host.vm(&plan.name));
        vms.any(|vm| vm.role == Role::Primary && !vm.protected)
            .then_some(())
    })?;
    let second = upload_calmly(cluster, &plan, false, at_least, &mut peak);
    let mut second = second.context("into an unprotected VM")?;
    drop(busy);
    cluster.start_host(&backup)?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.kill_host(&primary)?;
    cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    second.check().context("after the primary's death")?;
    cluster.start_host(&primary)?;
    cluster.end("c", &plan.name)?;
    let uploads = [first, second];
    Ok(Outcome {
        uploaded_mib: uploads.each_ref().map(|upload| upload.bytes() >> 20),
        log_mib: LOG_MIB,
        peak_log_bytes: peak,
        longest_ms: uploads
            .iter()
            .map(|upload| upload.longest.as_millis())
            .max()
            .unwrap_or(0),
    })
}

/// An upload during which nobody was elected.
fn upload_calmly(
    cluster: &Cluster<'_>,
    plan: &VmPlan,
    is_protected: bool,
    at_least: Duration,
    peak: &mut u64,
) -> Result<Upload> {
    let mut elections = Vec::new();
    while elections.len() < UPLOADS {
        // An election may have cost a backup that it had.
        if is_protected {
            cluster.await_protected(&plan.name, PATIENCE)?;
        }
        let (upload, elected) = upload(cluster, plan, at_least, peak)?;
        if elected == 0 {
            return Ok(upload);
        }
        elections.push(elected);
    }
    bail!("{elections:?} elections without a death in so many uploads")
}

/// Uploads until the log's limit was exceeded several times over, and at least so long. The last value is there. And how many elections there were.
fn upload(
    cluster: &Cluster<'_>,
    plan: &VmPlan,
    at_least: Duration,
    peak: &mut u64,
) -> Result<(Upload, usize)> {
    let (begun, begun_at, to) = (Instant::now(), SystemTime::now(), plan.service());
    let client = cluster.testbed().node("client");
    let opened = client.spawn("upload", move || Upload::open(to, GIVE_UP))?.join();
    let mut upload = opened.map_err(|_| anyhow!("the upload's thread panicked"))???;
    while upload.bytes() < (TIMES * LOG_MIB) << 20 || begun.elapsed() < at_least {
        for _ in 0..SOME {
            upload.put()?;
        }
        for status in cluster.statuses() {
            let Some(vm) = status.vm(&plan.name) else { continue };
            let (bytes, limit) =
                log(vm).with_context(|| format!("no figures of host {}'s log", status.host))?;
            *peak = bytes.max(*peak);
            // A follower cuts a little later than its leader.
            ensure!(
                bytes <= 2 * limit && limit >= LOG_MIB << 20,
                "host {}'s log holds {bytes} bytes, and its limit is {limit}",
                status.host
            );
        }
    }
    upload.check()?;
    let events = cluster.logged()?;
    let elected = events
        .iter()
        .filter(|event| event.kind == EventKind::Elected && event.at > begun_at);
    Ok((upload, elected.count()))
}

/// What a log holds, and what it may hold.
fn log(vm: &VmStatus) -> Option<(u64, u64)> {
    let log = vm.queues.iter().find(|queue| queue.name == "log")?;
    Some((log.bytes, log.limit_bytes))
}

fn reason(status: &HostStatus, vm: &str, of: fn(&Reasons) -> u64) -> u64 {
    status.vm(vm).map_or(0, |vm| of(&vm.sync.reasons))
}
