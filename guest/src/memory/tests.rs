use std::fs::File;
use std::os::fd::FromRawFd;

use super::*;

/// A memory whose "QEMU" is this very process.
fn own_memory(pages: usize) -> Option<(Memory, *mut u8)> {
    let ram = RamFile::new("test", (pages * PAGE_BYTES) as u64).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    let guest = unsafe {
        mmap(
            std::ptr::null_mut(),
            pages * PAGE_BYTES,
            protection,
            MapFlags::SHARED,
            ram.file(),
            0,
        )
        .unwrap()
    };
    let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd") else {
        crate::skipped::skip("/dev/userfaultfd cannot be opened, which needs root");
        return None;
    };
    // SAFETY: USERFAULTFD_IOC_NEW answers a descriptor.
    let uffd = unsafe {
        use std::os::fd::AsRawFd;
        OwnedFd::from_raw_fd(libc::ioctl(
            device.as_raw_fd(),
            0xAA00,
            libc::O_CLOEXEC | libc::O_NONBLOCK,
        ))
    };
    let memory = Memory::attach(std::process::id(), ram, uffd, vec![]).unwrap();
    Some((memory, guest.cast()))
}

#[test]
fn written_pages_are_found_exactly_and_once() {
    let Some((memory, guest)) = own_memory(3000) else {
        return;
    };
    assert_eq!(memory.scan_dirty().unwrap().count(), 0);
    let pages = [0u64, 1, 7, 63, 64, 1024, 2047, 2999];
    for page in pages {
        // SAFETY: inside the mapping.
        unsafe { guest.add(page as usize * PAGE_BYTES + 5).write_volatile(1) };
    }
    assert_eq!(memory.scan_dirty().unwrap().iter().collect::<Vec<_>>(), pages);
    assert!(memory.scan_dirty().unwrap().is_empty(), "a scan cleans");
    // More ranges than one call of the kernel answers.
    for page in (0..3000).step_by(2) {
        // SAFETY: inside the mapping.
        unsafe { guest.add(page * PAGE_BYTES).write_volatile(2) };
    }
    assert_eq!(
        memory.scan_dirty().unwrap().iter().collect::<Vec<_>>(),
        (0..3000).step_by(2).collect::<Vec<_>>()
    );
    // All of these exist; others do where the system backs shared memory by huge pages.
    let populated = memory.populated().unwrap();
    let mut written = (0..3000).step_by(2).chain(pages);
    assert!(written.all(|page| populated.contains(page)));
}

#[test]
fn several_threads_find_what_one_finds() {
    let pages = 4 * 512 + 100;
    let Some((memory, guest)) = own_memory(pages) else {
        return;
    };
    let write = |wanted: &[usize]| {
        for page in wanted {
            // SAFETY: inside the mapping.
            unsafe { guest.add(page * PAGE_BYTES).write_volatile(3) };
        }
    };
    let found = |threads: usize, least_pages: usize| {
        let mut offsets = Vec::new();
        let least_bytes = (least_pages * PAGE_BYTES) as u64;
        let scanned = memory.tracker.scan_on(threads, least_bytes, |range| {
            offsets.extend(
                range
                    .step_by(PAGE_BYTES)
                    .map(|offset| offset as usize / PAGE_BYTES),
            );
        });
        scanned.unwrap();
        offsets
    };
    // At the borders of the pieces, too, and all of a piece.
    let mut wanted = vec![0, 1, 511, 512, 513, 1023, 1024, 2047, 2048, pages - 1];
    wanted.extend(1100..1500);
    wanted.sort_unstable();
    for (threads, least_pages) in [(1, 1), (2, 1), (3, 512), (8, 1), (8, 1024), (100, 1)] {
        write(&wanted);
        assert_eq!(
            found(threads, least_pages),
            wanted,
            "{threads} threads, {least_pages} pages"
        );
        assert!(found(threads, least_pages).is_empty(), "a scan cleans");
    }
}

#[test]
fn our_own_writes_reach_the_guest_and_are_not_tracked() {
    let Some((memory, guest)) = own_memory(8) else {
        return;
    };
    memory.write_page(3, &[9; PAGE_BYTES]);
    let blocks = [[1; BLOCK_BYTES], [2; BLOCK_BYTES]].concat();
    memory.write_blocks(3, 1 << 15 | 1 << 1, &blocks);
    let mut seen = [0; PAGE_BYTES];
    // SAFETY: inside the mapping.
    unsafe { std::ptr::copy_nonoverlapping(guest.add(3 * PAGE_BYTES), seen.as_mut_ptr(), PAGE_BYTES) };
    assert_eq!((seen[0], seen[256], seen[512], seen[4095]), (9, 1, 9, 2));
    assert!(memory.scan_dirty().unwrap().is_empty());
    memory.clear_all().unwrap();
    memory.copy_page(3, &mut seen);
    assert_eq!(seen, [0; PAGE_BYTES]);
}

#[test]
fn hashes_are_the_same_on_any_number_of_threads() {
    let Some((memory, _)) = own_memory(2000) else {
        return;
    };
    for page in 0..2000 {
        memory.write_page(page, &[page as u8; PAGE_BYTES]);
    }
    let pages: Vec<u64> = (0..2000).rev().collect();
    let one = memory.hash_pages(&pages, 1);
    assert_eq!(one, memory.hash_pages(&pages, 7));
    assert_eq!(one[0], hash::page(&[(1999 % 256) as u8; PAGE_BYTES]));
    let blocks = memory.hash_blocks(&pages, 3);
    assert_eq!(blocks[0][0], blocks[0][15]);
    assert_ne!(blocks[0], blocks[1]);
}

#[test]
fn only_the_mappings_of_the_file_count() {
    let maps = "\
7f0000000000-7f0000002000 rw-s 00000000 00:01 4242 /memfd:dunlin-ram-a (deleted)
7f0000002000-7f0000003000 rw-s 00002000 00:01 4242 /memfd:dunlin-ram-a (deleted)
7f0000010000-7f0000011000 rw-s 00000000 00:01 4243 /memfd:dunlin-ram-b (deleted)
7f0000020000-7f0000021000 r--p 00000000 fd:00 4242 /usr/lib/x.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]";
    let found = mappings(maps, 4242);
    assert_eq!(
        found,
        [
            (0x7f0000000000..0x7f0000002000, 0),
            (0x7f0000002000..0x7f0000003000, 0x2000)
        ]
    );
}
