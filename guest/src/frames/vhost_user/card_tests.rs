//! A card as QEMU tells it of its rings, whatever the guest has set.

use super::*;
use crate::memory::{PAGE_BYTES, RamFile};
use rustix::event::{EventfdFlags, eventfd};

const RAM_BYTES: u64 = 1 << 20;
/// Where QEMU has the RAM.
const USER: u64 = 0x7f00_0000_0000;
const DESCRIPTORS: u64 = USER + 0x1000;
const AVAILABLE: u64 = USER + 0x2000;
const USED: u64 = USER + 0x3000;
const BUFFER: u64 = 0x10000;
const SIZE: u16 = 64;
const FRAME: usize = 60_000;

/// A guest that sends the same frame with each descriptor of its ring.
struct Guest {
    card: Card,
    _ram: RamFile,
}

impl Guest {
    fn new() -> Guest {
        let ram = RamFile::new("t", RAM_BYTES).expect("memory");
        let (mut descriptors, mut available) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        for number in 0..SIZE {
            let at = 16 * usize::from(number);
            descriptors[at..at + 8].copy_from_slice(&BUFFER.to_le_bytes());
            let bytes = (HEADER_BYTES + FRAME) as u32;
            descriptors[at + 8..at + 12].copy_from_slice(&bytes.to_le_bytes());
            let at = 4 + 2 * usize::from(number);
            available[at..at + 2].copy_from_slice(&number.to_le_bytes());
        }
        available[2..4].copy_from_slice(&SIZE.to_le_bytes());
        ram.write_page(1, &descriptors).expect("in memory");
        ram.write_page(2, &available).expect("in memory");
        let card = Card::new(Signals::new().expect("descriptors"));
        card.set_features(1 << VIRTIO_F_VERSION_1)
            .expect("what it offers");
        card.is_to_write_to(RamIdentity::of(ram.file()).expect("a file"));
        let regions = [VhostUserMemoryRegion::new(0, RAM_BYTES, USER, 0)];
        let file = ram.file().try_clone().expect("a descriptor");
        card.set_mem_table(&regions, vec![file], None).expect("its RAM");
        Guest { card, _ram: ram }
    }

    /// What QEMU says when the guest's driver is ready.
    fn starts(&self, size: u32, [descriptors, available, used]: [u64; 3]) {
        let (ring, kick) = (
            TX as u32,
            eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor"),
        );
        let flags = VhostUserVringAddrFlags::empty();
        let card = &self.card;
        let said = [
            card.set_vring_num(ring, size),
            card.set_vring_base(ring, 0),
            card.set_vring_addr(ring, flags, descriptors, used, available, 0),
            card.set_vring_kick(TX as u8, Some(File::from(kick))),
            card.set_vring_enable(ring, true),
        ];
        for (number, said) in said.into_iter().enumerate() {
            said.unwrap_or_else(|error| panic!("message {number} of size {size}: {error}"));
        }
    }

    fn sends(&self) -> usize {
        let taken = self.card.take_frames(&mut Buffers::default(), |frame| {
            assert_eq!(frame.len(), FRAME);
        });
        taken.expect("the card lives")
    }

    /// What QEMU asks when the VM stops, or the driver resets the card.
    fn stops(&self) -> u32 {
        let stands = self.card.get_vring_base(TX as u32).expect("an answer");
        stands.num
    }
}

/// QEMU hands on what the guest's driver has written into the card's registers.
#[test]
fn a_ring_that_none_can_be_does_not_run_and_ends_nothing() {
    let guest = Guest::new();
    let right = [DESCRIPTORS, AVAILABLE, USED];
    let outside = USER + RAM_BYTES;
    let wrong = [
        (0, right),
        (3, right),
        (1 << 16, right),
        (u32::MAX, right),
        (64, [outside, AVAILABLE, USED]),
        (64, [DESCRIPTORS, outside - 16, USED]),
        (64, [DESCRIPTORS, AVAILABLE, 0x1000]),
        (64, [DESCRIPTORS, AVAILABLE, USED + 2]),
    ];
    for (size, places) in wrong {
        guest.starts(size, places);
        assert_eq!(guest.sends(), 0, "{size} at {places:x?}");
        assert_eq!(guest.stops(), 0);
    }
    guest.starts(u32::from(SIZE), right);
    assert!(guest.sends() > 0, "it runs when it is set right");
}

#[test]
fn one_call_takes_so_many_bytes_and_the_next_goes_on() {
    let guest = Guest::new();
    guest.starts(u32::from(SIZE), [DESCRIPTORS, AVAILABLE, USED]);
    let first = MOST_READ_BYTES.div_ceil(FRAME);
    assert_eq!(guest.sends(), first);
    assert_eq!(guest.sends(), usize::from(SIZE) - first);
    assert_eq!((guest.sends(), guest.stops()), (0, u32::from(SIZE)));
}
