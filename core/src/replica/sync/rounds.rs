//! What it decides: what a sync has looked at so far, where it has several rounds.
//!
//! A sync has rounds: any number while the VMs run (pre-copy), and a last one that they stand still for. Each round takes the pages
//! written since the one before (by either VM, where both run), and what it sends of a page takes the place of what an earlier
//! one sent. So a page that nobody writes any more has left the primary before the stop.
//!
//! Source: Lu and Chiueh, "Speculative memory state transfer for active-active fault tolerance" (CCGrid'12). Not here: the
//! rounds themselves (`primary`, `backup`), when there is one (the VM loop).

use crate::sync::compare::DivergentPage;
use crate::sync::dirty::PageSet;

/// The rounds of one sync so far.
#[derive(Debug, Default)]
pub struct Rounds {
    /// Pages that the primary, the backup, either has written.
    ours: PageSet,
    theirs: PageSet,
    either: PageSet,
    /// Of these, what the backup has to take over.
    differing: PageSet,
    bytes: u64,
}

impl Rounds {
    /// One more round: who wrote what since the last, what of that differs, and how many bytes were sent for it.
    pub fn add(&mut self, ours: &PageSet, theirs: &PageSet, differing: &[DivergentPage], bytes: u64) {
        let round = ours.union(theirs);
        let differing = PageSet::from_runs(differing.iter().map(|page| (page.page, 1)));
        self.differing = self.differing.minus(&round).union(&differing);
        self.ours = self.ours.union(ours);
        self.theirs = self.theirs.union(theirs);
        self.either = self.either.union(&round);
        self.bytes += bytes;
    }

    /// How many pages the primary has written, the backup, either, and how many of them differ.
    #[must_use]
    pub fn pages(&self) -> [u64; 4] {
        [&self.ours, &self.theirs, &self.either, &self.differing].map(|pages| pages.len() as u64)
    }

    /// What was sent, with what was sent in vain.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(pages: &[u32]) -> PageSet {
        PageSet::from_runs(pages.iter().map(|&page| (page, 1)))
    }

    #[test]
    fn a_later_round_takes_the_place_of_an_earlier_one() {
        let differs = |page| DivergentPage { page, blocks: 1 };
        let mut rounds = Rounds::default();
        rounds.add(&pages(&[1, 2]), &pages(&[2, 3]), &[differs(1), differs(2)], 512);
        // The backup has written page 1 again, and now it is the same on both.
        rounds.add(&pages(&[]), &pages(&[1]), &[], 0);
        assert_eq!(rounds.pages(), [2, 3, 3, 1]);
        assert_eq!(rounds.bytes(), 512);
    }
}
