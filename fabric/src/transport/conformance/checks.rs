//! The checks themselves; see the parent module.

use super::{Bed, R, open, payload, until, until_closed};
use crate::transport::ring::{Found, Place, RingReader, RingWriter, Sent};
use crate::transport::word::{SLOT_BYTES, WordReader, WordWriter};
use crate::transport::{Transport, TransportError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SMALL: Place = Place {
    region: R,
    offset: SLOT_BYTES,
    bytes: 4096,
};
const REGION: usize = SLOT_BYTES + 4096;

fn ends(a: &dyn Transport, b: &dyn Transport) -> (RingWriter, RingReader) {
    let (granted, opened) = (a.granted(R).expect("granted"), b.opened(R).expect("opened"));
    assert_eq!(granted, opened, "both ends know the same grant");
    (
        RingWriter::new(SMALL, granted.epoch, granted.key),
        RingReader::new(SMALL, opened.epoch, opened.key),
    )
}

/// Invariants 1 to 3, with the writer on another thread: many laps of a small ring, every message equals what was sent.
/// The cursor travels back as a word in the other direction.
pub fn entries_are_believed_only_whole(bed: &mut dyn Bed, count: u64) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    open(&mut *b, &mut *a, 1, REGION);
    let (mut writer, mut reader) = ends(&*a, &*b);
    let mut cursor = WordReader::new(0, a.opened(R).expect("opened").key);
    let back = b.granted(R).expect("granted");
    let mut give = WordWriter::new(R, 0, back.epoch, back.key);
    let started = Instant::now();
    let in_time = || {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "messages stopped arriving"
        )
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..count {
                let message = payload(n, 3000);
                let mut at = 0;
                while let Sent::Until(rest) = writer.send_rest(&mut *a, &message, at).expect("send") {
                    at = rest;
                    a.flush().expect("flush");
                    a.progress(1 << 20).expect("progress");
                    if let Some([consumed, ..]) = a.region(R).and_then(|m| cursor.get(m)) {
                        assert!(writer.give_back(consumed));
                    } else {
                        std::thread::yield_now();
                    }
                    in_time();
                }
                if n % 7 == 0 {
                    a.flush().expect("flush");
                }
            }
            a.flush().expect("flush");
            // The last bytes may still be on their way: go on until the reader has it all.
            while writer.room() < SMALL.bytes {
                a.progress(1 << 20).expect("progress");
                if let Some([consumed, ..]) = a.region(R).and_then(|m| cursor.get(m)) {
                    assert!(writer.give_back(consumed));
                } else {
                    std::thread::yield_now();
                }
                in_time();
            }
        });
        let mut got = Vec::new();
        let mut n = 0;
        let mut told = 0;
        while n < count {
            let progressed = b.progress(4096);
            while n < count && reader.next(b.region(R).expect("open"), &mut got) == Found::Message {
                assert!(
                    got == payload(n, 3000),
                    "{}: message {n} differs from what was sent",
                    b.fabric()
                );
                n += 1;
            }
            if told != reader.consumed() {
                told = reader.consumed();
                give.put(&mut *b, [told, 0, 0]).expect("cursor");
                b.flush().expect("flush");
            } else {
                progressed.expect("progress");
                std::thread::yield_now();
            }
            in_time();
        }
        // Words of a lying fabric may be lost: repeat until the writer has left.
        while b.progress(4096).is_ok() {
            if give
                .put(&mut *b, [reader.consumed(), 0, 0])
                .and_then(|()| b.flush())
                .is_err()
            {
                break;
            }
            std::thread::yield_now();
            in_time();
        }
    });
}

/// Messages full of records that imitate this ring's own headers for coming sequences are data, never records.
pub fn no_payload_poses_as_an_entry(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 7, REGION);
    let (mut writer, mut reader) = ends(&*a, &*b);
    let mut got = Vec::new();
    for n in 0..2000u64 {
        // Every 32 bytes: "sequence n+k, length 0, epoch 7, checksum as an outsider without the key would make it".
        let mut message = Vec::new();
        for k in 0..8u64 {
            let words = [n + 2 + k, 0, 7];
            let mut all = [0u8; 40];
            for (i, w) in words
                .into_iter()
                .chain([xxhash_rust::xxh3::xxh3_64(&[]), 0])
                .enumerate()
            {
                all[i * 8..i * 8 + 8].copy_from_slice(&w.to_le_bytes());
            }
            message.extend_from_slice(&all[..24]);
            message.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&all).to_le_bytes());
        }
        assert_eq!(writer.send(&mut *a, &message).expect("send"), Sent::Whole);
        a.flush().expect("flush");
        until(&mut *a, &mut *b, "a message arrives", |_, b| {
            reader.next(b.region(R).expect("open"), &mut got) == Found::Message
        });
        assert!(got == message, "{}: message {n} differs", b.fabric());
        assert_eq!(
            reader.next(b.region(R).expect("open"), &mut got),
            Found::Nothing,
            "nothing else was sent"
        );
        assert!(writer.give_back(reader.consumed()));
    }
}

