//! A host's copy of the VM as its loop sees it: a guest, the socket of its card, and the `Output` of what it says.

use super::trigger::Syncs;
use crate::tcp::guest::Guest;
use crate::tcp::random::Random;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::overheard::Overheard;
use dunlin_core::units::Epoch;
use std::collections::VecDeque;
use std::fmt;

/// A guest's clock is so far ahead of the world's at first, so that it can fall behind.
const CLOCK_AHEAD_US: u64 = 1 << 40;
/// How far a guest may be behind the timestamps that it hears echoed: its clock stands in syncs, and a copy that did not run goes on from the last.
const BEHIND_TICKS: i32 = 5_000;
/// What a backup's host may keep of the network.
const OVERHEARD_BYTES: usize = 64 << 10;
/// No frame of a guest takes more than this to hold.
const MOST_FRAME_BYTES: usize = 1 << 10;

/// A copy of the VM.
pub struct Machine {
    pub guest: Guest,
    /// Said, and not read by the loop yet.
    pub socket: VecDeque<Frame>,
    pub output: Output,
    /// What the network has brought while another host spoke for the VM.
    pub overheard: Overheard,
    pub syncs: Syncs,
    random: Random,
    clock_ahead_us: u64,
    /// The guest's clock, where it stands.
    stood_us: Option<u64>,
}

/// The VM as it was at a sync's line.
#[derive(Clone)]
pub struct Line {
    /// The numbers of its connections.
    pub table: Bytes,
    pub guest: Guest,
    clock_us: u64,
}

impl Machine {
    pub fn new(voice: Voice, epoch: Epoch, budget_bytes: usize, seed: u64) -> Self {
        Self {
            guest: Guest::default(),
            socket: VecDeque::new(),
            output: Output::new(voice, epoch).with_budget(budget_bytes),
            overheard: Overheard::new(OVERHEARD_BYTES),
            syncs: Syncs::default(),
            random: Random::new(seed),
            clock_ahead_us: CLOCK_AHEAD_US,
            stood_us: None,
        }
    }

    /// The guest does something, and may lose inputs inside.
    pub fn works(&mut self, now_us: u64, drop_percent: u8) -> Result<(), String> {
        if let Some(stood_us) = self.stood_us.take() {
            self.clock_ahead_us = stood_us - now_us;
        }
        let clock_us = now_us + self.clock_ahead_us;
        for _ in 0..self.random.within(0, 6) {
            let due = self.guest.timer().is_some_and(|at_us| at_us <= clock_us);
            if !due && !self.guest.has_work() {
                break;
            }
            let loses = self.random.percent(drop_percent);
            self.socket
                .extend(self.guest.work(clock_us, loses, &mut self.random));
        }
        // Any other one, a deposed primary too, hears what clients say to the one that speaks. What a deposed one made of it counts if it ever
        // speaks again.
        match self.output.voice() {
            Voice::Shut => Ok(()),
            Voice::Backup => self.guest.no_trouble(i32::MAX),
            Voice::Alone | Voice::Protected => self.guest.no_trouble(BEHIND_TICKS),
        }
    }

    /// The VM stands, its socket is read: what a backup needs to be its copy. `compares`: the backup's words count from here on.
    pub fn line(&mut self, now_us: u64, compares: bool) -> Line {
        if compares {
            self.output.compare_from(self.output.epoch());
        }
        self.guest.forget_history();
        Line {
            table: self.output.draw_line(),
            guest: self.guest.clone(),
            clock_us: self.stood_us.unwrap_or(now_us + self.clock_ahead_us),
        }
    }

    /// The guest is the one at that line, and goes on from there when it runs.
    pub fn becomes(&mut self, line: Line) {
        self.guest = line.guest;
        self.stood_us = Some(line.clock_us);
    }

    /// Whether what is held and kept stays within its budgets, where `before` was held. Before a sync the socket is read to its end, and where
    /// this host alone speaks nothing waits for long.
    pub fn is_within_budgets(&self, before: usize, stops: bool) -> Result<(), String> {
        let (held, budget, _) = self.output.held();
        let most = match self.output.voice() {
            Voice::Protected if !stops => before.max(budget + MOST_FRAME_BYTES),
            Voice::Shut => before.max(budget),
            _ => usize::MAX,
        };
        let of = [
            ("held", held, most),
            ("overheard", self.overheard.held().0, OVERHEARD_BYTES),
            (
                "for retransmission",
                self.output.retransmit().0,
                self.output.retransmit().1,
            ),
            ("compared", self.output.compared().0, self.output.compared().1),
        ];
        match of.into_iter().find(|(_, bytes, most)| bytes > most) {
            Some((what, bytes, most)) => Err(format!("{bytes} of {most} bytes are {what}")),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("voice", &self.output.voice())
            .field("epoch", &self.output.epoch())
            .field("held_frames", &self.output.held_frames())
            .field("counters", &self.output.counters())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({} bytes of numbers)", self.table.len())
    }
}
