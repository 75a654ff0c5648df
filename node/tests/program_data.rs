//! A running program is copied with its data: what it has open on its image is open in the copy, and the image is as it was at the dump.
//!
//! Real namespaces, images, loop devices and CRIU; `a_join` is no test of its own, but this executable again with CRIU's place in its
//! environment.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;
#[path = "common/with_criu.rs"]
mod with_criu;

use dunlin_program::copy::Copy;
use dunlin_program::data::Data;
use dunlin_program::data::blocks::{self, Target};
use dunlin_program::guard::{self, Criu, Place};
use dunlin_program::message::{Adopted, Mounted};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);
const AT: &str = "/srv";

/// Writes lines on and on, each with a number, into a file that it has open, one that has no name any more, and one that is new each time.
const WRITES: &str = r#"exec {log}>>/srv/log {gone}>/srv/gone
    rm /srv/gone
    echo in memory > /tmp/dunlin-elsewhere
    echo over a mount > "$MOUNTED/dunlin-elsewhere"
    n=0
    while :; do
        n=$((n + 1))
        echo $n >&$log
        echo $n >&$gone
        echo $n > /srv/newest.new && mv /srv/newest.new /srv/newest
        head -c 300000 /dev/urandom > /srv/large
        [ $n = 3 ] && echo frame > /dev/udp/10.213.24.1/9
    done"#;

/// A file system of its own below `/tmp`, as any host may have: what is mounted there is looked at before a copy's files come.
/// Only this thread and its children see it.
struct BelowTmp(PathBuf);

impl BelowTmp {
    fn mount(folder: &Path) -> Self {
        let (nothing, at) = (None::<&str>, folder.join("mounted"));
        fs::create_dir(&at).expect("a folder");
        unshare(CloneFlags::CLONE_NEWNS).expect("mounts of its own");
        mount(
            nothing,
            "/",
            nothing,
            MsFlags::MS_PRIVATE | MsFlags::MS_REC,
            nothing,
        )
        .expect("they stay its own");
        mount(Some("none"), &at, Some("tmpfs"), MsFlags::empty(), nothing).expect("a file system");
        Self(at)
    }
}

impl Drop for BelowTmp {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).expect("it is mounted");
    }
}

fn copy_of(name: &str, data: &Data, image: dunlin_program::data::Image, mounted: &Path) -> Copy {
    let attached = image.attach().expect("a loop device");
    let mut spec = copies::spec(24, &["/bin/bash", "-c", WRITES]);
    spec.directory = AT.into();
    let mounted = mounted.to_str().expect("a path of text");
    spec.environment.push(("MOUNTED".into(), mounted.into()));
    spec.walls.as_mut().expect("it has some").data = Some(Mounted {
        device: attached.device().to_owned(),
        at: data.at.clone(),
    });
    copies::prepare(name, &spec, Some(attached))
}

fn data(folder: &Path, name: &str) -> Data {
    Data {
        image: folder.join(name),
        at: AT.into(),
        mib: 32,
    }
}

/// A file of its data, as the copy has it.
fn file(copy: &Copy, name: &str) -> String {
    let path = format!("/proc/{}/root{AT}/{name}", copy.keeper());
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn last(log: &str) -> u64 {
    let numbers: Vec<u64> = log.lines().map(|line| line.parse().expect("a number")).collect();
    let all: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, all, "a line is missing, or there twice");
    numbers.len() as u64
}

