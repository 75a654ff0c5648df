//! What a host's loop says to its log.

use super::world::World;
use dunlin_core::agreed::Agreed;
use dunlin_core::consensus::{Event, Refusal};
use dunlin_core::units::Index;
use dunlin_core::wire::agreed;

impl World {
    /// A leader's word to the group. Whether the log takes it, or will as soon as it can.
    pub(super) fn propose(&mut self, id: u8, entry: &Agreed) -> bool {
        let inputs = matches!(entry, Agreed::Frames(_));
        let host = &mut self.hosts[usize::from(id)];
        if !inputs && !host.unsaid.is_empty() {
            return host.unsaid.keep(entry);
        }
        match self.ask_log(id, entry) {
            Ok(_) => true,
            Err(Refusal::NotLeader { .. }) => false,
            Err(_) => self.hosts[usize::from(id)].unsaid.keep(entry),
        }
    }

    /// Says again what was refused.
    pub(super) fn propose_unsaid(&mut self, id: u8) {
        while let Some(entry) = self.hosts[usize::from(id)].unsaid.next().cloned() {
            let asked = self.ask_log(id, &entry);
            let unsaid = &mut self.hosts[usize::from(id)].unsaid;
            match asked {
                Ok(_) => unsaid.said(),
                Err(Refusal::NotLeader { .. }) => unsaid.clear(),
                Err(_) => return,
            }
        }
    }

    fn ask_log(&mut self, id: u8, entry: &Agreed) -> Result<Index, Refusal> {
        let payload = agreed::encode(entry);
        let Some(node) = self.hosts[usize::from(id)].node.as_mut() else {
            return Err(Refusal::NotLeader { leader: None });
        };
        let asked = match entry {
            Agreed::Frames(_) => node.propose(payload),
            _ => node.propose_control(payload),
        };
        self.note(|| format!("{id} proposes {}: {asked:?}", entry.name()));
        if asked.is_ok() {
            self.step(id, Event::Flush);
        }
        asked
    }
}
