//! A guest of forty bytes: writes 17 pages over and over and a serial port. It needs no kernel, so it also runs under
//! a KVM that cannot run a stock Linux. The same test under TCG shows that the test itself is right.

mod common;

use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::qemu::{accel, spawn::choose_user};
use dunlin_guest::{Accel, Machine, Qemu, VmSpec};

const FIRST_PAGE: u64 = 0x400;
const PAGES: u64 = 17;

/// A multiboot image (its header says where to load and enter it): protected mode, no paging, no interrupts.
fn program() -> Vec<u8> {
    const LOAD: u32 = 0x10_0000;
    const HEADER_WORDS: u32 = 8;
    #[rustfmt::skip]
    let code: &[u8] = &[
        0x31, 0xDB,                         // xor ebx, ebx
        // outer:
        0x43,                               // inc ebx
        0xBF, 0x00, 0x00, 0x40, 0x00,       // mov edi, 0x400000
        0xB9, PAGES as u8, 0, 0, 0,         // mov ecx, 17
        // fill:
        0x89, 0x1F,                         // mov [edi], ebx
        0x81, 0xC7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
        0x49,                               // dec ecx
        0x75, 0xF5,                         // jnz fill
        0xF7, 0xC3, 0xFF, 0x03, 0x00, 0x00, // test ebx, 0x3ff
        0x75, 0xE2,                         // jnz outer
        0x66, 0xBA, 0xF8, 0x03,             // mov dx, 0x3f8
        0xB0, 0x6B,                         // mov al, 'k'
        0xEE,                               // out dx, al
        0xEB, 0xD9,                         // jmp outer
    ];
    let (magic, flags) = (0x1BAD_B002u32, 1u32 << 16);
    let end = LOAD + HEADER_WORDS * 4 + code.len() as u32;
    let checksum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
    let header = [
        magic,
        flags,
        checksum,
        LOAD,
        LOAD,
        end,
        end,
        LOAD + HEADER_WORDS * 4,
    ];
    let mut image: Vec<u8> = header.iter().flat_map(|w| w.to_le_bytes()).collect();
    image.extend_from_slice(code);
    image.resize(4096, 0);
    image
}

/// A guest that never waits is never idle; a stopped one is, as soon as its threads have gone to sleep.
fn busy_and_idle(qemu: &Qemu) {
    // Its threads are looked at one after the other: on a busy machine one may have slept when the other did not.
    let idle = (0..200).filter(|_| qemu.threads().idle()).count();
    assert!(idle < 20, "it was idle at {idle} of 200 looks");
    qemu.stop_within(OBEYS).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !qemu.threads().idle() {
        assert!(
            Instant::now() < deadline,
            "a stopped VM is idle: {:?}",
            qemu.threads().letters().collect::<Vec<_>>()
        );
        std::thread::yield_now();
    }
    qemu.cont_within(OBEYS).unwrap();
}

/// The guest under this accelerator.
fn bare(accel: Accel) -> VmSpec {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bare-metal-{accel:?}.bin"));
    std::fs::write(&path, program()).unwrap();
    let mut spec = VmSpec::new("bare", 32);
    spec.accel = accel;
    spec.machine = Machine::Pc;
    spec.qemu = std::env::var_os("DUNLIN_TEST_QEMU").map(Into::into);
    spec.kernel = Some(path);
    // A software-assisted KVM offers MSRs with `-cpu host` that it then refuses to set.
    spec.cpu = Some("qemu64".into());
    let ordinary = choose_user(None).unwrap();
    if accel == Accel::Kvm && ordinary.is_some_and(|user| accel::is_for(&user).is_err()) {
        // Only here: /dev/kvm of this machine is root's alone.
        spec.run_as = Some("root".into());
    }
    spec
}

fn tracked_synced_and_failed_over(accel: Accel) {
    let _alone = one_at_a_time();
    let mut pair = Pair::new(&bare(accel), "kkkkkkkk");
    assert_eq!(pair.primary.qemu.accel().0, accel);
    busy_and_idle(&pair.primary.qemu);
    let pages: Vec<u64> = (FIRST_PAGE..FIRST_PAGE + PAGES).collect();
    for _ in 0..syncs_or(8) {
        for vm in [&pair.primary, &pair.backup] {
            let seen = vm.qemu.console().total_bytes();
            assert!(
                vm.qemu.console().wait_more(seen + 2, Duration::from_secs(30)),
                "both run"
            );
        }
        let staged = pair.pause_and_stage();
        let united: Vec<u64> = pair.carried.iter().collect();
        // Below 1 MiB the host itself may write: KVM was seen to touch one page of the firmware's area at each exit.
        let high: Vec<u64> = united.iter().copied().filter(|page| *page >= 0x100).collect();
        assert_eq!(high, pages, "the 17 pages and no other");
        assert!(
            united.len() - high.len() <= if accel == Accel::Kvm { 1 } else { 0 },
            "{united:x?}"
        );
        assert_eq!(staged.stats.dirty_primary, staged.stats.united);
        pair.apply(staged, assert_same_ram);
    }
    pair.primary.qemu.kill().unwrap();
    pair.colo.failover().unwrap();
    let seen = pair.backup.qemu.console().total_bytes();
    assert!(
        pair.backup
            .qemu
            .console()
            .wait_more(seen + 2, Duration::from_secs(30)),
        "it goes on"
    );
}

#[test]
fn under_tcg() {
    tracked_synced_and_failed_over(Accel::Tcg);
}

#[test]
fn under_kvm() {
    match accel::opens() {
        Ok(()) => tracked_synced_and_failed_over(Accel::Kvm),
        Err(why) => skipped::skip(&why.to_string()),
    }
}
