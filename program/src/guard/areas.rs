//! CRIU's list of a process' areas of memory: those that are large and that nobody may write to are not to be counted as memory.
//!
//! Decides:    which.
//! Flow:       the images have come -> `promise_nothing` -> CRIU restores.
//! Invariants: 1. nothing else of an image changes; 2. an image that is not as it is known here stays as it is.
//! Why:        where memory went ahead (images below others), and in a child that has its areas from its parent, CRIU maps every area for writing
//!             first, and takes that right away afterwards. A kernel refuses to promise more memory than it has, so that an area which is only kept
//!             free (MariaDB keeps 8 TiB for its buffer pool) could not be brought anywhere. With MAP_NORESERVE nothing is promised.
//! Source:     CRIU's `images/{mm,vma}.proto`, `criu/mem.c: premap_private_vma`; mmap(2); a protobuf message has its length before it.

use super::pagemap::{number, put_number};
use std::fs;
use std::io;
use std::path::Path;

/// All of CRIU's images, and this kind.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];
/// Of a process, the areas; of an area, what follows.
const AREAS: u64 = 14;
const FROM: u64 = 1;
const TO: u64 = 2;
const ACCESS: u64 = 5;
const FLAGS: u64 = 6;
/// The kinds of a field that are here.
const IS_NUMBER: u64 = 0;
const IS_BYTES: u64 = 2;
/// A kernel that counts coarsely, as most do, refuses one area that is larger than all of its memory.
const LARGE: u64 = 1 << 30;

/// In all images of this folder.
///
/// # Errors
/// Those of the disk.
pub(super) fn promise_nothing(images: &Path) -> io::Result<()> {
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_one = name
            .to_str()
            .is_some_and(|name| name.starts_with("mm-") && name.ends_with(".img"));
        if !is_one {
            continue;
        }
        let image = fs::read(entry.path())?;
        if let Some(changed) = without_promises(&image).filter(|changed| *changed != image) {
            fs::write(entry.path(), changed)?;
        }
    }
    Ok(())
}

/// None where it is something else than it is known to be.
#[must_use]
pub fn without_promises(image: &[u8]) -> Option<Vec<u8>> {
    let rest = image.strip_prefix(&MAGIC)?;
    let (length, message) = rest.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*length) as usize != message.len() {
        return None;
    }
    let process = each_field(message, |field, value, all| match (field, value) {
        (AREAS, Value::Bytes(area)) => {
            let area = area_without(area)?;
            put_number(all, AREAS << 3 | IS_BYTES);
            put_number(all, area.len() as u64);
            all.extend_from_slice(&area);
            Some(true)
        }
        _ => Some(false),
    })?;
    let mut changed = MAGIC.to_vec();
    changed.extend_from_slice(&u32::try_from(process.len()).ok()?.to_le_bytes());
    changed.extend_from_slice(&process);
    Some(changed)
}

fn area_without(area: &[u8]) -> Option<Vec<u8>> {
    let (mut from, mut to, mut access, mut flags) = (None, None, None, None);
    each_field(area, |field, value, _| {
        if let Value::Number(number) = value {
            match field {
                FROM => from = Some(number),
                TO => to = Some(number),
                ACCESS => access = Some(number),
                FLAGS => flags = Some(number),
                _ => {}
            }
        }
        Some(false)
    })?;
    let own = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let is_kept_free =
        to?.checked_sub(from?)? >= LARGE && access? & libc::PROT_WRITE as u64 == 0 && flags? & own == own;
    each_field(area, |field, value, all| match (field, value) {
        (FLAGS, Value::Number(flags)) if is_kept_free => {
            put_number(all, FLAGS << 3 | IS_NUMBER);
            put_number(all, flags | libc::MAP_NORESERVE as u64);
            Some(true)
        }
        _ => Some(false),
    })
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The message anew: of a field for which `put` says true it has put what is to be there, any other stays.
fn each_field(
    mut message: &[u8],
    mut put: impl FnMut(u64, Value<'_>, &mut Vec<u8>) -> Option<bool>,
) -> Option<Vec<u8>> {
    let mut all = Vec::with_capacity(message.len());
    while !message.is_empty() {
        let whole = message;
        let key = number(&mut message)?;
        let value = match key & 7 {
            IS_NUMBER => Value::Number(number(&mut message)?),
            IS_BYTES => {
                let length = usize::try_from(number(&mut message)?).ok()?;
                let (bytes, rest) = message.split_at_checked(length)?;
                message = rest;
                Value::Bytes(bytes)
            }
            _ => return None,
        };
        if !put(key >> 3, value, &mut all)? {
            all.extend_from_slice(&whole[..whole.len() - message.len()]);
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: u64 = 0x22;
    const GIB: u64 = 1 << 30;

    fn area(bytes: u64, access: u64, flags: u64) -> Vec<u8> {
        let mut area = Vec::new();
        let from = 0x7000_0000_0000;
        for (field, value) in [
            (1, from),
            (2, from + bytes),
            (3, 0),
            (5, access),
            (6, flags),
            (8, 1),
        ] {
            put_number(&mut area, field << 3);
            put_number(&mut area, value);
        }
        area
    }

    fn image(areas: &[Vec<u8>]) -> Vec<u8> {
        let mut message = Vec::new();
        put_number(&mut message, 12 << 3);
        put_number(&mut message, 300);
        for area in areas {
            put_number(&mut message, AREAS << 3 | IS_BYTES);
            put_number(&mut message, area.len() as u64);
            message.extend_from_slice(area);
        }
        put_number(&mut message, 15 << 3);
        put_number(&mut message, 1);
        let length = (message.len() as u32).to_le_bytes();
        [&MAGIC[..], &length, &message].concat()
    }

    #[test]
    fn what_is_large_and_kept_free_is_promised_nothing_and_all_else_stays() {
        let (none, read_write) = (0, 3);
        let is_free = PRIVATE | libc::MAP_NORESERVE as u64;
        let before = [
            area(8192 * GIB, none, PRIVATE),
            area(8192 * GIB, read_write, PRIVATE),
            area(8192 * GIB, none, 0x21),
            area(GIB - 4096, none, PRIVATE),
            area(GIB, none, is_free),
        ];
        let mut after = before.clone();
        after[0] = area(8192 * GIB, none, is_free);
        assert_eq!(without_promises(&image(&before)), Some(image(&after)));
        assert_eq!(without_promises(&image(&after)), Some(image(&after)));
    }

    #[test]
    fn what_is_no_list_of_areas_stays_as_it_is() {
        let whole = image(&[area(8192 * GIB, 0, PRIVATE)]);
        assert_eq!(without_promises(&[]), None);
        assert_eq!(without_promises(&whole[1..]), None);
        assert_eq!(without_promises(&whole[..whole.len() - 1]), None, "cut");
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("mm-2.img"), &whole[..40]).expect("written");
        fs::write(at("core-2.img"), &whole).expect("written");
        fs::write(at("mm-3.img"), &whole).expect("written");
        promise_nothing(folder.path()).expect("read");
        assert_eq!(fs::read(at("mm-2.img")).expect("there"), &whole[..40]);
        assert_eq!(fs::read(at("core-2.img")).expect("there"), whole);
        assert_ne!(fs::read(at("mm-3.img")).expect("there"), whole);
    }
}
