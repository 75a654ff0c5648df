//! Between a QEMU on a TAP of its own and the network: what frames cost that pass a process by AF_PACKET.
//!
//! * **Decides:** nothing. It is the way of serving a card that Dunlin has not taken, as little of it as carries frames: no agreement, no backup, and
//!   nothing that makes it right where a VM stops (docs/guest.md, "The way not taken").
//! * **Flow:** QEMU -> its TAP -> AF_PACKET with virtio headers -> (cut, put together) -> a TAP on the host's bridge; and back. A process of its own, so that the
//!   host's share of the CPU holds for it: this very executable, told by [`VARIABLE`].
//! * **Invariant:** a frame that finds no room is lost, as the kernel does it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Stdio};

use anyhow::{Context, Result};
use dunlin_core::offload::merge::Run;
use dunlin_core::offload::segment::segments;
use dunlin_core::offload::{MOST_SEGMENTS, Offload};
use dunlin_guest::frames::{FRAME_BYTES_MAX, Tap};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::testbed::{Node, packet};

/// The two devices and whether large frames are cut: `plain0,plain1,cut`.
const VARIABLE: &str = "DUNLIN_BENCH_RELAY";
const CUT: &str = "cut";
/// linux/if_packet.h.
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// What waits in the socket where the process is late.
const BUFFER_BYTES: libc::c_int = 32 << 20;
/// So many frames are taken before the other way is looked at.
const BATCH: usize = 64;

/// Begins it on a host.
pub fn spawn(host: &Node, inner: &str, outer: &str, cuts: bool) -> Result<Child> {
    let me = std::env::current_exe().context("finding this executable")?;
    let how = if cuts { CUT } else { "whole" };
    let mut command = host.command(me)?;
    command
        .args(["bench", "cards"])
        .env(VARIABLE, format!("{inner},{outer},{how}"));
    command.stdin(Stdio::null()).spawn().context("starting the relay")
}

/// Whether this process is to be it; then it does not end by itself.
pub fn is_wanted() -> Option<Result<()>> {
    let words = std::env::var(VARIABLE).ok()?;
    Some(run(&words))
}

fn run(words: &str) -> Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).context("dying with the parent")?;
    let mut words = words.split(',');
    let mut next = || words.next().context("what is relayed?");
    let (inner, outer, cuts) = (next()?, next()?, next()? == CUT);
    let tap = Tap::open_with_offloads(outer, Some("br0"))?;
    let socket = socket_on(inner).with_context(|| format!("a packet socket on {inner}"))?;
    let mut relay = Relay {
        buffer: vec![0; Offload::BYTES + FRAME_BYTES_MAX],
        segments: VecDeque::new(),
        cuts,
    };
    loop {
        let mut ready = [
            PollFd::new(socket.as_fd(), PollFlags::POLLIN),
            PollFd::new(tap.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::NONE)?;
        relay.carry(
            |buffer| receive(&socket, buffer),
            |frame| tap.write(frame).map(drop),
        )?;
        relay.carry(|buffer| tap.read(buffer), |frame| send(&socket, frame))?;
    }
}

struct Relay {
    buffer: Vec<u8>,
    segments: VecDeque<Box<[u8]>>,
    cuts: bool,
}

impl Relay {
    fn carry(
        &mut self,
        mut read: impl FnMut(&mut [u8]) -> io::Result<Option<usize>>,
        mut write: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<()> {
        let mut segment = Vec::new();
        for _ in 0..BATCH {
            let Some(length) = read(&mut self.buffer)? else {
                break;
            };
            if !self.cuts {
                write(&self.buffer[..length])?;
                continue;
            }
            let (header, frame) = self.buffer[..length].split_at_mut(Offload::BYTES);
            let offload = Offload::read((&*header).try_into().expect("as long as a header"));
            segments(&offload, frame, &mut segment, |frame| {
                self.segments.push_back(frame.into());
            });
        }
        while !self.segments.is_empty() {
            let run = Run::at_front(self.segments.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
            let mut whole = run.offload.to_bytes().to_vec();
            whole.extend_from_slice(&run.head);
            for frame in self.segments.drain(..run.frames) {
                whole.extend_from_slice(&frame[run.payload_at..]);
            }
            write(&whole)?;
        }
        Ok(())
    }
}

fn socket_on(device: &str) -> io::Result<OwnedFd> {
    let socket = packet::socket(libc::SOCK_NONBLOCK)?;
    packet::set(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, &1)?;
    packet::set(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1)?;
    packet::set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER_BYTES)?;
    packet::set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER_BYTES)?;
    packet::bind(&socket, Some(device))?;
    Ok(socket)
}

/// A frame behind its virtio header; none waits.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match nix::unistd::read(socket, buffer) {
        Ok(length) => Ok(Some(length).filter(|length| *length >= Offload::BYTES)),
        // The device went down: it may come again.
        Err(Errno::EAGAIN | Errno::ENETDOWN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A frame that finds no room is lost.
fn send(socket: &OwnedFd, frame: &[u8]) -> io::Result<()> {
    match nix::unistd::write(socket, frame) {
        Ok(_) | Err(Errno::ENOBUFS | Errno::EAGAIN | Errno::ENETDOWN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
