//! What it decides: how long clients wait for the VM's answer, by a sample of connections.
//!
//! Flow: a frame leaves -> its connection is chosen -> the client's next payload on it comes in -> the next frame of the VM on it that was said since
//! then leaves: that is one wait. In figures: the median and the 99th percentile of the last second.
//!
//! Invariants:
//! 1. One connection at a time, one wait in [`EVERY_US`] at most: a frame that is not of that connection costs a comparison of a few bytes, and
//!    nothing is allocated or read for it.
//! 2. A wait that has lasted for more than a second counts as long as it is, though it is not over; after [`LONGEST_US`] it is given up.
//!
//! It is a sample: of many connections a few are seen, while one is waited for no other is, and an answer is whatever the VM says next on the
//! connection, an acknowledgement, too. Not here: how long outputs are held, of which every frame is counted (`Tally`).

use super::gate::Leaving;
use super::packet::{Direction, FlowKey, Parsed, parse};
use crate::agreed::Frame;
use std::net::IpAddr;

/// No wait is begun sooner after the last: 250 in a second.
const EVERY_US: u64 = 4_000;
/// Another connection is chosen where the chosen one's client says nothing for so long, or so many frames without payload.
const SILENT_US: u64 = 100_000;
/// See `SILENT_US`.
const EMPTY: u8 = 8;
/// What figures are of.
const WINDOW_US: u64 = 1_000_000;
/// Nobody waits longer: the connection is dead.
const LONGEST_US: u64 = 10_000_000;
/// More than a second has.
const SAMPLES: usize = 256;
/// Both addresses and ports, of IPv6.
const MOST_BYTES: usize = 36;

/// How long clients waited in the last second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Percentiles {
    /// Of how many waits.
    pub samples: u64,
    /// The median.
    pub p50_us: u64,
    /// The 99th percentile; of few waits the longest.
    pub p99_us: u64,
}

/// The sample.
#[derive(Debug)]
pub struct Answers {
    stage: Stage,
    /// No connection is chosen before that.
    rests_until_us: u64,
    /// A ring: when each wait was over, and how long it was.
    waits: [(u64, u64); SAMPLES],
    taken: usize,
}

#[derive(Debug)]
enum Stage {
    Rests,
    /// For the client's payload.
    Watches {
        ends: Ends,
        until_us: u64,
        empty: u8,
    },
    /// For the VM's answer.
    Waits {
        ends: Ends,
        since_us: u64,
    },
}

/// A connection's addresses and ports as they lie in its frames: side by side, in one place.
#[derive(Debug, Clone, Copy)]
struct Ends {
    nic: u8,
    at: usize,
    len: usize,
    from_vm: [u8; MOST_BYTES],
    to_vm: [u8; MOST_BYTES],
}

impl Ends {
    /// Of a frame of the VM; none of a packet with options, where they do not lie side by side.
    fn of(frame: &Frame, key: &FlowKey, tcp: usize) -> Option<Self> {
        let address = match key.vm {
            IpAddr::V4(_) => 4,
            IpAddr::V6(_) => 16,
        };
        let (at, len) = (tcp.checked_sub(2 * address)?, 2 * address + 4);
        let said = frame.bytes.get(at..at + len)?;
        let is_vms = match key.vm {
            IpAddr::V4(vm) => said.starts_with(&vm.octets()),
            IpAddr::V6(vm) => said.starts_with(&vm.octets()),
        };
        let (mut from_vm, mut to_vm) = ([0; MOST_BYTES], [0; MOST_BYTES]);
        from_vm[..len].copy_from_slice(said);
        let (addresses, ports) = said.split_at(2 * address);
        let swapped = [
            &addresses[address..],
            &addresses[..address],
            &ports[2..],
            &ports[..2],
        ];
        let mut bytes = swapped.into_iter().flatten();
        to_vm[..len].fill_with(|| bytes.next().copied().unwrap_or_default());
        is_vms.then_some(Self {
            nic: frame.nic,
            at,
            len,
            from_vm,
            to_vm,
        })
    }

    fn is_in(&self, frame: &Frame, bytes: &[u8; MOST_BYTES]) -> bool {
        frame.nic == self.nic && frame.bytes.get(self.at..self.at + self.len) == Some(&bytes[..self.len])
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            stage: Stage::Rests,
            rests_until_us: 0,
            waits: [(0, 0); SAMPLES],
            taken: 0,
        }
    }
}

