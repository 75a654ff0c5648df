//! Two real QEMUs on this machine and one sync between them, without network or consensus.
#![allow(dead_code)] // each test file uses its part

pub mod disk;
pub mod image;
pub mod skipped;

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_guest::frames::FramePort;
use dunlin_guest::memory::{BLOCK_BYTES, hash};
use dunlin_guest::{Bitmap, Colo, Machine, PAGE_BYTES, Ports, Qemu, Start, VmSpec};

/// So long a QEMU may take for an order, on a machine that does other things as well; Dunlin itself has less patience.
pub const OBEYS: Duration = Duration::from_secs(60);

/// One pair of VMs at a time: two TCG guests fill a small machine.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Syncs per machine type: 20, or $DUNLIN_SYNCS.
pub fn syncs_wanted() -> usize {
    syncs_or(20)
}

/// $DUNLIN_SYNCS, or so many.
pub fn syncs_or(usual: usize) -> usize {
    std::env::var("DUNLIN_SYNCS")
        .ok()
        .map_or(usual, |n| n.parse().expect("DUNLIN_SYNCS is a number"))
}

/// The Linux guest; $DUNLIN_TEST_QEMU names another executable.
pub fn linux(machine: Machine, vcpus: u32) -> VmSpec {
    let image = image::image();
    let mut spec = VmSpec::new("test", 128);
    spec.machine = machine;
    spec.vcpus = vcpus;
    spec.qemu = std::env::var_os("DUNLIN_TEST_QEMU").map(Into::into);
    spec.accel = dunlin_guest::Accel::Tcg;
    spec.kernel = Some(image.kernel);
    spec.initrd = Some(image.initrd);
    spec.append = Some("console=ttyS0 quiet panic=-1 net.ifnames=0".into());
    spec.nics = vec![dunlin_guest::NicSpec {
        mac: "52:54:00:77:00:02".into(),
        bridge: None,
        tap: None,
        promiscuous: false,
    }];
    spec
}

/// The address that a test speaks from.
pub const OURS: [u8; 6] = [0x52, 0x54, 0, 0x77, 0, 1];

/// Its own.
pub const GUEST: [u8; 6] = [0x52, 0x54, 0, 0x77, 0, 2];

/// An ICMP echo request of that number.
#[allow(dead_code, reason = "for tests of frames")]
pub fn ping(number: u16, bytes: usize) -> Vec<u8> {
    let builder = etherparse::PacketBuilder::ethernet2(OURS, GUEST)
        .ipv4([10, 77, 0, 1], [10, 77, 0, 2], 64)
        .icmpv4_echo_request(7, number);
    let mut frame = vec![];
    builder.write(&mut frame, &vec![number as u8; bytes]).unwrap();
    frame
}

/// An ARP request for the Linux guest's address.
pub fn who_has_the_guest() -> Vec<u8> {
    who_has_the_guest_tell(1)
}

/// The same from 10.77.0.`number`.
pub fn who_has_the_guest_tell(number: u8) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &OURS, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    frame.extend([&OURS[..], &[10, 77, 0, number], &[0; 6], &[10, 77, 0, 2]].concat());
    frame
}

/// A QEMU and our ends of its ports.
pub struct Vm {
    pub qemu: Qemu,
    pub frames: Vec<FramePort>,
}

pub fn start(spec: &VmSpec, how: Start) -> Vm {
    start_with_disks(spec, how, vec![])
}

pub fn start_with_disks(spec: &VmSpec, how: Start, nbd: Vec<OwnedFd>) -> Vm {
    let (frames, theirs): (Vec<FramePort>, Vec<OwnedFd>) = spec
        .nics
        .iter()
        .map(|_| FramePort::pair(spec.nic_backend).unwrap())
        .unzip();
    let ram_writers = frames.iter().filter_map(FramePort::ram_writer).collect();
    let ports = Ports {
        frames: theirs,
        ram_writers,
        nbd,
        ram: None,
    };
    let qemu = Qemu::start(spec, how, ports).unwrap();
    Vm { qemu, frames }
}

impl Vm {
    /// Waits until the guest says `ready`.
    pub fn wait_booted(&self, ready: &str) {
        let booted = self.qemu.console().wait_for(ready, Duration::from_secs(120));
        assert!(
            booted,
            "no {ready:?} on the console:\n{}",
            self.qemu.console().text()
        );
    }
}

