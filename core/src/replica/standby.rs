//! What it decides: when the part of a copy's host that stays away goes to the VM's standby, without a person, and which host is asked to take it.
//!
//! Flow: the host that serves looks once a second -> [`Standby::look`] -> the owner orders what comes back as a person would (`dunlin move`) ->
//! what came of it is [told](Standby::could_not) -> a copy joins there, as on any host.
//!
//! Invariants:
//! 1. Only the host that serves a VM moves its parts, and only while the VM is not protected and should be.
//! 2. A host that stands still for less than the VM's file says keeps its part; one that is heard in between begins anew.
//! 3. The host that is away is asked as well, in turn with the standby: it may have been given the part by the group and not have taken the VM, of
//!    which a daemon that was started anew knows nothing, and of which the host does not hear by itself. One that has a copy refuses.
//! 4. People read each host's reason once, until it is another one.
//!
//! Source: GAIA, 2.3.1, as far as a copy may be trusted that was not there (docs/replica.md says what that leaves out).
//!
//! Not here: who is the standby afterwards, and how a part moves (node: `config::hosts`, `vm::replacing`).

use std::collections::BTreeMap;

/// What the host that serves sees of the VM's other copy.
#[derive(Clone, Copy, Debug)]
pub struct Sight<'a> {
    /// This host serves the VM.
    pub serves: bool,
    /// The VM is to be protected, and is not.
    pub lacks_a_copy: bool,
    /// The other copy's host, if nothing is heard of it.
    pub away: Option<&'a str>,
    /// Who takes its part.
    pub standby: &'a str,
    /// After so long.
    pub after_us: u64,
}

/// A part is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The host that stays away.
    pub leaves: String,
    /// The host that is asked to take its part.
    pub comes: String,
    /// People have not heard yet that the standby takes this host's part.
    pub announces: bool,
}

/// One VM, as the host that serves it looks after it.
#[derive(Clone, Debug, Default)]
pub struct Standby {
    /// The copy's host that is away, and since when, or since the last try.
    away: Option<(String, u64)>,
    /// Invariant 3: the turn of the host that is away comes next.
    is_its_turn: bool,
    /// The host of whose part people have heard.
    announced: Option<String>,
    /// The last reason why a host could not.
    told: BTreeMap<String, String>,
}

impl Standby {
    /// Invariants 1 to 3.
    pub fn look(&mut self, now_us: u64, sight: &Sight<'_>) -> Option<Move> {
        let away = sight.away.filter(|_| sight.serves && sight.lacks_a_copy);
        let Some(away) = away else {
            // What was told belongs to a time that is over.
            *self = Self::default();
            return None;
        };
        let since_us = match &self.away {
            Some((host, since_us)) if host == away => *since_us,
            _ => {
                self.is_its_turn = false;
                now_us
            }
        };
        self.away = Some((away.to_owned(), since_us));
        if now_us.saturating_sub(since_us) < sight.after_us {
            return None;
        }
        self.away = Some((away.to_owned(), now_us));
        let asks_again = self.is_its_turn;
        self.is_its_turn = !asks_again;
        let announces = !asks_again && self.announced.as_deref() != Some(away);
        if announces {
            self.announced = Some(away.to_owned());
        }
        Some(Move {
            leaves: away.to_owned(),
            comes: if asks_again { away } else { sight.standby }.to_owned(),
            announces,
        })
    }

    /// The host could not take the part. Whether people have still to hear `why` (invariant 4).
    pub fn could_not(&mut self, comes: &str, why: &str) -> bool {
        let before = self.told.insert(comes.to_owned(), why.to_owned());
        before.as_deref() != Some(why)
    }
}

#[cfg(test)]
mod tests;
