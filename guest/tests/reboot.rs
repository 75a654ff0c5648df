//! The guest boots again: after one take-over and after two, while it is protected, and with a take-over in the middle.
//!
//! A QEMU that waits for a state has no firmware of its own. Nobody notices until the guest is reset.

mod common;

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::{Machine, Qemu, VmSpec};
use serde_json::json;

const BOOT: Duration = Duration::from_secs(120);
/// What QEMU builds anew for each boot of the guest, on whatever host.
const BUILT_AT_BOOT: [&str; 3] = [
    "/rom@etc/acpi/tables",
    "/rom@etc/acpi/rsdp",
    "/rom@etc/table-loader",
];

fn linux_that_resets(machine: Machine) -> VmSpec {
    let mut spec = linux(machine, 1);
    spec.append = spec.append.map(|line| line + " test.resets");
    spec
}

/// Asks a guest of [`linux_that_resets`] to reset its machine, until it says that it does.
fn reset_by_guest(vm: &mut Vm, by: Reset) {
    let deadline = Instant::now() + BOOT;
    while !vm
        .qemu
        .console()
        .wait_for("RESETTING", Duration::from_millis(200))
    {
        let text = vm.qemu.console().text();
        assert!(Instant::now() < deadline, "it does not reset:\n{text}");
        vm.frames[0].queue(&who_has_the_guest_tell(by as u8));
        vm.frames[0].flush().unwrap();
        vm.frames[0].read(|_| ()).unwrap();
    }
}

/// How a guest resets its machine; whose question makes it do so.
#[derive(Clone, Copy)]
enum Reset {
    Panic = 98,
    Reboot = 99,
}

/// Every RAM block of a VM but guest RAM, as its QEMU itself would send it to another. The VM is not to run any more.
fn ram_blocks(qemu: &Qemu) -> BTreeMap<String, Vec<u8>> {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("dunlin-blocks-{}-{number}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    // QEMU runs as an ordinary user.
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
    let shared = json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}, {"capability": "x-colo", "state": false}]});
    qemu.stop_within(OBEYS).unwrap();
    qemu.qmp().execute("migrate-set-capabilities", shared).unwrap();
    let uri = json!({"uri": format!("unix:{}", path.display())});
    qemu.qmp().execute("migrate", uri).unwrap();
    let mut stream = vec![];
    let (mut peer, _) = listener.accept().unwrap();
    std::fs::remove_file(&path).unwrap();
    peer.set_read_timeout(Some(BOOT)).unwrap();
    peer.read_to_end(&mut stream).unwrap();
    parse_ram(&stream)
}

/// The RAM sections of a migration's stream, as migration/ram.c writes them.
fn parse_ram(stream: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut at = 8; // magic and version
    let mut take = |count: usize| {
        at += count;
        &stream[at - count..at]
    };
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut blocks: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut block = String::new();
    loop {
        match take(1)[0] {
            1 => {
                take(4);
                let length = take(1)[0].into();
                assert_eq!(take(length), b"ram");
                take(8);
            }
            2 | 3 => drop(take(4)),
            8 => {
                take(2);
                let length = number(take(2)) as usize;
                take(length);
                continue;
            }
            _ => return blocks, // devices
        }
        loop {
            let word = number(take(8));
            let (offset, flags) = ((word & !0xfff) as usize, word & 0xfff);
            if flags & (0x02 | 0x08) != 0 && flags & 0x20 == 0 {
                let length = take(1)[0].into();
                block = text(take(length));
            }
            match flags & !0x20 {
                0x02 => {
                    let fill = take(1)[0];
                    blocks.get_mut(&block).unwrap()[offset..offset + 4096].fill(fill);
                }
                0x04 => {
                    let mut left = offset;
                    while left > 0 {
                        let length = take(1)[0].into();
                        let name = text(take(length));
                        let size = number(take(8)) as usize;
                        take(8); // its address
                        left -= size;
                        blocks.insert(name, vec![0; size]);
                    }
                }
                0x08 => blocks.get_mut(&block).unwrap()[offset..offset + 4096].copy_from_slice(take(4096)),
                0x10 => break,
                other => panic!("an item of kind {other:#x} in a RAM section"),
            }
        }
        assert_eq!(take(5)[0], 0x7e, "a section's footer");
    }
}

/// Names of blocks that are not the same in both.
fn differing(a: &BTreeMap<String, Vec<u8>>, b: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    assert!(a.contains_key("pc.bios") && a.len() >= 4, "{:?}", a.keys());
    let other = a
        .iter()
        .filter(|(name, bytes)| b[*name] != **bytes && *name != "ram");
    other.map(|(name, _)| name.clone()).collect()
}

