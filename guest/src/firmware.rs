//! The guest's firmware: RAM of QEMU's own, beside the RAM file, that the guest executes and, on some machines, writes.
//!
//! Decides:    which of QEMU's RAM blocks have to be carried, and when.
//! Flow:       primary: [`Firmware::changes`] before a saved device state -> [`prefix`] -> the backup's [`split`] ->
//!             [`Firmware::differing`] -> [`ram_section`] into its QEMU (`colo`).
//! Invariants: 1. the first state of a join carries every block whole, but for a UEFI's code, of which it carries a fingerprint
//!             that has to be the backup's own; 2. bytes of a peer give a value or an error; 3. what the guest sees and what QEMU
//!             keeps to go back to are both the primary's after a load.
//! Source:     a QEMU that waits for a migration throws its ROMs' contents away (hw/core/loader.c, rom_reset) and expects
//!             them from the stream; migration/ram.c for the form of its RAM section; hw/block/pflash_cfi01.c: a flash is a RAM
//!             block that its device writes to, and after each load writes to its drive; docs/guest.md, "Firmware".
//! Not here:   the drive behind a UEFI's variables, which is a disk like others (`disk`); ACPI tables and option ROMs: QEMU makes these by itself on both sides, the tables anew for each boot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use serde_json::json;
use xxhash_rust::xxh3::xxh3_128;

use crate::memory::PAGE_BYTES;
use crate::qemu::{Qmp, QmpError, StartError};
use crate::spec::{FirmwareKind, Machine, VmSpec};

/// Firmware lies below this guest address, on every machine of a PC's kind.
const TOP: u64 = 1 << 32;
/// BIOS, or the code and the variables of a UEFI; never so many.
const MOST_BLOCKS: usize = 4;
/// The largest firmware of Debian is 4 MiB.
const MOST_BLOCK_BYTES: u64 = 16 << 20;

/// One block's name, as QEMU calls it, and its bytes.
pub type Content<'a> = (String, &'a [u8]);

/// What is wrong with a primary's firmware, for this backup.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FirmwareError {
    /// Some of it is not here.
    #[error("the primary's has not come")]
    Missing,
    /// A UEFI's code, in the block of this name.
    #[error(
        "the UEFI's code ({0}) that the VM runs with on the primary's host is not the one here: install the same version of the package ovmf on both hosts; if they have it, the VM \
         runs since before an update: 'dunlin down' and 'dunlin up'"
    )]
    OtherCode(String),
    /// A block has another size, or is not there at all.
    #[error(
        "{name} has {theirs} bytes on the primary's host and {ours} here: install the same firmware packages (seabios, ovmf)"
    )]
    OtherSize {
        /// The block's name.
        name: String,
        /// Its size there.
        theirs: usize,
        /// Its size here.
        ours: u64,
    },
}

/// What becomes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Carried by a join, and never changed.
    Fixed,
    /// A UEFI's code: each QEMU has it from its host's file, which has to be the same.
    Code,
    /// The guest writes to it: a microvm's BIOS, which is RAM, or a UEFI's variables.
    Written,
}

/// A RAM block of one QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    name: String,
    /// In QEMU's address space.
    addresses: Range<u64>,
    kind: Kind,
}

/// QEMU's names of the two units of a flash.
const FLASH_CODE: &str = "system.flash0";
const FLASH_VARIABLES: &str = "system.flash1";

impl Block {
    fn bytes(&self) -> u64 {
        self.addresses.end - self.addresses.start
    }

    fn read(&self, memory: &File) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes() as usize];
        memory.read_exact_at(&mut bytes, self.addresses.start)?;
        Ok(bytes)
    }
}

/// The firmware of one QEMU.
pub struct Firmware {
    memory: File,
    blocks: Vec<Block>,
    /// Of a UEFI's code.
    fingerprint: [u8; 16],
    /// What was carried last of the blocks that the guest writes to.
    carried: Mutex<Vec<(String, Vec<u8>)>>,
}

