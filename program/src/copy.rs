//! One copy (or the client) from outside: its process, its card, what it prints, how it ends.
//!
//! Flow: `Copy::prepare` -> namespaces and card are there -> `go` -> it runs -> `Ended`.
//! Invariants:
//! 1. a copy that is dropped is killed, and waited for: with its keeper goes its pid 1, and with that everything in it;
//! 2. (memory) of what it prints the last `KEPT_BYTES` are kept.
//!
//! Source: unix(7), tuntap. Not here: what happens inside (`inside`).

use crate::chance::{Drawn, Seed};
use crate::data::{Attached, blocks};
use crate::limits::Group;
use crate::message::{Adopted, Go, Heard, Spec, Walls, receive, send};
use crate::page::{Leads, Page};
use crate::printed::Printed;
use crate::quiet::{Quiet, Watcher};
use crate::rest;
use crate::source::{Source, emptied};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// What is kept of what a copy prints.
const KEPT_BYTES: usize = 16 << 10;
/// A host makes namespaces in milliseconds; one that is very busy gets this.
const PREPARED_WITHIN: Duration = Duration::from_secs(20);

/// What has ended has printed all that it will; what it left behind may go on.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(500);
/// Where it did, nothing tells that all of its own words were read; what it has printed is read at once, and a loop that waits is silent to its group.
const WORDS_AMONG_OTHERS_WITHIN: Duration = Duration::from_millis(50);

/// How to run `inside::main`.
#[derive(Clone, Debug)]
pub struct Inside {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// A running copy.
pub struct Copy {
    name: String,
    keeper: Child,
    socket: OwnedFd,
    card: File,
    queues: OwnedFd,
    written: Option<OwnedFd>,
    /// The root of its data's file system, and what that is on.
    mounted: Option<OwnedFd>,
    attached: Option<Attached>,
    clock: Option<Page>,
    chance: Option<OwnedFd>,
    leads: Leads,
    prints_to: Option<String>,
    printed: Arc<Mutex<VecDeque<u8>>>,
    /// Closed when nobody can print any more.
    printing: Option<Receiver<()>>,
    ended: Option<Heard>,
    quiet: Watcher,
    rest: rest::Watcher,
    /// What limits it; removed when all else has ended.
    group: Option<Group>,
}

/// Why there is no copy: one line, with what to do where that is known.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {why}")]
pub struct CopyError {
    name: String,
    why: String,
}

/// Where what a copy prints goes.
pub enum Prints {
    /// The last of it is kept; all of it goes to this file, if there is one.
    Kept(Option<Printed>),
    /// To the tester's standard error.
    Through,
}

impl Copy {
    /// Makes the namespaces and the card; the program does not run yet. What it takes is limited by `group`; `attached` is the device
    /// of its data, which `spec` has it mount.
    ///
    /// # Errors
    /// Where the host refuses, or is too slow.
    pub fn prepare(
        name: &str,
        inside: &Inside,
        spec: &Spec,
        prints: Prints,
        group: Option<Group>,
        attached: Option<Attached>,
    ) -> Result<Self, CopyError> {
        let fail = |why: String| CopyError {
            name: name.to_owned(),
            why,
        };
        // Read before anybody forks for who is let into a copy: in a forked child nobody would end what another thread has begun to read.
        let _ = crate::inside::first_visitor();
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|error| fail(format!("a pair of sockets: {error}")))?;
        let mut command = Command::new(&inside.program);
        command.args(&inside.arguments).stdin(Stdio::from(theirs));
        let printed = Arc::new(Mutex::new(VecDeque::new()));
        let mut prints_to = None;
        let printing = match prints {
            Prints::Through => {
                command.stdout(stderr().map_err(|error| fail(error.to_string()))?);
                None
            }
            Prints::Kept(file) => {
                // One pipe: so the order of lines is the program's.
                let kept = io::pipe().and_then(|(stream, prints)| {
                    prints_to = Some(pipe_name(stream.as_fd())?);
                    command.stdout(prints.try_clone()?).stderr(prints);
                    keep(stream, Arc::clone(&printed), file)
                });
                Some(kept.map_err(|error| fail(format!("what it prints: {error}")))?)
            }
        };
        let keeper = command
            .spawn()
            .map_err(|error| fail(format!("{}: {error}", inside.program.display())))?;
        drop(command); // with it our copies of their ends: so it is seen when they are gone
        // From here on a failure ends the keeper with its guard.
        let mut keeper = Guard(Some(keeper));
        if let (Some(group), Some(keeper)) = (&group, &keeper.0) {
            // It has started nothing yet: it waits for its `Spec`.
            let limited = group.add(keeper.id());
            limited.map_err(|error| fail(format!("its control group: {error}")))?;
        }
        let gone = || fail("its process ended before it was ready".to_owned());
        send(ours.as_fd(), spec, &[]).map_err(|error| fail(error.to_string()))?;
        if !readable_within(ours.as_fd(), PREPARED_WITHIN) {
            let why = format!(
                "its namespaces were not there within {} s",
                PREPARED_WITHIN.as_secs()
            );
            return Err(fail(why));
        }
        let heard = receive::<Heard>(ours.as_fd()).map_err(|error| fail(error.to_string()))?;
        let has = |what: fn(&Walls) -> bool| spec.walls.as_ref().is_some_and(what);
        let (card, queues, written, mounted, clock, chance) = match heard.ok_or_else(gone)? {
            (Heard::Ready, descriptors) => {
                let mut descriptors = descriptors.into_iter();
                let mut next = |is_sent: bool| is_sent.then(|| descriptors.next());
                let (card, queues) = (next(true), next(true));
                let written = next(has(|_| true));
                let mounted = next(has(|walls| walls.data.is_some()));
                let clock = next(has(Walls::has_page));
                let chance = next(has(|walls| walls.chance.is_some()));
                let is_missing = [&written, &mounted, &clock, &chance]
                    .iter()
                    .any(|it| matches!(it, Some(None)));
                match (card.flatten(), queues.flatten()) {
                    (Some(card), Some(queues)) if !is_missing => {
                        let clock = clock.flatten().map(File::from);
                        (
                            File::from(card),
                            queues,
                            written.flatten(),
                            mounted.flatten(),
                            clock,
                            chance.flatten(),
                        )
                    }
                    _ => return Err(fail("its card did not come (too many open files?)".to_owned())),
                }
            }
            (Heard::Failed(why), _) => return Err(fail(why)),
            _ => return Err(gone()),
        };
        Ok(Self {
            name: name.to_owned(),
            keeper: keeper.0.take().ok_or_else(gone)?,
            socket: ours,
            card,
            queues,
            written,
            mounted,
            attached,
            clock: clock.map(Page::new),
            chance,
            leads: spec.walls.as_ref().map_or_else(Leads::default, Walls::leads),
            prints_to,
            printed,
            printing,
            ended: None,
            quiet: Watcher::default(),
            rest: rest::Watcher::default(),
            group,
        })
    }

