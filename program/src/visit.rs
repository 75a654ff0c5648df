//! A command in a running copy, from outside: `dunlin exec`.
//!
//! Flow:       `Rooms::of` a copy -> `Visit::begin` with whoever's standard streams -> `ended`, or dropped.
//! Invariants: 1. a visit that is dropped is killed and collected. Not here: what happens inside (`inside::visit`).

use crate::copy::Copy;
use crate::inside;
use crate::message::Walls;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The namespaces of a copy; the pid namespace is the one of its processes, not its keeper's.
const NAMESPACES: [&str; 6] = ["net", "ipc", "uts", "cgroup", "pid_for_children", "mnt"];

/// Where a copy's processes are.
#[derive(Debug)]
pub struct Rooms {
    namespaces: Vec<OwnedFd>,
    groups: Vec<OwnedFd>,
}

impl Rooms {
    /// Of a copy that runs.
    ///
    /// # Errors
    /// Where it has just ended, or has no process yet.
    pub fn of(copy: &Copy) -> io::Result<Self> {
        let keeper = copy.keeper();
        let open = |name: &&str| File::open(format!("/proc/{keeper}/ns/{name}")).map(OwnedFd::from);
        Ok(Self {
            namespaces: NAMESPACES.iter().map(open).collect::<Result<_, _>>()?,
            groups: copy.groups()?,
        })
    }
}

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Order {
    /// The command and its arguments; found by the program's `PATH`.
    pub command: Vec<String>,
    /// Where it starts.
    pub directory: PathBuf,
    /// All of its environment.
    pub environment: Vec<(String, String)>,
    /// The program's walls.
    pub walls: Walls,
}

/// A command that runs.
#[derive(Debug)]
pub struct Visit {
    child: Child,
    ended: OwnedFd,
}

impl Visit {
    /// Begins. The streams are its standard input, output and error.
    ///
    /// # Errors
    /// Where there is no such command inside, or the kernel refuses.
    pub fn begin(rooms: Rooms, order: &Order, streams: [OwnedFd; 3]) -> io::Result<Self> {
        let Some((name, arguments)) = order.command.split_first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no command"));
        };
        let [input, output, error] = streams.map(Stdio::from);
        let mut command = Command::new(name);
        command.args(arguments).env_clear();
        command.envs(order.environment.iter().cloned());
        command.stdin(input).stdout(output).stderr(error);
        let walls = order.walls.clone();
        let directory = order.directory.clone();
        let filter = inside::filter_of_a_visitor();
        let enter = move || {
            inside::enter(&rooms.namespaces, &rooms.groups, &walls, &filter)?;
            // Only now: it is a folder of the copy's view.
            std::env::set_current_dir(&directory)
        };
        // SAFETY: between fork and exec it makes system calls, and allocates at most where glibc's fork allows it.
        unsafe { command.pre_exec(enter) };
        let mut child = command.spawn()?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(ended) => Ok(Self { child, ended }),
            Err(error) => {
                end(&mut child);
                Err(error.into())
            }
        }
    }

    /// Whether it has ended within that time, or `gone` became readable: whoever asked has closed the connection.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn wait(&mut self, gone: BorrowedFd<'_>, within: Duration) -> io::Result<Waited> {
        let within = Timespec::try_from(within).unwrap_or_default();
        let mut fds = [
            PollFd::new(&self.ended, PollFlags::IN),
            PollFd::from_borrowed_fd(gone, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&within)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[0].revents().is_empty() {
            // It waits for the command, and has no other end than by an exit code or a kill.
            return Ok(Waited::Ended(self.child.wait()?.code().unwrap_or(1)));
        }
        match fds[1].revents().is_empty() {
            true => Ok(Waited::Runs),
            false => Ok(Waited::Deserted),
        }
    }
}

/// What became of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The command's exit code; 128 and the signal's number where a signal ended it.
    Ended(i32),
    /// It runs.
    Runs,
    /// Whoever asked has gone.
    Deserted,
}

impl Drop for Visit {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