impl Firmware {
    /// Finds the blocks of process `pid`.
    pub fn find(pid: u32, qmp: &Qmp, spec: &VmSpec) -> Result<Firmware, StartError> {
        let sizes = monitor(qmp, "info ramblock")?;
        let mut blocks = Vec::new();
        let mut top = TOP;
        while blocks.len() < MOST_BLOCKS {
            let page = top - PAGE_BYTES as u64;
            let Some(block) = block_at(&monitor(qmp, &format!("gpa2hva {page:#x}"))?, &sizes) else {
                break;
            };
            top -= block.bytes();
            blocks.push(Block {
                kind: kind_of(&block.name, spec),
                ..block
            });
        }
        let has = |name: &str| blocks.iter().any(|block| block.name == name);
        if blocks.is_empty()
            || (spec.firmware == FirmwareKind::Uefi && !(has(FLASH_CODE) && has(FLASH_VARIABLES)))
        {
            let words = format!("no firmware below 4 GiB among {sizes}");
            return Err(QmpError::NotUnderstood(words).into());
        }
        let memory = File::open(format!("/proc/{pid}/mem")).map_err(|error| {
            StartError::Host(format!(
                "reading the guest's firmware by /proc/{pid}/mem: {error}: the daemon needs CAP_SYS_PTRACE, which root has"
            ))
        })?;
        let code = blocks.iter().find(|block| block.kind == Kind::Code);
        let code = code.map(|block| block.read(&memory)).transpose()?;
        Ok(Firmware {
            memory,
            carried: Mutex::new(Vec::new()),
            fingerprint: xxh3_128(&code.unwrap_or_default()).to_be_bytes(),
            blocks,
        })
    }

    /// What has to go before a saved state: with `whole` all of it, else the blocks that changed since the last call. The VM stands.
    pub(crate) fn changes(&self, whole: bool) -> io::Result<Vec<(String, Vec<u8>)>> {
        let mut carried = self.carried.lock().expect("nothing panics while it is held");
        let mut changed = Vec::new();
        for block in &self.blocks {
            let bytes = match block.kind {
                Kind::Code if whole => self.fingerprint.to_vec(),
                Kind::Fixed if whole => block.read(&self.memory)?,
                Kind::Code | Kind::Fixed => continue,
                Kind::Written => {
                    let now = block.read(&self.memory)?;
                    let last = carried.iter().position(|(name, _)| *name == block.name);
                    match last.map(|at| &mut carried[at].1) {
                        Some(last) if *last == now && !whole => continue,
                        Some(last) => last.clone_from(&now),
                        None => carried.push((block.name.clone(), now.clone())),
                    }
                    now
                }
            };
            changed.push((block.name.clone(), bytes));
        }
        Ok(changed)
    }

    /// Refuses contents that this QEMU has no place for.
    pub(crate) fn check(&self, contents: &[Content<'_>]) -> Result<(), FirmwareError> {
        for (name, bytes) in contents {
            let ours = self.blocks.iter().find(|block| block.name == *name);
            if ours.is_some_and(|block| block.kind == Kind::Code) {
                if *bytes != self.fingerprint {
                    return Err(FirmwareError::OtherCode(name.clone()));
                }
                continue;
            }
            let size = ours.map_or(0, Block::bytes);
            if size != bytes.len() as u64 {
                return Err(FirmwareError::OtherSize {
                    name: name.clone(),
                    theirs: bytes.len(),
                    ours: size,
                });
            }
        }
        Ok(())
    }

    /// Whether each block is among `contents`.
    pub(crate) fn is_whole(&self, contents: &[(String, Vec<u8>)]) -> bool {
        let has = |block: &Block| contents.iter().any(|(name, _)| *name == block.name);
        self.blocks.iter().all(has)
    }

    /// The pages of `contents` that this QEMU has otherwise (invariant 3): in what the guest sees, or in what it `keeps`.
    pub(crate) fn differing<'a>(
        &self,
        contents: &'a [(String, Vec<u8>)],
        keeps: &[(String, Vec<u8>)],
    ) -> io::Result<Vec<Page<'a>>> {
        let mut found = Vec::new();
        for (block, name, wanted) in self.carried_whole(contents) {
            let sees = block.read(&self.memory)?;
            let kept = keeps.iter().find(|(kept, _)| kept == name);
            let kept = kept.map_or(&[][..], |(_, bytes)| bytes);
            found.extend(pages_of(name, wanted).filter(|page| {
                let at = page.offset as usize;
                [sees.as_slice(), kept]
                    .iter()
                    .any(|has| has.get(at..at + page.bytes.len()) != Some(page.bytes))
            }));
        }
        Ok(found)
    }

    /// Every page of `contents`.
    pub(crate) fn pages<'a>(&self, contents: &'a [(String, Vec<u8>)]) -> Vec<Page<'a>> {
        let whole = self.carried_whole(contents);
        whole.flat_map(|(_, name, bytes)| pages_of(name, bytes)).collect()
    }

    /// What of `contents` is a block's bytes and no fingerprint.
    fn carried_whole<'a>(
        &self,
        contents: &'a [(String, Vec<u8>)],
    ) -> impl Iterator<Item = (&Block, &'a str, &'a [u8])> {
        contents.iter().filter_map(|(name, bytes)| {
            let block = self.blocks.iter().find(|block| block.name == *name)?;
            (block.kind != Kind::Code).then_some((block, name.as_str(), bytes.as_slice()))
        })
    }
}

