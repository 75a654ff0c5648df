//! A stock QEMU under control: start, stop, continue, device state, end.
//!
//! Decides:    the order of a start.
//! Flow:       `VmSpec` -> [`Qemu::start`] -> stop / save_state / cont, over and over -> quit, kill or drop.
//! Invariants: 1. a failed start leaves nothing and says QEMU's own words; 2. dropping a [`Qemu`] kills and reaps it;
//!             3. `save_devices` never touches block devices (`live: false`).
//! Source:     stock-qemu.md sections 1 to 3; vm-loop.md pitfalls.
//! Not here:   RAM (`memory`), what the firmware is (`firmware`), loading state (`colo`), who decides to stop.

pub mod accel;
pub mod command;
pub mod console;
pub mod launch;
pub mod qmp;
pub mod spawn;

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dunlin_core::waits::Wait;
use serde_json::{Value, json};

pub use console::Console;
use console::DaemonLog;
pub use launch::StartError;
use launch::launch;
pub use qmp::{QemuEvent, Qmp, QmpError};

use crate::colo::Colo;
use crate::firmware::{self, Firmware};
use crate::memory::{Memory, RamFile, RamIdentity, RamWriter};
use crate::spec::{Accel, FirmwareKind, VmSpec};
use crate::state::ThreadStates;
use crate::sys::{memfd, memfd_with};
use crate::uefi;

/// How the VM begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Boots and runs.
    Boot,
    /// Waits for device state: the backup. [`Qemu::take_colo`] loads it.
    Incoming,
}

