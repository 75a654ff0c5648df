//! A VM's RAM as a file, with or without a process that runs on it.
//!
//! Decides:    nothing.
//! Flow:       what a host holds of an earlier copy -> the RAM of the next QEMU ([`Ports`](crate::Ports)).
//! Invariants: 1. nothing here makes a page that is not there: a hole is read as zeros, and stays one; 2. it has the size that it began with, whatever the QEMU that
//!             it is given to does.
//! Source:     memfd_create(2), fallocate(2), SEEK_DATA of lseek(2), F_ADD_SEALS of fcntl(2).
//! Not here:   RAM that is tracked ([`Memory`](super::Memory)).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate};

use super::{Bitmap, PAGE_BYTES, hash};
use crate::sys::memfd_of;

/// Which file it is, and how long, for who is shown one by QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamIdentity {
    device: u64,
    inode: u64,
    bytes: u64,
}

impl RamIdentity {
    /// Of a file.
    pub fn of(file: &File) -> io::Result<RamIdentity> {
        let metadata = file.metadata()?;
        Ok(RamIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
        })
    }

    /// Whether so many bytes from there on lie in it.
    pub fn has(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }
}

/// The file.
#[derive(Debug)]
pub struct RamFile {
    file: File,
    bytes: u64,
}

impl RamFile {
    /// A fresh one, for a VM of that name: all holes.
    pub fn new(vm: &str, bytes: u64) -> io::Result<RamFile> {
        let file = memfd_of(&format!("dunlin-ram-{vm}"), bytes)?;
        Ok(RamFile { file, bytes })
    }

    /// The same file once more.
    pub fn try_clone(&self) -> io::Result<RamFile> {
        Ok(RamFile {
            file: self.file.try_clone()?,
            bytes: self.bytes,
        })
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE_BYTES as u64
    }

    /// For QEMU to inherit, and to be mapped.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The pages that exist at all (others read as zeros).
    pub fn populated(&self) -> io::Result<Bitmap> {
        let mut populated = Bitmap::new(self.pages());
        let (page, mut at) = (PAGE_BYTES as u64, 0);
        loop {
            let start = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(rustix::io::Errno::NXIO) => return Ok(populated),
                Err(error) => return Err(error.into()),
            };
            let end = rustix::fs::seek(&self.file, SeekFrom::Hole(start))?;
            populated.set_range(start / page..end.div_ceil(page).min(self.pages()));
            at = end;
        }
    }

    /// 128-bit hashes of pages, in their order.
    pub fn hash_pages(&self, pages: impl Iterator<Item = u64>) -> io::Result<Vec<u128>> {
        let mut content = [0; PAGE_BYTES];
        let mut hash_one = |page| {
            self.file.read_exact_at(&mut content, page * PAGE_BYTES as u64)?;
            Ok(hash::page(&content))
        };
        pages.map(&mut hash_one).collect()
    }

    /// Writes a whole page.
    pub fn write_page(&self, page: u64, content: &[u8]) -> io::Result<()> {
        self.file.write_all_at(content, page * PAGE_BYTES as u64)
    }

    /// Gives pages back to the system: they read as zeros.
    pub fn clear(&self, pages: Range<u64>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let page = PAGE_BYTES as u64;
        let bytes = (pages.end - pages.start) * page;
        Ok(fallocate(&self.file, flags, pages.start * page, bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 600;

    #[test]
    fn what_is_not_there_is_not_made_by_looking_at_it() {
        let ram = RamFile::new("t", PAGES * PAGE_BYTES as u64).expect("memory");
        ram.write_page(3, &[7; PAGE_BYTES]).expect("room");
        ram.write_page(599, &[9; PAGE_BYTES]).expect("room");
        let hashes = ram.hash_pages([3, 4, 599].into_iter()).expect("read");
        assert_eq!(
            hashes,
            [[7; PAGE_BYTES], [0; PAGE_BYTES], [9; PAGE_BYTES]].map(|page| hash::page(&page))
        );
        let populated = ram.populated().expect("a map");
        // Memory in large pages has neighbours there, too; a hole far away it has not.
        assert!(populated.contains(3) && populated.contains(599));
        let there = populated.count();

        let again = ram.try_clone().expect("a descriptor");
        again.clear(0..4).expect("a hole");
        let after = ram.populated().expect("a map");
        assert!(!after.contains(3) && after.contains(599) && after.count() < there);
        assert_eq!(
            ram.hash_pages([3].into_iter()).expect("read"),
            [hash::page(&[0; PAGE_BYTES])]
        );
    }

    /// QEMU has it, and whoever has broken out of a guest.
    #[test]
    fn its_size_is_nobodys_to_change_and_its_pages_are_given_back_all_the_same() {
        let ram = RamFile::new("t", PAGES * PAGE_BYTES as u64).expect("memory");
        ram.write_page(599, &[9; PAGE_BYTES]).expect("room");
        for pages in [0, PAGES - 1, PAGES + 1] {
            let refused = ram.file().set_len(pages * PAGE_BYTES as u64);
            let refused = refused.expect_err("it is sealed");
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{pages} pages");
        }
        assert!(ram.write_page(PAGES, &[1; PAGE_BYTES]).is_err());
        ram.clear(0..PAGES).expect("a hole");
        assert_eq!(ram.populated().expect("a map").count(), 0);
    }

    #[test]
    fn pages_outside_are_refused() {
        let ram = RamFile::new("t", PAGE_BYTES as u64).expect("memory");
        assert!(ram.hash_pages([1].into_iter()).is_err());
    }
}
