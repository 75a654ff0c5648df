//! Who may ask what of a real daemon, as real users of this machine: who may only look is refused what changes something, and a stranger all.
//!
//! Needs root, which becomes the users; told as skipped without it.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::is_root;

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// Users and groups that every Debian has: name, uid, gid.
const OPERATOR: (&str, u32, u32) = ("games", 5, 60);
const VIEWER: (&str, u32, u32) = ("daemon", 1, 1);
const STRANGER: (&str, u32, u32) = ("nobody", 65_534, 65_534);
const ROOT: (&str, u32, u32) = ("root", 0, 0);

type User = (&'static str, u32, u32);

const VM: &str = "name = \"shop\"\nmembers = [\"a\"]\npolicy = \"none\"\n[vm]\nmemory_mib = 64\n";

struct Host {
    daemon: Option<Child>,
    folder: tempfile::TempDir,
    binary: PathBuf,
}

impl Host {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let binary = folder.path().join("dunlin");
        fs::copy(env!("CARGO_BIN_EXE_dunlin"), &binary)?;
        fs::set_permissions(&binary, Permissions::from_mode(0o755))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let made = Command::new(&binary)
            .arg("init")
            .arg(folder.path().join("etc"))
            .args(["--cluster", "one", "--host"])
            .arg(format!("a=127.0.0.1:{port}"))
            .arg("--control")
            .arg(folder.path().join("run/dunlin.sock"))
            .output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(Self {
            daemon: None,
            folder,
            binary,
        })
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("etc/a/host.toml")
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("run/dunlin.sock")
    }

    /// Adds to host.toml.
    fn configure(&self, more: &str) -> Result<()> {
        let text = fs::read_to_string(self.file())?;
        Ok(fs::write(self.file(), format!("{more}\n{text}"))?)
    }

    fn start(&mut self) -> Result<()> {
        let mut daemon = Command::new(&self.binary)
            .arg("host")
            .arg(self.file())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = BufReader::new(daemon.stdout.take().context("its output")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let mut why = daemon.stderr.take().context("its words")?;
        self.daemon = Some(daemon);
        if !line.contains("ready") {
            let mut words = String::new();
            std::io::Read::read_to_string(&mut why, &mut words)?;
            anyhow::bail!("{words}");
        }
        // What it says later is nobody's here, and must not stop it.
        std::thread::spawn(move || std::io::copy(&mut why, &mut std::io::sink()));
        Ok(())
    }

    fn stop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    fn say(&self, user: User, words: &[&str]) -> Result<Output> {
        let output = Command::new(&self.binary)
            .arg("--socket")
            .arg(self.socket())
            .args(words)
            .uid(user.1)
            .gid(user.2)
            .current_dir("/")
            .output()?;
        Ok(output)
    }

    fn is_done(&self, user: User, words: &[&str]) -> Result<()> {
        let output = self.say(user, words)?;
        let why = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} says {words:?}: {why}", user.0);
        Ok(())
    }

    /// It is refused in one line that names the user, and `wanted` is in it.
    fn is_refused(&self, user: User, words: &[&str], wanted: &str) -> Result<()> {
        let output = self.say(user, words)?;
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
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
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
    host.is_done(ROOT, &["status"])?;
    for user in [OPERATOR, VIEWER, STRANGER] {
        host.is_refused(user, &["status"], "Permission denied")?;
    }
    host.stop();

    host.configure("viewers = \"daemon\"\noperators = \"games\"")?;
    let vms = host.file().with_file_name("vms");
    fs::create_dir(&vms)?;
    host.start()?;
    for user in [VIEWER, OPERATOR, ROOT] {
        host.is_done(user, &["status"])?;
        host.is_done(user, &["events"])?;
        host.is_done(user, &["cluster", "status"])?;
        host.is_done(user, &["log", "status"])?;
    }
    let changes: [&[&str]; 3] = [
        &["failover", "shop"],
        &["down", "shop", "--now"],
        &["verify-disk", "shop"],
    ];
    for words in changes {
        host.is_refused(VIEWER, words, "user 'daemon' may not do that")?;
        host.is_refused(VIEWER, words, "members of group 'games'")?;
        host.is_refused(STRANGER, words, "user 'nobody' may not talk")?;
        // Their right is there; the VM is not.
        host.is_refused(OPERATOR, words, "there is no VM 'shop'")?;
    }
    let above: [&[&str]; 4] = [
        &["down", "shop", "--force"],
        &["protect", "shop", "--alone"],
        &["replace", "shop", "a"],
        &["log", "create", "jobs", "a"],
    ];
    for words in above {
        host.is_refused(OPERATOR, words, "user 'games' may not do that")?;
        host.is_refused(OPERATOR, words, "it is for root")?;
    }
    host.is_refused(STRANGER, &["status"], "user 'nobody' may not talk")?;

    let own = host.folder.path().join("shop.toml");
    fs::write(&own, VM)?;
    fs::set_permissions(&own, Permissions::from_mode(0o644))?;
    let own = own.to_str().context("a path")?;
    host.is_refused(VIEWER, &["up", own], "user 'daemon' may not do that")?;
    host.is_refused(OPERATOR, &["up", own], "only VMs that root has prepared")?;
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
    // A shell of that user which holds many connections open, and says nothing on them.
    let script = "import socket,sys\nheld=[]\nfor _ in range(100):\n s=socket.socket(socket.AF_UNIX)\n s.connect(sys.argv[1])\n held.append(s)\n\
                  print('held',flush=True)\nsys.stdin.read()\n";
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
    ensure!(said.trim() == "held", "{said}");
    // First, as the daemon ends silent conversations after some seconds. It meets whoever connects in turn: the crowd before this.
    host.is_refused(STRANGER, &["status"], "too many")?;
    host.is_done(VIEWER, &["status"])?;
    host.is_done(ROOT, &["status"])?;
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
    host.is_done(ROOT, &["status"])?;
    ensure!(Path::new(&host.socket()).exists(), "the socket has gone");
    Ok(())
}
