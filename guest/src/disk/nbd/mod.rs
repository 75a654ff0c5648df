//! Decides: how a client's NBD bytes become calls on an export, several at a time.
//!
//! Flow: [`handshake`] agrees on the export; [`server`] reads requests, calls the [`Export`], writes the replies.
//! Invariants: **N1** no request touches a byte outside the export; **N2** memory for requests in flight is bounded per
//! connection; **N3** whatever a client sends, the server answers or hangs up, and never panics;
//! **N4** a flush covers every write that was answered before it arrived.
//! Source: proto.md of the NBD project. Not here: what a read or write means to the replica ([`super`]).

pub mod handshake;
pub mod proto;
pub mod server;
#[cfg(test)]
mod tests;

pub use handshake::ExportInfo;
pub use server::{Connection, serve_path};

use bytes::Bytes;
use std::io;

/// A disk as the NBD server sees it. Ranges are inside the disk (N1 is checked by the server).
pub trait Export: Send + Sync {
    /// Name, size, read-only.
    fn info(&self) -> ExportInfo;
    /// Fills `out` from `offset` on.
    ///
    /// # Errors
    /// What the image said.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes `data`; with `fua` it is on stable storage on return.
    ///
    /// # Errors
    /// What the image said.
    fn write(&self, offset: u64, data: Bytes, fua: bool) -> io::Result<()>;
    /// Zeroes a range; `unmap`: space may be given back.
    ///
    /// # Errors
    /// What the image said.
    fn zero(&self, offset: u64, len: u64, unmap: bool, fua: bool) -> io::Result<()>;
    /// Everything answered so far reaches stable storage.
    ///
    /// # Errors
    /// What the image said.
    fn flush(&self) -> io::Result<()>;
    /// Consecutive stretches from `offset` on: (length, holds data). May stop early, but never before the first.
    ///
    /// # Errors
    /// What the image said.
    fn status(&self, offset: u64, len: u64) -> io::Result<Vec<(u64, bool)>>;
}
