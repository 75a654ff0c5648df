//! A program of a user of its own is copied by a daemon without CAP_SYS_RESOURCE, whom the kernel tells no other user's limits.
//!
//! Real namespaces and the real CRIU; the parts are no tests of their own, but this executable again with CRIU's place in its environment.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
#[path = "common/told.rs"]
mod told;
#[path = "common/with_criu.rs"]
mod with_criu;

use dunlin_program::copy::Copy;
use dunlin_program::guard::{self, Criu, Place};
use dunlin_program::message::Adopted;
use rustix::thread::CapabilitySet;
use std::fs;
use std::path::Path;

const NOBODY: u32 = 65_534;

/// Two processes; the first one has a limit of its own, and tells it after each turn with who it is.
const TELLS: &str = r#"
import os, resource, socket, sys, time
became, becomes = os.pipe()
if os.fork() == 0:
    if len(sys.argv) > 1:
        os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
    os.write(becomes, b".")
    time.sleep(600)
os.read(became, 1)
resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192))
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
turn = 0
while True:
    turn += 1
    with open("/tmp/told.new", "w") as told:
        told.write("%d %s %s" % (turn, os.getresuid(), resource.getrlimit(resource.RLIMIT_CORE)))
    os.rename("/tmp/told.new", "/tmp/told")
    card.sendto(b"frame", ("10.213.31.1", 9))
    time.sleep(0.05)
"#;

fn copy(name: &str, user: Option<(u32, u32)>, program: &[&str]) -> Copy {
    let mut spec = copies::spec(31, program);
    spec.walls.as_mut().expect("walls").user = user;
    copies::prepare(name, &spec, None)
}

/// What a copy tells when it has got on from `turn`, and the turn.
fn told_after(turn: u64, copy: &Copy) -> (u64, String) {
    told::told_after(turn, "tmp/told", copy)
}

/// As where a container's rights end.
fn give_up_the_right() {
    let mut sets = rustix::thread::capabilities(None).expect("this thread's capabilities");
    sets.effective.remove(CapabilitySet::SYS_RESOURCE);
    sets.permitted.remove(CapabilitySet::SYS_RESOURCE);
    sets.inheritable.remove(CapabilitySet::SYS_RESOURCE);
    rustix::thread::set_capabilities(None, sets).expect("fewer capabilities");
    // What is begun from here on has it not, either.
    let dropped = rustix::thread::remove_capability_from_bounding_set(CapabilitySet::SYS_RESOURCE);
    dropped.expect("fewer capabilities");
}

#[test]
#[ignore = "a part of the other test"]
fn a_join() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    give_up_the_right();
    let criu = Criu::find().expect("CRIU");
    let user = Some((NOBODY, NOBODY));
    let mut from = copy("the first copy", user, &["/usr/bin/python3", "-c", TELLS]);
    from.go().expect("it begins");
    let (mut turn, at_first) = told_after(0, &from);
    assert_eq!(at_first, "(65534, 65534, 65534) (4096, 8192)");
    for name in ["the second copy", "the third copy"] {
        let folder = tempfile::tempdir().expect("a folder");
        let place = Place::of(&from).expect("where it is");
        // Both ways in, one after the other: one whose memory stays, then a whole one, which is what is brought.
        let held = criu.hold(&place, folder.path()).expect("CRIU is held");
        held.stop(&place).expect("it stands still");
        let dumped = held.dump();
        guard::resume(&place, &mut |_| {}).expect("it runs on");
        dumped.expect("a dump without its memory");
        fs::remove_dir_all(folder.path().join("images")).expect("removed");

        let dumped = criu.dump(&place, folder.path());
        let saved = guard::save_written(&place, folder.path());
        let newest = guard::resume(&place, &mut |_| {}).expect("it runs on");
        dumped.expect("a dump");
        saved.expect("what it has written");
        let to = bring(name, user, &criu, &place, folder.path(), newest);
        // The first one has run on since; the copy of it has to come further.
        let (stood_at, _) = told_after(turn, &from);
        let (now, words) = told_after(stood_at, &to);
        assert_eq!(words, at_first, "{name}");
        turn = now;
        from = to;
    }
}

fn bring(
    name: &str,
    user: Option<(u32, u32)>,
    criu: &Criu,
    from: &Place,
    folder: &Path,
    newest: Option<u32>,
) -> Copy {
    let to = copy(name, user, &["/bin/false"]);
    to.vacate().expect("room");
    let there = Place::of(&to).expect("where it is");
    guard::load_written(&there, folder).expect("what it has written");
    criu.restore(&there, folder, from.prints_to()).expect("a restore");
    let adopted = Adopted {
        neighbours: Vec::new(),
        last_pid: newest.unwrap_or(0),
        stopped: Vec::new(),
    };
    to.adopt(adopted).expect("it runs");
    to
}

/// Each process' limits are told to its own user alone, and CRIU can be one user only.
#[test]
#[ignore = "a part of the other test"]
fn no_join() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    give_up_the_right();
    let criu = Criu::find().expect("CRIU");
    let child = NOBODY.to_string();
    let from = copy("the first copy", None, &["/usr/bin/python3", "-c", TELLS, &child]);
    from.go().expect("it begins");
    let (turn, _) = told_after(0, &from);
    let folder = tempfile::tempdir().expect("a folder");
    let place = Place::of(&from).expect("where it is");
    let why = criu
        .dump(&place, folder.path())
        .expect_err("a limit of another user");
    assert!(why.to_string().contains("no CAP_SYS_RESOURCE"), "{why}");
    guard::resume(&place, &mut |_| {}).expect("it runs on");
    told_after(turn, &from);
}

#[test]
fn a_program_of_another_user_is_copied_without_the_right_to_lift_limits() {
    with_criu::play("a_join");
}

#[test]
fn where_it_cannot_be_copied_without_that_right_one_line_says_so() {
    with_criu::play("no_join");
}
