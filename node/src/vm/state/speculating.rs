//! What speculation holds on this host: the driver of a primary's shadow sockets, or a backup's replica of them.
//!
//! Not here: what passes through it (`vm::speculating`).

use dunlin_api::SpeculationFigures;
use dunlin_core::agreed::Frame;
use dunlin_core::speculation::{Limits, Replica};
use dunlin_core::wire::WireError;
use dunlin_speculation::{Driver, Sockets, SocketsError};
use rustix::event::{PollFd, PollFlags};

/// What the shadow sockets cut streams to. A client that takes less says so.
pub(in crate::vm) const MTU: u16 = 1500;

/// What speculation needs on this host, in whichever role.
pub struct Speculating {
    pub(in crate::vm) limits: Limits,
    pub(in crate::vm) side: Side,
    /// The sockets may have more to say at once.
    pub more: bool,
}

pub(in crate::vm) enum Side {
    /// A primary's.
    Speaks(Driver),
    /// A backup's.
    Follows {
        replica: Replica,
        sockets: Sockets,
        /// Invariant 3.
        said: Vec<Frame>,
        said_bytes: usize,
    },
}

impl Speculating {
    pub(in crate::vm) fn limits(total_bytes: usize) -> Limits {
        Limits {
            total_bytes,
            ..Limits::default()
        }
    }

    /// Of a VM that begins to run here.
    pub fn primary(sockets: Sockets, total_bytes: usize) -> Box<Self> {
        let limits = Self::limits(total_bytes);
        Box::new(Self {
            limits,
            side: Side::Speaks(Driver::new(limits, sockets)),
            more: true,
        })
    }

    /// Of a VM that runs on another host.
    pub fn backup(sockets: Sockets, total_bytes: usize) -> Box<Self> {
        let limits = Self::limits(total_bytes);
        Box::new(Self {
            limits,
            side: Side::Follows {
                replica: Replica::new(limits),
                sockets,
                said: Vec::new(),
                said_bytes: 0,
            },
            more: false,
        })
    }

    /// The namespace with its TUN; blocks for some 10 ms.
    pub fn sockets() -> Result<Sockets, SocketsError> {
        Sockets::open(MTU, true)
    }

    pub(in crate::vm) fn driver(&mut self) -> Option<&mut Driver> {
        match &mut self.side {
            Side::Speaks(driver) => Some(driver),
            Side::Follows { .. } => None,
        }
    }

    pub(in crate::vm) fn speaks(&self) -> Option<&Driver> {
        match &self.side {
            Side::Speaks(driver) => Some(driver),
            Side::Follows { .. } => None,
        }
    }

    /// What is to be waited for. While this host may not speak, what the sockets say waits in their TUN.
    pub fn fds(&self, may_speak: bool) -> impl Iterator<Item = PollFd<'_>> {
        let sockets = self.speaks().map(Driver::sockets);
        let fds = sockets.map(|sockets| [Some(sockets.events()), may_speak.then(|| sockets.tun())]);
        fds.into_iter()
            .flatten()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
    }

    /// When it has something to do without a descriptor.
    pub fn deadline_us(&self) -> Option<u64> {
        match self.more {
            true => Some(0),
            false => self.speaks().and_then(Driver::deadline),
        }
    }

    /// Whether the VM has said something in the running epoch that waits for its end.
    pub fn waits(&self) -> bool {
        self.speaks().is_some_and(|driver| driver.core().waits())
    }

    /// What is kept, what may be, and how many segments that has cost.
    pub fn kept(&self) -> (usize, usize, u64) {
        match &self.side {
            Side::Speaks(driver) => {
                let core = driver.core();
                (core.size().1, self.limits.total_bytes, core.counts().dropped)
            }
            Side::Follows { replica, .. } => (replica.size().1, 2 * self.limits.total_bytes, 0),
        }
    }

    /// What it does, for people.
    pub fn figures(&self) -> SpeculationFigures {
        match &self.side {
            Side::Speaks(driver) => {
                let (core, counts) = (driver.core(), driver.core().counts());
                SpeculationFigures {
                    connections: core.size().0 as u64,
                    begun: counts.begun,
                    held: counts.held,
                    failed: counts.failed,
                }
            }
            Side::Follows { replica, .. } => SpeculationFigures {
                connections: replica.size().0 as u64,
                ..SpeculationFigures::default()
            },
        }
    }

    /// Of a backup: what it knows of the primary's connections.
    pub(in crate::vm) fn replica(&mut self) -> Result<&mut Replica, WireError> {
        match &mut self.side {
            Side::Follows { replica, .. } => Ok(replica),
            Side::Speaks(_) => Err(WireError::Invalid("receiver")),
        }
    }
}
