//! What it decides: which of the backup's own frames a new primary has to send, because the old one may not have.
//!
//! Flow: beside the comparison on the backup; read once, at a take-over.
//!
//! Invariants:
//! 1. A TCP segment that takes sequence numbers is kept until the client acknowledges it, a sync covers it, or a new
//!    connection of the same name begins. Of the rest the newest are kept: one acknowledgement and one reset of a
//!    connection, `MOST_OF_A_FLOW` of any other flow.
//! 2. Frames leave in the order in which the VM said them.
//! 3. Never more than `MOST_BYTES`: the oldest goes first. The VM's own TCP sends again what was lost by that; a datagram
//!    may always be lost.
//!
//! Source: ours. Not here: the client's numbers (`rewriter`): all that is said and heard here is in the VM's own.

use super::list::List;
use super::packet::{Direction, FlowKey, Parsed, before, parse};
use crate::agreed::Frame;
use std::collections::{HashMap, VecDeque};

/// How much is kept, with what it takes to keep it.
pub const MOST_BYTES: usize = 64 << 20;
/// How many frames of a flow without acknowledgements are kept.
pub const MOST_OF_A_FLOW: usize = 64;

/// What a frame costs besides its bytes: its places in the list, in its flow, and a share of the flow.
const OVERHEAD_BYTES: usize = 256;

/// What frames are kept together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Of {
    Flow(FlowKey),
    /// The link's own talk, fragments, and all that is not understood, of one NIC.
    Rest(u8),
}

/// What ends a frame's stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Until {
    /// An acknowledgement of this number.
    Acknowledged(u32),
    /// A newer acknowledgement.
    NewerAck,
    /// A newer reset.
    NewerReset,
    /// Enough newer ones.
    Newer,
}

#[derive(Debug)]
struct Item {
    of: Of,
    until: Until,
    frame: Frame,
}

#[derive(Debug, Default)]
struct Flow {
    /// In the order in which they were said, so the oldest of the list is the first here.
    queue: VecDeque<usize>,
    ack: Option<usize>,
    reset: Option<usize>,
}

impl Flow {
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.ack.is_none() && self.reset.is_none()
    }
}

/// What the backup's VM has said since the last sync, as far as it may have to be said to the client.
#[derive(Debug)]
pub struct RetransmitBuffer {
    items: List<Item>,
    // Looked up only, never walked.
    flows: HashMap<Of, Flow>,
    bytes: usize,
    most_bytes: usize,
    /// What that cost.
    dropped: u64,
}

impl Default for RetransmitBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl RetransmitBuffer {
    /// Nothing was said yet.
    #[must_use]
    pub fn new() -> Self {
        Self::with_most(MOST_BYTES)
    }

    fn with_most(most_bytes: usize) -> Self {
        Self {
            items: List::new(),
            flows: HashMap::new(),
            bytes: 0,
            most_bytes,
            dropped: 0,
        }
    }

    /// The VM here said `frame`.
    pub fn said(&mut self, frame: &Frame) {
        let parsed = parse(frame, Direction::FromVm);
        if let Parsed::Tcp(segment) = &parsed
            && segment.syn()
        {
            // Words of a former connection of this name would be taken for the new one's.
            self.forget_flow(Of::Flow(segment.key));
        }
        let (of, until) = match parsed {
            Parsed::Tcp(segment) if segment.rst() => (Of::Flow(segment.key), Until::NewerReset),
            Parsed::Tcp(segment) if segment.seq_len() > 0 => {
                (Of::Flow(segment.key), Until::Acknowledged(segment.seq_end()))
            }
            Parsed::Tcp(segment) => (Of::Flow(segment.key), Until::NewerAck),
            Parsed::Datagram(datagram) => (Of::Flow(datagram.key), Until::Newer),
            Parsed::Piece(_) | Parsed::Neighbour | Parsed::Fragment | Parsed::Other => {
                (Of::Rest(frame.nic), Until::Newer)
            }
        };
        self.bytes += cost(frame);
        let frame = frame.clone();
        let id = self.items.push_back(Item { of, until, frame });
        let flow = self.flows.entry(of).or_default();
        let superseded = match until {
            Until::NewerAck => flow.ack.replace(id),
            Until::NewerReset => flow.reset.replace(id),
            Until::Acknowledged(_) => {
                flow.queue.push_back(id);
                None
            }
            Until::Newer => {
                flow.queue.push_back(id);
                (flow.queue.len() > MOST_OF_A_FLOW)
                    .then(|| flow.queue.pop_front())
                    .flatten()
            }
        };
        if let Some(old) = superseded {
            self.forget(old);
        }
        while self.bytes > self.most_bytes && self.drop_oldest() {
            self.dropped += 1;
        }
    }

    /// The VM here got `frame`, in its own numbers: what the client has acknowledged need not be said again.
    pub fn heard(&mut self, frame: &Frame) {
        let Parsed::Tcp(segment) = parse(frame, Direction::ToVm) else {
            return;
        };
        if !segment.ack_flag() || segment.rst() {
            return;
        }
        let of = Of::Flow(segment.key);
        let Some(flow) = self.flows.get_mut(&of) else {
            return;
        };
        while let Some(id) = flow.queue.front().copied()
            && let Some(item) = self.items.get(id)
            && let Until::Acknowledged(end) = item.until
            && !before(segment.ack, end)
        {
            flow.queue.pop_front();
            self.bytes -= cost(&item.frame);
            self.items.remove(id);
        }
        if flow.is_empty() {
            self.flows.remove(&of);
        }
    }

    /// A sync was applied: the primary has said, or will say, all of it.
    pub fn applied(&mut self) {
        *self = Self {
            dropped: self.dropped,
            ..Self::with_most(self.most_bytes)
        };
    }

    /// All that is kept, for the network, in order.
    pub fn take(&mut self) -> Vec<Frame> {
        let frames = self.items.iter().map(|item| item.frame.clone()).collect();
        self.applied();
        frames
    }

    /// How many frames are kept.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.items.len()
    }

    /// How much they take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many frames found no room.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Takes an item off the list; its flow does not know it any more.
    fn forget(&mut self, id: usize) -> Option<Item> {
        let item = self.items.remove(id)?;
        self.bytes -= cost(&item.frame);
        Some(item)
    }

    fn forget_flow(&mut self, of: Of) {
        if let Some(flow) = self.flows.remove(&of) {
            for id in flow.queue.into_iter().chain(flow.ack).chain(flow.reset) {
                self.forget(id);
            }
        }
    }

    /// Whether there was one.
    fn drop_oldest(&mut self) -> bool {
        let Some(item) = self.items.first().and_then(|id| self.forget(id)) else {
            return false;
        };
        if let Some(flow) = self.flows.get_mut(&item.of) {
            match item.until {
                Until::NewerAck => flow.ack = None,
                Until::NewerReset => flow.reset = None,
                Until::Acknowledged(_) | Until::Newer => {
                    flow.queue.pop_front();
                }
            }
            if flow.is_empty() {
                self.flows.remove(&item.of);
            }
        }
        true
    }
}

fn cost(frame: &Frame) -> usize {
    frame.bytes.len() + OVERHEAD_BYTES
}

#[cfg(test)]
mod tests;