    /// Starts the program.
    ///
    /// # Errors
    /// Where its keeper has gone.
    pub fn go(&self) -> Result<(), CopyError> {
        self.tell(&Go::Start)
    }

    /// Instead of `go`: nothing runs in it until a copy of a running program was brought here, and is adopted.
    ///
    /// # Errors
    /// Where the host refuses, or is too slow.
    pub fn vacate(&self) -> Result<(), CopyError> {
        self.tell(&Go::Vacate)?;
        self.answered(&Heard::Vacant)
    }

    /// What was brought here runs from now on, as if `go` had started it.
    ///
    /// # Errors
    /// Where the host refuses, or is too slow.
    pub fn adopt(&self, adopted: Adopted) -> Result<(), CopyError> {
        self.tell(&Go::Adopt(adopted))?;
        self.answered(&Heard::Started)
    }

    fn tell(&self, word: &Go) -> Result<(), CopyError> {
        send(self.socket.as_fd(), word, &[]).map_err(|error| self.error(error.to_string()))
    }

    /// What the processor's own clock says, to a program that waits for it (`Heard::ReadTsc`).
    ///
    /// # Errors
    /// Where its first process has gone.
    pub fn tsc(&self, says: u64) -> Result<(), CopyError> {
        self.tell(&Go::Tsc(says))
    }

    fn answered(&self, with: &Heard) -> Result<(), CopyError> {
        if !readable_within(self.socket.as_fd(), PREPARED_WITHIN) {
            let why = format!("it does not answer within {} s", PREPARED_WITHIN.as_secs());
            return Err(self.error(why));
        }
        let heard = receive::<Heard>(self.socket.as_fd()).map_err(|error| self.error(error.to_string()))?;
        match heard {
            Some((heard, _)) if heard == *with => Ok(()),
            Some((Heard::Failed(why), _)) => Err(self.error(why)),
            _ => Err(self.error("its first process was killed".to_owned())),
        }
    }

