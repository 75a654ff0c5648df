//! A program's parts go to hosts of other names while it runs (`dunlin move`), or to a new machine of the same name (`dunlin replace`).
//!
//! * **Decides:** what passes: nothing lost whoever dies afterwards, and the old host has nothing left, also where it was dead meanwhile.
//! * **Flow:** load on a and b, with witness c -> a host dies, or lives -> its part goes to d or e, said on a host that does not serve -> the status
//!   names that one -> the next death of the primary -> the old host has let go.
//! * **Not here:** VMs that move ([`crate::scenario`]).

use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, bail, ensure};
use dunlin_api::{EventKind, HostStatus, Role};
use nix::sys::signal::Signal;

use super::stories::await_alone;
use super::{ACKNOWLEDGED, CONNECTIONS, MAC, NAME, PATIENCE, Plan, count, data, down, up, whole};
use crate::client::Counter;
use crate::cluster::Cluster;
use crate::scenario::campaign::speaker::{OneSpeaker, Queue, take_overs};
use crate::testbed::{Capture, TestbedSpec};

/// Five hosts, two of which have no part at first.
pub(super) fn five_hosts() -> TestbedSpec {
    TestbedSpec {
        hosts: ["a", "b", "c", "d", "e"].map(str::to_owned).to_vec(),
        ..TestbedSpec::three_hosts()
    }
}

/// The backup's host is dead: another one gets its part, and is the primary when the old one dies. The dead host comes back, and lets go.
pub(super) fn dead_backup(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup, counter) = begin(cluster, &Plan::redis(cluster.testbed())?)?;
    cluster.kill_host(&backup)?;
    await_alone(cluster, &primary)?;
    move_backup(cluster, "c", "d", &[])?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    dies(cluster, &primary, &counter)?;
    // It is told by who leads now, and has only heard of the old hosts.
    cluster.start_host(&backup)?;
    await_gone(cluster, &backup)?;
    cluster.start_host(&primary)?;
    let (serves, follows) = cluster.await_protected(NAME, PATIENCE)?;
    ensure!(
        ["d", &*primary]
            .iter()
            .all(|host| [&*serves, &*follows].contains(host)),
        "{serves} serves with {follows}"
    );
    dies(cluster, "d", &counter)?;
    finish(cluster, counter, "c")
}

/// A standby that was named while the program runs gets a dead host's part without a person, and the host that was dead is the standby when it is back: it gets
/// the next one's part.
pub(super) fn standby(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan {
        // Longer than a host that lives is silent on a busy machine.
        standby_after: Some("5s"),
        ..Plan::redis(cluster.testbed())?
    };
    let (primary, backup, counter) = begin(cluster, &plan)?;
    // Host e cannot be it: nothing could be copied there.
    cluster.stop_host("e", Signal::SIGTERM)?;
    cluster.lacks_criu("e");
    cluster.start_host("e")?;
    refused(
        cluster,
        "a",
        &["--standby", "e"],
        "host 'e': CRIU is not on this host",
    )?;
    cluster.order(&primary, &["move", NAME, "--standby", "d"])?;
    await_standby(cluster, &primary, "d")?;
    cluster.kill_host(&backup)?;
    await_backup(cluster, &primary, "d")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    await_standby(cluster, &primary, &backup)?;
    cluster.start_host(&backup)?;
    await_gone(cluster, &backup)?;
    // Of the first two hosts' copies the second one dies too, and the one that was dead first follows it.
    dies(cluster, &primary, &counter)?;
    await_backup(cluster, "d", &backup)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    cluster.start_host(&primary)?;
    await_gone(cluster, &primary)?;
    cluster.await_protected(NAME, PATIENCE)?;
    cluster.order("d", &["move", NAME, "--no-standby"])?;
    dies(cluster, "d", &counter)?;
    finish(cluster, counter, "c")
}

/// The backup's host stands still while another one gets its part, then the witness's. Each comes back with what it knew, the backup with a copy that runs,
/// and lets go.
pub(super) fn sleeping_hosts(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup, counter) = begin(cluster, &Plan::redis(cluster.testbed())?)?;
    cluster.freeze(&backup)?;
    await_alone(cluster, &primary)?;
    move_backup(cluster, "c", "d", &[])?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    cluster.thaw(&backup);
    cluster.freeze("c")?;
    move_witness(cluster, &primary, "e")?;
    await_gone(cluster, &backup)?;
    dies(cluster, &primary, &counter)?;
    cluster.thaw("c");
    await_gone(cluster, "c")?;
    cluster.start_host(&primary)?;
    cluster.await_protected(NAME, PATIENCE)?;
    dies(cluster, "d", &counter)?;
    finish(cluster, counter, "e")
}

