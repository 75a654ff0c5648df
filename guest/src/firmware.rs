//! The guest's firmware: RAM of QEMU's own, beside the RAM file, that the guest executes and, on some machines, writes.
//!
//! Decides:    which of QEMU's RAM blocks have to be carried, and when.
//! Flow:       primary: [`Firmware::changes`] before a saved device state -> [`prefix`] -> the backup's [`split`] ->
//!             [`Firmware::differing`] -> [`ram_section`] into its QEMU (`colo`).
//! Invariants: 1. the first state of a join carries every block whole; 2. bytes of a peer give a value or an error.
//! Source:     a QEMU that waits for a migration throws its ROMs' contents away (hw/core/loader.c, rom_reset) and expects
//!             them from the stream; migration/ram.c for the form of its RAM section; docs/guest.md, "Firmware".
//! Not here:   ACPI tables and option ROMs: QEMU makes these by itself on both sides, the tables anew for each boot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use serde_json::json;

use crate::memory::PAGE_BYTES;
use crate::qemu::{Qmp, QmpError, StartError};

/// Firmware lies below this guest address, on every machine of a PC's kind.
const TOP: u64 = 1 << 32;
/// BIOS, or the code and the variables of a UEFI; never so many.
const MOST_BLOCKS: usize = 4;
/// The largest firmware of Debian is 4 MiB.
const MOST_BLOCK_BYTES: u64 = 16 << 20;

/// One block's name, as QEMU calls it, and its bytes.
pub type Content<'a> = (String, &'a [u8]);

/// A RAM block of one QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    name: String,
    /// In QEMU's address space.
    addresses: Range<u64>,
}

/// The firmware of one QEMU.
pub struct Firmware {
    memory: File,
    blocks: Vec<Block>,
    /// Whether the guest can write to it: a microvm's BIOS is RAM.
    writable: bool,
    /// What was carried last.
    carried: Mutex<Vec<Vec<u8>>>,
}

impl Firmware {
    /// Finds the blocks of process `pid`.
    pub fn find(pid: u32, qmp: &Qmp, writable: bool) -> Result<Firmware, StartError> {
        let sizes = monitor(qmp, "info ramblock")?;
        let mut blocks = Vec::new();
        let mut top = TOP;
        while blocks.len() < MOST_BLOCKS {
            let page = top - PAGE_BYTES as u64;
            let Some(block) = block_at(&monitor(qmp, &format!("gpa2hva {page:#x}"))?, &sizes) else {
                break;
            };
            top -= block.addresses.end - block.addresses.start;
            blocks.push(block);
        }
        if blocks.is_empty() {
            let words = format!("no firmware below 4 GiB among {sizes}");
            return Err(QmpError::NotUnderstood(words).into());
        }
        let memory = File::open(format!("/proc/{pid}/mem")).map_err(|error| {
            StartError::Host(format!(
                "reading the guest's firmware by /proc/{pid}/mem: {error}: the daemon needs CAP_SYS_PTRACE, which root has"
            ))
        })?;
        Ok(Firmware {
            memory,
            carried: Mutex::new(Vec::new()),
            blocks,
            writable,
        })
    }

    /// Each block's name and bytes, now. The VM stands.
    pub fn read(&self) -> io::Result<Vec<(String, Vec<u8>)>> {
        let read = |block: &Block| {
            let mut bytes = vec![0; (block.addresses.end - block.addresses.start) as usize];
            self.memory.read_exact_at(&mut bytes, block.addresses.start)?;
            Ok((block.name.clone(), bytes))
        };
        self.blocks.iter().map(read).collect()
    }

    /// What has to go before a saved state: with `whole` all of it, else the blocks that changed since the last call.
    pub(crate) fn changes(&self, whole: bool) -> io::Result<Vec<(String, Vec<u8>)>> {
        if !whole && !self.writable {
            return Ok(Vec::new());
        }
        let now = self.read()?;
        let mut carried = self.carried.lock().expect("nothing panics while it is held");
        let last = std::mem::replace(
            &mut *carried,
            now.iter().map(|(_, bytes)| bytes.clone()).collect(),
        );
        let mut last = last.into_iter();
        let changed = now.into_iter().filter(|(_, bytes)| {
            let before = last.next();
            whole || before.as_ref() != Some(bytes)
        });
        Ok(changed.collect())
    }

