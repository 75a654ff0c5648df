//! Copies of the guest's pages, in memory that is used again.
//!
//! A copy is made while the VM stands. Fresh memory would have to be mapped meanwhile, page by page, which takes five times as long as
//! the copying itself.

use bytes::{Bytes, BytesMut};
use dunlin_core::sync::compare::PAGE_BYTES;
use dunlin_core::sync::dirty::PageSet;
use dunlin_guest::memory::Memory;

/// The most that is kept for the next copy: 4,096 pages. A larger copy is rare, and its memory goes back.
const KEPT_BYTES: usize = 16 << 20;

/// Where one session's copies are made, one at a time.
#[derive(Default)]
pub struct Copies {
    kept: BytesMut,
}

impl Copies {
    /// `pages` copied out of the guest, one after the other, in their order.
    pub fn copy(&mut self, memory: &Memory, pages: &PageSet) -> Bytes {
        let mut out = self.room(pages.len() * PAGE_BYTES);
        for (page, to) in pages.pages().zip(out.as_chunks_mut::<PAGE_BYTES>().0) {
            memory.copy_page(u64::from(page), to);
        }
        out.freeze()
    }

    fn room(&mut self, len: usize) -> BytesMut {
        if self.kept.capacity() < len {
            return BytesMut::zeroed(len);
        }
        let mut room = std::mem::take(&mut self.kept);
        // What is there already is overwritten, and not cleared first.
        room.resize(len, 0);
        room
    }

    /// Takes a copy back when nobody reads it any more.
    pub fn take_back(&mut self, copy: Bytes) {
        if copy.len() > KEPT_BYTES {
            return;
        }
        if let Ok(copy) = copy.try_into_mut()
            && copy.capacity() > self.kept.capacity()
        {
            self.kept = copy;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_when_nobody_reads_it_any_more() {
        let mut copies = Copies::default();
        let first = copies.room(8 * PAGE_BYTES).freeze();
        let at = first.as_ptr();
        let part = first.slice(PAGE_BYTES..2 * PAGE_BYTES);
        drop(part);
        copies.take_back(first);
        let smaller = copies.room(2 * PAGE_BYTES).freeze();
        assert_eq!((smaller.as_ptr(), smaller.len()), (at, 2 * PAGE_BYTES));
        copies.take_back(smaller);
        let again = copies.room(8 * PAGE_BYTES).freeze();
        assert_eq!((again.as_ptr(), again.len()), (at, 8 * PAGE_BYTES));

        let read = again.slice(..PAGE_BYTES);
        copies.take_back(again);
        assert_eq!(copies.kept.capacity(), 0, "somebody reads it still");
        drop(read);

        copies.take_back(BytesMut::zeroed(KEPT_BYTES + 1).freeze());
        assert_eq!(copies.kept.capacity(), 0, "more than is kept");
    }
}
