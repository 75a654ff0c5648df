//! The receiver, over a real stream, with a feeder that says what it likes.

use super::receiver::receive;
use super::*;
use crate::vm::held_memory::HeldMemory;
use crate::vm::session::reader::Reader;
use dunlin_core::sync::compare::{Compare, DivergentPage, PAGE_BYTES};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::units::{Epoch, Term};
use dunlin_fabric::link::{Hello, Purpose, Stream};
use dunlin_guest::memory::{RamFile, hash};
use dunlin_guest::probe::memory_available_bytes;
use std::sync::Arc;
use std::thread::JoinHandle;

const PAGES: u32 = 64;

struct Feeding {
    reader: Reader,
    writer: WriteHalf,
    receiver: JoinHandle<()>,
}

/// A connection about a VM 'v', up to the first message.
fn connect(held: &Arc<HeldMemory>, extra: Vec<u8>) -> Feeding {
    connect_of("v", held, extra, &[])
}

fn connect_of(vm: &str, held: &Arc<HeldMemory>, extra: Vec<u8>, parts: &'static [&'static str]) -> Feeding {
    let (ours, theirs) = Stream::pair().expect("a pair");
    ours.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut hello = Hello::new(vm, "d", Purpose::Checkpoint);
    hello.extra = extra;
    let held = held.clone();
    let has_part = |vm: &str| parts.contains(&vm);
    let receiver = std::thread::spawn(move || receive(&held, &hello, theirs, &has_part));
    let (half, writer) = ours.split();
    Feeding {
        reader: Reader::new(half),
        writer,
        receiver,
    }
}

fn ram() -> RamFile {
    RamFile::new("v", u64::from(PAGES) * PAGE_BYTES as u64).expect("memory")
}

fn terms() -> Terms {
    Terms {
        every: Duration::from_secs(1),
        held: Duration::from_secs(60),
    }
}

impl Feeding {
    fn say(&mut self, message: &SyncMessage) {
        // It may have ended: that is what the tests look at then.
        let _ = send(&mut self.writer, message);
    }

    fn join(&mut self, pages: u32) {
        self.say(&SyncMessage::Join {
            term: Term(0),
            pages,
            active: false,
            compare: Compare::List,
        });
    }

    /// What is held there already, by its hashes.
    fn begin(&mut self) -> Vec<(PageSet, Vec<u128>)> {
        self.join(PAGES);
        let mut held = Vec::new();
        loop {
            match self.reader.wait().expect("a message") {
                SyncMessage::Holds { pages, hashes } => held.push((pages, hashes)),
                SyncMessage::JoinReady => return held,
                other => panic!("{other:?}"),
            }
        }
    }

    fn page(&mut self, page: u32, byte: u8) {
        self.say(&SyncMessage::Pages(vec![PageDelta {
            at: DivergentPage {
                page,
                blocks: u16::MAX,
            },
            bytes: vec![byte; PAGE_BYTES].into(),
        }]));
    }

    fn end_round(&mut self, round: u64) {
        self.say(&SyncMessage::JoinLast { epoch: Epoch(round) });
        let answer = self.reader.wait().expect("an answer");
        assert_eq!(answer, SyncMessage::Staged { epoch: Epoch(round) });
    }

    fn ended(self) {
        drop(self.reader);
        drop(self.writer);
        self.receiver.join().expect("it does not panic");
    }
}

fn of(byte: u8) -> u128 {
    hash::page(&[byte; PAGE_BYTES])
}

#[test]
fn what_is_fed_is_held_and_gone_on_with_by_the_next_feeder() {
    let held = Arc::new(HeldMemory::default());
    let mut first = connect(&held, terms().encode());
    assert!(first.begin().is_empty());
    first.page(3, 7);
    first.page(60, 8);
    first.end_round(0);
    first.page(3, 9);
    first.end_round(1);
    first.ended();

    // Another host has the copy now.
    let mut second = connect(&held, terms().encode());
    let known = second.begin();
    let hashes: Vec<(u32, u128)> = known
        .iter()
        .flat_map(|(pages, hashes)| pages.pages().zip(hashes.iter().copied()))
        .collect();
    assert!(
        hashes.contains(&(3, of(9))) && hashes.contains(&(60, of(8))),
        "{hashes:?}"
    );
    second.page(4, 1);
    second.end_round(0);

    // The VM gets a copy here: from then on nobody writes into it.
    let ram = held.take("v").expect("it is held").into_ram();
    assert_eq!(
        ram.hash_pages([3, 4, 60].into_iter()).expect("read"),
        [of(9), of(1), of(8)]
    );
    second.page(4, 2);
    assert!(second.reader.wait().is_err(), "it is a VM's now");
    second.ended();
    assert_eq!(ram.hash_pages([4].into_iter()).expect("read"), [of(1)]);
}

#[test]
fn a_vm_that_has_ended_is_forgotten_and_one_whose_feeder_dies_is_not() {
    let held = Arc::new(HeldMemory::default());
    let feed = || {
        let mut feeding = connect(&held, terms().encode());
        feeding.begin();
        feeding.page(1, 1);
        feeding.end_round(0);
        feeding
    };
    feed().ended();
    assert!(held.holds("v"));
    let mut feeding = feed();
    feeding.say(&SyncMessage::Refused {
        why: "the VM has ended".into(),
    });
    feeding.ended();
    assert!(!held.holds("v"));
}

