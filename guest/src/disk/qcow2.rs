//! Decides: how an image in QEMU's own format becomes bytes that the disk port can read and write.
//!
//! Flow: [`Converter::start`] runs a `qemu-storage-daemon` with the image -> its FUSE export is a file of raw bytes -> [`super::Image`]
//! opens that file like any other.
//! The trap: a FUSE mount outlives a killed server and makes its path unusable. So the daemon mounts in a mount namespace of its
//! own, we look into that through `/proc/PID/root`, and the mount goes with the process.
//! Invariants: **Q1** whatever ends the daemon, its converter ends with it (PR_SET_PDEATHSIG) and nothing stays mounted;
//! **Q2** the image is locked by QEMU's own locks for as long as the converter runs; **Q3** no other file is opened because an image names
//! it: an image may come from anywhere, its first bytes may have been a guest's, and the converter runs as root. The file that it stands on
//! is opened where the VM's file says that it may be.
//! Source: qemu-storage-daemon(1), `--export fuse`. Not here: formats without a lock or a size (only qcow2 is offered).

use super::image::ImageError;
use crate::qemu::spawn;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    os::unix::{
        fs::{FileExt, MetadataExt},
        process::CommandExt,
    },
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
    pub fn start(image: &Path, at: &Path, read_only: bool, may_be_backed: bool) -> Result<Self, ImageError> {
        let failed = |error| ImageError::Open(image.into(), error);
        Head::read(image)?.judge(image, may_be_backed)?;
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
        let mut node = serde_json::json!({
            "driver": "qcow2", "node-name": "disk", "read-only": read_only, "discard": "unmap",
            "file": {"driver": "file", "filename": file, "read-only": read_only, "locking": "on", "discard": "unmap"},
        });
        if !may_be_backed {
            node["backing"] = serde_json::Value::Null;
        }
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

/// What an image says of other files.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    version: u32,
    backing: Option<String>,
    has_data_file: bool,
}

impl Head {
    /// Of a version that has features, from the beginning to the end of the first of them.
    const BYTES: usize = 80;
    const VERSION_AT: usize = 4;
    const BACKING_AT: usize = 8;
    const BACKING_BYTES_AT: usize = 16;
    const INCOMPATIBLE_AT: usize = 72;
    /// Since this version there are features.
    const WITH_FEATURES: u32 = 3;
    const DATA_FILE: u64 = 1 << 2;
    /// QEMU takes no longer name.
    const LONGEST_NAME: usize = 1023;

    fn read(image: &Path) -> Result<Self, ImageError> {
        let failed = |error| ImageError::Open(image.into(), error);
        let file = fs::File::open(image).map_err(failed)?;
        let mut head = [0; Self::BYTES];
        // Shorter than what follows its head: no image either.
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let long = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let version = word(Self::VERSION_AT);
        let backing = match long(Self::BACKING_AT) {
            0 => None,
            at => {
                let length = word(Self::BACKING_BYTES_AT) as usize;
                let mut name = vec![0; length.min(Self::LONGEST_NAME)];
                file.read_exact_at(&mut name, at).map_err(failed)?;
                // For a person: what stands there may be anything.
                Some(String::from_utf8_lossy(&name).escape_debug().to_string())
            }
        };
        Ok(Self {
            version,
            backing,
            has_data_file: version >= Self::WITH_FEATURES
                && long(Self::INCOMPATIBLE_AT) & Self::DATA_FILE != 0,
        })
    }

    /// Q3.
    fn judge(self, image: &Path, may_be_backed: bool) -> Result<(), ImageError> {
        if !(2..=Self::WITH_FEATURES).contains(&self.version) {
            return Err(ImageError::Unfit(
                image.into(),
                "is of a version that is not known",
            ));
        }
        if self.has_data_file {
            return Err(ImageError::Unfit(image.into(), "has its data in another file"));
        }
        match self.backing {
            Some(backing) if !may_be_backed => Err(ImageError::Backed(image.into(), backing)),
            _ => Ok(()),
        }
    }
}

/// A file that says of itself what it is: whoever took it for raw bytes would give a guest a disk of tables.
pub fn known_format(path: &Path) -> Option<&'static str> {
    let mut head = [0; 8];
    let file = fs::File::open(path).ok()?;
    file.read_exact_at(&mut head, 0).ok()?;
    match &head {
        [b'Q', b'F', b'I', 0xfb, ..] => Some("qcow2"),
        [b'K', b'D', b'M', b'V', ..] => Some("vmdk"),
        b"vhdxfile" => Some("vhdx"),
        b"conectix" => Some("vpc"),
        _ => None,
    }
}
