//! `--list`: every scenario by its name, also those that no file has.

use super::programs;
use dunlin_vmtest::scenario::{Scenario, orders, rolling, sizes};

/// Stories of their own that belong to every commit, and what they are about.
const STORIES: [(&str, &str); 8] = [
    ("bad-input", "mistakes in files and orders, strangers"),
    ("cluster-join", "hosts join by tokens"),
    ("life", "a VM is started and ended in every way"),
    ("two-vms", "several VMs on one host"),
    ("flood", "a guest that does not read"),
    ("long-upload", "--upload-seconds N --upload-loops N"),
    ("connections-come-and-go", "--kills N"),
    ("interrupt-leaves-nothing", "Ctrl-C in the middle of a scenario"),
];

/// Prints a line for each.
pub(super) fn print(chosen: &[Scenario]) {
    for one in chosen {
        println!(
            "{:40} {} {}x{}{}",
            one.name,
            one.policy,
            one.machine.name(),
            one.vcpus,
            if one.quick { " quick" } else { "" }
        );
    }
    for (name, _) in orders::STORIES {
        println!("{name:40} orders of a person, quick");
    }
    for (name, about) in STORIES {
        println!("{name:40} {about}, quick");
    }
    println!("{:40} a guest says more than may leave", "outpour");
    println!("{:40} plover pcx1, --kills N", "ledger");
    for (name, about) in programs::LIST {
        println!("{name:40} bare programs, {about}");
    }
    println!("{:40} by its seed, --faults N --seed S, quick", "campaign");
    for size in &sizes::SIZES {
        println!("{:40} dunlin", size.name);
    }
    for name in ["speculative-streams", "speculative-switchover"] {
        println!("{name:40} remus+spec pcx1");
    }
    println!("{:40} remus+spec pcx1, --kills N", "speculative-deaths");
    for name in ["speculative-loss", "speculative-come-and-go"] {
        println!("{name:40} remus+spec pcx1, --kills N");
    }
    println!("{:40} remus+spec pcx1 (TCG), --kills N", "speculative-ipv6");
    println!("{:40} dunlin+spec pcx1, --kills N", "speculative-modes");
    println!("{:40} dunlin pcx1, --seconds N", "overload");
    for name in ["rejoins", "disks-compared-by-schedule", "primary-log-disk-full"] {
        println!("{name:40} dunlin pcx1");
    }
    for (name, ..) in rolling::STORIES {
        println!("{name:40} dunlin pcx1, --from COMMIT, by name alone");
    }
    println!("{:40} dunlin pcx1, --minutes N, by name alone", "soak");
    println!(
        "{:40} dunlin pcx2 (KVM here: pcx1), --seconds N, by name alone",
        "stalls"
    );
}
