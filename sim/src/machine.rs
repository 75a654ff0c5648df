//! What the log's entries do: the replicated state machine of a world, a few registers and a sum over everything agreed.

use crate::check::fold;
use bytes::Bytes;
use dunlin_core::consensus::Entry;
use dunlin_core::units::Index;

/// Registers that the clients write.
pub const REGISTERS: usize = 2;

/// The replicated state machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Applied up to here.
    pub through: Index,
    /// Depends on every entry.
    pub chain: u64,
    /// Last written values.
    pub registers: [u64; REGISTERS],
}

impl Machine {
    pub(crate) fn apply(&mut self, entry: &Entry) {
        self.through = entry.stamp.index;
        self.chain = fold(self.chain, entry);
        if let Some((register, value)) = crate::client::decode(entry) {
            self.registers[register] = value;
        }
    }

    /// For `Truncate`.
    #[must_use]
    pub fn snapshot(&self) -> Bytes {
        let words = [self.through.0, self.chain, self.registers[0], self.registers[1]];
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect::<Vec<_>>()
            .into()
    }

    pub(crate) fn decode(state: &[u8]) -> Self {
        let word = |at: usize| {
            state
                .get(at * 8..at * 8 + 8)
                .map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap_or_default()))
        };
        Self {
            through: Index(word(0)),
            chain: word(1),
            registers: [word(2), word(3)],
        }
    }
}
