//! What it decides: how long to look before sleeping.
//!
//! **Flow**: an owner with a thread of its own calls `Group::wait` when `poll` had nothing; an owner with its own epoll does
//! not need this. **Invariants**: 1. a policy is part of every figure that is published (`Display`).
//! **Source**: docs/fabric.md: a wake-up costs 5 us on the same core and 75 to 90 us across cores; three pure spinners on
//! two cores have millisecond tails: spin a little, then yield, then block. **Not here**: what is waited for.

use std::fmt;

/// In rounds of looking at everything once (some tens of ns on shm, about a us on tcp).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitPolicy {
    /// Rounds without giving up the core.
    pub spin: u32,
    /// Rounds with `sched_yield` between.
    pub yields: u32,
    /// After that: sleep until something arrives, or go on yielding.
    pub block: bool,
}

/// What to do in this idle round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Idle {
    /// Look again at once.
    Spin,
    /// Let others run, then look again.
    Yield,
    /// Arm and sleep.
    Block,
}

impl WaitPolicy {
    /// Spin a little, yield a little, then sleep: for a core shared with others.
    pub const POLITE: Self = Self {
        spin: 200,
        yields: 50,
        block: true,
    };
    /// Sleep at once: least load, a wake-up in every round trip.
    pub const BLOCK: Self = Self {
        spin: 0,
        yields: 0,
        block: true,
    };
    /// Spin a little, then yield for ever: the lowest latency where cores are shared by few.
    pub const YIELD: Self = Self {
        spin: 200,
        yields: 0,
        block: false,
    };
    /// Never give up the core.
    pub const SPIN: Self = Self {
        spin: u32::MAX,
        yields: 0,
        block: false,
    };

    /// What to do after so many rounds without anything.
    #[must_use]
    pub fn after(self, idle_rounds: u32) -> Idle {
        if idle_rounds < self.spin {
            Idle::Spin
        } else if idle_rounds - self.spin < self.yields || !self.block {
            Idle::Yield
        } else {
            Idle::Block
        }
    }
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self::POLITE
    }
}

impl fmt::Display for WaitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::SPIN => f.write_str("spin"),
            Self::BLOCK => f.write_str("block"),
            Self {
                spin,
                yields,
                block: true,
            } => write!(f, "spin {spin}, yield {yields}, block"),
            Self { spin, .. } => write!(f, "spin {spin}, then yield"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_then_yield_then_block() {
        let p = WaitPolicy {
            spin: 2,
            yields: 1,
            block: true,
        };
        assert_eq!(
            [0, 1, 2, 3, 4].map(|n| p.after(n)),
            [Idle::Spin, Idle::Spin, Idle::Yield, Idle::Block, Idle::Block]
        );
        assert_eq!(WaitPolicy::YIELD.after(u32::MAX), Idle::Yield);
        assert_eq!(WaitPolicy::BLOCK.after(0), Idle::Block);
        assert_eq!(WaitPolicy::POLITE.to_string(), "spin 200, yield 50, block");
    }
}
