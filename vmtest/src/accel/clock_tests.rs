//! What only native speed shows: a guest's clock, timers, memory and vector registers over loads in place, under this machine's KVM.
//! `DUNLIN_SYNCS=1000` runs the full count.

use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_guest::Start;

use super::probe::{Vm, copy, spec};
use crate::image::{GuestImage, cpio};
use crate::paths;

/// So long a QEMU may take for an order, on a machine that does other things as well.
const OBEYS: Duration = Duration::from_secs(60);

/// Sleeps (a timer that is lost ends it), looks whether a clock has gone back and whether memory and vector registers are what was
/// written there, makes and drops page tables, and says so. Saves come most often while it counts with its vector registers full.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define WORDS (1 << 16)
static unsigned long words[WORDS];
static unsigned long now(int clock) { struct timespec t; clock_gettime(clock, &t); return t.tv_sec * 1000000000ul + t.tv_nsec; }
static unsigned char full[64], kept[64];
static int vectors_differ(unsigned long round) {
    unsigned long count = 3000000;
    if (!__builtin_cpu_supports("avx")) return 0;
    for (int i = 0; i < 64; i++) full[i] = (round * 13 + i * 7) | 1;
    __asm__ volatile("vmovdqu (%1), %%ymm2\n vmovdqu 32(%1), %%ymm13\n 1: dec %0\n jnz 1b\n"
                     "vmovdqu %%ymm2, (%2)\n vmovdqu %%ymm13, 32(%2)\n vzeroupper"
                     : "+r"(count) : "r"(full), "r"(kept) : "memory", "cc", "xmm2", "xmm13");
    return memcmp(full, kept, sizeof full) != 0;
}
int main(void) {
    unsigned long last[2] = {0, 0}, back = 0, bad = 0, round = 0;
    int clocks[2] = {CLOCK_MONOTONIC, CLOCK_REALTIME};
    setvbuf(stdout, 0, _IOLBF, 0);
    puts("CLOCK-READY");
    for (;; round++) {
        for (int i = 0; i < WORDS; i += 64) words[i] = round ^ i;
        for (int i = 0; i < 500; i++)
            for (int c = 0; c < 2; c++) { unsigned long t = now(clocks[c]); back += t < last[c]; last[c] = t; }
        char *p = mmap(0, 1 << 18, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (int i = 0; i < 1 << 18; i += 4096) p[i] = round;
        int child = fork(), status = 0;
        if (child == 0) { for (int i = 0; i < WORDS; i += 512) words[i]++; _exit(7); }
        bad += waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
        for (int i = 0; i < 1 << 18; i += 4096) bad += p[i] != (char)round;
        munmap(p, 1 << 18);
        bad += vectors_differ(round);
        struct timespec one = {0, 1000000};
        nanosleep(&one, 0);
        for (int i = 0; i < WORDS; i += 64) bad += words[i] != (round ^ i);
        printf("at %lu back %lu bad %lu\n", now(CLOCK_MONOTONIC), back, bad);
    }
}
"#;

/// The same kernel with that program instead of an init.
fn clock_guest(mut image: GuestImage) -> GuestImage {
    let dir = paths::target().join("tmp");
    std::fs::create_dir_all(&dir).unwrap();
    let (source, program) = (dir.join("clock.c"), dir.join("clock"));
    std::fs::write(&source, PROGRAM).unwrap();
    let compiled = Command::new("cc")
        .args(["-O2", "-static", "-o"])
        .args([&program, &source])
        .status();
    assert!(compiled.unwrap().success(), "cc and libc6-dev are needed");
    let mut archive = cpio::Archive::new();
    archive.dir("dev");
    archive.char_device("dev/console", 5, 1);
    archive.file("init", true, &std::fs::read(&program).unwrap());
    image.initrd = dir.join("clock.img");
    archive.write(&image.initrd).unwrap();
    image
}

/// The newest whole line: (clock, times it went back, words of memory and rounds of registers that were wrong). A load may come in the middle of a line, and
/// then the rest of another one follows.
fn newest(vm: &Vm) -> (u64, u64, u64) {
    let text = vm.qemu.console().text();
    let whole = &text[..text.rfind('\n').unwrap_or(0)];
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["at", at, "back", back, "bad", bad] => {
                Some((at.parse().ok()?, back.parse().ok()?, bad.parse().ok()?))
            }
            _ => None,
        }
    };
    whole
        .lines()
        .rev()
        .find_map(parse)
        .expect("it has said so before")
}

#[test]
fn clocks_timers_memory_and_registers_over_loads_in_place() {
    let Some(image) = super::native(&paths::guest_images()).unwrap() else {
        eprintln!("skipped: no KVM on this machine runs a guest");
        return;
    };
    let loads: u32 = std::env::var("DUNLIN_SYNCS").map_or(60, |n| n.parse().unwrap());
    let spec = spec(&clock_guest(image));
    let primary = Vm::start(&spec, Start::Boot).unwrap();
    let patience = Duration::from_secs(90);
    assert!(
        primary.qemu.console().wait_for("bad 0", patience),
        "it does not boot: {}",
        primary.qemu.console().text()
    );
    let mut backup = Vm::start(&spec, Start::Incoming).unwrap();
    let mut colo = backup.qemu.take_colo().unwrap();
    primary.qemu.stop_within(OBEYS).unwrap();
    let state = primary.qemu.save_state_within(true, OBEYS).unwrap();
    copy(&primary.qemu, &backup.qemu).unwrap();
    colo.enable(&state).unwrap();
    let first = newest(&primary).0;
    let (mut ran, begun) = (Duration::ZERO, Instant::now());
    for load in 0..loads {
        let seen = [&primary, &backup].map(|vm| vm.qemu.console().total_bytes());
        primary.qemu.cont_within(OBEYS).unwrap();
        let since = Instant::now();
        for (vm, (who, seen)) in [&primary, &backup]
            .into_iter()
            .zip(["the primary", "the backup"].into_iter().zip(seen))
        {
            let more = vm.qemu.console().wait_more(seen + 90, Duration::from_secs(20));
            let text = vm.qemu.console().text();
            let tail: String = text.lines().rev().take(4).collect::<Vec<_>>().join(" / ");
            assert!(more, "{who} stands still after {load} loads: {tail}");
        }
        colo.request().unwrap();
        primary.qemu.stop_within(OBEYS).unwrap();
        ran += since.elapsed();
        let state = primary.qemu.save_state_within(false, OBEYS).unwrap();
        colo.load(&state, || {
            copy(&primary.qemu, &backup.qemu).map_err(std::io::Error::other)
        })
        .unwrap();
        for (who, vm) in [("primary", &primary), ("backup", &backup)] {
            let (_, back, bad) = newest(vm);
            assert_eq!((back, bad), (0, 0), "{who} after {load} loads");
        }
    }
    let took = begun.elapsed();
    let (last, ..) = newest(&primary);
    primary.qemu.kill().unwrap();
    colo.failover().unwrap();
    let seen = backup.qemu.console().total_bytes();
    assert!(
        backup
            .qemu
            .console()
            .wait_more(seen + 90, Duration::from_secs(20)),
        "it goes on"
    );
    let (after, back, bad) = newest(&backup);
    assert!(after >= last, "the clock of the copy that took over is behind");
    assert_eq!((back, bad), (0, 0), "after the take-over");
    let (told, ran) = (Duration::from_nanos(last - first), ran);
    println!("{loads} loads in {took:?}: the VM ran {ran:?} of it by the host's clock, {told:?} by its own");
}
