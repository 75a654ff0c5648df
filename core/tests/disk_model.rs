//! The I/O switch against a model disk: random writes of both VMs, delayed mirror frames, syncs, idle passes, crashes of
//! either host and fail-overs. A read must say what the VM was told; after every sync and fail-over the whole disk must.
//!
//! Quick by default; `DUNLIN_DISK_OPS=1000000 cargo test -p dunlin-core --test disk_model` is the full run,
//! `DUNLIN_DISK_SEED=n` repeats one seed.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a seed may be given

use bytes::Bytes;
use dunlin_core::{
    disk::{
        Content, EpochExtents, ExtentSet, Pressure, Storage, Switch, SwitchError, buffer::Shared,
        extents::EXTENT_BYTES, io_switch::Limits,
    },
    units::Epoch,
};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

const DISK: u64 = 96 << 10;

#[derive(Default)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }
}

enum Sent {
    Write(u64, Content),
    Mark(Epoch),
}

#[derive(Debug, Default)]
struct Counts {
    syncs: u64,
    settled_bytes: u64,
    fail_overs: u64,
    lost_backups: u64,
}

/// An idle pass that is under way.
struct Light {
    equal: Vec<Shared>,
    on_image: usize,
    /// The last committed sync when the pieces were looked for.
    seen_at: Epoch,
}

/// A primary and a backup, and what each VM was told.
struct World {
    rng: Rng,
    storage: Storage,
    primary: Vec<u8>,
    backup_image: Vec<u8>,
    /// What the backup VM must see.
    backup_view: Vec<u8>,
    switch: Switch,
    stream: VecDeque<Sent>,
    /// The primary's disk at marks that are not committed.
    snapshots: VecDeque<(Epoch, Vec<u8>)>,
    epoch: u64,
    light: Option<Light>,
    history: VecDeque<(u64, Content)>,
    counts: Counts,
}

fn put(image: &mut [u8], offset: u64, content: &Content) {
    let at = offset as usize;
    content.copy_to(0, &mut image[at..at + content.len() as usize]);
}

fn fill_gaps(out: &mut [u8], base: u64, image: &[u8], gaps: Vec<Range<u64>>) {
    for gap in gaps {
        out[(gap.start - base) as usize..(gap.end - base) as usize]
            .copy_from_slice(&image[gap.start as usize..gap.end as usize]);
    }
}

