//! Decides: nothing. In tests: the power fails at the n-th point, and what was written and not flushed may be lost.
//!
//! Outside tests all of it is empty. A child process arms it (`power_tests`); the failure is a SIGKILL of itself, after about half
//! of the image's writes since the last flush were taken back, as a disk's cache would lose them.

#[cfg(not(test))]
mod off {
    /// The power may fail here.
    #[inline]
    pub fn point() {}
    /// These bytes are about to be overwritten.
    #[inline]
    pub fn before_write(_: &std::fs::File, _: u64, _: u64) {}
    /// Everything written to this file so far is safe.
    #[inline]
    pub fn flushed(_: &std::fs::File) {}
}
#[cfg(not(test))]
pub(super) use off::{before_write, flushed, point};

#[cfg(test)]
pub(super) use on::{arm, before_write, flushed, point};

#[cfg(test)]
mod on {
    use nix::sys::signal::{Signal, raise};
    use std::{
        fs::File,
        os::unix::fs::{FileExt, MetadataExt},
        sync::{
            Mutex, PoisonError,
            atomic::{AtomicBool, AtomicU64, Ordering},
        },
    };

    static ARMED: AtomicBool = AtomicBool::new(false);
    static LEFT: AtomicU64 = AtomicU64::new(0);
    static LOSS: AtomicU64 = AtomicU64::new(0);
    /// What was there before each write that no flush has covered yet.
    static UNSAFE_YET: Mutex<Vec<(File, u64, Vec<u8>)>> = Mutex::new(Vec::new());

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
        let lost = UNSAFE_YET.lock().unwrap_or_else(PoisonError::into_inner);
        let mut word = LOSS.load(Ordering::SeqCst);
        for (file, offset, old) in lost.iter().rev() {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if word >> 63 == 0 {
                file.write_all_at(old, *offset).unwrap();
            }
        }
        raise(Signal::SIGKILL).unwrap();
    }

    pub fn before_write(file: &File, offset: u64, len: u64) {
        if !ARMED.load(Ordering::SeqCst) {
            return;
        }
        let mut old = vec![0; len as usize];
        file.read_exact_at(&mut old, offset).unwrap();
        let mut all = UNSAFE_YET.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((file.try_clone().unwrap(), offset, old));
        drop(all);
        point();
    }

    pub fn flushed(file: &File) {
        if ARMED.load(Ordering::SeqCst) {
            let inode = |file: &File| file.metadata().unwrap().ino();
            let ours = inode(file);
            let mut all = UNSAFE_YET.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|(file, ..)| inode(file) != ours);
        }
    }
}
