//! `dunlin exec`: a person's command in the copy of a bare program on this host.
//!
//! **Decides**: who may. **Flow**: request -> the loop says where the copy is -> `Entered` -> the asker's standard streams, as descriptors -> the
//! command -> its exit code. **Invariants**: 1. it ends with its asker's connection, and with the copy. 2. `MOST_AT_ONCE` run at once. 3. it is not
//! replicated, and `Entered` says so. **Not here**: the namespaces and walls (`dunlin_program::visit`).

use super::Daemon;
use crate::control::server::AnswerTo;
use crate::vm::Visited;
use crate::vm::event::LoopEvent;
use crossbeam_channel::bounded;
use dunlin_api::{Answer, EventKind};
use dunlin_program::visit::{Visit, Waited};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Commands in copies of this host, of everybody together.
const MOST_AT_ONCE: usize = 16;
/// The loop turns ten times a second at the least.
const LOOP_WITHIN: Duration = Duration::from_secs(5);
/// The asker has them in its hand.
const STREAMS_WITHIN: Duration = Duration::from_secs(10);
/// Between two looks; what ends is seen at once.
const LOOK: Duration = Duration::from_secs(60);

static RUNNING: AtomicUsize = AtomicUsize::new(0);

struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        let more = |running| (running < MOST_AT_ONCE).then_some(running + 1);
        RUNNING
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .ok()
            .map(|_| Self)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The last answer.
pub fn serve(daemon: &Daemon, vm: &str, command: Vec<String>, mut stream: &UnixStream) -> Answer {
    let Some(_turn) = Turn::take() else {
        return Answer::failed(format!(
            "{MOST_AT_ONCE} commands run in programs of this host already: end one of them"
        ));
    };
    if command.is_empty() {
        return Answer::refused("there is no command: dunlin exec NAME -- COMMAND");
    }
    let visited = match visited(daemon, vm, command.clone()) {
        Ok(visited) => visited,
        Err(refusal) => return refusal,
    };
    let Ok(who) = daemon.roles.of(stream) else {
        return Answer::refused("nobody knows who asks");
    };
    if visited.is_root && !who.is_administrator() {
        return Answer::refused(format!(
            "program '{vm}' runs as root, who can read all that its host has: a command in it is for root ('user' in its file names another)"
        ));
    }
    let host = &daemon.host.name;
    let (name, role) = (&command[0], visited.role);
    let text = format!(
        "in the copy of '{vm}' on host '{host}' ({role}) alone: nothing of it is replicated; what it changes in the program makes the copies differ"
    );
    if stream.answer(&Answer::Entered { text }).is_err() {
        return Answer::failed("the asker has gone");
    }
    let streams = match streams(stream) {
        Ok(streams) => streams,
        Err(error) => return Answer::failed(format!("the standard streams of 'dunlin exec': {error}")),
    };
    daemon.host.events.push(
        vm,
        EventKind::Exec,
        format!(
            "user '{}' runs {name:?} in the copy on this host ({role}); it is not replicated",
            who.name()
        ),
    );
    let run = || -> io::Result<Option<i32>> {
        let mut visit = Visit::begin(visited.rooms, &visited.order, streams)?;
        loop {
            match visit.wait(stream.as_fd(), LOOK)? {
                Waited::Ended(code) => return Ok(Some(code)),
                Waited::Deserted => return Ok(None),
                Waited::Runs => {}
            }
        }
    };
    match run() {
        Ok(Some(code)) => Answer::Exited { code },
        Ok(None) => Answer::failed("the asker has gone"),
        Err(error) => Answer::failed(format!("{name}: {error}")),
    }
}

fn visited(daemon: &Daemon, vm: &str, command: Vec<String>) -> Result<Visited, Answer> {
    let refused = |why: String| Err(Answer::refused(why));
    let found = daemon
        .vms()
        .get(vm)
        .map(|handle| (handle.sender(), handle.status().program.is_some()));
    let to_loop = match found {
        None => {
            return refused(format!(
                "there is no program '{vm}' on this host; 'dunlin status' lists them"
            ));
        }
        Some((_, false)) => return refused(format!("'{vm}' is a VM: what runs in it is its own")),
        Some((to_loop, true)) => to_loop,
    };
    let (reply, answer) = bounded(1);
    to_loop.send(LoopEvent::Visit(command, reply));
    match answer.recv_timeout(LOOP_WITHIN) {
        Ok(Ok(visited)) => Ok(*visited),
        Ok(Err(why)) => Err(Answer::failed(why.to_string())),
        Err(_) => Err(Answer::failed(format!(
            "the loop of program '{vm}' does not answer; see 'dunlin events'"
        ))),
    }
}

/// One byte, with standard input, output and error.
fn streams(stream: &UnixStream) -> io::Result<[OwnedFd; 3]> {
    stream.set_read_timeout(Some(STREAMS_WITHIN))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let mut found = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            found.extend(descriptors);
        }
    }
    found
        .try_into()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "three descriptors were to come"))
}
