//! A network that loses, repeats, reorders and damages frames, until it is calm.

use super::frame::damaged;
use super::random::Random;
use dunlin_core::agreed::Frame;

/// How many copies of a frame arrive; `loss_percent` of them are lost.
pub fn copies(random: &mut Random, is_calm: bool, loss_percent: u8) -> u32 {
    match is_calm {
        true => 1,
        false if random.percent(loss_percent) => 0,
        false => 1 + u32::from(random.percent(3)),
    }
}

/// How long one is under way at least; each a little longer.
pub fn delay_us(random: &mut Random, is_calm: bool) -> u64 {
    match random.within(0, 19) {
        0 if !is_calm => random.within(500, 20_000),
        _ => 200,
    }
}

/// A copy as it arrives: now and then with one bit the other way round.
pub fn arriving(random: &mut Random, is_calm: bool, frame: &Frame) -> Frame {
    match random.within(0, 199) {
        0 if !is_calm => damaged(frame, random.draw()),
        _ => frame.clone(),
    }
}