impl World {
    fn new(seed: u64, storage: Storage) -> Self {
        Self {
            rng: Rng(seed),
            storage,
            primary: vec![0; DISK as usize],
            backup_image: vec![0; DISK as usize],
            backup_view: vec![0; DISK as usize],
            switch: Switch::new(storage, Limits::default(), Epoch(0)),
            stream: VecDeque::new(),
            snapshots: VecDeque::new(),
            epoch: 0,
            light: None,
            history: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// Sectors, blocks, and odd pieces of both.
    fn range(&mut self) -> Range<u64> {
        let unit = [1, 512, 4096][self.rng.below(3) as usize];
        let start = self.rng.below(DISK / unit) * unit;
        let len = ((self.rng.below(3 * 4096 / unit) + 1) * unit).min(DISK - start);
        start..start + len
    }

    /// Few values, so that equal and zero pieces arise by chance as well.
    fn content(&mut self, len: u64) -> Content {
        match self.rng.below(8) {
            0 => Content::Zero(len),
            byte => Content::Data(Bytes::from(vec![byte as u8 % 5; len as usize])),
        }
    }

    fn primary_writes(&mut self) {
        let range = self.range();
        let content = self.content(range.end - range.start);
        put(&mut self.primary, range.start, &content);
        self.stream.push_back(Sent::Write(range.start, content.clone()));
        self.history.push_back((range.start, content));
        if self.history.len() > 16 {
            self.history.pop_front();
        }
    }

    /// "The primary VM and secondary VM run the same code": mostly what the primary wrote, in memory of its own.
    fn backup_writes(&mut self) {
        let again = if self.rng.below(4) == 0 {
            None
        } else {
            self.history.pop_front()
        };
        let (offset, content) = again.unwrap_or_else(|| {
            let range = self.range();
            let content = self.content(range.end - range.start);
            (range.start, content)
        });
        put(&mut self.backup_view, offset, &content);
        let own = match content {
            Content::Data(data) => Content::Data(Bytes::copy_from_slice(&data)),
            zero @ Content::Zero(_) => zero,
        };
        self.switch.own_write(offset, own);
    }

    fn deliver(&mut self) {
        match self.stream.pop_front() {
            None => {}
            Some(Sent::Mark(epoch)) => self.switch.mark(epoch).unwrap(),
            Some(Sent::Write(offset, content)) if self.storage == Storage::Gannet => {
                self.switch.mirrored_write(offset, content);
            }
            Some(Sent::Write(offset, content)) => {
                for gap in self.switch.to_save(offset..offset + content.len()) {
                    let old = self.backup_image[gap.start as usize..gap.end as usize].to_vec();
                    let old = match old.iter().all(|byte| *byte == 0) {
                        true => Content::Zero(old.len() as u64),
                        false => Content::Data(Bytes::from(old)),
                    };
                    self.switch.save(gap.start, old);
                }
                put(&mut self.backup_image, offset, &content);
            }
        }
    }

    fn view(&self, range: Range<u64>) -> Vec<u8> {
        let mut out = vec![0xaa; (range.end - range.start) as usize];
        let mut gaps: Vec<_> = std::iter::once(range.clone()).collect();
        self.switch.read(range.start, &mut out, &mut gaps);
        fill_gaps(&mut out, range.start, &self.backup_image, gaps);
        out
    }

    fn check_read(&mut self) {
        let range = self.range();
        let told = &self.backup_view[range.start as usize..range.end as usize];
        assert!(self.view(range.clone()) == told, "D1: {range:?}");
    }

    fn check_mirror(&self) {
        if !self.stream.is_empty() {
            return;
        }
        let mut out = vec![0xaa; DISK as usize];
        let mut gaps: Vec<_> = std::iter::once(0..DISK).collect();
        self.switch.read_mirrored(0, &mut out, &mut gaps);
        fill_gaps(&mut out, 0, &self.backup_image, gaps);
        assert!(
            out == self.primary,
            "what a verification hashes is the primary's disk"
        );
    }

    fn mark(&mut self) {
        self.epoch += 1 + self.rng.below(2);
        self.stream.push_back(Sent::Mark(Epoch(self.epoch)));
        self.snapshots
            .push_back((Epoch(self.epoch), self.primary.clone()));
    }

    /// Commits some mark; marks before it belong to broken syncs.
    fn commit(&mut self) {
        if self.snapshots.is_empty() {
            return;
        }
        let at = self.rng.below(self.snapshots.len() as u64) as usize;
        let epoch = self.snapshots[at].0;
        // An idle pass may be under way: a commit does not wait for it.
        match self.switch.commit(epoch) {
            Err(SwitchError::MarkMissing { .. }) => {
                assert!(self.switch.marked() < epoch, "D2: a mark that is here is enough");
                return;
            }
            done => done.unwrap(),
        }
        assert!(epoch <= self.switch.marked(), "D2, D5");
        self.snapshots.drain(..at);
        self.backup_view = self.snapshots.pop_front().unwrap().1;
        assert!(self.view(0..DISK) == self.backup_view, "D3: sync {epoch:?}");
        self.counts.syncs += 1;
    }

    /// The flusher: one thread does this and the idle pass.
    fn settle(&mut self) {
        if self.light.is_some() {
            return;
        }
        if self.rng.below(2) == 0 {
            self.switch.join_settled();
        }
        let Some((epoch, buffer)) = self.switch.next_settled() else {
            return;
        };
        for (offset, content) in buffer.runs() {
            put(&mut self.backup_image, offset, content);
        }
        self.switch.settled(epoch);
    }

    /// A step of the idle pass: look, write some, write more, forget.
    fn light(&mut self) {
        match self.light.take() {
            None => {
                let from = self.rng.below(DISK);
                let pieces = self.switch.in_both(from, 1 + self.rng.below(DISK));
                let equal: Vec<_> = pieces.into_iter().filter(Shared::is_equal).collect();
                if !equal.is_empty() {
                    self.light = Some(Light {
                        equal,
                        on_image: 0,
                        seen_at: self.switch.committed(),
                    });
                }
            }
            Some(light) if light.on_image < light.equal.len() => {
                let left = (light.equal.len() - light.on_image) as u64;
                let more = light.on_image + self.rng.below(left) as usize + 1;
                for piece in &light.equal[light.on_image..more] {
                    put(&mut self.backup_image, piece.offset, &piece.ours);
                }
                self.light = Some(Light {
                    on_image: more,
                    ..light
                });
            }
            Some(light) => self.switch.forget_equal(light.seen_at, &light.equal),
        }
    }

    /// The primary's host dies: the backup's VM goes on, and gets a new backup.
    fn fail_over(&mut self) {
        while self.light.is_some() {
            self.light();
        }
        let flushed = self.switch.take_over();
        for (offset, content) in flushed.runs() {
            put(&mut self.backup_image, offset, content);
        }
        assert!(
            self.backup_image == self.backup_view,
            "D4: the image is what the VM was told"
        );
        self.primary.clone_from(&self.backup_image);
        self.counts.fail_overs += 1;
        self.join();
    }

    /// A backup with a copy of the primary's disk.
    fn join(&mut self) {
        self.counts.settled_bytes += self.switch.counters().settled_bytes;
        self.backup_image.clone_from(&self.primary);
        self.backup_view.clone_from(&self.primary);
        self.switch = Switch::new(self.storage, Limits::default(), Epoch(self.epoch));
        self.stream.clear();
        self.snapshots.clear();
        self.history.clear();
        self.light = None;
    }

    fn step(&mut self) {
        match self.rng.below(1000) {
            0..250 => self.primary_writes(),
            250..450 => self.backup_writes(),
            450..750 => self.deliver(),
            750..850 => self.check_read(),
            850..870 => self.mark(),
            870..890 => self.commit(),
            890..930 => self.settle(),
            930..992 => self.light(),
            992..996 => self.check_mirror(),
            996..998 => self.fail_over(),
            _ => {
                self.counts.lost_backups += 1;
                self.join();
            }
        }
    }
}

/// Runs `check(seed, operations)` over several seeds; says the seed and the command when it fails.
fn run(name: &str, quick: u64, check: impl Fn(u64, u64) + std::panic::RefUnwindSafe) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let operations = number("DUNLIN_DISK_OPS").unwrap_or(quick);
    let one = number("DUNLIN_DISK_SEED");
    let share = if one.is_some() { operations } else { operations / 8 };
    for seed in one.map_or(1..9, |seed| seed..seed + 1) {
        if let Err(panic) = std::panic::catch_unwind(|| check(seed, share)) {
            eprintln!(
                "seed {seed} fails; repeat with\n  DUNLIN_DISK_SEED={seed} DUNLIN_DISK_OPS={share} \
                 cargo test -p dunlin-core --test disk_model {name}"
            );
            std::panic::resume_unwind(panic);
        }
    }
}

fn model(seed: u64, operations: u64, storage: Storage) {
    let mut world = World::new(seed, storage);
    for _ in 0..operations {
        world.step();
    }
    world.fail_over();
    let counts = &world.counts;
    assert!(
        counts.syncs > 0 && counts.fail_overs > 0 && counts.lost_backups > 0,
        "{counts:?}"
    );
    assert!(
        storage != Storage::Gannet || counts.settled_bytes > 0,
        "the idle pass never settled anything"
    );
}

#[test]
fn gannet_keeps_what_either_vm_was_told() {
    run("gannet", 40_000, |seed, operations| {
        model(seed, operations, Storage::Gannet)
    });
}

#[test]
fn colo_keeps_what_either_vm_was_told() {
    run("colo", 20_000, |seed, operations| {
        model(seed, operations, Storage::Colo)
    });
}

/// Two hosts' dirty extents, with a version number as each extent's content: after any fail-over, what differs is in the
/// union of both maps.
#[test]
fn union_of_both_dirty_maps_covers_every_difference() {
    run("union", 20_000, |seed, operations| {
        let mut pair = Pair {
            rng: Rng(seed),
            ..Pair::default()
        };
        for _ in 0..operations {
            pair.step();
        }
    });
}

const EXTENTS: u64 = 12;

#[derive(Default)]
struct Pair {
    rng: Rng,
    version: u64,
    primary: [u64; EXTENTS as usize],
    backup: [u64; EXTENTS as usize],
    notes: EpochExtents,
    snapshots: VecDeque<(Epoch, [u64; EXTENTS as usize])>,
    epoch: u64,
    /// The backup VM's own writes.
    svm: BTreeMap<u64, u64>,
    /// The newest commit that the primary was not told of.
    untold: Option<Epoch>,
}

impl Pair {
    fn step(&mut self) {
        self.version += 1;
        let extent = self.rng.below(EXTENTS);
        match self.rng.below(20) {
            0..8 => {
                self.notes
                    .note(&(extent * EXTENT_BYTES + 5..extent * EXTENT_BYTES + 9));
                self.primary[extent as usize] = self.version;
            }
            8..12 => {
                self.svm.insert(extent, self.version);
            }
            12..14 => {
                self.epoch += 1;
                self.notes.mark(Epoch(self.epoch));
                self.snapshots.push_back((Epoch(self.epoch), self.primary));
            }
            14..16 => {
                if let Some((epoch, snapshot)) = self.snapshots.pop_front() {
                    self.svm.clear();
                    self.backup = snapshot;
                    self.untold = Some(epoch);
                }
            }
            16..19 => {
                if let Some(epoch) = self.untold.take() {
                    self.notes.committed(epoch, true);
                }
            }
            _ => self.fail_over_and_return(),
        }
    }