    /// Refuses contents that this QEMU has no place for.
    pub(crate) fn check(&self, contents: &[Content<'_>]) -> Result<(), String> {
        for (name, bytes) in contents {
            let ours = self.blocks.iter().find(|block| block.name == *name);
            let size = ours.map_or(0, |block| block.addresses.end - block.addresses.start);
            if size != bytes.len() as u64 {
                return Err(format!(
                    "{name} has {} bytes on the primary's host and {size} here: install the same firmware packages (seabios, ovmf)",
                    bytes.len()
                ));
            }
        }
        Ok(())
    }

    /// Whether each block is among `contents`.
    pub(crate) fn is_whole(&self, contents: &[(String, Vec<u8>)]) -> bool {
        let has = |block: &Block| contents.iter().any(|(name, _)| *name == block.name);
        self.blocks.iter().all(has)
    }

    /// The pages of `contents` that this QEMU has otherwise: block, offset, bytes.
    pub(crate) fn differing<'a>(&self, contents: &'a [(String, Vec<u8>)]) -> io::Result<Vec<Page<'a>>> {
        let ours = self.read()?;
        let mut found = Vec::new();
        for (name, wanted) in contents {
            let Some((_, have)) = ours.iter().find(|(ours, _)| ours == name) else {
                continue;
            };
            let pairs = wanted.chunks(PAGE_BYTES).zip(have.chunks(PAGE_BYTES));
            let other = pairs.enumerate().filter(|(_, (wanted, have))| wanted != have);
            found.extend(other.map(|(number, (bytes, _))| Page {
                block: name,
                offset: (number * PAGE_BYTES) as u64,
                bytes,
            }));
        }
        Ok(found)
    }
}

/// One page of a block.
pub(crate) struct Page<'a> {
    block: &'a str,
    offset: u64,
    bytes: &'a [u8],
}

/// Every page of `contents`.
pub(crate) fn pages(contents: &[(String, Vec<u8>)]) -> Vec<Page<'_>> {
    let mut all = Vec::new();
    for (name, bytes) in contents {
        all.extend(bytes.chunks(PAGE_BYTES).enumerate().map(|(number, bytes)| Page {
            block: name,
            offset: (number * PAGE_BYTES) as u64,
            bytes,
        }));
    }
    all
}

/// A RAM section of a migration stream that sets these pages.
pub(crate) fn ram_section(pages: &[Page<'_>]) -> Vec<u8> {
    const START: u8 = 1;
    const FOOTER: u8 = 0x7e;
    /// Any number: QEMU finds the section by its name.
    const SECTION: u32 = 0x444c;
    const VERSION: u32 = 4;
    const PAGE: u64 = 0x08;
    const SAME_BLOCK: u64 = 0x20;
    const END: u64 = 0x10;
    let mut out = vec![START];
    out.extend(SECTION.to_be_bytes());
    out.extend(b"\x03ram");
    out.extend(0u32.to_be_bytes());
    out.extend(VERSION.to_be_bytes());
    let mut last = None;
    for page in pages {
        let same = last.replace(page.block) == Some(page.block);
        let flags = if same { PAGE | SAME_BLOCK } else { PAGE };
        out.extend((page.offset | flags).to_be_bytes());
        if !same {
            out.push(page.block.len() as u8);
            out.extend(page.block.as_bytes());
        }
        out.extend(page.bytes);
        out.resize(out.len() + PAGE_BYTES - page.bytes.len(), 0);
    }
    out.extend(END.to_be_bytes());
    out.push(FOOTER);
    out.extend(SECTION.to_be_bytes());
    out
}

/// Marks a state that begins with firmware; QEMU's own begins with `QEVM`.
const MARK: [u8; 4] = *b"DLFW";

/// The bytes that go before a saved device state.
pub(crate) fn prefix(contents: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    if contents.is_empty() {
        return out;
    }
    out.extend(MARK);
    out.push(contents.len() as u8);
    for (name, bytes) in contents {
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend((bytes.len() as u32).to_be_bytes());
        out.extend(bytes);
    }
    out
}

/// Parts a state into what [`prefix`] made and QEMU's own bytes. `None`: neither.
pub fn split(state: &[u8]) -> Option<(Vec<Content<'_>>, &[u8])> {
    let Some(mut rest) = state.strip_prefix(&MARK) else {
        return Some((Vec::new(), state));
    };
    let mut take = |count: usize| {
        let (taken, left) = rest.split_at_checked(count)?;
        rest = left;
        Some(taken)
    };
    let blocks = take(1)?[0] as usize;
    let mut contents = Vec::new();
    for _ in 0..blocks {
        let length = take(1)?[0] as usize;
        let name = std::str::from_utf8(take(length)?).ok()?.to_owned();
        let size = u32::from_be_bytes(take(4)?.try_into().ok()?);
        contents.push((name, take(size as usize)?));
    }
    Some((contents, rest))
}

/// What the human monitor answers: it alone tells where a block lies.
fn monitor(qmp: &Qmp, command: &str) -> Result<String, QmpError> {
    let answer = qmp.execute("human-monitor-command", json!({"command-line": command}))?;
    match answer.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(QmpError::NotUnderstood(answer.to_string())),
    }
}

