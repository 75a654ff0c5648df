//! What the tester and the process that keeps a copy say to each other: one JSON object a message, descriptors beside it.
//!
//! Flow: `Spec` -> keeper; `Ready` (card, sock_diag socket) -> tester; `Start` -> keeper; `Started`, then `Ended`, or `Failed`.
//! For a copy of a program that runs: `Vacate` -> keeper; `Vacant` -> node; `Adopt` -> pid 1; `Started`, and so on.
//! Invariants: 1. a message is at most `MOST_BYTES`, and one that is not understood ends the conversation; 2. what came of the descriptors of a message
//! that did not come whole is closed.
//! Source: unix(7), SOCK_SEQPACKET. Not here: who does what with it.

use crate::page::Leads;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// The longest message: a command with its environment.
const MOST_BYTES: usize = 192 << 10;
/// More descriptors than come with any message.
const MOST_DESCRIPTORS: usize = 8;

/// What a copy is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where it starts.
    pub directory: PathBuf,
    /// All of its environment.
    pub environment: Vec<(String, String)>,
    /// Its card.
    pub card: Card,
    /// What it is kept from; none is what a client gets: only a network of its own.
    pub walls: Option<Walls>,
}

/// The network card of a namespace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Card {
    /// Its address.
    pub address: Ipv4Addr,
    /// How many bits of that name the network.
    pub prefix: u8,
    /// Where what is for other networks goes.
    pub gateway: Option<Ipv4Addr>,
    /// The most bytes of a packet.
    pub mtu: u16,
    /// Its hardware's address.
    pub mac: [u8; 6],
}

/// The walls of a copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Walls {
    /// The user and group that it runs as; none keeps the ones in the namespace.
    pub user: Option<(u32, u32)>,
    /// The directory of the host's that it sees as its root: "/" is the host's own.
    pub root: PathBuf,
    /// What it may write to its own view of the file system, in memory.
    pub scratch_mib: u32,
    /// Answer what yields chance from an agreed seed.
    pub agreed_chance: Option<u64>,
    /// Let the tester answer what reads the clock.
    pub agreed_clock: bool,
    /// Tell the tester when it reads the processor's own clock, and let the tester say what that is.
    #[serde(default)]
    pub tells_tsc: bool,
    /// The file system of its data.
    #[serde(default)]
    pub data: Option<Mounted>,
    /// Let the program read the clock from a page that its host sets. Not with one of the others: a program has one tracer.
    pub clock_page: bool,
    /// Let the program draw its chance from its host; the 16 bytes that it finds at its start. Not with `agreed_chance`.
    pub chance: Option<[u64; 2]>,
}

impl Walls {
    /// Whether a page that its host has as well is in the program.
    #[must_use]
    pub fn has_page(&self) -> bool {
        self.clock_page || self.chance.is_some()
    }

    pub(crate) fn draws_agreed(&self) -> bool {
        self.agreed_chance.is_some() || self.chance.is_some()
    }

    pub(crate) fn leads(&self) -> Leads {
        Leads {
            clock: self.clock_page,
            chance: self.chance.is_some(),
        }
    }
}

/// A file system that is mounted in a copy's view.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mounted {
    /// A block device with an ext4, as the host names it.
    pub device: PathBuf,
    /// A directory of the host's, which it covers in the view.
    pub at: PathBuf,
}

/// What the tester hears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Heard {
    /// The namespaces are there. With it: the card, a sock_diag socket, and, behind walls, the folder of what is written, the root of its
    /// data's file system, its page and the pipe of its chance, where it has them.
    Ready,
    /// They have a first process, and nothing else.
    Vacant,
    /// The program's own system calls are answered by who holds this. With it: the seccomp listener.
    Listener,
    /// The program runs.
    Started,
    /// It has read the processor's own clock, and waits for what that says (`Go::Tsc`).
    ReadTsc {
        /// Where: a number for each place.
        place: u32,
        /// The first time: the file, and where in it.
        name: Option<String>,
    },
    /// It could not be brought so far; the words end in what to do.
    Failed(String),
    /// The program's first process has ended.
    Ended {
        /// Its exit code, or none if a signal ended it.
        code: Option<i32>,
        /// The signal.
        signal: Option<i32>,
        /// Processes that it has left behind are running.
        others: bool,
    },
}

