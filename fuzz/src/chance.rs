//! How far another host's copy of a program has drawn its chance: any numbers, and what is drawn from there on.

use crate::script::Script;
use dunlin_program::chance::{Chance, Drawn, of_number};
use dunlin_program::source::Source;
use std::os::fd::OwnedFd;

/// A seed, places of threads and of the device, then threads that ask: a copy that is made at any moment draws the same.
pub fn chance(bytes: &[u8]) {
    let mut script = Script(bytes);
    let seed = of_number(script.number());
    let threads = (0..script.byte() % 8).map(|_| (script.number() as u32, script.number()));
    let threads = threads.collect();
    let device_bytes = script.number();
    let drawn = Drawn {
        threads,
        device_bytes,
    };
    let mut chance = Chance::drawn(seed, &drawn);
    let (_reads, device) = std::io::pipe().expect("a pipe");
    let source = Source::new(seed, &drawn, OwnedFd::from(device));
    let told = source.drawn().expect("nobody has read");
    assert_eq!(told.threads, chance.threads());
    assert_eq!(told.device_bytes, device_bytes);
    while !script.is_over() {
        // Few threads: each step makes a copy of all of them.
        let (thread, length) = (u32::from(script.byte() % 16), usize::from(script.byte()));
        let threads = chance.threads();
        let drawn = Drawn {
            threads,
            ..Drawn::default()
        };
        let mut copy = Chance::drawn(seed, &drawn);
        let before = place(&chance, thread);
        let (mut here, mut there) = (vec![0; length], vec![0; length]);
        chance.fill(thread, &mut here);
        copy.fill(thread, &mut there);
        assert_eq!(here, there, "a copy draws what the first one does");
        assert_eq!(copy.threads(), chance.threads());
        let words = place(&chance, thread).wrapping_sub(before);
        assert_eq!(words, length.div_ceil(4) as u64, "no word is given twice");
    }
}

/// How far that thread has drawn, in words.
fn place(chance: &Chance, thread: u32) -> u64 {
    let threads = chance.threads();
    let found = threads.iter().find(|(number, _)| *number == thread);
    found.map_or(0, |(_, words)| *words)
}

/// Of one that has drawn nothing, of one that has, and of one that has come to the end of all numbers.
pub fn seeds() -> Vec<Vec<u8>> {
    vec![
        vec![7, 0, 0, 2, 5, 3, 8, 2, 16],
        vec![7, 2, 2, 9, 3, 200, 100, 2, 64, 3, 1, 4, 5],
        vec![7, 2, 2, 255, 3, 252, 255, 2, 64, 3, 64, 2, 64],
    ]
}