#[test]
#[ignore = "a part of the other test"]
fn a_join() {
    if std::env::var_os("DUNLIN_CRIU").is_none() {
        return;
    }
    let criu = Criu::find().expect("CRIU");
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let mounted = BelowTmp::mount(folder.path());
    let at = mounted.0.clone();
    let (ours, theirs) = (data(folder.path(), "ours.img"), data(folder.path(), "theirs.img"));
    let first = copy_of("the first copy", &ours, ours.open(None).expect("an image"), &at);
    first.go().expect("it begins");
    let bound = Timespec::try_from(BOUND).expect("a time");
    let mut card = [PollFd::from_borrowed_fd(first.card().as_fd(), PollFlags::IN)];
    let sent = poll(&mut card, Some(&bound)).expect("poll");
    assert_eq!(sent, 1, "{:?}", first.last_words(9));
    assert!(data(folder.path(), "ours.img").open(None).is_err(), "two users");

    // What is there already, while it runs.
    let place = Place::of(&first).expect("where it is");
    let source = place.data().expect("an image");
    let image = theirs.open(None).expect("another image");
    let mut known = blocks::hashes(&image).expect("its hashes");
    let target = Target::new(image).expect("it");
    let mut write = |block: u64, bytes: &[u8]| target.write(block, bytes);
    let ahead = source.differing(&mut known, &mut write).expect("read");
    assert!(ahead > 0, "both are empty");
    let dumped = criu.dump(&place, folder.path());
    let saved = guard::save_written(&place, folder.path());
    let stood = last(&file(&first, "log"));
    let over = source.at_rest(&mut known.clone(), Duration::ZERO, &mut |_, _| Ok(()));
    let over = over.expect_err("no time is no time").to_string();
    assert!(over.contains("too long"), "{over}");
    let rest = source.at_rest(&mut known, Duration::from_secs(60), &mut write);
    let newest = guard::resume(&place, &mut |why| panic!("{why}"));
    dumped.expect("a dump");
    saved.expect("what it has written");
    assert!(rest.expect("at one moment") > 0, "it has written meanwhile");
    drop(first);

    target.sync().expect("on disk");
    // The other host has not mounted it.
    drop(mounted);
    let second = copy_of("the second copy", &theirs, target.end(), &at);
    second.vacate().expect("room");
    let there = Place::of(&second).expect("where it is");
    guard::load_written(&there, folder.path()).expect("what it has written");
    let restored = criu.restore(&there, folder.path(), place.prints_to());
    restored.expect("a restore");
    assert_eq!(last(&file(&second, "log")), stood, "it stands still");
    let adopted = Adopted {
        neighbours: Vec::new(),
        last_pid: newest.expect("it ran on").unwrap_or(0),
        stopped: Vec::new(),
    };
    second.adopt(adopted).expect("it runs");
    let until = Instant::now() + BOUND;
    while last(&file(&second, "log")) < stood + 3 {
        assert!(
            Instant::now() < until,
            "it does not go on: {:?}",
            second.last_words(9)
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    // The overlay has seen what was carried: the file is there, and more can be written beside it.
    let inside = PathBuf::from(format!("/proc/{}/root/tmp", second.keeper()));
    let carried = fs::read_to_string(inside.join("dunlin-elsewhere"));
    assert_eq!(carried.expect("what was written before"), "in memory\n");
    let seen = PathBuf::from(format!("/proc/{}/root", second.keeper()))
        .join(at.strip_prefix("/").expect("it is absolute"));
    let carried = fs::read_to_string(seen.join("dunlin-elsewhere"));
    assert_eq!(carried.expect("what was written over a mount"), "over a mount\n");
    fs::write(inside.join("dunlin-later"), "").expect("it can be written to");
    drop((second, there, place));

    // What was written is on the image, and nobody has it any more.
    for data in [&ours, &theirs] {
        let image = data.open(None).expect("it is free");
        drop(image);
        let checked = Command::new("/usr/sbin/e2fsck")
            .args(["-f", "-n"])
            .arg(&data.image)
            .output();
        let checked = checked.expect("e2fsck");
        assert!(
            checked.status.success(),
            "{}",
            String::from_utf8_lossy(&checked.stdout)
        );
    }
    let left = fs::read_dir("/sys/block").expect("it is there").flatten();
    let files = left.filter_map(|block| fs::read_to_string(block.path().join("loop/backing_file")).ok());
    let ours = files.filter(|file| file.contains(&*folder.path().to_string_lossy()));
    assert_eq!(ours.count(), 0, "loop devices are left");
}

#[test]
fn a_running_program_is_copied_with_its_data() {
    with_criu::play("a_join");
}
