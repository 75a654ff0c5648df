//! Whether this host's kernel tells which pages of a running program were written: tried, by this process' own pages.
//!
//! Decides:    nothing.
//! Flow:       pages of this process -> they are protected, as a program's are (`inside::tracked`) -> one is written to -> the kernel tells which.
//! Source:     userfaultfd(2), proc(5). Not here: what follows where it does not (`ahead`: all pages are compared).

use super::memory::{PAGE_BYTES, Process, Runs};
use crate::inside::tracked::{OLDEST_KERNEL, Tracked};
use std::io;

const PAGES: usize = 2;

/// Why it does not. What a copy costs then is no error's business.
#[derive(Debug, thiserror::Error)]
pub enum Untracked {
    /// It would take a page that was moved for an unwritten one.
    #[error(
        "Linux {release} does not tell which pages a running program has written ({}.{} and newer do)",
        OLDEST_KERNEL.0,
        OLDEST_KERNEL.1
    )]
    Old {
        /// Its own name.
        release: String,
    },
    /// It was built without, or somebody has forbidden it.
    #[error(
        "this kernel does not tell which pages a running program has written (userfaultfd, pagemap: {0})"
    )]
    Refused(#[from] io::Error),
    /// It cannot be believed.
    #[error("this kernel tells wrongly which pages were written")]
    Wrong,
}

/// Tries it.
///
/// # Errors
/// Where all of a program's pages are compared.
pub fn tells_what_is_written() -> Result<(), Untracked> {
    let tracked = Tracked::of_this().map_err(|error| match error.kind() {
        io::ErrorKind::Unsupported => Untracked::Old { release: release() },
        _ => Untracked::Refused(error),
    })?;
    let mut pages = Pages::new()?;
    // A page that is not there yet cannot be protected.
    pages.write(0);
    pages.write(1);
    let (from, to) = (pages.at(0), pages.at(PAGES));
    tracked.covers(from, to)?;
    tracked.protect(from, to)?;
    let own = Process::of(std::process::id())?;
    let own = own.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied))?;
    let all = Runs(vec![(from, PAGES as u64)]);
    let before = own.protected(&all)?.0;
    pages.write(0);
    let after = own.protected(&all)?.0;
    match before == all.0 && after == [(pages.at(1), 1)] {
        true => Ok(()),
        false => Err(Untracked::Wrong),
    }
}

fn release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Of no file, and nobody else's.
struct Pages(*mut u8);

impl Pages {
    const BYTES: usize = PAGES * PAGE_BYTES as usize;

    fn new() -> io::Result<Self> {
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: the kernel says where, and nobody else knows of it.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), Self::BYTES, access, kind, -1, 0) };
        match at {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            at => Ok(Self(at.cast())),
        }
    }

    fn at(&self, page: usize) -> u64 {
        self.0 as u64 + page as u64 * PAGE_BYTES
    }

    fn write(&mut self, page: usize) {
        assert!(page < PAGES);
        // SAFETY: it is in these pages. Volatile: nobody reads it, and it has to be written.
        unsafe { self.0.add(page * PAGE_BYTES as usize).write_volatile(1) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it.
        unsafe { libc::munmap(self.0.cast(), Self::BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Said by the kernel that the tests run on, whichever it is.
    #[test]
    fn this_kernel_tells_it_or_one_line_says_why_not() {
        match tells_what_is_written() {
            Ok(()) => assert!(crate::inside::tracked::kernel() >= OLDEST_KERNEL),
            Err(Untracked::Wrong) => panic!("{}", Untracked::Wrong),
            Err(why) => assert!(!why.to_string().contains('\n'), "{why}"),
        }
    }

    #[test]
    fn an_old_kernel_is_told_with_the_oldest_that_does() {
        let release = "6.1.0-56-amd64".to_owned();
        assert_eq!(
            Untracked::Old { release }.to_string(),
            "Linux 6.1.0-56-amd64 does not tell which pages a running program has written (6.13 and newer do)"
        );
    }
}
