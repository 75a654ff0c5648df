//! Between a QEMU on a TAP of its own and the network: what frames cost that pass a process by AF_PACKET.
//!
//! * **Decides:** nothing. It is the way of serving a card that Dunlin has not taken, as little of it as carries frames: no agreement, no backup, and
//!   nothing that makes it right where a VM stops (docs/guest.md, "The way not taken").
//! * **Flow:** QEMU -> its TAP -> AF_PACKET with virtio headers -> (cut, put together) -> a TAP on the host's bridge; and back. A process of its own, so that the
//!   host's share of the CPU holds for it: this very executable, told by [`VARIABLE`].
//! * **Invariant:** a frame that finds no room is lost, as the kernel does it.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Stdio};

use anyhow::{Context, Result};
use dunlin_core::offload::merge::Run;
use dunlin_core::offload::segment::segments;
use dunlin_core::offload::{MOST_SEGMENTS, Offload};
use dunlin_guest::frames::{FRAME_BYTES_MAX, Tap};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::testbed::Node;

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
    let name = CString::new(device)?;
    // SAFETY: a name that ends with zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a plain call; the result is checked and owned by nobody else.
    let socket = unsafe {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = libc::socket(libc::AF_PACKET, kind, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    set(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, 1)?;
    set(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER_BYTES)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, BUFFER_BYTES)?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index as libc::c_int,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address lives across the call and has the length that is said.
    let rc = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as u32,
        )
    };
    if rc == 0 {
        Ok(socket)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn set(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value lives across the call; the kernel copies it.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A frame behind its virtio header; none waits.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: the buffer lives across the call and is as long as is said.
    let got = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    match usize::try_from(got) {
        Ok(length) if length >= Offload::BYTES => Ok(Some(length)),
        Ok(_) => Ok(None),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // The device went down: it may come again.
            error if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(None),
            error => Err(error),
        },
    }
}

/// A frame that finds no room is lost.
fn send(socket: &OwnedFd, frame: &[u8]) -> io::Result<()> {
    // SAFETY: the frame lives across the call and is as long as is said.
    let sent = unsafe { libc::send(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
    if sent >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOBUFS | libc::EAGAIN | libc::ENETDOWN) => Ok(()),
        _ => Err(error),
    }
}
