//! What the tester is asked for, and why it may not come about.
//!
//! Decides:    the addresses of a wire. Not here: what the user typed (`dunlin`'s command line), the run (`check`).

use crate::copy::{CopyError, Inside};
use dunlin_core::program::order::Order;
use dunlin_guest::frames::TapError;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is to be tested, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to run `inside::main`.
    pub inside: Inside,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Where it starts.
    pub directory: PathBuf,
    /// Its environment.
    pub environment: Vec<(String, String)>,
    /// How many copies.
    pub copies: usize,
    /// When the next input is delivered.
    pub order: Order,
    /// How long it is waited for.
    pub patience: Duration,
    /// The user and the group that it runs as.
    pub user: Option<(u32, u32)>,
    /// What it may write, in memory.
    pub scratch_mib: u32,
    /// The time is the same for all copies.
    pub agreed_clock: bool,
    /// So is chance, from this seed.
    pub agreed_chance: Option<u64>,
    /// It is told who reads the processor's own clock.
    pub tells_tsc: bool,
    /// The port that it serves; none is any.
    pub port: Option<u16>,
    /// How long it may take until it listens.
    pub start_within: Duration,
    /// Who speaks with it.
    pub clients: Clients,
    /// Its address.
    pub address: Ipv4Addr,
    /// How many bits of that name the network.
    pub prefix: u8,
    /// The way to other networks.
    pub gateway: Option<Ipv4Addr>,
    /// It ends after so long, at the latest.
    pub most: Option<Duration>,
    /// Where all that the copies print goes.
    pub logs: Option<PathBuf>,
}

/// Who speaks with the copies.
#[derive(Clone, Debug)]
pub enum Clients {
    /// A shell's command in a network namespace of its own; the run is over when it ends.
    Command(String),
    /// Whoever reaches this host's end of the wire, which has this address.
    Host(Ipv4Addr),
    /// Whoever reaches this bridge of the host.
    Bridge(String),
}

/// Why there is no report: one line, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A copy, or the client, could not be made.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The program does not serve.
    #[error("{0}")]
    Program(String),
    /// The host's end of the wire.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The host refuses something else.
    #[error("{0}: {1}")]
    Host(&'static str, io::Error),
}

/// All copies have the same address, which belongs to nobody else: from the range that is left to local use.
pub(crate) fn mac_of(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x52, 0x54, a, b, c, d]
}

/// The client's address beside the program's: the next one or the one before, and none that is the network's own.
#[must_use]
pub fn neighbour(address: Ipv4Addr) -> Ipv4Addr {
    // Of four in a row the middle two are no network's own, however small it is.
    let bits = address.to_bits();
    Ipv4Addr::from_bits(if bits & 3 == 1 { bits + 1 } else { bits & !3 | 1 })
}

/// What is wrong with an address and the bits of its network: it has the text.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NetworkError {
    /// It is something else.
    #[error("{0:?} is not an IPv4 address and its network's bits, such as 10.0.0.57/24")]
    Form(String),
    /// So few or so many bits do not do.
    #[error("{0:?}: a network of 8 to 30 bits is needed, with room for the copies and a client")]
    Bits(String),
}

/// An address and the bits of its network.
///
/// # Errors
/// Where the text is something else.
pub fn network(text: &str) -> Result<(Ipv4Addr, u8), NetworkError> {
    let hint = || NetworkError::Form(text.to_owned());
    let (address, bits) = text.split_once('/').ok_or_else(hint)?;
    let bits: u8 = bits.parse().map_err(|_| hint())?;
    let address = address.parse().map_err(|_| hint())?;
    // A smaller network has no room for a client.
    (8..=30)
        .contains(&bits)
        .then_some((address, bits))
        .ok_or_else(|| NetworkError::Bits(text.to_owned()))
}

/// A file that a copy with this root would find at that path: links lead nowhere else than there.
///
/// # Errors
/// Those of the file system; before Linux 5.6 there is no such way.
pub fn open_in(root: &Path, path: &Path) -> io::Result<File> {
    if root == Path::new("/") {
        return File::open(path);
    }
    let folder = File::open(root)?;
    let (flags, mode) = (OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let below = path.strip_prefix("/").unwrap_or(path);
    Ok(openat2(folder, below, flags, mode, ResolveFlags::IN_ROOT)?.into())
}

/// A user's numbers.
///
/// # Errors
/// Where there is none of this name, or this process may not become somebody else.
pub fn user(name: &str) -> Result<(u32, u32), CheckError> {
    if !nix::unistd::geteuid().is_root() {
        let why = format!("to run as user {name:?} needs root: without it the program runs as yourself");
        return Err(CheckError::Program(why));
    }
    let found = nix::unistd::User::from_name(name).ok().flatten();
    let found = found.ok_or_else(|| CheckError::Program(format!("user {name:?}: there is no such user")))?;
    Ok((found.uid.as_raw(), found.gid.as_raw()))
}
