//! Memory that processes share goes along with a copy of a running program: System V's, and what lies in /dev/shm.
//!
//! Real namespaces and the real CRIU; `a_join` is no test of its own, but this executable again with CRIU's place in its environment.

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

/// As PostgreSQL does: a segment of System V's that nobody can find when it is removed, and a file in /dev/shm. Before each frame it tells
/// what is in both.
const SHARES: &str = r#"
import ctypes, mmap, os, socket, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(4711, 4096, 0o1600)
at = libc.shmat(number, None, 0)
ctypes.memmove(at, b"system v", 8)
file = os.open("/dev/shm/posix", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
shared = mmap.mmap(file, 4096)
shared[:5] = b"posix"
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
turn = 0
while True:
    turn += 1
    found = libc.shmget(4711, 4096, 0) == number
    with open("/told.new", "w") as told:
        told.write("%d %s %s %s" % (turn, ctypes.string_at(at, 8).decode(), bytes(shared[:5]).decode(), found))
    os.rename("/told.new", "/told")
    card.sendto(b"frame", ("10.213.23.1", 9))
    time.sleep(0.05)
"#;

fn copy(name: &str, program: &[&str]) -> Copy {
    copies::prepare(name, &copies::spec(23, program), None)
}

/// What a copy tells when it has got on from `turn`, and the turn.
fn told_after(turn: u64, copy: &Copy) -> (u64, String) {
    told::told_after(turn, "told", copy)
}

#[test]
#[ignore = "a part of the other test"]
fn a_join() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    let criu = Criu::find().expect("CRIU");
    let mut from = copy("the first copy", &["/usr/bin/python3", "-c", SHARES]);
    from.go().expect("it begins");
    let (mut turn, _) = told_after(0, &from);
    // The second copy is made of the first one, the third of the second: which processes are in a namespace of CRIU's making.
    for name in ["the second copy", "the third copy"] {
        let folder = tempfile::tempdir().expect("a folder");
        let place = Place::of(&from).expect("where it is");
        let dumped = criu.dump(&place, folder.path());
        let saved = guard::save_written(&place, folder.path());
        let newest = guard::resume(&place, &mut |_| {}).expect("it runs on");
        dumped.expect("a dump");
        saved.expect("what it has written");
        let to = copy(name, &["/bin/false"]);
        to.vacate().expect("room");
        let there = Place::of(&to).expect("where it is");
        guard::load_written(&there, folder.path()).expect("what it has written");
        criu.restore(&there, folder.path(), place.prints_to())
            .expect("a restore");
        let adopted = Adopted {
            neighbours: Vec::new(),
            last_pid: newest.unwrap_or(0),
            stopped: Vec::new(),
        };
        to.adopt(adopted).expect("it runs");
        // The first one has run on since; the copy of it has to come further.
        let (stood_at, _) = told_after(turn, &from);
        let (now, words) = told_after(stood_at, &to);
        assert_eq!(words, "system v posix True", "{name}");
        turn = now;
        from = to;
    }
}

#[test]
fn memory_that_processes_share_goes_along() {
    with_criu::play("a_join");
}
