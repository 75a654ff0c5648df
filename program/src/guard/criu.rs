//! CRIU: takes the processes of a copy out of its namespaces, and brings them into another's.
//!
//! Decides:    nothing.
//! Flow:       the program is stopped -> CRIU is begun with the host's files, in the copy's other namespaces -> it waits at a named pipe, which it
//!             takes for its configuration -> it enters the copy's mounts (`inside::stranger`) -> the pipe ends, it goes on.
//! Invariants: 1. it is root of the host, and works among files that the program may have written: it runs none of them, and believes none.
//!             So its code is loaded before it comes there; it has no configuration, no environment, no plugins, and a PATH on which no
//!             helper is; 2. of the host's files it has the folder of the images alone: as a mount of its own, above which there is nothing.
//! Source:     criu(8), and its 4.2 for what it reads and runs. Not here: what else a copy needs (`guard`).

use super::bounded::{Bounded, run};
use super::{GuardError, Place, SOON, Still, failed};
use crate::inside::BY_SIGNAL;
use crate::inside::stranger::Door;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::fs::inotify;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// What a dump or a restore may take: a gigabyte takes about a second.
const CRIU_WITHIN: Duration = Duration::from_secs(60);
/// Where the images lie, seen from who gets that folder as its standard input.
const HERE: &str = "/proc/self/fd/0";
/// A PATH with nothing on it.
const NOWHERE: &str = "/proc/self/fd/0/none";
/// The greatest number of a signal.
const LAST_SIGNAL: i32 = 64;
const ENTERING: &str = "CRIU's way into the copy";
/// Where it waits, beside the images.
const GATE: &str = "gate";
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
        // It is not begun where this daemon stands.
        let path = std::path::absolute(path.ok_or_else(missing)?).map_err(|_| missing())?;
        let mut version = Command::new(&path);
        version.arg("--version");
        let (_, said) = run(&mut version, SOON, "criu --version").map_err(|_| missing())?;
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        judge(&said, &release).map_err(unfit)?;
        let own = fs::read_to_string("/proc/self/status").unwrap_or_default();
        is_unfiltered(&own)
            .and_then(|()| has_capabilities(&own))
            .map_err(unfit)?;
        Ok(Self { path })
    }

    /// Takes the processes of a copy into `folder`. They stand still afterwards, until `resume`.
    ///
    /// # Errors
    /// Where CRIU cannot take them; its own last words.
    pub fn dump(&self, place: &Place, folder: &Path) -> Result<(), GuardError> {
        // Before CRIU is there, which it would reach.
        stop(place)?;
        place.stands_still()?;
        let (ours, theirs) = pair()?;
        let mut door = place.door(theirs).map_err(failed(ENTERING))?;
        door.whose = place.whose()?;
        // What CRIU finds out about the kernel it finds out as root, before that.
        door.held = door.whose.is_some();
        let is_held = door.held;
        let entering = Entering::begin(self.dumping(place, folder)?, door, ours, "dump", folder)?;
        let entering = match is_held {
            true => entering.hold()?,
            false => entering,
        };
        Ok(entering.enter()?)
    }

    /// Begins to take the processes of a copy but for their own memory, which stays in them, and holds before it looks at any. The program
    /// runs on.
    ///
    /// # Errors
    /// Where CRIU cannot begin.
    pub fn hold(&self, place: &Place, folder: &Path) -> Result<Held, GuardError> {
        let mut command = self.dumping(place, folder)?;
        // Whoever wants to have that memory asks at a socket, and nobody does: CRIU hears so when it has taken all else, and ends.
        let (asks, asked) = pair()?;
        drop(asks);
        command.args(["--lazy-pages", "--ps-socket", &asked.as_raw_fd().to_string()]);
        let (ours, theirs) = pair()?;
        let mut door = place.door(theirs).map_err(failed(ENTERING))?;
        door.held = true;
        door.whose = place.whose()?;
        door.given.push(asked);
        let entering = Entering::begin(command, door, ours, "dump", folder)?;
        Ok(Held(entering.hold()?))
    }

    fn dumping(&self, place: &Place, folder: &Path) -> Result<Command, GuardError> {
        let mut command = self.command("dump", folder)?;
        command.args(["--leave-running", "--tree", "2", "--ghost-limit", "64M"]);
        if let Some(pipe) = place.prints_to() {
            command.args(["--external", pipe]);
        }
        Ok(command)
    }

    /// Brings what lies in `folder` into a vacated copy, where it stands still until it is adopted. `prints_to`: what the pipe that it
    /// printed to was called.
    ///
    /// # Errors
    /// Where CRIU cannot bring it; its own last words.
    pub fn restore(&self, place: &Place, folder: &Path, prints_to: Option<&str>) -> Result<(), GuardError> {
        let mut command = self.command("restore", folder)?;
        super::areas::promise_nothing(&folder.join("images")).map_err(failed("its list of memory"))?;
        command.arg("--restore-detached");
        // What it starts is the program, within its limits.
        let groups: Result<Vec<OwnedFd>, io::Error> = place.groups.iter().map(OwnedFd::try_clone).collect();
        let groups = groups.map_err(failed("its control group"))?;
        if let Some(pipe) = prints_to {
            let ours = File::options()
                .write(true)
                .open(format!("/proc/{}/fd/1", place.keeper));
            command.stdout(ours.map_err(failed("the pipe for what it prints"))?);
            command.arg("--inherit-fd").arg(format!("fd[1]:{pipe}"));
        }
        let (ours, theirs) = pair()?;
        let mut door = place.door(theirs).map_err(failed(ENTERING))?;
        door.groups = groups;
        Ok(Entering::begin(command, door, ours, "restore", folder)?.enter()?)
    }

    fn command(&self, what: &str, folder: &Path) -> Result<Command, GuardError> {
        let images = folder.join("images");
        fs::create_dir_all(&images).map_err(failed("a folder for the images"))?;
        let mut command = Command::new(&self.path);
        command.env_clear().env("PATH", NOWHERE).arg(what);
        command.args(["--images-dir", HERE, "--log-file", &log_of(what), "-v1"]);
        command.args(["--libdir", HERE]);
        command.args(["--tcp-established", "--network-lock", "skip", "--file-locks"]);
        command.arg("--manage-cgroups=ignore");
        // Invariant 2.
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let images = open_tree(rustix::fs::CWD, &images, flags);
        command.stdin(images.map_err(failed("a mount of the folder for the images"))?);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }
}

