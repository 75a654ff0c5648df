//! From one version to the next, host by host, under clients that check every answer.
//!
//! * **Decides:** that an upgrade of a host loses nothing, hands its VM over first, and leaves the VM without a second copy no longer than planned
//!   switchovers do, and the start of a daemon.
//! * **Flow:** the older package on three hosts, a VM -> switchovers to compare with -> the newer package on the primary, the backup, the witness.
//! * **Not here:** the first steps on fresh hosts ([`super::minutes`]).

use anyhow::{Context, Result, bail, ensure};
use dunlin_vmtest::cluster::{Event, await_service};
use dunlin_vmtest::image::GuestImage;
use dunlin_vmtest::testbed::Testbed;

use super::libvirt::give_domain;
use super::machine::{Machine, PATIENCE};
use super::three::{ACKNOWLEDGED, await_protected, begin, count, import, plan, role};
use super::transcript::Transcript;

/// How long a daemon may take from its end to its start on a machine that is busy, in milliseconds.
const RESTART_MS: u64 = 10_000;

/// Plays it on hosts with both packages in root's folder.
pub fn run(
    testbed: &Testbed,
    machines: &mut [Machine; 3],
    image: &GuestImage,
    (older, newer): (&str, &str),
    say: &dyn Fn(&str),
) -> Result<()> {
    let unseen = Transcript::default();
    begin(machines, older, &unseen)?;
    let plan = plan();
    give_domain(testbed, &machines[0], &plan, image)?;
    import(machines, &plan, &unseen)?;
    machines[0].run("cd; dunlin up shop.toml")?;
    let client = testbed.node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let mut primary = await_protected(machines, &plan.name)?;
    let protocol = |machine: &Machine| machine.run("dunlin version --json | grep -o '\"protocol\":[0-9]*'");
    let spoken = protocol(&machines[primary])?;
    let counter = count(client, &plan)?;

    let since = now_ms()?;
    for _ in 0..3 {
        machines[primary].run(&format!("dunlin failover {}", plan.name))?;
        primary = await_protected(machines, &plan.name)?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    }
    let switchovers = unprotected(machines, &plan.name, since)?;
    let since = now_ms()?;
    // The primary first: it has to hand its VM over.
    for turn in 0..machines.len() {
        upgrade(
            machines,
            (primary + turn) % machines.len(),
            &plan.name,
            newer,
            say,
        )?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    }
    let upgrades = unprotected(machines, &plan.name, since)?;
    let (report, _) = counter.finish()?;
    say(&format!(
        "clients: {} acknowledged, {} lost, {} doubled, {} connections broken; without a second copy: switchovers {switchovers:?} ms, upgrades \
         {upgrades:?} ms",
        report.acknowledged, report.lost, report.doubled, report.resets
    ));
    ensure!(report.is_clean(), "clients were let down: {report:?}");
    let most = switchovers.iter().max().copied().unwrap_or_default() + RESTART_MS;
    if protocol(&machines[primary])? == spoken {
        ensure!(
            upgrades.iter().all(|&ms| ms <= most),
            "an upgrade left the VM without a second copy for longer than {most} ms"
        );
    } else {
        say(
            "both versions speak different protocols: hosts do not talk until all are upgraded, and that is not judged",
        );
    }
    Ok(())
}

/// How long the VM had no second copy, each time since then, in milliseconds: by what its hosts say happened.
fn unprotected(machines: &[Machine; 3], vm: &str, since_ms: u64) -> Result<Vec<u64>> {
    let mut events: Vec<Event> = Vec::new();
    for machine in machines {
        for line in machine.run("dunlin events --json")?.lines() {
            events.push(serde_json::from_str(line).with_context(|| line.to_owned())?);
        }
    }
    events.retain(|event| event.vm == vm && event.time_ms >= since_ms);
    events.sort_by_key(|event| event.time_ms);
    let (mut alone_since, mut times) = (None, Vec::new());
    for event in &events {
        match event.kind.as_str() {
            "unprotected" | "backup-lost" | "took-over" => {
                alone_since.get_or_insert(event.time_ms);
            }
            "protected" => times.extend(alone_since.take().map(|since| event.time_ms - since)),
            _ => {}
        }
    }
    ensure!(
        !times.is_empty(),
        "no host tells that the VM was without its backup: {events:?}"
    );
    Ok(times)
}

fn now_ms() -> Result<u64> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    Ok(u64::try_from(now.as_millis())?)
}

/// Upgrades one host under load, and waits until the VM is protected again.
fn upgrade(machines: &[Machine; 3], which: usize, vm: &str, newer: &str, say: &dyn Fn(&str)) -> Result<()> {
    let machine = &machines[which];
    let served = role(machine, vm)?.is_some_and(|role| role == "primary");
    machine.run(&format!(
        "cd; apt-get install -y --no-install-recommends ./{newer}"
    ))?;
    let version = machine.run("dpkg-query -W -f '${Version}' dunlin")?;
    let primary = await_protected(machines, vm)?;
    if served {
        if primary == which {
            bail!(
                "host {} was upgraded and still serves: it did not hand its VM over",
                machine.name()
            );
        }
        machine
            // With the journal's fields, and without them as older versions wrote it.
            .run("journalctl --sync\njournalctl -u dunlin -o export | grep -aE 'DUNLIN_KIND=host-ends|kind=.host-ends'")
            .context("the old daemon did not end by itself")?;
    }
    say(&format!(
        "host {} was upgraded to {version}{}; protected again, {} is the primary",
        machine.name(),
        if served { " and handed its VM over" } else { "" },
        machines[primary].name()
    ));
    Ok(())
}
