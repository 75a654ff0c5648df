//! The memory of a program that runs goes ahead of the copy: while it stands still only what has changed since is left to take.
//!
//! Decides:    nothing.
//! Flow:       the program runs: `Place::go_ahead` reads its memory into images of their own (sent at once) -> it stands still: CRIU takes all
//!             but its memory, meanwhile `Ahead::compare` -> `Ahead::compose` writes CRIU's lists anew: a page that is still as it went ahead is in
//!             the images below, all others are read then.
//! Invariants: 1. a page counts as unchanged if the kernel says that nobody has written to it since before it was read (`inside::tracked`); where it
//!             cannot say so, or a device may write behind its back (files that are read past the page cache), by all of its bytes, which are
//!             compared; 2. nothing is looked at before all threads stand still; 3. what CRIU lists and has not taken is taken here, whole, or
//!             there is no copy; 4. what the kernel was asked to notice it forgets when this is dropped.
//! Source:     CRIU's `--lazy-pages`, which leaves memory out of the images, and its parent images, which a restore reads by itself (criu(8)).
//! Not here:   what CRIU does (`criu`); the lists' form (`pagemap`).

use super::memory::{PAGE_BYTES, Process, Runs};
use super::pagemap::{Pagemap, Where};
use super::{GuardError, Place, failed, family};
use crate::inside::is_visitor;
use crate::inside::tracked::Tracked;
use crate::proc::has_gone;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Of what has gone ahead, seen from the folder that is sent: beneath CRIU's own images.
const BELOW: &str = "images/parent";
/// The program's first process; the one before it is Dunlin's.
const FIRST: u32 = 2;
/// What is read at once: it fits into a core's cache, with what it is compared to.
const PIECE_BYTES: usize = 128 << 10;
/// More than any server forks that is worth a second copy.
const MOST_PROCESSES: usize = 8192;
/// A thread that waits for a disk stops when it has been served.
const STILL_WITHIN: Duration = Duration::from_secs(5);
/// A thread that waits for its child is one that waits for nothing else for so long.
const AGAIN_AFTER: Duration = Duration::from_millis(20);
const STEP: &str = "the memory that goes ahead";
const REST: &str = "the rest of its memory";

/// What has gone ahead.
#[derive(Debug)]
pub struct Ahead {
    folder: PathBuf,
    processes: Vec<Sent>,
}

#[derive(Debug)]
struct Sent {
    process: Process,
    /// In the order of their addresses, and in the file.
    runs: Runs,
    file: PathBuf,
    /// Where its pages need not be compared.
    tracked: Option<Tracked>,
}

/// Which pages are still as they were sent: by the process' number inside.
#[derive(Debug, Default)]
pub struct Unchanged {
    runs: BTreeMap<u32, Runs>,
    compared_bytes: u64,
}

/// A program all of whose threads stand still.
#[derive(Debug)]
pub struct Still(Vec<Process>);

/// What it came to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Left {
    /// Were as they had been sent.
    pub below_bytes: u64,
    /// Were taken while the program stood still.
    pub taken_bytes: u64,
    /// Were compared then: the kernel did not say whether they were written to.
    pub compared_bytes: u64,
}

impl Place {
    /// Reads the memory of its processes, as it is now, into `folder`.
    ///
    /// # Errors
    /// A full disk, above all.
    pub fn go_ahead(&self, folder: &Path) -> Result<Ahead, GuardError> {
        let images = folder.join(BELOW);
        fs::create_dir_all(&images).map_err(failed(STEP))?;
        let mut processes = Vec::new();
        let numbers = self.numbers()?;
        are_few(&numbers)?;
        for number in numbers {
            let Some(process) = own_one(number).map_err(failed(STEP))? else {
                continue;
            };
            let reads_behind = match process.reads_behind() {
                Err(error) if has_gone(&error) => false,
                told => told.map_err(failed(STEP))?,
            };
            if reads_behind {
                return Err(GuardError(format!(
                    "{STEP}: the kernel reads for the program while that goes on (io_setup)"
                )));
            }
            let file = processes.len() as u64 + 1;
            if let Some(bytes) = process.keeps_free() {
                return Err(GuardError(format!(
                    "{STEP}: the program keeps {} GiB of addresses free, which take CRIU longer than its memory does",
                    bytes >> 30
                )));
            }
            // One that ends meanwhile has none.
            let areas = process.areas().unwrap_or_default();
            let runs = process.pages(&areas).unwrap_or_default();
            let tracked = track(&process, &areas, &runs).ok().flatten();
            processes.push(send(process, &runs, file, &images, tracked).map_err(failed(STEP))?);
        }
        let folder = folder.to_owned();
        Ok(Ahead { folder, processes })
    }

