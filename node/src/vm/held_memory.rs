//! Memory of VMs that this host holds and does not run: that of a copy that has ended here, or a checkpoint that another host makes.
//!
//! Flow: a copy ends, or a checkpoint comes in ([`checkpoint::receiver`](super::checkpoint::receiver)) -> it is held for a while -> the VM's next copy
//! here begins with it (`machine`), says so, and is sent only what differs (core's `replica::sync::primary::held`).
//!
//! Invariants:
//! 1. What is held is nobody's VM: it is never run, whatever it holds; a join makes it one, page by page.
//! 2. Whoever writes into a checkpoint does so under this lock and by its number: what was taken is written to by nobody else.
//! 3. Everything held has its time, after which it goes, and makes room for a VM that is to run here.

use dunlin_guest::memory::{PAGE_BYTES, RamFile};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

/// How long the memory of a copy that has ended here is held: its primary comes back to this host within seconds, or not so soon.
pub const AFTER_A_COPY: Duration = Duration::from_secs(300);

/// So many VMs' memory at the most.
const MOST_VMS: usize = 256;

/// What is held, by the VMs' names.
#[derive(Debug, Default)]
pub struct HeldMemory {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    vms: BTreeMap<String, Memory>,
    numbers: u64,
}

#[derive(Debug)]
struct Memory {
    number: u64,
    ram: RamFile,
    until: Instant,
}

impl Memory {
    fn bytes(&self) -> u64 {
        let populated = self.ram.populated();
        populated.map_or(0, |pages| pages.count() * PAGE_BYTES as u64)
    }
}

/// A checkpoint, as whoever writes into it knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Number(u64);

/// There is no more room for names.
#[derive(Debug, thiserror::Error)]
#[error("this host holds memory of {MOST_VMS} VMs already")]
pub struct TooManyVms;

impl HeldMemory {
    /// Holds this for so long, in place of what was held of that VM.
    ///
    /// # Errors
    /// If too many VMs' memory is held.
    pub fn keep(&self, vm: &str, ram: RamFile, duration: Duration) -> Result<Number, TooManyVms> {
        let mut held = self.held.lock();
        if held.vms.len() >= MOST_VMS && !held.vms.contains_key(vm) {
            return Err(TooManyVms);
        }
        held.numbers += 1;
        let number = held.numbers;
        let until = Instant::now() + duration;
        held.vms.insert(vm.to_owned(), Memory { number, ram, until });
        Ok(Number(number))
    }

    /// What is held of that VM, which is not held any more.
    #[must_use]
    pub fn take(&self, vm: &str) -> Option<RamFile> {
        self.held.lock().vms.remove(vm).map(|memory| memory.ram)
    }

    /// The same file once more, while it is held on.
    #[must_use]
    pub fn look(&self, vm: &str) -> Option<RamFile> {
        let held = self.held.lock();
        held.vms.get(vm).and_then(|memory| memory.ram.try_clone().ok())
    }