/// The block whose last page `answer` ("Host virtual address for 0xfffff000 (pc.bios) is 0x7f3239c3f000") tells of;
/// `None` when there is no RAM. `sizes` is the table of RAM blocks.
fn block_at(answer: &str, sizes: &str) -> Option<Block> {
    let (name, rest) = answer.split_once('(')?.1.split_once(')')?;
    let hex = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let last_page = hex(rest.trim().strip_prefix("is ")?)?;
    // Columns: name, page size (two words), offset, bytes used, bytes reserved.
    let row = sizes
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let size = row
        .filter(|words| words.first() == Some(&name))
        .find_map(|words| hex(words.get(4)?))?;
    let end = last_page + PAGE_BYTES as u64;
    (size <= MOST_BLOCK_BYTES && size <= end).then(|| Block {
        name: name.to_owned(),
        addresses: end - size..end,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: &str = "\
              Block Name    PSize              Offset               Used              Total
                     ram    4 KiB  0x0000000000000000 0x0000000008000000 0x0000000008000000
                 pc.bios    4 KiB  0x0000000008000000 0x0000000000040000 0x0000000000040000";

    #[test]
    fn the_monitors_words_tell_where_a_block_lies() {
        let answer = "Host virtual address for 0xfffff000 (pc.bios) is 0x7f3239c3f000\r\n";
        let block = block_at(answer, SIZES).unwrap();
        assert_eq!(block.name, "pc.bios");
        assert_eq!(block.addresses, 0x7f32_39c0_0000..0x7f32_39c4_0000);
        assert_eq!(
            block_at("No memory is mapped at address 0xd0000000\r\n", SIZES),
            None
        );
        let ram = "Host virtual address for 0x1000 (ram) is 0x7f3239c3f000\r\n";
        assert_eq!(block_at(ram, SIZES), None, "guest RAM is no firmware");
    }

    #[test]
    fn what_goes_before_a_state_comes_off_again_and_half_of_it_is_an_error() {
        let contents = vec![("pc.bios".to_owned(), vec![7; 5000]), ("x".to_owned(), vec![])];
        let mut state = prefix(&contents);
        let length = state.len();
        state.extend(b"QEVMstate");
        let (found, rest) = split(&state).unwrap();
        let found: Vec<_> = found.into_iter().map(|(name, b)| (name, b.to_vec())).collect();
        assert_eq!((found, rest), (contents, &b"QEVMstate"[..]));
        assert_eq!(split(b"QEVMstate"), Some((vec![], &b"QEVMstate"[..])));
        assert!((4..length).all(|end| split(&state[..end]).is_none()));
        assert_eq!(prefix(&[]), Vec::<u8>::new());
    }

    #[test]
    fn a_page_names_its_block_once() {
        let contents = vec![("pc.bios".to_owned(), vec![1; 2 * PAGE_BYTES])];
        let section = ram_section(&pages(&contents));
        let names = section.windows(7).filter(|w| w == b"pc.bios").count();
        assert_eq!(names, 1);
        assert_eq!(section.len(), 17 + 2 * (8 + PAGE_BYTES) + 8 + 8 + 5);
    }
}