impl Heard {
    /// How a process ended, in words; none while it goes on.
    #[must_use]
    pub fn end(&self) -> Option<String> {
        match self {
            Self::Ended {
                code: Some(code),
                others,
                ..
            } => {
                let others = if *others {
                    "; processes that it started go on"
                } else {
                    ""
                };
                Some(format!("ended with exit code {code}{others}"))
            }
            Self::Ended { signal, .. } => Some(format!("was ended by signal {}", signal.unwrap_or(0))),
            Self::Failed(why) => Some(format!("failed: {why}")),
            _ => None,
        }
    }
}

/// What the keeper hears after its `Spec`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Go {
    /// Start the program.
    Start,
    /// Start nothing: a copy of one that runs elsewhere is to come. Answered with `Vacant`.
    Vacate,
    /// It has come, and stands still: let it run.
    Adopt(Adopted),
    /// What the processor's own clock says.
    Tsc(u64),
}

/// What the kernel knew of a copy beside its processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// Whom it spoke with in its network, and their hardware's addresses.
    pub neighbours: Vec<(Ipv4Addr, [u8; 6])>,
    /// The newest process id: so that both copies give the next one the same.
    pub last_pid: u32,
    /// Those that the program itself had told to stand still. A primary of an earlier version does not say it.
    #[serde(default)]
    pub stopped: Vec<u32>,
}

/// Sends a message with descriptors.
///
/// # Errors
/// Those of sendmsg(2); `InvalidInput` where it is too long.
pub fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MOST_BYTES {
        let why = "the command and its environment are too long";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    let parts = [IoSlice::new(&bytes)];
    sendmsg::<()>(socket.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// The next message and its descriptors; none where the other side has gone.
///
/// # Errors
/// Those of recvmsg(2), `WouldBlock` among them; `InvalidData` where it is not understood; EMFILE where its descriptors have no room here.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    // Invariant 2: it closes what nobody takes out of it.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(rustix::io::Errno::MFILE.into());
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let length = got.bytes;
    if length == 0 {
        return Ok(None);
    }
    let message = serde_json::from_slice(&bytes[..length])?;
    Ok(Some((message, descriptors)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair")
    }

    #[test]
    fn as_many_descriptors_as_any_message_has_come_with_it() {
        let (ours, theirs) = pair();
        let (_, end) = std::io::pipe().expect("a pipe");
        let all = [end.as_fd(); MOST_DESCRIPTORS];
        send(theirs.as_fd(), &Heard::Ready, &all).expect("room");
        let heard = receive::<Heard>(ours.as_fd()).expect("it comes whole");
        let (heard, descriptors) = heard.expect("one");
        assert_eq!((heard, descriptors.len()), (Heard::Ready, MOST_DESCRIPTORS));
        drop(theirs);
        assert!(receive::<Heard>(ours.as_fd()).expect("its end").is_none());
    }

    #[test]
    fn invariant_2_nothing_stays_open_of_a_message_that_did_not_come_whole() {
        let (ours, theirs) = pair();
        let (reads, end) = std::io::pipe().expect("a pipe");
        send(
            theirs.as_fd(),
            &Heard::Ready,
            &[end.as_fd(); 3 * MOST_DESCRIPTORS],
        )
        .expect("room");
        drop(end);
        let error = receive::<Heard>(ours.as_fd()).expect_err("too many");
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
        // Nobody has the other end any more, but for who is just begun by another test.
        let within = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let mut polled = [PollFd::new(&reads, PollFlags::IN)];
        assert_eq!(poll(&mut polled, Some(&within)), Ok(1), "it is open here still");
    }
}
