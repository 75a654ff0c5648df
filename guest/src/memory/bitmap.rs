//! A set of pages.
//!
//! Decides:    nothing. Flow: dirty scans -> union -> the pages to hash.
//! Invariants: 1. bits past `pages` are zero.
//! Source:     PLOVER section 4: the united dirty bitmap. Not here: how it travels.

use std::ops::Range;

/// One bit per guest page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bitmap {
    words: Vec<u64>,
    pages: u64,
}

impl Bitmap {
    /// An empty set over `pages` pages.
    pub fn new(pages: u64) -> Bitmap {
        Bitmap {
            words: vec![0; pages.div_ceil(64) as usize],
            pages,
        }
    }

    /// From [`Bitmap::words`] of a peer. `None` if they do not fit `pages`.
    pub fn from_words(pages: u64, words: Vec<u64>) -> Option<Bitmap> {
        let surplus = words.len() as u64 * 64 - pages.min(words.len() as u64 * 64);
        let fits = words.len() as u64 == pages.div_ceil(64)
            && (surplus == 0 || words.last().is_some_and(|w| w.leading_zeros() as u64 >= surplus));
        fits.then_some(Bitmap { words, pages })
    }

    /// Number of pages that the set ranges over.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The bits, 64 pages a word, lowest page in the lowest bit.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Puts a page in.
    pub fn set(&mut self, page: u64) {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.words[(page / 64) as usize] |= 1 << (page % 64);
    }

    /// Takes a page out.
    pub fn unset(&mut self, page: u64) {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.words[(page / 64) as usize] &= !(1 << (page % 64));
    }

    /// Puts a range of pages in.
    pub fn set_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.pages, "pages {range:?} of {}", self.pages);
        let mut page = range.start;
        while page < range.end {
            let (word, bit) = ((page / 64) as usize, page % 64);
            let count = (64 - bit).min(range.end - page);
            self.words[word] |= (u64::MAX >> (64 - count)) << bit;
            page += count;
        }
    }

    /// Is the page in?
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    /// Adds all pages of `other`, which ranges over the same memory.
    pub fn unite(&mut self, other: &Bitmap) {
        assert_eq!(self.pages, other.pages, "bitmaps of one memory");
        self.words.iter_mut().zip(&other.words).for_each(|(a, b)| *a |= b);
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Number of pages in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// No page in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// The pages in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.words
            .iter()
            .enumerate()
            .filter(|(_, w)| **w != 0)
            .flat_map(|(i, word)| {
                let mut rest = *word;
                std::iter::from_fn(move || {
                    let bit = rest.trailing_zeros();
                    (rest != 0).then(|| {
                        rest &= rest - 1;
                        i as u64 * 64 + u64::from(bit)
                    })
                })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_behaves_as_a_set() {
        let (mut bitmap, mut oracle) = (Bitmap::new(1000), BTreeSet::new());
        let mut state = 7u64;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let (start, page) = (random(1000), random(1000));
            let end = (start + random(200)).min(1000);
            if random(3) == 0 {
                bitmap.set_range(start..end);
                oracle.extend(start..end);
            }
            bitmap.unset(page);
            oracle.remove(&page);
            bitmap.set(start);
            oracle.insert(start);
            assert_eq!(
                bitmap.iter().collect::<Vec<_>>(),
                oracle.iter().copied().collect::<Vec<_>>()
            );
            assert_eq!(bitmap.count(), oracle.len() as u64);
        }
    }

    #[test]
    fn words_of_a_peer_are_checked() {
        let mut bitmap = Bitmap::new(70);
        bitmap.set_range(60..70);
        assert_eq!(Bitmap::from_words(70, bitmap.words().to_vec()), Some(bitmap));
        assert_eq!(Bitmap::from_words(70, vec![0]), None, "too few");
        assert_eq!(
            Bitmap::from_words(70, vec![0, 1 << 6]),
            None,
            "a page past the end"
        );
        assert!(Bitmap::from_words(128, vec![u64::MAX; 2]).is_some());
        assert!(Bitmap::from_words(0, vec![]).is_some());
    }
}
