//! All shadow sockets of one VM, and the TUN that they speak through.
//!
//! Decides:    nothing.
//! Flow:       core's actions -> `build`, `send`, `shutdown`, `destroy`; `wait` has what happened to sockets, `read` what they say.
//! Invariants: 1. a socket is watched for room only while it has refused bytes. 2. what is dropped says nothing (`repair::vanish`).
//! Not here:   which bytes, and when.

use super::congestion;
use super::namespace::Namespace;
use super::repair::{self, RepairError};
use super::tun::Tun;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Flow, Socket};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const ETHERNET_BYTES: usize = 14;
/// The greatest packet of a device with offloads, its header, and the place for an Ethernet header.
const BUFFER_BYTES: usize = 65536 + Offload::BYTES + ETHERNET_BYTES;
const MOST_EVENTS: usize = 64;

/// Why there are no shadow sockets, or not this one.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// The namespace or its TUN could not be made.
    #[error("shadow sockets: {step}: {error}")]
    Place {
        /// What was tried.
        step: String,
        /// What the system said.
        error: io::Error,
    },
    /// A socket could not be put into its connection.
    #[error("a shadow socket: {0}")]
    Repair(#[from] RepairError),
}

impl SocketsError {
    pub(crate) fn new(step: &str, error: io::Error) -> Self {
        Self::Place {
            step: step.to_owned(),
            error,
        }
    }
}

/// What happened to a socket.
#[derive(Debug)]
pub enum Happened {
    /// It has room again.
    Writable(Flow),
    /// The kernel gave it up, mostly ETIMEDOUT.
    Failed(Flow, io::Error),
}

/// One of them.
#[derive(Debug)]
struct Shadow {
    id: u64,
    socket: OwnedFd,
    /// It may be in its slow start (`congestion`).
    begins: bool,
}

/// The shadow sockets of one VM.
#[derive(Debug)]
pub struct Sockets {
    namespace: Namespace,
    tun: Tun,
    epoll: OwnedFd,
    sockets: BTreeMap<Flow, Shadow>,
    flows: BTreeMap<u64, Flow>,
    next: u64,
    buffer: Vec<u8>,
}

impl Sockets {
    /// Makes the namespace and the TUN. `offload`: packets may be larger than `mtu` and without checksum, which who writes them
    /// on must be able to pass on.
    ///
    /// # Errors
    /// CAP_SYS_ADMIN, CAP_NET_ADMIN, /dev/net/tun and `ip` are needed.
    pub fn open(mtu: u16, offload: bool) -> Result<Self, SocketsError> {
        let (namespace, tun) = Namespace::enter(mtu, offload)?;
        let epoll =
            epoll::create(CreateFlags::CLOEXEC).map_err(|error| SocketsError::new("epoll", error.into()))?;
        Ok(Self {
            namespace,
            tun,
            epoll,
            sockets: BTreeMap::new(),
            flows: BTreeMap::new(),
            next: 0,
            buffer: vec![0; BUFFER_BYTES],
        })
    }

