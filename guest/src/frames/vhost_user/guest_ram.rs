//! The guest's memory as QEMU shows it to a card: by guest address, with account of what is written here.
//!
//! Decides:    nothing.
//! Flow:       QEMU's memory table -> [`GuestRam::new`]; rings write through it -> [`GuestRam::take_written`] -> the dirty scan.
//! Invariants: 1. no write is lost between two tables: what the last one had written goes over to the next; 2. a table that shows the
//!             same memory keeps the mapping, since QEMU sends it at each start of the rings; 3. nothing is mapped but the guest's RAM file,
//!             and of that nothing past its end, which would kill the daemon: QEMU is not believed.
//! Source:     QEMU docs/interop/vhost-user.rst, "Memory region description".
//! Not here:   which pages travel.

use std::fs::File;
use std::io;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::memory::{Bitmap, PAGE_BYTES, RamIdentity};

/// The guest's memory, by its addresses.
pub type Ram = GuestMemoryMmap<AtomicBitmap>;

/// A piece of the guest's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    guest: u64,
    /// Where QEMU has it: rings are told by these addresses.
    user: u64,
    bytes: u64,
    /// In the RAM file.
    offset: u64,
}

/// What one table shows.
pub struct GuestRam {
    table: Vec<Region>,
    ram: Arc<Ram>,
    /// Pages of the file that earlier tables' mappings had written, each once: nothing scans a VM that has no backup, however often its guest resets the card.
    before: Vec<u64>,
}

impl GuestRam {
    /// Maps what QEMU shows of the guest's RAM, that file, or keeps what `last` has of it.
    pub fn new(
        ram: RamIdentity,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        last: Option<GuestRam>,
    ) -> io::Result<GuestRam> {
        let mut table: Vec<Region> = Vec::with_capacity(regions.len());
        // Invariant 3.
        for file in &files {
            if RamIdentity::of(file)? != ram {
                return Err(io::Error::other("memory that is not the guest's RAM file"));
            }
        }
        for region in regions {
            table.push(Region {
                guest: region.guest_phys_addr,
                user: region.user_addr,
                bytes: region.memory_size,
                offset: region.mmap_offset,
            });
        }
        if !table.iter().all(|region| ram.has(region.offset, region.bytes)) {
            return Err(io::Error::other("memory past the end of the guest's RAM file"));
        }
        let before = match last {
            Some(last) if last.table == table => return Ok(last),
            Some(last) => last.written(),
            None => vec![],
        };
        let mut maps = Vec::with_capacity(table.len());
        for (region, file) in table.iter().zip(files) {
            let map = MmapRegion::from_file(FileOffset::new(file, region.offset), region.bytes as usize)
                .map_err(io::Error::other)?;
            let map = GuestRegionMmap::new(map, GuestAddress(region.guest))
                .ok_or_else(|| io::Error::other("a region past the end of all addresses"))?;
            maps.push(map);
        }
        Ok(GuestRam {
            table,
            ram: Arc::new(Ram::from_regions(maps).map_err(io::Error::other)?),
            before,
        })
    }

    /// The memory.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// The guest's address of what QEMU has there.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.table.iter().find_map(|region| {
            let at = user.checked_sub(region.user).filter(|at| *at < region.bytes)?;
            Some(GuestAddress(region.guest.checked_add(at)?))
        })
    }

    /// The pages of the RAM file that were written, each once a call.
    fn written(&self) -> Vec<u64> {
        let mut pages = self.before.clone();
        for region in &self.table {
            let map = self.ram.find_region(GuestAddress(region.guest));
            let words = map.map(|map| map.bitmap().get_and_reset()).unwrap_or_default();
            let first = region.offset / PAGE_BYTES as u64;
            for (number, mut word) in words.into_iter().enumerate() {
                while word != 0 {
                    pages.push(first + 64 * number as u64 + u64::from(word.trailing_zeros()));
                    word &= word - 1;
                }
            }
        }
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Adds what was written to `dirty`.
    pub fn take_written(&mut self, dirty: &mut Bitmap) {
        let pages = self.written();
        self.before.clear();
        for page in pages {
            // A file that is longer than the guest's RAM is not ours to tell of.
            if page < dirty.pages() {
                dirty.set(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RamFile;
    use vm_memory::Bytes;

    const PAGES: u64 = 64;
    const BYTES: u64 = PAGES * PAGE_BYTES as u64;

    fn file(ram: &RamFile) -> File {
        ram.file().try_clone().expect("a descriptor")
    }

    #[test]
    fn what_tables_have_written_is_kept_once_however_many_they_are() {
        let ram = RamFile::new("t", BYTES).expect("memory");
        let identity = RamIdentity::of(ram.file()).expect("a file");
        let page = PAGE_BYTES as u64;
        let mut last = None;
        for number in 0..1000 {
            // One shows all, the next one all but a page.
            let bytes = BYTES - page * (number % 2);
            let region = VhostUserMemoryRegion::new(0, bytes, 1 << 40, 0);
            let shown = GuestRam::new(identity, &[region], vec![file(&ram)], last).expect("its RAM");
            let at = GuestAddress(page * (3 + number % 2));
            shown.ram().write_slice(&[1], at).expect("in memory");
            assert!(shown.before.len() <= 2, "{} pages", shown.before.len());
            last = Some(shown);
        }
        let mut dirty = Bitmap::new(PAGES);
        last.expect("the last").take_written(&mut dirty);
        assert!(dirty.contains(3) && dirty.contains(4) && dirty.count() == 2);
    }

    #[test]
    fn nothing_is_mapped_but_the_guests_ram_and_of_that_nothing_past_its_end() {
        let (ram, other) = (RamFile::new("t", BYTES), RamFile::new("t", BYTES));
        let (ram, other) = (ram.expect("memory"), other.expect("memory"));
        let identity = RamIdentity::of(ram.file()).expect("a file");
        let shown = |at, bytes, file: File| {
            let region = VhostUserMemoryRegion::new(0, bytes, 1 << 40, at);
            GuestRam::new(identity, &[region], vec![file], None).is_ok()
        };
        let page = PAGE_BYTES as u64;
        assert!(shown(0, BYTES, file(&ram)) && shown(page, BYTES - page, file(&ram)));
        assert!(!shown(0, BYTES, file(&other)), "another file of that size");
        for (at, bytes) in [
            (0, BYTES + page),
            (page, BYTES),
            (BYTES, page),
            (u64::MAX - page + 1, page),
        ] {
            assert!(!shown(at, bytes, file(&ram)), "{bytes} bytes from {at} on");
        }
    }
}