impl Answers {
    /// A frame for the VM has come in from the network.
    pub fn asked(&mut self, frame: &Frame, now_us: u64) {
        let Stage::Watches { ends, empty, .. } = &mut self.stage else {
            return;
        };
        if !ends.is_in(frame, &ends.to_vm) {
            return;
        }
        let has_payload = match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => !segment.payload.is_empty(),
            _ => false,
        };
        *empty += 1;
        self.stage = match (has_payload, *empty < EMPTY) {
            (true, _) => Stage::Waits {
                ends: *ends,
                since_us: now_us,
            },
            (false, true) => return,
            (false, false) => Stage::Rests,
        };
    }

    /// A frame of the VM leaves.
    pub fn left(&mut self, leaving: &Leaving, now_us: u64) {
        match &self.stage {
            Stage::Rests if now_us < self.rests_until_us => {}
            Stage::Watches { until_us, .. } if now_us < *until_us => {}
            Stage::Rests | Stage::Watches { .. } => self.choose(&leaving.frame, now_us),
            Stage::Waits { ends, since_us } => {
                let waited_us = now_us.saturating_sub(*since_us);
                // What the VM said before it could hear the client is no answer.
                if leaving.arrived_us >= *since_us && ends.is_in(&leaving.frame, &ends.from_vm) {
                    self.waits[self.taken % SAMPLES] = (now_us, waited_us);
                    self.taken += 1;
                    self.stage = Stage::Rests;
                } else if waited_us > LONGEST_US {
                    self.stage = Stage::Rests;
                }
            }
        }
    }

    fn choose(&mut self, frame: &Frame, now_us: u64) {
        // Also where it is none: a flood of other frames is not read either (invariant 1).
        self.rests_until_us = now_us + EVERY_US;
        let ends = match parse(frame, Direction::FromVm) {
            Parsed::Tcp(segment) if !segment.rst() && !segment.fin() => {
                Ends::of(frame, &segment.key, segment.tcp)
            }
            _ => None,
        };
        self.stage = ends.map_or(Stage::Rests, |ends| Stage::Watches {
            ends,
            until_us: now_us + SILENT_US,
            empty: 0,
        });
    }

    /// How long clients waited in the second before `now_us`; none if none was seen.
    #[must_use]
    pub fn last_second(&self, now_us: u64) -> Option<Percentiles> {
        let mut waits = [0; SAMPLES + 1];
        let mut count = 0;
        let mut add = |wait_us| {
            waits[count] = wait_us;
            count += 1;
        };
        let known = &self.waits[..self.taken.min(SAMPLES)];
        known
            .iter()
            .filter(|(at_us, _)| now_us.saturating_sub(*at_us) < WINDOW_US)
            .for_each(|(_, wait_us)| add(*wait_us));
        if let Stage::Waits { since_us, .. } = &self.stage {
            let so_far_us = now_us.saturating_sub(*since_us);
            if (WINDOW_US..=LONGEST_US).contains(&so_far_us) {
                add(so_far_us);
            }
        }
        let waits = &mut waits[..count];
        waits.sort_unstable();
        // The nearest rank.
        let at = |percent: usize| waits[(count * percent).div_ceil(100) - 1];
        (count > 0).then(|| Percentiles {
            samples: count as u64,
            p50_us: at(50),
            p99_us: at(99),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::compare::FrameId;
    use super::super::packet::testing::Seg;
    use super::super::packet::{ACK, RST};
    use super::*;

    const MS: u64 = 1_000;

    /// One sample, and the time.
    #[derive(Default)]
    struct World {
        answers: Answers,
        now_us: u64,
    }

    impl World {
        fn says(&mut self, seg: Seg, said_us: u64) {
            let leaving = Leaving {
                id: FrameId(0),
                frame: seg.frame(),
                arrived_us: said_us,
            };
            self.answers.left(&leaving, self.now_us);
        }

        fn asks(&mut self, seg: Seg) {
            self.answers.asked(&seg.frame(), self.now_us);
        }

        /// A question and, after `us`, its answer.
        fn round(&mut self, us: u64) {
            self.now_us += EVERY_US;
            self.says(vm(), self.now_us);
            self.asks(client());
            self.now_us += us;
            self.says(vm(), self.now_us);
        }

        fn figures(&self) -> Option<(u64, u64, u64)> {
            let found = self.answers.last_second(self.now_us)?;
            Some((found.samples, found.p50_us, found.p99_us))
        }
    }

    fn vm() -> Seg {
        Seg::from_vm(ACK, 1, 1).with(b"answer")
    }

    fn client() -> Seg {
        Seg::to_vm(ACK, 1, 1).with(b"question")
    }

    #[test]
    fn a_wait_is_from_a_clients_payload_to_what_the_vm_says_after_it_on_that_connection() {
        for v6 in [false, true] {
            let mut world = World::default();
            let of = |seg: Seg| Seg { v6, ..seg };
            let other = |seg: Seg| Seg {
                v6,
                port: 4001,
                ..seg
            };
            world.says(of(vm()), 0);
            assert_eq!(world.figures(), None);
            world.asks(other(client()));
            world.asks(of(Seg::to_vm(ACK, 1, 1)));
            world.now_us = 5 * MS;
            world.asks(of(client()));
            world.now_us = 6 * MS;
            world.says(of(vm()), 4 * MS);
            world.says(other(vm()), 6 * MS);
            // Sent again, which begins nothing anew.
            world.asks(of(client()));
            assert_eq!(
                world.figures(),
                None,
                "one was said before, one to another client"
            );
            world.now_us = 12 * MS;
            world.says(of(vm()), 9 * MS);
            assert_eq!(world.figures(), Some((1, 7 * MS, 7 * MS)));
            world.now_us += WINDOW_US;
            assert_eq!(world.figures(), None, "that was in another second");
        }
    }

    #[test]
    fn a_connection_on_which_nothing_is_asked_gives_way_to_another() {
        let mut world = World::default();
        world.says(vm(), 0);
        world.now_us = SILENT_US;
        let other = |seg: Seg| Seg { port: 4001, ..seg };
        world.says(other(vm()), SILENT_US);
        world.asks(other(client()));
        world.now_us += 3 * MS;
        world.says(other(vm()), world.now_us);
        assert_eq!(world.figures(), Some((1, 3 * MS, 3 * MS)));
        // A download: the client says nothing but that it has got it.
        world.now_us += EVERY_US;
        world.says(vm(), world.now_us);
        (0..EMPTY).for_each(|_| world.asks(Seg::to_vm(ACK, 1, 1)));
        world.now_us += EVERY_US;
        world.says(other(vm()), world.now_us);
        world.asks(other(client()));
        world.says(other(vm()), world.now_us);
        assert_eq!(world.figures(), Some((2, 0, 3 * MS)));
        // One that ends is not chosen.
        world.now_us += EVERY_US;
        world.says(Seg::from_vm(RST, 1, 1), world.now_us);
        world.asks(client());
        world.says(vm(), world.now_us);
        assert_eq!(world.figures().map(|(samples, ..)| samples), Some(2));
    }

    #[test]
    fn figures_are_the_nearest_ranks_and_no_more_is_kept_than_a_second_has() {
        let mut world = World::default();
        (1..=200).for_each(|us| world.round(us));
        assert_eq!(world.figures(), Some((200, 100, 198)));
        (0..3 * SAMPLES).for_each(|_| world.round(9));
        assert!(world.answers.taken > SAMPLES);
        assert_eq!(
            world.figures().map(|(_, p50_us, p99_us)| (p50_us, p99_us)),
            Some((9, 9))
        );
    }

    #[test]
    fn a_client_that_still_waits_is_seen_until_its_connection_is_given_up() {
        let mut world = World::default();
        world.says(vm(), 0);
        world.asks(client());
        world.now_us = WINDOW_US - 1;
        assert_eq!(world.figures(), None);
        world.now_us = 3 * WINDOW_US;
        assert_eq!(world.figures(), Some((1, 3 * WINDOW_US, 3 * WINDOW_US)));
        world.now_us = LONGEST_US + 1;
        assert_eq!(world.figures(), None);
        world.says(Seg { port: 4001, ..vm() }, world.now_us);
        world.round(5);
        assert_eq!(world.figures(), Some((1, 5, 5)), "another one is chosen");
    }
}
