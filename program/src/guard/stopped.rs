//! What a program has itself told to stand still: it does so after a copy was taken, and in the copy.
//!
//! Decides:    nothing.
//! Flow:       before the program stands still: which of its processes do already -> all are let run afterwards (`resume`) -> these are stopped again.
//! Invariants: 1. who was let run for a moment is told by no signal of its own: a parent that waits for such news (WCONTINUED) gets it.
//! Source:     signal(7), proc(5). Not here: the other host's copy (`inside::init`).

use super::ahead::own;
use super::memory::Process;
use super::{GuardError, Place, failed};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The numbers inside of those that stand still, which nobody here has told to.
///
/// # Errors
/// Where the host's processes cannot be listed.
pub fn stopped(place: &Place) -> Result<Vec<u32>, GuardError> {
    let its = own(&place.numbers()?).map_err(failed("who stands still"))?;
    let its = its.into_iter().filter(Process::is_stopped);
    Ok(its.map(|process| process.inside).collect())
}

/// These, after all were let run. One that has gone meanwhile is passed over.
///
/// # Errors
/// Where the host's processes cannot be listed.
pub fn stop_again(place: &Place, stopped: &[u32]) -> Result<(), GuardError> {
    if stopped.is_empty() {
        return Ok(());
    }
    for number in place.numbers()? {
        let handle = Pid::from_raw(number as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let Some(Ok(handle)) = handle else { continue };
        // Of that number still, when it cannot become another's.
        if let Ok(Some(process)) = Process::of(number)
            && stopped.contains(&process.inside)
        {
            let _ = pidfd_send_signal(&handle, Signal::STOP);
        }
    }
    Ok(())
}
