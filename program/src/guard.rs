//! A copy of a program that runs: CRIU takes its processes out of one copy's namespaces, and brings them into another's.
//!
//! Decides:    nothing.
//! Flow:       primary: `dump` (the program stands still) -> its files (`save_written`) -> `resume` -> `pack`. Backup: `Unpacking` ->
//!             `restore` into a vacated copy -> `Copy::adopt`.
//! Invariants: 1. only processes are carried: both copies' namespaces, cards and mounts are made alike, by `inside`; 2. whatever became
//!             of a dump, `mend` lets its connections go on, and `resume` the program; 3. each step has a bound, and what it started is killed and collected there;
//!             4. of what the program has written nothing runs with the host's rights (`criu`, `inside::signal`).
//! Source:     tar(1). CRIU enters the copy's own namespaces, and takes the tree of its process 2: so it meets no namespace but System V's, no
//!             TAP and no mount that it would have to carry.
//! Not here:   CRIU itself (`criu`); when (`node`); connections in translation, the order of reading (core).

mod ahead;
mod areas;
mod bounded;
mod criu;
mod family;
pub(crate) mod layers;
mod memory;
mod pagemap;
mod repair;
mod room;
mod stopped;
mod tracking;
mod whose;

pub use ahead::{Ahead, Left, Still, Unchanged, compose};
pub use criu::{Criu, Held, Undumped};
pub use repair::mend;
pub use room::room_for;
pub use stopped::{stop_again, stopped};
pub use tracking::{Untracked, tells_what_is_written};

use crate::copy::Copy;
use crate::data::blocks::Source;
use crate::inside::is_visitor;
use crate::inside::listens;
use crate::inside::signal;
use crate::inside::stranger::Door;
use crate::page::{self, Leads};
use crate::proc::{has_gone, text};
use bounded::{Bounded, Collected, ended_well};
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What reads bytes that CRIU or another host has written, for the fuzz target `images` alone: it has to reach what nobody else should.
#[doc(hidden)]
pub mod decoded {
    pub use super::areas::without_promises;
    pub use super::layers::{name_of, place_of};
    pub use super::pagemap::{Pagemap, Pages, Where};
}

/// Everything here but CRIU and tar is a matter of milliseconds.
const SOON: Duration = Duration::from_secs(10);
/// What was written to files is bounded by its own tmpfs.
const FILES_WITHIN: Duration = Duration::from_secs(60);
/// The folder that a command gets as its standard input.
const HERE: &str = "/proc/self/fd/0";
/// The archive of what a program has written, beside the images.
const WRITTEN: &str = "written.tar";
/// The copy's own first process, as it is called inside.
const KEEPS: u32 = 1;
/// A process that a filter of system calls is for, as proc(5) says it.
const FILTERED: &str = "2";
/// How long it is tried to let a program run again, and how long it is waited in between: for its end, which needs no more tries.
const RESUMED_WITHIN: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Why a copy could not be taken or brought: one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GuardError(String);

impl GuardError {
    pub(crate) fn new(why: String) -> Self {
        Self(why)
    }

    /// `what: why`.
    pub fn of(what: &str, why: &impl std::fmt::Display) -> Self {
        Self(format!("{what}: {why}"))
    }
}

fn failed<E: std::fmt::Display>(step: &str) -> impl Fn(E) -> GuardError + '_ {
    move |error| GuardError(format!("{step}: {error}"))
}

/// Where a copy's processes are, for a thread that does not own it.
#[derive(Debug)]
pub struct Place {
    keeper: u32,
    /// Readable when that has ended.
    ended: OwnedFd,
    namespaces: Vec<OwnedFd>,
    /// One of them: the processes'.
    processes: OwnedFd,
    mounts: OwnedFd,
    prints_to: Option<String>,
    written: Option<OwnedFd>,
    data: Option<Source>,
    groups: Vec<OwnedFd>,
}

/// What CRIU enters, but for the processes' namespace and the mounts. Not that of System V's shared memory: CRIU carries what is there only
/// where that is another one than its own, and begins the processes in a new one.
const NAMESPACES: [&str; 3] = ["net", "uts", "cgroup"];

