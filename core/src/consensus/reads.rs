//! What it decides: when a read of the agreed state may be answered, though no entry is appended for it.
//!
//! Flow: a read asks for a beat -> a majority echoes it -> nobody newer led before, so what is agreed by then answers it. One round
//! serves all reads that came before its beat.
//!
//! Source: Ongaro 6.4. Not here: beats and their echoes (`propose`).

use super::{Action, Bug, Consensus, Role};

impl Consensus {
    /// A read is answered when a majority has echoed a beat that was sent after it came: nobody newer led before.
    pub(super) fn on_read(&mut self, id: u64, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            out.push(Action::ReadRefused { id });
            return;
        }
        let index = self.order.committed().max(self.leading.barrier);
        if self.bugged(Bug::ReadsAlone) {
            out.push(Action::ReadReady {
                id,
                index: self.order.committed(),
            });
            return;
        }
        let open = self.reads_asked();
        self.leading.reads.push((id, index, 0));
        if !open {
            self.beat(out);
        }
        self.answer_reads(out);
    }

    /// Is a read's beat under way? Then later reads wait for the next one: one round serves many.
    pub(super) fn reads_asked(&self) -> bool {
        self.leading.reads.iter().any(|&(_, _, beat)| beat != 0)
    }

    pub(super) fn answer_reads(&mut self, out: &mut Vec<Action>) {
        if self.leading.reads.is_empty() || self.order.committed() < self.leading.barrier {
            return;
        }
        let leading = &mut self.leading;
        let beats = leading.peers.iter().map(|peer| peer.beat);
        let echoed = leading.echoed.reached(leading.beat, beats);
        let before = self.leading.reads.len();
        self.leading.reads.retain(|&(id, index, beat)| {
            let ready = beat != 0 && beat <= echoed;
            if ready {
                out.push(Action::ReadReady { id, index });
            }
            !ready
        });
        let waiting = !self.leading.reads.is_empty() && !self.reads_asked();
        if waiting && self.leading.reads.len() < before {
            self.beat(out);
            self.answer_reads(out);
        }
    }

    pub(super) fn refuse_reads(&mut self, out: &mut Vec<Action>) {
        for (id, ..) in std::mem::take(&mut self.leading.reads) {
            out.push(Action::ReadRefused { id });
        }
    }
}
