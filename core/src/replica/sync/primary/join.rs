//! The join: memory is copied while the VM runs, until the rest is small.

use super::{Effect, Primary, Report, State};
use crate::replica::sync::PAGES_PER_MESSAGE;
use crate::sync::dirty::PageSet;
use crate::wire::sync::SyncMessage;

/// Rounds of the join stop when so little is left that a pause hardly shows, or when they no longer help.
const REST_PAGES: usize = 2048;
const ROUNDS: usize = 12;

/// A round of the copy.
#[derive(Debug)]
pub(super) struct Round {
    number: usize,
    pages: usize,
    /// In all rounds so far, and at least in all.
    sent: usize,
    total: usize,
}

impl Primary {
    pub(super) fn greet(&self, effects: &mut Vec<Effect>) -> State {
        effects.push(Effect::Send(SyncMessage::Join {
            term: self.setup.term,
            pages: self.setup.pages,
            active: self.active,
            compare: self.setup.compare,
        }));
        State::Greeting(Default::default())
    }

    /// The first round: all that the guest has ever used, but for what the backup was found to hold (`held`).
    pub(super) fn begin_copy(pages: &PageSet, done: usize, effects: &mut Vec<Effect>) -> State {
        let first = Round {
            number: 0,
            pages: 0,
            sent: done,
            total: done + pages.len(),
        };
        Self::copy_round(first, pages, effects)
    }

    /// In messages of their size.
    pub(super) fn send_pages(pages: &PageSet, effects: &mut Vec<Effect>) {
        effects.extend(pages.parts(PAGES_PER_MESSAGE).map(Effect::SendPages));
    }

    fn copy_round(mut round: Round, pages: &PageSet, effects: &mut Vec<Effect>) -> State {
        for part in pages.parts(PAGES_PER_MESSAGE) {
            round.sent += part.len();
            effects.push(Effect::SendPages(part));
            effects.push(Effect::Progress {
                sent: round.sent,
                total: round.total.max(round.sent),
            });
        }
        effects.push(Effect::Scan);
        round.number += 1;
        round.pages = pages.len();
        State::Copying(round)
    }

    /// A round is sent, and these pages were written meanwhile.
    pub(super) fn copied(&self, round: Round, pages: &PageSet, effects: &mut Vec<Effect>) -> State {
        let small = pages.len() <= REST_PAGES || pages.len() > round.pages * 9 / 10;
        if !small && round.number < ROUNDS {
            return Self::copy_round(round, pages, effects);
        }
        // What is written from that scan on is sent in the last, stopped round.
        Self::send_pages(pages, effects);
        effects.push(Effect::Report(Report::Copied));
        State::Idle
    }
}
