//! A copy of a program that runs: CRIU takes its processes out of one copy's namespaces, and brings them into another's.
//!
//! Decides:    nothing.
//! Flow:       primary: `dump` (the program stands still) -> its files (`save_written`) -> `resume` -> `pack`. Backup: `Unpacking` ->
//!             `restore` into a vacated copy -> `Copy::adopt`.
//! Invariants: 1. only processes are carried: both copies' namespaces, cards and mounts are made alike, by `inside`; 2. whatever became
//!             of a dump, `resume` lets the program run; 3. each step has a bound, and what it started is killed and collected there.
//! Source:     criu(8), nsenter(1), tar(1). CRIU enters the copy's own namespaces, and takes the tree of its process 2: so it meets no
//!             namespace, no TAP and no mount that it would have to carry.
//! Not here:   when (`node`); connections in translation, the order of reading (core).

use crate::copy::Copy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What a dump or a restore may take: a gigabyte takes about a second.
const CRIU_WITHIN: Duration = Duration::from_secs(60);
/// Everything else here is a matter of milliseconds.
const SOON: Duration = Duration::from_secs(10);
/// What was written to files is bounded by its own tmpfs.
const FILES_WITHIN: Duration = Duration::from_secs(60);
/// Where the images lie, seen from who gets that folder as its standard input.
const HERE: &str = "/proc/self/fd/0";
/// The archive of what a program has written, beside the images.
const WRITTEN: &str = "written.tar";
/// Where CRIU is, if it is not where packages put it.
const VARIABLE: &str = "DUNLIN_CRIU";
const PLACES: [&str; 3] = ["/usr/sbin/criu", "/usr/bin/criu", "/usr/local/sbin/criu"];
/// The oldest that was tried.
const OLDEST: (u32, u32) = (4, 1);
/// From this kernel on a socket that is no unix socket refuses SO_PASSCRED, which older versions take for an error.
const STRICT_KERNEL: (u32, u32) = (6, 16);
const OLDEST_FOR_STRICT: (u32, u32) = (4, 2);
/// What is wrong in every log, and does no harm: a device that the copy has not, and a limit that root may lack.
const HARMLESS: [&str; 2] = ["Unable to create tun", "Can't setup RLIMIT_NOFILE for self"];

/// Why a copy could not be taken or brought: one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GuardError(String);

fn failed<E: std::fmt::Display>(step: &str) -> impl Fn(E) -> GuardError + '_ {
    move |error| GuardError(format!("{step}: {error}"))
}

/// Where a copy's processes are, for a thread that does not own it.
#[derive(Debug)]
pub struct Place {
    keeper: u32,
    prints_to: Option<String>,
    written: Option<OwnedFd>,
    groups: Vec<OwnedFd>,
}

impl Place {
    /// Of this copy.
    ///
    /// # Errors
    /// Too many open files.
    pub fn of(copy: &Copy) -> Result<Self, GuardError> {
        let written = copy.written().map(|written| written.try_clone_to_owned());
        Ok(Self {
            keeper: copy.keeper(),
            prints_to: copy.prints_to().map(str::to_owned),
            written: written.transpose().map_err(failed("its files"))?,
            groups: copy.groups().map_err(failed("its control group"))?,
        })
    }

    /// The kernel's name of the pipe that it prints to.
    #[must_use]
    pub fn prints_to(&self) -> Option<&str> {
        self.prints_to.as_deref()
    }
}

/// A CRIU that this host's kernel can do with.
#[derive(Clone, Debug)]
pub struct Criu {
    path: PathBuf,
}

impl Criu {
    /// Looks for it.
    ///
    /// # Errors
    /// With what to do, where there is none, or one that is too old.
    pub fn find() -> Result<Self, GuardError> {
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        let path = named.or_else(|| PLACES.iter().map(PathBuf::from).find(|path| path.exists()));
        let missing = || {
            GuardError(format!(
                "CRIU is not on this host: apt-get install criu, 4.1 or newer (Linux 6.16 and newer want 4.2), or say in {VARIABLE} where it is"
            ))
        };
        let path = path.ok_or_else(missing)?;
        let mut version = Command::new(&path);
        version.arg("--version");
        let (_, said) = run(&mut version, SOON, "criu --version").map_err(|_| missing())?;
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        judge(&said, &release).map_err(GuardError)?;
        let own = fs::read_to_string("/proc/self/status").unwrap_or_default();
        is_unfiltered(&own).map_err(GuardError)?;
        Ok(Self { path })
    }

