//! The VM that host a has before Dunlin comes: libvirt's, made by virt-install, with its own disks.
//!
//! * **Decides:** that the domain is a real one: libvirt runs it and clients reach it, before it is switched off and imported.
//! * **Flow:** disks -> `virt-install` -> its service answers -> `virsh destroy`.
//! * **Not here:** what Dunlin makes of it ([`super::three::import`]).

use std::fs::{self, OpenOptions};
use std::io::Write as _;

use anyhow::{Context, Result};
use dunlin_vmtest::cluster::{VmPlan, await_service};
use dunlin_vmtest::image::GuestImage;
use dunlin_vmtest::testbed::Testbed;

use super::machine::{Machine, PATIENCE};
use super::transcript::Transcript;

/// What a host of libvirt's has more than others.
pub const PACKAGES: [&str; 3] = ["libvirt-daemon-system", "libvirt-clients", "virtinst"];
/// The VM's disks: the one that it boots from, and the one that its service writes to.
pub const DISKS: [&str; 2] = ["shop-boot.img", "shop.img"];
/// Where they are: the package's unit may write there.
pub const FILES: &str = "/srv/vm";
/// The card's address.
const MAC: &str = "52:54:00:12:34:56";

/// Gives host `first` fresh disks, and a domain on them that libvirt runs, if it has none of the name yet.
pub fn give_domain(testbed: &Testbed, first: &Machine, plan: &VmPlan, image: &GuestImage) -> Result<()> {
    plan.write(testbed, image)?;
    fs::create_dir_all(first.path(FILES))?;
    for disk in DISKS {
        first.take(&first.node().home().join(disk), &format!("{FILES}/{disk}"))?;
    }
    let (name, machine) = (&plan.name, plan.machine.name());
    if first.run(&format!("virsh domstate {name}")).is_ok() {
        return Ok(());
    }
    // Its name space has no cgroups for libvirt to make groups in.
    OpenOptions::new()
        .append(true)
        .open(first.path("/etc/libvirt/qemu.conf"))
        .and_then(|mut file| file.write_all(b"cgroup_controllers = []\n"))
        .context("libvirt's settings")?;
    first.run("systemctl restart libvirtd")?;
    let disks: String = DISKS
        .iter()
        .map(|disk| format!(" --disk path={FILES}/{disk},format=raw,bus=virtio"))
        .collect();
    first.run(&format!(
        "virt-install --name {name} --memory 256 --vcpus 1 --machine {machine} --virt-type qemu --osinfo debian11 --import{disks} \
         --network bridge=br0,mac={MAC},model=virtio --graphics none --noautoconsole"
    ))?;
    await_service(testbed.node("client"), plan.service(), PATIENCE).context("libvirt's VM does not serve")
}

/// Takes the domain from libvirt, as a person does who gives it to Dunlin.
pub fn leave(first: &Machine, plan: &VmPlan, transcript: &Transcript) -> Result<()> {
    let name = &plan.name;
    if first.run(&format!("virsh domstate {name}"))?.trim() == "running" {
        // Nothing in the trial's guest hears the button that `virsh shutdown` presses.
        transcript.types(first, &format!("virsh destroy {name}"))?;
    }
    transcript.types(first, &format!("virsh autostart --disable {name}"))?;
    Ok(())
}
