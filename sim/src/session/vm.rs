//! A model VM: pages, devices, a disk. Its guest can tell whether they belong together.
//!
//! It is deterministic in its inputs, but for whims: what its clock or its processors' timing would make it do. Two copies with
//! different whims differ in memory, and at times in what they say.

use crate::random::Random;
use bytes::Bytes;
use dunlin_core::sync::compare::{BLOCK_BYTES, BLOCKS_PER_PAGE, DivergentPage, hash_of_zeros};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use std::collections::BTreeSet;

/// Pages of a model VM.
pub const PAGES: u32 = 12;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What travels as the devices' state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Devices {
    /// All that the guest knows.
    pub mind: u64,
    /// What it believes its memory to hold.
    pub memory: u64,
    /// What it believes its disk to hold.
    pub disk: u64,
    /// All that it has ever said.
    pub said: Vec<u64>,
}

impl Devices {
    /// As bytes.
    #[must_use]
    pub fn save(&self) -> Bytes {
        let words = [self.mind, self.memory, self.disk];
        let words = words.iter().chain(&self.said);
        words
            .flat_map(|word| word.to_be_bytes())
            .collect::<Vec<u8>>()
            .into()
    }

    /// From its bytes.
    #[must_use]
    pub fn load(bytes: &Bytes) -> Self {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| u64::from_be_bytes(word.try_into().expect("eight bytes")));
        let mut next = || words.next().expect("a whole state");
        let (mind, memory, disk) = (next(), next(), next());
        Self {
            mind,
            memory,
            disk,
            said: words.collect(),
        }
    }
}

/// A VM.
#[derive(Clone, Debug, Default)]
pub struct Vm {
    /// Its memory.
    pub pages: [u64; PAGES as usize],
    /// Its devices.
    pub devices: Devices,
    /// Whether it runs.
    pub runs: bool,
    written: BTreeSet<u32>,
}

impl Vm {
    fn write(&mut self, page: u32, content: u64) {
        self.pages[page as usize] = content;
        self.written.insert(page);
        self.devices.memory = self.digest();
    }

    /// A digest of its memory.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.pages.iter().fold(7, |sum, page| mix(sum, *page))
    }

    /// A fresh one, which runs.
    #[must_use]
    pub fn that_runs() -> Self {
        Self {
            runs: true,
            ..Self::default()
        }
    }

    /// An earlier copy of it, on a host that had a part: some pages are as they are now, and some are not. In most worlds there is none.
    #[must_use]
    pub fn older(now: &Self, random: &mut Random) -> Option<Self> {
        if !random.chance(250_000) {
            return None;
        }
        let mut older = Self::default();
        for (page, now) in older.pages.iter_mut().zip(now.pages) {
            *page = [0, now, random.draw()][random.below(3) as usize];
        }
        Some(older)
    }

    /// The pages that hold anything.
    #[must_use]
    pub fn populated(&self) -> PageSet {
        let pages = (0..PAGES).filter(|page| self.pages[*page as usize] != 0);
        PageSet::from_runs(pages.map(|page| (page, 1)))
    }

    /// A hash for each of these pages.
    #[must_use]
    pub fn page_hashes(&self, pages: &PageSet) -> Vec<u128> {
        let hash = |content| match content {
            0 => hash_of_zeros(),
            other => u128::from(other),
        };
        self.copy(pages).into_iter().map(hash).collect()
    }

    /// It takes an input; what it says to that. `whim` is 0 where it does as its copy does.
    pub fn input(&mut self, input: u64, whim: u64) -> u64 {
        self.devices.mind = mix(mix(self.devices.mind, input), whim);
        let mind = self.devices.mind;
        self.write((mind % u64::from(PAGES)) as u32, mind);
        let word = mix(mind, 1);
        self.devices.said.push(word);
        word
    }

    /// It does something of itself, which nobody hears of.
    pub fn tick(&mut self, whim: u64) {
        self.write((whim % u64::from(PAGES)) as u32, mix(whim, 2));
    }

    /// It writes its disk, of which this is what it holds from now on.
    pub fn write_disk(&mut self, whim: u64) -> u64 {
        self.devices.disk = mix(self.devices.disk, whim);
        self.devices.disk
    }

    /// The pages that were written since it was last asked.
    pub fn scan(&mut self) -> PageSet {
        PageSet::from_runs(
            std::mem::take(&mut self.written)
                .into_iter()
                .map(|page| (page, 1)),
        )
    }

    /// The content of these pages.
    #[must_use]
    pub fn copy(&self, pages: &PageSet) -> Vec<u64> {
        pages.pages().map(|page| self.pages[page as usize]).collect()
    }

    /// Takes blocks over.
    pub fn take(&mut self, deltas: &[PageDelta]) {
        for delta in deltas {
            let content = delta.bytes[..8].try_into().expect("a block");
            self.pages[delta.at.page as usize] = u64::from_be_bytes(content);
        }
    }

    /// Whether the guest finds its memory and its disk as it left them.
    pub fn check(&self, disk: u64) -> Result<(), String> {
        if self.digest() != self.devices.memory {
            return Err("the VM's memory is not what its devices' state says".to_owned());
        }
        if disk != self.devices.disk {
            return Err("the VM's disk is not what it has written".to_owned());
        }
        Ok(())
    }
}

/// The block hashes of such pages: all of a page's content is in its first block.
#[must_use]
pub fn hashes(contents: &[u64]) -> Vec<u128> {
    let hash = |content: &u64| {
        let mut hashes = [0; BLOCKS_PER_PAGE];
        hashes[0] = u128::from(*content);
        hashes
    };
    contents.iter().flat_map(hash).collect()
}

/// Blocks of a page with this content.
#[must_use]
pub fn delta(at: DivergentPage, content: u64) -> PageDelta {
    let mut bytes = vec![0; at.blocks.count_ones() as usize * BLOCK_BYTES];
    bytes[..8].copy_from_slice(&content.to_be_bytes());
    PageDelta {
        at,
        bytes: bytes.into(),
    }
}
