//! The package on Debian machines that run systemd: from a person's first ten minutes to the purge.
//!
//! * **Decides:** nothing; what must hold is in [`minutes`], [`care`], [`beyond`], [`upgrade`] and [`alone`].
//! * **Flow:** a testbed of three hosts and a client -> a Debian root on each, booted ([`machine`]), the first with a VM of libvirt's ([`libvirt`]) -> a
//!   cluster on fresh hosts -> keys and roles -> speculation and a program -> purged everywhere -> a cluster of an older version, upgraded -> purged -> one host alone.
//! * **Invariants:** what the testbed made goes with it, however this ends.
//! * **Not here:** a VM's life in all its turns (the scenarios).

mod alone;
mod beyond;
mod care;
mod libvirt;
mod machine;
mod minutes;
mod three;
mod transcript;
mod upgrade;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::testbed::{Testbed, TestbedSpec};

use crate::accel::Accel;
use crate::criu;
use crate::setup;
use machine::Machine;

const PACKAGES: [(&str, &str); 2] = [
    ("mmdebstrap", "a fresh Debian root to try the package in"),
    ("systemd-container", "runs systemd in that root"),
];

/// The packages that a trial needs.
pub struct Debs<'a> {
    /// The one that is tried.
    pub this: &'a Path,
    /// The same executable as a later version.
    pub later: &'a Path,
    /// An earlier commit's.
    pub earlier: &'a Path,
}

/// Tries the package, and the upgrades to it and from it. What was typed on fresh hosts goes to `transcript`.
pub fn run(debs: &Debs<'_>, transcript: &Path) -> Result<()> {
    let begun = Instant::now();
    let say = |line: &str| println!("package: [{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    setup::install(&PACKAGES)?;
    criu::ensure()?;
    let (_, image) = Accel::tcg().choose()?;
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let (plain, with_libvirt) = (machine::archive(&[])?, machine::archive(&libvirt::PACKAGES)?);
    let hosts = [("a", &with_libvirt), ("b", &plain), ("c", &plain)]
        .map(|(name, archive)| Machine::unpack(testbed.node(name), archive));
    let [a, b, c] = hosts;
    let mut machines = [a?, b?, c?];
    let name = |deb: &Path| -> Result<String> {
        let name = deb.file_name().context("a package's name")?;
        Ok(name.to_string_lossy().into_owned())
    };
    let [this, later, earlier] = [name(debs.this)?, name(debs.later)?, name(debs.earlier)?];
    for machine in &mut machines {
        machine.boot()?;
        for (deb, name) in [(debs.this, &this), (debs.later, &later), (debs.earlier, &earlier)] {
            machine.take(deb, &format!("/root/{name}"))?;
        }
    }
    say("three Debian roots run systemd");

    let typed =
        minutes::run(&testbed, &mut machines, &image, &this, &say).context("ten minutes on fresh hosts")?;
    let (text, counted) = typed.finish();
    fs::write(transcript, &text).with_context(|| transcript.display().to_string())?;
    say(&format!("{counted}: {}", transcript.display()));
    ensure!(counted.minutes <= 10.0, "that is more than ten minutes");
    care::run(&testbed, &machines, &say).context("keys, roles and a request for help")?;
    beyond::run(&testbed, &machines, &say)?;
    three::leave(&machines, "shop").context("the package is taken away again")?;
    say("the VM is down, the services ended cleanly, and the purge left nothing");

    upgrade::run(&testbed, &mut machines, &image, (&earlier, &this), &say).context("upgrades")?;
    three::leave(&machines, "shop").context("the package is taken away again")?;
    let steps = alone::run(&machines[0], &this, &later)?;
    for machine in &mut machines {
        machine.off()?;
    }
    println!(
        "package: ten minutes, keys, speculation, a program, upgrades and {steps} steps on one host passed in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
