//! What it decides: nothing. A list from which any element can be taken, or moved to the end, in constant time.
//!
//! Flow: under the translation's table (which connection was used longest ago) and under what a backup keeps (in the
//! order in which it was said).
//!
//! Invariant:
//! 1. `first` ... `next` ... visits exactly the elements that are in, each once, the oldest first.
//!
//! Source: the usual doubly linked list, with indices in place of pointers. Not here: look-up by a key.

const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Slot<T> {
    before: usize,
    after: usize,
    /// Nothing: the slot is free, and `after` is the next free one.
    item: Option<T>,
}

/// A doubly linked list in one vector. An id stays good until its element is removed.
#[derive(Debug)]
pub(super) struct List<T> {
    slots: Vec<Slot<T>>,
    first: usize,
    last: usize,
    free: usize,
    len: usize,
}

impl<T> List<T> {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            first: NONE,
            last: NONE,
            free: NONE,
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_back(&mut self, item: T) -> usize {
        let slot = Slot {
            before: NONE,
            after: NONE,
            item: Some(item),
        };
        let id = if self.free == NONE {
            self.slots.push(slot);
            self.slots.len() - 1
        } else {
            let id = self.free;
            self.free = self.slots[id].after;
            self.slots[id] = slot;
            id
        };
        self.link_last(id);
        self.len += 1;
        id
    }

    pub(super) fn first(&self) -> Option<usize> {
        (self.first != NONE).then_some(self.first)
    }

    pub(super) fn get(&self, id: usize) -> Option<&T> {
        self.slots.get(id)?.item.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: usize) -> Option<&mut T> {
        self.slots.get_mut(id)?.item.as_mut()
    }

    pub(super) fn remove(&mut self, id: usize) -> Option<T> {
        let item = self.slots.get_mut(id)?.item.take()?;
        self.unlink(id);
        self.slots[id].after = self.free;
        self.free = id;
        self.len -= 1;
        Some(item)
    }

    pub(super) fn move_to_back(&mut self, id: usize) {
        if id != self.last && self.get(id).is_some() {
            self.unlink(id);
            self.link_last(id);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        let mut at = self.first;
        std::iter::from_fn(move || {
            let slot = self.slots.get(at)?;
            at = slot.after;
            slot.item.as_ref()
        })
    }

    /// Changes each element; in no order that means anything.
    pub(super) fn for_each(&mut self, change: impl FnMut(&mut T)) {
        self.slots
            .iter_mut()
            .filter_map(|slot| slot.item.as_mut())
            .for_each(change);
    }

    fn link_last(&mut self, id: usize) {
        (self.slots[id].before, self.slots[id].after) = (self.last, NONE);
        if self.last == NONE {
            self.first = id;
        } else {
            self.slots[self.last].after = id;
        }
        self.last = id;
    }

    fn unlink(&mut self, id: usize) {
        let (before, after) = (self.slots[id].before, self.slots[id].after);
        if before == NONE {
            self.first = after;
        } else {
            self.slots[before].after = after;
        }
        if after == NONE {
            self.last = before;
        } else {
            self.slots[after].before = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Invariant 1, against a vector that does the same slowly.
        #[test]
        fn it_is_a_list(steps in prop::collection::vec((0_u8..4, any::<prop::sample::Index>()), 0..200)) {
            let (mut list, mut model): (_, Vec<(usize, usize)>) = (List::new(), Vec::new());
            for (n, (step, which)) in steps.into_iter().enumerate() {
                if step < 2 || model.is_empty() {
                    model.push((list.push_back(n), n));
                } else {
                    let (id, item) = model.remove(which.index(model.len()));
                    if step == 2 {
                        prop_assert_eq!(list.remove(id), Some(item));
                        prop_assert_eq!(list.remove(id), None);
                    } else {
                        list.move_to_back(id);
                        model.push((id, item));
                    }
                }
                prop_assert_eq!(list.len(), model.len());
                prop_assert_eq!(list.first(), model.first().map(|(id, _)| *id));
                prop_assert!(list.iter().eq(model.iter().map(|(_, item)| item)));
            }
        }
    }
}
