//! Guest RAM: one shared file, mapped here and in QEMU.
//!
//! Decides:    nothing.
//! Flow:       scan_dirty -> (union) -> hash_pages -> (compare) -> copy_page / write_blocks.
//! Invariants: 1. page numbers are offsets in the RAM *file*, so they mean the same on every host, also where the machine
//!             (pc with more than 3 GiB) shows the file to the guest in two pieces; 2. a write made here is not seen
//!             by the dirty scan: the caller marks it; 3. a [`RamWriter`] tells its own writes, to the same scan.
//! Source:     stock-qemu.md section 1.
//! Not here:   which pages to send.

mod bitmap;
pub mod hash;
mod ram_file;
pub mod track;

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

pub use bitmap::Bitmap;
pub use ram_file::{RamFile, RamIdentity};
use track::Tracker;

/// Bytes of a guest page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of the blocks that a divergent page is compared in: such a page differs in about 100 bytes.
pub const BLOCK_BYTES: usize = 256;
/// Blocks of a page.
pub const BLOCKS_PER_PAGE: usize = PAGE_BYTES / BLOCK_BYTES;

/// Why RAM cannot be mapped or tracked.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// QEMU has not mapped the whole file.
    #[error("QEMU maps {mapped} of {size} bytes of its RAM file: is it a QEMU without memory-backend-file?")]
    NotMapped {
        /// Bytes found in its address space.
        mapped: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// The kernel cannot track.
    #[error("dirty tracking: {0}: it needs Linux 6.7 or newer, run `dunlin check`")]
    Tracking(io::Error),
    /// Another system call.
    #[error("guest RAM: {0}")]
    Io(#[from] io::Error),
}

/// Whoever writes to the guest's RAM through a mapping of its own while the VM runs, and keeps account of it.
pub trait WritesRam: Send + Sync + std::fmt::Debug {
    /// Which file that RAM is, before QEMU begins: it writes to no other.
    fn is_to_write_to(&self, ram: RamIdentity);

    /// Adds the pages that were written since the last call, by their offset in the RAM file. Exact when the VM is stopped.
    fn take_written(&self, dirty: &mut Bitmap);
}

/// One of them, shared with the [`Memory`].
pub type RamWriter = Arc<dyn WritesRam>;

/// The RAM of one VM.
pub struct Memory {
    ram: RamFile,
    base: *mut u8,
    bytes: usize,
    tracker: Tracker,
    writers: Vec<RamWriter>,
}

// SAFETY: the mapping is shared memory that the guest writes at any time anyway; all access here is by copies of raw
// bytes, and the callers order them by stopping the VM.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `ram`, that of process `pid`, and begins to track its writes there with `uffd`, made in that process; `writers` tell their own.
    pub fn attach(
        pid: u32,
        ram: RamFile,
        uffd: OwnedFd,
        writers: Vec<RamWriter>,
    ) -> Result<Memory, MemoryError> {
        let metadata = ram.file().metadata()?;
        let size = metadata.len();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let ranges = mappings(&maps, metadata.ino());
        let mapped = ranges.iter().map(|(r, _)| r.end - r.start).sum();
        if mapped != size || size % PAGE_BYTES as u64 != 0 {
            return Err(MemoryError::NotMapped { mapped, size });
        }
        let tracker = Tracker::new(pid, uffd, ranges).map_err(MemoryError::Tracking)?;
        let bytes = size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of a file of that length, at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                ram.file(),
                0,
            )
        };
        Ok(Memory {
            base: base.map_err(io::Error::from)?.cast(),
            bytes,
            ram,
            tracker,
            writers,
        })
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        (self.bytes / PAGE_BYTES) as u64
    }

    /// The pages that QEMU, its guest and the [`RamWriter`]s have written since the last call; they are clean from here on.
    /// About 0.7 us a MiB of RAM, on several cores from 4 GiB on. Exact when the VM is stopped.
    pub fn scan_dirty(&self) -> io::Result<Bitmap> {
        let mut dirty = Bitmap::new(self.pages());
        self.scan_dirty_into(&mut dirty)?;
        Ok(dirty)
    }

    /// As [`Memory::scan_dirty`], added to `dirty`.
    pub fn scan_dirty_into(&self, dirty: &mut Bitmap) -> io::Result<()> {
        self.writers.iter().for_each(|writer| writer.take_written(dirty));
        let page = PAGE_BYTES as u64;
        self.tracker
            .scan(|offsets| dirty.set_range(offsets.start / page..offsets.end / page))
    }

    /// The pages that exist at all (others read as zeros): what a first copy has to look at.
    pub fn populated(&self) -> io::Result<Bitmap> {
        self.ram.populated()
    }

    /// The file, which outlives QEMU.
    pub fn ram(&self) -> &RamFile {
        &self.ram
    }

    /// Copies a page out. (Reading a page that is not [`Memory::populated`] makes it, zeroed.)
    pub fn copy_page(&self, page: u64, out: &mut [u8; PAGE_BYTES]) {
        // SAFETY: `at` has checked the page; the guest may write meanwhile, then the copy is torn but initialised.
        unsafe { std::ptr::copy_nonoverlapping(self.at(page), out.as_mut_ptr(), PAGE_BYTES) }
    }

    /// Writes a whole page. Not seen by [`Memory::scan_dirty`].
    pub fn write_page(&self, page: u64, content: &[u8; PAGE_BYTES]) {
        // SAFETY: `at` has checked the page.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.at(page), PAGE_BYTES) }
    }

    /// Writes the blocks of a page whose bit is set in `mask` (lowest bit, first block); `blocks` holds these one after
    /// the other. Not seen by [`Memory::scan_dirty`].
    ///
    /// # Panics
    /// When `blocks` has not exactly as many blocks as `mask` has bits.
    pub fn write_blocks(&self, page: u64, mask: u16, blocks: &[u8]) {
        assert_eq!(
            blocks.len(),
            mask.count_ones() as usize * BLOCK_BYTES,
            "blocks for mask {mask:#x}"
        );
        let base = self.at(page);
        let targets = (0..BLOCKS_PER_PAGE).filter(|i| mask >> i & 1 == 1);
        for (i, block) in targets.zip(blocks.chunks_exact(BLOCK_BYTES)) {
            // SAFETY: inside the checked page.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), base.add(i * BLOCK_BYTES), BLOCK_BYTES) }
        }
    }

    /// Gives all pages back to the system: they read as zeros. For a backup that starts a first copy anew.
    pub fn clear_all(&self) -> io::Result<()> {
        self.ram.clear(0..self.pages())
    }

    /// 128-bit hashes of pages, in their order, on up to `threads` threads.
    pub fn hash_pages(&self, pages: &[u64], threads: usize) -> Vec<u128> {
        hash::on_threads(pages, threads, |&page| {
            let mut copy = [0; PAGE_BYTES];
            self.copy_page(page, &mut copy);
            hash::page(&copy)
        })
    }

    /// 64-bit hashes of each page's sixteen blocks. Two blocks of equal hash are *taken* to be equal only until the
    /// patched page's 128-bit hash has been compared.
    pub fn hash_blocks(&self, pages: &[u64], threads: usize) -> Vec<[u64; BLOCKS_PER_PAGE]> {
        hash::on_threads(pages, threads, |&page| {
            let mut copy = [0; PAGE_BYTES];
            self.copy_page(page, &mut copy);
            hash::blocks(&copy)
        })
    }

    /// A hash of all of RAM: a check for tests and debugging.
    pub fn hash_all(&self, threads: usize) -> Vec<u128> {
        let all: Vec<u64> = (0..self.pages()).collect();
        self.hash_pages(&all, threads)
    }

    fn at(&self, page: u64) -> *mut u8 {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        // SAFETY: inside the mapping.
        unsafe { self.base.add(page as usize * PAGE_BYTES) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it is ever given out.
        let _ = unsafe { munmap(self.base.cast(), self.bytes) };
    }
}

/// The ranges of a process's address space where the file with this inode is mapped, with the offsets in the file.
fn mappings(maps: &str, inode: u64) -> Vec<(Range<u64>, u64)> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let offset = words.nth(1)?;
        let found: u64 = words.nth(1)?.parse().ok()?;
        (found == inode && words.next()?.starts_with("/memfd:"))
            .then_some((hex(start)?..hex(end)?, hex(offset)?))
    };
    maps.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests;