    /// The process that keeps it: who enters its namespaces finds them there.
    #[must_use]
    pub fn keeper(&self) -> u32 {
        self.keeper.id()
    }

    /// What a process writes "0" to before it is one of this copy's.
    ///
    /// # Errors
    /// Too many open files.
    pub fn groups(&self) -> io::Result<Vec<OwnedFd>> {
        self.group.as_ref().map_or_else(|| Ok(Vec::new()), Group::doors)
    }

    /// Whether the kernel has killed a process of it for want of memory within its limits.
    #[must_use]
    pub fn met_its_memory(&self) -> bool {
        self.group
            .as_ref()
            .is_some_and(|group| group.killed_for_memory() > 0)
    }

    /// The folder of what it has written, over the host's files.
    #[must_use]
    pub fn written(&self) -> Option<BorrowedFd<'_>> {
        self.written.as_ref().map(AsFd::as_fd)
    }

    /// The image of its data, if it has one.
    ///
    /// # Errors
    /// Too many open files.
    pub fn data(&self) -> Option<io::Result<blocks::Source>> {
        let (attached, mounted) = (self.attached.as_ref()?, self.mounted.as_ref()?);
        Some(attached.source(mounted))
    }

    /// Whether all of its threads sleep, and none of them until this host has answered its call.
    ///
    /// # Errors
    /// Where the kernel does not tell.
    pub fn is_at_rest(&mut self) -> io::Result<bool> {
        self.rest.is_at_rest(self.keeper.id())
    }

    /// Whether it waits for its next input and has been told of all that it got.
    pub fn is_quiet(&mut self) -> Quiet {
        self.quiet.look(self.keeper.id())
    }

    /// What of its vDSO leads to its page.
    #[must_use]
    pub fn leads(&self) -> Leads {
        self.leads
    }

    /// Its chance, from how far another copy has drawn; none where that is its host's own. Once.
    pub fn draws(&mut self, seed: Seed, drawn: &Drawn) -> Option<Source> {
        let pipe = self.chance.take()?;
        Some(Source::new(seed, drawn, emptied(pipe)))
    }

    /// The page of its agreed clock, where it has one.
    #[must_use]
    pub fn clock(&self) -> Option<&Page> {
        self.clock.as_ref()
    }

    /// The kernel's name of the pipe that it prints to, where what it prints is kept.
    #[must_use]
    pub fn prints_to(&self) -> Option<&str> {
        self.prints_to.as_deref()
    }

    /// What it has to say since; none where it says nothing now. `Ended` is told once, and kept.
    ///
    /// # Errors
    /// Where its keeper said what nobody understands.
    pub fn heard(&mut self) -> Result<Option<(Heard, Vec<OwnedFd>)>, CopyError> {
        if self.ended.is_some() && self.keeper_is_silent() {
            return Ok(None);
        }
        if !readable_within(self.socket.as_fd(), Duration::ZERO) {
            return Ok(None);
        }
        let heard = receive::<Heard>(self.socket.as_fd()).map_err(|error| self.error(error.to_string()))?;
        let heard = match heard {
            Some(heard) => heard,
            None if self.ended.is_some() => return Ok(None),
            None => {
                let why = Heard::Failed("its first process was killed".to_owned());
                (why, Vec::new())
            }
        };
        if matches!(heard.0, Heard::Ended { .. } | Heard::Failed(_)) {
            self.ended = Some(heard.0.clone());
        }
        Ok(Some(heard))
    }

    /// After its end nobody speaks on its socket any more, and a poll would always say that it is readable.
    fn keeper_is_silent(&self) -> bool {
        !matches!(self.ended, Some(Heard::Ended { others: true, .. }))
    }

    /// How it ended, if it has.
    #[must_use]
    pub fn ended(&self) -> Option<&Heard> {
        self.ended.as_ref()
    }

    /// For messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Readable when `heard` has something to tell.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Readable when it has sent a frame.
    #[must_use]
    pub fn card(&self) -> &File {
        &self.card
    }

    /// A sock_diag socket in its network namespace.
    #[must_use]
    pub fn queues(&self) -> BorrowedFd<'_> {
        self.queues.as_fd()
    }

    /// The last lines that it printed, `most` of them at most, as a terminal may show them.
    #[must_use]
    pub fn last_words(&self, most: usize) -> Vec<String> {
        if let (Some(ended), Some(printing)) = (&self.ended, &self.printing) {
            // Its end is told on another way than its words.
            let _ = printing.recv_timeout(words_within(ended));
        }
        let printed = self.printed.lock();
        let bytes: Vec<u8> = printed.iter().copied().collect();
        last_lines(&bytes, most)
    }

    fn error(&self, why: String) -> CopyError {
        CopyError {
            name: self.name.clone(),
            why,
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        end(&mut self.keeper);
    }
}

