//! Places for requests that take long, and whose they are.
//!
//! **Decides**: who may have one more under way. **Flow**: an order -> [`Shares::take`] -> a [`Place`], which is free again when it is dropped.
//! **Invariants**: 1. nobody but an administrator holds more than a share, so one user does not keep the others out. 2. administrators have
//! places of their own. **Not here**: places of conversations by lines (`lines`), of connections (`daemon::roles`).

use crate::daemon::roles::Who;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Requests that take long, at once: of administrators, and of all others.
pub const WRITES: usize = 16;
/// Of these, what one of the others may have.
pub const WRITES_EACH: usize = 4;

/// All places.
pub struct Shares {
    all: usize,
    each: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    administrators: usize,
    /// By kind and name: a person may be called like a user.
    others: BTreeMap<(&'static str, String), usize>,
}

/// One of them.
#[derive(Debug)]
pub struct Place {
    /// Whose, if not an administrator's.
    whose: Option<(&'static str, String)>,
    taken: Arc<Mutex<Taken>>,
}

/// Why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// All are taken.
    All,
    /// Theirs are.
    Own,
}

impl Shares {
    /// So many for administrators, and so many for all others, who have a share each.
    pub fn new(all: usize, each: usize) -> Self {
        let taken = Arc::default();
        Self { all, each, taken }
    }

    /// One more.
    pub fn take(&self, who: &Who) -> Result<Place, Full> {
        let mut taken = self.taken.lock();
        let whose = (!who.is_administrator()).then(|| (who.kind(), who.name().to_owned()));
        match &whose {
            None if taken.administrators >= self.all => return Err(Full::All),
            None => taken.administrators += 1,
            Some(whose) => {
                let own = taken.others.get(whose).copied().unwrap_or_default();
                if own >= self.each {
                    return Err(Full::Own);
                }
                if taken.others.values().sum::<usize>() >= self.all {
                    return Err(Full::All);
                }
                taken.others.insert(whose.clone(), own + 1);
            }
        }
        let taken = self.taken.clone();
        Ok(Place { whose, taken })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        let Some(whose) = &self.whose else {
            taken.administrators -= 1;
            return;
        };
        if let Some(own) = taken.others.get_mut(whose) {
            *own -= 1;
            if *own == 0 {
                taken.others.remove(whose);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_fabric::keys::person::{Person, PersonRole};

    fn person(name: &str) -> Who {
        Who::person(&Person {
            name: name.into(),
            role: PersonRole::Operator,
            serial: Vec::new(),
        })
    }

    #[test]
    fn nobody_holds_more_than_a_share_and_administrators_have_places_of_their_own() {
        let shares = Shares::new(16, 4);
        let ann: Vec<_> = (0..100).map_while(|_| shares.take(&person("ann")).ok()).collect();
        assert_eq!(ann.len(), 4);
        assert_eq!(shares.take(&person("ann")).err(), Some(Full::Own));
        let others: Vec<_> = (0..100)
            .map_while(|number| shares.take(&person(&format!("p{number}"))).ok())
            .collect();
        assert_eq!(others.len(), 12, "all have 16 together");
        assert_eq!(shares.take(&person("zoe")).err(), Some(Full::All));
        let root: Vec<_> = (0..100).map_while(|_| shares.take(&Who::root()).ok()).collect();
        assert_eq!(root.len(), 16);
        assert_eq!(shares.take(&Who::root()).err(), Some(Full::All));
        drop(ann);
        assert!(shares.take(&person("zoe")).is_ok());
        drop((others, root));
        let taken = shares.taken.lock();
        assert!(
            taken.others.is_empty() && taken.administrators == 0,
            "nothing is left of who has gone"
        );
    }
}