fn kind_of(name: &str, spec: &VmSpec) -> Kind {
    match name {
        FLASH_CODE => Kind::Code,
        FLASH_VARIABLES => Kind::Written,
        _ if spec.machine == Machine::Microvm => Kind::Written,
        _ => Kind::Fixed,
    }
}

/// One page of a block.
pub(crate) struct Page<'a> {
    block: &'a str,
    offset: u64,
    bytes: &'a [u8],
}

fn pages_of<'a>(block: &'a str, bytes: &'a [u8]) -> impl Iterator<Item = Page<'a>> {
    bytes
        .chunks(PAGE_BYTES)
        .enumerate()
        .map(move |(number, bytes)| Page {
            block,
            offset: (number * PAGE_BYTES) as u64,
            bytes,
        })
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
        kind: Kind::Fixed,
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

    /// Firmware whose blocks lie in a file of the test's own.
    fn uefi(code: &[u8], variables: &[u8]) -> Firmware {
        let memory = crate::sys::memfd("dunlin-test").unwrap();
        memory.write_all_at(variables, 0).unwrap();
        let block = |name: &str, addresses, kind| Block {
            name: name.to_owned(),
            addresses,
            kind,
        };
        Firmware {
            memory,
            carried: Mutex::default(),
            fingerprint: xxh3_128(code).to_be_bytes(),
            blocks: vec![
                block(FLASH_CODE, 0x10_0000..0x20_0000, Kind::Code),
                block(FLASH_VARIABLES, 0..variables.len() as u64, Kind::Written),
            ],
        }
    }

    #[test]
    fn variables_are_carried_when_they_change_and_code_has_to_be_the_same() {
        let mut bytes = vec![0; 2 * PAGE_BYTES];
        let (primary, backup) = (uefi(b"code", &bytes), uefi(b"code", &bytes));
        let first = primary.changes(true).unwrap();
        assert_eq!(first[0].1.len(), 16, "of the code a fingerprint");
        assert_eq!(first[1], (FLASH_VARIABLES.to_owned(), bytes.clone()));
        assert_eq!(primary.changes(false).unwrap(), vec![]);
        let seen: Vec<_> = first
            .iter()
            .map(|(name, bytes)| (name.clone(), &bytes[..]))
            .collect();
        assert_eq!(backup.check(&seen), Ok(()));
        assert!(backup.is_whole(&first) && !backup.is_whole(&first[1..]));
        let refused = uefi(b"other", &bytes).check(&seen).unwrap_err().to_string();
        assert!(refused.contains("same version of the package ovmf"), "{refused}");

        bytes[PAGE_BYTES + 7] = 1;
        primary.memory.write_all_at(&bytes, 0).unwrap();
        let changed = primary.changes(false).unwrap();
        assert_eq!(changed, vec![(FLASH_VARIABLES.to_owned(), bytes.clone())]);
        let offsets = |sees: &Firmware, keeps: &[u8]| -> Vec<u64> {
            let keeps = [(FLASH_VARIABLES.to_owned(), keeps.to_vec())];
            let pages = sees.differing(&changed, &keeps).unwrap();
            pages.iter().map(|page| page.offset).collect()
        };
        let (old, new) = (vec![0; 2 * PAGE_BYTES], bytes.clone());
        let page = PAGE_BYTES as u64;
        assert_eq!(offsets(&backup, &old), vec![page]);
        // Its guest has written the same by itself, which QEMU would take back at a load.
        assert_eq!(offsets(&primary, &old), vec![page]);
        assert_eq!(offsets(&primary, &new), Vec::<u64>::new());
        assert_eq!(offsets(&primary, &[]), vec![0, page], "it keeps nothing yet");
    }

    #[test]
    fn a_page_names_its_block_once() {
        let contents = [("pc.bios".to_owned(), vec![1; 2 * PAGE_BYTES])];
        let section = ram_section(&pages_of(&contents[0].0, &contents[0].1).collect::<Vec<_>>());
        let names = section.windows(7).filter(|w| w == b"pc.bios").count();
        assert_eq!(names, 1);
        assert_eq!(section.len(), 17 + 2 * (8 + PAGE_BYTES) + 8 + 8 + 5);
    }
}
