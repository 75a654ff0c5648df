//! The images that QEMU has loaded into guest RAM itself, and loads again at every reset.
//!
//! Decides:    which pages a reset overwrites.
//! Flow:       QEMU's `info roms` -> [`Images::of`], once -> [`Images::keep`] -> a reset -> [`Kept::put_back`].
//! Invariants: 1. a page that a reset writes holds afterwards what it held before.
//! Source:     QEMU's hw/core/loader.c. An uncompressed kernel (ELF, with a PVH note) is such an image; a bzImage, firmware
//!             and option ROMs are not: they are read through fw_cfg, or lie outside of RAM.
//! Not here:   the images themselves; QEMU keeps them.

use std::ops::Range;

use serde_json::json;

use crate::memory::{Memory, PAGE_BYTES};
use crate::qemu::{Qmp, QmpError};

/// RAM that lies below has the addresses that it has in its file, on every machine.
const FOUR_GIB: u64 = 4 << 30;

/// Where they lie, as pages of the RAM file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Images(Vec<Range<u64>>);

/// What lay there.
pub(super) struct Kept {
    pages: Vec<Range<u64>>,
    bytes: Vec<u8>,
}

impl Images {
    /// Asks QEMU.
    pub(super) fn of(qmp: &Qmp, memory: &Memory) -> Result<Images, QmpError> {
        let told = qmp.execute("human-monitor-command", json!({"command-line": "info roms"}))?;
        let text = told
            .as_str()
            .ok_or_else(|| QmpError::NotUnderstood(told.to_string()))?;
        parse(text, memory.pages()).ok_or_else(|| QmpError::NotUnderstood(format!("info roms: {text}")))
    }

    /// Copies what lies there now.
    pub(super) fn keep(&self, memory: &Memory) -> Kept {
        let pages: u64 = self.0.iter().map(|range| range.end - range.start).sum();
        let mut bytes = vec![0; pages as usize * PAGE_BYTES];
        let mut chunks = bytes.chunks_exact_mut(PAGE_BYTES);
        for (page, chunk) in self.0.iter().cloned().flatten().zip(&mut chunks) {
            memory.copy_page(page, chunk.try_into().expect("a chunk is a page"));
        }
        Kept {
            pages: self.0.clone(),
            bytes,
        }
    }
}

impl Kept {
    /// Writes back what a reset has changed.
    pub(super) fn put_back(&self, memory: &Memory) {
        let mut now = [0; PAGE_BYTES];
        let chunks = self.bytes.chunks_exact(PAGE_BYTES);
        for (page, chunk) in self.pages.iter().cloned().flatten().zip(chunks) {
            memory.copy_page(page, &mut now);
            if now != *chunk {
                memory.write_page(page, chunk.try_into().expect("a chunk is a page"));
            }
        }
    }
}

/// Lines as `addr=0000000001000000 size=0x8efce0 mem=ram name="..."`. Those of firmware have no address, `mem=rom`, or (microvm)
/// lie above all RAM. `None` where one is not understood.
fn parse(text: &str, pages: u64) -> Option<Images> {
    let mut images = vec![];
    for line in text.lines().filter(|line| line.starts_with("addr=")) {
        let mut words = line.split_ascii_whitespace();
        let address = u64::from_str_radix(words.next()?.strip_prefix("addr=")?, 16).ok()?;
        let size = u64::from_str_radix(words.next()?.strip_prefix("size=0x")?, 16).ok()?;
        match words.next()?.strip_prefix("mem=")? {
            "ram" => {}
            _ => continue,
        }
        let end = address.checked_add(size)?;
        let range = address / PAGE_BYTES as u64..end.div_ceil(PAGE_BYTES as u64);
        if end > FOUR_GIB {
            return None;
        }
        if range.end <= pages {
            images.push(range);
        }
    }
    Some(Images(images))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_in_ram_is_an_image() {
        let text = "fw=genroms/kvmvapic.bin size=0x002400 name=\"kvmvapic.bin\"\r\n\
                    addr=0000000001000000 size=0x8efce0 mem=ram name=\"/proc/self/fd/30 ELF program header segment 0\"\r\n\
                    addr=0000000001a00000 size=0x0da001 mem=ram name=\"x\"\r\n\
                    addr=00000000fffc0000 size=0x040000 mem=rom name=\"bios-256k.bin\"\r\n\
                    addr=00000000ffff0000 size=0x010000 mem=ram name=\"bios-microvm.bin\"\r\n";
        let images = parse(text, 0x4000).unwrap();
        assert_eq!(images, Images(vec![0x1000..0x18f0, 0x1a00..0x1adb]));
        assert_eq!(parse("", 1), Some(Images(vec![])));
    }

    #[test]
    fn what_is_not_understood_is_no_empty_list() {
        assert_eq!(parse("addr=zz size=0x10 mem=ram", 0x4000), None);
        assert_eq!(parse("addr=0000000001000000", 0x4000), None);
        // RAM above 4 GiB has other addresses than in its file.
        assert_eq!(parse("addr=0000000100000000 size=0x10 mem=ram", u64::MAX), None);
    }
}
