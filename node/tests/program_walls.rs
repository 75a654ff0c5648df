//! A program that runs as root, and has changed all that a join could run of its files: nothing of that runs outside its walls.
//!
//! Real namespaces and the real CRIU; `a_join` is no test of its own, but this executable again with CRIU's place in its environment.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
#[path = "common/with_criu.rs"]
mod with_criu;

use dunlin_program::copy::Copy;
use dunlin_program::guard::{self, Criu, Place};
use dunlin_program::message::Adopted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Duration;

/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);
/// A file of the whole host's that it has open, to be read alone.
const HELD: &str = "/proc/sys/kernel/core_pattern";
/// Written by whatever runs that the program has put in the place of the host's.
const MARKER: &str = "ran-outside";

/// Puts a script that leaves its name in the place of everything that a join might run, then sends a frame, and waits.
fn tampering(criu: &Path) -> String {
    format!(
        r#"put() {{ mkdir -p "${{1%/*}}"; rm -f "$1"; printf '#!/bin/bash\necho %s >> /{MARKER}\nexit 1\n' "$1" > "$1"; chmod 755 "$1"; }}
           for file in /usr/sbin/criu /usr/sbin/iptables /usr/sbin/iptables-restore /usr/sbin/ip /usr/bin/tar /evil "{}"; do put $file; done
           mkdir -p /etc/criu /usr/lib/criu /root/.criu /run
           echo 'action-script /evil' | tee /etc/criu/default.conf > /root/.criu/default.conf
           echo no library > /usr/lib/criu/evil.so
           echo no cache > /run/criu.kdat
           echo /usr/lib/criu/evil.so > /etc/ld.so.preload
           put /bin/sh
           sleep 600 & kill -STOP $!
           exec {{kept}}> /kept
           exec {{held}}< {HELD}
           echo before >&$kept
           echo frame > /dev/udp/10.213.21.1/9
           exec sleep 600"#,
        criu.display()
    )
}

fn copy(name: &str, script: &str) -> Copy {
    copies::prepare(name, &copies::spec(21, &["/bin/bash", "-c", script]), None)
}

/// What a copy has written there; nothing where it has not.
fn written(copy: &Copy, path: &str) -> Option<String> {
    let layers = copy.written().expect("walls");
    fs::read_to_string(format!("/proc/self/fd/{}/u0/{path}", layers.as_raw_fd())).ok()
}

#[test]
#[ignore = "a part of the other test"]
fn a_join() {
    let Some(path) = std::env::var_os("DUNLIN_CRIU") else {
        return;
    };
    let criu = Criu::find().expect("CRIU");
    let folder = tempfile::tempdir().expect("a folder");
    let first = copy("the first copy", &tampering(Path::new(&path)));
    first.go().expect("it begins");
    let bound = Timespec::try_from(BOUND).expect("a time");
    let mut card = [PollFd::from_borrowed_fd(first.card().as_fd(), PollFlags::IN)];
    let sent = poll(&mut card, Some(&bound)).expect("poll");
    assert_eq!(sent, 1, "{:?}", first.last_words(9));
    assert!(
        written(&first, "etc/ld.so.preload").is_some(),
        "it has not tampered"
    );

    let place = Place::of(&first).expect("where it is");
    let stopped = one_that_is_stopped(&place);
    let bytes = place.bytes().expect("its size");
    // Bash and what it runs, and the files that it has put into its layer.
    assert!((1 << 20..64 << 20).contains(&bytes), "{bytes}");
    // While it runs CRIU begins, and is held.
    let held = criu.hold(&place, folder.path()).expect("CRIU is held");
    assert_eq!(written(&first, MARKER), None, "this ran outside");
    held.stop(&place).expect("it stands still");
    let dumped = held.dump();
    guard::resume(&place, &mut |_| {}).expect("it runs on");
    guard::stop_again(&place, &stopped).expect("stopped again");
    assert_eq!(one_that_is_stopped(&place), stopped);
    assert_eq!(written(&first, MARKER), None, "this ran outside");
    dumped.expect("a dump without its memory");
    fs::remove_dir_all(folder.path().join("images")).expect("removed");
    let dumped = criu.dump(&place, folder.path());
    let saved = guard::save_written(&place, folder.path());
    let newest = resume_at_the_second_try(&place);
    assert_eq!(written(&first, MARKER), None, "this ran outside");
    dumped.expect("a dump");
    saved.expect("what it has written");
    assert!(newest.is_some_and(|newest| newest >= 2), "it runs on");

    let second = copy("the second copy", "exit 1");
    second.vacate().expect("room");
    let there = Place::of(&second).expect("where it is");
    guard::load_written(&there, folder.path()).expect("what it has written");
    let restored = criu.restore(&there, folder.path(), place.prints_to());
    assert_eq!(written(&second, MARKER), None, "this ran outside");
    restored.expect("a restore");
    assert_eq!(written(&second, "kept").as_deref(), Some("before\n"));
    let adopted = Adopted {
        neighbours: Vec::new(),
        last_pid: newest.unwrap_or(0),
        stopped: stopped.clone(),
    };
    second.adopt(adopted).expect("it runs");
    assert_eq!(one_that_is_stopped(&there), stopped);
    for copy in [&first, &second] {
        assert_eq!(writable(copy), Vec::<String>::new());
        assert_eq!(opened_again(copy), [Some(libc::EROFS)]);
    }
    drop(second);
    let gone = guard::resume(&there, &mut |_| {}).expect("no more tries");
    assert_eq!(gone, None, "the copy has ended");
}

