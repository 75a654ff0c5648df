//! What it decides: how a VM, or a bare program, ends: on all hosts, by its group's agreement; or, where no group is left to agree, on one host
//! alone.
//!
//! Flow: `dunlin down` at any host -> an *order*, which waits for a leader -> this host leads: its guest is asked to switch itself off, and where
//! that cannot be, `Agreed::Down` is said -> agreed: who leads tells each other host, and the others wait for that word -> each host forgets the VM.
//! Another host leads: whoever asked asks there.
//!
//! Invariants:
//! 1. A host with an order may be elected without a living copy, since a VM that failed or never ran has to end too; all that it does as
//!    leader is to have the end agreed. An order lasts until then: without it the host would give up the lead with the end on its way.
//! 2. Whoever ordered it has an answer: within [`PATIENCE_US`] that nobody has agreed; agreed, when the hosts that can be reached have forgotten
//!    the VM.
//! 3. An end by force concerns one host alone, and is refused while a leader is known.
//! 4. Nobody forgets the VM but by force before its end is agreed. Who led then tells each other host, and is the last to forget: one whose link
//!    did not stand yet has to hear of it too, and no host may hear of it when the next VM of that name is there. The others forget when they
//!    are told, or after [`TOLD_US`].
//! 5. An end that is agreed waits for no sync.
//!
//! Source: ours. Not here: who may lead (`leadership`), how a guest is asked and other hosts are told (`node`), what of a machine remains there.

#[cfg(test)]
mod tests;

use crate::agreed::Life;
use crate::replica::leadership::Part;
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::{Index, ReplicaId, Term};

/// How long an order waits for a leader, and its agreement: an election takes a twentieth of it, on a busy machine a fifth.
pub const PATIENCE_US: u64 = 5_000_000;
/// How long a host waits for who led to tell it of the end.
pub const TOLD_US: u64 = 5_000_000;
/// How long a guest may take to switch itself off.
pub const POWERDOWN_US: u64 = 30_000_000;

/// A person's order.
#[derive(Clone, Copy, Debug)]
struct Order<T> {
    /// The guest is not asked.
    now: bool,
    until_us: u64,
    /// Who is answered.
    asker: T,
}

/// Whether the guest was asked to switch itself off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Guest {
    #[default]
    Unasked,
    UnderWay,
    Asked,
    /// It cannot be asked; whether that was told.
    NotAsked {
        told: bool,
    },
}

/// What a host sees at the end of a turn of its loop.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// Now.
    pub now_us: u64,
    /// The current term.
    pub term: Term,
    /// What the log says.
    pub life: Life,
    /// Another host leads.
    pub leader_elsewhere: Option<ReplicaId>,
    /// This host leads, and what it knows is up to date.
    pub leads: bool,
    /// What it has of the VM.
    pub part: Part,
    /// There is a guest here that can be asked to switch itself off.
    pub has_guest: bool,
}

/// What follows: one thing a turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn<T> {
    /// Nothing now.
    Nothing,
    /// That host leads: these ask there.
    Refers(ReplicaId, Vec<T>),
    /// The guest is asked to switch itself off ([`Shutdown::guest_was_asked`] says what became of it).
    AsksGuest,
    /// It was asked, and these are told so.
    GuestAsked(Vec<T>),
    /// The group is asked to agree ([`Shutdown::said`]); `unasked`: its guest was not, for the first time.
    Says {
        /// That is told once.
        unasked: bool,
    },
}

/// What follows when the end is agreed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AgreedEnd {
    /// This host tells each other one.
    Tells,
    /// It waits to be told.
    Awaits,
    /// It is under way.
    Nothing,
}

/// How far the end is on this host. `T` is who ordered it.
#[derive(Clone, Debug)]
pub struct Shutdown<T> {
    orders: Vec<Order<T>>,
    guest: Guest,
    /// The guest was asked, and is to be gone by then.
    quit_at_us: Option<u64>,
    /// It was not, and the end was proposed in that term.
    ignored_in: Option<Term>,
    /// The guest has switched itself off, and the group was asked to agree that this is the VM's end.
    switched_off: bool,
    said_in: Option<Term>,
    tells: bool,
    /// The end is agreed, and counts as told then.
    told_by_us: Option<u64>,
    forgotten: bool,
    bugs: Bugs,
}

