//! One way of a shaped cable: which frames are lost, and when the others come out.
//!
//! * **Decides:** all of it, from the frames, the time that it is told, and a seed.
//! * **Invariants:** (1) frames keep their order; (2) none comes out before its time; (3) chance is drawn once for each frame as a wire would carry it: a
//!   large frame is as many as it would be cut into, also where the wire's rate counts their bytes; (4) what waits is bounded, and what found no room is counted.
//! * **Source:** `tc-netem(8)` for the words. **Not here:** clocks and devices ([`super`]).

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use dunlin_core::offload::Offload;
use dunlin_core::offload::segment::segments;

use crate::random::Random;

/// What may wait in one direction: a gigabyte a second for 60 ms.
pub const QUEUE_BYTES: usize = 64 << 20;
/// Beside each frame on the wire: preamble, checksum and gap (IEEE 802.3).
const WIRE_BYTES: usize = 24;
/// Buffers that are kept for the next frames: memory that is touched for the first time costs more than the copy.
const SPARE: usize = 256;

/// What a cable does to each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How much later it comes, in each direction.
    pub delay: Duration,
    /// How many of a million are lost, in each direction.
    pub lost_of_million: u32,
    /// How fast the wire is in each direction, in megabits a second; none: as fast as frames come.
    pub megabits: Option<NonZeroU32>,
    /// From what it is drawn which ones these are.
    pub seed: u64,
}

/// What became of the frames, each as a wire would carry it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All that came.
    pub came: u64,
    /// Lost by chance, as was asked for.
    pub lost: u64,
    /// Lost for want of room (here or in the kernel), which was not.
    pub crowded_out: u64,
}

impl Counts {
    /// Those of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            came: self.came + other.came,
            lost: self.lost + other.lost,
            crowded_out: self.crowded_out + other.crowded_out,
        }
    }
}

/// One direction.
pub struct Lane {
    shape: Shape,
    random: Random,
    waiting: VecDeque<(Instant, Vec<u8>)>,
    /// When the wire has carried all that came, where it has a rate.
    free_at: Option<Instant>,
    bytes: usize,
    spare: Vec<Vec<u8>>,
    scratch: Vec<u8>,
    counts: Counts,
}