/// Whoever stands still before a dump does so after it, and after the restore. CRIU's own `--leave-stopped` would leave the connections in
/// repair, where they answer nothing.
fn stop(place: &Place) -> Result<(), GuardError> {
    let stopped = place.signal(Signal::SIGSTOP);
    stopped.map(drop).map_err(failed("stopping the program"))
}

fn pair() -> Result<(OwnedFd, OwnedFd), GuardError> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed(ENTERING))
}

/// One that is held before it looks at the program. What is dropped is killed.
pub struct Held(Entering);

impl Held {
    /// Has the program stand still, until `resume`.
    ///
    /// # Errors
    /// Where it cannot be told to.
    pub fn stop(&self, place: &Place) -> Result<Still, GuardError> {
        // It reaches CRIU as well: whoever holds it takes that for what it is.
        stop(place)?;
        place.stands_still()
    }

    /// Takes the processes. What they have in memory of their own is listed, and not taken.
    ///
    /// # Errors
    /// Where CRIU cannot take them; its own last words.
    pub fn dump(self) -> Result<(), Undumped> {
        self.0.enter()
    }
}

/// Why CRIU has not done its work.
#[derive(Debug)]
pub struct Undumped {
    /// In one line.
    pub why: GuardError,
    /// It was killed, or may have been: it has let go of nothing. Connections may be in repair (`mend`), and processes in CRIU's code, which
    /// they leave when they run.
    pub in_the_middle: bool,
}

/// Whatever is not CRIU's own word.
impl From<GuardError> for Undumped {
    fn from(why: GuardError) -> Self {
        Self {
            why,
            in_the_middle: true,
        }
    }
}

impl From<Undumped> for GuardError {
    fn from(undumped: Undumped) -> Self {
        undumped.why
    }
}

/// On its way into a copy.
struct Entering {
    criu: Bounded,
    ours: OwnedFd,
    /// As long as it waits there.
    gate: Option<Gate>,
    step: String,
    log: PathBuf,
}

