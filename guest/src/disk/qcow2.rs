//! Decides: how an image in QEMU's own format becomes bytes that the disk port can read and write.
//!
//! Flow: [`Converter::start`] runs a `qemu-storage-daemon` with the image -> its FUSE export is a file of raw bytes -> [`super::Image`]
//! opens that file like any other.
//! The trap: a FUSE mount outlives a killed server and makes its path unusable. So the daemon mounts in a mount namespace of its
//! own, we look into that through `/proc/PID/root`, and the mount goes with the process.
//! Invariants: **Q1** whatever ends the daemon, its converter ends with it (PR_SET_PDEATHSIG) and nothing stays mounted;
//! **Q2** the image is locked by QEMU's own locks for as long as the converter runs.
//! Source: qemu-storage-daemon(1), `--export fuse`. Not here: formats without a lock or a size (only qcow2 is offered).

use super::image::ImageError;
use crate::qemu::spawn;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const PROGRAM: &str = "qemu-storage-daemon";
const START: Duration = Duration::from_secs(20);
/// How often the mount is looked for while the converter starts: nothing tells of a mount in another namespace.
const LOOK: Duration = Duration::from_millis(5);

/// A running converter; dropped, it writes out what it holds and ends.
#[derive(Debug)]
pub(super) struct Converter {
    child: Child,
    raw: PathBuf,
}

impl Converter {
    /// Starts it for `image`; `at` is a file of ours that it mounts the raw bytes over.
    pub fn start(image: &Path, at: &Path, read_only: bool) -> Result<Self, ImageError> {
        let failed = |error| ImageError::Open(image.into(), error);
        let program = spawn::find_executable(Path::new(PROGRAM))
            .ok_or_else(|| ImageError::NoConverter(image.into(), format!("{PROGRAM} is not installed")))?;
        if !Path::new("/dev/fuse").exists() {
            return Err(ImageError::NoConverter(
                image.into(),
                "this kernel has no FUSE".into(),
            ));
        }
        let image_path = fs::canonicalize(image).map_err(failed)?;
        fs::write(at, b"").map_err(failed)?;
        let at = fs::canonicalize(at).map_err(failed)?;
        let ours = fs::metadata(&at).map_err(failed)?.dev();
        let (Some(file), Some(mount)) = (image_path.to_str(), at.to_str()) else {
            return Err(failed(io::Error::new(
                io::ErrorKind::InvalidInput,
                "its path is not UTF-8",
            )));
        };
        let node = serde_json::json!({
            "driver": "qcow2", "node-name": "disk", "read-only": read_only, "discard": "unmap",
            "file": {"driver": "file", "filename": file, "read-only": read_only, "locking": "on", "discard": "unmap"},
        });
        let mut command = Command::new(program);
        command
            .args(["--blockdev", &node.to_string(), "--export"])
            // A comma in a path is doubled (qemu-storage-daemon(1)).
            .arg(format!(
                "fuse,id=raw,node-name=disk,mountpoint={},writable={}",
                mount.replace(',', ",,"),
                if read_only { "off" } else { "on" }
            ))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let own_mounts = || {
            // SAFETY: between fork and exec only two plain system calls are made, with constants.
            let done = unsafe {
                libc::unshare(libc::CLONE_NEWNS) == 0
                    && libc::mount(
                        std::ptr::null(),
                        c"/".as_ptr(),
                        std::ptr::null(),
                        libc::MS_REC | libc::MS_PRIVATE,
                        std::ptr::null(),
                    ) == 0
            };
            if done {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        };
        // SAFETY: see the closure.
        unsafe { command.pre_exec(own_mounts) };
        let child = spawn::spawn(command, Vec::new(), None).map_err(failed)?;
        let seen =
            PathBuf::from(format!("/proc/{}/root", child.id())).join(at.strip_prefix("/").unwrap_or(&at));
        let mut this = Self { child, raw: seen };
        let until = Instant::now() + START;
        loop {
            // Mounted: another file system lies over ours.
            if fs::metadata(&this.raw).is_ok_and(|found| found.dev() != ours) {
                return Ok(this);
            }
            if let Ok(Some(status)) = this.child.try_wait() {
                return Err(this.words(image, &status.to_string()));
            }
            if Instant::now() > until {
                return Err(ImageError::NoConverter(
                    image.into(),
                    format!("{PROGRAM} does not start"),
                ));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The raw bytes, as a file.
    pub fn raw(&self) -> &Path {
        &self.raw
    }

    /// What it printed before it ended.
    fn words(&mut self, image: &Path, status: &str) -> ImageError {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Best effort: the status stands for it.
            let _ = io::Read::read_to_string(stderr, &mut text);
        }
        if text.contains("lock") {
            return ImageError::InUse(image.into());
        }
        let line = text
            .lines()
            .find(|line| !line.trim().is_empty())
            .unwrap_or(status);
        ImageError::NoConverter(image.into(), line.trim().to_owned())
    }
}

impl Drop for Converter {
    fn drop(&mut self) {
        // SIGTERM: it drains and closes the image, so that its lazily written tables are whole.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// A file that says of itself what it is: whoever took it for raw bytes would give a guest a disk of tables.
pub fn known_format(path: &Path) -> Option<&'static str> {
    let mut head = [0; 8];
    let file = fs::File::open(path).ok()?;
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut head, 0).ok()?;
    match &head {
        [b'Q', b'F', b'I', 0xfb, ..] => Some("qcow2"),
        [b'K', b'D', b'M', b'V', ..] => Some("vmdk"),
        b"vhdxfile" => Some("vhdx"),
        b"conectix" => Some("vpc"),
        _ => None,
    }
}
