//! Transcripts of bytes that go to the backup ahead of their checkpoint.

use super::seg::RST;
use super::talk::{Talk, limits};
use bytes::Bytes;
use dunlin_core::speculation::{Limits, Replica, Speculation};
use dunlin_core::units::Epoch;

const AHEAD_BYTES: u32 = 1000;

fn eager() -> Limits {
    Limits {
        ahead_bytes: AHEAD_BYTES,
        ..limits()
    }
}

/// A connection that the backup knows; all that was said of it is safe.
fn open() -> Talk {
    let mut talk = Talk::new();
    talk.core = Speculation::new(eager());
    talk.opens();
    talk.sync();
    talk
}

/// The VM says so many bytes more, all of them `byte`.
fn says(talk: &mut Talk, at: u32, count: usize, byte: u8) {
    let mut said = 0;
    while said < count {
        let n = (count - said).min(1400);
        let mut seg = talk.of_vm(at + said as u32, 0);
        seg.payload = vec![byte; n];
        talk.says(&seg);
        said += n;
    }
    talk.flush();
}

/// What is worth it goes ahead.
fn ahead(talk: &mut Talk) -> Vec<Bytes> {
    let mut parts = vec![];
    while let Some(part) = talk.core.ahead() {
        talk.replica
            .stage(talk.epoch, part.clone())
            .expect("what a primary says");
        parts.push(part);
    }
    parts
}

/// What a new primary has for the client, when the old one is dead and the client has nothing.
fn left_to_say(talk: &mut Talk) -> Vec<u8> {
    talk.die();
    let ack = talk.of_client(0, 0);
    talk.says(&ack);
    talk.write().0
}

#[test]
fn what_went_ahead_is_not_told_again_and_is_all_there_when_the_host_dies() {
    let mut talk = open();
    says(&mut talk, 0, 9_000, 1);
    // Four times the least at once.
    let parts = ahead(&mut talk);
    assert_eq!(parts.len(), 3, "{parts:?}");
    assert!(parts.iter().all(|part| part.len() < 4_300), "{parts:?}");
    says(&mut talk, 9_000, 500, 2);
    assert!(ahead(&mut talk).is_empty(), "little waits for the cut");
    let cut = talk.core.cut(talk.now, talk.epoch, false);
    assert!((500..800).contains(&cut.len()), "{}", cut.len());
    talk.replica.stage(talk.epoch, cut).expect("it follows");
    talk.safe(talk.epoch);
    assert_eq!(talk.replica.size(), (1, 9_500));
    assert_eq!(left_to_say(&mut talk), [vec![1; 9_000], vec![2; 500]].concat());
}

#[test]
fn what_went_ahead_counts_for_nothing_without_its_sync() {
    let mut talk = open();
    says(&mut talk, 0, 3_000, 1);
    ahead(&mut talk);
    talk.sync();
    says(&mut talk, 3_000, 3_000, 2);
    assert_eq!(ahead(&mut talk).len(), 1);
    assert_eq!(left_to_say(&mut talk), vec![1; 3_000]);
}

#[test]
fn what_is_not_safe_does_not_leave_though_the_backup_has_it() {
    let mut talk = open();
    says(&mut talk, 0, 3_000, 1);
    ahead(&mut talk);
    assert!(talk.write().0.is_empty());
    talk.cut();
    assert!(talk.write().0.is_empty());
    talk.safe(Epoch(talk.epoch.0 - 1));
    assert_eq!(talk.write().0.len(), 3_000);
}

#[test]
fn a_new_backup_is_told_all_whatever_went_ahead_to_another_one() {
    let mut talk = open();
    says(&mut talk, 0, 3_000, 1);
    ahead(&mut talk);
    talk.replica = Replica::new(eager());
    let whole = talk.core.cut(talk.now, talk.epoch, true);
    talk.replica.stage(talk.epoch, whole).expect("it is whole");
    talk.safe(talk.epoch);
    assert_eq!(left_to_say(&mut talk), vec![1; 3_000]);
}

#[test]
fn parts_that_do_not_follow_each_other_are_refused_and_change_nothing() {
    let mut talk = open();
    says(&mut talk, 0, 9_000, 1);
    let first = talk.core.ahead().expect("much waits");
    let second = talk.core.ahead().expect("more waits");
    let (epoch, size) = (talk.epoch, talk.replica.size());
    assert!(
        talk.replica.stage(epoch, second.clone()).is_err(),
        "the first is missing"
    );
    assert_eq!(talk.replica.size(), size);
    talk.replica.stage(epoch, first).expect("it follows");
    assert!(
        talk.replica.stage(Epoch(epoch.0 - 1), second.clone()).is_err(),
        "of an epoch that is over"
    );
    talk.replica.stage(epoch, second.clone()).expect("it follows");
    assert!(talk.replica.stage(epoch, second).is_err(), "twice");
}

/// A primary that sends ahead without an end is refused before it costs more than three checkpoints' streams.
#[test]
fn what_comes_ahead_is_bounded() {
    let small = Limits {
        total_bytes: 20_000,
        ..eager()
    };
    let mut talk = open();
    talk.replica = Replica::new(small);
    let whole = talk.core.cut(talk.now, talk.epoch, true);
    talk.replica.stage(talk.epoch, whole).expect("it is whole");
    talk.safe(talk.epoch);
    talk.epoch = talk.epoch.next();
    let mut refused = 0;
    for round in 0..20 {
        says(&mut talk, round * 4_000, 4_000, 1);
        while let Some(part) = talk.core.ahead() {
            refused += u32::from(talk.replica.stage(talk.epoch, part).is_err());
            assert!(talk.replica.size().1 <= 60_000, "{:?}", talk.replica.size());
        }
    }
    assert!(refused > 0);
    assert!(talk.replica.size().1 > 30_000, "{:?}", talk.replica.size());
}

/// Parts of epochs that never end cost a bounded number of entries.
#[test]
fn epochs_that_never_end_are_bounded() {
    let mut talk = open();
    let part = talk.core.cut(talk.now, talk.epoch, false);
    let mut replica = Replica::new(eager());
    let taken = (1..10_000)
        .take_while(|epoch| replica.stage(Epoch(*epoch), part.clone()).is_ok())
        .count();
    assert_eq!(taken, 1024);
}

/// What went ahead of a connection that has ended since stays with the backup until the cut.
#[test]
fn no_more_goes_ahead_of_a_cut_than_may_be_kept() {
    let mut talk = open();
    talk.core = Speculation::new(Limits {
        total_bytes: 20_000,
        ..eager()
    });
    let mut ahead = 0;
    for client in [0, 4, 8] {
        talk.client = client;
        talk.opens();
        says(&mut talk, 0, 9_000, 1);
        while let Some(part) = talk.core.ahead() {
            ahead += part.len();
        }
        // Its client gives it up.
        let mut reset = talk.of_client(0, 0);
        reset.flags = RST;
        talk.says(&reset);
        assert_eq!(talk.core.size().1, 0);
    }
    assert!((15_000..20_500).contains(&ahead), "{ahead}");
}
