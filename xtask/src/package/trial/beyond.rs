//! What the package runs beside ordinary VMs: speculative communication under the unit as it is, and a bare program with its drop-in.
//!
//! * **Decides:** that both are protected under systemd, that a copy of the running program is made under the unit, and that clients lose nothing by it.
//! * **Flow:** the VM's file says `speculative = true`, and it is begun again -> the drop-in on each host, whose daemon begins again -> a program -> its
//!   backup's daemon is killed, and a copy of what runs is brought to the new one -> the program and the drop-in are gone.
//! * **Not here:** streams and deaths under speculation, and a program's life in all its turns (the scenarios).

use std::fs;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::cluster::{VmPlan, await_service};
use dunlin_vmtest::paths;
use dunlin_vmtest::testbed::Testbed;

use super::machine::{Machine, PATIENCE};
use super::three::{ACKNOWLEDGED, LOOK_AGAIN, await_protected, count, plan, status};

/// The program's name.
const PROGRAM: &str = "sessions";
/// Where CRIU is put: Debian's stable release has none that a new kernel takes.
const CRIU: &str = "/opt/criu";
/// The service's drop-ins.
const DROP_INS: &str = "/etc/systemd/system/dunlin.service.d";

/// Plays it on a cluster whose VM is protected. The VM runs on, protected and speculative.
pub fn run(testbed: &Testbed, machines: &[Machine; 3], say: &dyn Fn(&str)) -> Result<()> {
    speculate(testbed, machines, say).context("a VM with speculative communication")?;
    program(testbed, machines, say).context("a bare program")
}

fn speculate(testbed: &Testbed, machines: &[Machine; 3], say: &dyn Fn(&str)) -> Result<()> {
    let plan = plan();
    let name = &plan.name;
    let primary = await_protected(machines, name)?;
    machines[primary].run(&format!("dunlin down --now {name}"))?;
    let first = &machines[0];
    first.run(&format!(
        "cd; sed -i -e '/^policy/d' -e '1i policy = \"remus\"\\nspeculative = true' {name}.toml; dunlin up {name}.toml"
    ))?;
    let client = testbed.node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let primary = await_protected(machines, name)?;
    let counter = count(client, &plan)?;
    let told = status(&machines[primary])?;
    let vm = told.vm(name).context("the primary knows the VM")?;
    ensure!(
        vm.policy == "remus+spec",
        "the policy is shown as '{}'",
        vm.policy
    );
    let begun = vm.speculation.as_ref().map_or(0, |figures| figures.begun);
    ensure!(begun > 0, "no connection has a shadow socket");
    machines[primary].run(&format!("dunlin switchover {name}"))?;
    await_protected(machines, name)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (report, _) = counter.finish()?;
    ensure!(report.is_clean(), "clients were let down: {report:?}");
    say(&format!(
        "a VM with speculative communication was protected under the unit as it is, and switched over: {} acknowledged, 0 lost",
        report.acknowledged
    ));
    Ok(())
}

fn program(testbed: &Testbed, machines: &[Machine; 3], say: &dyn Fn(&str)) -> Result<()> {
    let plan = VmPlan {
        number: 1,
        ..VmPlan::redis("dunlin")
    };
    for machine in machines {
        allow(machine)?;
        machine.run("systemctl restart dunlin")?;
        await_protected(machines, &super::three::plan().name)?;
    }
    let [first, ..] = machines;
    let nic = format!(
        "[[program.nics]]\nmac = \"52:54:00:12:34:57\"\nbridge = \"br0\"\naddress = \"{}/16\"\n",
        plan.service().ip()
    );
    let file = format!(
        "name = \"{PROGRAM}\"\nmembers = [\"a\", \"b\"]\nwitness = \"c\"\n\n[program]\n\
         command = [\"/usr/bin/redis-server\", \"--protected-mode\", \"no\", \"--save\", \"\"]\nuser = \"redis\"\nport = 6379\n\n{nic}"
    );
    fs::write(first.path("/root/sessions.toml"), file)?;
    first.run("cd; dunlin check sessions.toml; dunlin up sessions.toml")?;
    let client = testbed.node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let primary = await_protected(machines, PROGRAM)?;
    let counter = count(client, &plan)?;

    // Not a stop: a daemon that ends by itself hands over first. systemd begins it again.
    let backup = &machines[1 - primary];
    let before = protected(&machines[primary])?;
    backup.run("systemctl kill --signal=KILL dunlin")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let begun = Instant::now();
    while protected(&machines[primary])? == before {
        ensure!(begun.elapsed() < PATIENCE, "the program gets no second copy");
        std::thread::sleep(LOOK_AGAIN);
    }
    let primary = await_protected(machines, PROGRAM)?;
    machines[primary].run(&format!("dunlin switchover {PROGRAM}"))?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (report, _) = counter.finish()?;
    ensure!(report.is_clean(), "clients were let down: {report:?}");
    let primary = await_protected(machines, PROGRAM)?;
    machines[primary].run(&format!("dunlin down --now {PROGRAM}"))?;
    say(&format!(
        "a program under the drop-in: copied as it ran when its backup's daemon was killed, and switched over to that copy; {} acknowledged, 0 lost",
        report.acknowledged
    ));
    for machine in machines {
        forbid(machine)?;
        await_protected(machines, &super::three::plan().name)?;
    }
    Ok(())
}

/// How often this host has said that the program is protected.
fn protected(machine: &Machine) -> Result<usize> {
    let events = machine.run("dunlin events --json")?;
    let of_it = format!("\"{PROGRAM}\"");
    Ok(events
        .lines()
        .filter(|line| line.contains("\"protected\"") && line.contains(&of_it))
        .count())
}

/// What a person does on a host that is to run programs.
fn allow(machine: &Machine) -> Result<()> {
    let from = paths::criu();
    let from = from.parent().context("CRIU's folder")?;
    let status = Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(machine.path(CRIU))
        .status()?;
    ensure!(status.success(), "CRIU cannot be copied from {}", from.display());
    machine.run(&format!(
        "mkdir -p {DROP_INS}\nln -s /usr/share/dunlin/programs.conf {DROP_INS}/\n\
         cp /etc/dunlin/environment /root/environment\necho DUNLIN_CRIU={CRIU}/criu >> /etc/dunlin/environment\n\
         systemctl daemon-reload"
    ))?;
    Ok(())
}

/// And takes it back again.
fn forbid(machine: &Machine) -> Result<()> {
    machine.run(&format!(
        "rm -r {DROP_INS} {CRIU}\nmv /root/environment /etc/dunlin/environment\nsystemctl daemon-reload\nsystemctl restart dunlin"
    ))?;
    Ok(())
}
