//! Three hosts from packages alone: a VM, an upgrade of each host and the death of one, under clients that check every answer.
//!
//! * **Decides:** what a cluster of packages has to stand: no answer lost, doubled or refused, over all of it.
//! * **Flow:** install -> `dunlin init`, a folder to each host -> `up` -> clients -> upgrade host by host -> power off the primary -> on again
//!   -> `down` -> stop.
//! * **Not here:** the lab's own daemons (`dunlin_vmtest::demo`); here systemd starts them, under the package's unit.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::client::{Counter, CounterSpec};
use dunlin_vmtest::cluster::{HostStatus, VmPlan, await_service};
use dunlin_vmtest::image::GuestImage;
use dunlin_vmtest::lab::Lab;

use super::machine::{Machine, PATIENCE};

/// Where the VM's files are on each host: what the unit may write to.
const FILES: &str = "/srv/vm";
/// Acknowledged INCRs before and after each change.
const ACKNOWLEDGED: u64 = 100;
/// A host's status has no event that can be waited for from outside of its name spaces.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Plays it.
pub fn run(lab: &Lab, machines: &mut [Machine; 3], image: &GuestImage) -> Result<()> {
    let begun = Instant::now();
    let say = |line: &str| println!("package: [{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    begin(machines)?;
    say("three hosts installed the package, and run from what 'dunlin init' wrote");

    let plan = VmPlan {
        disk_mib: Some(64),
        ..VmPlan::redis("dunlin")
    };
    give_vm(lab, machines, &plan, image)?;
    let client = lab.node("client");
    machines[0].run(&format!("dunlin up {FILES}/vm.toml"))?;
    await_service(client, plan.service(), PATIENCE)?;
    let primary = await_protected(machines, &plan.name)?;
    say(&format!(
        "a VM with a disk is up and protected; {} is its primary",
        machines[primary].name()
    ));

    let counter = Counter::start(
        client,
        &CounterSpec {
            target: plan.service(),
            connections: 2,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    // The primary first: it has to hand its VM over.
    for turn in 0..machines.len() {
        upgrade(machines, (primary + turn) % machines.len(), &plan.name, &say)?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    }

    let primary = await_protected(machines, &plan.name)?;
    let killed_at = machines[primary].kill()?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers after the kill")?;
    let answered_at = Instant::now();
    say(&format!(
        "host {} lost its power; the VM answers",
        machines[primary].name()
    ));
    machines[primary].boot()?;
    let heir = await_protected(machines, &plan.name)?;
    if heir == primary {
        bail!("the host that was switched off serves the VM again");
    }
    say(&format!(
        "it was switched on, and the VM is protected again; {} is its primary",
        machines[heir].name()
    ));
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (report, answers) = counter.finish()?;
    say(&format!(
        "clients: {} acknowledged, {} lost, {} doubled, {} connections broken; no answer for at most {:.0} ms when the host died",
        report.acknowledged,
        report.lost,
        report.doubled,
        report.resets,
        answers.longest_gap_us(killed_at, answered_at) as f64 / 1e3
    ));
    if !report.is_clean() {
        bail!("clients were let down: {report:?}");
    }
    end(machines, heir, &plan.name)?;
    say("the VM is down, and the services ended cleanly");
    Ok(())
}

/// As docs/install.md tells it.
fn begin(machines: &[Machine; 3]) -> Result<()> {
    let mut init = "dunlin init /root/mine --cluster mine --state /var/lib/dunlin".to_owned();
    for machine in machines {
        machine.run("apt-get install -y --no-install-recommends /dunlin.deb")?;
        init.push_str(&format!(
            " --host {}={}:7700",
            machine.name(),
            machine.node().address()
        ));
    }
    machines[0].run(&init)?;
    for machine in machines {
        let from = machines[0].path(&format!("/root/mine/{}", machine.name()));
        for file in fs::read_dir(&from).with_context(|| from.display().to_string())? {
            let file = file?;
            fs::copy(file.path(), machine.path("/etc/dunlin").join(file.file_name()))?;
        }
        machine.run("systemctl start dunlin\ndunlin check")?;
    }
    Ok(())
}

/// Lays a VM's file, kernel and disk on the hosts, as a person would.
fn give_vm(lab: &Lab, machines: &[Machine; 3], plan: &VmPlan, image: &GuestImage) -> Result<()> {
    let file = plan.write(lab, image)?;
    let text = fs::read_to_string(&file)?
        .replace(&lab.here().display().to_string(), FILES)
        .replace(&lab.dir().display().to_string(), FILES);
    for machine in machines {
        fs::create_dir_all(machine.path(FILES))?;
        machine.take(&lab.dir().join("vmlinuz"), &format!("{FILES}/vmlinuz"))?;
        machine.take(&lab.dir().join("initrd.img"), &format!("{FILES}/initrd.img"))?;
        let disk = machine.node().home().join(format!("{}.img", plan.name));
        if disk.exists() {
            machine.take(&disk, &format!("{FILES}/{}.img", plan.name))?;
        }
        fs::write(machine.path(&format!("{FILES}/vm.toml")), &text)?;
    }
    Ok(())
}

/// Upgrades one host under load, and waits until the VM is protected again.
fn upgrade(machines: &[Machine; 3], which: usize, vm: &str, say: &dyn Fn(&str)) -> Result<()> {
    let machine = &machines[which];
    let served = role(machine, vm)?.is_some_and(|role| role == "primary");
    machine.run("apt-get install -y /newer.deb")?;
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
            .run("journalctl --sync\njournalctl -u dunlin -o cat | grep 'kind=\"host-ends\"'")
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

/// Waits until a host serves the VM and another says that it is its backup. Returns which one serves.
fn await_protected(machines: &[Machine; 3], vm: &str) -> Result<usize> {
    let begun = Instant::now();
    loop {
        let mut statuses = Vec::new();
        for machine in machines {
            statuses.push(status(machine)?);
        }
        let has_role = |status: &HostStatus, role: &str| status.vm(vm).is_some_and(|vm| vm.role == role);
        let serves = statuses
            .iter()
            .position(|status| has_role(status, "primary") && status.vm(vm).is_some_and(|vm| vm.protected));
        if let Some(number) = serves.filter(|_| statuses.iter().any(|status| has_role(status, "backup"))) {
            return Ok(number);
        }
        if begun.elapsed() > PATIENCE {
            let said = machines
                .each_ref()
                .map(|machine| machine.run("dunlin status; journalctl -u dunlin -o cat -n 15"));
            bail!(
                "VM {vm} is not protected within {} s: {said:?}",
                PATIENCE.as_secs()
            );
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn role(machine: &Machine, vm: &str) -> Result<Option<String>> {
    Ok(status(machine)?.vm(vm).map(|vm| vm.role.clone()))
}

fn status(machine: &Machine) -> Result<HostStatus> {
    // 3 tells a script that a VM is unprotected; the answer is whole all the same.
    let text = machine.run("dunlin status --json || test $? = 3")?;
    serde_json::from_str(&text).with_context(|| format!("status of host {}: {text}", machine.name()))
}

fn end(machines: &[Machine; 3], primary: usize, vm: &str) -> Result<()> {
    machines[primary].run(&format!("dunlin down --now {vm}"))?;
    for machine in machines {
        machine.run(
            "systemctl stop dunlin\ntest \"$(systemctl show -P Result dunlin)\" = success\n\
             if pgrep 'dunlin|qemu'; then exit 1; fi\ntest ! -e /run/dunlin",
        )?;
        let left = machine.run("ip -o link show type tun")?;
        if !left.trim().is_empty() {
            bail!("host {}: interfaces are left: {left}", machine.name());
        }
    }
    Ok(())
}
