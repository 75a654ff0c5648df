//! What it decides: when a program's time is agreed anew.
//!
//! A time waits until the program has done what came before it, so one for each batch of inputs would cost a busy program its pipeline: its
//! copies would stand still until both are done. So it comes with a batch when the last one is a while ago, and by itself while nothing
//! comes: a program looks at the clock when one of its timers is over, and the timers go by the kernel's.
//!
//! Not here: what time it is (`time`), what it waits for (`order`).

/// With inputs: no more often than this.
const WITH_INPUTS_US: u64 = 5_000;
/// While nothing comes.
const IDLE_US: u64 = 20_000;
/// While the copies begin: they do so at different moments, and many draw their first chance from the time of that.
const BEGINNING_US: u64 = 1_000_000;

/// When the time was last said.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    said_us: Option<u64>,
}

impl Pace {
    /// It was said now.
    pub fn said(&mut self, now_us: u64) {
        self.said_us = Some(now_us);
    }

    /// Whether it goes with inputs that are said now.
    #[must_use]
    pub fn is_due_with_inputs(&self, now_us: u64) -> bool {
        now_us >= self.due_us(WITH_INPUTS_US)
    }

    /// When it is due where nothing comes, in microseconds. `begins`: not every copy serves yet.
    #[must_use]
    pub fn due_alone_us(&self, begins: bool) -> u64 {
        self.due_us(if begins { BEGINNING_US } else { IDLE_US })
    }

    fn due_us(&self, after_us: u64) -> u64 {
        self.said_us.map_or(0, |said_us| said_us + after_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_with_inputs_now_and_then_and_alone_more_seldom() {
        let mut pace = Pace::default();
        assert!(pace.is_due_with_inputs(0), "it was never said");
        pace.said(1_000);
        assert!(!pace.is_due_with_inputs(5_999));
        assert!(pace.is_due_with_inputs(6_000));
        assert_eq!(pace.due_alone_us(false), 21_000);
        assert_eq!(pace.due_alone_us(true), 1_001_000);
    }
}