    /// Until all threads of all processes stand still, which were told to. One that waits for its child to execute something (vfork) cannot, as
    /// long as that stands still: both are let run for a moment, again and again.
    ///
    /// # Errors
    /// Where one does not; where CRIU would not take all of them.
    pub(super) fn stands_still(&self) -> Result<Still, GuardError> {
        let until = Instant::now() + STILL_WITHIN;
        let mut again = Instant::now() + AGAIN_AFTER;
        let mut numbers = self.numbers()?;
        are_few(&numbers)?;
        let mut processes = own(&numbers).map_err(failed("stopping the program"))?;
        while !processes.iter().all(Process::stands_still) {
            let now = Instant::now();
            if now > until {
                let within = STILL_WITHIN.as_secs();
                return Err(GuardError(format!(
                    "stopping the program: it does not stand still within {within} s"
                )));
            }
            if now > again && processes.iter().any(Process::cannot_stop) {
                let told = self
                    .signal(Signal::SIGCONT)
                    .and_then(|_| self.signal(Signal::SIGSTOP));
                told.map_err(failed("stopping the program"))?;
                again = Instant::now() + AGAIN_AFTER;
                numbers = self.numbers()?;
                processes = own(&numbers).map_err(failed("stopping the program"))?;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        family::is_whole(&numbers)?;
        Ok(Still(processes))
    }
}

/// Each takes a descriptor of the daemon's while its memory goes ahead, and all its VMs have to share them.
fn are_few(numbers: &[u32]) -> Result<(), GuardError> {
    match numbers.len() {
        0..=MOST_PROCESSES => Ok(()),
        many => Err(GuardError(format!(
            "the program has {many} processes, and of more than {MOST_PROCESSES} no copy is made ('tasks' in its file limits them)"
        ))),
    }
}

/// Of these processes the program's.
pub(super) fn own(numbers: &[u32]) -> std::io::Result<Vec<Process>> {
    let all = numbers.iter().filter_map(|number| own_one(*number).transpose());
    all.collect()
}

/// One that is not seen is none only if it has gone: whoever is passed over is not waited for, and not taken.
fn own_one(number: u32) -> std::io::Result<Option<Process>> {
    let process = Process::of(number)?;
    Ok(process.filter(|process| process.inside >= FIRST && !is_visitor(process.inside)))
}

/// Has the kernel notice who writes to these pages; none where it would not notice all.
fn track(process: &Process, areas: &[(u64, u64)], runs: &Runs) -> std::io::Result<Option<Tracked>> {
    let tracked = Tracked::of(process.number)?;
    for (from, to) in areas {
        // One that has gone meanwhile, or is none of those that can be, has pages that are never found protected.
        let _ = tracked.covers(*from, *to);
    }
    for (from, count) in &runs.0 {
        let _ = tracked.protect(*from, from + count * PAGE_BYTES);
    }
    // A device that was told before where to write does so still.
    Ok((!process.reads_directly()?).then_some(tracked))
}

fn send(
    process: Process,
    wanted: &Runs,
    file: u64,
    images: &Path,
    tracked: Option<Tracked>,
) -> std::io::Result<Sent> {
    let path = images.join(name_of_pages(file));
    let mut pages = BufWriter::new(File::create(&path)?);
    let mut bytes = vec![0; PIECE_BYTES];
    let mut list = Pagemap {
        file,
        pages: Vec::new(),
    };
    for (from, count) in &wanted.0 {
        let to = from + count * PAGE_BYTES;
        let mut at = *from;
        while at < to {
            let piece = &mut bytes[..PIECE_BYTES.min((to - at) as usize)];
            let read = process.read(at, piece);
            pages.write_all(&piece[..read])?;
            for page in 0..read as u64 / PAGE_BYTES {
                list.push(at + page * PAGE_BYTES, Where::Here, PAGE_BYTES);
            }
            // A page that is gone is passed over.
            at += (read as u64).max(PAGE_BYTES);
        }
    }
    pages.flush()?;
    fs::write(images.join(name_of_list(process.inside)), list.write())?;
    let runs = list.pages.iter().map(|pages| (pages.at, pages.count));
    Ok(Sent {
        process,
        runs: Runs(runs.collect()),
        file: path,
        tracked,
    })
}

impl Ahead {
    /// The folder that goes ahead.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What of it is as it was.
    ///
    /// # Errors
    /// Where what was sent cannot be read any more.
    pub fn compare(&self, still: &Still) -> Result<Unchanged, GuardError> {
        let mut unchanged = Unchanged::default();
        let stands = still.0.iter().map(|process| (process.inside, process.number));
        let stands: BTreeMap<u32, u32> = stands.collect();
        for sent in &self.processes {
            // One that has ended has none; another may have its number inside.
            if stands.get(&sent.process.inside) != Some(&sent.process.number) {
                continue;
            }
            let runs = match &sent.tracked {
                // In the memory that it has now: a page of a program that it has executed since is none that the kernel was asked about.
                Some(_) => sent.process.protected(&sent.runs).unwrap_or_default(),
                None => sent
                    .compare(&mut unchanged.compared_bytes)
                    .map_err(failed(STEP))?,
            };
            unchanged.runs.insert(sent.process.inside, runs);
        }
        Ok(unchanged)
    }
}

impl Sent {
    fn compare(&self, compared_bytes: &mut u64) -> std::io::Result<Runs> {
        let (mut now, mut then) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
        let file = File::open(&self.file)?;
        let mut same = Runs::default();
        let mut offset = 0;
        for (from, count) in &self.runs.0 {
            let to = from + count * PAGE_BYTES;
            let mut at = *from;
            while at < to {
                let length = PIECE_BYTES.min((to - at) as usize);
                let (now, then) = (&mut now[..length], &mut then[..length]);
                file.read_exact_at(then, offset)?;
                let read = self.process.read(at, now);
                push_alike(&mut same, at, &now[..read], &then[..read]);
                at += length as u64;
                offset += length as u64;
            }
        }
        *compared_bytes += offset;
        Ok(same)
    }
}

/// Takes what CRIU has left in the processes, and is not below. The program stands still.
///
/// # Errors
/// Where CRIU's images are not as they are known here, or a page that they list cannot be read.
pub fn compose(still: &Still, unchanged: &Unchanged, folder: &Path) -> Result<Left, GuardError> {
    let images = folder.join("images");
    let mut left = Left {
        compared_bytes: unchanged.compared_bytes,
        ..Left::default()
    };
    for entry in fs::read_dir(&images).map_err(failed(REST))? {
        let name = entry.map_err(failed(REST))?.file_name();
        let Some(inside) = name.to_str().and_then(inside_of) else {
            continue;
        };
        let process = still.0.iter().find(|process| process.inside == inside);
        let process = process.ok_or_else(|| GuardError(format!("{REST}: process {inside} has gone")))?;
        let below = unchanged.runs.get(&inside).map_or(&[][..], |runs| &runs.0);
        let its = compose_one(process, below, &images.join(name), &images)?;
        left.below_bytes += its.below_bytes;
        left.taken_bytes += its.taken_bytes;
    }
    Ok(left)
}

fn compose_one(
    process: &Process,
    below: &[(u64, u64)],
    list: &Path,
    images: &Path,
) -> Result<Left, GuardError> {
    let old = Pagemap::read(&fs::read(list).map_err(failed(REST))?)?;
    let path = images.join(name_of_pages(old.file));
    // CRIU writes none where there is nothing in it.
    let mut taken = match File::open(&path) {
        Ok(file) => Some(BufReader::new(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed(REST)(error)),
    };
    let whole = images.join("whole");
    let mut pages = BufWriter::with_capacity(PIECE_BYTES, File::create(&whole).map_err(failed(REST))?);
    let mut new = Pagemap {
        file: old.file,
        pages: Vec::new(),
    };
    let mut below = Cursor(below);
    let mut left = Left::default();
    let mut bytes = vec![0; PIECE_BYTES];
    for run in old.pages {
        let to = run.at + run.count * PAGE_BYTES;
        let mut at = run.at;
        while at < to {
            let (is_below, until) = match run.place {
                Where::Left => below.until(at, to),
                Where::Here => (false, to),
                // These images have none below: nothing was there when CRIU wrote them.
                Where::Below => return Err(GuardError(format!("{REST}: CRIU speaks of other images"))),
            };
            if is_below {
                left.below_bytes += until - at;
                push_all(&mut new, at, until, Where::Below);
                at = until;
                continue;
            }
            let piece = &mut bytes[..PIECE_BYTES.min((until - at) as usize)];
            match (run.place, &mut taken) {
                (Where::Here, Some(taken)) => taken.read_exact(piece).map_err(failed(REST))?,
                (Where::Here, None) => return Err(GuardError(format!("{REST}: CRIU's pages are missing"))),
                _ if process.read(at, piece) < piece.len() => {
                    return Err(GuardError(format!("{REST}: it cannot be read")));
                }
                _ => left.taken_bytes += piece.len() as u64,
            }
            pages.write_all(piece).map_err(failed(REST))?;
            push_all(&mut new, at, at + piece.len() as u64, Where::Here);
            at += piece.len() as u64;
        }
    }
    pages.flush().map_err(failed(REST))?;
    fs::rename(&whole, &path).map_err(failed(REST))?;
    fs::write(list, new.write()).map_err(failed(REST))?;
    Ok(left)
}

fn push_all(list: &mut Pagemap, from: u64, to: u64, place: Where) {
    let mut at = from;
    while at < to {
        list.push(at, place, PAGE_BYTES);
        at += PAGE_BYTES;
    }
}

fn name_of_list(inside: u32) -> String {
    format!("pagemap-{inside}.img")
}

fn name_of_pages(file: u64) -> String {
    format!("pages-{file}.img")
}

/// Of a process' list; shared memory has others.
fn inside_of(name: &str) -> Option<u32> {
    name.strip_prefix("pagemap-")?.strip_suffix(".img")?.parse().ok()
}

/// Pages that are alike.
fn push_alike(runs: &mut Runs, at: u64, now: &[u8], then: &[u8]) {
    let page_bytes = PAGE_BYTES as usize;
    if now == then {
        return runs.push(at, (now.len() / page_bytes) as u64);
    }
    for (page, (now, then)) in now.chunks(page_bytes).zip(then.chunks(page_bytes)).enumerate() {
        if now == then {
            runs.push(at + page as u64 * PAGE_BYTES, 1);
        }
    }
}

/// Looks forward only.
struct Cursor<'a>(&'a [(u64, u64)]);

impl Cursor<'_> {
    /// Whether the page at `at` is in a run, and up to where, `to` at most, the next ones are like it.
    fn until(&mut self, at: u64, to: u64) -> (bool, u64) {
        while let [(from, count), rest @ ..] = self.0 {
            let end = from + count * PAGE_BYTES;
            if end > at {
                return match *from <= at {
                    true => (true, end.min(to)),
                    false => (false, (*from).min(to)),
                };
            }
            self.0 = rest;
        }
        (false, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES as usize;

    #[test]
    fn a_program_of_too_many_processes_is_told_so() {
        assert!(are_few(&vec![7; MOST_PROCESSES]).is_ok());
        let why = are_few(&vec![7; MOST_PROCESSES + 1]).unwrap_err().to_string();
        assert!(why.contains("8193 processes") && why.contains("'tasks'"), "{why}");
    }

    #[test]
    fn pages_that_are_alike_are_found_among_others() {
        let then = vec![7; 5 * PAGE];
        let mut now = then.clone();
        now[2 * PAGE + 5] = 8;
        let mut runs = Runs::default();
        push_alike(&mut runs, 0, &then, &then);
        push_alike(&mut runs, 5 * PAGE_BYTES, &now, &then);
        assert_eq!(runs.0, [(0, 7), (8 * PAGE_BYTES, 2)]);
        let mut cursor = Cursor(&runs.0);
        let to = 20 * PAGE_BYTES;
        assert_eq!(cursor.until(PAGE_BYTES, to), (true, 7 * PAGE_BYTES));
        assert_eq!(cursor.until(7 * PAGE_BYTES, to), (false, 8 * PAGE_BYTES));
        assert_eq!(
            cursor.until(8 * PAGE_BYTES, 9 * PAGE_BYTES),
            (true, 9 * PAGE_BYTES)
        );
        assert_eq!(cursor.until(12 * PAGE_BYTES, to), (false, to));
    }

    /// What CRIU leaves in a process, this one: of five pages in a row the second was taken, all others are left.
    #[test]
    fn what_criu_has_left_is_below_or_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut memory = vec![0_u8; 7 * PAGE];
        let at = (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let offset = (at - memory.as_ptr() as u64) as usize;
        for page in 0..5 {
            memory[offset + page * PAGE..][..PAGE].fill(page as u8 + 1);
        }
        let process = || {
            let process = Process::of(std::process::id()).expect("asked");
            process.expect("it runs")
        };
        let below = folder.path().join("below");
        fs::create_dir(&below).expect("a folder");
        let sent = send(process(), &Runs(vec![(at, 5)]), 1, &below, None).expect("sent");
        memory[offset + 3 * PAGE] = 99;
        std::hint::black_box(&memory);
        let ahead = Ahead {
            folder: below,
            processes: vec![sent],
        };
        let others = ahead.compare(&Still(Vec::new())).expect("compared");
        assert!(others.runs.is_empty(), "it has gone");
        let unchanged = ahead.compare(&Still(vec![process()])).expect("compared");

        let images = folder.path();
        let entry = |page: u64, count, place| super::super::pagemap::Pages {
            at: at + page * PAGE_BYTES,
            count,
            place,
        };
        let pages = vec![
            entry(0, 1, Where::Left),
            entry(1, 1, Where::Here),
            entry(2, 3, Where::Left),
        ];
        let list = images.join("list");
        fs::write(&list, Pagemap { file: 4, pages }.write()).expect("written");
        fs::write(images.join("pages-4.img"), vec![55; PAGE]).expect("written");
        let inside = process().inside;
        let left = compose_one(&process(), &unchanged.runs[&inside].0, &list, images).expect("whole");
        assert_eq!(
            left,
            Left {
                below_bytes: 3 * PAGE_BYTES,
                taken_bytes: PAGE_BYTES,
                compared_bytes: 0
            }
        );
        let new = Pagemap::read(&fs::read(&list).expect("a list")).expect("a list");
        let expected = [
            entry(0, 1, Where::Below),
            entry(1, 1, Where::Here),
            entry(2, 1, Where::Below),
            entry(3, 1, Where::Here),
            entry(4, 1, Where::Below),
        ];
        assert_eq!(new.pages, expected);
        let pages = fs::read(images.join("pages-4.img")).expect("pages");
        assert_eq!(pages.len(), 2 * PAGE);
        assert_eq!((pages[0], pages[PAGE], pages[PAGE + 1]), (55, 99, 4));
    }
}
