//! A stock QEMU under control: start, stop, continue, device state, end.
//!
//! Decides:    the order of a start.
//! Flow:       `VmSpec` -> [`Qemu::start`] -> stop / save_devices / cont, over and over -> quit, kill or drop.
//! Invariants: 1. a failed start leaves nothing and says QEMU's own words; 2. dropping a [`Qemu`] kills and reaps it;
//!             3. `save_devices` never touches block devices (`live: false`).
//! Source:     stock-qemu.md sections 1 to 3; vm-loop.md pitfalls.
//! Not here:   RAM (`memory`), loading state (`colo`), who decides to stop.

pub mod accel;
pub mod command;
pub mod console;
pub mod qmp;
pub mod spawn;

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

pub use console::Console;
pub use qmp::{QemuEvent, Qmp, QmpError};

use crate::colo::Colo;
use crate::memory::{Memory, MemoryError};
use crate::spec::{Accel, Machine, SpecError, VmSpec};
use crate::state::ThreadStates;
use crate::sys::{memfd, memfd_with, receive_descriptor};

/// The preload object, built by build.rs from preload.c.
static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How the VM begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Boots and runs.
    Boot,
    /// Waits for device state: the backup. [`Qemu::take_colo`] loads it.
    Incoming,
}

/// QEMU's ends of the sockets that the node serves; one of each per NIC and disk of the spec.
#[derive(Debug, Default)]
pub struct Ports {
    /// For `-netdev stream`.
    pub frames: Vec<OwnedFd>,
    /// For `-blockdev nbd`.
    pub nbd: Vec<OwnedFd>,
}

/// Why QEMU did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The spec cannot work.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Something of the host is missing; the text says how to mend it.
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

/// A running QEMU.
pub struct Qemu {
    child: Mutex<Child>,
    pid: u32,
    pidfd: OwnedFd,
    qmp: Arc<Qmp>,
    version: String,
    accel: (Accel, Option<String>),
    memory: Arc<Memory>,
    threads: ThreadStates,
    console: Console,
    stderr: Console,
    save: Mutex<SaveFile>,
    colo: Option<Colo>,
}

/// The memfd that device state is saved into: QEMU writes to `writer`'s shared offset, we read by `reader`.
struct SaveFile {
    writer: File,
    reader: File,
}

impl SaveFile {
    fn new() -> io::Result<SaveFile> {
        let reader = memfd("dunlin-devices")?;
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        Ok(SaveFile {
            writer: File::options().write(true).open(path)?,
            reader,
        })
    }
}

