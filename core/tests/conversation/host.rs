//! A host: a guest, its output, and the agreed inputs worked off at its own pace.

use super::tcp::guest::Guest;
use super::tcp::random::Random;
use dunlin_core::agreed::Frame;
use dunlin_core::output::Output;
use dunlin_core::units::Epoch;

/// What the group has agreed on.
#[derive(Debug)]
pub enum Entry {
    Input(Frame),
    /// This epoch ends here. A later entry of the same epoch is of a sync whose backup was lost meanwhile, or whose place an
    /// earlier such entry has taken, and is nothing.
    Sync(Epoch),
}

pub struct Host {
    pub output: Output,
    pub guest: Guest,
    pub random: Random,
    /// How far it has read what was agreed.
    pub read_to: usize,
    pub ready_at: u64,
    /// It stands at the line of a sync, and with it its guest's clock.
    pub stands: bool,
    stood_at: u64,
    /// The guest's clock is that much ahead of the world's.
    clock_ahead: u64,
    pub is_backup: bool,
}

/// What a piece of work came to.
pub enum Worked {
    Said(Vec<Frame>),
    Stands,
}

impl Host {
    pub fn new(output: Output, guest: Guest, random: Random, read_to: usize, is_backup: bool) -> Self {
        Self {
            output,
            guest,
            random,
            read_to,
            ready_at: 0,
            stands: false,
            stood_at: 0,
            clock_ahead: 1 << 40,
            is_backup,
        }
    }

    /// The guest's own clock.
    pub fn clock(&self, now: u64) -> u64 {
        if self.stands {
            self.stood_at
        } else {
            now + self.clock_ahead
        }
    }

    pub fn stand(&mut self, now: u64) {
        self.stood_at = self.clock(now);
        self.stands = true;
    }

    /// A standing host's guest becomes another one.
    pub fn becomes(&mut self, guest: Guest, clock: u64) {
        assert!(self.stands);
        self.guest = guest;
        self.stood_at = clock;
    }

    pub fn run(&mut self, now: u64) {
        if self.stands {
            self.clock_ahead = self.stood_at - now;
            self.stands = false;
            self.ready_at = now;
        }
    }

    pub fn has_work(&self, agreed: usize) -> bool {
        self.guest.has_work() || self.read_to < agreed
    }

    /// When it has something to do next.
    pub fn next_at(&self, agreed: usize) -> Option<u64> {
        if self.stands {
            return None;
        }
        if self.has_work(agreed) {
            return Some(self.ready_at);
        }
        let timer = self.guest.timer()?;
        Some(timer.saturating_sub(self.clock_ahead).max(self.ready_at))
    }

    /// An input that goes to the guest without agreement.
    pub fn hears(&mut self, frame: &Frame) {
        let own = self.output.heard(frame);
        self.guest.queue(own);
    }

    /// Works a little. `faults`: it may lose inputs inside, and pause; `blind` is one of the faults put in on purpose.
    pub fn work(&mut self, agreed: &[Entry], now: u64, faults: Option<u8>, blind: bool) -> Worked {
        let most = self.random.within(0, 3) as usize + usize::from(!self.guest.has_work());
        for _ in 0..most {
            match agreed.get(self.read_to) {
                None => break,
                Some(Entry::Sync(epoch)) => {
                    self.read_to += 1;
                    if *epoch == self.output.epoch() {
                        self.stand(now);
                        return Worked::Stands;
                    }
                }
                Some(Entry::Input(frame)) => {
                    self.read_to += 1;
                    let own = self.output.heard(frame);
                    let own = if blind && self.is_backup {
                        frame.clone()
                    } else {
                        own
                    };
                    self.guest.queue(own);
                }
            }
        }
        let loses = faults.is_some_and(|percent| self.random.percent(percent));
        let pace = match self.random.within(0, 400) {
            0 if faults.is_some() && self.is_backup => self.random.within(1000, 150_000),
            0..4 if faults.is_some() => self.random.within(1000, 20_000),
            _ => self.random.within(10, 300),
        };
        self.ready_at = now + pace;
        let clock = self.clock(now);
        Worked::Said(self.guest.work(clock, loses, &mut self.random))
    }
}
