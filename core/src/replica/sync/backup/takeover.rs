//! The VM becomes a primary's.

use super::{Backup, Bug, Effect, Report, SessionError, State, Term};

impl Backup {
    /// What was staged is dropped whole; what was applied goes on.
    pub(super) fn take_over(&mut self, term: Term, effects: &mut Vec<Effect>) -> State {
        self.staging = None;
        if self.applied.is_none() {
            return Self::took_over(Err(SessionError::NotWhole), effects);
        }
        effects.push(Effect::TakeOverDisks(term));
        // The memory is that of this state already.
        let kept = self.kept.take().filter(|_| !self.bugs.has(Bug::ForgetsKeptState));
        effects.extend(kept.map(Effect::LoadKept));
        effects.push(Effect::FailOver);
        State::TakingOver
    }

    pub(super) fn took_over(outcome: Result<(), SessionError>, effects: &mut Vec<Effect>) -> State {
        effects.push(Effect::Report(Report::TookOver(outcome)));
        State::Ended
    }
}