impl Lane {
    /// An empty one. Two ways of a cable have different `number`s, so that they do not lose the same.
    pub fn new(shape: Shape, number: u64) -> Self {
        Self {
            shape,
            random: Random::new(shape.seed.wrapping_mul(2).wrapping_add(number)),
            waiting: VecDeque::new(),
            free_at: None,
            bytes: 0,
            spare: Vec::new(),
            scratch: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Takes a frame behind its header ([`Offload`]), which came at `now`.
    pub fn take(&mut self, now: Instant, framed: &mut [u8]) {
        let Some((header, frame)) = framed.split_first_chunk_mut() else {
            return;
        };
        let offload = Offload::read(header);
        if offload.gso_type == 0 || self.shape.lost_of_million == 0 {
            match self.is_lost() {
                true => self.counts.lost += 1,
                false => self.wait(now, framed),
            }
            return;
        }
        // A wire loses segments, not what a kernel keeps together to save work.
        let mut scratch = std::mem::take(&mut self.scratch);
        let (mut all, mut kept) = (0, Vec::new());
        let is_right = segments(&offload, frame, &mut scratch, |segment| {
            all += 1;
            if !self.is_lost() {
                kept.push([&Offload::default().to_bytes(), segment].concat());
            }
        });
        self.scratch = scratch;
        if !is_right {
            self.counts.crowded_out += 1;
        } else if kept.len() == all {
            self.wait(now, framed);
        } else {
            self.counts.lost += (all - kept.len()) as u64;
            kept.iter().for_each(|segment| self.wait(now, segment));
        }
    }

    fn is_lost(&mut self) -> bool {
        self.counts.came += 1;
        self.shape.lost_of_million > 0 && self.random.chance(self.shape.lost_of_million.into())
    }

    fn wait(&mut self, now: Instant, framed: &[u8]) {
        if self.bytes + framed.len() > QUEUE_BYTES {
            self.counts.crowded_out += 1;
            return;
        }
        let carried = match self.shape.megabits {
            None => now,
            Some(megabits) => {
                let bits = 8 * on_the_wire(framed) as u64;
                let begins = self.free_at.map_or(now, |free_at| free_at.max(now));
                begins + Duration::from_nanos(bits * 1000 / u64::from(megabits.get()))
            }
        };
        self.free_at = Some(carried);
        let at = carried + self.shape.delay;
        self.bytes += framed.len();
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(framed);
        self.waiting.push_back((at, buffer));
    }

    /// When the next one comes out.
    pub fn next_at(&self) -> Option<Instant> {
        self.waiting.front().map(|(at, _)| *at)
    }

    /// The next one that comes out by `now`.
    pub fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.next_at().filter(|at| *at <= now)?;
        let (_, framed) = self.waiting.pop_front()?;
        self.bytes -= framed.len();
        Some(framed)
    }

    /// Takes back what [`Lane::due`] gave, for a later frame.
    pub fn used(&mut self, framed: Vec<u8>) {
        if self.spare.len() < SPARE {
            self.spare.push(framed);
        }
    }

    /// The kernel had no room for one that came out.
    pub fn crowded_out(&mut self) {
        self.counts.crowded_out += 1;
    }

    /// What became of all so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// The bytes of all the frames that a wire would carry of this one.
fn on_the_wire(framed: &[u8]) -> usize {
    let Some((header, frame)) = framed.split_first_chunk() else {
        return 0;
    };
    let offload = Offload::read(header);
    let headers = usize::from(offload.hdr_len);
    let payload = frame.len().saturating_sub(headers);
    let frames = match offload.gso_type {
        0 => 1,
        _ => payload.div_ceil(usize::from(offload.gso_size).max(1)).max(1),
    };
    frame.len() + (frames - 1) * headers + frames * WIRE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn shape(lost_of_million: u32) -> Shape {
        Shape {
            delay: 5 * MS,
            lost_of_million,
            megabits: None,
            seed: 7,
        }
    }

    /// A small frame that says its number.
    fn numbered(number: u32) -> Vec<u8> {
        [
            &Offload::default().to_bytes()[..],
            &[0; 60],
            &number.to_be_bytes(),
        ]
        .concat()
    }

    fn number_of(framed: &[u8]) -> u32 {
        u32::from_be_bytes(*framed.last_chunk().unwrap())
    }

    /// `count` segments of 1,000 bytes of one stream, as one large frame.
    fn large(count: usize) -> Vec<u8> {
        let payload: Vec<u8> = (0..count * 1000).map(|at| (at / 1000) as u8).collect();
        let mut frame = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0][..], &[0; 40]].concat();
        let ip_bytes = 40 + payload.len() as u16;
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&ip_bytes.to_be_bytes());
        (frame[22], frame[23]) = (64, 6);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..38].copy_from_slice(&[0, 80, 0x9c, 0x40]);
        (frame[46], frame[47]) = (0x50, 0x10);
        frame.extend(payload);
        let offload = Offload {
            needs_csum: true,
            gso_type: 1,
            hdr_len: 54,
            gso_size: 1000,
            csum_start: 34,
            csum_offset: 16,
        };
        [&offload.to_bytes()[..], &frame].concat()
    }

    fn drain(lane: &mut Lane, now: Instant) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| lane.due(now)).collect()
    }

    #[test]
    fn frames_come_out_in_order_at_their_time_and_not_before() {
        let (mut lane, begun) = (Lane::new(shape(0), 0), Instant::now());
        lane.take(begun, &mut numbered(1));
        lane.take(begun + MS, &mut numbered(2));
        lane.take(begun + MS, &mut numbered(3));
        assert_eq!(lane.next_at(), Some(begun + 5 * MS));
        assert!(drain(&mut lane, begun + 5 * MS - Duration::from_nanos(1)).is_empty());
        let out = |lane: &mut Lane, at| -> Vec<u32> {
            drain(lane, at).iter().map(|framed| number_of(framed)).collect()
        };
        assert_eq!(out(&mut lane, begun + 5 * MS), [1]);
        // What was in a buffer before is not what comes out of it.
        lane.used(vec![9; 1000]);
        lane.take(begun + MS, &mut numbered(4));
        assert_eq!(out(&mut lane, begun + 6 * MS), [2, 3, 4]);
        assert_eq!((lane.next_at(), lane.bytes), (None, 0));
    }

    #[test]
    fn what_is_lost_is_what_the_seed_says_and_about_as_much_as_was_asked_for() {
        let lost = |shape: Shape, number: u64| -> Vec<u32> {
            let (mut lane, now) = (Lane::new(shape, number), Instant::now());
            (0..10_000).for_each(|number| lane.take(now, &mut numbered(number)));
            let out = drain(&mut lane, now + shape.delay);
            let came: Vec<u32> = out.iter().map(|framed| number_of(framed)).collect();
            assert!(came.is_sorted());
            let lost: Vec<u32> = (0..10_000).filter(|number| !came.contains(number)).collect();
            let counts = Counts {
                came: 10_000,
                lost: lost.len() as u64,
                crowded_out: 0,
            };
            assert_eq!(lane.counts(), counts);
            lost
        };
        let drawn = |seed: u64| -> Vec<u32> {
            let mut random = Random::new(seed);
            (0..10_000).filter(|_| random.chance(10_000)).collect()
        };
        assert_eq!(lost(shape(10_000), 0), drawn(14));
        assert_eq!(lost(shape(10_000), 1), drawn(15));
        // Of 10,000 draws of 1 %: 100, and five standard deviations are 50. The seed is fixed, so this never changes.
        let many = lost(shape(10_000), 0).len();
        assert!((50..150).contains(&many), "{many}");
        assert!(lost(shape(0), 0).is_empty());
        assert_eq!(lost(shape(1_000_000), 0).len(), 10_000);
    }

    #[test]
    fn of_a_large_frame_single_segments_are_lost_and_one_that_loses_none_stays_whole() {
        let now = Instant::now();
        let mut whole = 0;
        let mut lane = Lane::new(shape(20_000), 0);
        let mut random = Random::new(14);
        for _ in 0..200 {
            let framed = large(40);
            lane.take(now, &mut framed.clone());
            let kept: Vec<u8> = (0..40).filter(|_| !random.chance(20_000)).collect();
            let out = drain(&mut lane, now + 5 * MS);
            if kept.len() == 40 {
                whole += 1;
                assert_eq!(out, [framed]);
                continue;
            }
            // Each segment's payload tells its number in the large frame.
            let came: Vec<u8> = out.iter().map(|segment| *segment.last().unwrap()).collect();
            assert_eq!(came, kept);
            assert!(out.iter().all(|segment| segment.len() == 10 + 54 + 1000));
        }
        // 0.98 to the 40th of 200 are 89.
        assert!((50..130).contains(&whole), "{whole}");
        assert_eq!(lane.counts().came, 8_000);
        let mut lane = Lane::new(shape(0), 0);
        lane.take(now, &mut large(40));
        assert_eq!(drain(&mut lane, now + 5 * MS), [large(40)]);
    }

    #[test]
    fn a_wire_with_a_rate_carries_one_frame_after_the_other_and_of_a_large_one_each_segments_headers() {
        let now = Instant::now();
        let mut lane = Lane::new(
            Shape {
                megabits: NonZeroU32::new(8),
                ..shape(0)
            },
            0,
        );
        // A byte takes a microsecond.
        let us = |us: u64| now + 5 * MS + Duration::from_micros(us);
        lane.take(now, &mut numbered(1));
        lane.take(now, &mut numbered(2));
        assert_eq!(lane.next_at(), Some(us(64 + 24)));
        assert_eq!(drain(&mut lane, us(88)).len(), 1);
        assert_eq!(lane.next_at(), Some(us(2 * 88)));
        assert_eq!(drain(&mut lane, us(176)).len(), 1);
        // The wire was idle meanwhile, and has saved nothing up.
        let later = Duration::from_secs(1);
        lane.take(now + later, &mut large(40));
        assert_eq!(lane.next_at(), Some(us(40 * (54 + 1000 + 24)) + later));
    }

    #[test]
    fn invariant_4_what_finds_no_room_is_counted() {
        let (mut lane, now) = (Lane::new(shape(0), 0), Instant::now());
        let framed = large(60);
        let fit = QUEUE_BYTES / framed.len();
        (0..fit + 3).for_each(|_| lane.take(now, &mut framed.clone()));
        assert_eq!(lane.counts().crowded_out, 3);
        assert_eq!(drain(&mut lane, now + 5 * MS).len(), fit);
        lane.take(now, &mut framed.clone());
        assert_eq!(drain(&mut lane, now + 5 * MS).len(), 1);
    }
}
