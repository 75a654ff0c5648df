//! The one cursor that every decoder reads through.

use bytes::{Buf, Bytes};

/// Why bytes could not be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The bytes end before the value does.
    #[error("the message ends too early")]
    Short,
    /// Bytes are left over after the value.
    #[error("the message has bytes left over")]
    Trailing,
    /// A tag or count that this version does not know or allow.
    #[error("the message has an unknown or impossible {0}")]
    Invalid(&'static str),
}

/// Reads big-endian values off the front of `Bytes`, without copying.
pub struct Reader {
    bytes: Bytes,
}

impl Reader {
    /// A reader at the start of `bytes`.
    #[must_use]
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    /// How many bytes are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<Bytes, WireError> {
        if len > self.bytes.len() {
            Err(WireError::Short)
        } else {
            Ok(self.bytes.split_to(len))
        }
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.take(1)?.get_u8())
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16, WireError> {
        Ok(self.take(2)?.get_u16())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, WireError> {
        Ok(self.take(4)?.get_u32())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, WireError> {
        Ok(self.take(8)?.get_u64())
    }

    /// Sixteen bytes.
    pub fn u128(&mut self) -> Result<u128, WireError> {
        Ok(self.take(16)?.get_u128())
    }

    /// All that is left.
    pub fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes)
    }

    /// Ends the reading: nothing may be left.
    pub fn end(self) -> Result<(), WireError> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(WireError::Trailing)
        }
    }
}
