//! Agreed inputs that a copy gets before any other: those that were agreed while it was on its way here.
//!
//! Invariant: it holds so many bytes at most. What finds no room is lost, as on any wire: TCP sends it again, and of
//! what nobody sends again the primary is told (`frames`).
//! Not here: when a copy gets the next one (`frames`).

use dunlin_core::agreed::{AgreedTime, Frame};
use std::collections::VecDeque;

/// As much again as may have been agreed while the copy was on its way (`joined`).
const BACKLOG_BYTES: usize = 128 << 20;

/// What a copy gets.
#[derive(Debug)]
pub(super) enum Input {
    /// It is that time.
    Time(AgreedTime),
    /// Its card gets that.
    Frame(Frame),
}

#[derive(Default)]
pub(super) struct Backlog {
    inputs: VecDeque<Input>,
    bytes: usize,
}

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.inputs.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    /// What finds no room is given back.
    pub(super) fn push(&mut self, input: Input) -> Option<Input> {
        if self.bytes + input.weight() > BACKLOG_BYTES {
            return Some(input);
        }
        self.bytes += input.weight();
        self.inputs.push_back(input);
        None
    }

    pub(super) fn pop(&mut self) -> Option<Input> {
        let input = self.inputs.pop_front()?;
        self.bytes -= input.weight();
        Some(input)
    }
}

impl Input {
    /// With what keeping it costs.
    pub(super) fn weight(&self) -> usize {
        64 + match self {
            Self::Time(_) => 0,
            Self::Frame(frame) => frame.bytes.len(),
        }
    }
}

impl FromIterator<Input> for Backlog {
    fn from_iter<T: IntoIterator<Item = Input>>(inputs: T) -> Self {
        let mut backlog = Self::default();
        for input in inputs {
            // It is half of what the backlog takes (`joined`).
            backlog.push(input);
        }
        backlog
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn a_copy_that_takes_nothing_costs_a_bounded_backlog_and_gets_what_was_first() {
        let bytes = Bytes::from(vec![0; 1 << 20]);
        let frame = |nic| {
            let bytes = bytes.clone();
            Input::Frame(Frame { nic, bytes })
        };
        let number = |input| match input {
            Input::Frame(frame) => frame.nic,
            Input::Time(_) => panic!("no time was kept"),
        };
        let mut backlog: Backlog = (0..200).map(frame).collect();
        assert_eq!(backlog.len(), 127, "a MiB each, and what keeping it costs");
        assert!(backlog.bytes <= BACKLOG_BYTES);
        assert_eq!(backlog.pop().map(number), Some(0));
        assert!(backlog.push(frame(200)).is_none(), "there is room again");
        assert_eq!(backlog.push(frame(201)).map(number), Some(201), "and no more");
        let rest: Vec<_> = std::iter::from_fn(|| backlog.pop()).map(number).collect();
        assert_eq!((rest.len(), rest.last()), (127, Some(&200)));
        assert_eq!(backlog.bytes, 0);
    }
}
