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
//!             the primary's had not was broken for good by that, and q35 aborts on its second load without a reset;
//!             5. before its first load the VM has the primary's firmware, and after each load as well: a QEMU that waits
//!             for a state has none, and without it a guest that boots again after a take-over runs into zeros;
//!             6. nothing is written or sent before that reset is over: `system_reset` only asks for one, QEMU's main
//!             loop does it later and lets go of its lock meanwhile (to pause the vCPUs; under KVM also to read and write
//!             their registers), and a state that came then would be loaded before it. The versions tried answer after
//!             the reset; none promises to;
//!             7. what a reset writes to RAM is undone: it puts a kernel that QEMU has loaded itself ([`images`]) back
//!             as it was in its file, over the running kernel's variables.
//! Source:     stock-qemu.md section 3; QEMU's docs/COLO-FT.txt, migration/colo.c (the secondary's side).
//! Not here:   RAM (x-ignore-shared: it lies in a file of ours), the order of a sync (core).

mod images;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dunlin_core::waits::Wait;
use serde_json::Value;

use crate::firmware::{self, Content, Firmware, FirmwareError};
use crate::memory::Memory;
use crate::qemu::{QemuEvent, Qmp, QmpError};
use images::Images;

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
    /// The firmware is not of this host's kind, or has not come.
    #[error("firmware: {0}")]
    Firmware(#[from] FirmwareError),
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
    /// A reset ended otherwise than all do.
    #[error(
        "the backup's QEMU is {0:?} after its reset instead of \"prelaunch\": is it a newer version than was tried?"
    )]
    NotReset(String),
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
    memory: Arc<Memory>,
    /// Known from the first load on.
    images: Option<Images>,
    phase: ColoPhase,
    ours: Arc<Firmware>,
    /// The primary's firmware, as of the newest state that was taken in.
    theirs: Vec<(String, Vec<u8>)>,
    /// What QEMU was given of it last: where a guest has written to firmware since, a load goes back to this.
    kept: Vec<(String, Vec<u8>)>,
}