/// The primary's host stands still, the backup serves, and another host gets the part of the one that sleeps. That one comes back as who serves, in a group
/// whose hosts talk to it no more: it does not speak, and lets go.
pub(super) fn sleeping_primary(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup, counter) = begin(cluster, &Plan::redis(cluster.testbed())?)?;
    let capture = Capture::start(cluster.testbed(), MAC)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let mut one_speaker = OneSpeaker::default();
    let mut judge = |cluster: &Cluster<'_>, queues: &[Queue]| {
        let heard = capture.heard().spoken;
        ensure!(!heard.is_empty(), "nobody was heard at the switch");
        one_speaker
            .judge(&heard, &take_overs(cluster)?, queues)
            .map_err(|why| anyhow!(why))
    };
    judge(cluster, &[])?;
    cluster.freeze(&primary)?;
    cluster.await_take_over(NAME, &primary, PATIENCE)?;
    move_backup(cluster, "c", "d", &[])?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let queue = Queue::of_a_standstill(&primary, SystemTime::now());
    cluster.thaw(&primary);
    await_gone(cluster, &primary)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    judge(cluster, &[queue])?;
    let heard = capture.finish()?;
    ensure!(heard.missed == 0, "{} frames were not seen", heard.missed);
    dies(cluster, &backup, &counter)?;
    finish(cluster, counter, "c")
}

/// Both other hosts live and are well, and both lose their parts. Then the old primary is another machine of the same name. Host e has no CRIU, and can be the
/// witness alone.
pub(super) fn living_hosts(cluster: &mut Cluster<'_>) -> Result<()> {
    cluster.stop_host("e", Signal::SIGTERM)?;
    cluster.lacks_criu("e");
    cluster.start_host("e")?;
    let (primary, backup, counter) = begin(cluster, &Plan::redis(cluster.testbed())?)?;
    let words = format!("host '{backup}' is the program's backup, and well");
    refused(cluster, "a", &["--backup", "d"], &words)?;
    let unfit = ["--backup", "e", "--unprotected-meanwhile"];
    refused(cluster, "a", &unfit, "host 'e': CRIU is not on this host")?;
    cluster.await_protected(NAME, PATIENCE)?;
    move_backup(cluster, "c", "d", &["--unprotected-meanwhile"])?;
    await_gone(cluster, &backup)?;
    move_witness(cluster, &primary, "e")?;
    await_gone(cluster, "c")?;
    // Host a may be the one whose part has gone.
    refused(cluster, "e", &["--witness", "d"], "host 'd' has another part")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    dies(cluster, &primary, &counter)?;
    // Another machine: nothing that it was and knew is there.
    cluster.renew_host(&primary)?;
    cluster.start_host(&primary)?;
    cluster.order("e", &["replace", NAME, &primary])?;
    cluster.await_protected(NAME, PATIENCE)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    dies(cluster, "d", &counter)?;
    // A host comes back to a program that it had a part in, under a new number.
    move_backup(cluster, "e", &backup, &[])?;
    dies(cluster, &primary, &counter)?;
    cluster.start_host("d")?;
    await_gone(cluster, "d")?;
    finish(cluster, counter, "e")
}

/// The image goes along. A host that has another one in its place says so, and nothing is changed. After a loss of all hosts, one of which slept over the
/// move, it is begun again from the newest image.
pub(super) fn with_data(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup, counter) = begin(cluster, &Plan::redis_with_data(cluster.testbed())?)?;
    data::write(cluster)?;
    let image = cluster.testbed().node("d").home().join("sessions.img");
    std::fs::write(&image, vec![0; 1 << 20])?;
    let words = "host 'd': data: ";
    refused(cluster, "a", &["--backup", "d", "--unprotected-meanwhile"], words)?;
    cluster.await_protected(NAME, PATIENCE)?;
    std::fs::remove_file(&image)?;
    cluster.kill_host(&backup)?;
    await_alone(cluster, &primary)?;
    move_backup(cluster, &primary, "d", &[])?;
    data::write(cluster)?;
    dies(cluster, &primary, &counter)?;
    data::write(cluster)?;
    data::is_there(cluster, 3)?;
    cluster.start_host(&backup)?;
    await_gone(cluster, &backup)?;
    let left = cluster.testbed().node(&backup).home().join("sessions.img");
    ensure!(left.exists(), "{}: the old host's image is gone", left.display());
    cluster.start_host(&primary)?;
    cluster.await_protected(NAME, PATIENCE)?;
    dies(cluster, "d", &counter)?;
    data::is_there(cluster, 3)?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.start_host("d")?;
    cluster.await_protected(NAME, PATIENCE)?;
    // Host d sleeps over the next move, and the host that has its part over the one before.
    cluster.kill_host("d")?;
    await_alone(cluster, &primary)?;
    move_backup(cluster, "c", &backup, &[])?;
    data::write(cluster)?;
    for host in cluster.running() {
        cluster.kill_host(&host)?;
    }
    for host in ["d", "e", "c", &primary, &backup] {
        cluster.start_host(host)?;
    }
    cluster.await_protected(NAME, PATIENCE)?;
    data::is_there(cluster, 4)?;
    await_gone(cluster, "d")?;
    down(cluster, "c")?;
    data::forget(cluster)
}

