//! Rings in memory of our own, with a driver that keeps to the rules and one that does not.

use super::*;
use proptest::prelude::*;
use vm_memory::GuestMemoryBackend;
use vm_memory::bitmap::AtomicBitmap;

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x10000;
const SIZE: u16 = 8;
/// Flags of a descriptor: another one follows; it is the device's to write.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Flag of a descriptor: what it names are descriptors.
const INDIRECT: u16 = 4;

const NOW: Layout = Layout {
    header_bytes: HEADER_BYTES,
    merges: true,
};

/// A frame that leaves nothing to the card.
const NOTHING: Option<Offload> = Some(Offload {
    needs_csum: false,
    gso_type: 0,
    hdr_len: 0,
    gso_size: 0,
    csum_start: 0,
    csum_offset: 0,
});

/// The guest's side of a ring.
struct Driver {
    ram: Ram,
    next: u16,
}

impl Driver {
    fn new() -> Driver {
        Driver::with_memory(1 << 20)
    }

    fn with_memory(bytes: usize) -> Driver {
        let ram = vm_memory::GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), bytes)]);
        Driver {
            ram: ram.expect("some mebibytes"),
            next: 0,
        }
    }

    /// Descriptor 0 names a table of its own behind everything else: `entries` of `bytes` each, all at one place, one after the other.
    fn describe_table(&self, entries: u16, bytes: u32, flags: u16) {
        const TABLE: u64 = 1 << 20;
        let entry = |number: u16| {
            let next = if number + 1 == entries { 0 } else { NEXT };
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&BUFFERS.to_le_bytes());
            entry[8..12].copy_from_slice(&bytes.to_le_bytes());
            entry[12..14].copy_from_slice(&(flags | next).to_le_bytes());
            entry[14..].copy_from_slice(&(number + 1).to_le_bytes());
            entry
        };
        let table: Vec<u8> = (0..entries).flat_map(entry).collect();
        (self.ram.write_slice(&table, GuestAddress(TABLE))).expect("in memory");
        self.describe(0, TABLE, table.len() as u32, INDIRECT, 0);
    }

    fn place(&self) -> Place {
        Place {
            size: SIZE,
            descriptors: GuestAddress(DESCRIPTORS),
            available: GuestAddress(AVAILABLE),
            used: GuestAddress(USED),
            next: 0,
            event_index: false,
        }
    }

    fn ring(&self) -> Ring {
        Ring::start(&self.ram, self.place()).expect("it lies in memory")
    }

    fn write<const N: usize>(&self, at: u64, value: [u8; N]) {
        self.ram.write_slice(&value, GuestAddress(at)).expect("in memory");
    }

    fn describe(&self, number: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        let entry = DESCRIPTORS + 16 * u64::from(number);
        self.write(entry, at.to_le_bytes());
        self.write(entry + 8, bytes.to_le_bytes());
        self.write(entry + 12, flags.to_le_bytes());
        self.write(entry + 14, next.to_le_bytes());
    }

    fn offer(&mut self, head: u16) {
        self.write(
            AVAILABLE + 4 + 2 * u64::from(self.next % SIZE),
            head.to_le_bytes(),
        );
        self.next = self.next.wrapping_add(1);
        self.write(AVAILABLE + 2, self.next.to_le_bytes());
    }

    /// A buffer of its own for that descriptor.
    fn buffer(number: u16) -> u64 {
        BUFFERS + 0x4000 * u64::from(number)
    }

    fn used(&self) -> u16 {
        self.ram.read_obj(GuestAddress(USED + 2)).expect("in memory")
    }

    fn used_head(&self, entry: u16) -> u32 {
        let at = USED + 4 + 8 * u64::from(entry % SIZE);
        self.ram.read_obj(GuestAddress(at)).expect("in memory")
    }

    fn used_bytes(&self, entry: u16) -> u32 {
        let at = USED + 4 + 8 * u64::from(entry % SIZE) + 4;
        self.ram.read_obj(GuestAddress(at)).expect("in memory")
    }

    fn bytes(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.ram
            .read_slice(&mut bytes, GuestAddress(at))
            .expect("in memory");
        bytes
    }
}

