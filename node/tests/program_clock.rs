//! The agreed clock in a bare program: what it reads is what its host sets, before and after a copy of it was brought elsewhere.
//!
//! Real namespaces, the kernel's own vDSO and the real CRIU; `a_clock_is_carried` is no test of its own, but this executable again with
//! CRIU's place in its environment.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
#[path = "common/with_criu.rs"]
mod with_criu;

use dunlin_core::agreed::AgreedTime;
use dunlin_program::copy::Copy;
use dunlin_program::guard::{self, Criu, Place};
use dunlin_program::message::Adopted;
use std::time::{Duration, Instant};

/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);
/// Says its two clocks as often as it can.
const PROGRAM: &str = "import time\nwhile True:\n  print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.time_ns(), flush=True); time.sleep(0.01)";

fn copy(name: &str) -> Copy {
    let mut spec = copies::spec(22, &["/usr/bin/python3", "-c", PROGRAM]);
    spec.walls.as_mut().expect("it has some").clock_page = true;
    copies::prepare(name, &spec, None)
}

fn at(monotonic_s: u64, wall_s: u64) -> AgreedTime {
    AgreedTime {
        monotonic_ns: monotonic_s * 1_000_000_000 + 5,
        wall_ns: wall_s * 1_000_000_000 + 7,
    }
}

fn set(copy: &Copy, time: AgreedTime) {
    copy.clock().expect("a page").set(time).expect("set");
}

/// Until it says that.
fn says(copy: &Copy, time: AgreedTime) {
    let wanted = format!("{} {}", time.monotonic_ns, time.wall_ns);
    let until = Instant::now() + BOUND;
    while !copy.last_words(1).contains(&wanted) {
        assert!(
            Instant::now() < until,
            "{:?} and not {wanted}",
            copy.last_words(9)
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "a part of the other test"]
fn a_clock_is_carried() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    let criu = Criu::find().expect("CRIU");
    let folder = tempfile::tempdir().expect("a folder");
    let first = copy("the first copy");
    set(&first, at(100, 900));
    first.go().expect("it begins");
    says(&first, at(100, 900));
    set(&first, at(101, 950));
    says(&first, at(101, 950));

    // A copy, and one of the copy.
    let mut from = first;
    for number in 1..=2 {
        let place = Place::of(&from).expect("where it is");
        criu.dump(&place, folder.path()).expect("a dump");
        guard::save_written(&place, folder.path()).expect("what it has written");
        let newest = guard::resume(&place, &mut |_| {}).expect("it runs on");
        let to = copy("the next copy");
        to.vacate().expect("room");
        let there = Place::of(&to).expect("where it is");
        guard::load_written(&there, folder.path()).expect("what it has written");
        criu.restore(&there, folder.path(), place.prints_to())
            .expect("a restore");
        set(&to, at(200 * number, 1_000 * number));
        guard::lead_clocks(&there, to.leads()).expect("led to its page");
        let adopted = Adopted {
            neighbours: Vec::new(),
            last_pid: newest.unwrap_or(0),
            stopped: Vec::new(),
        };
        to.adopt(adopted).expect("it runs");
        says(&to, at(200 * number, 1_000 * number));
        set(&to, at(200 * number + 1, 1_000 * number + 1));
        says(&to, at(200 * number + 1, 1_000 * number + 1));
        from = to;
        std::fs::remove_dir_all(folder.path().join("images")).expect("images");
    }
}

#[test]
fn a_program_reads_the_clock_that_its_host_sets_and_so_does_a_copy_of_it() {
    with_criu::play("a_clock_is_carried");
}