    /// How much of this host's memory a VM that starts here could have of what is held: its own is its own, and the rest is given up for it
    /// (`make_room`).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.lock().vms.values().map(Memory::bytes).sum()
    }

    /// How much more of this host's memory what is held may still take: a checkpoint that is fed fills up.
    #[must_use]
    pub fn unfilled_bytes(&self) -> u64 {
        let unfilled = |memory: &Memory| memory.ram.bytes().saturating_sub(memory.bytes());
        self.held.lock().vms.values().map(unfilled).sum()
    }

    /// A VM that runs goes before memory that is only held: of others' it gives up what is needed, the soonest to go first.
    pub fn make_room(&self, vm: &str, needed_bytes: u64, available_bytes: impl Fn() -> u64) {
        let mut held = self.held.lock();
        let own_bytes = held.vms.get(vm).map_or(0, Memory::bytes);
        while available_bytes() + own_bytes < needed_bytes {
            let others = held.vms.iter().filter(|(name, _)| *name != vm);
            let soonest = others.min_by_key(|(_, memory)| memory.until);
            let Some(soonest) = soonest.map(|(name, _)| name.clone()) else {
                return;
            };
            held.vms.remove(&soonest);
        }
    }

    /// Nothing is held of that VM.
    pub fn forget(&self, vm: &str) {
        drop(self.take(vm));
    }

    /// Writes into a checkpoint, and holds it for so long from now on; none if it is held no more (invariant 2).
    pub fn write(
        &self,
        vm: &str,
        number: Number,
        duration: Duration,
        write: impl FnOnce(&RamFile) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        let mut held = self.held.lock();
        let memory = held.vms.get_mut(vm).filter(|memory| memory.number == number.0)?;
        memory.until = Instant::now() + duration;
        Some(write(&memory.ram))
    }

    /// A checkpoint is not held any more, unless it is another one by now.
    pub fn end(&self, vm: &str, number: Number) {
        let mut held = self.held.lock();
        if held.vms.get(vm).is_some_and(|memory| memory.number == number.0) {
            drop(held.vms.remove(vm));
        }
    }

    /// What has had its time goes (invariant 3).
    pub fn expire(&self, now: Instant) {
        self.held.lock().vms.retain(|_, memory| memory.until > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn ram() -> RamFile {
        RamFile::new("t", 4 * PAGE_BYTES as u64).expect("memory")
    }

    #[test]
    fn what_was_taken_is_written_to_by_nobody_else() {
        let held = HeldMemory::default();
        let number = held.keep("v", ram(), LONG).expect("room");
        let write = |ram: &RamFile| ram.write_page(1, &[7; PAGE_BYTES]);
        assert!(matches!(held.write("v", number, LONG, write), Some(Ok(()))));
        let taken = held.take("v").expect("held");
        assert!(taken.populated().expect("a map").contains(1));
        assert!(held.write("v", number, LONG, write).is_none(), "it is taken");
        // Another one of the same VM is another one.
        held.keep("v", ram(), LONG).expect("room");
        assert!(held.write("v", number, LONG, write).is_none(), "its time is over");
    }

    #[test]
    fn everything_has_its_time() {
        let held = HeldMemory::default();
        let number = held.keep("v", ram(), Duration::ZERO).expect("room");
        held.keep("w", ram(), LONG).expect("room");
        assert!(
            held.write("v", number, LONG, |_| Ok(())).is_some(),
            "it begins anew"
        );
        let now = Instant::now();
        held.expire(now);
        assert!(held.look("v").is_some() && held.look("w").is_some());
        held.expire(now + 2 * LONG);
        assert!(held.look("v").is_none() && held.look("w").is_none());
    }

    #[test]
    fn a_vm_that_is_to_run_here_gets_the_room() {
        let held = HeldMemory::default();
        for (vm, duration) in [("late", 2 * LONG), ("soon", LONG), ("own", LONG / 2)] {
            let full = ram();
            (0..4).for_each(|page| full.write_page(page, &[7; PAGE_BYTES]).expect("room"));
            held.keep(vm, full, duration).expect("room");
        }
        assert_eq!(held.unfilled_bytes(), 0, "they are full");
        let each = held.bytes() / 3;
        assert!(each >= 4 * PAGE_BYTES as u64);
        // A host with nothing left but what is held here.
        let available = std::cell::Cell::new(0);
        let looks = || available.replace(available.get() + each);
        held.make_room("own", each, looks);
        assert_eq!(held.bytes(), 3 * each, "its own is enough");
        available.set(0);
        held.make_room("own", 2 * each, looks);
        assert!(held.look("soon").is_none() && held.look("late").is_some() && held.look("own").is_some());
        held.make_room("another", u64::MAX / 2, || 0);
        assert_eq!(held.bytes(), 0, "it gives all that there is");
    }

    #[test]
    fn there_are_so_many_vms_and_no_more() {
        let held = HeldMemory::default();
        for vm in 0..MOST_VMS {
            held.keep(&vm.to_string(), ram(), LONG).expect("room");
        }
        assert!(held.keep("v", ram(), LONG).is_err());
        assert!(held.keep("7", ram(), LONG).is_ok(), "in place of the one before");
    }
}