/// What one sync did, in microseconds and pages.
#[derive(Debug, Default, Clone, Copy)]
pub struct SyncStats {
    pub request: u64,
    pub stop: u64,
    pub save: u64,
    pub scan: u64,
    pub hash: u64,
    pub copy: u64,
    pub load: u64,
    pub cont: u64,
    pub dirty_primary: u64,
    pub dirty_backup: u64,
    pub united: u64,
    pub divergent: u64,
    pub bytes: u64,
    pub state_bytes: u64,
}

/// A primary and its running backup.
pub struct Pair {
    pub primary: Vm,
    pub backup: Vm,
    pub colo: Colo,
    /// Dirty bits that an aborted sync has already taken from the trackers.
    pub carried: Bitmap,
}

/// Divergent content that has been staged but not yet applied.
pub struct Staged {
    pub state: Vec<u8>,
    pub pages: Vec<(u64, u16, Vec<u8>)>,
    pub stats: SyncStats,
}

fn us(since: &mut Instant) -> u64 {
    let now = Instant::now();
    let gone = now.duration_since(*since).as_micros() as u64;
    *since = now;
    gone
}

impl Pair {
    /// Boots a primary, waits for `ready` on its console, and brings a backup in.
    pub fn new(spec: &VmSpec, ready: &str) -> Pair {
        let primary = start(spec, Start::Boot);
        primary.wait_booted(ready);
        Pair::join(spec, primary)
    }

    /// Brings a backup in for a running primary.
    pub fn join(spec: &VmSpec, primary: Vm) -> Pair {
        Pair::join_vms(primary, start(spec, Start::Incoming), || ())
    }

    /// The same with a backup that was started already; `while_paused` runs when the primary stands.
    pub fn join_vms(primary: Vm, mut backup: Vm, while_paused: impl FnOnce()) -> Pair {
        let mut colo = backup.qemu.take_colo().unwrap();
        let (from, to) = (primary.qemu.memory(), backup.qemu.memory());
        primary.qemu.stop_within(OBEYS).unwrap();
        let state = primary.qemu.save_state_within(true, OBEYS).unwrap();
        from.scan_dirty().unwrap();
        let mut page = [0; PAGE_BYTES];
        to.clear_all().unwrap();
        for number in from.populated().unwrap().iter() {
            from.copy_page(number, &mut page);
            to.write_page(number, &page);
        }
        while_paused();
        // The backup runs before it says that it is ready: clean its dirty bits before.
        to.scan_dirty().unwrap();
        colo.enable(&state).unwrap();
        primary.qemu.cont_within(OBEYS).unwrap();
        let carried = Bitmap::new(from.pages());
        Pair {
            primary,
            backup,
            colo,
            carried,
        }
    }

    /// The first half: both VMs paused, the divergence staged.
    pub fn pause_and_stage(&mut self) -> Staged {
        let mut clock = Instant::now();
        self.colo.request().unwrap();
        let request = us(&mut clock);
        let mut staged = self.stage_again();
        staged.stats.request = request;
        staged
    }

