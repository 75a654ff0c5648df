//! How large a disk is for its guest, without opening it as one.
//!
//! Decides: nothing. Flow: `dunlin check VM.TOML` compares both hosts' disks before a VM is started; an [`super::Image`] has its size
//! from itself. Invariants: the image is only read, and not locked: its VM may run.
//! Source: QEMU's docs/interop/qcow2.txt. Not here: whether the image can be used ([`super::check`]).

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::DiskFormat;

/// Where a qcow2 header says the size of the disk, big-endian.
const QCOW2_SIZE_AT: u64 = 24;
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// The size in bytes of the disk in the image or block device at `path`.
///
/// # Errors
/// It cannot be read, or is not what `format` says.
pub fn size_bytes(path: &Path, format: DiskFormat) -> io::Result<u64> {
    let mut file = File::open(path)?;
    match format {
        DiskFormat::Raw => file.seek(SeekFrom::End(0)),
        DiskFormat::Qcow2 | DiskFormat::BackedQcow2 => {
            let (mut magic, mut size) = ([0; 4], [0; 8]);
            file.read_exact_at(&mut magic, 0)?;
            file.read_exact_at(&mut size, QCOW2_SIZE_AT)?;
            match magic == QCOW2_MAGIC {
                true => Ok(u64::from_be_bytes(size)),
                false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not qcow2")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_raw_and_a_qcow2_image_have_the_size_that_qemu_img_gave_them() {
        let folder = std::env::temp_dir().join(format!("dunlin-size-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, format) in [("raw", DiskFormat::Raw), ("qcow2", DiskFormat::Qcow2)] {
            let path = folder.join(name);
            let made = Command::new("qemu-img")
                .args(["create", "-q", "-f", name])
                .arg(&path)
                .arg("12345344")
                .status()
                .unwrap();
            assert!(made.success());
            assert_eq!(size_bytes(&path, format).unwrap(), 12_345_344);
        }
        assert!(size_bytes(&folder.join("raw"), DiskFormat::Qcow2).is_err());
        assert!(size_bytes(&folder.join("none"), DiskFormat::Raw).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