/// Without a cursor the writer stops in time, and goes on where it stopped.
pub fn a_full_ring_pushes_back(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    let (mut writer, mut reader) = ends(&*a, &*b);
    let message = vec![0x5a; 10_000]; // larger than the ring
    let Sent::Until(at) = writer.send(&mut *a, &message).expect("send") else {
        panic!("the ring took more than it has")
    };
    assert!(at > 0 && at < 4096);
    assert_eq!(
        writer.send_rest(&mut *a, &message, at).expect("send"),
        Sent::Until(at),
        "still full"
    );
    assert!(!writer.give_back(1 << 40), "an impossible cursor is refused");
    let (mut at, mut got) = (at, Vec::new());
    until(&mut *a, &mut *b, "the message arrives", |a, b| {
        let found = reader.next(b.region(R).expect("open"), &mut got);
        assert!(writer.give_back(reader.consumed()));
        if at < message.len() {
            at = match writer.send_rest(a, &message, at).expect("send") {
                Sent::Whole => message.len(),
                Sent::Until(at) => at,
            };
            a.flush().expect("flush");
        }
        found == Found::Message
    });
    assert!(got == message);
}

/// A word that is read was written, and never goes back.
pub fn words_only_grow(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    let grant = a.granted(R).expect("granted");
    let mut writer = WordWriter::new(R, 0, 1, grant.key);
    let mut reader = WordReader::new(0, grant.key);
    const LAST: u64 = 30_000;
    std::thread::scope(|scope| {
        let stop = AtomicBool::new(false);
        let stop = &*Box::leak(Box::new(stop));
        scope.spawn(move || {
            let mut i = 0;
            while !stop.load(Ordering::Acquire) {
                i = (i + 1).min(LAST);
                match writer.put(&mut *a, [i, i * 3, !i]) {
                    Ok(()) => a.flush().expect("flush"),
                    Err(TransportError::Full) => {}
                    Err(e) => panic!("{e}"),
                }
                let _ = a.progress(1 << 16);
                if i == LAST {
                    std::thread::yield_now();
                }
            }
        });
        let mut before = 0;
        let started = Instant::now();
        while before < LAST {
            b.progress(1 << 16).expect("progress");
            if let Some([x, y, z]) = reader.get(b.region(R).expect("open")) {
                assert!(y == x * 3 && z == !x, "{}: a torn word was believed", b.fabric());
                assert!(
                    x >= before,
                    "{}: a word went back from {before} to {x}",
                    b.fabric()
                );
                before = x;
            } else {
                std::thread::yield_now();
            }
            if started.elapsed() > Duration::from_secs(30) {
                stop.store(true, Ordering::Release);
                panic!("{}: words stopped arriving at {before}", b.fabric());
            }
        }
        stop.store(true, Ordering::Release);
        // The writer may be blocked on a full buffer: let it drain.
        while b.progress(1 << 16).is_ok() && started.elapsed() < Duration::from_secs(30) {}
    });
}

/// A write under an older epoch, made or still under way when the memory was registered anew, is not in the new memory.
pub fn stale_writes_are_never_read(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    a.write(R, 1, 0, &[0xee; 256]).expect("write");
    b.register(R, 2, REGION).expect("register");
    // `a` has not heard of it: it still writes under the old grant, and its flush carries both.
    let _ = a.write(R, 1, 0, &[0xee; 256]);
    let _ = a.flush();
    let deadline = Instant::now() + Duration::from_millis(50);
    while Instant::now() < deadline || a.granted(R).is_none_or(|g| g.epoch != 2) {
        a.progress(1 << 20).expect("progress");
        b.progress(1 << 20).expect("progress");
        assert_eq!(
            b.region(R).expect("open").load(0),
            0,
            "{}: a stale write landed",
            b.fabric()
        );
        assert!(
            Instant::now() < deadline + Duration::from_secs(60),
            "the new grant did not arrive"
        );
    }
    let refused = a.write(R, 1, 0, &[0xee; 8]);
    assert!(
        matches!(refused, Err(TransportError::Stale { .. })),
        "{}: {refused:?}",
        a.fabric()
    );
    a.write_notify(R, 2, 0, &7u64.to_le_bytes()).expect("write");
    until(&mut *a, &mut *b, "the new epoch's write lands", |_, b| {
        b.region(R).expect("open").load(0) == 7
    });
}

