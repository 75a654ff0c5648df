//! What it decides: who may connect to this host, and as whom. A [`Stream`] exists only after both ends have shown
//! that they belong to the same cluster.
//!
//! **Flow**: [`connect`] / [`Listener`] -> preamble (magic, versions, cluster, mode, nonces) -> TLS, or a proof of the
//! shared secret -> [`Hello`] -> the acceptor's answer -> [`Stream`].
//!
//! **Invariants**
//! 1. No byte of a stream is handed up before the peer is authenticated (unless the identity is `Insecure`).
//! 2. With TLS a peer speaks only for the host that its certificate names.
//! 3. A stranger can neither block the listener (deadline, bounded number, places kept for members) nor learn the cluster's id.
//!
//! **Source**: TLS 1.3 by rustls; the challenge is HMAC-SHA256 over both nonces, as in RFC 2195's idea.
//! **Not here**: what a hello's VM or purpose means (the node routes), QEMU versions (the node compares), reconnection.
//! With a secret and no TLS the peers are authenticated but later bytes are neither encrypted nor protected: a trusted
//! network segment is assumed.

mod handshake;
mod hello;
mod listener;
mod places;
mod stream;
mod tls;
mod version;

pub(crate) use handshake::set_option;
pub use hello::{Hello, Purpose, Welcome};
pub use listener::{Listener, NotWelcome, Policy, Refusal, Refusals};
pub use places::{Place, Places};
pub use stream::{ReadHalf, Stream, WriteHalf};
pub(crate) use tls::names;
pub use version::{OLDEST_PROTOCOL, PROTOCOL_VERSION, Spoken, Versions};

use crate::keys;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustls::CertificateError;
use rustls::pki_types::CertificateDer;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::Ender;

/// Both sides of a handshake over a socket that is there already: for the fuzzer (`fuzz/`), which has no network.
#[doc(hidden)]
pub mod parts {
    pub use super::handshake::{initiate_on as initiate, respond_on as respond};
}

/// Why a person's certificate does not count, in a few words.
#[derive(Debug, thiserror::Error)]
pub enum PersonError {
    /// There is nothing to look at it with.
    #[error("this host has no certificates")]
    NoKeys,
    /// There is none to look at.
    #[error("no certificate was shown")]
    NoneShown,
    /// Its time has passed.
    #[error("this certificate is over")]
    Over,
    /// The authority has taken it back.
    #[error("this certificate was revoked")]
    Revoked,
    /// Something else is wrong with it.
    #[error("this certificate counts no more ({0})")]
    Invalid(CertificateError),
    /// It could not be looked at.
    #[error("this certificate counts no more ({0})")]
    Unjudged(rustls::Error),
}

/// Why a connection did not come about. Each message is one line and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer belongs to another cluster.
    #[error("the peer belongs to another cluster: both hosts need the files that one `dunlin init` made")]
    OtherCluster,
    /// Both have no version in common.
    #[error(
        "the peer speaks protocol {theirs}, this host {ours}: upgrade {} to a dunlin version that knows one of these, or run the same on all hosts",
        if theirs.newest < ours.oldest { "the peer" } else { "this host" }
    )]
    OtherVersion {
        /// This host's versions.
        ours: Versions,
        /// The peer's; one of them where it told no more.
        theirs: Versions,
    },
    /// What was said before TLS arrived otherwise than it was sent.
    #[error(
        "the greeting was changed on its way, perhaps to have both hosts speak an older version: look at what stands between them"
    )]
    Altered,
    /// One uses TLS, the other the secret, or nothing.
    #[error(
        "the peer protects its links with {theirs}, this host with {ours}: use the same setting on all hosts"
    )]
    OtherMode {
        /// This host's mode.
        ours: &'static str,
        /// The peer's.
        theirs: &'static str,
    },
    /// The secrets differ.
    #[error("the peer does not know this cluster's secret: copy the same secret to all hosts")]
    WrongSecret,
    /// TLS failed.
    #[error(
        "the peer's certificate is not accepted ({0}): both hosts need the files that one `dunlin init` made"
    )]
    Untrusted(String),
    /// The peer's certificate counts no more.
    #[error(
        "the peer's certificate was revoked: if that machine is to be of the cluster again, 'dunlin cluster token' lets it in"
    )]
    PeerRevoked,
    /// This host's own certificate counts no more for the peer.
    #[error(
        "this host's certificate was revoked: 'dunlin cluster token' on the cluster's first host lets it in again, with new keys"
    )]
    Revoked,
    /// A certificate of another host than claimed.
    #[error("the peer calls itself {claimed:?} but its certificate is not for that host")]
    NameMismatch {
        /// The name in its hello.
        claimed: String,
    },
    /// Not a member.
    #[error("host {0:?} is not a member of this cluster: add it to cluster.toml on all hosts")]
    UnknownMember(String),
    /// The peer's own refusal.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// Not our protocol at all.
    #[error("the peer does not speak Dunlin's protocol: {0}")]
    Garbage(&'static str),
    /// No answer in time.
    #[error("no answer within {0:?}: is dunlin running there, and does the network let it through?")]
    Timeout(Duration),
    /// Setting up this host's own identity failed.
    #[error("this host's keys cannot be used: {0}")]
    BadKeys(String),
    /// Neither TLS nor a secret.
    #[error(
        "neither keys nor a secret are configured: run `dunlin init`, or set insecure = true on a network you trust"
    )]
    NoSecret,
    /// The operating system's error.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl LinkError {
    /// Every [`kind`](Self::kind) of a refusal, for counters.
    pub const KINDS: [&'static str; 14] = [
        "other-cluster",
        "other-version",
        "altered",
        "other-protection",
        "wrong-secret",
        "untrusted",
        "revoked",
        "other-name",
        "unknown-host",
        "not-wanted",
        "garbage",
        "timeout",
        "system",
        "too-many",
    ];

    /// One word for what is wrong.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::OtherCluster => "other-cluster",
            Self::OtherVersion { .. } => "other-version",
            Self::Altered => "altered",
            Self::OtherMode { .. } => "other-protection",
            Self::WrongSecret => "wrong-secret",
            Self::Untrusted(_) => "untrusted",
            Self::PeerRevoked | Self::Revoked => "revoked",
            Self::NameMismatch { .. } => "other-name",
            Self::UnknownMember(_) => "unknown-host",
            Self::Refused(_) => "not-wanted",
            Self::Garbage(_) => "garbage",
            Self::Timeout(_) => "timeout",
            Self::BadKeys(_) | Self::NoSecret | Self::Io { .. } => "system",
        }
    }

    fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// How links are protected.