impl Entering {
    fn begin(
        mut command: Command,
        door: Door,
        ours: OwnedFd,
        what: &str,
        folder: &Path,
    ) -> Result<Self, GuardError> {
        let gate = Gate::at(folder.join(GATE)).map_err(failed(ENTERING))?;
        command.arg("--config").arg(&gate.path);
        // SAFETY: between fork and exec it makes system calls alone.
        unsafe { command.pre_exec(move || door.enter()) };
        let step = format!("criu {what}");
        // With the command our copy of the other end goes: so it is seen when nobody has it any more.
        let criu = Bounded::begin(&mut command, CRIU_WITHIN, &step)?;
        Ok(Self {
            criu,
            ours,
            gate: Some(gate),
            step,
            log: folder.join("images").join(log_of(what)),
        })
    }

    /// Up to where it is held.
    fn hold(mut self) -> Result<Self, GuardError> {
        if self.is_at_gate()? && self.may_go_on()? {
            self.gate = None;
            if self.is_answered()? {
                return Ok(self);
            }
        }
        let early = GuardError(format!("{}: it ended before it was held", self.step));
        self.gate = None;
        self.end(true)?;
        Err(early)
    }

    /// Into the copy, and to its end.
    fn enter(mut self) -> Result<(), Undumped> {
        // What went before was not its time: the program's memory was sent while it was held.
        self.criu.renew();
        let is_in = !self.is_at_gate()? || self.may_go_on()?;
        self.gate = None;
        self.end(is_in)
    }

    /// Or was there; not where it has ended before.
    fn is_at_gate(&self) -> Result<bool, GuardError> {
        let gate = self
            .gate
            .as_ref()
            .map(|gate| self.criu.until_readable(gate.opened.as_fd()));
        gate.unwrap_or(Ok(true))
    }

    fn end(self, is_in: bool) -> Result<(), Undumped> {
        let Self { criu, step, log, .. } = self;
        let status = criu.end()?;
        if is_in && status.success() {
            return Ok(());
        }
        let why = match is_in {
            true => {
                let log = fs::read_to_string(log).unwrap_or_default();
                complaint(&log).unwrap_or_else(|| status.to_string())
            }
            false => format!("it could not enter the copy's mounts: {status}"),
        };
        Err(Undumped {
            why: GuardError(format!("{step}: {why}")),
            in_the_middle: was_killed(status),
        })
    }

    /// Says so to who let it begin.
    fn may_go_on(&self) -> Result<bool, GuardError> {
        rustix::io::write(&self.ours, &[1]).map_err(failed(ENTERING))?;
        self.is_answered()
    }

    /// Nothing is said where it was not let in: it has ended then, and its status says so.
    fn is_answered(&self) -> Result<bool, GuardError> {
        let answers = self.criu.until_readable(self.ours.as_fd())?;
        Ok(answers && rustix::io::read(&self.ours, &mut [0]).map_err(failed(ENTERING))? == 1)
    }
}

/// A named pipe at which it waits as long as this is not dropped.
struct Gate {
    path: PathBuf,
    /// Readable when it has come.
    opened: OwnedFd,
    _held: File,
}

impl Gate {
    fn at(path: PathBuf) -> io::Result<Self> {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
        // For writing too: who opens it to read finds somebody there, and waits for what is said.
        let held = File::options().read(true).write(true).open(&path)?;
        let opened = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&opened, &path, inotify::WatchFlags::OPEN)?;
        Ok(Self {
            path,
            opened,
            _held: held,
        })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // It is no part of what is sent. One that cannot be removed goes with its folder.
        let _ = fs::remove_file(&self.path);
    }
}

/// Who waits for CRIU ends as it does (`inside::visit`): by that number of a signal, where one has ended it, as a shell says it.
fn was_killed(status: ExitStatus) -> bool {
    let signals = BY_SIGNAL + 1..=BY_SIGNAL + LAST_SIGNAL;
    status.code().is_none_or(|code| signals.contains(&code))
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
        true => " (this daemon has no CAP_SYS_RESOURCE, and the program's processes are of several users)",
        false => "",
    };
    Some(format!("{why}{hint}"))
}