    fn fail_over_and_return(&mut self) {
        let mut union = self.notes.needed();
        let mut theirs = ExtentSet::default();
        for (extent, version) in std::mem::take(&mut self.svm) {
            self.backup[extent as usize] = version;
            theirs.insert(extent);
        }
        union.union(&theirs);
        for extent in 0..EXTENTS {
            let differs = self.primary[extent as usize] != self.backup[extent as usize];
            assert!(
                !differs || union.remove(extent),
                "extent {extent} would not be copied"
            );
        }
        self.primary = self.backup;
        self.notes = EpochExtents::default();
        self.snapshots.clear();
        self.untold = None;
    }
}

#[test]
fn pressure_rises_before_memory_does() {
    let limits = Limits {
        sync_at_bytes: 1 << 20,
        throttle_at_bytes: 2 << 20,
        most_bytes: 3 << 20,
    };
    let mut switch = Switch::new(Storage::Gannet, limits, Epoch(0));
    let mut seen = vec![switch.pressure()];
    for at in 0..900u64 {
        switch.mirrored_write(at * 8192, Content::Data(Bytes::from(vec![1; 4096])));
        if *seen.last().unwrap() != switch.pressure() {
            seen.push(switch.pressure());
        }
    }
    assert_eq!(
        seen,
        [
            Pressure::None,
            Pressure::WantsSync,
            Pressure::Throttle,
            Pressure::Full
        ]
    );
    switch.mark(Epoch(1)).unwrap();
    switch.commit(Epoch(1)).unwrap();
    // What waits for a slow image is memory, but no reason for one sync after the other.
    assert!(switch.pressure() == Pressure::Full && !switch.wants_sync());
    switch.settled(Epoch(1));
    assert_eq!((switch.pressure(), switch.bytes()), (Pressure::None, 0));
}
