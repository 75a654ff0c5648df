//! Decides: nothing. In tests: the power fails at the n-th point, and what was written and not flushed may be lost.
//!
//! Outside tests all of it is empty. A child process arms it (`power_tests`); the failure is a SIGKILL of itself, after about half
//! of the image's writes since the last flush were taken back, as a disk's cache would lose them. Or a test watches one host's
//! image, ends that host, and takes back what it likes: then the other host lives on.

#[cfg(not(test))]
mod off {
    /// The power may fail here.
    #[inline]
    pub fn point() {}
    /// These bytes are about to be overwritten.
    #[inline]
    pub fn before_write(_: &std::fs::File, _: u64, _: u64) {}
    /// A flush of this file begins.
    #[inline]
    pub fn flushing(_: &std::fs::File) -> usize {
        0
    }
    /// Everything written to this file before that is safe.
    #[inline]
    pub fn flushed(_: &std::fs::File, _: usize) {}
}
#[cfg(not(test))]
pub(super) use off::{before_write, flushed, flushing, point};

#[cfg(test)]
pub(super) use on::{arm, before_write, fail, flushed, flushing, point, watch};

#[cfg(test)]
mod on {
    use parking_lot::Mutex;
    use std::{
        fs::File,
        os::unix::fs::{FileExt, MetadataExt},
        path::Path,
        sync::atomic::{AtomicBool, AtomicU64, Ordering},
    };

    static ARMED: AtomicBool = AtomicBool::new(false);
    static LEFT: AtomicU64 = AtomicU64::new(0);
    static LOSS: AtomicU64 = AtomicU64::new(0);
    /// What was there before each write that no flush has covered yet.
    static UNSAFE_YET: Mutex<Vec<(File, u64, Vec<u8>)>> = Mutex::new(Vec::new());
    /// Files whose writes are remembered though nothing is armed.
    static WATCHED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

    fn inode(file: &File) -> u64 {
        file.metadata().unwrap().ino()
    }

    fn is_remembered(file: &File) -> bool {
        ARMED.load(Ordering::SeqCst) || {
            let watched = WATCHED.lock();
            !watched.is_empty() && watched.contains(&inode(file))
        }
    }

    /// From here on the writes to this image are remembered until a flush covers them.
    pub fn watch(image: &Path) {
        let file = File::open(image).unwrap();
        let mut watched = WATCHED.lock();
        watched.push(inode(&file));
    }

    /// The power of a watched image's host has failed: takes back the writes that `loses` names, of those that no flush has
    /// covered. Nobody uses the image any more. Returns how many there were.
    pub fn fail(image: &Path, mut loses: impl FnMut() -> bool) -> usize {
        let of = inode(&File::open(image).unwrap());
        WATCHED.lock().retain(|watched| *watched != of);
        let mut all = UNSAFE_YET.lock();
        let (ours, others): (Vec<_>, Vec<_>) = all.drain(..).partition(|(file, ..)| inode(file) == of);
        *all = others;
        for (file, offset, old) in ours.iter().rev().filter(|_| loses()) {
            file.write_all_at(old, *offset).unwrap();
        }
        ours.len()
    }

    /// The power fails at the `n`-th point from here; `loss` picks what a cache loses.
    pub fn arm(n: u64, loss: u64) {
        LEFT.store(n, Ordering::SeqCst);
        LOSS.store(loss, Ordering::SeqCst);
        ARMED.store(true, Ordering::SeqCst);
    }

    pub fn point() {
        if !ARMED.load(Ordering::SeqCst) || LEFT.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        // Nobody writes any more: whoever comes to a write waits here for ever.
        let lost = UNSAFE_YET.lock();
        let mut word = LOSS.load(Ordering::SeqCst);
        for (file, offset, old) in lost.iter().rev() {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if word >> 63 == 0 {
                file.write_all_at(old, *offset).unwrap();
            }
        }
        let itself = rustix::process::getpid();
        rustix::process::kill_process(itself, rustix::process::Signal::KILL).unwrap();
    }

    pub fn before_write(file: &File, offset: u64, len: u64) {
        if !is_remembered(file) {
            return;
        }
        let mut old = vec![0; len as usize];
        file.read_exact_at(&mut old, offset).unwrap();
        let mut all = UNSAFE_YET.lock();
        all.push((file.try_clone().unwrap(), offset, old));
        drop(all);
        point();
    }

    /// How many writes to the file the flush that begins now covers.
    pub fn flushing(file: &File) -> usize {
        if !is_remembered(file) {
            return 0;
        }
        let ours = inode(file);
        let all = UNSAFE_YET.lock();
        all.iter().filter(|(file, ..)| inode(file) == ours).count()
    }

    pub fn flushed(file: &File, mut covered: usize) {
        if covered == 0 {
            return;
        }
        let ours = inode(file);
        let mut all = UNSAFE_YET.lock();
        all.retain(|(file, ..)| {
            let safe = covered > 0 && inode(file) == ours;
            covered -= usize::from(safe);
            !safe
        });
    }
}
