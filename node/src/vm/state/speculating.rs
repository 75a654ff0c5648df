//! What speculation holds on this host: the driver of a primary's shadow sockets, or a backup's replica of them.
//!
//! Not here: what passes through it (`vm::speculating`).

use dunlin_api::SpeculationFigures;
use dunlin_core::agreed::Frame;
use dunlin_core::speculation::{Limits, Replica};
use dunlin_core::sync::way_out::WayOut;
use dunlin_core::units::Epoch;
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

/// Of a primary whose mode changes.
#[derive(Debug, Default)]
pub(in crate::vm) struct Modes {
    /// The way to a mode in which the backup's VM runs.
    pub(in crate::vm) way: WayOut,
    /// What is wished for is such a mode, and it may be taken up: all connections are held.
    pub(in crate::vm) free: bool,
    /// When the VM first said something in the running epoch, in the one whose sync is under way, and in the newest that is safe: so long its words
    /// were kept at most, which tells what the mode brings.
    said_us: Option<u64>,
    ended: Option<(Epoch, Option<u64>)>,
    safe_us: Option<u64>,
}

impl Modes {
    pub(in crate::vm) fn said(&mut self, now_us: u64) {
        self.said_us.get_or_insert(now_us);
    }

    pub(in crate::vm) fn line_drawn(&mut self, epoch: Epoch) {
        self.ended = Some((epoch, self.said_us.take()));
    }

    pub(in crate::vm) fn safe(&mut self, epoch: Epoch) {
        if let Some((_, said_us)) = self.ended.take_if(|(ended, _)| *ended <= epoch) {
            self.safe_us = said_us;
        }
    }

    /// What the VM says leaves at once, or not at all.
    pub(in crate::vm) fn keeps_nothing(&mut self) {
        (self.said_us, self.ended, self.safe_us) = (None, None, None);
    }

    /// How long what leaves now was kept at most.
    pub(in crate::vm) fn held_us(&self, now_us: u64) -> u64 {
        self.safe_us.map_or(0, |said_us| now_us.saturating_sub(said_us))
    }
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
    /// Of a VM that begins to run here.
    pub fn primary(sockets: Sockets, limits: Limits) -> Box<Self> {
        Self::speaking(limits, Driver::new(limits, sockets))
    }

    /// Of a VM that this host speaks for.
    pub(in crate::vm) fn speaking(limits: Limits, driver: Driver) -> Box<Self> {
        Box::new(Self {
            limits,
            side: Side::Speaks(driver),
            more: true,
        })
    }

    /// Of a VM that runs on another host.
    pub fn backup(sockets: Sockets, limits: Limits) -> Box<Self> {
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

    /// Whether no connection has anything here that a copy of the VM which runs would lack.
    pub fn all_are_held(&self) -> bool {
        self.speaks().is_some_and(|driver| driver.core().all_are_held())
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
            Side::Follows { replica, .. } => (replica.size().1, 3 * self.limits.total_bytes, 0),
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
