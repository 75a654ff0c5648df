//! What it decides: which frames for the VM that reached this host's network while another host spoke for it are given to
//! the VM after a take-over: those of the last moment that were not agreed.
//!
//! Flow: the network brings each frame to both hosts (it floods, or copies them) -> [`Overheard::heard`]; the log's frames ->
//! [`Overheard::agreed`]; take-over -> [`Overheard::take`] -> the log. A client then need not send again what its host said to the
//! dead one, which it would do 200 ms later at the soonest (Linux's TCP_RTO_MIN).
//!
//! Invariants:
//! 1. One frame of the network is given to the VM once, whether it was heard before or after it was agreed on, as long as the
//!    one follows the other within [`SPAN_US`].
//! 2. What is kept is never more than the budget, nor older than [`SPAN_US`]: the oldest go first.
//! 3. Where inputs are not agreed nobody knows which of them the VM of the last sync has had. Then TCP alone is given to it:
//!    its ends know what they have got.
//!
//! Not here: reading the network (`node`'s NICs), whether this host may speak (`output::gate`, `consensus`).

use crate::agreed::Frame;
use crate::output::packet::{Direction, Parsed, parse};
use std::collections::{HashMap, VecDeque};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What is older than this a client has sent again by itself, or is about to.
pub const SPAN_US: u64 = 1_000_000;
/// What a frame costs beside its bytes.
const FRAME_COST: usize = 128;

/// Frames that were heard while another host spoke for the VM.
#[derive(Debug)]
pub struct Overheard {
    budget_bytes: usize,
    heard: VecDeque<Heard>,
    bytes: usize,
    /// When which frames were agreed before they were heard here, oldest first.
    agreed: VecDeque<(u64, u64)>,
    /// The network last brought something.
    heard_us: Option<u64>,
    /// Frames that went for want of room.
    pushed_out: u64,
    balance: HashMap<u64, Balance>,
}

#[derive(Debug)]
struct Heard {
    at_us: u64,
    digest: u64,
    frame: Frame,
}

/// Of frames that are equal byte by byte.
#[derive(Clone, Copy, Debug, Default)]
struct Balance {
    /// Heard and kept.
    heard: u32,
    /// Of them, those that were agreed: the oldest.
    settled: u32,
    /// Agreed, and not heard yet.
    ahead: u32,
    /// Agreed first, and heard since.
    followed: u32,
}

impl Overheard {
    /// Nothing was heard yet; it will keep so many bytes.
    #[must_use]
    pub fn new(budget_bytes: usize) -> Self {
        Self {
            budget_bytes,
            heard: VecDeque::new(),
            bytes: 0,
            agreed: VecDeque::new(),
            heard_us: None,
            pushed_out: 0,
            balance: HashMap::new(),
        }
    }

    /// The network has brought a frame.
    pub fn heard(&mut self, frame: Frame, now_us: u64) {
        self.forget_old(now_us);
        self.heard_us = Some(now_us);
        let digest = digest(&frame);
        let balance = self.balance.entry(digest).or_default();
        if balance.ahead > 0 {
            balance.ahead -= 1;
            balance.followed += 1;
            return;
        }
        balance.heard += 1;
        self.bytes += cost(&frame);
        self.heard.push_back(Heard {
            at_us: now_us,
            digest,
            frame,
        });
        while self.bytes > self.budget_bytes {
            self.pushed_out += 1;
            self.forget_oldest();
        }
    }

    /// The group has agreed on a frame: the VM gets it that way.
    pub fn agreed(&mut self, frame: &Frame, now_us: u64) {
        self.forget_old(now_us);
        // Where the network brings nothing, nothing is to be told apart.
        if self.heard_us.is_none_or(|heard_us| heard_us + SPAN_US <= now_us) {
            return;
        }
        let digest = digest(frame);
        let balance = self.balance.entry(digest).or_default();
        if balance.settled < balance.heard {
            balance.settled += 1;
            return;
        }
        balance.ahead += 1;
        self.agreed.push_back((now_us, digest));
        // As many as could be matched: no frame is shorter than its cost.
        while self.agreed.len() * FRAME_COST > self.budget_bytes {
            self.forget_oldest_agreed();
        }
    }

    /// This host speaks for the VM from now on: what nobody has agreed on, in the order in which it was heard. `agreed`: whether
    /// inputs have been agreed on at all (invariant 3).
    #[must_use]
    pub fn take(&mut self, agreed: bool, now_us: u64) -> Vec<Frame> {
        self.forget_old(now_us);
        let mut left = Vec::new();
        while let Some(Heard { digest, frame, .. }) = self.heard.pop_front() {
            if !self.was_settled(digest) && (agreed || is_tcp(&frame)) {
                left.push(frame);
            }
        }
        *self = Self {
            pushed_out: self.pushed_out,
            ..Self::new(self.budget_bytes)
        };
        left
    }

    /// Bytes that are kept, that may be, and how many frames had to go before they were old.
    #[must_use]
    pub fn held(&self) -> (usize, usize, u64) {
        (self.bytes, self.budget_bytes, self.pushed_out)
    }

    fn forget_old(&mut self, now_us: u64) {
        let is_old = |at_us: u64| at_us + SPAN_US <= now_us;
        while self.heard.front().is_some_and(|heard| is_old(heard.at_us)) {
            self.forget_oldest();
        }
        while self.agreed.front().is_some_and(|(at_us, _)| is_old(*at_us)) {
            self.forget_oldest_agreed();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.heard.pop_front() {
            self.bytes -= cost(&oldest.frame);
            self.was_settled(oldest.digest);
        }
    }

    fn forget_oldest_agreed(&mut self) {
        let Some((_, digest)) = self.agreed.pop_front() else {
            return;
        };
        if let Some(balance) = self.balance.get_mut(&digest) {
            match balance.followed {
                0 => balance.ahead = balance.ahead.saturating_sub(1),
                _ => balance.followed -= 1,
            }
        }
        self.tidy(digest);
    }

    /// Takes the oldest of these frames out of the balance. Whether it was agreed.
    fn was_settled(&mut self, digest: u64) -> bool {
        let Some(balance) = self.balance.get_mut(&digest) else {
            return false;
        };
        let settled = balance.settled > 0;
        balance.heard = balance.heard.saturating_sub(1);
        balance.settled = balance.settled.saturating_sub(1);
        self.tidy(digest);
        settled
    }

    fn tidy(&mut self, digest: u64) {
        let is_over = |balance: &Balance| balance.heard + balance.ahead + balance.followed == 0;
        if self.balance.get(&digest).is_some_and(is_over) {
            self.balance.remove(&digest);
        }
    }
}

fn is_tcp(frame: &Frame) -> bool {
    matches!(parse(frame, Direction::ToVm), Parsed::Tcp(_))
}

fn cost(frame: &Frame) -> usize {
    FRAME_COST + frame.bytes.len()
}

fn digest(frame: &Frame) -> u64 {
    xxh3_64_with_seed(&frame.bytes, u64::from(frame.nic))
}

#[cfg(test)]
mod tests;
