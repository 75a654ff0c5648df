//! What it decides: how urgently a lock's holder runs: as urgently as the most urgent that waits for it.
//!
//! The keeper has real-time priority and the owner has not. An owner that is kept from its core while it holds the lock would keep the
//! keeper, too, and a host with much to do would fall silent (priority inversion). `std`'s lock knows no inheritance.
//!
//! **Source**: Sha, Rajkumar and Lehoczky 1990 (priority inheritance); `PTHREAD_PRIO_INHERIT` of POSIX, futex(2)'s `FUTEX_LOCK_PI`.
//! **Not here**: poisoning; a panic under this lock ends the daemon.

use std::cell::UnsafeCell;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

/// As pthread.h has it.
const PTHREAD_PRIO_INHERIT: libc::c_int = 1;

/// A value, and a lock with priority inheritance.
pub(super) struct InheritingLock<T> {
    /// It may not move.
    mutex: Box<UnsafeCell<libc::pthread_mutex_t>>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached under the lock only, by one thread at a time.
unsafe impl<T: Send> Send for InheritingLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for InheritingLock<T> {}

impl<T> InheritingLock<T> {
    pub(super) fn new(value: T) -> io::Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        let mutex = Box::new(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));
        // SAFETY: the attributes are initialised before they are used and destroyed once; the mutex lies where it stays, and nobody
        // uses it yet.
        unsafe {
            done(libc::pthread_mutexattr_init(attributes.as_mut_ptr()))?;
            let made = done(libc::pthread_mutexattr_setprotocol(
                attributes.as_mut_ptr(),
                PTHREAD_PRIO_INHERIT,
            ))
            .and_then(|()| done(libc::pthread_mutex_init(mutex.get(), attributes.as_ptr())));
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
            made?;
        }
        let value = UnsafeCell::new(value);
        Ok(Self { mutex, value })
    }

    pub(super) fn lock(&self) -> Held<'_, T> {
        // SAFETY: an initialised mutex.
        let rc = unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
        assert_eq!(rc, 0, "nobody locks it twice");
        Held {
            of: self,
            on_this_thread: PhantomData,
        }
    }
}

impl<T> Drop for InheritingLock<T> {
    fn drop(&mut self) {
        // SAFETY: nobody holds it: whoever did had borrowed it.
        unsafe { libc::pthread_mutex_destroy(self.mutex.get()) };
    }
}

/// The value, as long as the lock is held.
pub(super) struct Held<'a, T> {
    of: &'a InheritingLock<T>,
    /// Who has locked it unlocks it.
    on_this_thread: PhantomData<*const ()>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.of.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and borrows the value once.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this thread has locked it.
        unsafe { libc::pthread_mutex_unlock(self.of.mutex.get()) };
    }
}

fn done(rc: libc::c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::real_time;
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// How urgent this thread is just now, inherited urgency included: below 0 is real-time (proc(5), field 18).
    fn urgency() -> i64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, rest) = stat.rsplit_once(')').unwrap();
        // The third field comes first here.
        rest.split_ascii_whitespace()
            .nth(18 - 3)
            .unwrap()
            .parse()
            .unwrap()
    }

    #[test]
    fn who_holds_it_is_as_urgent_as_who_waits_for_it() {
        let lock = Arc::new(InheritingLock::new(0).unwrap());
        let mut held = lock.lock();
        assert!(urgency() >= 0, "an ordinary thread");
        let waits = Arc::clone(&lock);
        let keeper = std::thread::spawn(move || {
            real_time().expect("real-time scheduling: run the tests as root");
            *waits.lock() += 1;
        });
        let begun = Instant::now();
        while urgency() >= 0 {
            assert!(!keeper.is_finished(), "it has not waited");
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is inherited");
            std::thread::yield_now();
        }
        *held += 1;
        drop(held);
        keeper.join().unwrap();
        assert_eq!(*lock.lock(), 2);
        assert!(urgency() >= 0, "it is given back");
    }
}
