use super::*;
use bytes::Bytes;
use dunlin_core::consensus::{Entry, EntryKind, HardState, Member, Snapshot};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A directory of one test, removed with it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let n: [u8; 8] = crate::keys::random().unwrap();
        let path = std::env::temp_dir().join(format!("dunlin-{name}-{:x}", u64::from_le_bytes(n)));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn stamp(term: u64, index: u64) -> Viewstamp {
    Viewstamp {
        term: Term(term),
        index: Index(index),
    }
}

fn entry(term: u64, index: u64) -> Entry {
    let kind = [EntryKind::Data, EntryKind::Barrier][(index % 5 == 0) as usize];
    let payload = vec![(index * 7 + term) as u8; (index * 37 % 300) as usize];
    Entry {
        stamp: stamp(term, index),
        kind,
        payload: Bytes::from(payload),
    }
}

fn entries(term: u64, range: std::ops::RangeInclusive<u64>) -> Vec<Entry> {
    range.map(|i| entry(term, i)).collect()
}

fn small() -> DiskOptions {
    DiskOptions {
        segment_bytes: 16 << 10,
        limit_bytes: None,
    }
}

fn open(dir: &Scratch) -> (Disk, Found) {
    Disk::open(dir.path(), small()).unwrap()
}

fn segments(dir: &Scratch) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    all.retain(|p| p.file_name().unwrap().to_str().unwrap().starts_with("log-"));
    all.sort();
    all
}

#[test]
fn what_was_synced_is_found_again_over_many_segments() {
    let dir = Scratch::new("found");
    let (mut disk, found) = open(&dir);
    assert!(
        found.log.is_empty() && found.hard_state.is_none() && found.snapshot.is_none() && found.cut.is_none()
    );
    for batch in 0..40 {
        disk.append(&entries(3, batch * 10 + 1..=batch * 10 + 10))
            .unwrap();
        disk.sync().unwrap();
        while disk.prepare().unwrap() {}
    }
    let hard_state = HardState {
        term: Term(3),
        voted_for: Some(ReplicaId(2)),
    };
    disk.hard_state(hard_state).unwrap();
    assert!(matches!(
        Disk::open(dir.path(), small()),
        Err(DiskError::Busy { .. })
    ));
    drop(disk);
    assert!(segments(&dir).len() > 3);
    let (_, found) = open(&dir);
    assert_eq!(found.log, entries(3, 1..=400));
    assert_eq!((found.hard_state, found.cut), (Some(hard_state), None));
}

#[test]
fn a_log_that_was_left_for_one_in_memory_says_so_until_it_counts_again() {
    let dir = Scratch::new("left");
    let (mut disk, found) = open(&dir);
    assert!(!found.in_memory);
    disk.append(&entries(1, 1..=400)).unwrap();
    disk.sync().unwrap();
    disk.snapshot(&Snapshot {
        last: stamp(1, 10),
        members: vec![Member::full(0)],
        state: Bytes::new(),
    })
    .unwrap();
    let hard_state = HardState {
        term: Term(1),
        voted_for: None,
    };
    disk.hard_state(hard_state).unwrap();
    disk.leaves_for_memory().unwrap();
    disk.leaves_for_memory().unwrap();
    drop(disk);
    // A crash while it is being forgotten leaves a log that can be read.
    assert!(segments(&dir).len() > 2);
    while segments(&dir).len() > 2 {
        std::fs::remove_file(segments(&dir).pop().unwrap()).unwrap();
        assert!(open(&dir).1.in_memory);
    }
    let (mut disk, _) = open(&dir);
    disk.forget().unwrap();
    drop(disk);
    let (mut disk, found) = open(&dir);
    assert!(found.in_memory && found.log.is_empty() && found.snapshot.is_none());
    assert_eq!(found.hard_state, Some(hard_state));
    disk.append(&entries(2, 1..=5)).unwrap();
    disk.counts_again().unwrap();
    drop(disk);
    let (_, found) = open(&dir);
    assert_eq!((found.log, found.in_memory), (entries(2, 1..=5), false));
}

