//! Ten minutes on fresh hosts: docs/ten-minutes.md as a person types it, and then a host dies.
//!
//! * **Decides:** that a VM of libvirt's is protected by ten minutes of typing, and that its clients lose nothing when a host loses its power.
//! * **Flow:** libvirt's VM ([`super::libvirt`]) -> install -> `dunlin cluster init`, `join` -> `virsh destroy`, `dunlin import` -> `check`, `up` -> clients -> power off the primary -> on again.
//! * **Not here:** what follows in a cluster's life ([`super::care`], [`super::upgrade`]).

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::cluster::await_service;
use dunlin_vmtest::image::GuestImage;
use dunlin_vmtest::testbed::Testbed;

use super::libvirt::give_domain;
use super::machine::{Machine, PATIENCE};
use super::three::{ACKNOWLEDGED, await_protected, begin, count, import, plan};
use super::transcript::Transcript;

/// Plays it on hosts with the package `deb` in root's folder. The VM runs on, protected.
pub fn run(
    testbed: &Testbed,
    machines: &mut [Machine; 3],
    image: &GuestImage,
    deb: &str,
    say: &dyn Fn(&str),
) -> Result<Transcript> {
    let transcript = Transcript::default();
    let plan = plan();
    give_domain(testbed, &machines[0], &plan, image)?;
    say("libvirt runs a VM that virt-install made");
    begin(machines, deb, &transcript)?;
    say("three hosts installed the package, and joined with tokens");
    import(machines, &plan, &transcript)?;
    transcript.types(&machines[0], "dunlin up shop.toml")?;
    let client = testbed.node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let primary = await_protected(machines, &plan.name)?;
    transcript.types(&machines[primary], "dunlin status")?;
    say(&format!(
        "libvirt's guest boots from its own disk and is protected; {} is its primary",
        machines[primary].name()
    ));

    let counter = count(client, &plan)?;
    let killed_at = machines[primary].kill()?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers after the kill")?;
    let answered_at = Instant::now();
    transcript.tells(&format!(
        "Clients count on the VM. Host {} loses its power.",
        machines[primary].name()
    ));
    transcript.types(&machines[1 - primary], "dunlin events --since 1m")?;
    machines[primary].boot()?;
    let successor = await_protected(machines, &plan.name)?;
    ensure!(
        successor != primary,
        "the host that was switched off serves the VM again"
    );
    transcript.tells("It is switched on again.");
    transcript.types(&machines[successor], "dunlin status")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (report, answers) = counter.finish()?;
    let seen = format!(
        "{} acknowledged, {} lost, {} doubled, {} connections broken; no answer for at most {:.0} ms when the host died",
        report.acknowledged,
        report.lost,
        report.doubled,
        report.resets,
        answers.longest_gap_us(killed_at, answered_at) as f64 / 1e3
    );
    say(&format!(
        "host {} lost its power and came back; clients: {seen}",
        machines[primary].name()
    ));
    ensure!(report.is_clean(), "clients were let down: {report:?}");
    transcript.tells(&format!("What the clients saw: {seen}."));
    Ok(transcript)
}
