//! What it decides: whether it pays to ask a peer what its image holds, before an extent is copied to it.
//!
//! A host that once had a part in the VM, or was given an image in advance, has most of the disk; a fresh one has nothing. Asking costs
//! the peer a read and a hash of the extent, sending costs the network the extent itself.
//! Invariant: a peer that was unlike for long is still asked now and then, so that a disk whose first part only is unlike is not sent
//! whole.
//! Not here: the question and its answer (`guest::disk::primary`).

/// So many answers in a row that nothing is alike, and the peer is asked seldom.
const PATIENCE: u32 = 64;
/// How seldom: one extent in so many.
const SELDOM: u32 = 16;

/// What a peer's answers so far say.
#[derive(Clone, Debug)]
pub struct Likeness {
    /// Unlike answers that are still borne.
    patience: u32,
    /// Extents that were sent without a question since the last one.
    unasked: u32,
}

impl Default for Likeness {
    fn default() -> Self {
        Self {
            patience: PATIENCE,
            unasked: 0,
        }
    }
}

impl Likeness {
    /// Says whether to ask for the next extent.
    pub fn asks(&mut self) -> bool {
        if self.patience > 0 || self.unasked + 1 >= SELDOM {
            self.unasked = 0;
            return true;
        }
        self.unasked += 1;
        false
    }

    /// What the peer said of one.
    pub fn answered(&mut self, alike: bool) {
        self.patience = if alike {
            PATIENCE
        } else {
            self.patience.saturating_sub(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a disk: says of how many extents the peer was asked.
    fn asked(extents: impl Iterator<Item = bool>) -> usize {
        let mut likeness = Likeness::default();
        let asked = extents.filter(|alike| {
            let asks = likeness.asks();
            if asks {
                likeness.answered(*alike);
            }
            asks
        });
        asked.count()
    }

    #[test]
    fn a_peer_that_is_alike_now_and_then_is_asked_each_time() {
        assert_eq!(asked((0..10_000).map(|extent| extent % 50 == 0)), 10_000);
    }

    #[test]
    fn an_empty_peer_is_asked_seldom() {
        let asked = asked((0..10_000).map(|_| false));
        assert_eq!(
            asked,
            PATIENCE as usize + (10_000 - PATIENCE as usize) / SELDOM as usize
        );
    }

    #[test]
    fn a_disk_of_which_only_the_end_is_alike_is_not_sent_whole() {
        let alike = 1000;
        let asked = asked((0..2 * alike).map(|extent| extent >= alike));
        let least = PATIENCE + (alike as u32 - PATIENCE) / SELDOM + alike as u32 - SELDOM;
        assert!(asked >= least as usize, "{asked} of {least}");
    }
}