    /// Takes the processes of a copy, with their connections, into `folder`. It stands still afterwards, until `resume`.
    ///
    /// # Errors
    /// Where CRIU cannot take them; its own last words.
    pub fn dump(&self, place: &Place, folder: &Path) -> Result<(), GuardError> {
        // Whoever stands still before a dump does so after it, and after the restore. CRIU's own `--leave-stopped` would leave the
        // connections in repair, where they answer nothing.
        let (status, _) = signal(place, "kill -STOP -1")?;
        ended_well(status, "stopping the program")?;
        let mut command = self.command(place.keeper, "dump", folder)?;
        command.args(["--leave-running", "--tree", "2", "--ghost-limit", "64M"]);
        if let Some(pipe) = place.prints_to() {
            command.args(["--external", pipe]);
        }
        self.run(&mut command, "dump", folder)
    }

    /// Brings what lies in `folder` into a vacated copy, where it stands still until it is adopted. `prints_to`: what the pipe that it
    /// printed to was called.
    ///
    /// # Errors
    /// Where CRIU cannot bring it; its own last words.
    pub fn restore(&self, place: &Place, folder: &Path, prints_to: Option<&str>) -> Result<(), GuardError> {
        let mut command = self.command(place.keeper, "restore", folder)?;
        command.arg("--restore-detached");
        // What it starts is the program, within its limits.
        let groups: Result<Vec<OwnedFd>, io::Error> = place.groups.iter().map(OwnedFd::try_clone).collect();
        let groups = groups.map_err(failed("its control group"))?;
        let join = move || {
            groups
                .iter()
                .try_for_each(|group| rustix::io::write(group, b"0").map(drop).map_err(Into::into))
        };
        // SAFETY: between fork and exec it makes system calls alone.
        unsafe { command.pre_exec(join) };
        if let Some(pipe) = prints_to {
            let ours = File::options()
                .write(true)
                .open(format!("/proc/{}/fd/1", place.keeper));
            command.stdout(ours.map_err(failed("the pipe for what it prints"))?);
            command.arg("--inherit-fd").arg(format!("fd[1]:{pipe}"));
        }
        self.run(&mut command, "restore", folder)
    }

