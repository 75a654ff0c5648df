//! A flow of datagrams: the n-th payload of the primary against the n-th payload of the backup, since the backup was
//! loaded last. There is no number in a datagram by which a lost or an additional one could be told from a different
//! one, so anything else than the same sequence is a difference.

use super::place::{Found, alike, shown};
use super::types::{Difference, FrameId};
use crate::output::packet::Datagram;
use bytes::Bytes;
use std::collections::VecDeque;

/// What a datagram costs besides its bytes: one without content is kept, too.
const MESSAGE_COST_BYTES: usize = 64;

/// A datagram: ICMP's type and code (0 for UDP), and its payload. Or a part of one: its place there, and what it brings.
#[derive(Debug, PartialEq, Eq)]
pub struct Message {
    is_part: bool,
    kind: u16,
    payload: Bytes,
}

impl Message {
    /// Of a whole datagram in `frame`.
    pub fn whole(datagram: &Datagram, frame: &Bytes) -> Self {
        Self {
            is_part: false,
            kind: datagram.kind,
            payload: frame.slice(datagram.payload.clone()),
        }
    }

    /// Of a part of one.
    pub fn part(piece: &Datagram, frame: &Bytes) -> Self {
        Self {
            is_part: true,
            ..Self::whole(piece, frame)
        }
    }

    fn cost(&self) -> usize {
        self.payload.len() + MESSAGE_COST_BYTES
    }
}

/// What was said on a flow and not matched yet.
#[derive(Debug, Default)]
pub struct Datagrams {
    primary: VecDeque<(FrameId, Message)>,
    backup: VecDeque<Message>,
    differs: bool,
}

impl Datagrams {
    pub fn primary_said(&mut self, id: FrameId, message: Message) {
        self.primary.push_back((id, message));
    }

    /// The change of bytes kept. After a difference nothing is compared any more, so nothing is kept for it.
    pub fn backup_said(&mut self, message: Message) -> usize {
        if self.differs {
            return 0;
        }
        let grown = message.cost();
        self.backup.push_back(message);
        grown
    }

    /// The next frame that both have said.
    pub fn next_matched(&mut self) -> Result<Option<FrameId>, Difference> {
        if self.differs {
            return Ok(None);
        }
        let (Some((id, ours)), Some(theirs)) = (self.primary.front(), self.backup.front()) else {
            return Ok(None);
        };
        if ours != theirs {
            self.differs = true;
            return Err(Difference::Datagram);
        }
        let id = *id;
        self.primary.pop_front();
        self.backup.pop_front();
        Ok(Some(id))
    }

    /// How the oldest of both stand to each other.
    pub fn found(&self) -> Found {
        let (Some((_, ours)), Some(theirs)) = (self.primary.front(), self.backup.front()) else {
            return Found::default();
        };
        let equal = alike(&ours.payload, &theirs.payload);
        Found {
            at_byte: equal as u64,
            from_beginning: true,
            primary: shown(&ours.payload, equal),
            backup: shown(&theirs.payload, equal),
        }
    }

    /// A sync covers all that waited. (What is kept holds its whole frame.)
    pub fn covered(&mut self) {
        self.primary.clear();
    }

    /// Says no more until the next sync.
    pub fn give_up(&mut self) {
        self.differs = true;
        self.backup.clear();
    }

    /// How many bytes of the backup are kept.
    pub fn kept_bytes(&self) -> usize {
        self.backup.iter().map(Message::cost).sum()
    }
}
