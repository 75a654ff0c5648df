//! What it decides: which inputs of several connections may be unread together (`Order::Batch`).
//!
//! A program that waits in `epoll` is told of its connections in the order in which they became ready. They stand in a list, and each that becomes
//! ready goes to its end. So what was delivered in an agreed order is read in that order, however much of it is there when the program looks: where
//! the program finds one it reads one, where it finds five it reads the five as they came.
//!
//! The trap: level-triggered `epoll` puts what it has just told back into the list, and takes it out when the program waits the next time and it
//! is no longer ready. A further input of that connection meanwhile takes the older place, before inputs of others that came first. So a
//! connection has one input in a batch, and the next batch begins when there is nothing in the list.
//!
//! Invariants:
//! 1. A batch begins only when every copy waits in its `epoll`, with nothing in the list: it is *quiet*.
//! 2. It has at most one input of each connection.
//! 3. What is in it, a program reads at once when it is told: the bytes that follow those that it has read, few enough for one read, on a
//!    connection that it has read before (so that `epoll` knows it).
//! 4. All else goes alone: it is delivered when all before it was read, and nothing joins it before it is read itself.
//!
//! Copies need not begin and end their batches alike: each reads in the order of delivery, and that is the same for all (the gate's invariant 1).
//!
//! Source: fs/eventpoll.c (`ep_poll_callback`, `ep_send_events`, `ep_done_scan`), as modelled in `epoll_tests`. Not here: how quiet is found (the
//! driver's); programs with several threads that read, or that wait otherwise: the driver knows none of these to be quiet, as far as it can see.

use super::{End, Gate, Input, Of, Order, Queued, REFUSED_SHARE};
use crate::output::packet::FlowKey;

/// After so many inputs in a row that were found read, a connection's next ones are believed to be read where every copy is quiet: it waits, nothing is
/// ready for it, and it was never seen to leave there what it was told of.
pub(super) const SURE: u8 = 4;
/// Each such input of a connection is asked after.
const ASKED_EACH: u8 = 16;
/// The inputs of a batch that are not known to be read.
const MOST_UNREAD: usize = 128;
/// What a program reads at once: a segment of an ordinary network.
const MOST_BYTES: u32 = 1460;
/// Of what waits this much is looked at for another connection.
const LOOKED_THROUGH: usize = 8;
/// After it has waited for a batch in vain inputs go alone for this part of the patience, and twice as long each time in a row, so often at most: a busy
/// host may have had no processor for a program that is fit for batches.
const ALONE_SHARE: u64 = 8;
const MOST_DOUBLED: u32 = 5;
/// For a batch that is unread it is asked for this part of the patience whether the copies are quiet: a program that writes to a disk may take long for it.
const QUIET_SHARE: u64 = 2;
/// Whoever was found quiet by chance alone (several threads that take turns at waiting, of which one is watched) may have read all of it long before.
const BY_CHANCE_SHARE: u64 = 32;
/// Where nobody can know whether a copy is quiet it is not asked again for so long.
const UNKNOWN_US: u64 = 1_000_000;

/// The batch that is delivered.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// What a connection that is in it is marked with; 0 before the first one.
    pub(super) number: u64,
    is_open: bool,
    /// Every copy was quiet, and nothing was delivered since.
    is_quiet: bool,
    /// Until when an input waits for a batch; after that it goes alone.
    until_us: Option<u64>,
    /// Inputs go alone until then.
    alone_until_us: u64,
    /// How often in a row the program was not quiet in time.
    unquiet: u32,
    /// It was quiet by chance the last time: when a batch began, and not when it was read.
    is_by_chance: bool,
    /// The batch for which that was asked in vain.
    in_vain: u64,
    /// Whose the last input was.
    last: Option<FlowKey>,
}

impl Batch {
    /// An input was. What nobody waits for may be in the list for who knows how long.
    pub(super) fn delivered(&mut self, key: &FlowKey, is_waited_for: bool) {
        self.is_open &= is_waited_for;
        self.is_quiet = false;
        self.until_us = None;
        self.last = Some(*key);
    }

    pub(super) fn is_over(&mut self) {
        self.is_open = false;
    }
}

impl Gate {
    /// Every copy waits in its `epoll` and has been told of all that was delivered: what [`super::Next::AskForQuiet`] asked.
    pub fn are_quiet(&mut self) {
        self.batch.is_quiet = true;
        self.batch.unquiet = 0;
        if !self.waiting.is_empty() {
            self.batch.is_by_chance = false;
        }
        for waiting in self
            .waiting
            .iter_mut()
            .filter(|waiting| waiting.of == Of::Connection)
        {
            let heard = self.heard.get_mut(&waiting.key);
            if let Some(heard) = heard.filter(|heard| heard.was_read >= SURE) {
                // Now and then it is asked all the same.
                heard.believed = (heard.believed + 1) % ASKED_EACH;
                if heard.believed > 0 {
                    waiting.unread.fill(false);
                    waiting.is_believed = true;
                }
            }
        }
    }

