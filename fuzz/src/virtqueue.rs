//! A card's rings in a guest's memory, where the guest may write anything.

use crate::script::Script;
use dunlin_core::offload::segment::segments;
use dunlin_core::offload::{MOST_CUT, Offload};
use dunlin_guest::frames::FRAME_BYTES_MAX;
use dunlin_guest::frames::vhost_user::Ram;
use dunlin_guest::frames::vhost_user::ring::{HEADER_BYTES, Layout, Place, Put, Ring};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Two pieces with a hole in between, as below and above a PC's hole for devices.
const PIECES: [(u64, usize); 2] = [(0, 0x1_0000), (0x2_0000, 0x4000)];
const PAGE: usize = 4096;
const DESCRIPTORS: u16 = 8;
/// Frames that are taken and put for one input.
const FRAMES: usize = 2 * DESCRIPTORS as usize;

/// Bits of an input's first byte.
const EVENT_INDEX: u8 = 1;
const MERGES: u8 = 2;
const LEGACY_HEADER: u8 = 4;

fn memory() -> Ram {
    let ranges = PIECES.map(|(at, bytes)| (GuestAddress(at), bytes));
    GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).expect("some pages")
}

fn pages(ram: &Ram) -> Vec<Vec<u8>> {
    let read = |at: u64| {
        let mut page = vec![0; PAGE];
        ram.read_slice(&mut page, GuestAddress(at)).expect("in memory");
        page
    };
    let starts = PIECES
        .iter()
        .flat_map(|(at, bytes)| (*at..*at + *bytes as u64).step_by(PAGE));
    starts.map(read).collect()
}

/// In the order of [`pages`].
fn written(ram: &Ram) -> Vec<bool> {
    let of_piece = ram.iter().flat_map(|region| {
        let words = region.bitmap().get_and_reset();
        let pages = region.size() / PAGE;
        (0..pages).map(move |page| words[page / 64] >> (page % 64) & 1 == 1)
    });
    of_piece.collect()
}

/// No frame is longer than any, nothing takes for ever, and each page that we have changed is known to be written: it would be missing in a sync.
pub fn virtqueue(bytes: &[u8]) {
    let mut script = Script(bytes);
    let flags = script.byte();
    let mut place = || GuestAddress(u64::from(script.u16()));
    let [descriptors, available, used] = [place(), place(), place()];
    let place = Place {
        size: DESCRIPTORS,
        descriptors,
        available,
        used,
        next: script.u16(),
        event_index: flags & EVENT_INDEX != 0,
    };
    let layout = Layout {
        header_bytes: match flags & LEGACY_HEADER {
            0 => HEADER_BYTES,
            _ => HEADER_BYTES - 2,
        },
        merges: flags & MERGES != 0,
    };
    let frame_bytes = usize::from(script.u16());
    let ram = memory();
    for (at, bytes) in PIECES {
        let content = script.bytes(bytes);
        ram.write_slice(content, GuestAddress(at)).expect("in memory");
    }
    let before = pages(&ram);
    written(&ram);
    let Ok(mut ring) = Ring::start(&ram, place) else {
        return;
    };
    let (mut frame, given) = (Vec::new(), vec![0xda; frame_bytes]);
    for _ in 0..FRAMES {
        let first = ring.next();
        if let Ok(Some(offload)) = ring.take(&ram, layout, &mut frame) {
            assert_eq!(ring.next(), first.wrapping_add(1), "one chain is one frame");
            let (longest, mut count) = (frame.len(), 0);
            segments(&offload, &mut frame, &mut Vec::new(), |segment| {
                assert!(segment.len() <= longest);
                count += 1;
            });
            assert!(count <= MOST_CUT);
        }
        assert!(frame.len() <= FRAME_BYTES_MAX);
        let first = ring.next();
        if matches!(
            ring.put(&ram, layout, Offload::default(), &[&given]),
            Ok(Put::Waits)
        ) {
            assert_eq!(ring.next(), first, "what waits has taken no buffer");
        }
        let _any = ring.want_kick(&ram);
        let _any = ring.tell(&ram, None);
    }
    let pages = before.iter().zip(pages(&ram)).zip(written(&ram));
    for (number, ((before, after), is_written)) in pages.enumerate() {
        assert!(
            is_written || *before == after,
            "page {number} was changed in silence"
        );
    }
}

/// A ring with a frame of the guest's, and one with buffers for frames to it.
pub fn seeds() -> Vec<Vec<u8>> {
    const RING: [u16; 3] = [0x1000, 0x2000, 0x3000];
    let seed = |flags: u8, frame_bytes: u16, buffers: &[(u64, u32, u16, u16)]| {
        let mut memory = vec![0u8; 0x3010];
        for (number, (at, bytes, flags, next)) in buffers.iter().enumerate() {
            let entry = usize::from(RING[0]) + 16 * number;
            memory[entry..entry + 8].copy_from_slice(&at.to_le_bytes());
            memory[entry + 8..entry + 12].copy_from_slice(&bytes.to_le_bytes());
            memory[entry + 12..entry + 14].copy_from_slice(&flags.to_le_bytes());
            memory[entry + 14..entry + 16].copy_from_slice(&next.to_le_bytes());
        }
        // Every descriptor is the head of a chain.
        let available = usize::from(RING[1]);
        memory[available + 2..available + 4].copy_from_slice(&(buffers.len() as u16).to_le_bytes());
        for number in 0..buffers.len() {
            let entry = available + 4 + 2 * number;
            memory[entry..entry + 2].copy_from_slice(&(number as u16).to_le_bytes());
        }
        let head = RING
            .into_iter()
            .chain([0, frame_bytes])
            .flat_map(u16::to_le_bytes);
        [flags].into_iter().chain(head).chain(memory).collect()
    };
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    vec![
        // A header and a frame behind it; then the frame alone.
        seed(0, 60, &[(0x100, HEADER_BYTES as u32, NEXT, 1), (0x200, 60, 0, 0)]),
        seed(
            EVENT_INDEX,
            60,
            &[(0x8000, 2048, WRITE, 0), (0x9000, 2048, WRITE, 0)],
        ),
        // A frame over both pieces and over the edge of one.
        seed(
            MERGES,
            1514,
            &[(0xfff0, 64, WRITE, 0), (0x2_0000, 2048, WRITE, 0)],
        ),
        seed(
            MERGES | LEGACY_HEADER,
            9000,
            &[
                (0x8000, 4096, WRITE, 0),
                (0x9000, 4096, WRITE | NEXT, 2),
                (0xa000, 4096, WRITE, 0),
            ],
        ),
        // A chain without an end.
        seed(0, 60, &[(0x100, 60, NEXT, 1), (0x200, 60, NEXT, 0)]),
        // Empty descriptors in a table of their own, which lies behind the one that names it.
        seed(
            MERGES,
            60,
            &[
                (0x1010, 48, INDIRECT, 0),
                (0x8000, 0, WRITE | NEXT, 1),
                (0x8000, 0, WRITE | NEXT, 2),
                (0x8000, 64, WRITE, 0),
            ],
        ),
    ]
}
