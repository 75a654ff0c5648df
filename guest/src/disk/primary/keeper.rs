//! The thread that keeps the dirty map beside a link: it clears it, and names the pair.
//!
//! Decides: when what the peer has committed leaves the map (P5 of [`super`]). Flow: a commit -> [`Orders`] -> [`Primary::keep_map`]
//! -> a flush of the image -> the map.
//! Invariants: an order of each kind waits at most, however long a flush hangs: each stands for all that were given before it.
//! Not here: the map's file ([`crate::disk::dirty_map`]).

use super::*;
use parking_lot::Condvar;

/// What is asked for.
pub(super) enum Keep {
    Clear,
    /// The first commit from the join's mark on: what was copied is on the peer's image for good.
    Pair(Epoch, [u8; 16]),
}

/// What was asked for, and is not begun.
#[derive(Default)]
pub(super) struct Orders {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    clear: bool,
    /// Once for a link.
    pair: Option<(Epoch, [u8; 16])>,
    ended: bool,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock()
    }

    /// Never waits.
    pub(super) fn give(&self, keep: Keep) {
        let mut waiting = self.lock();
        match keep {
            Keep::Clear => waiting.clear = true,
            Keep::Pair(epoch, pair) => waiting.pair = Some((epoch, pair)),
        }
        self.changed.notify_one();
    }

    /// No more will be given; what waits is still done.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_one();
    }

    /// Waits for the next one; nothing after the end.
    fn next(&self) -> Option<Keep> {
        let mut waiting = self.lock();
        self.changed.wait_while(&mut waiting, |waiting| {
            !waiting.clear && waiting.pair.is_none() && !waiting.ended
        });
        if let Some((epoch, pair)) = waiting.pair.take() {
            return Some(Keep::Pair(epoch, pair));
        }
        std::mem::take(&mut waiting.clear).then_some(Keep::Clear)
    }
}

impl Primary {
    /// A thread of its own, because a flush may take long and what the peer says must be heard meanwhile.
    pub(super) fn keep_map(&self, link: &Arc<Link>, orders: &Orders) {
        while let Some(order) = orders.next() {
            // Not for the map alone: a flush keeps the image in use, and this host may be about to follow.
            if link.closed().is_some() && matches!(order, Keep::Clear) {
                continue;
            }
            let kept = self.clear_map();
            let kept = kept.and_then(|()| match order {
                Keep::Pair(_, pair) if !self.has_another(link) => self.shared.paired(pair),
                _ => Ok(()),
            });
            if let Err(error) = kept {
                self.shared.image_failed("keeping the dirty map", &error);
            }
            if let Keep::Pair(epoch, _) = order {
                self.shared.event(DiskEvent::Committed { epoch });
            }
        }
    }

    /// The pair that this link's commit made is history.
    fn has_another(&self, link: &Arc<Link>) -> bool {
        self.link().is_some_and(|current| !Arc::ptr_eq(&current, link))
    }

    /// P5. What the peer has committed before the flush begins, and what nobody writes until it has ended, is on both images
    /// for good.
    fn clear_map(&self) -> io::Result<()> {
        let _alone = self.clearing.lock();
        let done = {
            let mut state = self.lock();
            state.written_since = Some(ExtentSet::default());
            self.shared.dirty.all().minus(&state.extents.needed())
        };
        let flushed = self.shared.image.flush_ours();
        {
            // Under the lock, so that no write is noted between looking and clearing. That is memory only (M4): the VM's loop
            // comes for this lock too.
            let mut state = self.lock();
            let written = state.written_since.take().unwrap_or_default();
            // Whether this one failed, or one of the guest's did, which then was told what this one was not.
            state.doubt(&self.shared);
            flushed?;
            self.shared
                .dirty
                .clear(&done.minus(&written).minus(&state.doubtful));
        }
        self.shared.dirty.save()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_a_flush_hangs_orders_do_not_pile_up() {
        let orders = Orders::default();
        for _ in 0..1000 {
            orders.give(Keep::Clear);
        }
        orders.give(Keep::Pair(Epoch(1), [1; 16]));
        orders.give(Keep::Clear);
        orders.end();
        assert!(matches!(orders.next(), Some(Keep::Pair(Epoch(1), _))));
        assert!(matches!(orders.next(), Some(Keep::Clear)));
        assert!(orders.next().is_none());
    }
}