#[test]
fn a_frame_in_pieces_is_one_frame_and_its_buffers_are_given_back() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    let at = Driver::buffer(0);
    driver.write(at, [0; HEADER_BYTES]);
    driver.write(at + HEADER_BYTES as u64, *b"first ");
    driver.write(Driver::buffer(1), *b"second");
    driver.describe(0, at, HEADER_BYTES as u32 + 6, NEXT, 1);
    driver.describe(1, Driver::buffer(1), 6, 0, 0);
    driver.offer(0);
    let mut frame = vec![];
    assert_eq!(
        ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
        NOTHING
    );
    assert_eq!(frame, b"first second");
    assert_eq!(
        ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
        None
    );
    assert_eq!((driver.used(), ring.next()), (1, 1));
}

#[test]
fn what_a_frame_leaves_to_the_card_is_told_wherever_its_header_lies() {
    let left = Offload {
        needs_csum: true,
        gso_type: 1,
        hdr_len: 66,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    let header = [&left.to_bytes()[..], &[0, 0]].concat();
    for first in [1, 7, HEADER_BYTES, HEADER_BYTES + 2] {
        let mut driver = Driver::new();
        let mut ring = driver.ring();
        let whole = [&header[..], b"frame"].concat();
        let (one, other) = whole.split_at(first);
        for (number, piece) in [one, other].into_iter().enumerate() {
            let at = Driver::buffer(number as u16);
            (driver.ram.write_slice(piece, GuestAddress(at))).expect("in memory");
        }
        driver.describe(0, Driver::buffer(0), one.len() as u32, NEXT, 1);
        driver.describe(1, Driver::buffer(1), other.len() as u32, 0, 0);
        driver.offer(0);
        let mut frame = vec![];
        let told = ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring");
        assert_eq!((told, &frame[..]), (Some(left), &b"frame"[..]), "{first}");

        driver.describe(0, Driver::buffer(0), 5, WRITE, 0);
        driver.describe(1, Driver::buffer(1), 100, WRITE, 0);
        driver.offer(0);
        driver.offer(1);
        let put = ring.put(&driver.ram, NOW, left, &[b"", b"in ", b"", b"pieces"]);
        assert_eq!(put.expect("a sound ring"), Put::Done);
        let got = [
            driver.bytes(Driver::buffer(0), 5),
            driver.bytes(Driver::buffer(1), 16),
        ]
        .concat();
        let expected = [&left.to_bytes()[..], &[2, 0], b"in pieces"].concat();
        assert_eq!(got, expected);
    }
}

#[test]
fn a_frame_is_put_into_as_many_buffers_as_it_needs_or_waits_for_them() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    let frame: Vec<u8> = (0..200).map(|byte| byte as u8).collect();
    for number in 0..2 {
        driver.describe(number, Driver::buffer(number), 100, WRITE, 0);
    }
    driver.offer(0);
    let put = |ring: &mut Ring, driver: &Driver| {
        ring.put(&driver.ram, NOW, Offload::default(), &[&frame])
            .expect("a sound ring")
    };
    assert_eq!(put(&mut ring, &driver), Put::Waits);
    driver.offer(1);
    assert_eq!(put(&mut ring, &driver), Put::Waits, "12 bytes more");
    assert_eq!(driver.used(), 0, "what waits has used nothing");
    driver.describe(2, Driver::buffer(2), 100, WRITE, 0);
    driver.offer(2);
    assert_eq!(put(&mut ring, &driver), Put::Done);
    assert_eq!(driver.used(), 3);
    let shown = |entry| (driver.used_head(entry), driver.used_bytes(entry));
    assert_eq!([0, 1, 2].map(shown), [(0, 100), (1, 100), (2, 12)]);
    let mut got = vec![];
    for (number, bytes) in [(0, 100), (1, 100), (2, 12)] {
        got.extend(driver.bytes(Driver::buffer(number), bytes));
    }
    assert_eq!(got[BUFFERS_AT..HEADER_BYTES], 3u16.to_le_bytes());
    assert_eq!(got[HEADER_BYTES..], frame);
}

