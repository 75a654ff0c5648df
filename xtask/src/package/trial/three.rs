//! Three Debian hosts that run Dunlin from its package: a cluster of them, its VM, its end.
//!
//! * **Decides:** nothing; what has to hold is in [`super::minutes`], [`super::care`] and [`super::upgrade`].
//! * **Not here:** one of the machines ([`Machine`]), what a person types ([`Transcript`]).

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dunlin_vmtest::client::{Counter, CounterSpec};
use dunlin_vmtest::cluster::{self, HostStatus, VmPlan};
use dunlin_vmtest::testbed::Node;

use super::libvirt::{self, DISKS, FILES};
use super::machine::{Machine, PATIENCE};
use super::transcript::Transcript;

/// Acknowledged INCRs before and after each change.
pub const ACKNOWLEDGED: u64 = 100;
/// A host's status has no event that can be waited for from outside of its name spaces.
pub const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The guest that was libvirt's: it boots from its own disk, and its redis writes to a second one.
pub fn plan() -> VmPlan {
    VmPlan {
        name: "shop".to_owned(),
        machine: cluster::Machine::Q35,
        boots_from_disk: true,
        disk_mib: Some(64),
        ..VmPlan::redis("dunlin")
    }
}

/// Clients that count on the VM, and check every answer.
pub fn count(client: &Node, plan: &VmPlan) -> Result<Counter> {
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
    Ok(counter)
}

/// Installs a package that lies in root's folder, and makes a cluster of the hosts.
pub fn begin(machines: &[Machine; 3], deb: &str, transcript: &Transcript) -> Result<()> {
    for machine in machines {
        transcript.types(
            machine,
            &format!("apt install -y --no-install-recommends ./{deb}"),
        )?;
        transcript.types(machine, "dunlin check")?;
    }
    let hosts: String = machines
        .iter()
        .map(|machine| format!(" --host {}={}:7700", machine.name(), machine.node().address()))
        .collect();
    let [first, others @ ..] = machines;
    let init = format!("dunlin cluster init mine{hosts}");
    // What an earlier cluster's said is none of it.
    first.run("rm -f /root/said")?;
    let lines = first.path("/root/said");
    std::thread::scope(|scope| {
        let door = scope.spawn(|| {
            // It goes on while the others join: what it says is read from a file meanwhile.
            first.run(&format!("cd; {init} 2>&1 | tee /root/said"))
        });
        let begun = Instant::now();
        let tokens = loop {
            let said = fs::read_to_string(&lines).unwrap_or_default();
            let tokens: Vec<String> = said
                .lines()
                .map(str::trim)
                .filter(|line| line.starts_with("dunlin cluster join "))
                .map(str::to_owned)
                .collect();
            if tokens.len() == others.len() && said.ends_with('\n') {
                transcript.reads(first, &init, &said);
                break tokens;
            }
            ensure!(
                !door.is_finished() && begun.elapsed() < PATIENCE,
                "dunlin cluster init printed no tokens: {said}"
            );
            std::thread::sleep(LOOK_AGAIN);
        };
        for (machine, join) in others.iter().zip(&tokens) {
            transcript.types(machine, join)?;
        }
        door.join()
            .expect("it returns an error and does not panic")
            .map(drop)
    })?;
    for machine in machines {
        transcript.types(machine, "systemctl start dunlin")?;
    }
    transcript.types(first, "dunlin cluster status")?;
    Ok(())
}

/// The VM's file from libvirt's domain, and empty disks on the other host.
pub fn import(machines: &[Machine; 3], plan: &VmPlan, transcript: &Transcript) -> Result<()> {
    libvirt::leave(&machines[0], plan, transcript)?;
    transcript.types(
        &machines[0],
        &format!("dunlin import --libvirt {0} -o {0}.toml", plan.name),
    )?;
    fs::create_dir_all(machines[1].path(FILES))?;
    for disk in DISKS {
        let bytes = fs::metadata(machines[0].path(&format!("{FILES}/{disk}")))?.len();
        transcript.types(&machines[1], &format!("truncate -s {bytes} {FILES}/{disk}"))?;
    }
    transcript.types(&machines[0], "dunlin check shop.toml")?;
    Ok(())
}

/// Waits until a host serves the VM and another says that it is its backup. Returns which one serves.
pub fn await_protected(machines: &[Machine; 3], vm: &str) -> Result<usize> {
    let begun = Instant::now();
    loop {
        let mut statuses = Vec::new();
        for machine in machines {
            statuses.push(status(machine)?);
        }
        let has_role =
            |status: &HostStatus, role: &str| status.vm(vm).is_some_and(|vm| vm.role.as_str() == role);
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

pub fn role(machine: &Machine, vm: &str) -> Result<Option<String>> {
    Ok(status(machine)?.vm(vm).map(|vm| vm.role.to_string()))
}

pub fn status(machine: &Machine) -> Result<HostStatus> {
    // 3 tells a script that a VM is unprotected; the answer is whole all the same.
    let text = machine.run("dunlin status --json || test $? = 3")?;
    serde_json::from_str(&text).with_context(|| format!("status of host {}: {text}", machine.name()))
}

/// Ends the VM, stops the services, and takes the package and all that it has kept from the hosts.
pub fn leave(machines: &[Machine; 3], vm: &str) -> Result<()> {
    let primary = await_protected(machines, vm)?;
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
        machine.run("apt-get purge -y dunlin; rm -f /root/*.toml /root/said /root/token")?;
        let left = machine.run("find /etc/dunlin /var/lib/dunlin /run/dunlin 2>/dev/null || true")?;
        ensure!(
            left.trim().is_empty(),
            "host {}: left after the purge: {left}",
            machine.name()
        );
    }
    Ok(())
}