#[derive(Clone)]
pub enum Auth {
    /// Mutually authenticated TLS 1.3. All PEM.
    Tls {
        /// This host's certificate.
        cert_pem: String,
        /// Its key.
        key_pem: String,
        /// The cluster's authority; two while one follows the other.
        ca_pem: String,
        /// Revocation lists, if there are any.
        crl_pem: Option<String>,
    },
    /// Peers prove that they know the secret (at least 16 bytes); what follows is plain.
    Secret(Vec<u8>),
    /// Nothing at all. Only for tests and networks that nobody else reaches.
    Insecure,
}

impl Auth {
    fn configs(&self, host: &str) -> Result<tls::Configs, LinkError> {
        match self {
            Self::Tls {
                cert_pem,
                key_pem,
                ca_pem,
                crl_pem,
            } => {
                let files = tls::Files {
                    cert: cert_pem,
                    key: key_pem,
                    ca: ca_pem,
                    crl: crl_pem.as_deref(),
                };
                tls::Configs::new(&files, host)
            }
            _ => Err(LinkError::BadKeys("these are no keys".into())),
        }
    }
}

/// Who this host is. Cheap to clone.
#[derive(Clone)]
pub struct Identity(Arc<IdentityInner>);

struct IdentityInner {
    cluster_id: [u8; 16],
    host: String,
    /// What peers are told of the program that runs here.
    build: String,
    versions: Versions,
    members: Vec<String>,
    secret: Vec<u8>,
    mode: Mode,
    /// Exchanged while links stand ([`Identity::renew`]).
    tls: Option<RwLock<Arc<tls::Configs>>>,
    /// The links that stand, with the number of the certificate that the peer has shown.
    links: Mutex<Vec<(Vec<u8>, Ender)>>,
}

/// Keys that fit together, and with which [`Identity::renew`] goes on.
pub struct Renewal(tls::Configs);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Mode {
    Insecure = 0,
    Secret = 1,
    Tls = 2,
}

impl Mode {
    fn name(code: u8) -> &'static str {
        match code {
            0 => "nothing (insecure)",
            1 => "a shared secret",
            2 => "TLS",
            _ => "something unknown",
        }
    }
}

