//! Whether a program waits for its next input and has been told of all that it got: its one thread sleeps in `epoll_wait`, and nothing is ready there.
//!
//! Decides:    which programs can be asked that: those with one `epoll` that watches sockets, in which one thread waits.
//! Flow:       its processes' descriptors -> its `epoll`, held here too -> at each look what system call the thread is in, and a poll of the
//!             `epoll` -> [`Quiet`].
//! Invariants: 1. whatever cannot be seen is not quiet; 2. what was found is looked for anew after `FIND_AGAIN`: a program may get further ones.
//! Source:     epoll(7): an `epoll` can be polled itself. The kernel then looks through its list, and takes out what is not ready any more, as it does
//!             at the program's next `epoll_wait`. proc(5): `syscall`, `fdinfo`; pidfd_getfd(2).
//! Not here:   what waits for quiet (`dunlin_core::program::order`); several threads of which one waits at a time: nobody can see these.

use crate::proc::has_gone;
use crate::rest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// What was found is believed so long.
const FIND_AGAIN: Duration = Duration::from_secs(2);
/// The system calls that wait in an `epoll`; its number is their first argument.
const WAITS: [i64; 3] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
];
/// More than the line of a `syscall` is long.
const LINE_BYTES: usize = 256;

/// How a program was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Quiet {
    /// It waits, and was told of all.
    Yes,
    /// It is at work.
    NotYet,
    /// That cannot be known, and why.
    Unknown(String),
}

/// What is known of one copy.
#[derive(Default)]
pub(crate) struct Watcher(Option<Watched>);

struct Watched {
    epoll: OwnedFd,
    /// Of the thread that waits in it.
    syscall: File,
    /// How its line begins then.
    waiting: [String; 3],
    found: Instant,
}

impl Watcher {
    /// Of the copy whose first process is the only child of this one.
    pub(crate) fn look(&mut self, keeper: u32) -> Quiet {
        let is_known = |watched: &Watched| watched.found.elapsed() < FIND_AGAIN;
        if !self.0.as_ref().is_some_and(is_known) {
            self.0 = None;
            match rest::processes(keeper).and_then(find) {
                Ok(Found::Watched(watched)) => self.0 = Some(watched),
                Ok(Found::AtWork) => return Quiet::NotYet,
                Ok(Found::Not(why)) => return Quiet::Unknown(why),
                // A process or thread that has ended meanwhile: it is looked for anew.
                Err(error) if has_gone(&error) => return Quiet::NotYet,
                Err(error) => return Quiet::Unknown(error.to_string()),
            }
        }
        let Some(watched) = &self.0 else {
            return Quiet::NotYet;
        };
        match watched.is_quiet() {
            Ok(true) => Quiet::Yes,
            Ok(false) => Quiet::NotYet,
            // The thread has gone: it is looked for anew.
            Err(_) => {
                self.0 = None;
                Quiet::NotYet
            }
        }
    }
}

impl Watched {
    fn is_quiet(&self) -> io::Result<bool> {
        let mut line = [0; LINE_BYTES];
        let length = self.syscall.read_at(&mut line, 0)?;
        if !waits(&line[..length], &self.waiting) {
            return Ok(false);
        }
        let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
        Ok(poll(&mut polled, Some(&Timespec::default()))? == 0)
    }
}

fn waits(line: &[u8], waiting: &[String; 3]) -> bool {
    waiting.iter().any(|begin| line.starts_with(begin.as_bytes()))
}

enum Found {
    Watched(Watched),
    /// Its thread does not wait just now.
    AtWork,
    Not(String),
}

fn find(processes: Vec<u32>) -> io::Result<Found> {
    let mut all = Vec::new();
    for process in processes {
        all.extend(epolls_of(process)?.into_iter().map(|number| (process, number)));
    }
    let (process, number) = match all[..] {
        [one] => one,
        [] => {
            return Ok(Found::Not(
                "it does not wait for its sockets in an epoll".to_owned(),
            ));
        }
        _ => {
            return Ok(Found::Not(format!(
                "it waits for sockets in {} epolls",
                all.len()
            )));
        }
    };
    let waiting = WAITS.map(|call| format!("{call} {number:#x} "));
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/task"))? {
        let syscall = File::open(entry?.path().join("syscall"))?;
        let mut line = [0; LINE_BYTES];
        let length = syscall.read_at(&mut line, 0)?;
        if waits(&line[..length], &waiting) {
            threads.push(syscall);
        }
    }
    if threads.len() > 1 {
        let why = format!("{} of its threads wait in one epoll", threads.len());
        return Ok(Found::Not(why));
    }
    let Some(syscall) = threads.pop() else {
        return Ok(Found::AtWork);
    };
    let handle = i32::try_from(process).ok().and_then(Pid::from_raw);
    let handle = pidfd_open(handle.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    let epoll = pidfd_getfd(handle.as_fd(), number, PidfdGetfdFlags::empty())?;
    Ok(Found::Watched(Watched {
        epoll,
        syscall,
        waiting,
        found: Instant::now(),
    }))
}