    fn command(&self, keeper: u32, what: &str, folder: &Path) -> Result<Command, GuardError> {
        let images = folder.join("images");
        fs::create_dir_all(&images).map_err(failed("a folder for the images"))?;
        let mut command = inside(keeper);
        command.arg(&self.path).arg(what);
        command.args(["--images-dir", HERE, "--log-file", &log_of(what), "-v1"]);
        command.args(["--tcp-established", "--network-lock", "skip", "--file-locks"]);
        command.arg("--manage-cgroups=ignore");
        command.stdin(File::open(&images).map_err(failed("a folder for the images"))?);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    fn run(&self, command: &mut Command, what: &str, folder: &Path) -> Result<(), GuardError> {
        let status = wait(command, CRIU_WITHIN, "criu")?;
        if status.success() {
            return Ok(());
        }
        let log = fs::read_to_string(folder.join("images").join(log_of(what))).unwrap_or_default();
        let why = complaint(&log).unwrap_or_else(|| status.to_string());
        Err(GuardError(format!("criu {what}: {why}")))
    }
}

/// Lets a program run that stands still, and says the newest process id in its namespace.
///
/// # Errors
/// Where its namespaces are gone.
pub fn resume(place: &Place) -> Result<u32, GuardError> {
    // Nobody is forked between the look and the end but who looks. A shell's own `read` reads byte by byte, which this file does not bear.
    let script = "last=$(cat /proc/sys/kernel/ns_last_pid); kill -CONT -1; echo $last";
    let (status, said) = signal(place, script)?;
    said.trim()
        .parse()
        .map_err(|_| GuardError(format!("letting the program run on: {status}")))
}

/// Puts what the program has written to files beside the images.
///
/// # Errors
/// Those of tar.
pub fn save_written(place: &Place, folder: &Path) -> Result<(), GuardError> {
    let Some(written) = &place.written else {
        return Ok(());
    };
    let mut command = tar(written.as_fd(), "--create")?;
    command.arg("--file").arg(folder.join(WRITTEN));
    // The layers over the host's file systems; what overlayfs works in, and the place they are put together at, are not theirs.
    command.args(["--exclude=./w*", "--exclude=./root", "."]);
    succeed(&mut command, "what the program has written")
}

/// Puts that into a vacated copy.
///
/// # Errors
/// Those of tar.
pub fn load_written(place: &Place, folder: &Path) -> Result<(), GuardError> {
    let Some(written) = &place.written else {
        return Ok(());
    };
    let mut command = tar(written.as_fd(), "--extract")?;
    command.args(["--overwrite", "--file"]).arg(folder.join(WRITTEN));
    succeed(&mut command, "what the program has written")
}

/// Whom a copy knows in its network, by /proc/net/arp.
///
/// # Errors
/// Where its namespaces are gone.
pub fn neighbours(place: &Place) -> Result<Vec<(Ipv4Addr, [u8; 6])>, GuardError> {
    let file = format!("/proc/{}/net/arp", place.keeper);
    let text = fs::read_to_string(file).map_err(failed("whom it spoke with"))?;
    Ok(text.lines().skip(1).filter_map(neighbour_of).collect())
}

/// All that lies in a folder, as one stream.
///
/// # Errors
/// Where tar cannot be started.
pub fn pack(folder: &Path) -> Result<Packing, GuardError> {
    let mut command = Command::new("tar");
    command
        .arg("--create")
        .arg("--sparse")
        .arg("--directory")
        .arg(folder);
    command.args(["--file", "-", "."]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let child = command.spawn().map_err(failed("tar"))?;
    Ok(Packing(Collected(child)))
}

/// A stream that is read.
pub struct Packing(Collected);

impl Packing {
    /// The next piece, of `most` bytes at most; an empty one at the end.
    ///
    /// # Errors
    /// Those of tar.
    pub fn piece(&mut self, most: usize) -> Result<Vec<u8>, GuardError> {
        let stream = self.0.0.stdout.as_mut();
        let mut bytes = Vec::new();
        let read = stream.map(|stream| stream.take(most as u64).read_to_end(&mut bytes));
        read.transpose().map_err(failed("tar"))?;
        if bytes.is_empty() {
            ended_well(self.0.0.wait().map_err(failed("tar"))?, "tar")?;
        }
        Ok(bytes)
    }
}

/// A stream that is written into a folder.
pub struct Unpacking(Collected);

impl Unpacking {
    /// Begins.
    ///
    /// # Errors
    /// Where tar cannot be started.
    pub fn into(folder: &Path) -> Result<Self, GuardError> {
        fs::create_dir_all(folder).map_err(failed("a folder for the images"))?;
        let mut command = Command::new("tar");
        command.args(["--extract", "--file", "-", "--directory"]);
        command.arg(folder).stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(failed("tar"))?;
        Ok(Self(Collected(child)))
    }

    /// The next piece.
    ///
    /// # Errors
    /// Those of tar: a full disk, above all.
    pub fn piece(&mut self, bytes: &[u8]) -> Result<(), GuardError> {
        let stream = self.0.0.stdin.as_mut();
        let written = stream.map(|stream| stream.write_all(bytes));
        written.transpose().map(drop).map_err(failed("tar"))
    }

    /// That was all.
    ///
    /// # Errors
    /// Where it was no whole stream.
    pub fn end(mut self) -> Result<(), GuardError> {
        self.0.0.stdin = None;
        ended_well(self.0.0.wait().map_err(failed("tar"))?, "tar")
    }
}

/// What is dropped is killed and collected (invariant 3).
struct Collected(Child);

impl Drop for Collected {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A shell's command to all processes of a copy but its first.
fn signal(place: &Place, script: &str) -> Result<(ExitStatus, String), GuardError> {
    let mut command = inside(place.keeper);
    command.args(["/bin/sh", "-c", script]).stdin(Stdio::null());
    run(&mut command, SOON, "a signal to the program")
}

/// A command in a copy's namespaces.
fn inside(keeper: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--target={keeper}"));
    command.args(["--mount", "--net", "--ipc", "--uts", "--cgroup"]);
    command.arg(format!("--pid=/proc/{keeper}/ns/pid_for_children"));
    command.arg("--");
    command
}

fn tar(folder: BorrowedFd<'_>, what: &str) -> Result<Command, GuardError> {
    let folder = folder
        .try_clone_to_owned()
        .map_err(failed("what the program has written"))?;
    let mut command = Command::new("tar");
    command.args([what, "--directory", HERE, "--numeric-owner", "--sparse"]);
    command.args(["--xattrs", "--xattrs-include=*", "--warning=no-all"]);
    command.stdin(Stdio::from(folder));
    Ok(command)
}

fn succeed(command: &mut Command, what: &str) -> Result<(), GuardError> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    ended_well(wait(command, FILES_WITHIN, what)?, what)
}

fn ended_well(status: ExitStatus, what: &str) -> Result<(), GuardError> {
    match status.success() {
        true => Ok(()),
        false => Err(GuardError(format!("{what}: {status}"))),
    }
}

/// Runs it, and returns what little it prints.
fn run(command: &mut Command, within: Duration, what: &str) -> Result<(ExitStatus, String), GuardError> {
    let (mut reader, writer) = io::pipe().map_err(failed(what))?;
    command.stdout(writer).stderr(Stdio::null());
    let status = wait(command, within, what);
    // Our copy of the writing end goes with it.
    command.stdout(Stdio::null());
    let status = status?;
    let mut said = String::new();
    reader.read_to_string(&mut said).map_err(failed(what))?;
    Ok((status, said))
}

/// Until it has ended, or was killed for being late (invariant 3): with all that it has started.
fn wait(command: &mut Command, within: Duration, what: &str) -> Result<ExitStatus, GuardError> {
    let mut child = Collected(command.process_group(0).spawn().map_err(failed(what))?);
    let pid = Pid::from_child(&child.0);
    let ended = pidfd_open(pid, PidfdFlags::empty()).map_err(failed(what))?;
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&left)) {
            Ok(0) => break,
            Ok(_) => return child.0.wait().map_err(failed(what)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed(what)(error)),
        }
    }
    let _ = kill_process_group(pid, Signal::KILL);
    Err(GuardError(format!("{what}: not within {} s", within.as_secs())))
}