    /// Readable when a socket has said something.
    #[must_use]
    pub fn tun(&self) -> BorrowedFd<'_> {
        self.tun.as_fd()
    }

    /// Readable when `happened` has something.
    #[must_use]
    pub fn events(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// The next packet of a socket, behind an empty Ethernet header; none if there is none.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn read(&mut self) -> io::Result<Option<(Frame, Offload)>> {
        loop {
            let Some((offload, packet)) = self.tun.read(&mut self.buffer[ETHERNET_BYTES..])? else {
                return Ok(None);
            };
            let ether_type: [u8; 2] = match packet.first().map(|first| first >> 4) {
                Some(4) => [8, 0],
                Some(6) => [0x86, 0xdd],
                _ => continue,
            };
            let mut bytes = Vec::with_capacity(ETHERNET_BYTES + packet.len());
            bytes.extend([0; ETHERNET_BYTES - 2]);
            bytes.extend(ether_type);
            bytes.extend(packet);
            let moved = |at: u16| {
                if at == 0 {
                    0
                } else {
                    at.saturating_add(ETHERNET_BYTES as u16)
                }
            };
            let offload = Offload {
                hdr_len: moved(offload.hdr_len),
                csum_start: if offload.needs_csum {
                    offload.csum_start + ETHERNET_BYTES as u16
                } else {
                    0
                },
                ..offload
            };
            let bytes = Bytes::from(bytes);
            return Ok(Some((Frame { nic: 0, bytes }, offload)));
        }
    }

    /// Gives the sockets an IP packet.
    ///
    /// # Errors
    /// Those of the TUN; a full queue is none.
    pub fn deliver(&self, packet: &[u8]) -> io::Result<bool> {
        self.tun.write(Offload::default(), packet)
    }

    /// Builds a socket, and writes its dummy byte.
    ///
    /// # Errors
    /// The step that the kernel refused.
    pub fn build(&mut self, spec: &Socket) -> Result<(), SocketsError> {
        self.destroy(&spec.flow);
        let socket = self.namespace.build(spec)?;
        let id = self.next;
        self.next += 1;
        // Errors are told without being asked for.
        epoll::add(&self.epoll, &socket, EventData::new_u64(id), EventFlags::empty())
            .map_err(|error| SocketsError::new("epoll", error.into()))?;
        self.flows.insert(id, spec.flow);
        let shadow = Shadow {
            id,
            socket,
            begins: true,
        };
        self.sockets.insert(spec.flow, shadow);
        self.send(&spec.flow, &[0])
            .map_err(|error| SocketsError::new("the dummy byte", error))?;
        Ok(())
    }

    /// Writes what there is room for; how much that was. Less than all: `Happened::Writable` comes when there is room again.
    ///
    /// # Errors
    /// Those of send(2), but for EAGAIN.
    pub fn send(&mut self, flow: &Flow, bytes: &[u8]) -> io::Result<usize> {
        let Some(Shadow { id, socket, begins }) = self.sockets.get_mut(flow) else {
            return Ok(0);
        };
        *begins = *begins && !congestion::look(socket);
        let n = match send(&*socket, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => n,
            Err(rustix::io::Errno::AGAIN) => 0,
            Err(error) => return Err(error.into()),
        };
        if n < bytes.len() {
            epoll::modify(&self.epoll, &*socket, EventData::new_u64(*id), EventFlags::OUT)?;
        }
        Ok(n)
    }

    /// Ends the stream.
    pub fn shutdown(&mut self, flow: &Flow) {
        if let Some(Shadow { socket, .. }) = self.sockets.get(flow) {
            // One that the kernel has given up is told of by `happened`.
            let _gone = shutdown(socket, Shutdown::Write);
        }
    }

    /// Ends the socket without a word.
    pub fn destroy(&mut self, flow: &Flow) {
        if let Some(Shadow { id, socket, .. }) = self.sockets.remove(flow) {
            self.flows.remove(&id);
            repair::vanish(socket);
        }
    }

    /// What happened to sockets since.
    ///
    /// # Errors
    /// Those of epoll.
    pub fn happened(&mut self) -> io::Result<Vec<Happened>> {
        let mut events = Vec::with_capacity(MOST_EVENTS);
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut events),
            Some(&now),
        )?;
        let mut out = Vec::new();
        for event in events {
            let Some(flow) = self.flows.get(&event.data.u64()).copied() else {
                continue;
            };
            let Some(Shadow { id, socket, .. }) = self.sockets.get(&flow) else {
                continue;
            };
            let flags = event.flags;
            if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
                // Told for ever, if it was asked again.
                epoll::delete(&self.epoll, socket)?;
                if let Some(error) = repair::error_of(socket) {
                    out.push(Happened::Failed(flow, error));
                }
            } else {
                epoll::modify(&self.epoll, socket, EventData::new_u64(*id), EventFlags::empty())?;
                out.push(Happened::Writable(flow));
            }
        }
        Ok(out)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for (_, Shadow { socket, .. }) in std::mem::take(&mut self.sockets) {
            repair::vanish(socket);
        }
    }
}