fn begin(cluster: &mut Cluster<'_>, plan: &Plan) -> Result<(String, String, Counter)> {
    up(cluster, plan)?;
    let counter = count(cluster, CONNECTIONS)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (primary, backup) = whole(cluster)?;
    Ok((primary, backup, counter))
}

fn of<'a>(hosts: &'a [HostStatus], host: &str) -> Option<&'a dunlin_api::VmStatus> {
    hosts.iter().find(|status| status.host == host)?.vm(NAME)
}

/// It ends when the program is protected.
fn move_backup(cluster: &Cluster<'_>, said_on: &str, host: &str, more: &[&str]) -> Result<()> {
    let words = [&["move", NAME, "--backup", host], more].concat();
    let told = cluster.order(said_on, &words)?;
    ensure!(told.contains("is up and protected"), "{told}");
    // An old backup that lives may take itself for one for a moment, and on a busy machine an election may have come since.
    let what = format!("a copy of the program counts on host {host}");
    cluster.await_status(&what, PATIENCE, |hosts| {
        let its = of(hosts, host)?;
        let counts = its.protected && matches!(its.role, Role::Primary | Role::Backup);
        counts.then_some(())
    })
}

fn move_witness(cluster: &Cluster<'_>, primary: &str, host: &str) -> Result<()> {
    cluster.order(primary, &["move", NAME, "--witness", host])?;
    cluster.await_status("the new witness takes part", PATIENCE, |hosts| {
        let mut peers = of(hosts, primary)?.peers.iter();
        peers
            .any(|peer| peer.host == host && peer.witness && peer.connected)
            .then_some(())
    })
}

fn await_standby(cluster: &Cluster<'_>, primary: &str, host: &str) -> Result<()> {
    cluster.await_status("the standby is named", PATIENCE, |hosts| {
        let standby = of(hosts, primary)?.standby.as_deref();
        (standby == Some(host)).then_some(())
    })
}

/// Nobody said a word.
fn await_backup(cluster: &Cluster<'_>, primary: &str, host: &str) -> Result<()> {
    cluster.await_status("the standby has the part", PATIENCE, |hosts| {
        let program = of(hosts, primary)?;
        let mut copies = program.peers.iter().filter(|peer| !peer.witness);
        (program.protected && copies.any(|peer| peer.host == host && peer.connected)).then_some(())
    })
}

/// In one line, and before anything is changed.
fn refused(cluster: &Cluster<'_>, said_on: &str, to: &[&str], words: &str) -> Result<()> {
    let output = cluster.output(said_on, &[&["move", NAME], to].concat())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(2) && said.contains(words) && said.lines().count() == 1,
        "{words}: {:?}: {said}",
        output.status
    );
    Ok(())
}

fn dies(cluster: &mut Cluster<'_>, primary: &str, counter: &Counter) -> Result<()> {
    whole(cluster)?;
    cluster.kill_host(primary)?;
    cluster.await_take_over(NAME, primary, PATIENCE)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .with_context(|| format!("no answers after the death of host {primary}"))
}

/// It has nothing of it, and says why.
fn await_gone(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    cluster.await_status("the old host has let go of the program", PATIENCE, |hosts| {
        let status = hosts.iter().find(|status| status.host == host)?;
        status.vm(NAME).is_none().then_some(())
    })?;
    let folder = cluster.state(host).join("vms").join(NAME);
    ensure!(!folder.exists(), "host {host}: {} is left", folder.display());
    let told = cluster.events(host)?;
    if !told.iter().any(|event| event.kind == EventKind::Left) {
        bail!("host {host} does not say that it has left: {told:?}");
    }
    Ok(())
}

/// Nothing was lost in all of that. All hosts run again, and it is ended.
fn finish(cluster: &mut Cluster<'_>, counter: Counter, has_part: &str) -> Result<()> {
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let running = cluster.running();
    for host in cluster.hosts().to_vec() {
        if !running.contains(&host) {
            cluster.start_host(&host)?;
        }
    }
    down(cluster, has_part)
}