fn boots_again_after_each_take_over(machine: Machine) {
    let _alone = one_at_a_time();
    let spec = linux_that_resets(machine);
    let mut pair = Pair::new(&spec, "GUEST-READY");
    let mut first = None;
    for round in 1..=2 {
        pair.sync();
        pair.sync();
        if first.is_none() {
            first = Some(ram_blocks(&pair.primary.qemu));
        }
        pair.primary.qemu.kill().unwrap();
        pair.colo.failover().unwrap();
        reset_by_guest(&mut pair.backup, Reset::Panic);
        let console = pair.backup.qemu.console();
        assert!(
            // It was said before the backup joined, so this is a second time.
            console.wait_for("GUEST-READY", BOOT),
            "{machine:?}: it does not boot again after take-over {round}:\n{}",
            console.text()
        );
        pair = Pair::join(&spec, pair.backup);
    }
    pair.sync();
    let first = first.unwrap();
    // It has booted anew on another host, and every block is as it was on the first.
    let now = ram_blocks(&pair.primary.qemu);
    let mut other = differing(&first, &now);
    // There it is RAM, and holds the firmware's variables: two boots may leave other ones, such as the clock's measured rate.
    other.retain(|name| machine != Machine::Microvm || name != "pc.bios");
    assert_eq!(other, Vec::<String>::new(), "{machine:?}: after a boot elsewhere");
    pair.colo.failover().unwrap();
    let other = differing(&now, &ram_blocks(&pair.backup.qemu));
    let unexpected = other
        .iter()
        .filter(|name| !BUILT_AT_BOOT.contains(&name.as_str()));
    assert_eq!(
        unexpected.collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "{machine:?}: in a backup"
    );
}

#[test]
fn pc_boots_again_after_each_take_over() {
    boots_again_after_each_take_over(Machine::Pc);
}

#[test]
fn q35_boots_again_after_each_take_over() {
    boots_again_after_each_take_over(Machine::Q35);
}

#[test]
fn microvm_boots_again_after_each_take_over() {
    boots_again_after_each_take_over(Machine::Microvm);
}

/// Syncs all the way through a boot, with the whole of RAM compared after each, then a take-over after so many.
fn boots_while_protected(machine: Machine, both: bool, killed_after: Option<usize>) {
    let _alone = one_at_a_time();
    let mut pair = Pair::new(&linux_that_resets(machine), "GUEST-READY");
    pair.sync();
    let (before, own) = (
        pair.primary.qemu.console().text().len(),
        pair.backup.qemu.console().text().len(),
    );
    reset_by_guest(&mut pair.primary, Reset::Reboot);
    if both {
        // The two copies do not boot at the same moment.
        reset_by_guest(&mut pair.backup, Reset::Reboot);
    }
    let deadline = Instant::now() + BOOT;
    let mut syncs = 0;
    loop {
        pair.drain_frames();
        pair.sync();
        syncs += 1;
        let text = pair.primary.qemu.console().text();
        if killed_after == Some(syncs) || text[before..].contains("GUEST-READY") {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{machine:?} does not boot while it is protected:\n{text}"
        );
        // The guest gets something done between two syncs.
        let seen = pair.primary.qemu.console().total_bytes();
        pair.primary
            .qemu
            .console()
            .wait_more(seen, Duration::from_millis(100));
    }
    println!("{machine:?}: {syncs} syncs since the reset");
    pair.primary.qemu.kill().unwrap();
    pair.colo.failover().unwrap();
    let console = pair.backup.qemu.console();
    let next = format!("tick {}\r", last_tick(&pair.backup.qemu).max(3) + 5);
    let booted = console.wait_for(&next, BOOT);
    assert!(
        booted,
        "{machine:?}, taken over after {syncs} syncs:\n{}",
        &console.text()[own..]
    );
}

#[test]
#[ignore = "a minute and a half: by hand, --ignored"]
fn pc_boots_while_it_is_protected() {
    boots_while_protected(Machine::Pc, true, None);
}

#[test]
#[ignore = "a minute and a half: by hand, --ignored"]
fn q35_boots_while_it_is_protected() {
    boots_while_protected(Machine::Q35, true, None);
}

#[test]
#[ignore = "a minute and a half: by hand, --ignored"]
fn microvm_boots_while_it_is_protected() {
    boots_while_protected(Machine::Microvm, true, None);
}

#[test]
fn a_take_over_in_the_middle_of_a_boot_boots_on() {
    for machine in [Machine::Pc, Machine::Q35] {
        boots_while_protected(machine, false, Some(2));
    }
}
