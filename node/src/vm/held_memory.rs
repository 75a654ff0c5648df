//! Memory of VMs that this host holds and does not run: that of a copy that has ended here, or a checkpoint that another host makes.
//!
//! Flow: a copy ends, or a checkpoint comes in ([`checkpoint::receiver`](super::checkpoint::receiver)) -> it is held for a while -> the VM's next copy
//! here begins with it (`machine`), says so, and is sent only what differs (core's `replica::sync::primary::held`).
//!
//! Invariants:
//! 1. What is held is nobody's VM: it is never run, whatever it holds; a join makes it one, page by page.
//! 2. Whoever writes into a checkpoint does so by its number, and no write is under way when it is taken: what was taken is written to by nobody
//!    else, and is not held again by who had looked at it before.
//! 3. Everything held has its time, after which it goes, and makes room for a VM that is to run here.
//! 4. VMs' loops wait for nothing here: what takes as long as memory is large (to see what is there, to give it back) is not done under the lock.
//!
//! Not here: memory that was promised to the VMs that do run ([`promised`]).

pub mod promised;

use dunlin_guest::memory::{PAGE_BYTES, RamFile};
use parking_lot::Mutex;
use promised::PromisedMemory;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the memory of a copy that has ended here is held: its primary comes back to this host within seconds, or not so soon.
pub const AFTER_A_COPY: Duration = Duration::from_secs(300);

/// So much of what a host could still give is left alone.
pub const LEFT_ALONE_BYTES: u64 = 256 << 20;

/// So many VMs' memory at the most.
const MOST_VMS: usize = 256;

/// What is held, by the VMs' names.
#[derive(Debug, Default)]
pub struct HeldMemory {
    held: Mutex<Held>,
    /// What this host has promised to VMs that it runs.
    pub promised: PromisedMemory,
}

#[derive(Debug, Default)]
struct Held {
    vms: BTreeMap<String, Memory>,
    numbers: u64,
    /// Held no more, and not given back yet (invariant 4); not for longer than a second.
    gone: Vec<Arc<Ram>>,
}

#[derive(Debug)]
struct Memory {
    number: u64,
    ram: Arc<Ram>,
    until: Instant,
}

/// The memory itself: who looks at it or writes into it does so without the lock of all.
#[derive(Debug)]
struct Ram {
    file: RamFile,
    /// Held while somebody writes. False: it was taken (invariant 2).
    may_be_written: Mutex<bool>,
}

impl Ram {
    fn of(file: RamFile) -> Arc<Self> {
        Arc::new(Self {
            file,
            may_be_written: Mutex::new(true),
        })
    }

    fn bytes(&self) -> u64 {
        let populated = self.file.populated();
        populated.map_or(0, |pages| pages.count() * PAGE_BYTES as u64)
    }
}

/// A checkpoint, as whoever writes into it knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Number(u64);

/// Memory that was held, until it is a machine's.
#[derive(Debug)]
pub struct Taken {
    ram: RamFile,
    until: Instant,
}

/// Nothing more is held.
#[derive(Debug, thiserror::Error)]
pub enum NotHeld {
    /// There is no more room for names.
    #[error("this host holds memory of {MOST_VMS} VMs already")]
    TooManyVms,
    /// There is none for it.
    #[error("memory for a checkpoint: {0}")]
    Memory(#[from] io::Error),
}

impl Taken {
    /// What is here of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let populated = self.ram.populated();
        populated.map_or(0, |pages| pages.count() * PAGE_BYTES as u64)
    }

    /// For a machine.
    #[must_use]
    pub fn into_ram(self) -> RamFile {
        self.ram
    }
}

impl Held {
    fn put(&mut self, vm: &str, ram: Arc<Ram>, until: Instant) -> Result<Number, NotHeld> {
        if self.vms.len() >= MOST_VMS && !self.vms.contains_key(vm) {
            return Err(NotHeld::TooManyVms);
        }
        self.numbers += 1;
        let number = self.numbers;
        let before = self.vms.insert(vm.to_owned(), Memory { number, ram, until });
        self.gone.extend(before.map(|memory| memory.ram));
        Ok(Number(number))
    }

    fn drop_of(&mut self, vm: &str) {
        let gone = self.vms.remove(vm);
        self.gone.extend(gone.map(|memory| memory.ram));
    }
}

impl HeldMemory {
    /// Holds this for so long, in place of what was held of that VM.
    ///
    /// # Errors
    /// If too many VMs' memory is held.
    pub fn keep(&self, vm: &str, ram: RamFile, duration: Duration) -> Result<Number, NotHeld> {
        let until = Instant::now() + duration;
        self.held.lock().put(vm, Ram::of(ram), until)
    }

    /// A checkpoint begins: it goes on with what is held of that VM, if that is of this size, and whoever fed it before does so no more. The file, to
    /// look at.
    ///
    /// # Errors
    /// If there is no room for it.
    pub fn begin(&self, vm: &str, bytes: u64, duration: Duration) -> Result<(RamFile, Number), NotHeld> {
        let mut held = self.held.lock();
        let known = held.vms.get(vm).map(|memory| memory.ram.clone());
        let ram = match known.filter(|ram| ram.file.bytes() == bytes) {
            Some(ram) => ram,
            None => Ram::of(RamFile::new(vm, bytes)?),
        };
        let file = ram.file.try_clone()?;
        let number = held.put(vm, ram, Instant::now() + duration)?;
        Ok((file, number))
    }

