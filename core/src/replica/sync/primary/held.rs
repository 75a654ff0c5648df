//! A join's head start: the backup says what its memory holds of an earlier copy of this VM, and what is equal is not sent.
//!
//! Flow: `Holds`, part by part, before `JoinReady` -> each part is hashed here while the VM runs -> what differs is sent -> `join` sends
//! what the backup does not hold.
//!
//! Invariants:
//! 1. A page is hashed here after the marks of written pages were cleared: one that is written afterwards is in a later round, whatever
//!    its hash was.
//! 2. What the backup holds and the guest has never used is zeros here, and is not looked at, which would make it: unless that is what the
//!    backup holds, it is sent as zeros.
//! 3. What a backup says takes no more memory here than a sync may; the backup says no more than that (`SendHeld`).

use super::{Bug, Effect, Next, PageSet, Primary, Report, Setup, State};
use crate::replica::sync::{PAGES_AT_ONCE, PAGES_PER_MESSAGE, SessionError};
use crate::sync::compare::hash_of_zeros;
use crate::wire::sync::parts::BadPart;
use std::collections::VecDeque;

/// What the backup's memory holds, by parts in ascending order.
#[derive(Debug, Default)]
pub(super) struct Held {
    parts: VecDeque<Part>,
    pages: usize,
    /// The page after the last one.
    end: u32,
}

#[derive(Debug)]
struct Part {
    pages: PageSet,
    /// One for each page.
    hashes: Vec<u128>,
}

impl Held {
    /// Takes the next part.
    pub(super) fn add(
        &mut self,
        pages: PageSet,
        hashes: Vec<u128>,
        setup: &Setup,
    ) -> Result<(), SessionError> {
        let Some(first) = pages.pages().next() else {
            return Err(BadPart::Order.into());
        };
        if pages.end() > setup.pages {
            return Err(BadPart::Outside.into());
        }
        if first < self.end || pages.len() > PAGES_AT_ONCE as usize || hashes.len() != pages.len() {
            return Err(BadPart::Order.into());
        }
        self.pages += pages.len();
        if self.pages * size_of::<u128>() > setup.staging_bytes {
            return Err(SessionError::HoldsTooMuch);
        }
        self.end = pages.end();
        self.parts.push_back(Part { pages, hashes });
        Ok(())
    }

    fn all(&self) -> PageSet {
        PageSet::from_runs(self.parts.iter().flat_map(|part| part.pages.runs()))
    }
}

/// What is held beside what is here.
#[derive(Debug)]
pub(super) struct Likening {
    held: Held,
    /// What the guest has ever used.
    mapped: PageSet,
    /// Used, and not held.
    missing: PageSet,
    looked_at: usize,
    equal: usize,
    /// What a page hashes to that the guest has never used.
    zeros: u128,
}

impl Likening {
    pub(super) fn new(held: Held, mapped: PageSet) -> Self {
        let missing = mapped.minus(&held.all());
        Self {
            held,
            mapped,
            missing,
            looked_at: 0,
            equal: 0,
            zeros: hash_of_zeros(),
        }
    }

    /// Those of the next part that the guest has ever used: the others are not to be made by looking at them.
    fn used(&self, part: &Part) -> PageSet {
        part.pages.minus(&part.pages.minus(&self.mapped))
    }
}

impl Primary {
    /// The next part, or all that is not held.
    pub(super) fn compare_held(likening: Likening, effects: &mut Vec<Effect>) -> State {
        if let Some(part) = likening.held.parts.front() {
            effects.push(Effect::HashPages(likening.used(part)));
            return State::ComparingHeld(likening);
        }
        if likening.held.pages > 0 {
            effects.push(Effect::Report(Report::Held {
                pages: likening.held.pages,
                equal: likening.equal,
            }));
        }
        Self::begin_copy(&likening.missing, likening.looked_at, effects)
    }

    /// Also an empty list is sent: the backup waits for pages, and hears that there will be some.
    pub(super) fn held_hashed(
        &self,
        mut likening: Likening,
        ours: &[u128],
        effects: &mut Vec<Effect>,
    ) -> Next {
        let part = likening.held.parts.pop_front().expect("a part was hashed");
        let used = likening.used(&part);
        let mut known = used.pages().zip(ours).peekable();
        let zeros = likening.zeros;
        let differs = |&(page, theirs): &(u32, u128)| {
            let here = known.next_if(|(here, _)| *here == page);
            here.map_or(zeros, |(_, ours)| *ours) != theirs && !self.bugs.has(Bug::TrustsWhatIsHeld)
        };
        let held = part.pages.pages().zip(part.hashes.iter().copied());
        let differing = PageSet::from_runs(held.filter(differs).map(|(page, _)| (page, 1)));
        let unused = differing.minus(&used);
        likening.looked_at += part.pages.len();
        likening.equal += part.pages.len() - differing.len();
        match differing.is_empty() {
            true => effects.push(Effect::SendPages(differing)),
            false => Self::send_pages(&differing.minus(&unused), effects),
        }
        effects.extend(unused.parts(PAGES_PER_MESSAGE).map(Effect::SendZeros));
        effects.push(Effect::Progress {
            sent: likening.looked_at,
            total: likening.held.pages + likening.missing.len(),
        });
        Ok(Self::compare_held(likening, effects))
    }
}
