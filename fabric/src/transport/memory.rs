//! What it decides: how memory that another process (or NIC, or thread) may write at any moment is touched at all.
//!
//! **Flow**: backends map it; `ring` and `word` load from it; `tcp`'s receiver and `shm`'s writer store into it.
//! **Invariants**: 1. only atomic word loads and stores; copies are made to private memory before anything looks at
//! them. 2. the mapping lives as long as the value.
//! **Source**: docs/fabric.md "atomic loads and copy-out only". **Not here**: meaning.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Mapped memory in 8-byte words, little-endian.
pub struct Memory {
    words: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: all access goes through atomics; the pointer is owned and unmapped once, in `drop`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(fd: i32, bytes: usize, flags: i32) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is touched.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(at.cast()).expect("a mapping is not at address 0");
        Ok(Self {
            words,
            len: bytes / 8,
        })
    }

    /// Zeroed memory of this process alone.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        Self::map(-1, bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    /// Zeroed memory and the descriptor by which another process can map it. It can neither grow nor shrink.
    pub fn shared(bytes: usize) -> io::Result<(Self, OwnedFd)> {
        // SAFETY: the name is a C string; the result is checked.
        let fd =
            unsafe { libc::memfd_create(c"dunlin".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain calls on an owned descriptor.
        let ok = unsafe {
            libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) == 0
                && libc::fcntl(
                    fd.as_raw_fd(),
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
                ) == 0
        };
        if !ok {
            return Err(io::Error::last_os_error());
        }
        Ok((Self::map(fd.as_raw_fd(), bytes, libc::MAP_SHARED)?, fd))
    }

    /// Maps what a peer shared. Its size is checked and must be sealed: a peer that shrank it would kill us (SIGBUS).
    pub fn of_peer(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        // SAFETY: stat is plain data; the descriptor is open.
        let (seals, size) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &raw mut stat) != 0 {
                return Err(io::Error::last_os_error());
            }
            (libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS), stat.st_size)
        };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || size != bytes as i64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the shared memory is not of the size granted, or not sealed",
            ));
        }
        Self::map(fd.as_raw_fd(), bytes, libc::MAP_SHARED)
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * 8
    }

    /// Where it is mapped, for a network card.
    #[cfg(feature = "verbs")]
    pub(crate) fn address(&self) -> *mut u8 {
        self.words.as_ptr().cast()
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has `len` words, is aligned to a page, and lives as long as `self`; atomics may be shared
        // with other writers.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.len) }
    }

    /// The word at byte `offset` (a multiple of 8), acquired: what its writer stored before it is visible.
    #[inline]
    #[must_use]
    pub fn load(&self, offset: usize) -> u64 {
        u64::from_le(self.words()[offset / 8].load(Ordering::Acquire))
    }

    /// Stores one word, released.
    #[inline]
    pub fn store(&self, offset: usize, value: u64) {
        self.words()[offset / 8].store(value.to_le(), Ordering::Release);
    }

    /// Exchanges one word, sequentially consistent.
    #[inline]
    pub fn swap(&self, offset: usize, value: u64) -> u64 {
        u64::from_le(self.words()[offset / 8].swap(value.to_le(), Ordering::SeqCst))
    }

    /// Copies `out.len()` bytes (a multiple of 8) from `offset` (too) to private memory. It may be torn.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        assert_eq!((offset % 8, out.len() % 8), (0, 0));
        let from = &self.words()[offset / 8..offset / 8 + out.len() / 8];
        for (word, bytes) in from.iter().zip(out.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        std::sync::atomic::fence(Ordering::Acquire);
    }

    /// Stores `bytes` (a multiple of 8 of them) at `offset` (too), the first word last and released, so that a reader
    /// who polls the first word rarely meets the rest half-way.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        assert_eq!((offset % 8, bytes.len() % 8), (0, 0));
        let Some((first, rest)) = bytes.split_first_chunk::<8>() else {
            return;
        };
        let to = &self.words()[offset / 8..offset / 8 + bytes.len() / 8];
        for (word, bytes) in to[1..].iter().zip(rest.chunks_exact(8)) {
            word.store(
                u64::from_ne_bytes(bytes.try_into().expect("8 bytes")),
                Ordering::Relaxed,
            );
        }
        to[0].store(u64::from_ne_bytes(*first), Ordering::Release);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and not used after this.
        unsafe { libc::munmap(self.words.as_ptr().cast(), self.len * 8) };
    }
}
