//! Decides: what a client is told about the export, and how the two will talk.
//! Flow: accept -> [`negotiate`] -> `server::serve`. Over any `Read + Write`, so that tests and the fuzzer drive it
//! without sockets.
//! Invariants: a client gets nothing but this one export; an unknown option is refused and the talk goes on; no answer
//! depends on more than [`proto::MOST_OPTION_BYTES`] of the client's bytes.
//! Source: proto.md, "Fixed newstyle negotiation". Not here: TLS (the socket is a socketpair or a 0600 Unix socket).

use super::proto::{self, Opt, ProtoError, Rep};
use std::io::{self, Read, Write};

/// What a client may know about the disk.
#[derive(Clone, Debug)]
pub struct ExportInfo {
    /// Its name; the empty name means it too.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
}

/// What was agreed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Session {
    /// Reads are answered by structured replies.
    pub structured: bool,
    /// Block status for `base:allocation` may be asked.
    pub allocation: bool,
}

/// Why a handshake ended without a session.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error(transparent)]
    Proto(#[from] ProtoError),
    #[error("the NBD client went away during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("the client asked for an export that does not exist")]
    NoSuchExport,
}

/// Speaks the handshake. `None`: the client said good-bye in good order.
///
/// # Errors
/// The client broke the protocol or the connection.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    export: &ExportInfo,
) -> Result<Option<Session>, HandshakeError> {
    let mut greeting = Vec::with_capacity(18);
    greeting.extend(proto::NBDMAGIC.to_be_bytes());
    greeting.extend(proto::IHAVEOPT.to_be_bytes());
    greeting.extend(proto::HANDSHAKE_FLAGS.to_be_bytes());
    stream.write_all(&greeting)?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    let no_zeroes = proto::client_flags(flags)?;
    let mut session = Session::default();
    let mut data = Vec::new();
    loop {
        let mut head = [0; 16];
        match stream.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let head = match proto::option_head(&head) {
            Err(error @ ProtoError::OptionTooLong(_)) => {
                // The data cannot be skipped cheaply: answer, then hang up.
                let raw = u32::from_be_bytes([head[8], head[9], head[10], head[11]]);
                stream.write_all(&proto::option_reply(raw, Rep::TooBig, 0))?;
                return Err(error.into());
            }
            other => other?,
        };
        data.resize(head.len as usize, 0);
        stream.read_exact(&mut data)?;
        let mut reply = Reply {
            stream,
            raw: head.raw,
        };
        match head.option {
            Opt::ExportName => {
                if !export.is_called(&data) {
                    return Err(HandshakeError::NoSuchExport);
                }
                let mut out = Vec::with_capacity(134);
                out.extend(export.size_bytes.to_be_bytes());
                out.extend(proto::transmission_flags(export.read_only).to_be_bytes());
                if !no_zeroes {
                    out.resize(134, 0);
                }
                reply.stream.write_all(&out)?;
                return Ok(Some(session));
            }
            Opt::Abort => {
                // The client may hang up without reading this.
                let _gone = reply.send(Rep::Ack, &[]);
                return Ok(None);
            }
            Opt::List if data.is_empty() => {
                let mut server = (export.name.len() as u32).to_be_bytes().to_vec();
                server.extend(export.name.as_bytes());
                reply.send(Rep::Server, &server)?;
                reply.send(Rep::Ack, &[])?;
            }
            Opt::StructuredReply if data.is_empty() => {
                session.structured = true;
                reply.send(Rep::Ack, &[])?;
            }
            Opt::List | Opt::StructuredReply => reply.send(Rep::Invalid, &[])?,
            Opt::Info | Opt::Go => {
                if describe(&mut reply, export, &data)? && head.option == Opt::Go {
                    return Ok(Some(session));
                }
            }
            Opt::ListMeta | Opt::SetMeta => {
                let set = head.option == Opt::SetMeta;
                contexts(&mut reply, export, &data, set, &mut session)?;
            }
            Opt::Other => reply.send(Rep::Unsupported, &[])?,
        }
    }
}

impl ExportInfo {
    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

struct Reply<'a, S> {
    stream: &'a mut S,
    raw: u32,
}

impl<S: Write> Reply<'_, S> {
    fn send(&mut self, kind: Rep, data: &[u8]) -> io::Result<()> {
        let mut out = proto::option_reply(self.raw, kind, data.len()).to_vec();
        out.extend(data);
        self.stream.write_all(&out)
    }
}

/// Says whether the client now knows the export.
fn describe<S: Write>(reply: &mut Reply<S>, export: &ExportInfo, data: &[u8]) -> io::Result<bool> {
    let Ok((name, asked)) = proto::info_request(data) else {
        reply.send(Rep::Invalid, &[])?;
        return Ok(false);
    };
    if !export.is_called(name) {
        reply.send(Rep::Unknown, b"no such export")?;
        return Ok(false);
    }
    let mut info = 0u16.to_be_bytes().to_vec();
    info.extend(export.size_bytes.to_be_bytes());
    info.extend(proto::transmission_flags(export.read_only).to_be_bytes());
    reply.send(Rep::Info, &info)?;
    for asked in asked {
        let info = match asked {
            1 => [&1u16.to_be_bytes()[..], export.name.as_bytes()].concat(),
            3 => [
                &3u16.to_be_bytes()[..],
                // Any alignment works; a file system's block is what suits the image.
                &1u32.to_be_bytes(),
                &4096u32.to_be_bytes(),
                &proto::MOST_REQUEST_BYTES.to_be_bytes(),
            ]
            .concat(),
            _ => continue,
        };
        reply.send(Rep::Info, &info)?;
    }
    reply.send(Rep::Ack, &[])?;
    Ok(true)
}

fn contexts<S: Write>(
    reply: &mut Reply<S>,
    export: &ExportInfo,
    data: &[u8],
    set: bool,
    session: &mut Session,
) -> io::Result<()> {
    let Ok((name, queries)) = proto::meta_request(data) else {
        return reply.send(Rep::Invalid, &[]);
    };
    if set {
        // proto.md: a new selection replaces the old one, even when it fails.
        session.allocation = false;
        if !session.structured {
            return reply.send(Rep::Invalid, b"negotiate structured replies first");
        }
    }
    if !export.is_called(name) {
        return reply.send(Rep::Unknown, b"no such export");
    }
    let allocation = proto::ALLOCATION.as_bytes();
    let wanted =
        queries.contains(&allocation) || (!set && (queries.is_empty() || queries.contains(&&b"base:"[..])));
    if wanted {
        let id = if set { proto::ALLOCATION_ID } else { 0 };
        let mut context = id.to_be_bytes().to_vec();
        context.extend(allocation);
        reply.send(Rep::MetaContext, &context)?;
        session.allocation |= set;
    }
    reply.send(Rep::Ack, &[])
}