impl<T> Default for Shutdown<T> {
    fn default() -> Self {
        Self {
            orders: Vec::new(),
            guest: Guest::default(),
            quit_at_us: None,
            ignored_in: None,
            switched_off: false,
            said_in: None,
            tells: false,
            told_by_us: None,
            forgotten: false,
            bugs: Bugs::default(),
        }
    }
}

impl<T> Shutdown<T> {
    /// With a fault put back on purpose.
    #[must_use]
    pub fn with_bugs(bugs: Bugs) -> Self {
        Self {
            bugs,
            ..Self::default()
        }
    }

    /// A person orders it; `now`: without asking the guest. What follows is said by this turn, or a later one.
    pub fn order(&mut self, now_us: u64, now: bool, asker: T) {
        self.orders.push(Order {
            now,
            until_us: now_us + PATIENCE_US,
            asker,
        });
    }

    /// Whether it was ordered, and that waits to be carried out.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        !self.orders.is_empty()
    }

    /// Whether this host may lead although it has nothing to serve (invariant 1).
    #[must_use]
    pub fn leads_to_end(&self, witness: bool, life: Life) -> bool {
        !witness && self.is_ordered() && life != Life::Down && !self.bugs.has(Bug::EndNeedsCopy)
    }

    /// What follows now.
    pub fn turn(&mut self, sight: &Sight) -> Turn<T> {
        if self.orders.is_empty() || sight.life == Life::Down {
            return Turn::Nothing;
        }
        if let Some(leader) = sight.leader_elsewhere {
            return Turn::Refers(leader, self.take_orders());
        }
        if !sight.leads {
            return Turn::Nothing;
        }
        let now = self.orders.iter().any(|order| order.now);
        let unasked = match (sight.part, self.guest) {
            // It is being taken over: then it can be asked.
            (Part::Backup, _) if !now => return Turn::Nothing,
            (Part::Primary, guest) if !now && sight.has_guest => match guest {
                Guest::Unasked => {
                    self.guest = Guest::UnderWay;
                    return Turn::AsksGuest;
                }
                Guest::UnderWay => return Turn::Nothing,
                Guest::Asked => {
                    self.quit_at_us = Some(sight.now_us + POWERDOWN_US);
                    self.ignored_in = None;
                    return Turn::GuestAsked(self.take_orders());
                }
                Guest::NotAsked { told } => {
                    self.guest = Guest::NotAsked { told: true };
                    !told
                }
            },
            _ => false,
        };
        match self.said_in == Some(sight.term) {
            true => Turn::Nothing,
            false => Turn::Says { unasked },
        }
    }

    /// The end was proposed in that term.
    pub fn said(&mut self, term: Term) {
        self.said_in = Some(term);
    }

    /// Whether it was ever proposed: it may be agreed yet.
    #[must_use]
    pub fn was_said(&self) -> bool {
        self.said_in.is_some()
    }

    /// Invariant 2: those who have waited long enough, and to whose order nobody has agreed. Once it is agreed they hear of that when the
    /// others were told, which is bounded as well, and not that it came to nothing.
    pub fn overdue(&mut self, now_us: u64, life: Life) -> Vec<T> {
        if life == Life::Down {
            return Vec::new();
        }
        let due = |order: &mut Order<T>| order.until_us <= now_us;
        let late: Vec<T> = self.orders.extract_if(.., due).map(|order| order.asker).collect();
        if self.orders.is_empty() {
            self.asks_anew();
        }
        late
    }

    // The guest.

    /// The guest was asked, or could not be.
    pub fn guest_was_asked(&mut self, asked: bool) {
        if self.guest == Guest::UnderWay {
            self.guest = match asked {
                true => Guest::Asked,
                false => Guest::NotAsked { told: false },
            };
        }
    }

    /// The guest was asked, and has not switched itself off in time: the end is to be proposed, once in each term, since it may be lost with
    /// the old one. Where nobody leads that waits until this host does; whoever ordered it has had an answer long ago.
    #[must_use]
    pub fn guest_ignores(&self, now_us: u64, term: Term) -> bool {
        self.quit_at_us.is_some_and(|at_us| at_us <= now_us) && self.ignored_in != Some(term)
    }

    /// It was proposed in that term; whether that is news.
    pub fn ignored_end_was_said(&mut self, term: Term) -> bool {
        self.ignored_in.replace(term).is_none()
    }

    /// When the guest is to be gone, as long as nothing was proposed.
    #[must_use]
    pub fn quit_at_us(&self) -> Option<u64> {
        self.quit_at_us.filter(|_| self.ignored_in.is_none())
    }

    /// The guest has switched itself off; whether the group was asked to agree that this is the end. Its process ends by itself.
    pub fn guest_left(&mut self, said: bool) {
        self.switched_off = said;
    }

    /// Whether it has, and that is to be agreed.
    #[must_use]
    pub fn has_guest_left(&self) -> bool {
        self.switched_off
    }

    /// The copy here is gone, and with it what was asked of its guest.
    pub fn copy_ended(&mut self) {
        self.quit_at_us = None;
        self.ignored_in = None;
        self.switched_off = false;
    }

    // The agreement.

    /// Invariant 5: where the log is to be taken up if a sync holds it back and the end behind it is agreed: what lies before says nothing any
    /// more. A sync whose guest takes nothing any more would hold it back for good, and the hosts that have ended the VM already would look as
    /// if they were lost. `appended` is the newest entry here that was an end; `is_end`: it still is, since one that was never agreed may have
    /// been replaced.
    #[must_use]
    pub fn skips_to(
        appended: Option<Index>,
        applied: Index,
        committed: Index,
        is_end: impl FnOnce(Index) -> bool,
    ) -> Option<Index> {
        let end = appended.filter(|end| applied < *end && *end <= committed)?;
        is_end(end).then(|| Index(end.0 - 1))
    }

    /// The end is agreed; `leads`: this host led then (invariant 4).
    pub fn agreed(&mut self, now_us: u64, leads: bool) -> AgreedEnd {
        if self.tells || self.forgotten {
            return AgreedEnd::Nothing;
        }
        if leads {
            self.tells = true;
            return AgreedEnd::Tells;
        }
        self.told_by_us.get_or_insert(now_us + TOLD_US);
        AgreedEnd::Awaits
    }

    /// Who led has not said a word: the VM is forgotten all the same.
    #[must_use]
    pub fn is_untold(&self, now_us: u64) -> bool {
        let ends_unagreed = self.bugs.has(Bug::EndsUnagreed) && self.was_said() && !self.tells;
        !self.forgotten && (ends_unagreed || self.told_by_us.is_some_and(|at_us| at_us <= now_us))
    }

    /// When that is.
    #[must_use]
    pub fn told_by_us(&self) -> Option<u64> {
        self.told_by_us.filter(|_| !self.forgotten)
    }

    /// Nothing of the VM is left to do here.
    pub fn forgets(&mut self, life: Life, by_force: bool) {
        assert!(
            life == Life::Down || by_force || self.bugs.has(Bug::EndsUnagreed),
            "invariant 4: a VM is forgotten whose end is not agreed"
        );
        self.forgotten = true;
    }

    /// Whether nothing is.
    #[must_use]
    pub fn is_forgotten(&self) -> bool {
        self.forgotten
    }

    /// Whether whoever ordered it is to be answered: it is agreed, and if it is for this host to tell the others, that is done.
    #[must_use]
    pub fn is_done(&self, life: Life) -> bool {
        life == Life::Down && (!self.tells || self.forgotten)
    }

    /// Invariant 3: this host alone is to forget the VM. Those who wait are answered.
    ///
    /// # Errors
    /// A leader is known.
    pub fn force(&mut self, leader: Option<ReplicaId>) -> Result<Vec<T>, ReplicaId> {
        match leader {
            Some(leader) => Err(leader),
            None => Ok(self.take_orders()),
        }
    }

    /// Those who ordered it. Whoever orders it next asks the guest anew.
    pub fn take_orders(&mut self) -> Vec<T> {
        self.asks_anew();
        self.orders.drain(..).map(|order| order.asker).collect()
    }

    fn asks_anew(&mut self) {
        self.guest = Guest::Unasked;
    }
}