impl Place {
    /// Of this copy, which runs or is vacated.
    ///
    /// # Errors
    /// Where it has just ended; too many open files.
    pub fn of(copy: &Copy) -> Result<Self, GuardError> {
        let keeper = copy.keeper();
        let open = |name: &str| {
            let opened = File::open(format!("/proc/{keeper}/ns/{name}"));
            opened.map(OwnedFd::from).map_err(failed("its namespaces"))
        };
        let pid = i32::try_from(keeper).ok().and_then(Pid::from_raw);
        let ended = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let written = copy.written().map(|written| written.try_clone_to_owned());
        Ok(Self {
            keeper,
            ended: ended
                .unwrap_or(Err(rustix::io::Errno::SRCH))
                .map_err(failed("its keeper"))?,
            namespaces: NAMESPACES
                .iter()
                .map(|name| open(name))
                .collect::<Result<_, _>>()?,
            processes: open("pid_for_children")?,
            mounts: open("mnt")?,
            prints_to: copy.prints_to().map(str::to_owned),
            written: written.transpose().map_err(failed("its files"))?,
            data: copy.data().transpose().map_err(failed("its image"))?,
            groups: copy.groups().map_err(failed("its control group"))?,
        })
    }

    /// The kernel's name of the pipe that it prints to.
    #[must_use]
    pub fn prints_to(&self) -> Option<&str> {
        self.prints_to.as_deref()
    }

    /// The image of its data, if it has one.
    #[must_use]
    pub fn data(&self) -> Option<&Source> {
        self.data.as_ref()
    }

    /// The numbers of all processes in it, with whoever has entered it.
    ///
    /// # Errors
    /// Where the host's processes cannot be listed.
    pub fn processes(&self) -> Result<Vec<u32>, GuardError> {
        self.numbers()
    }

    fn numbers(&self) -> Result<Vec<u32>, GuardError> {
        let processes = self.all_processes()?.into_iter();
        let number = |process: std::path::PathBuf| process.file_name()?.to_str()?.parse().ok();
        Ok(processes.filter_map(number).collect())
    }

    /// To all of its processes but the first; the newest process id.
    fn signal(&self, signal: Signal) -> io::Result<u32> {
        signal::to_all(self.processes.as_fd(), signal, SOON)
    }

    /// For who enters it with the host's rights.
    fn door(&self, knock: OwnedFd) -> io::Result<Door> {
        let namespaces = self.namespaces.iter().chain([&self.processes]);
        Ok(Door {
            namespaces: namespaces.map(OwnedFd::try_clone).collect::<Result<_, _>>()?,
            mounts: self.mounts.try_clone()?,
            groups: Vec::new(),
            knock,
            held: false,
            whose: None,
            given: Vec::new(),
        })
    }

    /// Whether it has ended, or does so within that time.
    fn ends_within(&self, within: Duration) -> bool {
        let within = Timespec::try_from(within).unwrap_or_default();
        let ended = poll(&mut [PollFd::new(&self.ended, PollFlags::IN)], Some(&within));
        ended.is_ok_and(|ready| ready > 0)
    }
}

