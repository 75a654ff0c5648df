//! Loads device state again and again into a live backup, by playing the COLO primary to a stock secondary.
//!
//! Decides:    nothing; it keeps the protocol's order.
//! Flow:       [`Colo::enable`] once -> ([`Colo::request`] -> [`Colo::load`])* -> [`Colo::failover`].
//! Invariants: 1. between `request` and `load` the VM is paused and still whole: [`Colo::failover`] from there resumes the
//!             backup's *own* state; 2. nothing of the VM is changed before `load` is called, which is only done when all
//!             that is needed lies here (staging is complete); 3. an error means the VM can no longer be loaded: fail
//!             over if it may speak, else start a new one; 4. every load is into a machine just reset: a device state
//!             leaves out what has its value of then (a queue's indices while it has no address, `broken`, MSRs that are
//!             0), and a backup that ran ahead would keep its own. A network card that the backup's guest had set up and
//!             the primary's had not was broken for good by that, and q35 aborts on its second load without a reset.
//! Source:     stock-qemu.md section 3; QEMU's docs/COLO-FT.txt, migration/colo.c (the secondary's side).
//! Not here:   RAM (x-ignore-shared: it lies in a file of ours), the order of a sync (core).

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dunlin_core::waits::Wait;
use serde_json::Value;

use crate::qemu::{Qmp, QmpError};

/// The stream's magic `QEVM` and version: 8 bytes that a saved state begins with.
pub const HEADER_BYTES: usize = 8;
const MAGIC: [u8; 4] = *b"QEVM";
/// Longest wait for the secondary; it stops and loads in milliseconds.
const ANSWER_TIMEOUT: Duration = Wait::ColoAnswers.bound();

/// `QEMU_VM_COMMAND` and the command that switches COLO on.
const VM_COMMAND: u8 = 0x08;
const ENABLE_COLO: u16 = 8;

/// The secondary's and primary's messages, be32 on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Message {
    CheckpointReady = 0,
    Request = 1,
    Reply = 2,
    Send = 3,
    Size = 4,
    Received = 5,
    Loaded = 6,
}

/// What went wrong with a load.
#[derive(Debug, thiserror::Error)]
pub enum ColoError {
    /// The bytes are not a device state.
    #[error("not a QEMU device state of {0} bytes: was it saved by another QEMU version?")]
    NotAState(usize),
    /// The secondary answered something else.
    #[error("the backup's QEMU answered message {got} instead of {expected}: it must be started again")]
    Unexpected {
        /// The message waited for.
        expected: u32,
        /// The message that came.
        got: u32,
    },
    /// The secondary is gone or hangs.
    #[error("the backup's QEMU does not answer: {0}")]
    Io(#[from] io::Error),
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The caller could not write the RAM.
    #[error("writing the backup's RAM: {0}")]
    Ram(#[source] io::Error),
}

/// Where the secondary stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColoPhase {
    /// Nothing was loaded yet.
    Empty,
    /// The VM runs.
    Running,
    /// `request` was answered: the VM is paused, its state its own.
    Paused,
    /// A step failed half-way.
    Broken,
}

/// The port by which a backup's device and CPU state is loaded.
pub struct Colo {
    socket: UnixStream,
    qmp: Arc<Qmp>,
    phase: ColoPhase,
}

impl Colo {
    /// `socket`: the other end of QEMU's `migrate-incoming fd:N`.
    pub(crate) fn new(socket: UnixStream, qmp: Arc<Qmp>) -> Colo {
        Colo {
            socket,
            qmp,
            phase: ColoPhase::Empty,
        }
    }

    /// Where the secondary stands.
    pub fn phase(&self) -> ColoPhase {
        self.phase
    }

    /// The first load. The RAM must have been written before. On return the VM *runs*; the dirty scan that counts for
    /// the next sync must be made before this call.
    ///
    /// `state`: what [`crate::Qemu::save_devices`] of the primary answered.
    pub fn enable(&mut self, state: &[u8]) -> Result<(), ColoError> {
        assert_eq!(self.phase, ColoPhase::Empty, "COLO is enabled once");
        let body = body(state)?;
        let mut stream = state[..HEADER_BYTES].to_vec();
        stream.push(VM_COMMAND);
        stream.extend(ENABLE_COLO.to_be_bytes());
        stream.extend(0u16.to_be_bytes());
        stream.extend_from_slice(body);
        self.phase = ColoPhase::Broken;
        self.socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        self.socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        self.socket.write_all(&stream)?;
        self.expect(Message::CheckpointReady)?;
        self.phase = ColoPhase::Running;
        Ok(())
    }

    /// Pauses the VM for a load; returns when its vCPUs stand.
    pub fn request(&mut self) -> Result<(), ColoError> {
        assert_eq!(
            self.phase,
            ColoPhase::Running,
            "a request goes to a running backup"
        );
        self.phase = ColoPhase::Broken;
        self.say(&[Message::Request as u32])?;
        self.expect(Message::Reply)?;
        self.phase = ColoPhase::Paused;
        Ok(())
    }

    /// Replaces the paused VM's state: the point of no return. `write_ram` writes the divergent pages and is called when
    /// QEMU itself will no longer write to the RAM. On return the VM runs on from `state`.
    pub fn load(
        &mut self,
        state: &[u8],
        write_ram: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ColoError> {
        assert_eq!(self.phase, ColoPhase::Paused, "a load follows a request");
        let body = body(state)?;
        self.phase = ColoPhase::Broken;
        // Invariant 4. QEMU resets before it lets anyone else at its devices, so before the load; a reset writes no RAM.
        self.qmp.execute("system_reset", Value::Null)?;
        write_ram().map_err(ColoError::Ram)?;
        let mut message = Vec::with_capacity(body.len() + 17);
        message.extend((Message::Send as u32).to_be_bytes());
        message.push(0); // the live state: empty
        message.extend((Message::Size as u32).to_be_bytes());
        message.extend((body.len() as u64).to_be_bytes());
        message.extend_from_slice(body);
        self.socket.write_all(&message)?;
        self.expect(Message::Received)?;
        self.expect(Message::Loaded)?;
        self.phase = ColoPhase::Running;
        Ok(())
    }

    /// Makes the backup an ordinary VM that runs: from its own state, also when it is paused after [`Colo::request`].
    /// Takes about 1 ms. There is no way back: a VM that failed over is never loaded again.
    pub fn failover(self) -> Result<(), ColoError> {
        self.qmp.execute("x-colo-lost-heartbeat", Value::Null)?;
        let _ = self.socket.shutdown(Shutdown::Both);
        Ok(())
    }

    fn say(&mut self, words: &[u32]) -> io::Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_be_bytes()).collect();
        self.socket.write_all(&bytes)
    }

    fn expect(&mut self, expected: Message) -> Result<(), ColoError> {
        let mut bytes = [0; 4];
        self.socket.read_exact(&mut bytes)?;
        let got = u32::from_be_bytes(bytes);
        match got == expected as u32 {
            true => Ok(()),
            false => Err(ColoError::Unexpected {
                expected: expected as u32,
                got,
            }),
        }
    }
}

/// The state without its header.
fn body(state: &[u8]) -> Result<&[u8], ColoError> {
    match state.starts_with(&MAGIC) && state.len() > HEADER_BYTES + 1 {
        true => Ok(&state[HEADER_BYTES..]),
        false => Err(ColoError::NotAState(state.len())),
    }
}