fn log_of(what: &str) -> String {
    format!("{what}.log")
}

/// The first that went wrong: what follows it only says that something did.
fn complaint(log: &str) -> Option<String> {
    let errors = log
        .lines()
        .filter_map(|line| line.split_once("Error ").map(|(_, why)| why));
    let mut telling = errors.filter(|why| !HARMLESS.iter().any(|harmless| why.contains(harmless)));
    let why = telling.next()?;
    let hint = match why.contains("Can't get rlimit") {
        true => " (this host's root has no CAP_SYS_RESOURCE, and the program runs as another user)",
        false => "",
    };
    Some(format!("{why}{hint}"))
}

fn neighbour_of(line: &str) -> Option<(Ipv4Addr, [u8; 6])> {
    const COMPLETE: u32 = 2;
    let mut words = line.split_whitespace();
    let address = words.next()?.parse().ok()?;
    let flags = u32::from_str_radix(words.nth(1)?.strip_prefix("0x")?, 16).ok()?;
    let mut hardware = [0; 6];
    let mut bytes = words.next()?.split(':');
    for byte in &mut hardware {
        *byte = u8::from_str_radix(bytes.next()?, 16).ok()?;
    }
    (flags & COMPLETE != 0).then_some((address, hardware))
}

/// Whether this CRIU does on this kernel.
fn judge(said: &str, release: &str) -> Result<(), String> {
    let version = said.lines().find_map(|line| line.strip_prefix("Version: "));
    let version = version.ok_or("'criu --version' does not say its version")?.trim();
    let (has, kernel) = (numbers(version), numbers(release));
    let wants = if kernel >= STRICT_KERNEL {
        OLDEST_FOR_STRICT
    } else {
        OLDEST
    };
    if has >= wants {
        return Ok(());
    }
    Err(format!(
        "CRIU {version} is too old for Linux {}: {}.{} or newer does",
        release.trim(),
        wants.0,
        wants.1
    ))
}