fn words_within(ended: &Heard) -> Duration {
    match ended {
        Heard::Ended { others: true, .. } => WORDS_AMONG_OTHERS_WITHIN,
        _ => LAST_WORDS_WITHIN,
    }
}

/// They go into events and messages, which people read on terminals: what a program prints tells no terminal what to do.
fn last_lines(bytes: &[u8], most: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let shown = |line: &str| -> String {
        line.chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect()
    };
    let mut lines: Vec<String> = text.lines().map(shown).collect();
    lines.retain(|line| !line.trim().is_empty());
    lines.split_off(lines.len().saturating_sub(most))
}

struct Guard(Option<Child>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(keeper) = &mut self.0 {
            end(keeper);
        }
    }
}

/// SIGKILL ends at once; what is in its pid namespace follows before its parent, the keeper's, is told.
fn end(keeper: &mut Child) {
    let _ = keeper.kill();
    let _ = keeper.wait();
}

fn stderr() -> io::Result<Stdio> {
    Ok(Stdio::from(io::stderr().as_fd().try_clone_to_owned()?))
}

/// As /proc tells it: the same for both ends.
fn pipe_name(end: BorrowedFd<'_>) -> io::Result<String> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", end.as_raw_fd()))?;
    Ok(link.to_string_lossy().into_owned())
}

/// A thread that ends with the stream, that is with the last process that prints to it.
fn keep(
    mut stream: PipeReader,
    printed: Arc<Mutex<VecDeque<u8>>>,
    mut file: Option<Printed>,
) -> io::Result<Receiver<()>> {
    let (prints, printing) = channel::<()>();
    let run = move || {
        let _prints = prints;
        let mut buffer = [0; 4096];
        loop {
            let length = match stream.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            if let Some(file) = &mut file {
                // A full disk costs the log, not the program.
                let _ = file.write_all(&buffer[..length]);
            }
            let mut printed = printed.lock();
            printed.extend(&buffer[..length]);
            let too_many = printed.len().saturating_sub(KEPT_BYTES);
            printed.drain(..too_many);
        }
    };
    std::thread::Builder::new()
        .name("printed".to_owned())
        .spawn(run)?;
    Ok(printing)
}

/// Whether there is something to read, or the other side has gone.
fn readable_within(descriptor: BorrowedFd<'_>, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut polled, Some(&left)) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_lines_without_what_a_terminal_obeys() {
        let printed = "begun\n\u{1b}]0;title\u{7}\tfail\u{9b}31m: ключ\r\n \n\u{1b}\n".as_bytes();
        assert_eq!(last_lines(printed, 1), [" ]0;title  fail 31m: ключ"]);
        assert_eq!(last_lines(printed, 9).len(), 2, "what says nothing is no line");
        assert!(last_lines(printed, 0).is_empty());
        assert_eq!(last_lines(b"a\xff\x1bb", 1), ["a\u{fffd} b"]);
    }

    #[test]
    fn who_left_others_behind_is_not_waited_for_as_if_all_had_ended() {
        let ended = |others| Heard::Ended {
            code: Some(0),
            signal: None,
            others,
        };
        assert_eq!(words_within(&ended(false)), LAST_WORDS_WITHIN);
        assert_eq!(words_within(&ended(true)), WORDS_AMONG_OTHERS_WITHIN);
    }

    #[test]
    fn of_what_a_copy_prints_the_last_is_kept() {
        let (stream, mut prints) = std::io::pipe().expect("a pipe");
        let printed = Arc::new(Mutex::new(VecDeque::new()));
        let printing = keep(stream, Arc::clone(&printed), None).expect("a thread");
        for line in 0..10_000 {
            writeln!(prints, "line {line}").expect("it is read");
        }
        drop(prints);
        // Nobody prints any more, and all of it was taken.
        printing
            .recv_timeout(PREPARED_WITHIN)
            .expect_err("nothing is sent");
        let kept: Vec<u8> = printed.lock().iter().copied().collect();
        assert_eq!(kept.len(), KEPT_BYTES);
        assert!(kept.ends_with(b"line 9999\n"));
    }
}