/// Lets a program run that stands still, and says the newest process id in its namespace. What fails is told, and tried again, for a
/// minute, or until the copy has ended: then there is none.
///
/// # Errors
/// Where it cannot be.
pub fn resume(place: &Place, failed: &mut dyn FnMut(&io::Error)) -> Result<Option<u32>, GuardError> {
    let until = Instant::now() + RESUMED_WITHIN;
    let mut pause = FIRST_PAUSE;
    loop {
        let why = match place.signal(Signal::SIGCONT) {
            Ok(newest) => return Ok(Some(newest)),
            Err(why) => why,
        };
        failed(&why);
        if place.ends_within(pause) {
            return Ok(None);
        }
        if Instant::now() > until {
            let within = RESUMED_WITHIN.as_secs();
            return Err(GuardError(format!(
                "the program stands still, and cannot be let run for {within} s: {why}"
            )));
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Puts what the program has written to files beside the images.
///
/// # Errors
/// Those of tar.
pub fn save_written(place: &Place, folder: &Path) -> Result<(), GuardError> {
    let Some(written) = &place.written else {
        return Ok(());
    };
    let mut command = tar(written.as_fd(), "--create")?;
    command.arg("--file").arg(folder.join(WRITTEN));
    // The layers over the host's file systems; what overlayfs works in, and the place they are put together at, are not theirs.
    command.args(["--exclude=./w*", "--exclude=./root", "."]);
    succeed(&mut command, "what the program has written")
}

/// Puts that into a vacated copy.
///
/// # Errors
/// Those of tar.
pub fn load_written(place: &Place, folder: &Path) -> Result<(), GuardError> {
    let Some(written) = &place.written else {
        return Ok(());
    };
    let own = layers::Layers::of(written.as_fd()).map_err(failed("what the program has written"))?;
    let mut command = tar(written.as_fd(), "--extract")?;
    command.args(["--overwrite", "--file"]).arg(folder.join(WRITTEN));
    succeed(&mut command, "what the program has written")?;
    own.settle(written.as_fd())
        .map_err(failed("what the program has written"))
}

/// Leads the clocks of a copy's processes, which were brought here and stand still, to its page. Their vDSO is this kernel's, whatever the
/// other host's said.
///
/// # Errors
/// Where the kernel does not let their memory be written.
pub fn lead_clocks(place: &Place, leads: Leads) -> Result<(), GuardError> {
    let jumps = page::jumps(leads).map_err(|error| GuardError(error.to_string()))?;
    for process in place.numbers()? {
        page::lead(process, &jumps).map_err(failed("its agreed clock"))?;
    }
    Ok(())
}

/// Has the chance of a copy's processes, which were brought here and stand still, asked of this host: a listener for each of their threads.
///
/// # Errors
/// Where the kernel does not let them be filtered.
pub fn listen(place: &Place) -> Result<Vec<OwnedFd>, GuardError> {
    // CRIU has told them to, and does not wait for it.
    place.stands_still()?;
    let mut listeners = Vec::new();
    for process in place.numbers()? {
        let status = match text(format!("/proc/{process}/status")) {
            Err(error) if has_gone(&error) => continue,
            status => status.map_err(failed("its agreed chance"))?,
        };
        if draws(&status) {
            listeners.extend(listens::to(process).map_err(failed("its agreed chance"))?);
        }
    }
    Ok(listeners)
}

/// Whether it is one of the program's, which has not ended: each has the filter that the first one began with, whatever it has executed since.
fn draws(status: &str) -> bool {
    let word = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let is_its = memory::inside(status).is_some_and(|inside| inside > KEEPS && !is_visitor(inside));
    let has_ended = word("State:").is_none_or(|state| state.trim().starts_with(['Z', 'X']));
    is_its && !has_ended && word("Seccomp:").is_some_and(|mode| mode.trim() == FILTERED)
}

/// Whom a copy knows in its network, by /proc/net/arp.
///
/// # Errors
/// Where its namespaces are gone.
pub fn neighbours(place: &Place) -> Result<Vec<(Ipv4Addr, [u8; 6])>, GuardError> {
    let file = format!("/proc/{}/net/arp", place.keeper);
    let text = fs::read_to_string(file).map_err(failed("whom it spoke with"))?;
    Ok(text.lines().skip(1).filter_map(neighbour_of).collect())
}

/// All that lies in a folder, but what is called `but` there, as one stream. Several follow each other as one.
///
/// # Errors
/// Where tar cannot be started.
pub fn pack(folder: &Path, but: &str) -> Result<Packing, GuardError> {
    let mut command = Command::new("tar");
    command
        .arg("--create")
        .arg("--sparse")
        .arg("--directory")
        .arg(folder);
    command.arg(format!("--exclude=./{but}"));
    command.args(["--file", "-", "."]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let child = command.spawn().map_err(failed("tar"))?;
    Ok(Packing(Collected(child)))
}

/// A stream that is read.
pub struct Packing(Collected);

impl Packing {
    /// The next piece, of `most` bytes at most; an empty one at the end.
    ///
    /// # Errors
    /// Those of tar.
    pub fn piece(&mut self, most: usize) -> Result<Vec<u8>, GuardError> {
        let stream = self.0.0.stdout.as_mut();
        let mut bytes = Vec::new();
        let read = stream.map(|stream| stream.take(most as u64).read_to_end(&mut bytes));
        read.transpose().map_err(failed("tar"))?;
        if bytes.is_empty() {
            ended_well(self.0.0.wait().map_err(failed("tar"))?, "tar")?;
        }
        Ok(bytes)
    }
}

/// A stream that is written into a folder.
pub struct Unpacking(Collected);

impl Unpacking {
    /// Begins.
    ///
    /// # Errors
    /// Where tar cannot be started.
    pub fn into(folder: &Path) -> Result<Self, GuardError> {
        fs::create_dir_all(folder).map_err(failed("a folder for the images"))?;
        let mut command = Command::new("tar");
        command.args(["--extract", "--ignore-zeros", "--file", "-", "--directory"]);
        command.arg(folder).stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(failed("tar"))?;
        Ok(Self(Collected(child)))
    }

    /// The next piece.
    ///
    /// # Errors
    /// Those of tar: a full disk, above all.
    pub fn piece(&mut self, bytes: &[u8]) -> Result<(), GuardError> {
        let stream = self.0.0.stdin.as_mut();
        let written = stream.map(|stream| stream.write_all(bytes));
        written.transpose().map(drop).map_err(failed("tar"))
    }

    /// That was all.
    ///
    /// # Errors
    /// Where it was no whole stream.
    pub fn end(mut self) -> Result<(), GuardError> {
        self.0.0.stdin = None;
        ended_well(self.0.0.wait().map_err(failed("tar"))?, "tar")
    }
}

fn tar(folder: BorrowedFd<'_>, what: &str) -> Result<Command, GuardError> {
    let folder = folder
        .try_clone_to_owned()
        .map_err(failed("what the program has written"))?;
    let mut command = Command::new("tar");
    command.args([what, "--directory", HERE, "--numeric-owner", "--sparse"]);
    command.args(["--xattrs", "--xattrs-include=*", "--warning=no-all"]);
    command.stdin(Stdio::from(folder));
    Ok(command)
}

fn succeed(command: &mut Command, what: &str) -> Result<(), GuardError> {
    succeed_within(command, FILES_WITHIN, what)
}

/// One of the host's own tools, which has to end well in time.
pub(crate) fn succeed_within(command: &mut Command, within: Duration, what: &str) -> Result<(), GuardError> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    ended_well(Bounded::begin(command, within, what)?.end()?, what)
}

fn neighbour_of(line: &str) -> Option<(Ipv4Addr, [u8; 6])> {
    const COMPLETE: u32 = 2;
    let mut words = line.split_whitespace();
    let address = words.next()?.parse().ok()?;
    let flags = u32::from_str_radix(words.nth(1)?.strip_prefix("0x")?, 16).ok()?;
    let mut hardware = [0; 6];
    let mut bytes = words.next()?.split(':');
    for byte in &mut hardware {
        *byte = u8::from_str_radix(bytes.next()?, 16).ok()?;
    }
    (flags & COMPLETE != 0).then_some((address, hardware))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_the_programs_and_runs_draws_from_its_host() {
        let status = |state: &str, inside: u32, mode: u32| {
            format!("Name:\tp\nState:\t{state}\nNSpid:\t4711\t{inside}\nSeccomp:\t{mode}\n")
        };
        assert!(draws(&status("T (stopped)", 2, 2)));
        assert!(draws(&status("T (stopped)", 77, 2)), "it has executed something");
        assert!(!draws(&status("S (sleeping)", 1, 0)), "the copy's own");
        assert!(!draws(&status("Z (zombie)", 9, 2)), "it has ended");
        assert!(!draws(&status("T (stopped)", crate::inside::first_visitor(), 2)));
        assert!(!draws(""));
    }

    #[test]
    fn a_line_of_arp_is_an_address_and_its_hardware() {
        let line = "10.77.0.9        0x1         0x2         52:54:00:12:34:56     *        eth0";
        let hardware = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        assert_eq!(neighbour_of(line), Some((Ipv4Addr::new(10, 77, 0, 9), hardware)));
        assert_eq!(
            neighbour_of(&line.replace("0x2", "0x0")),
            None,
            "it does not answer"
        );
        assert_eq!(neighbour_of("nonsense"), None);
    }

    #[test]
    fn a_folder_arrives_as_it_was_and_half_of_one_does_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("images")).expect("made");
        fs::write(from.join("images/pages"), vec![7; 100_000]).expect("written");
        let mut packing = pack(&from, "ahead").expect("tar");
        let mut pieces = Vec::new();
        loop {
            let piece = packing.piece(30_000).expect("a piece");
            if piece.is_empty() {
                break;
            }
            assert!(piece.len() <= 30_000);
            pieces.push(piece);
        }
        let unpack = |pieces: &[Vec<u8>]| {
            let mut unpacking = Unpacking::into(&to)?;
            pieces.iter().try_for_each(|piece| unpacking.piece(piece))?;
            unpacking.end()
        };
        assert!(unpack(&pieces[..2]).is_err(), "half of it");
        unpack(&pieces).expect("all of it");
        assert_eq!(
            fs::read(to.join("images/pages")).expect("there"),
            vec![7; 100_000]
        );
    }
}
