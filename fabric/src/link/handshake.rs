//! What it decides: whether the two ends of a fresh TCP connection belong together.
//!
//! **Flow** (connector `C`, acceptor `A`):
//! ```text
//! C -> A  "DUNLIN" oldest:u16 | mode:u8 cluster:16 nonce:32               (the nonce says the newest version: `version`)
//! A -> C  "DUNLIN" chosen:u16 status:u8 | mode:u8 nonce:32 proof:32       (what stands after | only if status = 0)
//!         TLS 1.3 handshake, in mode TLS
//! C -> A  length:u16 [build] hello proof:32                               (build: from version 3 on)
//! A -> C  status:u8 length:u16 ([build] welcome | reason)
//! ```
//! **Invariants**: 1. the first eight bytes have this meaning in every version, so other versions get a clear answer.
//! 2. the proofs are HMACs over everything said so far, with different labels, so neither can be reflected.
//! 3. the acceptor says nothing about its cluster to a peer that does not name it.
//! 4. with TLS the connector's proof is a digest of everything said so far, which version 2 sent as zeros and did not look at. So what was said in
//! the clear, the versions among it, counts only as both ends have said it.
//! **Not here**: sockets' options beyond those that a dead peer needs.

use super::hello::HELLO_MAX;
use super::hello::{build_of, put_build};
use super::version::{BUILD_SINCE, GREETING_SINCE, Spoken, Versions};
use super::{Hello, Identity, LinkError, Mode, NotWelcome, Stream, Welcome, tls};
use crate::keys;
use ring::{digest, hmac};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 6] = b"DUNLIN";
const OK: u8 = 0;
const OTHER_CLUSTER: u8 = 1;
const OTHER_MODE: u8 = 2;
const WRONG_SECRET: u8 = 3;
const UNKNOWN_MEMBER: u8 = 4;
const REFUSED: u8 = 5;
const OTHER_VERSION: u8 = 6;
const ALTERED: u8 = 7;
const PROOF_BYTES: usize = 32;

/// The socket with one deadline for the whole handshake: a peer that drips bytes cannot stretch it.
struct Timed<'a> {
    tcp: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(left)
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.tcp.set_read_timeout(Some(self.left()?))?;
        (&mut &*self.tcp).read(buf)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.tcp.set_write_timeout(Some(self.left()?))?;
        (&mut &*self.tcp).write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Either the socket or TLS on it, during the handshake.
struct Talk<'a> {
    sock: Timed<'a>,
    tls: Option<rustls::Connection>,
}

