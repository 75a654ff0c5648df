//! Starts QEMU's process: as which user, with which descriptors, and so that it dies with us.
//!
//! Decides:    the user it runs as.
//! Flow:       `Qemu::start` -> the spawner thread -> fork, here -> exec.
//! Invariants: 1. PR_SET_PDEATHSIG is set *after* the change of user (a change clears it) and by a thread that lives as
//!             long as the daemon (the signal is sent when the forking *thread* ends, not the process);
//!             2. only the named descriptors are inherited: all of ours are close-on-exec; 3. what is started has the daemon's
//!             own priority, not that of the thread which asked for it: a loop goes before the guests, and its QEMU must not
//!             come along.
//! Source:     prctl(2), credentials(7).
//! Not here:   the command line.

use std::ffi::CString;
use std::fs::Metadata;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// The user and groups QEMU gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name, for messages.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Its own group.
    pub gid: u32,
    /// Further groups: the one that owns /dev/kvm, when KVM is used.
    pub groups: Vec<u32>,
}

/// Of the three mode bits of an owner, a group or everybody.
const READ_AND_WRITE: u32 = 0o6;

impl User {
    /// Whether it may open a device for reading and writing, as its owner, by the device's group (which it gets where
    /// it needs it, but never root's) or because anybody may.
    pub fn reads_and_writes(&self, device: &Metadata) -> bool {
        let may = |shift: u32| (device.mode() >> shift) & READ_AND_WRITE == READ_AND_WRITE;
        (device.uid() == self.uid && may(6)) || (device.gid() != 0 && may(3)) || may(0)
    }

    /// The same user with the group of /dev/kvm.
    #[must_use]
    pub fn with_kvm(mut self) -> Self {
        let group = std::fs::metadata("/dev/kvm").map(|device| device.gid());
        self.groups.extend(group.ok().filter(|group| *group != 0));
        self
    }
}

/// Why there is no user for QEMU to run as.
#[derive(Debug, thiserror::Error)]
pub enum NoUser {
    /// Only root becomes another user.
    #[error("vm.run_as = {0:?} needs the daemon to be started as root; leave it out to run QEMU as yourself")]
    NeedsRoot(String),
    /// Nobody has that name.
    #[error("vm.run_as: there is no user {0:?}; create it (useradd --system {0}) or name another")]
    Unknown(String),
    /// None is named, and those that are there on any host are not on this one.
    #[error("neither user dunlin nor nobody exists: set vm.run_as to an ordinary user")]
    NoneNamed,
}

/// Which user QEMU is to run as: `None` keeps ours (we are an ordinary user already).
pub fn choose_user(run_as: Option<&str>) -> Result<Option<User>, NoUser> {
    if !rustix::process::geteuid().is_root() {
        return match run_as.map(look_up) {
            Some(Some(user)) if user.uid == rustix::process::geteuid().as_raw() => Ok(None),
            Some(_) => Err(NoUser::NeedsRoot(run_as.unwrap_or_default().to_owned())),
            None => Ok(None),
        };
    }
    let user = match run_as {
        Some(name) => look_up(name).ok_or_else(|| NoUser::Unknown(name.to_owned()))?,
        None => look_up("dunlin")
            .or_else(|| look_up("nobody"))
            .ok_or(NoUser::NoneNamed)?,
    };
    Ok(Some(user))
}

fn look_up(name: &str) -> Option<User> {
    let c_name = CString::new(name).ok()?;
    let mut buffer = vec![0u8; 16 * 1024];
    let mut found = std::ptr::null_mut();
    // SAFETY: passwd is plain data; the call writes only to the entry, the buffer and `found`.
    unsafe {
        let mut entry: libc::passwd = std::mem::zeroed();
        let (text, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        if libc::getpwnam_r(c_name.as_ptr(), &raw mut entry, text, length, &raw mut found) != 0
            || found.is_null()
        {
            return None;
        }
        Some(User {
            name: name.to_owned(),
            uid: entry.pw_uid,
            gid: entry.pw_gid,
            groups: vec![],
        })
    }
}

type Job = (Command, Sender<io::Result<Child>>);

/// Spawns from the one thread that lives as long as the daemon (invariant 1).
pub fn spawn(mut command: Command, inherited: Vec<RawFd>, user: Option<User>) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    let groups = user.as_ref().map(|u| [&[u.gid][..], &u.groups].concat());
    let in_child = move || {
        // Between fork and exec: only async-signal-safe calls, no allocation.
        let check = |result: libc::c_int| match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: plain system calls with valid arguments.
        unsafe {
            if let (Some(user), Some(groups)) = (&user, &groups) {
                check(libc::setgroups(groups.len(), groups.as_ptr()))?;
                check(libc::setresgid(user.gid, user.gid, user.gid))?;
                check(libc::setresuid(user.uid, user.uid, user.uid))?;
            }
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            if libc::getppid() != parent.as_raw_nonzero().get() {
                libc::_exit(122); // the daemon died in between: nobody would kill us
            }
            // A signal mask of the daemon is not QEMU's business, nor is Ctrl-C on the daemon's terminal.
            libc::setsid();
            for fd in &inherited {
                check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
            }
        }
        Ok(())
    };
    // SAFETY: the closure keeps to async-signal-safe calls.
    unsafe { command.pre_exec(in_child) };

    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, inbox) = channel::<Job>();
        let run = move || {
            with_the_daemons_priority();
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        };
        std::thread::Builder::new()
            .name("dunlin-spawner".into())
            .spawn(run)
            .expect("a thread can be made");
        jobs
    });
    let (answer, outcome) = channel();
    spawner.send((command, answer)).expect("the spawner never ends");
    outcome.recv().expect("the spawner always answers")
}

/// Invariant 3, for the calling thread: a thread begins with the scheduling of the one that made it.
fn with_the_daemons_priority() {
    // A process's id names its first thread, whose priority nobody raises.
    let own = rustix::process::getpriority_process(Some(rustix::process::getpid())).unwrap_or(0);
    let ordinary = libc::sched_param { sched_priority: 0 };
    // SAFETY: a live structure of the kind that the call expects; 0 is the calling thread.
    let refused = unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const ordinary) } != 0;
    // To give up a priority needs no right.
    let kept = rustix::process::setpriority_process(None, own);
    if refused || kept.is_err() {
        tracing::warn!("what this daemon starts keeps the priority of one of its loops");
    }
}

/// Where an executable lies: a path as it is, a bare name by the PATH.
pub fn find_executable(name: &std::path::Path) -> Option<std::path::PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_owned());
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
}
