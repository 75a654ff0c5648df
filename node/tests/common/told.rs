//! What a copy of a program tells in a file, and when: it sends a frame after each turn.

use dunlin_program::copy::Copy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);

/// What the copy tells in that file when it has got on from `turn`, and the turn: `TURN WORDS`, or nothing yet.
pub fn told_after(turn: u64, file: &str, copy: &Copy) -> (u64, String) {
    let layers = copy.written().expect("walls").as_raw_fd();
    let bound = Timespec::try_from(BOUND).expect("a time");
    loop {
        let mut card = [PollFd::from_borrowed_fd(copy.card().as_fd(), PollFlags::IN)];
        let sent = poll(&mut card, Some(&bound)).expect("poll");
        assert_eq!(sent, 1, "{:?}", copy.last_words(9));
        rustix::io::read(copy.card(), &mut [0; 2048]).expect("a frame");
        let told = fs::read_to_string(format!("/proc/self/fd/{layers}/u0/{file}")).unwrap_or_default();
        let Some((now, words)) = told.split_once(' ') else {
            continue;
        };
        let now = now.parse().expect("a turn");
        if now > turn {
            return (now, words.to_owned());
        }
    }
}
