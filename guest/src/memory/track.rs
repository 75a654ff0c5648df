//! Which pages of another process's mapping were written: userfaultfd write protection and PAGEMAP_SCAN.
//!
//! Decides:    how a large guest's memory is looked at by several threads.
//! Flow:       preload object's userfaultfd -> [`Tracker::new`] registers -> [`Tracker::scan`] over and over.
//! Invariants: 1. one call reads and re-protects a range atomically: no write is lost between; 2. without an error
//!             every byte of the range was looked at.
//! Source:     linux/userfaultfd.h, linux/fs.h, Documentation/admin-guide/mm/pagemap.rst (Linux >= 6.7).
//! Not here:   our own writes through our own mapping: this tracker does not see them.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;

const UFFD_API: u64 = 0xAA;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
/// What dirty tracking of a shared file needs.
pub const FEATURES: u64 =
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

const UFFDIO_API: libc::Ioctl = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::Ioctl = 0xC020_AA00;
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xC018_AA06;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;

fn ioctl<T>(fd: &impl AsRawFd, request: libc::Ioctl, argument: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: each caller pairs the request with the structure that the kernel expects for it.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

/// Switches the features on; fails where the kernel lacks one.
pub fn enable_api(uffd: BorrowedFd<'_>) -> io::Result<()> {
    let mut api = UffdioApi {
        api: UFFD_API,
        features: FEATURES,
        ioctls: 0,
    };
    ioctl(&uffd.as_raw_fd(), UFFDIO_API, &mut api).map(drop)
}

/// Registers a range of the process that made `uffd`, and protects it: from here on its writes are tracked.
pub fn register(uffd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    let (start, len) = (range.start, range.end - range.start);
    let mut register = UffdioRegister {
        start,
        len,
        mode: UFFDIO_REGISTER_MODE_WP,
        ioctls: 0,
    };
    ioctl(&uffd.as_raw_fd(), UFFDIO_REGISTER, &mut register)?;
    let mut protect = UffdioWriteprotect {
        start,
        len,
        mode: UFFDIO_WRITEPROTECT_MODE_WP,
    };
    ioctl(&uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &mut protect).map(drop)
}

/// Calls `written` for each written range of addresses in `range` and protects it again.
pub fn scan(pagemap: &File, range: Range<u64>, mut written: impl FnMut(Range<u64>)) -> io::Result<()> {
    let mut regions = [PageRegion::default(); 512];
    let mut argument = PmScanArg {
        size: size_of::<PmScanArg>() as u64,
        flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        start: range.start,
        end: range.end,
        walk_end: 0,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_WRITTEN,
    };
    while argument.start < range.end {
        let count = match ioctl(pagemap, PAGEMAP_SCAN, &mut argument) {
            Ok(count) => count as usize,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        regions[..count].iter().for_each(|r| written(r.start..r.end));
        assert!(argument.walk_end > argument.start, "PAGEMAP_SCAN makes progress");
        argument.start = argument.walk_end;
    }
    Ok(())
}

/// Addresses that are worth a thread of their own: the VM stands while they are looked at, for 0.7 ms a GiB.
const BYTES_PER_THREAD: u64 = 2 << 30;
/// More threads wait for each other in the kernel, and a host has other VMs.
const MOST_THREADS: usize = 8;
/// Two threads never look at one page table.
const TABLE_BYTES: u64 = 2 << 20;

/// Tracks the mapping of a file in one process.
pub struct Tracker {
    pagemap: File,
    /// Held: protection ends with it.
    _uffd: OwnedFd,
    /// Where the file lies: (addresses, offset in the file).
    ranges: Vec<(Range<u64>, u64)>,
}

impl Tracker {
    /// Tracks `ranges` of process `pid`, whose userfaultfd is `uffd`.
    pub fn new(pid: u32, uffd: OwnedFd, ranges: Vec<(Range<u64>, u64)>) -> io::Result<Tracker> {
        enable_api(uffd.as_fd())?;
        for (range, _) in &ranges {
            register(uffd.as_fd(), range.clone())?;
        }
        Ok(Tracker {
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            _uffd: uffd,
            ranges,
        })
    }

    /// Calls `written` with each range of *file offsets* written since the last scan.
    pub fn scan(&self, written: impl FnMut(Range<u64>)) -> io::Result<()> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        self.scan_on(cores.min(MOST_THREADS), BYTES_PER_THREAD, written)
    }

    /// As [`Self::scan`], on up to so many threads, each of which has at least so many bytes to look at.
    pub(super) fn scan_on(
        &self,
        threads: usize,
        least_bytes: u64,
        mut written: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let pieces = self.pieces(threads, least_bytes);
        let look = |(addresses, offset): &(Range<u64>, u64), each: &mut dyn FnMut(Range<u64>)| {
            let to_offset = |address: u64| address - addresses.start + offset;
            scan(&self.pagemap, addresses.clone(), |found| {
                each(to_offset(found.start)..to_offset(found.end));
            })
        };
        let look_apart = |piece| {
            let mut found = Vec::new();
            look(piece, &mut |range| found.push(range)).map(|()| found)
        };
        let Some((own, others)) = pieces.split_first() else {
            return Ok(());
        };
        thread::scope(|scope| {
            let start = |piece| {
                let named = thread::Builder::new().name("scan".into());
                (piece, named.spawn_scoped(scope, move || look_apart(piece)))
            };
            let others: Vec<_> = others.iter().map(start).collect();
            look(own, &mut written)?;
            for (piece, thread) in others {
                let found = match thread {
                    Ok(thread) => thread.join().expect("a scan does not panic")?,
                    // The system has no thread left.
                    Err(_) => look_apart(piece)?,
                };
                found.into_iter().for_each(&mut written);
            }
            Ok(())
        })
    }

    /// All ranges, cut into pieces for that many threads.
    fn pieces(&self, threads: usize, least_bytes: u64) -> Vec<(Range<u64>, u64)> {
        let all: u64 = self.ranges.iter().map(|(range, _)| range.end - range.start).sum();
        let most = all.div_ceil(threads.max(1) as u64).max(least_bytes);
        let most = most.next_multiple_of(TABLE_BYTES);
        let cut = |(range, offset): &(Range<u64>, u64)| {
            let (start, end, offset) = (range.start, range.end, *offset);
            let starts = (start..end).step_by(most as usize);
            starts.map(move |at| (at..end.min(at + most), offset + (at - start)))
        };
        self.ranges.iter().flat_map(cut).collect()
    }
}