    /// The first half when the backup is paused already.
    pub fn stage_again(&mut self) -> Staged {
        let mut stats = SyncStats::default();
        let (from, to) = (self.primary.qemu.memory(), self.backup.qemu.memory());
        let mut clock = Instant::now();
        self.primary.qemu.stop_within(OBEYS).unwrap();
        stats.stop = us(&mut clock);
        let state = self.primary.qemu.save_state_within(false, OBEYS).unwrap();
        stats.save = us(&mut clock);
        let (primary, backup) = (from.scan_dirty().unwrap(), to.scan_dirty().unwrap());
        self.carried.unite(&primary);
        self.carried.unite(&backup);
        stats.scan = us(&mut clock);
        let united: Vec<u64> = self.carried.iter().collect();
        let (a, b) = (from.hash_pages(&united, 2), to.hash_pages(&united, 2));
        let divergent: Vec<u64> = united
            .iter()
            .zip(a.iter().zip(&b))
            .filter(|(_, (a, b))| a != b)
            .map(|(p, _)| *p)
            .collect();
        let blocks = from
            .hash_blocks(&divergent, 2)
            .into_iter()
            .zip(to.hash_blocks(&divergent, 2));
        let masks: Vec<u16> = blocks.map(|(a, b)| hash::differing(&a, &b)).collect();
        stats.hash = us(&mut clock);
        let mut page = [0; PAGE_BYTES];
        let capture = |(number, mask): (&u64, &u16)| {
            from.copy_page(*number, &mut page);
            let blocks = page
                .chunks(BLOCK_BYTES)
                .enumerate()
                .filter(|(i, _)| mask >> i & 1 == 1);
            (
                *number,
                *mask,
                blocks.flat_map(|(_, b)| b).copied().collect::<Vec<u8>>(),
            )
        };
        let pages: Vec<_> = divergent.iter().zip(&masks).map(capture).collect();
        stats.copy = us(&mut clock);
        stats.dirty_primary = primary.count();
        stats.dirty_backup = backup.count();
        stats.united = united.len() as u64;
        stats.divergent = divergent.len() as u64;
        stats.bytes = pages.iter().map(|(_, _, b)| b.len() as u64).sum();
        stats.state_bytes = state.len() as u64;
        Staged { state, pages, stats }
    }

    /// The second half: applies the staged divergence; `check` runs when the RAM is written and nothing runs yet.
    pub fn apply(&mut self, staged: Staged, check: impl FnOnce(&Qemu, &Qemu)) -> SyncStats {
        let mut stats = staged.stats;
        let (primary, backup) = (&self.primary.qemu, &self.backup.qemu);
        let mut checking = Duration::ZERO;
        let mut clock = Instant::now();
        let write = || {
            staged
                .pages
                .iter()
                .for_each(|(page, mask, blocks)| backup.memory().write_blocks(*page, *mask, blocks));
            // What a reset on the way to the load has written is the same on both sides now: the next sync need not look.
            backup.memory().scan_dirty()?;
            let before = Instant::now();
            check(primary, backup);
            checking = before.elapsed();
            Ok(())
        };
        self.colo.load(&staged.state, write).unwrap();
        stats.load = us(&mut clock) - checking.as_micros() as u64;
        self.carried.clear();
        primary.cont_within(OBEYS).unwrap();
        stats.cont = us(&mut clock);
        stats
    }

    /// One whole sync, with the check that both VMs' RAM is identical at its end.
    pub fn sync(&mut self) -> SyncStats {
        let staged = self.pause_and_stage();
        self.apply(staged, assert_same_ram)
    }

    /// Neither console shows an oops.
    pub fn assert_healthy(&self) {
        for (who, vm) in [("primary", &self.primary), ("backup", &self.backup)] {
            assert_eq!(
                vm.qemu.console().oops(),
                None,
                "{who}:\n{}",
                vm.qemu.console().text()
            );
        }
    }

    /// Throws away what the guests have sent, so that their sockets do not fill.
    pub fn drain_frames(&mut self) {
        for port in self.primary.frames.iter_mut().chain(&mut self.backup.frames) {
            port.read(|_| ()).unwrap();
        }
    }
}

/// Every byte of RAM is the same in both VMs. (Pages that neither file holds read as zeros; reading them through the
/// mapping would make them.)
pub fn assert_same_ram(primary: &Qemu, backup: &Qemu) {
    let mut pages = primary.memory().populated().unwrap();
    pages.unite(&backup.memory().populated().unwrap());
    let pages: Vec<u64> = pages.iter().collect();
    let (a, b) = (
        primary.memory().hash_pages(&pages, 2),
        backup.memory().hash_pages(&pages, 2),
    );
    let differing: Vec<u64> = (0..a.len())
        .filter(|i| a[*i] != b[*i])
        .map(|i| pages[i])
        .collect();
    assert!(
        differing.is_empty(),
        "{} pages differ after a sync: {:x?}...",
        differing.len(),
        &differing[..1]
    );
}

/// The highest `tick N` on a console.
pub fn last_tick(qemu: &Qemu) -> u64 {
    let text = qemu.console().text();
    let mut lines: Vec<&str> = text.split('\n').collect();
    lines.pop(); // may be half a line
    lines
        .iter()
        .rev()
        .find_map(|l| l.trim().strip_prefix("tick ")?.parse().ok())
        .unwrap_or(0)
}
