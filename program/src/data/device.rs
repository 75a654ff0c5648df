//! A loop device that detaches itself.
//!
//! Source: loop(4); linux/loop.h. Not here: what is on it (`data`).

use crate::guard::GuardError;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

/// Hands out free devices.
pub(super) const CONTROL: &str = "/dev/loop-control";
/// Another process may be faster with the device that was found free.
const TRIES: usize = 32;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
/// Detached with the last who has it open or mounted.
const AUTOCLEAR: u32 = 4;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Configuration {
    file: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// One that is held.
#[derive(Debug)]
pub(super) struct Device {
    path: PathBuf,
    number: u32,
    _held: File,
}

impl Device {
    /// Puts `file` on a free device.
    pub(super) fn attach(file: &File) -> Result<Self, GuardError> {
        let fail = |what: &str, error: io::Error| {
            GuardError::new(format!(
                "{what}: {error} (modprobe loop; a container has to be given its devices)"
            ))
        };
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let control = open(Path::new(CONTROL)).map_err(|error| fail(CONTROL, error))?;
        for _ in 0..TRIES {
            // SAFETY: it takes no argument, and returns a number.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            let number =
                u32::try_from(number).map_err(|_| fail("a loop device", io::Error::last_os_error()))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let name = path.display().to_string();
            let held = open(&path).map_err(|error| fail(&name, error))?;
            match configure(&held, file.as_raw_fd()) {
                Ok(()) => {
                    return Ok(Self {
                        path,
                        number,
                        _held: held,
                    });
                }
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(fail(&name, error)),
            }
        }
        let busy = io::Error::from_raw_os_error(libc::EBUSY);
        Err(fail("a loop device", busy))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            folder: format!("/sys/block/loop{}", self.number).into(),
        }
    }
}

fn configure(device: &File, file: RawFd) -> io::Result<()> {
    let configuration = Configuration {
        file: file.cast_unsigned(),
        block_size: 0,
        info: Info {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: AUTOCLEAR,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads a `struct loop_config`, which this is, byte by byte.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const configuration) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How much was written to a device, for who must know that nothing was.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    folder: PathBuf,
}

impl Figures {
    /// Of no device.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self {
            folder: PathBuf::new(),
        }
    }

    /// Writes that are done (discards and flushes too); none while one is under way.
    pub(super) fn writes(&self) -> io::Result<Option<u64>> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name));
        // In this order: what is done in between was under way.
        let under_way = field(&read("inflight")?, 1)?;
        let stat = read("stat")?;
        Ok((under_way == 0).then_some(done(&stat)?))
    }
}

/// By Documentation/block/stat.rst.
fn done(stat: &str) -> io::Result<u64> {
    const WRITES: usize = 4;
    const DISCARDS: usize = 11;
    Ok(field(stat, WRITES)? + field(stat, DISCARDS)?)
}

fn field(text: &str, at: usize) -> io::Result<u64> {
    let number = text.split_whitespace().nth(at).and_then(|word| word.parse().ok());
    number.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "figures of a loop device that nobody knows",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_are_as_long_as_it_says() {
        assert_eq!(size_of::<Info>(), 232);
        assert_eq!(size_of::<Configuration>(), 304);
    }

    #[test]
    fn writes_and_discards_count_and_reads_do_not() {
        let stat = "  9 0 8 7  100 3 800 20 0 30 27  5 0 0 0  2 9\n";
        assert_eq!(done(stat).expect("a number"), 105);
        assert!(done("nonsense").is_err());
    }
}