impl Colo {
    /// `socket`: the other end of QEMU's `migrate-incoming fd:N`.
    pub(crate) fn new(socket: UnixStream, qmp: Arc<Qmp>, memory: Arc<Memory>, ours: Arc<Firmware>) -> Colo {
        Colo {
            socket,
            qmp,
            memory,
            images: None,
            phase: ColoPhase::Empty,
            ours,
            theirs: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Where the secondary stands.
    pub fn phase(&self) -> ColoPhase {
        self.phase
    }

    /// Keeps the firmware that a state brings: for a state that is agreed and not loaded, and may never be.
    pub fn take_in(&mut self, state: &[u8]) -> Result<(), ColoError> {
        self.devices_of(state).map(drop)
    }

    /// Whether the firmware that a state brings has its place here. Changes nothing.
    pub fn check(&self, state: &[u8]) -> Result<(), ColoError> {
        self.parts_of(state).map(drop)
    }

    fn parts_of<'a>(&self, state: &'a [u8]) -> Result<(Vec<Content<'a>>, &'a [u8]), ColoError> {
        let (contents, devices) = firmware::split(state).ok_or(ColoError::NotAState(state.len()))?;
        self.ours.check(&contents)?;
        Ok((contents, devices))
    }

    fn devices_of<'a>(&mut self, state: &'a [u8]) -> Result<&'a [u8], ColoError> {
        let (contents, devices) = self.parts_of(state)?;
        for (name, bytes) in contents {
            self.theirs.retain(|(known, _)| *known != name);
            self.theirs.push((name, bytes.to_vec()));
        }
        Ok(devices)
    }

    /// The first load. The RAM must have been written before. On return the VM *runs*; the dirty scan that counts for
    /// the next sync must be made before this call.
    ///
    /// `state`: what [`crate::Qemu::save_state`] of the primary answered.
    pub fn enable(&mut self, state: &[u8]) -> Result<(), ColoError> {
        assert_eq!(self.phase, ColoPhase::Empty, "COLO is enabled once");
        let state = self.devices_of(state)?;
        let body = body(state)?;
        if !self.ours.is_whole(&self.theirs) {
            return Err(FirmwareError::Missing.into());
        }
        let mut stream = state[..HEADER_BYTES].to_vec();
        stream.push(VM_COMMAND);
        stream.extend(ENABLE_COLO.to_be_bytes());
        stream.extend(0u16.to_be_bytes());
        // After the command: QEMU then also keeps it as what a later load goes back to.
        stream.extend(firmware::ram_section(&self.ours.pages(&self.theirs)));
        stream.extend(with_tables_to_build(body));
        self.phase = ColoPhase::Broken;
        self.socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        self.socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        self.socket.write_all(&stream)?;
        self.expect(Message::CheckpointReady)?;
        self.kept.clone_from(&self.theirs);
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
    /// QEMU itself will no longer write to the RAM, which then holds what it held when the VM was paused. On return the VM runs
    /// on from `state`.
    pub fn load(
        &mut self,
        state: &[u8],
        write_ram: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ColoError> {
        assert_eq!(self.phase, ColoPhase::Paused, "a load follows a request");
        let body = with_tables_to_build(body(self.devices_of(state)?)?);
        self.phase = ColoPhase::Broken;
        self.reset()?;
        write_ram().map_err(ColoError::Ram)?;
        let mut message = Vec::with_capacity(body.len() + 17);
        message.extend((Message::Send as u32).to_be_bytes());
        // The live state: RAM. A reset may have written to the firmware, and so may the backup's guest.
        let other = self.ours.differing(&self.theirs, &self.kept)?;
        if !other.is_empty() {
            message.extend(firmware::ram_section(&other));
        }
        let gives = !other.is_empty();
        message.push(0);
        message.extend((Message::Size as u32).to_be_bytes());
        message.extend((body.len() as u64).to_be_bytes());
        message.extend_from_slice(&body);
        self.socket.write_all(&message)?;
        self.expect(Message::Received)?;
        self.expect(Message::Loaded)?;
        if gives {
            self.kept.clone_from(&self.theirs);
        }
        self.phase = ColoPhase::Running;
        self.qmp.forget_events()?;
        Ok(())
    }

    /// Makes the backup an ordinary VM that runs: from its own state, also when it is paused after [`Colo::request`].
    /// Takes about 1 ms. There is no way back: a VM that failed over is never loaded again.
    pub fn failover(self) -> Result<(), ColoError> {
        self.qmp.execute("x-colo-lost-heartbeat", Value::Null)?;
        let _ = self.socket.shutdown(Shutdown::Both);
        Ok(())
    }

    /// Invariants 4, 6 and 7.
    fn reset(&mut self) -> Result<(), ColoError> {
        let images = match self.images.take() {
            Some(images) => images,
            None => Images::of(&self.qmp, &self.memory)?,
        };
        let kept = images.keep(&self.memory);
        self.images = Some(images);
        self.qmp
            .execute_until("system_reset", &QemuEvent::Reset { guest: false })?;
        // The event comes before the vCPUs have their new registers. The main loop, which answers here, has ended the reset.
        let status = self.qmp.execute("query-status", Value::Null)?;
        match status["status"].as_str() {
            Some("prelaunch") => {}
            other => return Err(ColoError::NotReset(other.unwrap_or("?").to_owned())),
        }
        kept.put_back(&self.memory);
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

/// The state, in which QEMU has not yet built its ACPI tables for this boot of the guest. It builds them when the firmware
/// asks for them, from the devices; a backup's QEMU that were told that it had done so would show a guest that boots just
/// then the tables of an empty machine.
fn with_tables_to_build(body: &[u8]) -> Vec<u8> {
    const NAME: &[u8] = b"\x0aacpi_build";
    const FULL_SECTION: u8 = 4;
    const FOOTER: u8 = 0x7e;
    /// Instance and version, each be32, between the name and the one byte of its state.
    const BETWEEN: usize = 8;
    let mut body = body.to_vec();
    let found = body.windows(NAME.len()).position(|bytes| bytes == NAME);
    if let Some(at) = found {
        let built = at + NAME.len() + BETWEEN;
        // Before the name stand the section's kind and number, after its state a footer.
        let is_section = at >= 5 && body[at - 5] == FULL_SECTION && body.get(built + 1) == Some(&FOOTER);
        if is_section {
            body[built] = 0;
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use super::with_tables_to_build;

    #[test]
    fn only_the_byte_that_says_that_tables_were_built_is_changed() {
        let section = b"\x04\0\0\0\x09\x0aacpi_build\0\0\0\0\0\0\0\x01\x01\x7e\0\0\0\x09rest";
        let changed = with_tables_to_build(section);
        let at: Vec<usize> = (0..section.len()).filter(|&i| section[i] != changed[i]).collect();
        assert_eq!((at, changed[24]), (vec![24], 0));
        let no_section = b"xxxxx\x0aacpi_build\0\0\0\0\0\0\0\x01\x01\x7e";
        assert_eq!(with_tables_to_build(no_section), no_section);
    }
}
