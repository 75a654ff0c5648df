//! What it decides: how contents of any size become messages, and when all of them are here.
//!
//! How many pages are dirty is the guest's choice, how many frames it sends as well, and how large its devices' state is
//! QEMU's. So their senders cut them here, and [`super::encode`] never has to refuse them.
//!
//! Invariants:
//! 1. No part holds more than [`PART_BYTES`], or one frame.
//! 2. The parts of a set of pages ascend, and each but the last holds some: whoever gathers them hears the end, or an error,
//!    after as many as the guest has pages.

use super::RUN_BYTES;
use crate::agreed::Frame;
use crate::sync::dirty::PageSet;
use bytes::Bytes;

/// The most content in one part: small enough that a reader holds a few of them at once without a thought.
pub const PART_BYTES: usize = 1 << 20;

/// Parts of a set of pages, in order, each with whether more follow; an empty set is one part.
pub fn pages(set: &PageSet) -> impl Iterator<Item = (PageSet, bool)> + '_ {
    let mut parts = set.cut(PART_BYTES / RUN_BYTES).peekable();
    std::iter::from_fn(move || {
        let part = parts.next()?;
        Some((part, parts.peek().is_some()))
    })
}

/// All but the last part of `bytes`, and the last.
#[must_use]
pub fn bytes(mut bytes: Bytes) -> (Vec<Bytes>, Bytes) {
    let mut first = Vec::new();
    while bytes.len() > PART_BYTES {
        first.push(bytes.split_to(PART_BYTES));
    }
    (first, bytes)
}

/// `hashes` in order, cut into lists that fit messages.
pub fn hashes(hashes: &[u128]) -> impl Iterator<Item = Vec<u128>> + '_ {
    hashes
        .chunks(PART_BYTES / size_of::<u128>())
        .map(<[u128]>::to_vec)
}

/// `frames` in order, cut into lists that fit messages.
pub fn frames(frames: Vec<Frame>) -> impl Iterator<Item = Vec<Frame>> {
    let mut left = frames.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut part = vec![left.next()?];
        let mut bytes = part[0].bytes.len();
        while let Some(frame) = left.next_if(|frame| bytes + frame.bytes.len() <= PART_BYTES) {
            bytes += frame.bytes.len();
            part.push(frame);
        }
        Some(part)
    })
}

/// What is wrong with a part of a set of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadPart {
    /// A page that the guest does not have.
    #[error("the other host names pages outside the guest's memory")]
    Outside,
    /// It does not follow the part before.
    #[error("the other host's list of pages is out of order")]
    Order,
}

/// A set of pages whose parts are on their way here.
#[derive(Debug)]
pub struct Gathering {
    guest_pages: u64,
    so_far: PageSet,
}

impl Gathering {
    /// Of a guest of so many pages; nothing has come.
    #[must_use]
    pub fn new(guest_pages: u64) -> Self {
        Self {
            guest_pages,
            so_far: PageSet::default(),
        }
    }

    /// Takes the next part; all of the set after the last one.
    ///
    /// # Errors
    /// If it cannot belong to this guest or to the parts before (invariant 2).
    pub fn add(&mut self, part: PageSet, more: bool) -> Result<Option<PageSet>, BadPart> {
        if u64::from(part.end()) > self.guest_pages {
            return Err(BadPart::Outside);
        }
        if more && part.is_empty() || !self.so_far.append(part) {
            return Err(BadPart::Order);
        }
        Ok((!more).then(|| std::mem::take(&mut self.so_far)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MOST_BYTES, SyncMessage, encode};
    use super::*;
    use crate::units::Epoch;
    use bytes::BytesMut;

    /// Every other page of a guest of 64 GiB: the most runs that it can have.
    const GUEST_PAGES: u64 = 16 << 20;

    #[test]
    fn every_other_page_of_a_large_guest_is_told_in_messages_that_fit() {
        let set = PageSet::from_runs((0..GUEST_PAGES as u32 / 2).map(|run| (2 * run, 1)));
        assert!(
            set.runs().count() > MOST_BYTES / RUN_BYTES,
            "too many for one message"
        );
        let mut gathering = Gathering::new(GUEST_PAGES);
        let mut whole = None;
        for (pages, more) in pages(&set) {
            assert_eq!(whole, None, "nothing follows the last part");
            let epoch = Epoch(1);
            let message = SyncMessage::Dirty { epoch, pages, more };
            let mut out = BytesMut::new();
            encode(&message, &mut out).expect("it was cut");
            let SyncMessage::Dirty { pages, more, .. } =
                super::super::decode(out.freeze().slice(4..)).unwrap()
            else {
                panic!("another message");
            };
            whole = gathering.add(pages, more).expect("a part in its place");
        }
        assert!(whole == Some(set));
    }

    #[test]
    fn an_empty_set_is_one_message() {
        let parts: Vec<_> = pages(&PageSet::default()).collect();
        assert_eq!(parts, [(PageSet::default(), false)]);
        let whole = Gathering::new(1).add(PageSet::default(), false);
        assert_eq!(whole, Ok(Some(PageSet::default())));
    }

    #[test]
    fn a_list_of_pages_that_never_ends_is_refused() {
        let part = |run| PageSet::from_runs([run]);
        let mut gathering = Gathering::new(10);
        assert_eq!(gathering.add(part((1, 2)), true), Ok(None));
        assert_eq!(
            gathering.add(part((1, 2)), true),
            Err(BadPart::Order),
            "it came before"
        );
        assert_eq!(
            gathering.add(PageSet::default(), true),
            Err(BadPart::Order),
            "nothing new"
        );
        assert_eq!(gathering.add(part((9, 2)), true), Err(BadPart::Outside));
        assert_eq!(
            gathering.add(part((9, 1)), false),
            Ok(Some(PageSet::from_runs([(1, 2), (9, 1)])))
        );
    }

    #[test]
    fn frames_and_states_of_any_size_are_cut() {
        let frame = |len: usize| Frame {
            nic: 0,
            bytes: vec![7; len].into(),
        };
        let all: Vec<Frame> = (0..600).map(|n| frame(n * 100)).collect();
        let parts: Vec<_> = frames(all.clone()).collect();
        assert!(parts.len() > 10 && parts.iter().all(|part| !part.is_empty()));
        for part in &parts {
            assert!(part.iter().map(|frame| frame.bytes.len()).sum::<usize>() <= PART_BYTES);
        }
        assert_eq!(parts.concat(), all);
        assert_eq!(frames(vec![]).count(), 0);

        let state = Bytes::from(vec![3; 2 * PART_BYTES + 1]);
        let (first, last) = bytes(state.clone());
        assert_eq!((first.len(), last.len()), (2, 1));
        assert_eq!([first.concat(), last.to_vec()].concat(), state);
        assert_eq!(bytes(Bytes::new()), (vec![], Bytes::new()));
    }
}
