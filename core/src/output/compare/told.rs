//! Which bytes of a connection a client was told, by their place in the primary's stream.
//!
//! A VM may lose a segment on its way out and say the next one, and what a comparer sees first of a connection may be a
//! repetition. So what lies before a byte that was told was not always told as well.
//!
//! Invariants:
//! 1. A byte counts as told only if it left, or if a sync has covered what was said beyond it: at the line both VMs held the same there.
//! 2. (memory) Of holes the newest [`MOST_HOLES`] are kept apart. What lies before them counts as not told, which costs a
//!    comparison, or a sync.
//!
//! Not here: whether something may be told (`connection`).

use super::numbers::{after, earlier, later};

/// How many holes are kept apart.
const MOST_HOLES: usize = 32;
/// How far back anything is known: a stream goes on for more than sequence numbers can tell apart, and a window is not larger.
pub(super) const FAR: u32 = 1 << 30;

/// What was told of a connection.
#[derive(Debug, Default)]
pub(super) struct Told {
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    /// Before it nothing was told, as far as is known.
    from: u32,
    /// From here on nothing was told.
    to: u32,
    /// What was not told between the two, in order, with something told between any two of them.
    holes: Vec<(u32, u32)>,
}

impl Told {
    /// A sync has covered all that was told, and with it what lies before that.
    pub(super) fn covered(&mut self) {
        if let Some(known) = &mut self.known {
            known.from = known.to.wrapping_sub(FAR);
            known.holes = Vec::new();
        }
    }

    /// From `from` to `to` it is told now.
    pub(super) fn tell(&mut self, from: u32, to: u32) {
        if from == to {
            return;
        }
        match &mut self.known {
            Some(known) if known.is_near(from) => known.tell(from, to),
            // Of the one before it nothing is known any more.
            _ => {
                let holes = Vec::new();
                self.known = Some(Known { from, to, holes });
            }
        }
    }

    /// The first piece between `from` and `to` that was not told.
    pub(super) fn next_untold(&self, from: u32, to: u32) -> Option<(u32, u32)> {
        let (start, end) = match &self.known {
            Some(known) => known.next_untold(from),
            None => (from, to),
        };
        after(to, start).then(|| (start, earlier(end, to)))
    }

    /// All of them.
    pub(super) fn untold(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut at = from;
        std::iter::from_fn(move || {
            let piece = self.next_untold(at, to)?;
            at = piece.1;
            Some(piece)
        })
    }

    /// Whether all between `from` and `to` was told.
    pub(super) fn is_told(&self, from: u32, to: u32) -> bool {
        self.next_untold(from, to).is_none()
    }
}

impl Known {
    /// The first piece that was not told and ends behind `at`, from `at` on. The last one has no end: it is far away.
    fn next_untold(&self, at: u32) -> (u32, u32) {
        if after(self.from, at) {
            return (at, self.from);
        }
        match self.holes.iter().find(|hole| after(hole.1, at)) {
            Some(hole) => (later(hole.0, at), hole.1),
            None => {
                let start = later(self.to, at);
                (start, start.wrapping_add(FAR))
            }
        }
    }

    fn is_near(&self, at: u32) -> bool {
        let away = at.wrapping_sub(self.to);
        away <= FAR || away.wrapping_neg() <= FAR
    }

    fn tell(&mut self, from: u32, to: u32) {
        if after(from, self.to) {
            self.holes.push((self.to, from));
        } else if !self.holes.is_empty() {
            self.fill(from, to);
        }
        if after(self.from, from) {
            if after(self.from, to) {
                self.holes.insert(0, (to, self.from));
            }
            self.from = from;
        }
        self.to = later(self.to, to);
        self.forget();
    }

    fn fill(&mut self, from: u32, to: u32) {
        let rest = |&(start, end): &(u32, u32)| {
            let before = (start, earlier(end, from));
            let behind = (later(start, to), end);
            [before, behind]
                .into_iter()
                .filter(|(start, end)| after(*end, *start))
        };
        self.holes = self.holes.iter().flat_map(rest).collect();
    }

