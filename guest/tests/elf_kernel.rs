//! A kernel that QEMU loads into RAM itself (an ELF file with a PVH note, no bzImage) is loaded again by every reset, and so
//! before every load of a backup: over the variables of the kernel that runs there. Nothing of that may be left.

mod common;

use std::time::Duration;

use common::*;
use dunlin_guest::{Accel, Machine, VmSpec};

const LOAD: u64 = 0x20_0000;
const PAGE: u64 = 0x1000;

/// The file: a page of code, and one with a variable that is 0 in it, which the code sets once; then it says `k` as long as the
/// variable is what it was set to, and `X` otherwise.
fn elf() -> Vec<u8> {
    #[rustfmt::skip]
    let code: &[u8] = &[
        0xC7, 0x05, 0x00, 0x10, 0x20, 0x00, 0x5A, 0x5A, 0x5A, 0x5A, // mov dword [0x201000], 0x5a5a5a5a
        // outer:
        0xB9, 0x40, 0x0D, 0x03, 0x00,                               // mov ecx, 200000
        0x49,                                                       // dec ecx
        0x75, 0xFD,                                                 // jnz
        0xB0, 0x6B,                                                 // mov al, 'k'
        0x81, 0x3D, 0x00, 0x10, 0x20, 0x00, 0x5A, 0x5A, 0x5A, 0x5A, // cmp dword [0x201000], 0x5a5a5a5a
        0x74, 0x02,                                                 // je same
        0xB0, 0x58,                                                 // mov al, 'X'
        // same:
        0x66, 0xBA, 0xF8, 0x03,                                     // mov dx, 0x3f8
        0xEE,                                                       // out dx, al
        0xFF, 0x05, 0x00, 0x00, 0x40, 0x00,                         // inc dword [0x400000]
        0xEB, 0xDB,                                                 // jmp outer
    ];
    let half = |file: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|v| file.extend(v.to_le_bytes()));
    let word = |file: &mut Vec<u8>, values: &[u32]| values.iter().for_each(|v| file.extend(v.to_le_bytes()));
    let long = |file: &mut Vec<u8>, values: &[u64]| values.iter().for_each(|v| file.extend(v.to_le_bytes()));
    const NOTE: u64 = 0x200;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    half(&mut file, &[2, 62]); // an executable, x86-64
    word(&mut file, &[1]);
    long(&mut file, &[LOAD, 64, 0]); // entry, program headers
    word(&mut file, &[0]);
    half(&mut file, &[64, 56, 2, 64, 0, 0]);
    word(&mut file, &[1, 7]); // PT_LOAD
    long(&mut file, &[PAGE, LOAD, LOAD, 2 * PAGE, 2 * PAGE, PAGE]);
    word(&mut file, &[4, 4]); // PT_NOTE
    long(&mut file, &[NOTE, 0, 0, 24, 24, 4]);
    file.resize(NOTE as usize, 0);
    word(&mut file, &[4, 8, 18]); // XEN_ELFNOTE_PHYS32_ENTRY
    file.extend(b"Xen\0");
    long(&mut file, &[LOAD]);
    file.resize(PAGE as usize, 0);
    file.extend(code);
    file.resize(3 * PAGE as usize, 0);
    file
}

fn keeps_its_variables(machine: Machine) {
    let _alone = one_at_a_time();
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("elf-kernel-{machine:?}"));
    std::fs::write(&path, elf()).unwrap();
    let mut spec = VmSpec::new("elf", 32);
    spec.accel = Accel::Tcg;
    spec.machine = machine;
    spec.qemu = std::env::var_os("DUNLIN_TEST_QEMU").map(Into::into);
    spec.kernel = Some(path);
    let mut pair = Pair::new(&spec, "kkkkkkkk");
    for _ in 0..syncs_or(4) {
        for vm in [&pair.primary, &pair.backup] {
            let seen = vm.qemu.console().total_bytes();
            assert!(
                vm.qemu.console().wait_more(seen + 2, Duration::from_secs(30)),
                "both run"
            );
        }
        let staged = pair.pause_and_stage();
        assert!(
            !pair.carried.iter().any(|page| page == LOAD / PAGE + 1),
            "nobody has written the variable since: no sync carries it"
        );
        pair.apply(staged, assert_same_ram);
    }
    pair.primary.qemu.kill().unwrap();
    pair.colo.failover().unwrap();
    let console = pair.backup.qemu.console();
    let seen = console.total_bytes();
    assert!(console.wait_more(seen + 2, Duration::from_secs(30)), "it goes on");
    assert!(
        !console.text().contains('X'),
        "its variable was lost: {}",
        console.text()
    );
}

#[test]
fn pc() {
    keeps_its_variables(Machine::Pc);
}

#[test]
fn q35() {
    keeps_its_variables(Machine::Q35);
}

#[test]
fn microvm() {
    keeps_its_variables(Machine::Microvm);
}