/// By ptrace(2), PTRACE_O_SUSPEND_SECCOMP: a program has a filter, and whoever is to copy it may have none.
fn is_unfiltered(status: &str) -> Result<(), String> {
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    match mode.map(str::trim) {
        None | Some("0") => Ok(()),
        Some(_) => Err(
            "CRIU cannot copy a running program: this daemon is behind a seccomp filter itself; where its systemd unit makes it, link \
             /usr/share/dunlin/programs.conf into /etc/systemd/system/dunlin.service.d and restart it"
                .to_owned(),
        ),
    }
}

/// The first two numbers of a version.
fn numbers(version: &str) -> (u32, u32) {
    let mut numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_does_where_the_kernel_is_old_enough() {
        assert!(judge("Version: 4.1.1\n", "6.12.43-amd64\n").is_ok());
        let why = judge("Version: 4.1.1\n", "6.18.44-x\n").unwrap_err();
        assert_eq!(
            why,
            "CRIU 4.1.1 is too old for Linux 6.18.44-x: 4.2 or newer does"
        );
        assert!(judge("Version: 4.2.1 (gitid 0)\n", "6.18.44-x\n").is_ok());
        assert!(judge("Version: 3.17.1\nGitID: v3.17\n", "6.1.0\n").is_err());
        assert!(judge("nonsense", "6.1.0\n").is_err());
        assert!(is_unfiltered("Name:\tdunlin\nSeccomp:\t0\nSeccomp_filters:\t0\n").is_ok());
        assert!(
            is_unfiltered("Name:\tdunlin\n").is_ok(),
            "a kernel without seccomp"
        );
        let why = is_unfiltered("Seccomp:\t2\n").unwrap_err();
        assert!(why.contains("programs.conf") && !why.contains('\n'), "{why}");
    }

    #[test]
    fn a_line_of_arp_is_an_address_and_its_hardware() {
        let line = "10.77.0.9        0x1         0x2         52:54:00:12:34:56     *        eth0";
        let hardware = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        assert_eq!(neighbour_of(line), Some((Ipv4Addr::new(10, 77, 0, 9), hardware)));
        assert_eq!(
            neighbour_of(&line.replace("0x2", "0x0")),
            None,
            "it does not answer"
        );
        assert_eq!(neighbour_of("nonsense"), None);
    }

    #[test]
    fn what_a_log_says_first_of_what_matters_is_told() {
        let log = "(00.1) Error (criu/tun.c:85): tun: Unable to create tun: No such file\n\
                   (00.2) Error (criu/sk-inet.c:188): inet: Connected TCP socket, consider using --tcp-established option.\n\
                   (00.3) Error (criu/cr-dump.c:2111): Dumping FAILED.\n";
        let why = complaint(log).expect("one");
        assert!(why.starts_with("(criu/sk-inet.c:188): inet: Connected"), "{why}");
        assert_eq!(complaint("(00.1) all is well"), None);
        let log = "Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted\n\
                   Error (criu/cr-dump.c:1584): Dump core (pid: 2) failed with -1\n";
        assert!(complaint(log).is_some_and(|why| why.contains("no CAP_SYS_RESOURCE")));
    }

    #[test]
    fn what_takes_too_long_is_killed_with_all_that_it_started() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]);
        let begun = Instant::now();
        let why = run(&mut command, Duration::from_millis(200), "a step").unwrap_err();
        assert_eq!(why.to_string(), "a step: not within 0 s");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_folder_arrives_as_it_was_and_half_of_one_does_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("images")).expect("made");
        fs::write(from.join("images/pages"), vec![7; 100_000]).expect("written");
        let mut packing = pack(&from).expect("tar");
        let mut pieces = Vec::new();
        loop {
            let piece = packing.piece(30_000).expect("a piece");
            if piece.is_empty() {
                break;
            }
            assert!(piece.len() <= 30_000);
            pieces.push(piece);
        }
        let unpack = |pieces: &[Vec<u8>]| {
            let mut unpacking = Unpacking::into(&to)?;
            pieces.iter().try_for_each(|piece| unpacking.piece(piece))?;
            unpacking.end()
        };
        assert!(unpack(&pieces[..2]).is_err(), "half of it");
        unpack(&pieces).expect("all of it");
        assert_eq!(
            fs::read(to.join("images/pages")).expect("there"),
            vec![7; 100_000]
        );
    }
}
