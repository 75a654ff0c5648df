//! Runs a QEMU with the preload object, as an ordinary user, until it answers on QMP.
//!
//! Decides:    nothing.
//! Flow:       `Qemu::start` and the probe -> [`launch`] -> `spawn` -> userfaultfd and QMP come back.
//! Invariants: 1. a failed launch leaves no process and says QEMU's own words; 2. the environment of the daemon is not
//!             QEMU's.
//! Source:     stock-qemu.md section 1.
//! Not here:   the VM's arguments (`command`), its memory and devices (`Qemu`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::accel::NoAccel;
use super::console::DaemonLog;
use super::spawn::{self, NoUser, User};
use super::{Console, Qmp, QmpError};
use crate::memory::MemoryError;
use crate::spec::SpecError;
use crate::sys::{memfd_with, receive_descriptor, wait_readable};
use crate::uefi::UefiError;

/// The preload object, built by build.rs from preload.c.
static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Why QEMU did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The spec cannot work.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no user for it to run as.
    #[error(transparent)]
    User(#[from] NoUser),
    /// KVM is asked for and not to be had.
    #[error(transparent)]
    Accel(#[from] NoAccel),
    /// Nothing can be tracked.
    #[error(transparent)]
    Userfaultfd(#[from] NoUserfaultfd),
    /// The guest's UEFI is missing.
    #[error(transparent)]
    Uefi(#[from] UefiError),
    /// Something else of the host is missing; the text says how to mend it.
    #[error("{0}")]
    Host(String),
    /// A file of the spec cannot be opened.
    #[error("vm.{key} = {path:?}: {error}")]
    File {
        /// Key in the TOML file.
        key: &'static str,
        /// The path given.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// QEMU ended during its start; its own lines.
    #[error("QEMU did not start ({status}): {stderr}")]
    Ended {
        /// How it ended.
        status: String,
        /// What it printed.
        stderr: String,
    },
    /// QMP failed during the start.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its memory cannot be mapped or tracked.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A system call failed.
    #[error("starting QEMU: {0}")]
    Io(#[from] io::Error),
}

/// A QEMU that answers.
pub struct Launched {
    /// The process, killed if it is not kept.
    pub child: Killed,
    /// Its userfaultfd, made in its address space.
    pub uffd: OwnedFd,
    /// Its control socket, negotiated.
    pub qmp: Qmp,
    /// Its version.
    pub version: String,
    /// What it prints.
    pub stderr: Console,
}

/// Runs `binary` as `user` with the arguments that `arguments` makes from the number of the QMP descriptor. `further` is preloaded
/// after our own object; `inherited` are the further descriptors it gets; `ends` are dropped once it has them (else its death would not end the sockets).
/// What it prints goes to `log`, too.
pub(crate) fn launch(
    binary: &Path,
    user: Option<User>,
    log: Option<DaemonLog>,
    further: Option<&File>,
    mut inherited: Vec<RawFd>,
    arguments: impl FnOnce(RawFd) -> Vec<String>,
    ends: impl Sized,
) -> Result<Launched, StartError> {
    let preload = memfd_with("dunlin-preload", &mut &PRELOAD[..])?;
    let device = open_userfaultfd()?;
    let (qmp_ours, qmp_theirs) = UnixStream::pair()?;
    let (uffd_ours, uffd_theirs) = UnixStream::pair()?;
    let own = [
        preload.as_raw_fd(),
        device.as_raw_fd(),
        qmp_theirs.as_raw_fd(),
        uffd_theirs.as_raw_fd(),
    ];
    inherited.extend(own);
    inherited.extend(further.map(AsRawFd::as_raw_fd));
    let preloaded: Vec<String> = std::iter::once(&preload)
        .chain(further)
        .map(|object| format!("/proc/self/fd/{}", object.as_raw_fd()))
        .collect();
    let mut command = Command::new(binary);
    command
        .args(arguments(qmp_theirs.as_raw_fd()))
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LD_PRELOAD", preloaded.join(":"))
        .env(
            "DUNLIN_UFFD",
            format!("{}:{}", device.as_raw_fd(), uffd_theirs.as_raw_fd()),
        )
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let as_user = user
        .as_ref()
        .map_or(String::new(), |u| format!(" as user {:?}", u.name));
    let mut child = spawn::spawn(command, inherited, user)
        .map_err(|e| StartError::Host(format!("cannot run {}{as_user}: {e}", binary.display())))?;
    let stderr = child.stderr.take().expect("piped");
    let pid = child.id();
    let mut child = Killed(Some(child));
    let stderr = Console::follow("qemu-stderr", stderr, log)?;
    drop((qmp_theirs, uffd_theirs, ends));

    let begin = || -> Result<_, StartError> {
        // A wrapper or a static executable would never run the preload object.
        if !wait_readable(uffd_ours.as_fd(), Instant::now() + START_TIMEOUT)? {
            return Err(StartError::Host(format!(
                "{} did not load the preload object: vm.qemu must be QEMU itself, no wrapper",
                binary.display()
            )));
        }
        let uffd = receive_descriptor(uffd_ours.as_fd())?;
        let (qmp, version) = Qmp::handshake(qmp_ours, START_TIMEOUT)?;
        main_loop_first(pid);
        Ok((uffd, qmp, version))
    };
    match begin() {
        Ok((uffd, qmp, version)) => Ok(Launched {
            child,
            uffd,
            qmp,
            version,
            stderr,
        }),
        Err(error) => Err(child.own_words(error, &stderr)),
    }
}

/// Between the loop of the VM, which it must not keep from a core, and everybody else.
const MAIN_LOOP_NICE: i32 = -10;

/// QEMU's main loop goes before the guest's virtual CPUs, whose threads are there by now and keep their priority: the command to
/// stop, the cards and the disks wait for it. On a host with more to do than it can, a sync waited for it for seconds.
fn main_loop_first(pid: u32) {
    let first_thread = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Err(error) = rustix::process::setpriority_process(first_thread, MAIN_LOOP_NICE) {
        // Without that right the host has to have a core free.
        tracing::debug!("the priority of QEMU's main loop: {error}");
    }
}

/// The device from which an ordinary user's userfaultfd may also see the kernel's accesses.
pub fn open_userfaultfd() -> Result<File, NoUserfaultfd> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd");
    device.map_err(NoUserfaultfd)
}

/// Why that device is not to be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "/dev/userfaultfd: {0}: dirty tracking needs it: Linux 6.7 or newer with CONFIG_USERFAULTFD, and the daemon as root or with \
     rights on that file"
)]
pub struct NoUserfaultfd(pub io::Error);

/// A child that is killed and reaped if the start fails.
pub struct Killed(Option<Child>);

impl Killed {
    /// Gives the child to its keeper.
    pub fn keep(mut self) -> Child {
        self.0.take().expect("only taken here")
    }

    fn child(&self) -> &Child {
        self.0.as_ref().expect("only taken at the end of a start")
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    /// A descriptor that is readable when it has ended.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        Ok(pidfd_open(Pid::from_child(self.child()), PidfdFlags::empty())?)
    }

    /// Replaces an "it closed the socket" by what QEMU printed.
    fn own_words(&mut self, error: StartError, stderr: &Console) -> StartError {
        let ended = match &error {
            StartError::Qmp(QmpError::Closed) => true,
            StartError::Io(e) => {
                e.kind() == io::ErrorKind::UnexpectedEof || e.raw_os_error() == Some(libc::ECONNRESET)
            }
            _ => false,
        };
        if !ended {
            return error; // and the drop kills it
        }
        stderr.wait_end(Duration::from_secs(5));
        let child = self.0.as_mut().expect("only taken at the end of a start");
        let _ = child.kill();
        let status = match child.wait() {
            Ok(status) if status.signal() == Some(libc::SIGSYS) => {
                "killed by its system call filter; set vm.sandbox = false if you trust this QEMU".to_owned()
            }
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        let text = stderr.text();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        StartError::Ended {
            status,
            stderr: lines[lines.len().saturating_sub(4)..].join("; "),
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
