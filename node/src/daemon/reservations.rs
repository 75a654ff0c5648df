//! Names under which a VM is being started: on each host one call has the name, until it has started the VM or gives it back.
//!
//! Flow: `up` asks each host (`Prepare`), which reserves the name -> `Install` needs the reservation -> the VM has the name. A call
//! that fails half-way gives back what it has (`Undo`).
//!
//! Invariants:
//! 1. A name is reserved for one call at a time.
//! 2. A call undoes only what it made: it says by which ticket.
//! 3. A reservation whose call says nothing more runs out.
//!
//! Not here: the VMs that run (`daemon`), what is kept of them (`store`).

use dunlin_api::Ticket;
use dunlin_fabric::keys::{self, KeyError};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longer than a call may take to ask every host: each has a minute to answer.
const KEPT: Duration = Duration::from_secs(240);

/// There is no ticket.
#[derive(Debug, thiserror::Error)]
#[error("random numbers: {0}")]
pub struct TicketError(#[source] KeyError);

/// One that no other call has.
pub fn draw() -> Result<Ticket, TicketError> {
    keys::random()
        .map(|bytes| Ticket(u64::from_be_bytes(bytes)))
        .map_err(TicketError)
}

struct Entry {
    ticket: Ticket,
    until: Instant,
    started: bool,
}

/// A host's reservations.
#[derive(Default)]
pub struct Reservations {
    names: BTreeMap<String, Entry>,
}

impl Reservations {
    /// Keeps the name for this call; whether that was possible.
    pub fn reserve(&mut self, vm: &str, ticket: Ticket, now: Instant) -> bool {
        self.names.retain(|_, entry| entry.until > now);
        let taken = self
            .names
            .get(vm)
            .is_some_and(|entry| !entry.started && entry.ticket != ticket);
        if !taken {
            let entry = Entry {
                ticket,
                until: now + KEPT,
                started: false,
            };
            self.names.insert(vm.to_owned(), entry);
        }
        !taken
    }

    /// Whether the name is still this call's, which needs it a little longer.
    pub fn renew(&mut self, vm: &str, ticket: Ticket, now: Instant) -> bool {
        let entry = self.names.get_mut(vm);
        let own = entry.filter(|entry| entry.ticket == ticket && !entry.started && entry.until > now);
        own.map(|entry| entry.until = now + KEPT).is_some()
    }

    /// The VM runs under its name now; the call that began it may still take it back. False: it has done so already, while the VM was being started.
    #[must_use]
    pub fn started(&mut self, vm: &str, ticket: Ticket) -> bool {
        let entry = self.names.get_mut(vm).filter(|entry| entry.ticket == ticket);
        entry.map(|entry| entry.started = true).is_some()
    }

    /// The VM of that name has ended: a call that has not started it here does not start it any more.
    pub fn cancel(&mut self, vm: &str) {
        self.names.retain(|name, entry| name != vm || entry.started);
    }

    /// This call is done with the name. Whether it has started the VM here.
    pub fn give_back(&mut self, vm: &str, ticket: Ticket) -> bool {
        match self.names.get(vm) {
            Some(entry) if entry.ticket == ticket => self.names.remove(vm).is_some_and(|entry| entry.started),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Ticket = Ticket(1);
    const TWO: Ticket = Ticket(2);

    #[test]
    fn a_name_is_one_calls_until_it_is_given_back_or_has_run_out() {
        let (mut names, now) = (Reservations::default(), Instant::now());
        assert!(names.reserve("v", ONE, now));
        assert!(!names.reserve("v", TWO, now));
        assert!(names.reserve("w", TWO, now), "another name is free");
        assert!(!names.give_back("v", TWO), "not its own");
        assert!(!names.reserve("v", TWO, now), "nor was it given back");
        assert!(!names.give_back("v", ONE), "nothing was started");
        assert!(names.reserve("v", TWO, now));
        let later = now + KEPT;
        assert!(!names.renew("v", TWO, later), "it has run out");
        assert!(names.reserve("v", ONE, later));
    }

    /// `dunlin down` beside an `up` or a `move` that has not come here yet.
    #[test]
    fn a_vm_that_has_ended_is_not_started_by_a_call_that_was_under_way() {
        let (mut names, now) = (Reservations::default(), Instant::now());
        assert!(names.reserve("v", ONE, now) && names.reserve("w", ONE, now));
        names.cancel("v");
        assert!(!names.renew("v", ONE, now), "it is ended");
        assert!(names.renew("w", ONE, now), "another one is not");
        assert!(!names.give_back("v", ONE), "nothing was started");
        assert!(names.reserve("v", TWO, now), "the name is free");
        // One that was started is for its call to take back, if it comes to that.
        assert!(names.started("v", TWO));
        names.cancel("v");
        assert!(names.give_back("v", TWO));
    }

    #[test]
    fn only_the_call_that_started_a_vm_takes_it_back() {
        let (mut names, now) = (Reservations::default(), Instant::now());
        assert!(
            !names.renew("v", ONE, now),
            "without a reservation nothing starts"
        );
        assert!(names.reserve("v", ONE, now) && names.renew("v", ONE, now));
        assert!(names.started("v", ONE));
        assert!(!names.renew("v", ONE, now), "it is started once");
        assert!(!names.give_back("v", TWO));
        assert!(names.give_back("v", ONE));
        assert!(!names.give_back("v", ONE), "once");
        assert!(names.reserve("v", ONE, now) && names.renew("v", ONE, now));
        assert!(!names.give_back("v", ONE), "nothing was started yet");
        assert!(!names.started("v", ONE), "it was taken back meanwhile");
        assert!(names.reserve("v", ONE, now) && names.renew("v", ONE, now));
        names.cancel("v");
        assert!(
            !names.started("v", ONE),
            "its VM ended while it was being started"
        );
    }
}