impl Qemu {
    /// Starts QEMU for `spec`. Blocks until it answers on QMP and its RAM is tracked (about 0.1 s).
    pub fn start(spec: &VmSpec, start: Start, ports: Ports) -> Result<Qemu, StartError> {
        spec.validate()?;
        if ports.frames.len() != spec.nics.len() || ports.nbd.len() != spec.disks.len() {
            panic!(
                "a port for each NIC and disk: {} nics, {} disks, {ports:?}",
                spec.nics.len(),
                spec.disks.len()
            );
        }
        let binary = executable(spec)?;
        let accel = accel::choose(spec.accel).map_err(StartError::Host)?;
        let user =
            spawn::choose_user(spec.run_as.as_deref(), accel.0 == Accel::Kvm).map_err(StartError::Host)?;

        let ram = memfd(&format!("dunlin-ram-{}", spec.name))?;
        ram.set_len(spec.memory_bytes())?;
        let save = SaveFile::new()?;
        let preload = memfd_with("dunlin-preload", &mut &PRELOAD[..])?;
        let uffd_device = File::options()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")
            .map_err(|e| {
                StartError::Host(format!(
                    "/dev/userfaultfd: {e}: dirty tracking needs it; run `dunlin check`"
                ))
            })?;
        let kernel = spec
            .kernel
            .as_ref()
            .map(|p| readable_by_all("kernel", p))
            .transpose()?;
        let initrd = spec
            .initrd
            .as_ref()
            .map(|p| readable_by_all("initrd", p))
            .transpose()?;
        let serial_log = spec.serial_log.as_ref().map(|p| open_log(p)).transpose()?;
        let (qmp_ours, qmp_theirs) = UnixStream::pair()?;
        let (console_ours, console_theirs) = UnixStream::pair()?;
        let (uffd_ours, uffd_theirs) = UnixStream::pair()?;

        let number = |file: &File| file.as_raw_fd();
        let descriptors = command::Descriptors {
            ram: ram.as_raw_fd(),
            qmp: qmp_theirs.as_raw_fd(),
            console: console_theirs.as_raw_fd(),
            save: save.writer.as_raw_fd(),
            kernel: kernel.as_ref().map(number),
            initrd: initrd.as_ref().map(number),
            frames: ports.frames.iter().map(AsRawFd::as_raw_fd).collect(),
            nbd: ports.nbd.iter().map(AsRawFd::as_raw_fd).collect(),
        };
        let colo_pair = (start == Start::Incoming).then(UnixStream::pair).transpose()?;
        let inherited = inherited(
            &descriptors,
            &preload,
            &uffd_device,
            &uffd_theirs,
            colo_pair.as_ref(),
        );

        let mut command = Command::new(&binary);
        command
            .args(command::arguments(
                spec,
                accel.0,
                &descriptors,
                start == Start::Incoming,
            ))
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("LD_PRELOAD", format!("/proc/self/fd/{}", preload.as_raw_fd()))
            .env(
                "DUNLIN_UFFD",
                format!("{}:{}", uffd_device.as_raw_fd(), uffd_theirs.as_raw_fd()),
            )
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = spawn::spawn(command, inherited, user.clone()).map_err(|error| {
            let as_user = user
                .as_ref()
                .map_or(String::new(), |u| format!(" as user {:?}", u.name));
            StartError::Host(format!("cannot run {}{as_user}: {error}", binary.display()))
        })?;
        let stderr = Console::follow("qemu-stderr", child.stderr.take().expect("piped"), None)?;
        let mut child = Killed(Some(child));
        // Our copies of QEMU's ends must go, or its death would not end the sockets.
        drop((qmp_theirs, console_theirs, uffd_theirs, ports));

        let begin = || -> Result<_, StartError> {
            let uffd = receive_descriptor(uffd_ours.as_fd())?;
            let (qmp, version) = Qmp::handshake(qmp_ours, START_TIMEOUT)?;
            Ok((uffd, qmp, version))
        };
        let (uffd, qmp, version) = begin().map_err(|error| child.own_words(error, &stderr))?;
        let qmp = Arc::new(qmp);
        let pid = child.pid();
        let memory = Arc::new(Memory::attach(pid, ram, uffd)?);
        let console = Console::follow("qemu-console", console_ours, serial_log)?;
        let threads = ThreadStates::new(pid, vcpu_threads(&qmp)?)?;
        let colo = match colo_pair {
            Some((ours, theirs)) => {
                prepare_incoming(&qmp, theirs.as_raw_fd())?;
                // QEMU adopts the number itself, our copy can go.
                drop(theirs);
                let needs_reset = spec.machine == Machine::Q35;
                Some(Colo::new(ours, Arc::clone(&qmp), needs_reset))
            }
            None => None,
        };
        let pidfd = child.pidfd()?;
        let child = Mutex::new(child.0.take().expect("still here"));
        let save = Mutex::new(save);
        Ok(Qemu {
            child,
            pid,
            pidfd,
            qmp,
            version,
            accel,
            memory,
            threads,
            console,
            stderr,
            save,
            colo,
        })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Readable (epoll) when the process has ended: the surest sign of a dead VM.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// QEMU's version, as `7.2.22 Debian 1:7.2+dfsg-7+deb12u18+b3`. State is only loaded between equal versions.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What runs the guest, and why it is not KVM if `auto` found none.
    pub fn accel(&self) -> (Accel, Option<&str>) {
        (self.accel.0, self.accel.1.as_deref())
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Is the guest busy?
    pub fn threads(&self) -> &ThreadStates {
        &self.threads
    }

    /// The serial console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// What QEMU itself printed.
    pub fn stderr(&self) -> &Console {
        &self.stderr
    }

    /// The control connection; its descriptor is readable when events have come ([`Qmp::poll_events`]).
    pub fn qmp(&self) -> &Arc<Qmp> {
        &self.qmp
    }

    /// The port that loads state into a [`Start::Incoming`] VM. `None` when booted, or already taken.
    pub fn take_colo(&mut self) -> Option<Colo> {
        self.colo.take()
    }

    /// Stops the vCPUs; requests in flight on disks are drained.
    pub fn stop(&self) -> Result<(), QmpError> {
        self.qmp.execute("stop", Value::Null).map(drop)
    }

    /// Lets the vCPUs run on.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.qmp.execute("cont", Value::Null).map(drop)
    }

    /// Device and CPU state of the stopped VM, in QEMU's own format with its 8 header bytes.
    pub fn save_devices(&self) -> Result<Vec<u8>, QmpError> {
        let mut save = self.save.lock().expect("no thread panics while saving");
        save.writer.set_len(0)?;
        // QEMU writes at the offset that this description shares with its own.
        save.writer.rewind()?;
        // live: true, the default, would inactivate the block devices of a stopped VM.
        let arguments = json!({"filename": format!("/dev/fdset/{}", command::SAVE_FDSET), "live": false});
        self.qmp.execute("xen-save-devices-state", arguments)?;
        let mut state = vec![0; save.reader.metadata()?.len() as usize];
        save.reader.read_exact_at(&mut state, 0)?;
        Ok(state)
    }

    /// Asks QEMU to end, and waits for it; kills it when it takes longer than `timeout`.
    pub fn quit(&self, timeout: Duration) -> io::Result<ExitStatus> {
        if self.qmp.execute("quit", Value::Null).is_ok() {
            let _ = crate::sys::wait_readable(self.pidfd(), std::time::Instant::now() + timeout)?;
        }
        self.kill()
    }

    /// Kills QEMU (if it still runs) and reaps it.
    pub fn kill(&self) -> io::Result<ExitStatus> {
        let mut child = self.child.lock().expect("no thread panics while it reaps");
        child.kill()?;
        child.wait()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A child that is killed and reaped if the start fails.
struct Killed(Option<Child>);

impl Killed {
    fn child(&self) -> &Child {
        self.0.as_ref().expect("only taken at the end of a start")
    }

    fn pid(&self) -> u32 {
        self.child().id()
    }

    fn pidfd(&self) -> io::Result<OwnedFd> {
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
        let Some(mut child) = self.0.take().filter(|_| ended) else {
            return error;
        };
        stderr.wait_end(Duration::from_secs(5));
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

/// The executable of the spec, looked up.
pub fn executable(spec: &VmSpec) -> Result<PathBuf, StartError> {
    let name = spec.qemu.as_deref().unwrap_or(Path::new("qemu-system-x86_64"));
    spawn::find_executable(name).ok_or_else(|| {
        StartError::Host(format!(
            "there is no {}: install it (Debian: apt-get install qemu-system-x86) or set vm.qemu",
            name.display()
        ))
    })
}

fn inherited(
    fds: &command::Descriptors,
    preload: &File,
    uffd_device: &File,
    uffd_socket: &UnixStream,
    colo: Option<&(UnixStream, UnixStream)>,
) -> Vec<RawFd> {
    let mut all = vec![fds.ram, fds.qmp, fds.console, fds.save];
    all.extend([
        preload.as_raw_fd(),
        uffd_device.as_raw_fd(),
        uffd_socket.as_raw_fd(),
    ]);
    all.extend(
        fds.kernel
            .iter()
            .chain(&fds.initrd)
            .chain(&fds.frames)
            .chain(&fds.nbd),
    );
    all.extend(colo.iter().map(|(_, theirs)| theirs.as_raw_fd()));
    all
}

/// The file as a descriptor that QEMU's ordinary user can open again by /proc/self/fd: a file that only root can
/// read is copied into memory.
fn readable_by_all(key: &'static str, path: &Path) -> Result<File, StartError> {
    let fail = |error| StartError::File {
        key,
        path: path.to_owned(),
        error,
    };
    let mut file = File::open(path).map_err(fail)?;
    match file.metadata().map_err(fail)?.permissions().mode() & 0o004 {
        0 => memfd_with("dunlin-boot", &mut file).map_err(fail),
        _ => Ok(file),
    }
}

fn open_log(path: &Path) -> Result<File, StartError> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|error| StartError::File {
            key: "serial_log",
            path: path.to_owned(),
            error,
        })
}

fn vcpu_threads(qmp: &Qmp) -> Result<Vec<u32>, QmpError> {
    let cpus = qmp.execute("query-cpus-fast", Value::Null)?;
    let ids = cpus.as_array().map(|cpus| {
        cpus.iter()
            .filter_map(|c| c["thread-id"].as_u64())
            .map(|t| t as u32)
    });
    ids.map(Iterator::collect)
        .ok_or_else(|| QmpError::NotUnderstood(cpus.to_string()))
}

fn prepare_incoming(qmp: &Qmp, colo: RawFd) -> Result<(), QmpError> {
    let on = |name| json!({"capability": name, "state": true});
    // x-ignore-shared: RAM is a shared file that we fill ourselves.
    qmp.execute(
        "migrate-set-capabilities",
        json!({"capabilities": [on("x-colo"), on("x-ignore-shared")]}),
    )?;
    qmp.execute("migrate-incoming", json!({"uri": format!("fd:{colo}")}))
        .map(drop)
}
