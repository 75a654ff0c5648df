//! Who may ask what of a real daemon, as real users of this machine: who may only look is refused what changes something, and a stranger all.
//!
//! Needs root, which becomes the users; told as skipped without it.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use daemon::{Host, OPERATOR, ROOT, STRANGER, User, VIEWER};
use dunlin_vmtest::is_root;

#[path = "common/daemon.rs"]
mod daemon;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

const VM: &str = "name = \"shop\"\nmembers = [\"a\"]\npolicy = \"none\"\n[vm]\nmemory_mib = 64\n";

fn is_done(host: &Host, user: User, words: &[&str]) -> Result<()> {
    let output = host.say(user, words)?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} says {words:?}: {why}", user.0);
    Ok(())
}

/// It is refused in one line that names the user, and `wanted` is in it.
fn is_refused(host: &Host, user: User, words: &[&str], wanted: &str) -> Result<()> {
    let output = host.say(user, words)?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success(),
        "{} says {words:?}, and it is done",
        user.0
    );
    ensure!(
        why.contains(wanted) && why.lines().count() == 1,
        "{} says {words:?}: {why}",
        user.0
    );
    Ok(())
}

#[test]
fn whoever_may_only_look_is_refused_what_changes_something_and_a_stranger_all() -> Result<()> {
    if !is_root() {
        skipped::skip("becoming another user needs root");
        return Ok(());
    }
    let mut host = Host::new()?;
    host.start()?;
    // Without a group the socket is root's.
    is_done(&host, ROOT, &["status"])?;
    for user in [OPERATOR, VIEWER, STRANGER] {
        is_refused(&host, user, &["status"], "Permission denied")?;
    }
    host.stop();

    host.configure("viewers = \"daemon\"\noperators = \"games\"")?;
    let vms = host.file().with_file_name("vms");
    fs::create_dir(&vms)?;
    host.start()?;
    for user in [VIEWER, OPERATOR, ROOT] {
        is_done(&host, user, &["status"])?;
        is_done(&host, user, &["events"])?;
        is_done(&host, user, &["cluster", "status"])?;
        is_done(&host, user, &["log", "status"])?;
    }
    let changes: [&[&str]; 3] = [
        &["switchover", "shop"],
        &["down", "shop", "--now"],
        &["verify-disk", "shop"],
    ];
    for words in changes {
        is_refused(&host, VIEWER, words, "user 'daemon' may not do that")?;
        is_refused(&host, VIEWER, words, "members of group 'games'")?;
        is_refused(&host, STRANGER, words, "user 'nobody' may not talk")?;
        // Their right is there; the VM is not.
        is_refused(&host, OPERATOR, words, "there is no VM 'shop'")?;
    }
    let above: [&[&str]; 4] = [
        &["down", "shop", "--force"],
        &["promote", "shop", "--force"],
        &["replace", "shop", "a"],
        &["log", "create", "jobs", "a"],
    ];
    for words in above {
        is_refused(&host, OPERATOR, words, "user 'games' may not do that")?;
        is_refused(&host, OPERATOR, words, "it is for root")?;
    }
    is_refused(&host, STRANGER, &["status"], "user 'nobody' may not talk")?;

    let own = host.socket().with_file_name("shop.toml");
    fs::write(&own, VM)?;
    fs::set_permissions(&own, Permissions::from_mode(0o644))?;
    let own = own.to_str().context("a path")?;
    is_refused(&host, VIEWER, &["up", own], "user 'daemon' may not do that")?;
    is_refused(
        &host,
        OPERATOR,
        &["up", own],
        "may start only VMs that root has prepared",
    )?;

    // A check runs what the file names as QEMU, as the user that it names.
    let ran = host.socket().with_file_name("ran");
    let qemu = host.socket().with_file_name("qemu");
    fs::write(&qemu, format!("#!/bin/sh\ntouch {}\n", ran.display()))?;
    fs::set_permissions(&qemu, Permissions::from_mode(0o755))?;
    let lines = format!(
        "kernel = \"/bin/true\"\nqemu = \"{}\"\nrun_as = \"root\"\nsandbox = false\n",
        qemu.display()
    );
    let hostile = host.socket().with_file_name("hostile.toml");
    fs::write(&hostile, format!("{VM}{lines}"))?;
    fs::set_permissions(&hostile, Permissions::from_mode(0o644))?;
    let hostile = hostile.to_str().context("a path")?;
    for user in [VIEWER, OPERATOR] {
        is_refused(
            &host,
            user,
            &["check", hostile],
            "may check only VMs that root has prepared",
        )?;
    }
    ensure!(!ran.exists(), "a program of somebody who may only look was run");
    let checked = host.say(ROOT, &["check", hostile])?;
    ensure!(
        ran.exists(),
        "root's check does not run it, so this test sees nothing: {checked:?}"
    );

    fs::write(vms.join("shop.toml"), VM)?;
    // It is looked at from now on: no disk, no kernel.
    let output = host.say(OPERATOR, &["up", own, "--no-wait"])?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(!why.contains("may "), "{why}");
    Ok(())
}

#[test]
fn a_user_s_open_conversations_keep_neither_root_nor_other_users_out() -> Result<()> {
    if !is_root() {
        skipped::skip("becoming another user needs root");
        return Ok(());
    }
    let mut host = Host::new()?;
    host.configure("viewers = \"daemon\"")?;
    host.start()?;
    // A shell of that user which opens many connections, asks for nothing on them (a byte a second, as the daemon ends silent ones), and waits until the last
    // one is turned away. Only then does anybody else of that user come: a command takes one of its places too, for a moment.
    let script = "import socket,sys\nheld=[]\nfor _ in range(100):\n s=socket.socket(socket.AF_UNIX)\n s.connect(sys.argv[1])\n held.append(s)\n\
                  print(held[-1].makefile().readline(),end='',flush=True)\nimport select\n\
                  while not select.select([sys.stdin],[],[],1)[0]:\n for s in held:\n  try: s.send(b' ')\n  except OSError: pass\n";
    let mut crowd = Command::new("python3")
        .args(["-c", script])
        .arg(host.socket())
        .uid(STRANGER.1)
        .gid(STRANGER.2)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = String::new();
    BufReader::new(crowd.stdout.take().context("its output")?).read_line(&mut said)?;
    ensure!(said.contains("too many open conversations"), "{said}");
    is_refused(&host, STRANGER, &["status"], "too many")?;
    is_done(&host, VIEWER, &["status"])?;
    is_done(&host, ROOT, &["status"])?;
    drop(crowd.stdin.take());
    crowd.wait()?;
    Ok(())
}

#[test]
fn a_group_that_is_not_there_is_one_line_and_a_request_without_end_ends() -> Result<()> {
    if !is_root() {
        skipped::skip("the daemon's host needs root");
        return Ok(());
    }
    let mut host = Host::new()?;
    host.configure("viewers = \"no-such-group\"")?;
    let why = host.start().err().context("it starts")?.to_string();
    ensure!(
        why.contains("there is no group 'no-such-group'") && why.trim().lines().count() == 1,
        "{why}"
    );
    host.stop();
    let text = fs::read_to_string(host.file())?.replace("no-such-group", "daemon");
    fs::write(host.file(), text)?;
    host.start()?;
    let mut endless = UnixStream::connect(host.socket())?;
    // More than any request has. The daemon may hang up before all of it is written.
    let _ = endless.write_all(&vec![b'x'; 2 << 20]);
    let _ = endless.shutdown(std::net::Shutdown::Write);
    is_done(&host, ROOT, &["status"])?;
    ensure!(Path::new(&host.socket()).exists(), "the socket has gone");
    Ok(())
}