/// QEMU's ends of the sockets that the node serves; one of each per NIC and image of the spec.
#[derive(Debug, Default)]
pub struct Ports {
    /// One for each NIC.
    pub frames: Vec<OwnedFd>,
    /// Those of the NICs that write to the guest's RAM themselves.
    pub ram_writers: Vec<RamWriter>,
    /// For `-blockdev nbd`; a UEFI's variables behind the last disk.
    pub nbd: Vec<OwnedFd>,
    /// What is known of the memory of a VM that waits for its state: its RAM begins as this, where it is of that size.
    pub ram: Option<RamFile>,
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
    firmware: Arc<Firmware>,
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
    pub fn start(spec: &VmSpec, start: Start, mut ports: Ports) -> Result<Qemu, StartError> {
        spec.validate()?;
        if ports.frames.len() != spec.nics.len() || ports.nbd.len() != spec.images() {
            panic!(
                "a port for each NIC and image: {} nics, {} images, {ports:?}",
                spec.nics.len(),
                spec.images()
            );
        }
        let binary = executable(spec)?;
        let user = spawn::choose_user(spec.run_as.as_deref())?;
        let accel = accel::choose(spec.accel, user.as_ref())?;
        let user = match accel.0 {
            Accel::Kvm => user.map(spawn::User::with_kvm),
            _ => user,
        };

        let known = ports.ram.take();
        let known = known.filter(|ram| start == Start::Incoming && ram.bytes() == spec.memory_bytes());
        let ram = match known {
            Some(ram) => ram,
            None => RamFile::new(&spec.name, spec.memory_bytes())?,
        };
        let save = SaveFile::new()?;
        let open = |key, path: &Option<PathBuf>| path.as_ref().map(|p| readable_by_all(key, p)).transpose();
        let kernel = open("kernel", &spec.kernel)?;
        let initrd = open("initrd", &spec.initrd)?;
        let preload = open("preload", &spec.preload)?;
        let code = match spec.firmware {
            FirmwareKind::Bios => None,
            FirmwareKind::Uefi => Some(readable_by_all("firmware", &uefi::code()?)?),
        };
        let serial_log = spec.serial_log.as_ref().map(|p| open_log(p)).transpose()?;
        let (console_ours, console_theirs) = UnixStream::pair()?;
        let colo_pair = (start == Start::Incoming).then(UnixStream::pair).transpose()?;

        let mut descriptors = command::Descriptors {
            qmp: -1, // known to `launch`
            ram: ram.file().as_raw_fd(),
            console: console_theirs.as_raw_fd(),
            save: save.writer.as_raw_fd(),
            kernel: kernel.as_ref().map(File::as_raw_fd),
            initrd: initrd.as_ref().map(File::as_raw_fd),
            frames: ports.frames.iter().map(AsRawFd::as_raw_fd).collect(),
            nbd: ports.nbd.iter().map(AsRawFd::as_raw_fd).collect(),
            code: code.as_ref().map(File::as_raw_fd),
        };
        let mut inherited = vec![descriptors.ram, descriptors.console, descriptors.save];
        inherited.extend(
            descriptors
                .kernel
                .iter()
                .chain(&descriptors.initrd)
                .chain(&descriptors.code),
        );
        inherited.extend(descriptors.frames.iter().chain(&descriptors.nbd));
        inherited.extend(colo_pair.iter().map(|(_, theirs)| theirs.as_raw_fd()));
        let arguments = |qmp| {
            descriptors.qmp = qmp;
            command::arguments(spec, accel.0, &descriptors, start == Start::Incoming)
        };
        let ram_writers = std::mem::take(&mut ports.ram_writers);
        let identity = RamIdentity::of(ram.file())?;
        ram_writers
            .iter()
            .for_each(|writer| writer.is_to_write_to(identity));
        let (colo_ours, colo_theirs) = colo_pair.unzip();
        let colo_number = colo_theirs.as_ref().map(AsRawFd::as_raw_fd);
        let launched = launch(
            &binary,
            user,
            Some(DaemonLog::of(&spec.name)),
            preload.as_ref(),
            inherited,
            arguments,
            (console_theirs, colo_theirs, ports),
        )?;

        let qmp = Arc::new(launched.qmp);
        let pid = launched.child.pid();
        let memory = Arc::new(Memory::attach(pid, ram, launched.uffd, ram_writers)?);
        let firmware = Arc::new(Firmware::find(pid, &qmp, spec)?);
        let console = Console::follow("qemu-console", console_ours, serial_log)?;
        let threads = ThreadStates::new(pid, vcpu_threads(&qmp)?)?;
        let mut colo = None;
        if let (Some(ours), Some(number)) = (colo_ours, colo_number) {
            prepare_incoming(&qmp, number)?;
            colo = Some(Colo::new(
                ours,
                Arc::clone(&qmp),
                Arc::clone(&memory),
                Arc::clone(&firmware),
            ));
        }
        Ok(Qemu {
            pid,
            pidfd: launched.child.pidfd()?,
            child: Mutex::new(launched.child.keep()),
            qmp,
            version: launched.version,
            accel,
            memory,
            firmware,
            threads,
            console,
            stderr: launched.stderr,
            save: Mutex::new(save),
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
        self.stop_within(Wait::VmStops.bound())
    }

    /// The same, for whoever has less time.
    pub fn stop_within(&self, bound: Duration) -> Result<(), QmpError> {
        self.qmp.execute_within("stop", Value::Null, bound).map(drop)
    }

    /// Lets the vCPUs run on.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.cont_within(Wait::VmResumes.bound())
    }

    /// The same, for whoever has less time. Without an answer in time QEMU knows of it all the same, behind whatever it was told
    /// before, and obeys when it can: a VM does not stand because another command was slow.
    pub fn cont_within(&self, bound: Duration) -> Result<(), QmpError> {
        match self.qmp.execute_within("cont", Value::Null, bound) {
            Err(QmpError::NotTold(command, bound)) => {
                self.qmp.tell(&command, bound)?;
                Err(QmpError::Timeout(command, bound))
            }
            done => done.map(drop),
        }
    }

    /// What a backup needs of the stopped VM beside guest RAM and disks: its devices' and CPUs' state, and before that the
    /// firmware, for the first state of a join (`first`) all of it, later what the guest has changed.
    pub fn save_state(&self, first: bool) -> Result<Vec<u8>, QmpError> {
        self.save_state_within(first, Wait::DevicesSave.bound())
    }

    /// The same, for whoever has less time.
    pub fn save_state_within(&self, first: bool, bound: Duration) -> Result<Vec<u8>, QmpError> {
        let mut state = firmware::prefix(&self.firmware.changes(first)?);
        state.extend(self.save_devices(bound)?);
        Ok(state)
    }

    /// Device and CPU state of the stopped VM, in QEMU's own format with its 8 header bytes.
    pub fn save_devices(&self, bound: Duration) -> Result<Vec<u8>, QmpError> {
        let mut save = self.save.lock().expect("no thread panics while saving");
        save.writer.set_len(0)?;
        // QEMU writes at the offset that this description shares with its own.
        save.writer.rewind()?;
        // live: true, the default, would inactivate the block devices of a stopped VM.
        let arguments = json!({"filename": format!("/dev/fdset/{}", command::SAVE_FDSET), "live": false});
        self.qmp
            .execute_within("xen-save-devices-state", arguments, bound)?;
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

    /// Kills QEMU (if it still runs), and does not wait for its end.
    pub fn end(&self) -> io::Result<()> {
        use rustix::process::{Signal, pidfd_send_signal};
        match pidfd_send_signal(self.pidfd(), Signal::KILL) {
            // It has ended, and may have been reaped.
            Err(rustix::io::Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Kills QEMU (if it still runs) and reaps it. A process that is deep in the kernel takes as long as that does.
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