    /// Invariant 2, and what is so far back that nobody asks for it.
    fn forget(&mut self) {
        let far = self.to.wrapping_sub(FAR);
        let most = self.holes.len().saturating_sub(MOST_HOLES);
        if let Some(last) = self.holes[..most].last() {
            self.from = last.1;
            self.holes.drain(..most);
        }
        let is_far = |at: u32| self.to.wrapping_sub(at) > FAR;
        if is_far(self.from) {
            self.from = far;
            self.holes.retain(|hole| self.to.wrapping_sub(hole.1) < FAR);
            if let Some(first) = self.holes.first_mut().filter(|hole| is_far(hole.0)) {
                first.0 = far;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_hole_is_what_was_not_told_until_it_is_or_a_sync_covers_it() {
        let mut told = Told::default();
        assert_eq!(told.next_untold(90, 95), Some((90, 95)));
        told.tell(100, 110);
        told.tell(120, 130);
        let untold = |told: &Told| told.untold(95, 135).collect::<Vec<_>>();
        assert_eq!(untold(&told), [(95, 100), (110, 120), (130, 135)]);
        told.tell(112, 114);
        assert_eq!(untold(&told), [(95, 100), (110, 112), (114, 120), (130, 135)]);
        told.tell(105, 125);
        assert_eq!(untold(&told), [(95, 100), (130, 135)]);
        told.tell(80, 90);
        told.tell(150, 160);
        assert_eq!(untold(&told), [(95, 100), (130, 135)]);
        assert!(told.is_told(82, 90) && !told.is_told(79, 81));
        told.covered();
        assert!(told.is_told(10, 160) && !told.is_told(10, 161));
    }

    #[test]
    fn holes_are_bounded_and_what_is_forgotten_counts_as_not_told() {
        let mut told = Told::default();
        for n in 0..200 {
            told.tell(10 * n, 10 * n + 5);
        }
        assert_eq!(
            told.known.as_ref().map(|known| known.holes.len()),
            Some(MOST_HOLES)
        );
        assert!(told.is_told(1990, 1995) && told.is_told(1800, 1805));
        assert!(!told.is_told(1985, 1990) && !told.is_told(0, 5));
    }

    #[test]
    fn a_stream_may_be_longer_than_its_numbers() {
        let mut told = Told::default();
        told.tell(7, 10);
        told.tell(20, 30);
        let mut at = 30_u32;
        for _ in 0..100 {
            let end = at.wrapping_add(1 << 27);
            assert_eq!(told.next_untold(at, end), Some((at, end)));
            told.tell(at, end);
            assert!(told.is_told(end.wrapping_sub(1 << 26), end));
            at = end;
        }
        assert!(told.known.is_some_and(|known| known.holes.is_empty()));
    }

    proptest! {
        /// A VM may say anything: what was just told is told, pieces lie where they were asked for, in order, and
        /// nothing is known from further back.
        #[test]
        fn any_numbers_are_survived(steps in prop::collection::vec((any::<u32>(), 0_u32..70_000), 1..60)) {
            let mut told = Told::default();
            for (from, length) in steps {
                let mut at = 0;
                for (start, end) in told.untold(from, from.wrapping_add(length)) {
                    let (start, end) = (start.wrapping_sub(from), end.wrapping_sub(from));
                    prop_assert!(at <= start && start < end && end <= length);
                    at = end;
                }
                told.tell(from, from.wrapping_add(length));
                prop_assert!(told.is_told(from, from.wrapping_add(length)));
                let far = |known: &Known| known.to.wrapping_sub(known.from);
                prop_assert!(told.known.as_ref().is_none_or(|known| far(known) <= FAR));
            }
        }

        /// As a set of single bytes has it, wherever the numbers begin.
        #[test]
        fn it_is_a_set_of_bytes(
            isn in any::<u32>(),
            pieces in prop::collection::vec((0_u32..300, 0_u32..40), 1..30),
        ) {
            let mut told = Told::default();
            let mut bytes = [false; 400];
            for (from, length) in pieces {
                told.tell(isn.wrapping_add(from), isn.wrapping_add(from + length));
                bytes[from as usize..(from + length) as usize].fill(true);
                for (at, byte) in (0_u32..).zip(bytes) {
                    let at = isn.wrapping_add(at);
                    prop_assert_eq!(told.is_told(at, at.wrapping_add(1)), byte);
                }
            }
            let untold: u32 = told.untold(isn, isn.wrapping_add(400)).map(|(from, to)| to.wrapping_sub(from)).sum();
            prop_assert_eq!(untold as usize, bytes.iter().filter(|byte| !**byte).count());
        }
    }
}
