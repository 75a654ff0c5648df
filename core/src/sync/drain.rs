//! What it decides: whether the VM has taken what was sent to its cards, or will not.
//!
//! Flow: a look at the cards' sockets, on the primary before it stops the VM and on a backup before it does -> [`Drain::look`] ->
//! [`Drain::is_over`] starts the sync.
//!
//! Invariants:
//! 1. A card that takes nothing for [`Wait::CardTakes`] is *deaf*: nobody waits for it until it has taken something.
//! 2. No sync waits longer than [`Wait::Drain`] for all cards together.
//!
//! A guest never takes what comes to a card that it has not set up, and QEMU stops reading that card's socket. What is left
//! in a socket when a sync begins reaches the VM after it: to one VM a frame is late then, to the other it may come twice or
//! not at all. All of that happens on any wire; what the two VMs say of it is compared, or covered by the next sync.
//!
//! Not here: how many bytes a socket holds (guest's frame ports), what a queue may hold.

use crate::waits::Wait;

/// The cards of one VM, as they were seen last.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    cards: Vec<Card>,
    /// Since when a sync waits for them.
    began_us: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Card {
    in_flight: usize,
    /// Since when it holds something and has taken nothing.
    still_since_us: Option<u64>,
}

impl Card {
    fn is_deaf(self, now_us: u64) -> bool {
        let still = |since_us| now_us.saturating_sub(since_us) >= Wait::CardTakes.bound_us();
        self.still_since_us.is_some_and(still)
    }
}

impl Drain {
    /// So many bytes are on their way to each card.
    pub fn look(&mut self, now_us: u64, in_flight: impl Iterator<Item = usize>) {
        let mut count = 0;
        for (number, bytes) in in_flight.enumerate() {
            count = number + 1;
            if self.cards.len() < count {
                self.cards.push(Card::default());
            }
            let card = &mut self.cards[number];
            let took = bytes < card.in_flight;
            card.still_since_us = match (bytes, took) {
                (0, _) => None,
                (_, true) => Some(now_us),
                (_, false) => card.still_since_us.or(Some(now_us)),
            };
            card.in_flight = bytes;
        }
        self.cards.truncate(count);
    }

    /// Whether every card has taken what was sent to it, but those that take nothing (invariant 1).
    #[must_use]
    pub fn is_settled(&self, now_us: u64) -> bool {
        let settled = |card: &Card| card.in_flight == 0 || card.is_deaf(now_us);
        self.cards.iter().all(settled)
    }

    /// A sync waits for the cards from now on.
    pub fn begin(&mut self, now_us: u64) {
        self.began_us = Some(now_us);
    }

    /// Whether the sync may go on. If so it no longer waits.
    pub fn is_over(&mut self, now_us: u64) -> bool {
        let began_us = *self.began_us.get_or_insert(now_us);
        let over = self.is_settled(now_us) || now_us.saturating_sub(began_us) >= Wait::Drain.bound_us();
        if over {
            self.began_us = None;
        }
        over
    }

    /// The cards that take nothing.
    pub fn deaf(&self, now_us: u64) -> impl Iterator<Item = usize> {
        let cards = self.cards.iter().enumerate();
        cards.filter_map(move |(number, card)| card.is_deaf(now_us).then_some(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD_US: u64 = Wait::CardTakes.bound_us();
    const ALL_US: u64 = Wait::Drain.bound_us();

    fn look(drain: &mut Drain, now_us: u64, in_flight: &[usize]) {
        drain.look(now_us, in_flight.iter().copied());
    }

    #[test]
    fn a_card_that_takes_what_it_gets_is_waited_for() {
        let mut drain = Drain::default();
        drain.begin(0);
        look(&mut drain, 0, &[300]);
        assert!(!drain.is_over(0));
        look(&mut drain, CARD_US - 1, &[200]);
        look(&mut drain, CARD_US + 1, &[200]);
        assert!(!drain.is_over(CARD_US + 1), "it has taken some");
        look(&mut drain, CARD_US + 2, &[0]);
        assert!(drain.is_over(CARD_US + 2));
    }

    #[test]
    fn invariant_1_a_card_that_takes_nothing_holds_up_one_sync_for_a_moment_and_no_other() {
        let mut drain = Drain::default();
        drain.begin(0);
        look(&mut drain, 0, &[0, 50]);
        assert!(!drain.is_over(0));
        look(&mut drain, CARD_US, &[0, 50]);
        assert!(drain.is_over(CARD_US));
        assert_eq!(drain.deaf(CARD_US).collect::<Vec<_>>(), [1]);
        // More comes for it, and it takes nothing.
        look(&mut drain, 5 * CARD_US, &[0, 90]);
        drain.begin(5 * CARD_US);
        assert!(drain.is_over(5 * CARD_US));
        // The guest sets it up: from now on it counts.
        look(&mut drain, 6 * CARD_US, &[0, 80]);
        assert!(!drain.is_settled(6 * CARD_US));
        assert_eq!(drain.deaf(6 * CARD_US).count(), 0);
    }

    #[test]
    fn a_deaf_card_does_not_excuse_another() {
        let mut drain = Drain::default();
        look(&mut drain, 0, &[0, 50]);
        look(&mut drain, CARD_US, &[10, 50]);
        assert!(!drain.is_settled(CARD_US));
    }

    #[test]
    fn invariant_2_a_card_that_takes_little_by_little_is_not_waited_for_longer_than_a_sync_may() {
        let mut drain = Drain::default();
        drain.begin(0);
        let mut now_us = 0;
        while now_us < ALL_US {
            look(&mut drain, now_us, &[usize::MAX - now_us as usize]);
            assert!(!drain.is_over(now_us));
            now_us += CARD_US / 2;
        }
        look(&mut drain, now_us, &[1]);
        assert!(drain.is_over(now_us));
    }

    #[test]
    fn a_vm_without_cards_has_nothing_to_take() {
        let mut drain = Drain::default();
        look(&mut drain, 0, &[]);
        assert!(drain.is_over(0));
    }
}
