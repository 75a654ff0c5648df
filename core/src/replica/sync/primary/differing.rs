//! Which pages the backup is sent: those that it has otherwise, or all.
//!
//! Not here: the same by hash trees (`descent`).

use super::SessionError;
use crate::sync::compare::{DivergentPage, divergent};
use crate::sync::dirty::PageSet;

/// Which of these pages the backup has otherwise.
pub(super) fn compare(
    pages: &PageSet,
    ours: &[u128],
    theirs: &[u128],
) -> Result<Vec<DivergentPage>, SessionError> {
    divergent(pages, ours, theirs).ok_or(SessionError::OtherPages)
}

/// All of these pages: the backup has no own words to compare.
pub(super) fn whole(pages: &PageSet) -> Vec<DivergentPage> {
    let whole = |page| DivergentPage {
        page,
        blocks: u16::MAX,
    };
    pages.pages().map(whole).collect()
}