    /// What is held of that VM, which is not held any more. Waits for a write into it, which is short.
    #[must_use]
    pub fn take(&self, vm: &str) -> Option<Taken> {
        let Memory { ram, until, .. } = self.held.lock().vms.remove(vm)?;
        *ram.may_be_written.lock() = false;
        let ram = ram.file.try_clone().ok()?;
        Some(Taken { ram, until })
    }

    /// No machine came of it: it is held on, unless there is something else of that VM by now.
    pub fn give_back(&self, vm: &str, taken: Taken) {
        let mut held = self.held.lock();
        let Taken { ram, until } = taken;
        let ram = Ram::of(ram);
        match held.vms.contains_key(vm) {
            true => held.gone.push(ram),
            // No room for names: it goes.
            false => drop(held.put(vm, ram, until)),
        }
    }

    fn all(&self) -> Vec<Arc<Ram>> {
        let held = self.held.lock();
        held.vms.values().map(|memory| memory.ram.clone()).collect()
    }

    /// How much of this host's memory a VM that starts here could have of what is held: its own is its own, and the rest is given up for it
    /// (`make_room`).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.all().iter().map(|ram| ram.bytes()).sum()
    }

    /// How much more of this host's memory what is held may still take: a checkpoint that is fed fills up.
    #[must_use]
    pub fn unfilled_bytes(&self) -> u64 {
        let unfilled = |ram: &Arc<Ram>| ram.file.bytes().saturating_sub(ram.bytes());
        self.all().iter().map(unfilled).sum()
    }

    /// A VM that runs goes before memory that is only held: of others' it gives up what is needed, the soonest to go first.
    pub fn make_room(&self, vm: &str, needed_bytes: u64, available_bytes: impl Fn() -> u64) {
        self.give_gone_back();
        let own = self.held.lock().vms.get(vm).map(|memory| memory.ram.clone());
        let own_bytes = own.map_or(0, |ram| ram.bytes());
        while available_bytes().saturating_add(own_bytes) < needed_bytes {
            let soonest = {
                let mut held = self.held.lock();
                let others = held.vms.iter().filter(|(name, _)| *name != vm);
                let soonest = others.min_by_key(|(_, memory)| memory.until);
                let soonest = soonest.map(|(name, _)| name.clone());
                soonest.and_then(|name| held.vms.remove(&name))
            };
            if soonest.is_none() {
                return;
            }
        }
    }

    /// Nothing is held of that VM.
    pub fn forget(&self, vm: &str) {
        self.held.lock().drop_of(vm);
    }

    /// Writes into a checkpoint, and holds it for so long from now on; none if it is held no more (invariant 2).
    pub fn write(
        &self,
        vm: &str,
        number: Number,
        duration: Duration,
        write: impl FnOnce(&RamFile) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        let ram = {
            let mut held = self.held.lock();
            let memory = held.vms.get_mut(vm).filter(|memory| memory.number == number.0)?;
            memory.until = Instant::now() + duration;
            memory.ram.clone()
        };
        let may_be_written = ram.may_be_written.lock();
        may_be_written.then(|| write(&ram.file))
    }

    /// A checkpoint is not held any more, unless it is another one by now.
    pub fn end(&self, vm: &str, number: Number) {
        let ended = {
            let mut held = self.held.lock();
            let is_it = held.vms.get(vm).is_some_and(|memory| memory.number == number.0);
            is_it.then(|| held.vms.remove(vm))
        };
        drop(ended);
    }

    /// What has had its time goes (invariant 3).
    pub fn expire(&self, now: Instant) {
        {
            let mut held = self.held.lock();
            let over = held.vms.iter().filter(|(_, memory)| memory.until <= now);
            let over: Vec<String> = over.map(|(vm, _)| vm.clone()).collect();
            over.iter().for_each(|vm| held.drop_of(vm));
        }
        self.give_gone_back();
    }

    /// What the VMs that run here fill up is not available any more, whatever a host had when it began to hold something: it gives that up in time.
    pub fn give_way(&self, available_bytes: impl Fn() -> u64) {
        self.make_room("", LEFT_ALONE_BYTES, available_bytes);
    }

    /// Invariant 4.
    fn give_gone_back(&self) {
        let gone = std::mem::take(&mut self.held.lock().gone);
        drop(gone);
    }

    /// It goes after so long.
    #[cfg(test)]
    pub fn expire_in(&self, vm: &str, time: Duration) {
        let mut held = self.held.lock();
        held.vms.get_mut(vm).expect("it is held").until = Instant::now() + time;
    }

    /// Whether something is held of that VM.
    #[cfg(test)]
    pub fn holds(&self, vm: &str) -> bool {
        self.held.lock().vms.contains_key(vm)
    }
}

#[cfg(test)]
mod tests;
