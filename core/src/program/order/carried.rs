//! What of the order a copy of a running program needs: where each client's next byte will be.
//!
//! Layout, all numbers big-endian: how many connections (4); for each, as they began, its key, where the client's next byte will be (4), and flags (1).
//!
//! The kernel counts what a brought connection takes in from nothing (`tcpi_bytes_received`), so the copy counts anew, too.
//! Source: tcp(7), TCP_REPAIR. Not here: the connection itself, and the numbers that it shows its client (`output::rewriter`).

use super::{Gate, Heard, MOST_CONNECTIONS};
use crate::output::rewriter::table::{put_key, take_key};
use crate::wire::{Reader, WireError};
use bytes::{BufMut, Bytes, BytesMut};

const OPENING: u8 = 1;
const REFUSED: u8 = 2;
const ENDED: u8 = 4;
const OWED: u8 = 8;
/// The least that a connection takes.
const LEAST_BYTES: usize = 6 + 8 + 4 + 4 + 1;

impl Gate {
    /// For a copy that goes on from here. Nothing may wait.
    #[must_use]
    pub fn table(&self) -> Bytes {
        assert!(self.is_idle(), "what waits is nowhere in a copy");
        let mut out = BytesMut::new();
        out.put_u32(self.heard.len() as u32);
        let mut all: Vec<_> = self.heard.iter().collect();
        all.sort_unstable_by_key(|(_, heard)| heard.number);
        for (key, heard) in all {
            put_key(&mut out, key);
            out.put_u32(heard.isn.wrapping_add(1).wrapping_add(heard.said_to as u32));
            let flag = |is: bool, bit| if is { bit } else { 0 };
            out.put_u8(
                flag(heard.opening, OPENING)
                    | flag(heard.refused, REFUSED)
                    | flag(heard.ended, ENDED)
                    | flag(!heard.owed.is_empty(), OWED),
            );
        }
        out.freeze()
    }

    /// The copy here goes on from what `table` was made of.
    ///
    /// # Errors
    /// If the bytes are not what it writes; nothing has changed then.
    pub fn load(&mut self, table: Bytes) -> Result<(), WireError> {
        let mut from = Reader::new(table);
        let count = from.u32()? as usize;
        // Checked before anything is allocated.
        if count > MOST_CONNECTIONS || count * LEAST_BYTES > from.left() {
            return Err(WireError::Invalid("count of connections"));
        }
        let mut heard = Vec::with_capacity(count);
        for _ in 0..count {
            let (key, next, flags) = (take_key(&mut from)?, from.u32()?, from.u8()?);
            if flags & !(OPENING | REFUSED | ENDED | OWED) != 0 {
                return Err(WireError::Invalid("state of a connection"));
            }
            let of_it = Heard {
                opening: flags & OPENING != 0,
                refused: flags & REFUSED != 0,
                ended: flags & ENDED != 0,
                owed: match flags & OWED != 0 {
                    true => vec![true; self.copies],
                    false => Vec::new(),
                },
                // The first input here goes alone.
                ..Heard::since(next.wrapping_sub(1), heard.len() as u64)
            };
            heard.push((key, of_it));
        }
        from.end()?;
        self.heard = heard.into_iter().collect();
        self.count_spare();
        self.beyond = 0;
        self.count_owing();
        // What was read here may not be worked off: the first time waits for that as any other one (invariant 5).
        self.stirred = true;
        Ok(())
    }
}