/// Why a CRIU does not do here.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
enum Unfit {
    /// It is something else, perhaps.
    #[error("'criu --version' does not say its version")]
    NoVersion,
    /// The kernel has changed since.
    #[error("CRIU {version} is too old for Linux {release}: {}.{} or newer does", .wants.0, .wants.1)]
    TooOld {
        /// Its version.
        version: String,
        /// The kernel's.
        release: String,
        /// The oldest that does.
        wants: (u32, u32),
    },
    /// It is the daemon that cannot have it work.
    #[error(
        "CRIU cannot copy a running program: this daemon is behind a seccomp filter itself; where its systemd unit makes it, link \
         /usr/share/dunlin/programs.conf into /etc/systemd/system/dunlin.service.d and restart it"
    )]
    Filtered,
    /// So it is here.
    #[error(
        "CRIU cannot bring a copy of a running program: this daemon has no {0} (/usr/share/dunlin/programs.conf gives it to the package's \
         service)"
    )]
    Lacks(&'static str),
}

fn unfit(why: Unfit) -> GuardError {
    GuardError(why.to_string())
}

/// Whether this CRIU does on this kernel.
fn judge(said: &str, release: &str) -> Result<(), Unfit> {
    let version = said.lines().find_map(|line| line.strip_prefix("Version: "));
    let version = version.ok_or(Unfit::NoVersion)?.trim();
    let (has, kernel) = (numbers(version), numbers(release));
    let wants = if kernel >= STRICT_KERNEL {
        OLDEST_FOR_STRICT
    } else {
        OLDEST
    };
    if has >= wants {
        return Ok(());
    }
    Err(Unfit::TooOld {
        version: version.to_owned(),
        release: release.trim().to_owned(),
        wants,
    })
}

/// By ptrace(2), PTRACE_O_SUSPEND_SECCOMP: a program has a filter, and whoever is to copy it may have none.
fn is_unfiltered(status: &str) -> Result<(), Unfit> {
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    match mode.map(str::trim) {
        None | Some("0") => Ok(()),
        Some(_) => Err(Unfit::Filtered),
    }
}

/// What CRIU needs of the daemon's capabilities, besides those that every program needs: a process gets its flags back (capabilities(7), "securebits"),
/// and its monotonic clock goes on (time_namespaces(7)).
const NEEDS: [(&str, u32); 2] = [("CAP_SETPCAP", 8), ("CAP_SYS_TIME", 25)];

/// Whether whoever has this status has all of them.
fn has_capabilities(status: &str) -> Result<(), Unfit> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let lacks = |(_, number): &(&str, u32)| effective.is_some_and(|has| has >> number & 1 == 0);
    match NEEDS.into_iter().find(lacks) {
        Some((name, _)) => Err(Unfit::Lacks(name)),
        None => Ok(()),
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
            why.to_string(),
            "CRIU 4.1.1 is too old for Linux 6.18.44-x: 4.2 or newer does"
        );
        assert!(judge("Version: 4.2.1 (gitid 0)\n", "6.18.44-x\n").is_ok());
        assert!(judge("Version: 3.17.1\nGitID: v3.17\n", "6.1.0\n").is_err());
        assert_eq!(judge("nonsense", "6.1.0\n"), Err(Unfit::NoVersion));
        assert!(is_unfiltered("Name:\tdunlin\nSeccomp:\t0\nSeccomp_filters:\t0\n").is_ok());
        assert!(
            is_unfiltered("Name:\tdunlin\n").is_ok(),
            "a kernel without seccomp"
        );
        assert_eq!(has_capabilities("CapEff:\t000001ffffffffff\n"), Ok(()));
        let lacks = |status: &str| has_capabilities(status).unwrap_err().to_string();
        assert!(lacks("CapEff:\t000001fffdffffff\n").contains("no CAP_SYS_TIME"));
        assert!(lacks("CapEff:\t000001fffffffeff\n").contains("no CAP_SETPCAP"));
        let why = is_unfiltered("Seccomp:\t2\n").unwrap_err().to_string();
        assert!(why.contains("programs.conf") && !why.contains('\n'), "{why}");
    }

    #[test]
    fn a_criu_that_was_killed_is_told_from_one_that_gave_up() {
        use std::os::unix::process::ExitStatusExt;

        let by_itself = |code: i32| was_killed(ExitStatus::from_raw(code << 8));
        assert!(!by_itself(0) && !by_itself(1) && !by_itself(255));
        assert!(by_itself(BY_SIGNAL + libc::SIGKILL), "who waits for it says so");
        assert!(was_killed(ExitStatus::from_raw(libc::SIGKILL)));
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
}