    /// Nobody can know whether the copies are quiet: they do not wait in one `epoll` each. For a while their inputs go alone.
    pub fn cannot_be_quiet(&mut self, now_us: u64) {
        self.batch.alone_until_us = now_us + UNKNOWN_US;
    }

    /// The copies did not read a batch alike: from here on inputs are unread one at a time.
    pub fn keep_apart(&mut self) {
        if self.order == Order::Batch {
            self.order = Order::Read;
            self.batch.is_over();
        }
    }

    /// Whether the next input is one of the open batch (invariants 2 to 4).
    pub(super) fn joins(&self) -> bool {
        self.batch.is_open
            && self.resting.is_none()
            && self.waiting.len() < MOST_UNREAD
            && self.waiting.front().is_none_or(|first| !first.is_alone)
            && self.next_input().is_some_and(|input| {
                let heard = self.heard.get(&input.key);
                self.is_fit(input) && heard.is_some_and(|heard| heard.batch != self.batch.number)
            })
    }

    fn next_input(&self) -> Option<&Input> {
        match self.queue.front()? {
            Queued::Input(input) => Some(input),
            Queued::Time(_) => None,
        }
    }

    /// Invariant 3.
    fn is_fit(&self, input: &Input) -> bool {
        let (End::Read { from, to }, Some(heard)) = (input.ends, self.heard.get(&input.key)) else {
            return false;
        };
        let goes_on = from == heard.isn.wrapping_add(1).wrapping_add(heard.said_to as u32);
        let is_small = (1..=MOST_BYTES).contains(&to.wrapping_sub(from));
        let reads = heard.was_read > 0 && !heard.opening && !heard.refused && !heard.ended;
        goes_on && is_small && reads && heard.beyond.is_empty()
    }

    /// Whether the next input has to wait until the copies are quiet, so that a batch begins with it (invariant 1). Nothing is unread.
    pub(super) fn wants_quiet(&mut self, now_us: u64) -> bool {
        let is_over = self.order == Order::Batch && !self.joins();
        let Some(input) = self.next_input().filter(|input| is_over && self.is_fit(input)) else {
            return false;
        };
        if self.batch.is_quiet {
            self.batch.number += 1;
            self.batch.is_open = true;
            return false;
        }
        if now_us < self.batch.alone_until_us || !self.is_worth_it(input) {
            return false;
        }
        // A program that is at work for long gets the next input alone: that is right at any time.
        let until_us = *self
            .batch
            .until_us
            .get_or_insert(now_us + self.patience_us / REFUSED_SHARE);
        if now_us >= until_us {
            self.was_asked_in_vain(now_us);
            return false;
        }
        true
    }

    fn was_asked_in_vain(&mut self, now_us: u64) {
        self.batch.alone_until_us = now_us + ((self.patience_us / ALONE_SHARE) << self.batch.unquiet);
        self.batch.unquiet = (self.batch.unquiet + 1).min(MOST_DOUBLED);
    }

    /// A client who asks alone need not wait for a batch.
    fn is_worth_it(&self, next: &Input) -> bool {
        let is_another = |queued: &Queued| matches!(queued, Queued::Input(input) if input.key != next.key);
        self.batch.last.is_none_or(|last| last != next.key)
            || self.queue.iter().take(LOOKED_THROUGH).any(is_another)
    }

    /// Whether quiet is asked for before the sockets of the batch are: one look for all of them, which the next batch needs as well, and if it is
    /// quiet only those are unread that the program does not want to read. Not for long: then it is asked what it has read.
    pub(super) fn is_quiet_asked_first(&mut self, now_us: u64, until_us: u64) -> bool {
        let wants_batch = |input: &Input| self.is_fit(input) && self.is_worth_it(input);
        let is_followed = self.order == Order::Batch
            && self.waiting.front().is_some_and(|first| !first.is_alone)
            && self.next_input().is_some_and(wants_batch);
        let helps = (self.waiting.len() > 1 || is_followed)
            && !self.batch.is_quiet
            && now_us >= self.batch.alone_until_us;
        let share = match self.batch.is_by_chance {
            true => BY_CHANCE_SHARE,
            false => QUIET_SHARE,
        };
        let is_early = now_us + self.patience_us - self.patience_us / share < until_us;
        if helps && !is_early && self.batch.in_vain != self.batch.number {
            self.batch.in_vain = self.batch.number;
            self.batch.is_by_chance = true;
            self.was_asked_in_vain(now_us);
        }
        helps && is_early
    }
}

#[cfg(test)]
mod tests;