impl Identity {
    /// `members`: the cluster's hosts; a hello from any other is refused (empty: any name is taken).
    /// `auth: None` is refused with [`LinkError::NoSecret`], so that nothing is unprotected by omission.
    pub fn new(
        cluster_id: [u8; 16],
        host: &str,
        members: &[String],
        auth: Option<Auth>,
    ) -> Result<Self, LinkError> {
        if let Some(bad) = std::iter::once(host)
            .chain(members.iter().map(String::as_str))
            .find(|n| !keys::is_host_name(n))
        {
            return Err(LinkError::BadKeys(
                keys::KeyError::BadName(bad.to_owned()).to_string(),
            ));
        }
        let (mode, secret, tls) = match auth.ok_or(LinkError::NoSecret)? {
            Auth::Insecure => (Mode::Insecure, Vec::new(), None),
            Auth::Secret(s) if s.len() < 16 => {
                return Err(LinkError::BadKeys("the secret is shorter than 16 bytes".into()));
            }
            Auth::Secret(s) => (Mode::Secret, s, None),
            auth @ Auth::Tls { .. } => {
                let configs = Arc::new(auth.configs(host)?);
                (Mode::Tls, Vec::new(), Some(RwLock::new(configs)))
            }
        };
        let members = members.to_vec();
        Ok(Self(Arc::new(IdentityInner {
            cluster_id,
            host: host.to_owned(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            versions: Versions::OURS,
            members,
            secret,
            mode,
            tls,
            links: Mutex::default(),
        })))
    }

    /// Looks at other keys for this host, and changes nothing.
    pub fn prepare(&self, auth: &Auth) -> Result<Renewal, LinkError> {
        match self.0.tls {
            Some(_) => auth.configs(&self.0.host).map(Renewal),
            None => Err(LinkError::BadKeys("this host has none".into())),
        }
    }

    /// Goes on with other keys: every connection from now on is made with them. Links that stand go on, but for those of removed
    /// machines, which end. Returns how many these were.
    pub fn renew(&self, renewal: Renewal) -> usize {
        let Some(tls) = &self.0.tls else { return 0 };
        *tls.write() = Arc::new(renewal.0);
        let mut ended = 0;
        self.links().retain(|(serial, link)| {
            let removed = self.is_removed(serial);
            if removed && link.end() {
                ended += 1;
            }
            !removed && link.stands()
        });
        ended
    }

    fn tls(&self) -> Option<Arc<tls::Configs>> {
        let tls = self.0.tls.as_ref()?;
        Some(tls.read().clone())
    }

    fn links(&self) -> MutexGuard<'_, Vec<(Vec<u8>, Ender)>> {
        self.0.links.lock()
    }

    fn is_removed(&self, serial: &[u8]) -> bool {
        self.tls().is_some_and(|configs| configs.is_removed(serial))
    }

    /// A link stands from now on. A machine that was removed after its certificate had been looked at is noticed here.
    fn stands(&self, serial: Vec<u8>, link: Ender) -> Result<(), LinkError> {
        let mut links = self.links();
        links.retain(|(_, link)| link.stands());
        links.push((serial.clone(), link));
        // Under the lock, which `renew` takes after the new list counts: one of the two sees it.
        match self.is_removed(&serial) {
            true => Err(LinkError::PeerRevoked),
            false => Ok(()),
        }
    }

    /// TLS with this host's keys for people, whose certificate is looked at if they show one; nothing on a host without TLS.
    #[must_use]
    pub fn for_people(&self) -> Option<Arc<rustls::ServerConfig>> {
        Some(self.tls()?.people())
    }

    /// Whether a certificate that a person has shown, with those that came with it, counts now: by the authorities and revocation lists of this
    /// moment. Else why not, in a few words.
    pub fn person_counts(&self, shown: &[CertificateDer<'_>]) -> Result<(), PersonError> {
        match self.tls() {
            Some(tls) => tls.person_counts(shown),
            None => Err(PersonError::NoKeys),
        }
    }

    /// What peers are told of the program that runs here, in place of this crate's version: at most 64 characters of it are shown.
    ///
    /// # Panics
    /// If the identity has been cloned already: peers would be told two things.
    #[must_use]
    pub fn of_build(mut self, build: &str) -> Self {
        self.inner().build = build.chars().take(64).collect();
        self
    }

    /// Speaks other versions than this build does: for tests of what comes after it.
    #[cfg(test)]
    fn speaking(mut self, oldest: u16, newest: u16) -> Self {
        self.inner().versions = Versions { oldest, newest };
        self
    }

    fn inner(&mut self) -> &mut IdentityInner {
        Arc::get_mut(&mut self.0).expect("nobody has the identity yet")
    }

    /// This host's name.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.0.host
    }

    /// "TLS", "a shared secret" or "nothing (insecure)", for status output.
    #[must_use]
    pub fn protection(&self) -> &'static str {
        Mode::name(self.0.mode as u8)
    }
}

/// Connects to `addr`, shows `identity`, says `hello` (its `from` is filled in), and waits for the answer; all of it
/// within `timeout`.
pub fn connect(
    addr: impl ToSocketAddrs,
    identity: &Identity,
    hello: &Hello,
    timeout: Duration,
) -> Result<(Welcome, Stream), LinkError> {
    let until = Instant::now() + timeout;
    let mut last = LinkError::Io {
        what: "resolving the address",
        source: std::io::ErrorKind::NotFound.into(),
    };
    for addr in addr
        .to_socket_addrs()
        .map_err(LinkError::io("resolving the address"))?
    {
        match connect_one(addr, identity, hello, until) {
            Err(e @ LinkError::Io { .. }) => last = e,
            Err(LinkError::Timeout(_)) => return Err(LinkError::Timeout(timeout)),
            other => return other,
        }
    }
    Err(last)
}

fn connect_one(
    addr: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    until: Instant,
) -> Result<(Welcome, Stream), LinkError> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(LinkError::Timeout(left));
    }
    let tcp = TcpStream::connect_timeout(&addr, left).map_err(|e| match e.kind() {
        std::io::ErrorKind::TimedOut => LinkError::Timeout(left),
        _ => LinkError::Io {
            what: "connecting",
            source: e,
        },
    })?;
    handshake::initiate(tcp, identity, hello, until)
}

#[cfg(test)]
mod renew_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod version_tests;