/// While the peer writes without pause, memory is revoked and opened anew many times: the new memory stays zero.
pub fn nothing_lands_after_revoke(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    std::thread::scope(|scope| {
        let stop = &*Box::leak(Box::new(AtomicBool::new(false)));
        scope.spawn(move || {
            while !stop.load(Ordering::Acquire) {
                // Only odd epochs are written to, whatever is granted.
                if let Some(g) = a.granted(R).filter(|g| g.epoch % 2 == 1) {
                    match a.write_notify(R, g.epoch, 64, &[0xff; 1024]) {
                        Ok(()) | Err(TransportError::Full | TransportError::Stale { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                a.progress(1 << 16).expect("progress");
            }
        });
        let mut landed = 0;
        for epoch in 2..200u64 {
            b.revoke(R);
            assert!(
                b.region(R).is_none() && b.opened(R).is_none(),
                "{}: still open after revoke",
                b.fabric()
            );
            b.register(R, epoch, REGION).expect("register");
            let started = Instant::now();
            let patience = Duration::from_millis(if epoch % 2 == 1 { 200 } else { 1 });
            while started.elapsed() < patience {
                b.progress(1 << 16).expect("progress");
                let word = b.region(R).expect("open").load(64);
                if word != 0 {
                    assert!(epoch % 2 == 1, "{}: {word:x} landed after the revoke", b.fabric());
                    landed += 1;
                    break;
                }
            }
        }
        stop.store(true, Ordering::Release);
        assert!(
            landed > 50,
            "{}: the writer hardly wrote ({landed}): nothing was tested",
            b.fabric()
        );
        let started = Instant::now();
        while b.progress(1 << 16).is_ok() && started.elapsed() < Duration::from_secs(5) {}
    });
}

/// Invariant 5.
pub fn a_dead_peer_is_noticed(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    drop(b);
    until_closed(&mut *a);
}

/// Invariant 6, with the sleeper on its own thread in poll(2), many times.
pub fn a_sleeper_is_woken(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    open(&mut *b, &mut *a, 1, REGION);
    const ROUNDS: u64 = 3000;
    let sleep_until = |t: &mut dyn Transport, offset: usize, value: u64| {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            t.progress(1 << 16).expect("progress");
            if t.region(R).expect("open").load(offset) >= value {
                return;
            }
            t.arm().expect("arm");
            if t.region(R).expect("open").load(offset) < value {
                let mut fds: Vec<libc::pollfd> = (t.fds().into_iter().flatten())
                    .map(|fd| libc::pollfd {
                        fd,
                        events: libc::POLLIN,
                        revents: 0,
                    })
                    .collect();
                // SAFETY: a live array of the stated length.
                let n = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 5000) };
                // Where the peer's thread had no turn meanwhile there was nothing to wake it for.
                let due = t.region(R).expect("open").load(offset) >= value;
                assert!(
                    n != 0 || !due,
                    "{}: nobody woke the sleeper at {value}",
                    t.fabric()
                );
                assert!(Instant::now() < deadline, "{}: {value} does not come", t.fabric());
            }
            t.disarm();
        }
    };
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || {
            for i in 1..=ROUNDS {
                sleep_until(&mut *b, 0, i);
                b.write_notify(R, 1, 0, &i.to_le_bytes()).expect("write");
            }
            b
        });
        for i in 1..=ROUNDS {
            a.write_notify(R, 1, 0, &i.to_le_bytes()).expect("write");
            sleep_until(&mut *a, 0, i);
        }
        drop(echo.join());
    });
}

/// `reconnect` leaves nothing of the old connection.
pub fn a_reconnected_link_starts_afresh(bed: &mut dyn Bed) {
    let (mut a, mut b) = bed.pair();
    open(&mut *a, &mut *b, 1, REGION);
    a.write_notify(R, 1, 0, &1u64.to_le_bytes()).expect("write");
    let Some((x, y)) = bed.streams() else { return };
    a.reconnect(x).expect("reconnect");
    b.reconnect(y).expect("reconnect");
    assert!(
        a.granted(R).is_none() && b.region(R).is_none(),
        "{}: something was left over",
        a.fabric()
    );
    open(&mut *a, &mut *b, 1, REGION);
    assert_eq!(b.region(R).expect("open").load(0), 0);
    a.write_notify(R, 1, 0, &2u64.to_le_bytes()).expect("write");
    until(&mut *a, &mut *b, "a write lands", |_, b| {
        b.region(R).expect("open").load(0) == 2
    });
}
