//! What is read here of a program's copy that another host sends: CRIU's lists of pages and of areas, and the folders of what was written.

use crate::script::Script;
use dunlin_program::guard::decoded::{Pagemap, Pages, Where, name_of, place_of, without_promises};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// What a list of pages begins with, and what one of areas does.
const PAGES: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
const AREAS: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];
/// The field that is an area: its number, and that it is bytes.
const AREA: u8 = 14 << 3 | 2;
const PAGE_BYTES: u64 = 4096;

/// First byte: what it is; bytes as they come, or pieces that are put together with right lengths.
pub fn images(bytes: &[u8]) {
    let mut script = Script(bytes);
    match script.byte() % 5 {
        0 => pages(script.0),
        1 => areas(script.0),
        2 => layer(script.0),
        3 => {
            let mut image = PAGES.to_vec();
            while !script.is_over() {
                let n = usize::from(script.byte());
                let message = script.bytes(n);
                image.extend_from_slice(&(message.len() as u32).to_le_bytes());
                image.extend_from_slice(message);
            }
            pages(&image);
        }
        _ => {
            let mut process = Vec::new();
            while !script.is_over() {
                // One byte is its length's, too.
                let n = usize::from(script.byte() % 128);
                let area = script.bytes(n);
                process.extend_from_slice(&[AREA, area.len() as u8]);
                process.extend_from_slice(area);
            }
            areas(&image_of(&AREAS, &process));
        }
    }
}

/// What was read is written, and read alike; no page lies behind the last address.
fn pages(image: &[u8]) {
    let Ok(list) = Pagemap::read(image) else {
        return;
    };
    let is_there = |pages: &Pages| pages.at.checked_add(pages.count * PAGE_BYTES).is_some();
    assert!(list.pages.iter().all(is_there));
    assert_eq!(Pagemap::read(&list.write()).ok(), Some(list));
}

/// What is promised nothing stays so, and nothing else changes.
fn areas(image: &[u8]) {
    if let Some(changed) = without_promises(image) {
        assert_eq!(without_promises(&changed), Some(changed));
    }
}

/// A layer's name leads below the view, and is the only one of its place; each place there has one.
fn layer(bytes: &[u8]) {
    if bytes.contains(&0) {
        return;
    }
    let is_below = |place: &Path| {
        let mut parts = place.components();
        parts.all(|part| matches!(part, Component::Normal(_)))
    };
    let name = OsStr::from_bytes(bytes);
    // No folder's name has a slash in it.
    if !bytes.contains(&b'/')
        && let Some(place) = place_of(name)
    {
        assert!(is_below(&place), "{place:?} is none of the view's");
        assert_eq!(name_of(&place), name);
    }
    let place: PathBuf = Path::new(name).components().collect();
    if is_below(&place) {
        assert_eq!(place_of(&name_of(&place)), Some(place));
    }
}

fn image_of(magic: &[u8], message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u32).to_le_bytes();
    [magic, &length, message].concat()
}

/// A message of numbers, as protobuf writes it.
fn numbers(fields: &[(u8, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (field, value) in fields {
        bytes.push(field << 3);
        let mut left = *value;
        while left >= 0x80 {
            bytes.push(left as u8 | 0x80);
            left >>= 7;
        }
        bytes.push(left as u8);
    }
    bytes
}

/// Each kind, whole and in pieces: pages here, below and in none; an area that is kept free, and one that is not; layers and a place.
pub fn seeds() -> Vec<Vec<u8>> {
    let (stack, heap) = (0x7fff_f7fe_0000, 0x5555_5000);
    let pages = |at, count, place| Pages { at, count, place };
    let list = Pagemap {
        file: 3,
        pages: vec![
            pages(heap, 1, Where::Here),
            pages(0x7f00_0000_0000, 300, Where::Below),
            pages(stack, 70_000, Where::Left),
        ],
    };
    let of_pages = [
        numbers(&[(1, 3)]),
        numbers(&[(1, heap), (2, 7), (3, 1)]),
        numbers(&[(1, stack), (2, 0), (4, 6), (5, 9)]),
    ];
    // From, to, access, flags: private and of no file.
    let area = |bytes: u64, access: u64| {
        let from = 0x7000_0000_0000;
        numbers(&[(1, from), (2, from + bytes), (5, access), (6, 0x22), (8, 1)])
    };
    let of_areas = [area(1 << 43, 0), area(8192, 3)];
    let in_pieces = |kind: u8, pieces: &[Vec<u8>]| {
        let mut script = vec![kind];
        for piece in pieces {
            script.push(piece.len() as u8);
            script.extend_from_slice(piece);
        }
        script
    };
    let process = of_areas.iter().flat_map(|area| {
        let head = [AREA, area.len() as u8];
        [&head[..], area].concat()
    });
    let process: Vec<u8> = process.collect();
    let mut out = vec![
        [&[0][..], &list.write()].concat(),
        [&[1][..], &image_of(&AREAS, &process)].concat(),
        in_pieces(3, &of_pages),
        in_pieces(4, &of_areas),
    ];
    let places = ["", "var/lib", "srv/a|b/50%"].map(|place| name_of(Path::new(place)));
    let names = places.iter().map(|name| name.as_bytes());
    let others: [&[u8]; 3] = [b"u|..|etc", b"u|a||b", b"srv/a|b/50%"];
    out.extend(names.chain(others).map(|name| [&[2][..], name].concat()));
    out
}
