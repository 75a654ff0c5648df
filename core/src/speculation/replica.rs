//! What a backup knows of the primary's connections: the last whole checkpoint, and parts of later ones that are not whole yet.
//!
//! Flow: parts of a checkpoint, of which some come ahead of it while its epoch runs, are staged; when it is whole they are merged.
//!
//! Invariants: 1. a part is merged when its checkpoint is whole, as memory is; a take-over throws parts of the abandoned branch away.
//! 2. what does not follow what is known is refused when it comes, and leaves everything as it was. 3. the streams' bytes are bounded.
//! Not here: the session that carries it.

use super::connection::{self, Connection};
use super::epochs::next_until;
use super::handshake::Handshake;
use super::state::{Change, decode};
use super::{Flow, Limits};
use crate::output::packet::before;
use crate::units::Epoch;
use crate::wire::WireError;
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};

/// Epochs of which something has come and the checkpoint is not whole. A replica has one at a time; the model and the kernel's test have more.
const MOST_EPOCHS: usize = 1024;

/// What is known of one flow.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) handshake: Option<Handshake>,
    pub(super) connection: Option<Connection>,
}

impl Connection {
    /// Takes over the bytes that an earlier part has brought, where these are the next ones of the same stream.
    fn continues(&mut self, mut earlier: Connection) {
        if earlier.nxt == self.base && before(self.una, self.base) {
            earlier.bytes.append(&mut self.bytes);
            (self.bytes, self.base) = (earlier.bytes, earlier.base);
        }
    }
}

/// A backup's knowledge of the primary's connections.
#[derive(Debug)]
pub struct Replica {
    limits: Limits,
    known: BTreeMap<Flow, Known>,
    staged: VecDeque<(Epoch, BTreeMap<Flow, Known>)>,
    /// The newest whole checkpoint.
    whole: Option<Epoch>,
    /// Where the streams end in what was staged last.
    ends: BTreeMap<Flow, u32>,
    bytes: usize,
}

impl Replica {
    /// Knows nothing; its first part has to be a whole one.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            known: BTreeMap::new(),
            staged: VecDeque::new(),
            whole: None,
            ends: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// A part of `epoch`'s checkpoint has come: each connection in it is as this part says, with the bytes of the parts before.
    ///
    /// # Errors
    /// If it cannot be understood, does not follow what was staged before, or is more than the limits allow.
    pub fn stage(&mut self, epoch: Epoch, part: Bytes) -> Result<(), WireError> {
        let changes = decode(part)?;
        let follows = |change: &Change| match &change.connection {
            Some(new) => new.base == new.una || self.ends.get(&change.flow) == Some(&new.base),
            None => true,
        };
        let newest = self.staged.back().map(|(staged, _)| *staged);
        let is_late =
            newest.is_some_and(|newest| epoch < newest) || self.whole.is_some_and(|whole| epoch <= whole);
        if is_late || !changes.iter().all(follows) {
            return Err(WireError::Invalid("order of checkpoints"));
        }
        let more: usize = changes
            .iter()
            .filter_map(|change| change.connection.as_ref())
            .map(Connection::kept)
            .sum();
        // Of one checkpoint the streams are within the limit. One more may be on its way, and ahead of it as much that it does not need any more.
        let staged_flows: usize = self.staged.iter().map(|(_, staged)| staged.len()).sum();
        let flows = self.known.len() + self.ends.len() + staged_flows + changes.len();
        if self.bytes + more > 3 * self.limits.total_bytes
            || flows > 8 * (self.limits.connections + self.limits.handshakes)
            || (newest != Some(epoch) && self.staged.len() >= MOST_EPOCHS)
        {
            return Err(WireError::Invalid("amount of streams"));
        }
        self.bytes += more;
        if newest != Some(epoch) {
            self.staged.push_back((epoch, BTreeMap::new()));
        }
        let (_, staged) = self.staged.back_mut().expect("there is one of this epoch");
        for Change {
            flow,
            handshake,
            connection,
        } in changes
        {
            match &connection {
                Some(connection) => self.ends.insert(flow, connection.nxt),
                None => self.ends.remove(&flow),
            };
            let mut change = Known {
                handshake,
                connection,
            };
            if let Some(ahead) = staged.remove(&flow).and_then(|known| known.connection) {
                self.bytes -= ahead.kept();
                if let Some(new) = &mut change.connection {
                    self.bytes -= new.kept();
                    new.continues(ahead);
                    self.bytes += new.kept();
                }
            }
            staged.insert(flow, change);
        }
        Ok(())
    }

    /// The checkpoint of `epoch`, and with it all before, is whole.
    pub fn complete(&mut self, epoch: Epoch) {
        while let Some((_, changes)) = next_until(&mut self.staged, |(staged, _)| *staged <= epoch) {
            for (flow, change) in changes {
                self.merge(flow, change);
            }
        }
        self.whole = self.whole.max(Some(epoch));
    }

    fn merge(&mut self, flow: Flow, mut change: Known) {
        let old = self.known.remove(&flow).and_then(|known| known.connection);
        self.bytes -= old.as_ref().map_or(0, Connection::kept);
        if let Some(new) = &mut change.connection {
            self.bytes -= new.kept();
            if let Some(old) = old {
                new.continues(old);
            }
            if before(new.una, new.base) {
                // A primary that took its client's word back: it has no stream any more.
                change.connection = None;
            } else {
                let n = (new.una.wrapping_sub(new.base) as usize).min(new.bytes.len());
                new.bytes.drain(..n);
                new.base = new.una;
                connection::give_back(&mut new.bytes);
                self.bytes += new.kept();
            }
        }
        if change.handshake.is_some() || change.connection.is_some() {
            self.known.insert(flow, change);
        }
    }

    /// How many flows are known, and how many bytes of them.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.known.len(), self.bytes)
    }

    /// What is whole.
    pub(super) fn into_known(self) -> BTreeMap<Flow, Known> {
        self.known
    }
}
