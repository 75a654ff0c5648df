//! The package on Debian machines that run systemd: on one from its installation to its purge, and on three hosts of a cluster.
//!
//! * **Decides:** nothing; what must hold is in [`alone`] and [`three`].
//! * **Flow:** a lab of three hosts and a client -> a Debian root on each, booted ([`machine`]) -> [`alone`] -> [`three`].
//! * **Invariants:** what the lab made goes with it, however this ends.
//! * **Not here:** a VM's life in all its turns (the scenarios).

mod alone;
mod machine;
mod three;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use dunlin_vmtest::lab::{Lab, LabSpec};

use crate::accel::Accel;
use crate::setup;
use machine::Machine;

const PACKAGES: [(&str, &str); 2] = [
    ("mmdebstrap", "a fresh Debian root to try the package in"),
    ("systemd-container", "runs systemd in that root"),
];

/// Tries the package, and the upgrade to a newer one of it.
pub fn run(deb: &Path, newer: &Path) -> Result<()> {
    let begun = Instant::now();
    setup::install(&PACKAGES)?;
    let (_, image) = Accel::tcg().choose()?;
    let lab = Lab::new(&LabSpec::three_hosts())?;
    let archive = machine::archive()?;
    let hosts = ["a", "b", "c"].map(|name| Machine::unpack(lab.node(name), &archive));
    let [a, b, c] = hosts;
    let mut machines = [a?, b?, c?];
    for machine in &mut machines {
        machine.boot()?;
        machine.take(deb, "dunlin.deb")?;
        machine.take(newer, "newer.deb")?;
    }
    println!(
        "package: three Debian roots run systemd after {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    let steps = alone::run(&machines[0])?;
    three::run(&lab, &mut machines, &image).context("three hosts from packages alone")?;
    for machine in &mut machines {
        machine.off()?;
    }
    println!(
        "package: {steps} steps on one host and a cluster of three passed in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