/// What the program would be told that opens what it holds once more, to write to it. Root is asked here, who may do all but that.
fn opened_again(copy: &Copy) -> Vec<Option<i32>> {
    let mut processes = vec![copy.keeper()];
    let mut told = Vec::new();
    while let Some(process) = processes.pop() {
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
        let children = children.unwrap_or_default();
        processes.extend(
            children
                .split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).expect("its descriptors");
        let held = descriptors.filter_map(|one| Some(one.ok()?.path()));
        let held = held.filter(|one| fs::read_link(one).is_ok_and(|to| to == Path::new(HELD)));
        told.extend(held.map(|one| {
            let opened = fs::File::options().write(true).open(one);
            opened.err().and_then(|error| error.raw_os_error())
        }));
    }
    // One for each process that has it: the program's first one is enough.
    told.dedup();
    told
}

/// The kernel's own mounts in its view that are not read-only, but for what is its processes' own. What lies below the copy's own /proc is
/// covered by it.
fn writable(copy: &Copy) -> Vec<String> {
    let keeper = copy.keeper();
    let children =
        fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).expect("its first process");
    let first = children.trim();
    let mounts = fs::read_to_string(format!("/proc/{first}/mountinfo")).expect("its mounts");
    let is_read_only = |at: &str| {
        let last = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(at));
        let options = last.and_then(|line| line.split(' ').nth(5)).unwrap_or("none");
        options.split(',').any(|option| option == "ro")
    };
    let wanted = [
        "/sys",
        "/proc/sys",
        "/proc/sysrq-trigger",
        "/proc/irq",
        "/proc/fs",
    ];
    let wanted = wanted.into_iter().filter(|place| Path::new(place).exists());
    let below_sys = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let below_sys = below_sys.filter(|at| at.starts_with("/sys/"));
    let not = wanted.chain(below_sys).filter(|at| !is_read_only(at));
    not.map(str::to_owned).collect()
}

/// By the number inside of the one that the program has told to stand still, as soon as it alone does.
fn one_that_is_stopped(place: &Place) -> Vec<u32> {
    let until = std::time::Instant::now() + BOUND;
    loop {
        let stopped = guard::stopped(place).expect("its processes");
        if stopped.len() == 1 || std::time::Instant::now() > until {
            return stopped;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The first one finds no descriptor free.
fn resume_at_the_second_try(place: &Place) -> Option<u32> {
    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..limit
    };
    setrlimit(Resource::Nofile, none).expect("a limit");
    let mut failures = 0;
    let newest = guard::resume(place, &mut |_| {
        failures += 1;
        setrlimit(Resource::Nofile, limit).expect("the limit as it was");
    });
    assert_eq!(failures, 1);
    newest.expect("it runs on")
}

#[test]
fn nothing_that_a_program_has_written_runs_outside_its_walls_when_it_is_copied() {
    with_criu::play("a_join");
}