/// The numbers of those of a process that watch a socket.
fn epolls_of(process: u32) -> io::Result<Vec<i32>> {
    let link = |number: &str| fs::read_link(format!("/proc/{process}/fd/{number}"));
    let is_socket = |number: &str| link(number).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
    let mut all = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let name = entry?.file_name();
        let Some(name) = name.to_str() else { continue };
        // One that was closed meanwhile is none.
        if !link(name).is_ok_and(|to| to.as_os_str() == "anon_inode:[eventpoll]") {
            continue;
        }
        let watched = fs::read_to_string(format!("/proc/{process}/fdinfo/{name}")).unwrap_or_default();
        let mut targets = watched
            .lines()
            .filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next());
        if targets.any(is_socket) {
            all.extend(name.parse::<i32>());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command, Stdio};

    /// What this script does.
    fn program(script: &str) -> Child {
        Command::new("python3")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 (cargo xtask setup)")
    }

    const EPOLL: &str = "
import select, socket
ours, theirs = socket.socketpair()
waits = select.epoll()
waits.register(ours, select.EPOLLIN)
print('here', flush=True)
waits.poll()
";

    fn is_found(script: &str, wanted: impl Fn(&Quiet) -> bool) {
        let mut program = program(script);
        let mut here = [0; 5];
        program
            .stdout
            .as_mut()
            .expect("a pipe")
            .read_exact(&mut here)
            .expect("it prints");
        let until = Instant::now() + Duration::from_secs(20);
        let mut watched = None;
        let found = loop {
            let found = match watched
                .as_ref()
                .map_or_else(|| find(vec![program.id()]), |_| Ok(Found::AtWork))
            {
                Ok(Found::Watched(new)) => {
                    watched = Some(new);
                    Quiet::NotYet
                }
                Ok(Found::Not(why)) => Quiet::Unknown(why),
                _ => Quiet::NotYet,
            };
            let found = match &watched {
                Some(watched) if watched.is_quiet().expect("proc") => Quiet::Yes,
                _ => found,
            };
            if wanted(&found) || Instant::now() > until {
                break found;
            }
            std::thread::yield_now();
        };
        program.kill().expect("it runs");
        program.wait().expect("it ends");
        assert!(wanted(&found), "{found:?}");
    }

    #[test]
    fn one_that_has_ended_is_looked_for_again_and_nothing_is_said_of_it() {
        let mut program = program("pass");
        program.wait().expect("it ends");
        let error = epolls_of(program.id()).expect_err("it has ended");
        assert!(has_gone(&error), "{error}");
    }

    #[test]
    fn a_program_that_waits_in_its_epoll_is_quiet() {
        is_found(EPOLL, |found| *found == Quiet::Yes);
    }

    #[test]
    fn one_that_selects_or_has_two_of_them_cannot_be_known() {
        let selects = EPOLL.replace("waits = select.epoll()", "waits = select.poll()");
        is_found(
            &selects,
            |found| matches!(found, Quiet::Unknown(why) if why.contains("not wait")),
        );
        let two = EPOLL.replace(
            "print('here'",
            "more = select.epoll()\nmore.register(theirs, 1)\nprint('here'",
        );
        is_found(
            &two,
            |found| matches!(found, Quiet::Unknown(why) if why.contains("2 epolls")),
        );
    }

    /// What the kernel does for who polls an `epoll`: the ground on which invariant 1 stands.
    #[test]
    fn a_poll_says_whether_something_is_ready_and_takes_out_what_was() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let list = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll");
        epoll::add(&list, &ours, epoll::EventData::new_u64(1), epoll::EventFlags::IN).expect("added");
        let is_ready = || {
            let mut polled = [PollFd::new(&list, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).expect("a poll") == 1
        };
        assert!(!is_ready());
        theirs.write_all(b"x").expect("room");
        assert!(is_ready());
        let mut told = Vec::with_capacity(4);
        epoll::wait(
            &list,
            rustix::buffer::spare_capacity(&mut told),
            Some(&Timespec::default()),
        )
        .expect("told");
        assert_eq!(told.len(), 1);
        assert!(is_ready(), "told, and not read");
        (&ours).read_exact(&mut [0]).expect("it is there");
        assert!(!is_ready(), "read: it stood in the list until now");
    }
}
