//! What a running program has in memory goes ahead of its copy, and what changes afterwards arrives: with the real CRIU, in real namespaces.
//!
//! `a_join` is no test of its own, but this executable again with CRIU's place in its environment.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
#[path = "common/told.rs"]
mod told;
#[path = "common/with_criu.rs"]
mod with_criu;

use dunlin_program::copy::Copy;
use dunlin_program::guard::{self, Criu, Place, Unpacking};
use dunlin_program::message::Adopted;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use told::told_after;

/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// What CRIU would keep on the host for the next time.
const CACHE: &str = "/run/criu.kdat";
/// Where the part that is killed works.
const FOLDER: &str = "DUNLIN_TEST_FOLDER";

/// 24 MiB of chance in two processes, some of which changes at each turn: a page in the middle, one that is new, one that is given back. The
/// child does not share what it changes. Both tell a hash of all, and whether it is what it has to be. One page has
/// something in it that nobody may look at, but for a moment in each turn.
const CHANGES: &str = r#"
import ctypes, hashlib, mmap, os, socket, time
PAGE = 4096
memory = mmap.mmap(-1, 24 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
chance = hashlib.shake_128(b"a seed").digest(1 << 20)
for mib in range(24):
    memory[mib << 20:(mib + 1) << 20] = bytes([mib]) + chance[1:]
expected = mmap.mmap(-1, 24 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
expected[:] = memory[:]
hidden = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
hidden[:6] = b"hidden"
at_hidden = ctypes.addressof(ctypes.c_char.from_buffer(hidden))
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert mprotect(at_hidden, PAGE, 0) == 0
parent = os.fork() != 0
name = "parent" if parent else "child"
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
turn = 0
more = []
while True:
    turn += 1
    for number in [17, turn % 6144]:
        page = (name + str(turn)).encode().ljust(PAGE, b".")
        memory[number * PAGE:(number + 1) * PAGE] = page
        expected[number * PAGE:(number + 1) * PAGE] = page
    given = 3000 + turn % 100
    memory.madvise(mmap.MADV_DONTNEED, given * PAGE, PAGE)
    expected[given * PAGE:(given + 1) * PAGE] = bytes(PAGE)
    if turn % 8 == 0:
        more.append(mmap.mmap(-1, 8 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        more[-1][:PAGE] = page
        if len(more) > 20:
            more.pop(0).close()
    right = all(memory[mib << 20:(mib + 1) << 20] == expected[mib << 20:(mib + 1) << 20] for mib in range(24))
    mprotect(at_hidden, PAGE, mmap.PROT_READ)
    right = right and hidden[:6] == b"hidden"
    mprotect(at_hidden, PAGE, 0)
    right = right and all(one[:4] in (b"pare", b"chil") and one[PAGE:] == bytes(7 * PAGE) for one in more)
    with open("/%s.new" % name, "w") as told:
        told.write("%d %s" % (turn, "right" if right else "wrong"))
    os.rename("/%s.new" % name, "/%s" % name)
    card.sendto(b"frame", ("10.213.29.1", 9))
    time.sleep(0.02)
"#;

fn copy(name: &str, program: &[&str]) -> Copy {
    copies::prepare(name, &copies::spec(29, program), None)
}

/// The turn that one of its processes tells, when it is beyond that.
fn turn_after(turn: u64, name: &str, copy: &Copy) -> u64 {
    let (now, words) = told_after(turn, name, copy);
    assert_eq!(words, "right", "{name} at {now}");
    now
}

/// As the other host gets it: what goes ahead, then the rest.
fn carry(ahead: &Path, from: &Path, to: &Path) {
    let mut unpacking = Unpacking::into(to).expect("tar");
    for folder in [ahead, from] {
        let mut packing = guard::pack(folder, "ahead").expect("tar");
        loop {
            let piece = packing.piece(1 << 20).expect("a piece");
            if piece.is_empty() {
                break;
            }
            unpacking.piece(&piece).expect("it is taken");
        }
    }
    unpacking.end().expect("all of it");
}

#[test]
#[ignore = "a part of the other test"]
fn a_join() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    let criu = Criu::find().expect("CRIU");
    let mut from = copy("the first copy", &["/usr/bin/python3", "-c", CHANGES]);
    from.go().expect("it begins");
    let processes = ["parent", "child"];
    for name in ["the second copy", "the third copy"] {
        for process in processes {
            turn_after(20, process, &from);
        }
        let (folder, other) = (
            tempfile::tempdir().expect("a folder"),
            tempfile::tempdir().expect("a folder"),
        );
        let place = Place::of(&from).expect("where it is");
        let ahead = place
            .go_ahead(&folder.path().join("ahead"))
            .expect("it goes ahead");
        let held = criu.hold(&place, folder.path()).expect("CRIU is held");
        // It runs on meanwhile, and changes.
        let then = turn_after(0, "parent", &from);
        turn_after(then + 5, "parent", &from);
        let begun = Instant::now();
        let still = held.stop(&place).expect("it stands still");
        let unchanged = ahead.compare(&still).expect("compared");
        let dumped = held.dump();
        let dumped = dumped.map_err(|undumped| undumped.why);
        let left = dumped.and_then(|()| guard::compose(&still, &unchanged, folder.path()));
        let saved = guard::save_written(&place, folder.path());
        let newest = guard::resume(&place, &mut |_| {}).expect("it runs on");
        let stood = begun.elapsed();
        let left = left.expect("a dump");
        saved.expect("what it has written");
        println!("{left:?}, it stood still for {stood:?}");
        assert!((40 * MIB..200 * MIB).contains(&left.below_bytes), "{left:?}");
        // Python writes where it only reads: it counts who knows of what.
        assert!((1..16 * MIB).contains(&left.taken_bytes), "{left:?}");
        carry(ahead.folder(), folder.path(), other.path());
        let to = copy(name, &["/bin/false"]);
        to.vacate().expect("room");
        let there = Place::of(&to).expect("where it is");
        guard::load_written(&there, other.path()).expect("what it has written");
        criu.restore(&there, other.path(), place.prints_to())
            .expect("a restore");
        let adopted = Adopted {
            neighbours: Vec::new(),
            last_pid: newest.unwrap_or(0),
            stopped: Vec::new(),
        };
        to.adopt(adopted).expect("it runs");
        for process in processes {
            // The first one has run on since; the copy of it has to come further, and to have all of its memory.
            let stood_at = turn_after(0, process, &from);
            turn_after(stood_at, process, &to);
        }
        from = to;
    }
    // Who is held and not needed leaves nothing, and the program runs on.
    let folder = tempfile::tempdir().expect("a folder");
    let place = Place::of(&from).expect("where it is");
    let processes = || place.processes().expect("its processes");
    let before = processes();
    let ahead = place
        .go_ahead(&folder.path().join("ahead"))
        .expect("it goes ahead");
    let held = criu.hold(&place, folder.path()).expect("CRIU is held");
    assert_eq!(processes().len(), before.len() + 1, "CRIU is among them");
    drop((ahead, held));
    let until = Instant::now() + BOUND;
    while processes() != before {
        assert!(Instant::now() < until, "CRIU is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    let now = turn_after(0, "parent", &from);
    turn_after(now, "parent", &from);
    // CRIU that is killed while it is held: the program stands still then, all of it can be taken in another way, and it runs on.
    let ahead = place
        .go_ahead(&folder.path().join("ahead"))
        .expect("it goes ahead");
    let held = criu.hold(&place, folder.path()).expect("CRIU is held");
    let strangers = processes().into_iter().filter(|number| !before.contains(number));
    for stranger in strangers {
        kill_process(stranger);
    }
    held.stop(&place).expect("it stands still");
    let why = held.dump().expect_err("it was killed");
    println!("{}", why.why);
    drop(ahead);
    fs::remove_dir_all(folder.path().join("images")).expect("removed");
    criu.dump(&place, folder.path()).expect("a whole dump");
    guard::resume(&place, &mut |_| {}).expect("it runs on");
    let now = turn_after(0, "parent", &from);
    turn_after(now, "parent", &from);
}

/// As a database does for its buffers; the child has that from its parent.
const KEEPS_FREE: &str = r#"
import mmap, os, socket, time
free = mmap.mmap(-1, 8 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
name = "parent" if os.fork() else "child"
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
turn = 0
while True:
    turn += 1
    with open("/%s.new" % name, "w") as told:
        told.write("%d right" % turn)
    os.rename("/%s.new" % name, "/%s" % name)
    card.sendto(b"frame", ("10.213.29.1", 9))
    time.sleep(0.02)
"#;

#[test]
#[ignore = "a part of the other test"]
fn a_join_of_free_addresses() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    let criu = Criu::find().expect("CRIU");
    let from = copy("the first copy", &["/usr/bin/python3", "-c", KEEPS_FREE]);
    from.go().expect("it begins");
    turn_after(1, "child", &from);
    let folder = tempfile::tempdir().expect("a folder");
    let place = Place::of(&from).expect("where it is");
    let begun = Instant::now();
    let why = place
        .go_ahead(&folder.path().join("ahead"))
        .expect_err("too many");
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "its addresses were looked at"
    );
    assert!(
        why.to_string().contains("keeps 8192 GiB of addresses free"),
        "{why}"
    );
    let dumped = criu.dump(&place, folder.path());
    let newest = guard::resume(&place, &mut |_| {}).expect("it runs on");
    dumped.expect("a dump");
    let to = copy("the second copy", &["/bin/false"]);
    to.vacate().expect("room");
    let there = Place::of(&to).expect("where it is");
    criu.restore(&there, folder.path(), place.prints_to())
        .expect("a restore");
    let adopted = Adopted {
        neighbours: Vec::new(),
        last_pid: newest.unwrap_or(0),
        stopped: Vec::new(),
    };
    to.adopt(adopted).expect("it runs");
    for process in ["parent", "child"] {
        let stood_at = turn_after(0, process, &from);
        turn_after(stood_at, process, &to);
    }
}

#[test]
fn addresses_that_are_kept_free_are_brought_and_are_no_memory() {
    with_criu::play("a_join_of_free_addresses");
}

fn kill_process(number: u32) {
    let number = rustix::process::Pid::from_raw(number as i32).expect("a number");
    rustix::process::kill_process(number, rustix::process::Signal::KILL).expect("it is there");
}

/// Holds CRIU, says which processes there are, and waits to be killed.
#[test]
#[ignore = "a part of the other test"]
fn a_daemon_that_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let criu = Criu::find().expect("CRIU");
    let copy = copy("the copy", &["/usr/bin/python3", "-c", CHANGES]);
    copy.go().expect("it begins");
    turn_after(5, "parent", &copy);
    let place = Place::of(&copy).expect("where it is");
    let _ahead = place.go_ahead(&folder.join("ahead")).expect("it goes ahead");
    let _held = criu.hold(&place, folder).expect("CRIU is held");
    let numbers: Vec<String> = place
        .processes()
        .expect("its processes")
        .iter()
        .map(u32::to_string)
        .collect();
    fs::write(folder.join("new"), numbers.join(" ")).expect("written");
    fs::rename(folder.join("new"), folder.join("processes")).expect("renamed");
    std::thread::sleep(BOUND);
}

#[test]
fn a_daemon_that_is_killed_while_criu_is_held_leaves_no_process() {
    let criu = dunlin_vmtest::paths::criu();
    if !rustix::process::geteuid().is_root() || !criu.exists() {
        return skipped::skip("programs are copied as root, with CRIU (cargo xtask setup)");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let had_cache = Path::new(CACHE).exists();
    let mut daemon = Command::new(std::env::current_exe().expect("it runs"))
        .args(["--exact", "a_daemon_that_is_killed", "--ignored"])
        .env("DUNLIN_CRIU", criu)
        .env(FOLDER, folder.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("it begins");
    let until = Instant::now() + BOUND;
    let numbers = loop {
        match fs::read_to_string(folder.path().join("processes")) {
            Ok(numbers) => break numbers,
            Err(_) => assert!(Instant::now() < until, "CRIU is not held"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    daemon.kill().expect("killed");
    daemon.wait().expect("collected");
    // The first process, two of the program, and CRIU.
    assert_eq!(numbers.split(' ').count(), 4, "{numbers}");
    for number in numbers.split(' ') {
        while Path::new("/proc").join(number).exists() {
            assert!(Instant::now() < until, "process {number} is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert_eq!(Path::new(CACHE).exists(), had_cache, "CRIU has kept something");
}

#[test]
fn memory_goes_ahead_and_what_changes_afterwards_arrives() {
    with_criu::play("a_join");
}