/// Redis's small answers teach a guest to make small buffers; then a long frame needs several, and finds one.
#[test]
fn a_guest_with_too_few_buffers_kicks_for_the_next_one_and_not_for_those_that_are_there() {
    let mut driver = Driver::new();
    let place = Place {
        event_index: true,
        ..driver.place()
    };
    let mut ring = Ring::start(&driver.ram, place).expect("it lies in memory");
    driver.describe(0, Driver::buffer(0), 100, WRITE, 0);
    driver.offer(0);
    let put = ring
        .put(&driver.ram, NOW, Offload::default(), &[&[1; 200]])
        .expect("a sound ring");
    assert_eq!((put, ring.next()), (Put::Waits, 0));
    // `avail_event`, behind the used ring.
    let at = USED + 4 + 8 * u64::from(SIZE);
    let kicks_for: u16 = driver.ram.read_obj(GuestAddress(at)).expect("in memory");
    assert_eq!(kicks_for, 1);
}

thread_local! {
    static LINES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts what a test's thread has told the log.
struct Log;

impl log::Log for Log {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _record: &log::Record<'_>) {
        LINES.set(LINES.get() + 1);
    }

    fn flush(&self) {}
}

/// It says that more is available than its ring holds, or that a chain begins outside of it. Its ring is looked at at each turn of the loop: whatever was said of it would
/// fill the log.
#[test]
fn a_guest_that_lies_about_its_ring_is_not_waited_for_and_nothing_is_said_of_it() {
    // Another test may have set it first; it counts by threads.
    let _set = log::set_logger(&Log);
    log::set_max_level(log::LevelFilter::Trace);
    log::error!("one line");
    assert_eq!(LINES.get(), 1, "the log is counted");
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    driver.offer(SIZE);
    assert!(ring.take(&driver.ram, NOW, &mut vec![]).is_err());
    let put = ring.put(&driver.ram, NOW, Offload::default(), &[&[1; 60]]);
    assert!(put.is_err());
    assert_eq!((ring.next(), driver.used()), (0, 0), "it stays where it is");
    driver.write(AVAILABLE + 2, 5_000u16.to_le_bytes());
    let mut frame = vec![];
    assert_eq!(
        ring.take(&driver.ram, NOW, &mut frame).expect("it is looked at"),
        None
    );
    let put = ring
        .put(&driver.ram, NOW, Offload::default(), &[&[1; 60]])
        .expect("it is looked at");
    assert_eq!(put, Put::Waits);
    assert_eq!(LINES.get(), 1, "nothing but the test's own");
}

#[test]
fn what_no_buffer_holds_is_lost_and_the_buffer_waits_for_the_next() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    driver.describe(0, Driver::buffer(0), 100, WRITE, 0);
    driver.offer(0);
    let alone = Layout { merges: false, ..NOW };
    let mut put = |bytes| {
        ring.put(&driver.ram, alone, Offload::default(), &[&vec![7; bytes]])
            .expect("a sound ring")
    };
    assert_eq!(put(89), Put::Done);
    assert_eq!(driver.used(), 0, "one byte too long");
    assert_eq!(put(88), Put::Done);
    assert_eq!(driver.used(), 1);
}

#[test]
fn a_frame_that_is_longer_than_any_or_has_no_content_gives_its_buffers_back_and_nothing_out() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    let mut frame = vec![];
    driver.describe(0, BUFFERS, (HEADER_BYTES + FRAME_BYTES_MAX) as u32 + 1, 0, 0);
    driver.describe(1, BUFFERS, HEADER_BYTES as u32, 0, 0);
    driver.describe(2, u64::MAX - 5, 100, 0, 0);
    // A chain that leads back to itself.
    driver.describe(3, BUFFERS, 30_000, NEXT, 3);
    for head in 0..4 {
        driver.offer(head);
        assert_eq!(
            ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
            NOTHING
        );
        assert!(frame.is_empty(), "descriptor {head}");
        assert_eq!(driver.used(), head + 1);
    }
}

/// It would be followed for a gigabyte of descriptors, once for each buffer of a frame that it never has room for.
#[test]
fn a_chain_of_empty_descriptors_is_not_followed() {
    let mut driver = Driver::with_memory(4 << 20);
    let mut ring = driver.ring();
    driver.describe_table(u16::MAX - 1, 0, WRITE);
    for _ in 0..SIZE {
        driver.offer(0);
    }
    let put = ring.put(&driver.ram, NOW, Offload::default(), &[&[1; 60]]);
    assert!(put.is_err());
    assert_eq!((ring.next(), driver.used()), (0, 0), "it stays where it is");
    // What is to be written is nothing to read, and an empty one is nothing.
    let mut frame = vec![1];
    for flags in [WRITE, 0] {
        driver.describe_table(u16::MAX - 1, 0, flags);
        let taken = ring.take(&driver.ram, NOW, &mut frame).expect("it is given back");
        assert_eq!(taken, NOTHING);
        assert!(frame.is_empty());
    }
    assert_eq!((ring.next(), driver.used()), (2, 2));
}

