//! What the loop of a bare program waits for: its events, the group's links, the copy's card and keeper, the network, the backup's words, and the
//! next deadline.
//!
//! Each turn of the loop costs many system calls, and most of them as much for ten frames as for one. So where more is about to come it is waited
//! for: as a card does that tells its host of several frames by one interrupt.
//!
//! * **Decides:** when what is readable is worth a turn.
//! * **Invariants:** 1. what is put off is put off for [`DOOR_US`] or [`CARD_US`] at most; 2. the only input under way, and its answer, are never
//!   put off.
//!
//! Not here: what follows from any of it (`step`).

use super::state::{ProgramLoop, Ready, Running};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;

/// The longest sleep: a bound on what a forgotten deadline could cost.
const LONGEST_SLEEP_US: u64 = 100_000;
/// While a copy begins it is looked at so often.
const BEGINNING_LOOK_US: u64 = 5_000;
/// The longest that frames of the network are left alone. With more than that to the other host and back, several entries are under way.
const DOOR_US: u64 = 300;
/// With fewer inputs under way they are not: those of a few clients go at once.
const MANY: usize = 4;
/// The longest that answers wait for others.
const CARD_US: u64 = 250;
/// What a quick program takes for one input of several, with what the kernel does for it.
const QUICK_US: u64 = 10;

impl Running {
    /// Several inputs are with the program, and it has answered a part of them at most: the loop is to be woken by the last answer, not by each.
    pub(super) fn waits_for_several(&mut self, now_us: u64) {
        self.card_at_us = now_us + answers_wait_us(self.gate.owed());
    }
}

/// How long answers wait for others, of so many that the program owes.
fn answers_wait_us(owed: usize) -> u64 {
    (owed.saturating_sub(1) as u64 * QUICK_US).min(CARD_US)
}

/// Until when frames of the network are left alone with so many inputs under way, if they are: until that much after the last were taken.
fn frames_wait(now_us: u64, taken_us: u64, under_way: usize) -> Option<u64> {
    let until_us = taken_us + DOOR_US;
    (under_way >= MANY && now_us < until_us).then_some(until_us)
}

impl ProgramLoop {
    /// Waits for what can happen, until the next deadline at the latest.
    pub(super) fn wait(&mut self) -> Ready {
        // Armed: a peer's write after this rings a doorbell. What is there already must not be slept on.
        let lent = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.lent.as_ref());
        let more = lent.is_some_and(|lent| lent.has_more());
        let idle = self.group.arm() && self.inbox.events.is_empty() && !more;
        let now_us = self.now_us();
        let (door_is_due, door_at_us) = self.is_door_due(now_us);
        let running = self.own.running.as_ref();
        let card_at_us = running
            .map(|running| running.card_at_us)
            .filter(|at_us| *at_us > now_us);
        let sleep_us = match idle {
            true => self.sleep_us(now_us, [door_at_us, card_at_us]),
            false => 0,
        };
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: (sleep_us * 1000) as i64,
        };
        let lent = lent.and_then(|lent| lent.fd());
        let card = running.filter(|_| card_at_us.is_none() && !self.net.output.is_full());
        let keeper = running.filter(|running| running.copy.ended().is_none());
        let door = self.net.door.as_ref().filter(|_| door_is_due);
        let watched = [
            Some(self.inbox.to_loop.waker().as_fd()),
            Some(self.group.as_fd()),
            card.map(|running| running.copy.card().as_fd()),
            keeper.map(|running| running.copy.socket()),
            lent,
            door.map(AsFd::as_fd),
        ];
        let mut fds: Vec<PollFd<'_>> = watched
            .iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
            .collect();
        // Interrupted: everything is looked at.
        if poll(&mut fds, Some(&timeout)).is_err() {
            return Ready::ALL;
        }
        let mut told = fds.iter().map(|fd| !fd.revents().is_empty());
        let [waker, group, card, keeper, words, _] =
            watched.map(|watched| watched.is_some() && told.next().unwrap_or(false));
        Ready {
            waker,
            group,
            // What was put off is read with whatever comes.
            card: card || card_at_us.is_some(),
            keeper,
            words: words || more,
        }
    }

    fn sleep_us(&self, now_us: u64, put_off: [Option<u64>; 2]) -> u64 {
        let copy_us = self.own.running.as_ref().map(|running| match running.ready {
            true => running.look_at_us,
            false => now_us + BEGINNING_LOOK_US,
        });
        let [door_us, card_us] = put_off;
        let deadlines = [
            self.group.next_deadline_us(),
            copy_us,
            self.net.announcements.due_us(),
            self.tick_due_us(),
            door_us,
            card_us,
        ];
        let deadline_us = deadlines.into_iter().flatten().min().unwrap_or(u64::MAX);
        deadline_us.saturating_sub(now_us).min(LONGEST_SLEEP_US)
    }

    /// Whether frames are taken from the network now; if not, when they are at the latest, where they are at all. While many inputs are under way
    /// what comes is left for one entry of the log: that costs little more than one for each frame would.
    pub(super) fn is_door_due(&self, now_us: u64) -> (bool, Option<u64>) {
        if self.net.door.is_none() || !self.takes_inputs() {
            return (false, None);
        }
        let waits = frames_wait(now_us, self.net.taken_us, self.inputs_under_way());
        (waits.is_none(), waits)
    }

    /// Inputs that were taken, and that the copy here has not answered as far as it is known.
    fn inputs_under_way(&self) -> usize {
        let with_copy = self
            .own
            .running
            .as_ref()
            .map_or(0, |running| running.gate.queued() + running.gate.owed());
        with_copy + self.not_agreed()
    }

    fn not_agreed(&self) -> usize {
        match self.group.appended().index == self.group.committed() {
            true => 0,
            false => self.net.not_agreed,
        }
    }

    /// So many frames were taken from the network, and the group is to be asked.
    pub(super) fn were_taken(&mut self, frames: usize) {
        self.net.not_agreed = self.not_agreed() + frames;
        self.net.taken_us = self.now_us();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_input_and_its_answer_are_never_put_off_and_nothing_is_for_long() {
        assert_eq!((answers_wait_us(0), answers_wait_us(1)), (0, 0));
        assert_eq!(
            (answers_wait_us(3), answers_wait_us(10_000)),
            (2 * QUICK_US, CARD_US)
        );
        let taken_us = 5_000;
        for under_way in 0..2 * MANY {
            for now_us in taken_us..taken_us + 2 * DOOR_US {
                let waits = frames_wait(now_us, taken_us, under_way);
                let is_soon = now_us < taken_us + DOOR_US;
                assert_eq!(
                    waits.is_some(),
                    under_way >= MANY && is_soon,
                    "{under_way}, {now_us}"
                );
                assert!(waits.is_none_or(|until_us| until_us == taken_us + DOOR_US));
            }
        }
    }
}
