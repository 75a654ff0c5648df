//! Decides: what the bytes of the NBD protocol mean. Pure: bytes in, values out; never panics, allocates nothing.
//! Flow: `handshake` and `server` read fixed-size pieces from the socket and hand them to the decoders here.
//! Invariants: every length that a client announces is bounded before it is used.
//! Source: the NBD protocol document (NetworkBlockDevice/nbd, doc/proto.md), sections "Handshake phase",
//! "Transmission phase", "Values". Not here: sockets.

use dunlin_core::disk::mirror::MOST_PAYLOAD_BYTES;

/// Server's first word.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Starts the server's second word and every option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Handshake flags that we offer: fixed newstyle, no zeroes.
pub const HANDSHAKE_FLAGS: u16 = 1 | 2;
/// No option's data is longer.
pub const MOST_OPTION_BYTES: u32 = 16 << 10;
/// The longest read or write; what `proto.md` asks every server to take.
pub const MOST_REQUEST_BYTES: u32 = MOST_PAYLOAD_BYTES as u32;
/// The longest name that `proto.md` allows.
pub const MOST_NAME_BYTES: usize = 4096;
/// The one context that we know.
pub const ALLOCATION: &str = "base:allocation";
/// Our number for it.
pub const ALLOCATION_ID: u32 = 1;

/// `NBD_OPT_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opt {
    ExportName,
    Abort,
    List,
    Info,
    Go,
    StructuredReply,
    ListMeta,
    SetMeta,
    /// STARTTLS, extended headers, and whatever comes later: refused as unsupported.
    Other,
}

/// An option's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionHead {
    pub option: Opt,
    /// As sent: a reply repeats it.
    pub raw: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

/// What a client may send that we do not take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtoError {
    #[error("the client does not speak fixed newstyle NBD (flags {0:#x}): use a client from this century")]
    ClientFlags(u32),
    #[error("the client sent something that is no NBD option")]
    NoOption,
    #[error("the client sent an option of {0} bytes; the most is {MOST_OPTION_BYTES}")]
    OptionTooLong(u32),
    #[error("the client sent a malformed option")]
    Malformed,
    #[error("the client sent something that is no NBD request")]
    NoRequest,
    #[error("the client announced a write of {0} bytes; the most is {MOST_REQUEST_BYTES}")]
    WriteTooLong(u32),
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// Client flags: says whether the client does without the 124 zeroes.
///
/// # Errors
/// Flags that we did not offer, or no fixed newstyle.
pub fn client_flags(bytes: [u8; 4]) -> Result<bool, ProtoError> {
    let flags = be32(&bytes, 0);
    if flags & !3 != 0 || flags & 1 == 0 {
        return Err(ProtoError::ClientFlags(flags));
    }
    Ok(flags & 2 != 0)
}

/// An option's header.
///
/// # Errors
/// No magic, or too long.
pub fn option_head(bytes: &[u8; 16]) -> Result<OptionHead, ProtoError> {
    if be64(bytes, 0) != IHAVEOPT {
        return Err(ProtoError::NoOption);
    }
    let (raw, len) = (be32(bytes, 8), be32(bytes, 12));
    if len > MOST_OPTION_BYTES {
        return Err(ProtoError::OptionTooLong(len));
    }
    let option = match raw {
        1 => Opt::ExportName,
        2 => Opt::Abort,
        3 => Opt::List,
        6 => Opt::Info,
        7 => Opt::Go,
        8 => Opt::StructuredReply,
        9 => Opt::ListMeta,
        10 => Opt::SetMeta,
        _ => Opt::Other,
    };
    Ok(OptionHead { option, raw, len })
}

/// `NBD_OPT_INFO` and `NBD_OPT_GO`: the export's name, and the information types asked for.
///
/// # Errors
/// Lengths that do not fit together.
pub fn info_request(data: &[u8]) -> Result<(&[u8], impl Iterator<Item = u16> + '_), ProtoError> {
    let (name, rest) = counted(data)?;
    if rest.len() < 2 {
        return Err(ProtoError::Malformed);
    }
    let count = usize::from(be16(rest, 0));
    let asked = &rest[2..];
    if asked.len() != count * 2 {
        return Err(ProtoError::Malformed);
    }
    Ok((name, asked.chunks_exact(2).map(|pair| be16(pair, 0))))
}

/// `NBD_OPT_LIST_META_CONTEXT` and `SET`: the export's name, and the queries.
///
/// # Errors
/// Lengths that do not fit together.
pub fn meta_request(data: &[u8]) -> Result<(&[u8], Vec<&[u8]>), ProtoError> {
    let (name, rest) = counted(data)?;
    if rest.len() < 4 {
        return Err(ProtoError::Malformed);
    }
    let count = be32(rest, 0);
    let mut rest = &rest[4..];
    let mut queries = Vec::new();
    // A query takes at least four bytes, so a huge count runs out of data before it costs memory.
    for _ in 0..count {
        let (query, after) = counted(rest)?;
        queries.push(query);
        rest = after;
    }
    if rest.is_empty() {
        Ok((name, queries))
    } else {
        Err(ProtoError::Malformed)
    }
}