#[test]
fn a_cut_suffix_stays_cut_and_a_newer_term_replaces_it() {
    let dir = Scratch::new("cut");
    let (mut disk, _) = open(&dir);
    disk.append(&entries(1, 1..=20)).unwrap();
    disk.cut(Index(11)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    let (mut disk, found) = open(&dir);
    assert_eq!(found.log, entries(1, 1..=10));
    disk.append(&entries(2, 11..=14)).unwrap();
    disk.append(&entries(3, 13..=13)).unwrap(); // replaces without a cut of its own
    disk.sync().unwrap();
    drop(disk);
    let expected: Vec<_> = [entries(1, 1..=10), entries(2, 11..=12), entries(3, 13..=13)].concat();
    assert_eq!(open(&dir).1.log, expected);
}

#[test]
fn a_snapshot_removes_what_it_stands_for_and_may_leap_ahead() {
    let dir = Scratch::new("snapshot");
    let (mut disk, _) = open(&dir);
    disk.append(&entries(1, 1..=400)).unwrap();
    disk.sync().unwrap();
    let before = segments(&dir).len();
    let snapshot = |term, index| Snapshot {
        last: stamp(term, index),
        members: vec![Member::full(0), Member::witness(2)],
        state: Bytes::from(vec![9; 5000]),
    };
    disk.snapshot(&snapshot(1, 390)).unwrap();
    assert!(segments(&dir).len() < before);
    drop(disk);
    let (mut disk, found) = open(&dir);
    assert_eq!(found.snapshot, Some(snapshot(1, 390)));
    assert!(found.log.first().unwrap().stamp.index <= Index(391));
    assert_eq!(found.log.last().unwrap().stamp, stamp(1, 400));
    // From another replica, far ahead.
    disk.snapshot(&snapshot(5, 9000)).unwrap();
    disk.append(&entries(5, 8990..=9010)).unwrap(); // what the snapshot stands for is left out
    disk.sync().unwrap();
    drop(disk);
    let (_, found) = open(&dir);
    assert_eq!(found.snapshot, Some(snapshot(5, 9000)));
    assert_eq!(found.log, entries(5, 9001..=9010));
    assert_eq!(segments(&dir).len(), 1);
}

#[test]
fn a_log_that_was_overruled_begins_anew_below_its_old_snapshot() {
    let dir = Scratch::new("overruled");
    let (mut disk, _) = open(&dir);
    disk.append(&entries(1, 1..=400)).unwrap();
    let snapshot = |term, index| Snapshot {
        last: stamp(term, index),
        members: vec![Member::full(0), Member::witness(2)],
        state: Bytes::new(),
    };
    disk.snapshot(&snapshot(1, 390)).unwrap();
    disk.snapshot(&snapshot(0, 0)).unwrap();
    disk.cut(Index(1)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    let (mut disk, found) = open(&dir);
    assert_eq!(found.snapshot, Some(snapshot(0, 0)));
    assert!(found.log.is_empty(), "{:?}", found.log);
    disk.append(&entries(9, 1..=20)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    assert_eq!(open(&dir).1.log, entries(9, 1..=20));
}

/// Cuts the last segment's content at every length: what is found is a prefix that contains everything synced before the
/// last batch, and the disk can be used on.
#[test]
fn a_torn_tail_is_cut_at_every_byte() {
    let dir = Scratch::new("torn");
    let (mut disk, _) = open(&dir);
    disk.append(&entries(1, 1..=8)).unwrap();
    disk.sync().unwrap();
    let file = segments(&dir).pop().unwrap();
    let whole = |file: &Path| {
        std::fs::read(file)
            .unwrap()
            .iter()
            .rposition(|b| *b != 0)
            .unwrap()
            + 1
    };
    let synced = whole(&file).next_multiple_of(8);
    disk.append(&entries(1, 9..=12)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    let original = std::fs::read(&file).unwrap();
    let end = whole(&file);
    for cut in synced..end {
        let mut torn = original.clone();
        torn[cut..end].fill(0);
        std::fs::write(&file, &torn).unwrap();
        let (mut disk, found) = open(&dir);
        assert!(
            found.log.len() >= 8,
            "cut at {cut}: only {} entries",
            found.log.len()
        );
        assert_eq!(found.log, entries(1, 1..=found.log.len() as u64), "cut at {cut}");
        // A torn record leaves its mark behind, unless the cut is between two records.
        let n = found.log.len() as u64;
        disk.append(&entries(2, n + 1..=n + 1)).unwrap();
        disk.sync().unwrap();
        drop(disk);
        assert_eq!(
            open(&dir).1.log.last().unwrap().stamp,
            stamp(2, n + 1),
            "cut at {cut}"
        );
    }
    // Rubbish of any kind behind what was synced is a torn tail, too.
    for seed in 0..200u64 {
        let mut torn = original.clone();
        let mut state = seed;
        for byte in &mut torn[synced..end] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        std::fs::write(&file, &torn).unwrap();
        let (_, found) = open(&dir);
        assert_eq!(found.log, entries(1, 1..=8));
        assert_eq!(
            found.cut.map(|c| (c.file, c.offset)),
            Some((file.clone(), synced as u64))
        );
    }
}

/// One damaged byte anywhere in what was synced before the last batch: opening says where, or the byte meant nothing.
#[test]
fn damage_in_the_middle_is_an_error_that_names_file_and_offset() {
    let dir = Scratch::new("middle");
    let (mut disk, _) = open(&dir);
    for batch in 0..20 {
        disk.append(&entries(1, batch * 5 + 1..=batch * 5 + 5)).unwrap();
        disk.sync().unwrap();
    }
    drop(disk);
    let files = segments(&dir);
    assert_eq!(files.len(), 2);
    for (i, file) in files.iter().enumerate() {
        let original = std::fs::read(file).unwrap();
        let end = original.iter().rposition(|b| *b != 0).unwrap() + 1;
        // In the last file all but the last batch; in the one before everything.
        let last_batch = if i == 1 { 5 * 400 } else { 0 };
        for at in (0..end - last_batch).step_by(3) {
            let mut damaged = original.clone();
            damaged[at] ^= 0x40;
            std::fs::write(file, &damaged).unwrap();
            match Disk::open(dir.path(), small()) {
                Err(DiskError::Corrupt {
                    file: named, offset, ..
                }) => {
                    assert_eq!(&named, file);
                    assert!(offset as usize <= at, "damage at {at} was reported at {offset}");
                }
                Err(e) => panic!("{e}"),
                Ok((_, found)) => assert_eq!(found.log, entries(1, 1..=100), "silent loss by damage at {at}"),
            }
        }
        std::fs::write(file, &original).unwrap();
    }
    assert_eq!(open(&dir).1.log.len(), 100);
    std::fs::remove_file(&files[0]).unwrap();
    assert!(
        matches!(Disk::open(dir.path(), small()), Err(DiskError::Corrupt { .. })),
        "a missing segment is noticed"
    );
}

#[test]
fn blocks_of_removed_segments_are_never_taken_for_records() {
    let dir = Scratch::new("stale");
    let (mut disk, _) = open(&dir);
    disk.append(&entries(1, 1..=8)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    let file = segments(&dir).pop().unwrap();
    let old = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let (mut disk, _) = open(&dir);
    disk.append(&entries(2, 1..=1)).unwrap();
    disk.sync().unwrap();
    drop(disk);
    // The file system gave us an old block behind our first record.
    let raw = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    raw.write_all_at(&old[64..2000], 1024).unwrap();
    assert_eq!(open(&dir).1.log, entries(2, 1..=1));
}

fn wait_for(writer: &mut Writer, mut done: impl FnMut(&[Done]) -> bool) -> Vec<Done> {
    let mut all = Vec::new();
    let started = std::time::Instant::now();
    while !done(&all) {
        all.extend(writer.done());
        assert!(started.elapsed().as_secs() < 60, "got only {all:?}");
        std::thread::yield_now();
    }
    all
}

#[test]
fn a_full_disk_stops_the_acknowledgement_and_goes_on_when_there_is_room() {
    for mode in [Mode::Thread, Mode::Inline] {
        let dir = Scratch::new("full");
        let options = DiskOptions {
            segment_bytes: 16 << 10,
            limit_bytes: Some(48 << 10),
        };
        let (disk, _) = Disk::open(dir.path(), options.clone()).unwrap();
        let mut writer = Writer::new(disk, mode).unwrap();
        let mut submitted = 0;
        let mut all = Vec::new();
        let is_full = |all: &[Done]| all.iter().any(|d| matches!(d, Done::Full(_)));
        while !is_full(&all) {
            submitted += 1;
            writer.submit(Command::Persist {
                entries: entries(1, submitted * 10 - 9..=submitted * 10),
                ticket: submitted,
            });
            all.extend(wait_for(&mut writer, |done| !done.is_empty()));
            assert!(submitted < 1000);
        }
        assert!(!all.contains(&Done::Persisted(submitted)));
        assert!(writer.queued_bytes() > 0, "what waits for room is counted");
        // A hard state needs no room; a snapshot makes some.
        let hard_state = HardState {
            term: Term(4),
            voted_for: None,
        };
        writer.submit(Command::HardState(hard_state));
        let done = wait_for(&mut writer, |done| done.contains(&Done::HardState(hard_state)));
        assert!(!done.contains(&Done::Room));
        let last = stamp(1, submitted * 10 - 30);
        writer.submit(Command::Snapshot(Snapshot {
            last,
            ..Snapshot::default()
        }));
        let done = wait_for(&mut writer, |done| done.contains(&Done::Room));
        assert!(done.contains(&Done::Snapshot(last)) && done.contains(&Done::Persisted(submitted)));
        assert_eq!(writer.queued_bytes(), 0);
        drop(writer);
        let (_, found) = Disk::open(dir.path(), options).unwrap();
        assert_eq!(
            found.log.last().unwrap().stamp,
            stamp(1, submitted * 10),
            "{mode:?}"
        );
    }
}

/// A log whose disk is full of entries with such a payload; a snapshot stands for the first three. And how many tickets it has got.
fn filled(dir: &Scratch, mode: Mode, payload: usize) -> (Writer, u64) {
    let options = DiskOptions {
        segment_bytes: 16 << 10,
        limit_bytes: Some(48 << 10),
    };
    let (disk, _) = Disk::open(dir.path(), options).unwrap();
    let mut writer = Writer::new(disk, mode).unwrap();
    let (mut all, mut ticket): (Vec<Done>, u64) = (Vec::new(), 0);
    while !all.iter().any(|d| matches!(d, Done::Full(_))) {
        ticket += 1;
        assert!(ticket < 1000);
        let entries = (ticket * 10 - 9..=ticket * 10).map(|index| Entry {
            stamp: stamp(1, index),
            kind: EntryKind::Data,
            payload: Bytes::from(vec![7; payload]),
        });
        writer.submit(Command::Persist {
            entries: entries.collect(),
            ticket,
        });
        all.extend(wait_for(&mut writer, |done| !done.is_empty()));
        if ticket == 1 {
            writer.submit(standing_for(1, 3));
            wait_for(&mut writer, |done| done.contains(&Done::Snapshot(stamp(1, 3))));
        }
    }
    (writer, ticket)
}

fn standing_for(term: u64, index: u64) -> Command {
    Command::Snapshot(Snapshot {
        last: stamp(term, index),
        ..Snapshot::default()
    })
}

/// A person has said that this host is dead, and it returns: the log that it forgets had entries that have found no room.
#[test]
fn a_log_that_was_overruled_on_a_full_disk_begins_anew_without_what_waited_for_room() {
    for mode in [Mode::Thread, Mode::Inline] {
        let dir = Scratch::new("overruled-full");
        // At the end of the segment there is room for what says so, and for two small entries.
        let (mut writer, ticket) = filled(&dir, mode, 1000);
        let order = HardState {
            term: Term(9),
            voted_for: None,
        };
        writer.submit(Command::HardState(order));
        writer.submit(standing_for(0, 0));
        writer.submit(Command::Cut(Index(1)));
        writer.submit(Command::Persist {
            entries: entries(9, 1..=2),
            ticket: ticket + 1,
        });
        let done = wait_for(&mut writer, |done| done.contains(&Done::Persisted(ticket + 1)));
        assert!(done.contains(&Done::HardState(order)) && done.contains(&Done::Snapshot(stamp(0, 0))));
        assert_eq!(writer.queued_bytes(), 0);
        drop(writer);
        let (_, found) = open(&dir);
        assert_eq!(found.snapshot.map(|snapshot| snapshot.last), Some(stamp(0, 0)));
        assert_eq!(found.log, entries(9, 1..=2), "{mode:?}");
    }
}

/// The first one needs room to say that what the log held does not count any more; the second would need none.
#[test]
fn a_snapshot_does_not_overtake_one_that_has_found_no_room() {
    for mode in [Mode::Thread, Mode::Inline] {
        let dir = Scratch::new("snapshots-full");
        // Fifteen such entries fill a segment to its last byte.
        let (mut writer, _) = filled(&dir, mode, 1048);
        writer.submit(standing_for(0, 0));
        writer.submit(standing_for(1, 4));
        let mut told: Vec<Done> = Vec::new();
        for term in 2..5 {
            let hard_state = HardState {
                term: Term(term),
                voted_for: None,
            };
            writer.submit(Command::HardState(hard_state));
            told.extend(wait_for(&mut writer, |done| {
                done.contains(&Done::HardState(hard_state))
            }));
        }
        assert!(!told.iter().any(|d| matches!(d, Done::Snapshot(_))), "{told:?}");
        drop(writer);
        let (_, found) = open(&dir);
        assert_eq!(found.snapshot.map(|snapshot| snapshot.last), Some(stamp(1, 3)));
        assert_eq!(found.log.last().map(|entry| entry.stamp), Some(stamp(1, 45)));
    }
}