#[test]
fn a_feeder_that_talks_nonsense_is_hung_up_on() {
    let held = Arc::new(HeldMemory::default());
    let outside = |feeding: &mut Feeding| feeding.page(PAGES, 1);
    let half_a_page = |feeding: &mut Feeding| {
        feeding.say(&SyncMessage::Pages(vec![PageDelta {
            at: DivergentPage { page: 1, blocks: 1 },
            bytes: vec![1; 256].into(),
        }]));
    };
    let out_of_turn = |feeding: &mut Feeding| feeding.say(&SyncMessage::JoinReady);
    let nonsense: [&dyn Fn(&mut Feeding); 3] = [&outside, &half_a_page, &out_of_turn];
    for says in nonsense {
        let mut feeding = connect(&held, terms().encode());
        feeding.begin();
        says(&mut feeding);
        assert!(feeding.reader.wait().is_err());
        feeding.ended();
    }
    for extra in [vec![], vec![0; 15], vec![0; 17]] {
        let mut feeding = connect(&held, extra);
        feeding.join(PAGES);
        assert!(feeding.reader.wait().is_err());
        feeding.ended();
    }
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let held = Arc::new(HeldMemory::default());
    let mut feeding = connect(&held, terms().encode());
    feeding.join(u32::MAX);
    let SyncMessage::Refused { why } = feeding.reader.wait().expect("an answer") else {
        panic!("16 TiB are taken");
    };
    assert!(why.contains("no room for a checkpoint"), "{why}");
    feeding.ended();
    assert!(!held.holds("v"));
}

#[test]
fn room_that_is_promised_is_not_promised_again() {
    let held = Arc::new(HeldMemory::default());
    let most_of_it = memory_available_bytes() / 5 * 3 / PAGE_BYTES as u64;
    let answer = |vm| {
        let mut feeding = connect_of(vm, &held, terms().encode(), &[]);
        feeding.join(u32::try_from(most_of_it).expect("less than 16 TiB"));
        let answer = feeding.reader.wait().expect("an answer");
        feeding.ended();
        answer
    };
    assert_eq!(answer("v"), SyncMessage::JoinReady);
    assert!(matches!(answer("w"), SyncMessage::Refused { .. }));
    assert!(held.holds("v") && !held.holds("w"));
}

/// A guest's memory is a file that fills up: what the system has left is promised to it already.
#[test]
fn room_that_a_vm_of_this_host_was_promised_is_not_a_checkpoints() {
    let held = Arc::new(HeldMemory::default());
    let answer = || {
        let mut feeding = connect(&held, terms().encode());
        feeding.join(PAGES);
        let answer = feeding.reader.wait().expect("an answer");
        feeding.ended();
        answer
    };
    let promised = held.promised.to_start(memory_available_bytes() * 2);
    assert!(matches!(answer(), SyncMessage::Refused { .. }));
    assert!(!held.holds("v"));
    drop(promised);
    assert_eq!(answer(), SyncMessage::JoinReady);
}

/// What is held there is of a copy that has ended, and for the next one.
#[test]
fn a_host_with_a_part_in_the_vm_takes_no_checkpoint_of_it() {
    let held = Arc::new(HeldMemory::default());
    connect(&held, terms().encode()).begin();
    let number = held.keep("v", ram(), HELD_BEYOND).expect("room");
    let mut feeding = connect_of("v", &held, terms().encode(), &["v"]);
    feeding.join(PAGES);
    let SyncMessage::Refused { why } = feeding.reader.wait().expect("an answer") else {
        panic!("it is taken");
    };
    assert!(why.contains("has a part in the VM"), "{why}");
    feeding.ended();
    assert!(
        held.write("v", number, HELD_BEYOND, |_| Ok(())).is_some(),
        "it is what it was"
    );
}

/// A checkpoint each day is one also a moment before the next round is due, and a round in which nothing has changed is one, too.
#[test]
fn a_checkpoint_is_held_from_one_round_to_the_next() {
    let standby = Standby {
        host: "d".into(),
        after: Duration::from_secs(30),
        checkpoint: None,
    };
    let every = Duration::from_secs(86_400);
    let terms = Terms::of(&standby, every);
    assert!(terms.held > every + standby.after);
    assert_eq!(Terms::decode(&terms.encode()), Some(terms));

    let held = Arc::new(HeldMemory::default());
    let mut feeding = connect(&held, terms.encode());
    feeding.begin();
    // As if the last page had come so long ago.
    held.expire_in("v", Duration::from_secs(1));
    feeding.end_round(0);
    held.expire(std::time::Instant::now() + every);
    assert!(held.holds("v"), "its time has begun anew");
    feeding.ended();
}

#[test]
fn terms_are_what_they_were_and_none_is_for_ever() {
    assert_eq!(Terms::decode(&terms().encode()), Some(terms()));
    let for_ever = Terms::decode(&[0xff; 16]).expect("two times");
    assert!(for_ever.held <= Duration::from_secs(7 * 86_400));
}