fn counted(data: &[u8]) -> Result<(&[u8], &[u8]), ProtoError> {
    if data.len() < 4 {
        return Err(ProtoError::Malformed);
    }
    let len = be32(data, 0) as usize;
    if len > MOST_NAME_BYTES || data.len() - 4 < len {
        return Err(ProtoError::Malformed);
    }
    Ok((&data[4..4 + len], &data[4 + len..]))
}

/// `NBD_REP_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Rep {
    Ack = 1,
    Server = 2,
    Info = 3,
    MetaContext = 4,
    Unsupported = 1 << 31 | 1,
    Invalid = 1 << 31 | 3,
    Unknown = 1 << 31 | 6,
    TooBig = 1 << 31 | 9,
}

/// The header of a reply to option `raw`.
#[must_use]
pub fn option_reply(raw: u32, reply: Rep, data_len: usize) -> [u8; 20] {
    let mut out = [0; 20];
    out[0..8].copy_from_slice(&OPTION_REPLY.to_be_bytes());
    out[8..12].copy_from_slice(&raw.to_be_bytes());
    out[12..16].copy_from_slice(&(reply as u32).to_be_bytes());
    out[16..20].copy_from_slice(&(data_len as u32).to_be_bytes());
    out
}

/// Transmission flags of an export: flush, FUA, trim, write-zeroes, no-fragment reads, and one cache behind all
/// connections (a flush on one covers the writes of every other).
#[must_use]
pub fn transmission_flags(read_only: bool) -> u16 {
    1 | u16::from(read_only) << 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8
}

/// `NBD_CMD_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    Unknown,
}

/// One request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub command: Command,
    /// A write is on stable storage before its reply.
    pub fua: bool,
    /// Write-zeroes must keep the space allocated.
    pub no_hole: bool,
    /// Block status: one extent is enough.
    pub one: bool,
    /// Write-zeroes: fail at once if it would be slow (we do not advertise it).
    pub fast: bool,
    /// The client's name for the request.
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

/// Size of a request's header.
pub const REQUEST_BYTES: usize = 28;

/// A request's header.
///
/// # Errors
/// No magic (the stream is out of step), or a write too long to skip.
pub fn request(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, ProtoError> {
    if be32(bytes, 0) != REQUEST {
        return Err(ProtoError::NoRequest);
    }
    let flags = be16(bytes, 4);
    let command = match be16(bytes, 6) {
        0 => Command::Read,
        1 => Command::Write,
        2 => Command::Disconnect,
        3 => Command::Flush,
        4 => Command::Trim,
        5 => Command::Cache,
        6 => Command::WriteZeroes,
        7 => Command::BlockStatus,
        _ => Command::Unknown,
    };
    let len = be32(bytes, 24);
    if command == Command::Write && len > MOST_REQUEST_BYTES {
        return Err(ProtoError::WriteTooLong(len));
    }
    Ok(Request {
        command,
        fua: flags & 1 != 0,
        no_hole: flags & 2 != 0,
        one: flags & 8 != 0,
        fast: flags & 16 != 0,
        cookie: be64(bytes, 8),
        offset: be64(bytes, 16),
        len,
    })
}

/// Numbers that NBD gives to errors (not the host's errno).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum NbdError {
    NotPermitted = 1,
    Io = 5,
    NoMemory = 12,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    NotSupported = 95,
    Shutdown = 108,
}

/// A simple reply.
#[must_use]
pub fn simple_reply(cookie: u64, error: Option<NbdError>) -> [u8; 16] {
    let mut out = [0; 16];
    out[0..4].copy_from_slice(&SIMPLE_REPLY.to_be_bytes());
    out[4..8].copy_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// Kinds of chunks in structured replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Chunk {
    OffsetData = 1,
    BlockStatus = 5,
    Error = 1 << 15 | 1,
}

/// The header of the one and last chunk of a structured reply.
#[must_use]
pub fn chunk(cookie: u64, kind: Chunk, len: usize) -> [u8; 20] {
    let mut out = [0; 20];
    out[0..4].copy_from_slice(&STRUCTURED_REPLY.to_be_bytes());
    out[4..6].copy_from_slice(&1u16.to_be_bytes());
    out[6..8].copy_from_slice(&(kind as u16).to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..20].copy_from_slice(&(len as u32).to_be_bytes());
    out
}
