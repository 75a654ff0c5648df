//! Orders that change who has a part in what: one at a time for each VM, program or log.
//!
//! **Decides**: who waits for whom. A VM's `down` waits for its own `up` or move, and for no other VM's: that may ask a host that does not answer for a
//! minute, and be tried again and again (`standby`). **Flow**: an order -> [`Changes::of`] its name -> held until it is carried out.
//! **Invariants**: 1. of two orders for one name the second begins when the first has ended. 2. (memory) nothing is kept of a name that nobody changes.
//! **Not here**: orders that are given on several hosts at once (`reservations`).

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// What is being changed, by name.
#[derive(Default)]
pub struct Changes(Mutex<BTreeMap<String, Weak<Mutex<()>>>>);

impl Changes {
    /// Whoever changes what has this name locks what comes back.
    #[must_use]
    pub fn of(&self, name: &str) -> Arc<Mutex<()>> {
        let mut all = self.0.lock();
        all.retain(|_, one| one.strong_count() > 0);
        if let Some(one) = all.get(name).and_then(Weak::upgrade) {
            return one;
        }
        let one = Arc::new(Mutex::new(()));
        all.insert(name.to_owned(), Arc::downgrade(&one));
        one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_changes_one_vm_keeps_nobody_who_changes_another() {
        let changes = Changes::default();
        let (shop, mail) = (changes.of("shop"), changes.of("mail"));
        let slow = shop.lock();
        assert!(mail.try_lock().is_some());
        assert!(changes.of("shop").try_lock().is_none(), "invariant 1");
        drop(slow);
        assert!(changes.of("shop").try_lock().is_some());
        drop((shop, mail));
        drop(changes.of("other"));
        assert_eq!(changes.0.lock().len(), 1, "invariant 2");
    }
}
