//! CRIU's list of a process' pages in its images: read, and written anew.
//!
//! Decides:    nothing.
//! Invariants: 1. what cannot be read is no list: nothing is guessed, and no entry ends behind the last address; 2. what is written is read back
//!             alike by CRIU 4.1 (which takes the number of pages from the second field) and later ones (from the fifth).
//! Source:     CRIU's `images/pagemap.proto`, `criu/include/{magic,pagemap}.h`; a protobuf message has its length before it.
//! Not here:   which pages (`ahead`).

use super::GuardError;
use super::memory::PAGE_BYTES;

/// All of CRIU's images, and this kind.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
/// A process that has more of them has no memory left for a program.
const MOST_PAGES: u64 = 1 << 31;
const IN_PARENT: u64 = 1;
const LAZY: u64 = 1 << 1;
const PRESENT: u64 = 1 << 2;

/// Where pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Where {
    /// In the file of pages, one entry's behind the other's.
    Here,
    /// In the images beneath these.
    Below,
    /// In no image: the process itself has them.
    Left,
}

/// Some that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pages {
    /// The first one's address.
    pub at: u64,
    /// How many.
    pub count: u64,
    /// Where all of them are.
    pub place: Where,
}

/// One process'.
#[derive(PartialEq, Eq, Debug)]
pub struct Pagemap {
    /// The number of the file that has the pages.
    pub file: u64,
    /// In the order in which they are listed.
    pub pages: Vec<Pages>,
}

impl Pagemap {
    /// Of an image.
    ///
    /// # Errors
    /// Where it is none, or one of another CRIU's (invariant 1).
    pub fn read(image: &[u8]) -> Result<Self, GuardError> {
        let broken = || GuardError("CRIU's list of pages is not as it is known here".to_owned());
        let mut rest = image.strip_prefix(&MAGIC).ok_or_else(broken)?;
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let (length, others) = rest.split_first_chunk::<4>().ok_or_else(broken)?;
            let length = u32::from_le_bytes(*length) as usize;
            let (message, others) = others.split_at_checked(length).ok_or_else(broken)?;
            messages.push(fields(message).ok_or_else(broken)?);
            rest = others;
        }
        let (head, entries) = messages.split_first().ok_or_else(broken)?;
        let entries = entries.iter().map(|entry| pages_of(entry).ok_or_else(broken));
        Ok(Self {
            file: head[1].ok_or_else(broken)?,
            pages: entries.collect::<Result<_, _>>()?,
        })
    }

    /// As an image.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut image = MAGIC.to_vec();
        message(&mut image, &[(1, self.file)]);
        for pages in &self.pages {
            let (count, flags) = (pages.count, flags_of(pages.place));
            let fields = [(1, pages.at), (2, count), (4, flags), (5, count)];
            message(&mut image, &fields);
        }
        image
    }

    /// Puts these behind the last ones.
    pub(super) fn push(&mut self, at: u64, place: Where, page_bytes: u64) {
        match self.pages.last_mut() {
            Some(last) if last.place == place && last.at + last.count * page_bytes == at => last.count += 1,
            _ => self.pages.push(Pages { at, count: 1, place }),
        }
    }
}

const FIELDS: usize = 6;

/// Those that are numbers, by their own number. None but these are in such a message.
fn fields(mut message: &[u8]) -> Option<[Option<u64>; FIELDS]> {
    let mut found = [None; FIELDS];
    while !message.is_empty() {
        let key = number(&mut message)?;
        let is_number = key & 7 == 0;
        let value = is_number.then(|| number(&mut message)).flatten()?;
        *found.get_mut((key >> 3) as usize)? = Some(value);
    }
    Some(found)
}

fn pages_of(fields: &[Option<u64>; FIELDS]) -> Option<Pages> {
    let count = fields[5].or(fields[2])?;
    let is_in_parent = fields[3].is_some_and(|flag| flag != 0);
    let place = match fields[4] {
        _ if is_in_parent => Where::Below,
        None => Where::Here,
        Some(flags) if flags & PRESENT != 0 => Where::Here,
        Some(flags) if flags & IN_PARENT != 0 => Where::Below,
        Some(flags) if flags & LAZY != 0 => Where::Left,
        Some(_) => return None,
    };
    let at = fields[1]?;
    let is_there = count < MOST_PAGES && at.checked_add(count * PAGE_BYTES).is_some();
    is_there.then_some(Pages { at, count, place })
}

fn flags_of(place: Where) -> u64 {
    match place {
        Where::Here => PRESENT,
        Where::Below => IN_PARENT,
        Where::Left => LAZY,
    }
}

/// Of a message of protobuf's, from its beginning.
pub(super) fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

pub(super) fn put_number(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn message(image: &mut Vec<u8>, fields: &[(u64, u64)]) {
    let mut bytes = Vec::new();
    for (field, value) in fields {
        put_number(&mut bytes, field << 3);
        put_number(&mut bytes, *value);
    }
    image.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    image.extend_from_slice(&bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> Pagemap {
        let pages = |at, count, place| Pages { at, count, place };
        Pagemap {
            file: 3,
            pages: vec![
                pages(0x5555_5000, 1, Where::Here),
                pages(0x7f00_0000_0000, 300, Where::Below),
                pages(0x7fff_f7fe_0000, 70_000, Where::Left),
            ],
        }
    }

    #[test]
    fn what_is_written_is_read_alike() {
        assert_eq!(Pagemap::read(&list().write()).expect("a list"), list());
    }

    #[test]
    fn both_numbers_of_pages_are_known_and_the_older_flag() {
        let mut image = MAGIC.to_vec();
        message(&mut image, &[(1, 1)]);
        message(&mut image, &[(1, 4096), (2, 7), (3, 1)]);
        // The second one is zero where the fifth counts.
        message(&mut image, &[(1, 65536), (2, 0), (4, LAZY | PRESENT), (5, 9)]);
        let read = Pagemap::read(&image).expect("a list");
        let places: Vec<(u64, Where)> = read
            .pages
            .iter()
            .map(|pages| (pages.count, pages.place))
            .collect();
        assert_eq!(places, [(7, Where::Below), (9, Where::Here)]);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let image = list().write();
        assert!(Pagemap::read(&[]).is_err());
        assert!(Pagemap::read(&MAGIC).is_err(), "no head");
        assert!(Pagemap::read(&image[1..]).is_err());
        assert!(Pagemap::read(&image[..image.len() - 1]).is_err(), "cut");
        let mut other = MAGIC.to_vec();
        message(&mut other, &[(1, 1)]);
        message(&mut other, &[(1, 4096), (2, 1), (9, 1)]);
        assert!(Pagemap::read(&other).is_err(), "a field that nobody knows");
        let mut beyond = list();
        beyond.pages[0].at = u64::MAX - 4095;
        assert!(Pagemap::read(&beyond.write()).is_err(), "behind the last address");
    }

    #[test]
    fn pages_that_follow_each_other_are_one_entry() {
        let mut list = Pagemap {
            file: 1,
            pages: Vec::new(),
        };
        for (at, place) in [
            (0, Where::Here),
            (1, Where::Here),
            (2, Where::Below),
            (4, Where::Below),
        ] {
            list.push(at * 4096, place, 4096);
        }
        let counts: Vec<u64> = list.pages.iter().map(|pages| pages.count).collect();
        assert_eq!(counts, [2, 1, 1]);
    }
}