impl Talk<'_> {
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let Some(conn) = &mut self.tls else {
            return self.sock.write_all(bytes).map_err(failed);
        };
        conn.writer().write_all(bytes).map_err(failed)?;
        while conn.wants_write() {
            conn.write_tls(&mut self.sock).map_err(failed)?;
        }
        Ok(())
    }

    fn take(&mut self, mut buf: &mut [u8]) -> Result<(), LinkError> {
        let Some(conn) = &mut self.tls else {
            return self.sock.read_exact(buf).map_err(failed);
        };
        while !buf.is_empty() {
            match conn.reader().read(buf) {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => buf = &mut buf[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if conn.read_tls(&mut self.sock).map_err(failed)? == 0 {
                        return Err(failed(io::ErrorKind::UnexpectedEof.into()));
                    }
                    conn.process_new_packets().map_err(tls::untrusted)?;
                }
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LinkError> {
        let mut a = [0; N];
        self.take(&mut a)?;
        Ok(a)
    }
}

fn failed(e: io::Error) -> LinkError {
    match e.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => LinkError::Timeout(Duration::ZERO),
        io::ErrorKind::UnexpectedEof => LinkError::Garbage("it closed the connection during the handshake"),
        _ => tls::from_io(e, "handshake"),
    }
}

/// Sets a socket's option that is a number.
pub(crate) fn set_option(
    socket: RawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is an int that lives across the call, and its size is passed.
    let rc = unsafe {
        libc::setsockopt(
            socket,
            level,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn prepare(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    let set = |level, name, value| set_option(tcp.as_raw_fd(), level, name, value);
    // A host that lost its power sends no end of stream: bulk streams notice within about ten seconds. The log's
    // links notice within an election time-out, by their own heartbeats.
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4)?;
    set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 10_000)
}

fn finish(
    identity: &Identity,
    tcp: TcpStream,
    tls: Option<rustls::Connection>,
    peer: String,
    spoken: Spoken,
) -> Result<Stream, LinkError> {
    tcp.set_read_timeout(None)
        .map_err(LinkError::io("socket option"))?;
    tcp.set_write_timeout(None)
        .map_err(LinkError::io("socket option"))?;
    let shown = tls.as_ref().and_then(|conn| conn.peer_certificates()?.first());
    let serial = shown.and_then(|cert| keys::serial_of_der(cert));
    let stream = Stream::new(tcp, tls, peer, spoken);
    if let Some(serial) = serial {
        identity.stands(serial, stream.ender())?;
    }
    Ok(stream)
}

fn proof(identity: &Identity, label: &[u8], parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    if identity.0.mode != Mode::Secret {
        return [0; PROOF_BYTES];
    }
    let key = hmac::Key::new(hmac::HMAC_SHA256, &identity.0.secret);
    let mut context = hmac::Context::with_key(&key);
    context.update(label);
    for part in parts {
        context.update(part);
    }
    context
        .sign()
        .as_ref()
        .try_into()
        .expect("HMAC-SHA256 has 32 bytes")
}

fn check_proof(
    identity: &Identity,
    got: &[u8; PROOF_BYTES],
    want: [u8; PROOF_BYTES],
) -> Result<(), LinkError> {
    #[allow(deprecated)] // the constant-time comparison; the keyed variant would need the parts joined
    let equal = ring::constant_time::verify_slices_are_equal(got, &want).is_ok();
    if identity.0.mode == Mode::Secret && !equal {
        Err(LinkError::WrongSecret)
    } else {
        Ok(())
    }
}

/// What a connector proves with its hello: as [`proof`], and with TLS a digest (invariant 4).
fn seal(identity: &Identity, said: &[u8], body: &[u8]) -> [u8; PROOF_BYTES] {
    const LABEL: &[u8] = b"dunlin connector";
    if identity.0.mode != Mode::Tls {
        return proof(identity, LABEL, &[said, body]);
    }
    let mut context = digest::Context::new(&digest::SHA256);
    for part in [LABEL, said, body] {
        context.update(part);
    }
    context
        .finish()
        .as_ref()
        .try_into()
        .expect("SHA-256 has 32 bytes")
}

/// Whether a connector has said what was heard. `knows_ranges`: its greeting said a range.
fn check_seal(
    identity: &Identity,
    got: &[u8; PROOF_BYTES],
    want: [u8; PROOF_BYTES],
    knows_ranges: bool,
) -> Result<(), LinkError> {
    if identity.0.mode != Mode::Tls {
        return check_proof(identity, got, want);
    }
    // A build that knows no ranges shows zeros. One that knows them shows a digest even if its greeting came without its range.
    let is_old = !knows_ranges && got == &[0; PROOF_BYTES];
    if is_old || got == &want {
        Ok(())
    } else {
        Err(LinkError::Altered)
    }
}

fn nonce() -> Result<[u8; 32], LinkError> {
    keys::random().map_err(|e| LinkError::BadKeys(e.to_string()))
}

/// The connector's part.
pub(super) fn initiate(
    tcp: TcpStream,
    identity: &Identity,
    hello: &Hello,
    until: Instant,
) -> Result<(Welcome, Stream), LinkError> {
    prepare(&tcp).map_err(LinkError::io("socket option"))?;
    initiate_on(tcp, identity, hello, until)
}

/// As [`initiate`], on a socket with its options set.
pub fn initiate_on(
    tcp: TcpStream,
    identity: &Identity,
    hello: &Hello,
    until: Instant,
) -> Result<(Welcome, Stream), LinkError> {
    let mut talk = Talk {
        sock: Timed { tcp: &tcp, until },
        tls: None,
    };
    let ours = identity.0.versions;
    let mut said = Vec::with_capacity(96);
    said.extend_from_slice(MAGIC);
    said.extend_from_slice(&ours.oldest.to_be_bytes());
    said.push(identity.0.mode as u8);
    said.extend_from_slice(&identity.0.cluster_id);
    let mut nonce = nonce()?;
    ours.mark(&mut nonce);
    said.extend_from_slice(&nonce);
    talk.send(&said)?;

    let head: [u8; 9] = talk.array()?;
    if &head[..6] != MAGIC {
        return Err(LinkError::Garbage("its first bytes are something else"));
    }
    let version = u16::from_be_bytes([head[6], head[7]]);
    if !ours.has(version) || head[8] == OTHER_VERSION {
        let theirs = Versions::only(version);
        return Err(LinkError::OtherVersion { ours, theirs });
    }
    match head[8] {
        OK => {}
        OTHER_MODE => {
            let [theirs] = talk.array()?;
            return Err(LinkError::OtherMode {
                ours: identity.protection(),
                theirs: Mode::name(theirs),
            });
        }
        _ => return Err(LinkError::OtherCluster),
    }
    let answer: [u8; 65] = talk.array()?;
    let shown: [u8; PROOF_BYTES] = answer[33..].try_into().expect("32 of 65 bytes");
    said.extend_from_slice(&answer[..33]);
    said.extend_from_slice(chosen(version).as_slice());
    if let Err(wrong) = check_proof(identity, &shown, proof(identity, b"dunlin acceptor", &[&said])) {
        // An empty hello without a proof: the acceptor can then say why, too, instead of "it hung up".
        let _ = talk.send(&[0; 2 + PROOF_BYTES]);
        return Err(wrong);
    }

    if let Some(configs) = identity.tls() {
        let mut conn = configs.client(&hello.to)?;
        tls::handshake(&mut conn, &mut talk.sock).map_err(in_time)?;
        talk.tls = Some(conn);
    }
    let hello = Hello {
        from: identity.0.host.clone(),
        ..hello.clone()
    };
    let mut body = Vec::with_capacity(256);
    put_build(version, &identity.0.build, &mut body);
    hello.encode(&identity.0.cluster_id, &mut body);
    let mut frame = (body.len() as u16).to_be_bytes().to_vec();
    frame.extend_from_slice(&body);
    frame.extend_from_slice(&seal(identity, &said, &body));
    talk.send(&frame)?;
    let [status, high, low] = talk.array()?;
    let mut rest = vec![0; usize::from(u16::from_be_bytes([high, low])).min(HELLO_MAX)];
    talk.take(&mut rest)?;
    // A peer's words: one line, and not a long one, whatever it sent.
    let reason = || {
        let text = String::from_utf8_lossy(&rest);
        let printable = text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(500);
        printable.collect::<String>()
    };
    let (build, welcome) = match status {
        OK => build_of(version, &rest)
            .and_then(|(build, welcome)| Some((build, Welcome::decode(welcome)?)))
            .ok_or(LinkError::Garbage("its welcome does not decode"))?,
        ALTERED => return Err(LinkError::Altered),
        OTHER_CLUSTER => return Err(LinkError::OtherCluster),
        WRONG_SECRET => return Err(LinkError::WrongSecret),
        UNKNOWN_MEMBER => return Err(LinkError::UnknownMember(reason())),
        _ => return Err(LinkError::Refused(reason())),
    };
    if welcome.host != hello.to {
        return Err(LinkError::Refused(format!(
            "this is host {:?}, not {:?}: check the addresses",
            welcome.host, hello.to
        )));
    }
    let conn = talk.tls.take();
    let spoken = Spoken { version, build };
    finish(identity, tcp, conn, welcome.host.clone(), spoken).map(|stream| (welcome, stream))
}

/// What the chosen version adds to what both have said: nothing before [`BUILD_SINCE`].
fn chosen(version: u16) -> Vec<u8> {
    match version {
        ..BUILD_SINCE => Vec::new(),
        _ => version.to_be_bytes().to_vec(),
    }
}

fn in_time(e: LinkError) -> LinkError {
    match e {
        LinkError::Io { source, .. } => failed(source),
        other => other,
    }
}

/// The acceptor's part. `admit` is the owner's word on an authenticated hello: its error is sent to the peer.
pub(super) fn respond(
    tcp: TcpStream,
    identity: &Identity,
    until: Instant,
    admit: &dyn Fn(&Hello) -> Result<Welcome, NotWelcome>,
) -> Result<(Hello, Stream), LinkError> {
    prepare(&tcp).map_err(LinkError::io("socket option"))?;
    respond_on(tcp, identity, until, admit)
}

/// As [`respond`], on a socket with its options set.
pub fn respond_on(
    tcp: TcpStream,
    identity: &Identity,
    until: Instant,
    admit: &dyn Fn(&Hello) -> Result<Welcome, NotWelcome>,
) -> Result<(Hello, Stream), LinkError> {
    let mut talk = Talk {
        sock: Timed { tcp: &tcp, until },
        tls: None,
    };
    let greeted = preamble(&mut talk, identity)?;
    if let Some(configs) = identity.tls() {
        let mut conn = configs.server()?;
        tls::handshake(&mut conn, &mut talk.sock).map_err(in_time)?;
        talk.tls = Some(conn);
    }
    let length = usize::from(u16::from_be_bytes(talk.array()?));
    if length > HELLO_MAX {
        return Err(LinkError::Garbage("its hello is too long"));
    }
    let mut body = vec![0; length];
    talk.take(&mut body)?;
    let shown = talk.array()?;
    let judged = judge(identity, &greeted, &body, &shown, &talk).and_then(|(build, hello)| {
        let welcome = admit(&hello).map_err(|NotWelcome(why)| LinkError::Refused(why))?;
        let host = identity.0.host.clone();
        Ok((build, hello, Welcome { host, ..welcome }))
    });
    let version = greeted.version;
    let mut answer = Vec::new();
    match &judged {
        Ok((_, _, welcome)) => {
            put_build(version, &identity.0.build, &mut answer);
            welcome.encode(&mut answer);
        }
        Err(LinkError::UnknownMember(name)) => answer.extend_from_slice(name.as_bytes()),
        Err(LinkError::Refused(reason)) => answer.extend_from_slice(reason.as_bytes()),
        Err(other) => answer.extend_from_slice(other.to_string().as_bytes()),
    }
    answer.truncate(HELLO_MAX);
    let status = match &judged {
        Ok(_) => OK,
        Err(LinkError::OtherCluster) => OTHER_CLUSTER,
        Err(LinkError::WrongSecret) => WRONG_SECRET,
        Err(LinkError::UnknownMember(_)) => UNKNOWN_MEMBER,
        Err(LinkError::Altered) if greeted.knows_ranges => ALTERED,
        Err(_) => REFUSED,
    };
    let mut frame = vec![status];
    frame.extend_from_slice(&(answer.len() as u16).to_be_bytes());
    frame.extend_from_slice(&answer);
    let sent = talk.send(&frame);
    let (build, hello, _) = judged?;
    sent?;
    let conn = talk.tls.take();
    let spoken = Spoken { version, build };
    finish(identity, tcp, conn, hello.from.clone(), spoken).map(|stream| (hello, stream))
}

/// What an acceptor knows after the preamble.
struct Greeted {
    /// What both have said, the chosen version with it.
    said: Vec<u8>,
    /// The version in which both go on.
    version: u16,
    /// The connector said a range of versions.
    knows_ranges: bool,
}

/// Reads the connector's preamble and answers it.
fn preamble(talk: &mut Talk<'_>, identity: &Identity) -> Result<Greeted, LinkError> {
    let head: [u8; 8] = talk.array()?;
    if &head[..6] != MAGIC {
        return Err(LinkError::Garbage("its first bytes are something else"));
    }
    let ours = identity.0.versions;
    let oldest = u16::from_be_bytes([head[6], head[7]]);
    // A version that this build does not know yet, or one with another greeting: nothing after these bytes is understood.
    if oldest > ours.newest || oldest < GREETING_SINCE {
        return Err(other_version(talk, ours, Versions::only(oldest)));
    }
    let rest: [u8; 49] = talk.array()?;
    let (theirs, knows_ranges) = Versions::said(oldest, rest[17..].try_into().expect("32 of 49 bytes"));
    let Some(version) = ours.common(theirs) else {
        return Err(other_version(talk, ours, theirs));
    };
    let mut reply = MAGIC.to_vec();
    reply.extend_from_slice(&version.to_be_bytes());
    let mode = identity.0.mode as u8;
    if rest[1..17] != identity.0.cluster_id {
        reply.push(OTHER_CLUSTER);
        talk.send(&reply)?;
        return Err(LinkError::OtherCluster);
    }
    if rest[0] != mode {
        reply.extend_from_slice(&[OTHER_MODE, mode]);
        talk.send(&reply)?;
        return Err(LinkError::OtherMode {
            ours: identity.protection(),
            theirs: Mode::name(rest[0]),
        });
    }
    let mut said = head.to_vec();
    said.extend_from_slice(&rest);
    said.push(mode);
    said.extend_from_slice(&nonce()?);
    reply.push(OK);
    reply.extend_from_slice(&said[57..]);
    said.extend_from_slice(&chosen(version));
    reply.extend_from_slice(&proof(identity, b"dunlin acceptor", &[&said]));
    talk.send(&reply)?;
    Ok(Greeted {
        said,
        version,
        knows_ranges,
    })
}

/// Tells a connector that both have no version in common.
fn other_version(talk: &mut Talk<'_>, ours: Versions, theirs: Versions) -> LinkError {
    let mut reply = MAGIC.to_vec();
    reply.extend_from_slice(&ours.nearest_to(theirs).to_be_bytes());
    reply.push(OTHER_VERSION);
    match talk.send(&reply) {
        Ok(()) => LinkError::OtherVersion { ours, theirs },
        Err(error) => error,
    }
}

/// Whether the hello is believed.
fn judge(
    identity: &Identity,
    greeted: &Greeted,
    body: &[u8],
    shown: &[u8; PROOF_BYTES],
    talk: &Talk<'_>,
) -> Result<(Option<String>, Hello), LinkError> {
    check_seal(
        identity,
        shown,
        seal(identity, &greeted.said, body),
        greeted.knows_ranges,
    )?;
    let (build, (cluster, hello)) = build_of(greeted.version, body)
        .and_then(|(build, hello)| Some((build, Hello::decode(hello)?)))
        .ok_or(LinkError::Garbage("its hello does not decode"))?;
    if cluster != identity.0.cluster_id {
        return Err(LinkError::OtherCluster);
    }
    if let Some(conn) = &talk.tls {
        let cert = conn.peer_certificates().and_then(<[_]>::first);
        if !cert.is_some_and(|cert| tls::names(cert, &hello.from)) {
            return Err(LinkError::NameMismatch { claimed: hello.from });
        }
    }
    let known = identity.0.members.is_empty() || identity.0.members.contains(&hello.from);
    if !known {
        return Err(LinkError::UnknownMember(hello.from));
    }
    if hello.to != identity.0.host {
        return Err(LinkError::Refused(format!(
            "this is host {:?}, not {:?}: check the addresses",
            identity.0.host, hello.to
        )));
    }
    Ok((build, hello))
}
