//! Agreed inputs that a copy gets before any other: those that were agreed while it was on its way here.
//!
//! Invariant: it holds so many bytes at most. What finds no room is lost, as on any wire, and TCP sends it again.
//! Not here: when a copy gets the next one (`frames`).

use dunlin_core::agreed::Frame;
use std::collections::VecDeque;

/// As much again as may have been agreed while the copy was on its way (`joined`).
const BACKLOG_BYTES: usize = 128 << 20;

#[derive(Default)]
pub(super) struct Backlog {
    frames: VecDeque<Frame>,
    bytes: usize,
}

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn push(&mut self, frame: Frame) {
        if self.bytes + weight(&frame) <= BACKLOG_BYTES {
            self.bytes += weight(&frame);
            self.frames.push_back(frame);
        }
    }

    pub(super) fn pop(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= weight(&frame);
        Some(frame)
    }
}

/// With what keeping it costs.
fn weight(frame: &Frame) -> usize {
    frame.bytes.len() + 64
}

impl FromIterator<Frame> for Backlog {
    fn from_iter<T: IntoIterator<Item = Frame>>(frames: T) -> Self {
        let mut backlog = Self::default();
        frames.into_iter().for_each(|frame| backlog.push(frame));
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
        let frame = |nic| Frame {
            nic,
            bytes: bytes.clone(),
        };
        let mut backlog: Backlog = (0..200).map(frame).collect();
        assert_eq!(backlog.len(), 127, "a MiB each, and what keeping it costs");
        assert!(backlog.bytes <= BACKLOG_BYTES);
        assert_eq!(backlog.pop().map(|first| first.nic), Some(0));
        backlog.push(frame(200));
        let rest: Vec<_> = std::iter::from_fn(|| backlog.pop())
            .map(|frame| frame.nic)
            .collect();
        assert_eq!((rest.len(), rest.last()), (127, Some(&200)));
        assert_eq!(backlog.bytes, 0);
    }
}
