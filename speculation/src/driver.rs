//! Carries core's actions out, in their order.
//!
//! Decides:    nothing.
//! Invariants: 1. what an action brings about is done before the next one. 2. a socket that cannot be built or written is told to core, which
//!                ends the connection on the VM's side; the others go on.
//! Not here:   where the VM's and the clients' frames come from and go to (`Ports`).

use super::sockets::{Happened, Sockets};
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::output::{Ends, packet::FlowKey};
use dunlin_core::speculation::{Action, Flow, Limits, Replica, Speculation};
use dunlin_core::units::Epoch;
use std::collections::VecDeque;
use std::io;

/// Packets of the shadow sockets that are taken before others have their turn.
const MOST_PACKETS: usize = 256;

/// Where frames go.
pub trait Ports {
    /// Into the VM's NIC.
    fn to_vm(&mut self, frame: Frame);
    /// To the client. With offloads it may be larger than the MTU.
    fn to_client(&mut self, frame: Frame, offload: Offload);
    /// Said by the VM: it waits for the running epoch.
    fn hold(&mut self, frame: Frame);
    /// So many ticks more are added to this connection's timestamps on their way to the client, whoever speaks (`Limits::translated`).
    fn lift(&mut self, key: FlowKey, ticks: u32, ends: Ends);
}

/// Speculative communication of one VM, with its sockets.
#[derive(Debug)]
pub struct Driver {
    core: Speculation,
    sockets: Sockets,
}

impl Driver {
    /// Without connections.
    #[must_use]
    pub fn new(limits: Limits, sockets: Sockets) -> Self {
        let core = Speculation::new(limits);
        Self { core, sockets }
    }

    /// Goes on from what a backup knows.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn take_over(
        limits: Limits,
        replica: Replica,
        sockets: Sockets,
        now_us: u64,
        ports: &mut impl Ports,
    ) -> io::Result<Self> {
        let mut out = Vec::new();
        let core = Speculation::take_over(limits, replica, now_us, &mut out);
        let mut driver = Self { core, sockets };
        driver.act(now_us, out, ports)?;
        Ok(driver)
    }

    /// What it decides with.
    #[must_use]
    pub fn core(&self) -> &Speculation {
        &self.core
    }

    /// Its sockets: their descriptors are to be waited for.
    #[must_use]
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// The VM sent a frame. `flush` ends a batch of them.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn vm_sent(&mut self, now_us: u64, frame: Frame, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        self.core.vm_sent(now_us, frame, &mut out);
        self.act(now_us, out, ports)
    }

    /// A client sent a frame. `flush` ends a batch of them.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn client_sent(&mut self, now_us: u64, frame: Frame, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        self.core.client_sent(now_us, frame, &mut out);
        self.act(now_us, out, ports)
    }

    /// A frame that was held leaves.
    pub fn leaves(&mut self, now_us: u64, frame: &Frame) {
        self.core.leaves(now_us, frame);
    }

    /// Ends a batch of frames.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn flush(&mut self, now_us: u64, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        self.core.flush(now_us, &mut out);
        self.act(now_us, out, ports)
    }

    /// The epoch ends; the VM's frames were all taken.
    pub fn cut(&mut self, now_us: u64, epoch: Epoch, whole: bool) -> Bytes {
        self.core.cut(now_us, epoch, whole)
    }

    /// Bytes of one connection that may go to a backup ahead of the next cut; none if nothing is worth it.
    pub fn ahead(&mut self) -> Option<Bytes> {
        self.core.ahead()
    }

    /// The epoch, and all before it, is safe.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn released(&mut self, now_us: u64, epoch: Epoch, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        self.core.released(now_us, epoch, &mut out);
        self.act(now_us, out, ports)
    }

    /// No other host holds a copy that could go on: all that the VM has said is safe.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn all_is_safe(&mut self, now_us: u64, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        self.core.all_is_safe(now_us, &mut out);
        self.act(now_us, out, ports)
    }

    /// Whether all connections are to be held as before, or may be ahead of their clients.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn hold_all(&mut self, now_us: u64, hold: bool, ports: &mut impl Ports) -> io::Result<()> {
        let mut out = Vec::new();
        match hold {
            true => self.core.hold_all(now_us, &mut out),
            false => self.core.speculate_again(),
        }
        self.act(now_us, out, ports)
    }

    /// When `turn` has something to do without a descriptor.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.core.deadline()
    }

    /// Takes what the sockets said and what happened to them, and what is due. `speaks`: what they said may leave; else it waits in
    /// the TUN. True: there may be more at once.
    ///
    /// # Errors
    /// Those of the TUN.
    pub fn turn(&mut self, now_us: u64, speaks: bool, ports: &mut impl Ports) -> io::Result<bool> {
        let mut out = Vec::new();
        self.core.poll(now_us, &mut out);
        for happened in self.sockets.happened()? {
            match happened {
                Happened::Writable(flow) => out.push(Action::Write(flow)),
                Happened::Failed(flow, _) => self.core.failed(now_us, flow, &mut out),
            }
        }
        self.act(now_us, out, ports)?;
        if !speaks {
            return Ok(false);
        }
        for _ in 0..MOST_PACKETS {
            let Some((frame, offload)) = self.sockets.read()? else {
                return Ok(false);
            };
            let mut out = Vec::new();
            self.core.socket_sent(now_us, &frame, offload, &mut out);
            self.act(now_us, out, ports)?;
        }
        Ok(true)
    }

    fn act(&mut self, now_us: u64, actions: Vec<Action>, ports: &mut impl Ports) -> io::Result<()> {
        let mut queue: VecDeque<Action> = actions.into();
        while let Some(action) = queue.pop_front() {
            let mut more = Vec::new();
            match action {
                Action::ToVm(frame) => ports.to_vm(frame),
                Action::ToClient(frame, offload) => ports.to_client(frame, offload),
                Action::Hold(frame) => ports.hold(frame),
                Action::ToShadow(packet) => {
                    self.sockets.deliver(&packet)?;
                }
                Action::Build(spec) => {
                    if self.sockets.build(&spec).is_err() {
                        self.core.failed(now_us, spec.flow, &mut more);
                    }
                }
                Action::Write(flow) => self.write(now_us, flow, &mut more),
                Action::Shutdown(flow) => self.sockets.shutdown(&flow),
                Action::Destroy(flow) => self.sockets.destroy(&flow),
                Action::Lift(key, ticks, ends) => ports.lift(key, ticks, ends),
            }
            more.into_iter().rev().for_each(|action| queue.push_front(action));
        }
        Ok(())
    }

    /// Writes what is safe, as far as the kernel takes it.
    fn write(&mut self, now_us: u64, flow: Flow, more: &mut Vec<Action>) {
        while let Some(bytes) = self.core.unsent(&flow) {
            let whole = bytes.len();
            match self.sockets.send(&flow, bytes) {
                Ok(0) => return,
                Ok(n) => {
                    self.core.wrote(now_us, flow, n, more);
                    if n < whole {
                        return;
                    }
                }
                Err(_) => return self.core.failed(now_us, flow, more),
            }
        }
    }
}