#[test]
fn a_chain_may_have_so_many_descriptors_and_no_more() {
    const MOST: u16 = MOST_IN_CHAIN as u16;
    let mut driver = Driver::with_memory(4 << 20);
    let mut ring = driver.ring();
    let mut frame = vec![];
    for (entries, bytes) in [(MOST, MOST_IN_CHAIN - HEADER_BYTES), (MOST + 1, 0)] {
        driver.describe_table(entries, 1, 0);
        driver.offer(0);
        let taken = ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring");
        assert_eq!((taken, frame.len()), (NOTHING, bytes), "{entries}");
    }
    driver.describe_table(MOST, 1, WRITE);
    driver.offer(0);
    let put = ring.put(&driver.ram, NOW, Offload::default(), &[&[1; 60]]);
    assert_eq!(put.expect("a sound ring"), Put::Done);
    driver.describe_table(MOST + 1, 1, WRITE);
    driver.offer(0);
    let put = ring.put(&driver.ram, NOW, Offload::default(), &[&[1; 60]]);
    assert!(put.is_err());
    assert_eq!((ring.next(), driver.used()), (3, 3));
}

#[test]
fn a_ring_goes_on_where_it_stood_and_not_outside_the_memory() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    let mut frame = vec![];
    for _ in 0..11 {
        driver.describe(0, BUFFERS, 60, 0, 0);
        driver.offer(0);
        assert_eq!(
            ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
            NOTHING
        );
    }
    let place = Place {
        next: ring.next(),
        ..driver.place()
    };
    let mut ring = Ring::start(&driver.ram, place).expect("the same place");
    assert_eq!(
        ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
        None
    );
    driver.offer(0);
    assert_eq!(
        ring.take(&driver.ram, NOW, &mut frame).expect("a sound ring"),
        NOTHING
    );
    assert_eq!(driver.used(), 12);
    let outside = Place {
        used: GuestAddress(1 << 30),
        ..place
    };
    assert!(Ring::start(&driver.ram, outside).is_err());
}

#[test]
fn all_that_is_written_is_told() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    driver.describe(0, BUFFERS, 2000, WRITE, 0);
    driver.offer(0);
    let map = driver.ram.find_region(GuestAddress(0)).expect("all of it");
    map.bitmap().reset();
    assert_eq!(
        ring.put(&driver.ram, NOW, Offload::default(), &[&[1; 60]])
            .expect("a sound ring"),
        Put::Done
    );
    let written = map.bitmap().get_and_reset();
    let pages: Vec<u64> = (0..256)
        .filter(|page| written[page / 64] >> (page % 64) & 1 == 1)
        .map(|page| page as u64)
        .collect();
    assert_eq!(pages, [USED / 4096, BUFFERS / 4096]);
}

proptest! {
    /// Whatever the guest's memory holds: no panic, no endless call, no frame that is too long.
    #[test]
    fn a_guest_may_write_anything(
        content in prop::collection::vec(any::<u8>(), 0x3000),
        places in prop::array::uniform3(0u64..0x3000),
        next in any::<u16>(),
        event_index in any::<bool>(),
        merges in any::<bool>(),
        frames in prop::collection::vec(0usize..3000, 1..20),
    ) {
        let driver = Driver::new();
        driver.ram.write_slice(&content, GuestAddress(0)).expect("in memory");
        let [descriptors, available, used] = places.map(|place| GuestAddress(place & !15));
        let place = Place { size: SIZE, descriptors, available, used, next, event_index };
        if let Ok(mut ring) = Ring::start(&driver.ram, place) {
            let layout = Layout { merges, ..NOW };
            let mut frame = vec![];
            for bytes in frames {
                let _any = ring.take(&driver.ram, layout, &mut frame);
                prop_assert!(frame.len() <= FRAME_BYTES_MAX);
                let _any = ring.put(&driver.ram, layout, Offload::default(), &[&vec![3; bytes]]);
                let _any = ring.want_kick(&driver.ram);
                let _any = ring.tell(&driver.ram, None);
            }
        }
    }
}
