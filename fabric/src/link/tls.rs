//! What it decides: how TLS is set up, and how one TLS connection serves a reader and a writer on different threads.
//!
//! **Flow**: [`Configs`] once per identity; [`Session`] per stream, after the handshake.
//! **Invariants**: 1. TLS 1.3 only, both ends show a certificate of the cluster's authority. 2. Records leave in the
//! order in which they were made: `out` is held from sealing to sending. 3. `conn` is never held across a system call,
//! so a blocked writer does not stop the reader.
//! **Source**: rustls. **Not here**: sockets' life cycle (`stream`).

use super::{LinkError, PersonError};
use crate::keys::revocation::{self, Reason, Verified};
use rustls::client::WebPkiServerVerifier;
use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, RootCertStore,
    ServerConfig, ServerConnection,
};
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex};

/// How much plaintext is sealed in one go.
const SEAL_BYTES: usize = 64 * 1024;
/// How much ciphertext is read in one go.
const RAW_BYTES: usize = 64 * 1024;

/// Both sides' rustls configuration.
pub(super) struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    people: Arc<ServerConfig>,
    of_people: Arc<dyn ClientCertVerifier>,
    revoked: Vec<Verified>,
}

/// What a host shows, and whom it believes. All PEM.
pub(super) struct Files<'a> {
    pub cert: &'a str,
    pub key: &'a str,
    /// One authority, or two while one follows the other.
    pub ca: &'a str,
    /// Revocation lists; of other authorities they do not count.
    pub crl: Option<&'a str>,
}

impl Configs {
    pub(super) fn new(files: &Files<'_>, host: &str) -> Result<Self, LinkError> {
        let bad = |what: &str, e: &dyn std::fmt::Display| LinkError::BadKeys(format!("{what}: {e}"));
        let cert = CertificateDer::from_pem_slice(files.cert.as_bytes()).map_err(|e| bad("cert", &e))?;
        let key = PrivateKeyDer::from_pem_slice(files.key.as_bytes()).map_err(|e| bad("key", &e))?;
        if !names(&cert, host) {
            return Err(LinkError::BadKeys(format!(
                "the certificate is not for host {host:?}"
            )));
        }
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(files.ca.as_bytes()) {
            let ca = ca.map_err(|e| bad("ca", &e))?;
            roots.add(ca).map_err(|e| bad("ca", &e))?;
        }
        let roots = Arc::new(roots);
        let revoked = revocation::verified(files.crl.unwrap_or_default(), files.ca);
        let lists = || {
            let lists = revoked.iter();
            lists.map(|one| CertificateRevocationListDer::from_pem_slice(one.pem.as_bytes()))
        };
        let crls: Vec<_> = lists().collect::<Result<_, _>>().map_err(|e| bad("crl", &e))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // Where an authority has no list, nothing of it is revoked.
        let of_clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(crls.clone())
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status()
            .build()
            .map_err(|e| bad("ca", &e))?;
        // Whoever has none is told what is missing.
        let of_people = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(crls.clone())
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status()
            .allow_unauthenticated()
            .build()
            .map_err(|e| bad("ca", &e))?;
        let of_servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(crls)
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status()
            .build()
            .map_err(|e| bad("ca", &e))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| bad("TLS 1.3", &e))?
            .with_client_cert_verifier(of_clients)
            .with_single_cert(vec![cert.clone()], key.clone_key())
            .map_err(|e| bad("cert and key", &e))?;
        server.send_tls13_tickets = 0; // connections live long: resumption buys nothing
        let mut people = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| bad("TLS 1.3", &e))?
            .with_client_cert_verifier(of_people.clone())
            .with_single_cert(vec![cert.clone()], key.clone_key())
            .map_err(|e| bad("cert and key", &e))?;
        people.send_tls13_tickets = 0; // who is revoked is asked again each time
        people.alpn_protocols = vec![b"http/1.1".to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| bad("TLS 1.3", &e))?
            .with_webpki_verifier(of_servers)
            .with_client_auth_cert(vec![cert], key)
            .map_err(|e| bad("cert and key", &e))?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
            people: Arc::new(people),
            of_people,
            revoked,
        })
    }

    /// Whether links of whoever has shown this certificate are to end.
    pub(super) fn is_removed(&self, serial: &[u8]) -> bool {
        let mut reasons = self.revoked.iter().filter_map(|one| one.list.reason(serial));
        reasons.any(|reason| reason == Reason::Removed)
    }

    pub(super) fn people(&self) -> Arc<ServerConfig> {
        self.people.clone()
    }

    /// Whether a person's certificate, which the others follow, counts now; else why not, in a few words.
    pub(super) fn person_counts(&self, shown: &[CertificateDer<'_>]) -> Result<(), PersonError> {
        let Some((own, others)) = shown.split_first() else {
            return Err(PersonError::NoneShown);
        };
        match self.of_people.verify_client_cert(own, others, UnixTime::now()) {
            Ok(_) => Ok(()),
            Err(rustls::Error::InvalidCertificate(why)) => Err(match why {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => PersonError::Over,
                CertificateError::Revoked => PersonError::Revoked,
                other => PersonError::Invalid(other),
            }),
            Err(other) => Err(PersonError::Unjudged(other)),
        }
    }

    pub(super) fn client(&self, to: &str) -> Result<Connection, LinkError> {
        let name =
            ServerName::try_from(to.to_owned()).map_err(|_| LinkError::UnknownMember(to.to_owned()))?;
        ClientConnection::new(self.client.clone(), name)
            .map(Connection::Client)
            .map_err(untrusted)
    }

    pub(super) fn server(&self) -> Result<Connection, LinkError> {
        ServerConnection::new(self.server.clone())
            .map(Connection::Server)
            .map_err(untrusted)
    }
}

pub(super) fn untrusted(e: rustls::Error) -> LinkError {
    match e {
        rustls::Error::InvalidCertificate(CertificateError::Revoked) => LinkError::PeerRevoked,
        rustls::Error::AlertReceived(AlertDescription::CertificateRevoked) => LinkError::Revoked,
        other => LinkError::Untrusted(other.to_string()),
    }
}

/// Whether `cert` is for `host`.
pub(crate) fn names(cert: &CertificateDer<'_>, host: &str) -> bool {
    let Ok(name) = ServerName::try_from(host) else {
        return false;
    };
    ParsedCertificate::try_from(cert).is_ok_and(|c| verify_server_name(&c, &name).is_ok())
}

/// Runs the handshake over a blocking socket (which has its own deadline).
pub(super) fn handshake(conn: &mut Connection, sock: &mut (impl Read + Write)) -> Result<(), LinkError> {
    while conn.is_handshaking() {
        if let Err(e) = conn.complete_io(sock) {
            // The alert that tells the peer why: rustls itself writes one record of what waits, and another stands before it.
            while conn.wants_write() && conn.write_tls(sock).is_ok_and(|n| n > 0) {}
            return Err(from_io(e, "TLS handshake"));
        }
    }
    Ok(())
}

/// rustls reports its own errors as `InvalidData`.
pub(super) fn from_io(e: io::Error, what: &'static str) -> LinkError {
    match e.kind() {
        io::ErrorKind::InvalidData => match e.downcast::<rustls::Error>() {
            Ok(e) => untrusted(e),
            Err(e) => LinkError::Untrusted(e.to_string()),
        },
        _ => LinkError::Io { what, source: e },
    }
}

/// One TLS connection after its handshake.
pub(super) struct Session {
    conn: Mutex<Connection>,
    out: Mutex<Sealed>,
}

#[derive(Default)]
struct Sealed {
    bytes: Vec<u8>,
    sent: usize,
}

impl Sealed {
    fn send(&mut self, mut sock: impl Write) -> io::Result<()> {
        while self.sent < self.bytes.len() {
            match sock.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }
}

/// The reader's part: ciphertext that arrived and was not opened yet.
pub(super) struct Raw {
    buf: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Raw {
    /// Whether all that the socket held was read, and opened as far as its records are whole.
    pub(super) fn is_drained(&self) -> bool {
        self.at == self.end && self.end < self.buf.len()
    }
}

impl Raw {
    pub(super) fn new() -> Self {
        Self {
            buf: vec![0; RAW_BYTES].into(),
            at: 0,
            end: 0,
        }
    }
}

impl Session {
    pub(super) fn new(conn: Connection) -> Self {
        Self {
            conn: Mutex::new(conn),
            out: Mutex::default(),
        }
    }

    /// Plaintext for the caller; blocks or not as `sock` does.
    pub(super) fn read(&self, raw: &mut Raw, mut sock: impl Read, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            {
                let mut conn = self.conn.lock().expect("no panic under this lock");
                match conn.reader().read(buf) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    other => return other,
                }
                if raw.at < raw.end {
                    let mut left = &raw.buf[raw.at..raw.end];
                    let before = left.len();
                    conn.read_tls(&mut left)?;
                    raw.at += before - left.len();
                    conn.process_new_packets()
                        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                    continue;
                }
            }
            match sock.read(&mut raw.buf) {
                Ok(0) => return Ok(0),
                Ok(n) => (raw.at, raw.end) = (0, n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Seals and sends. When a non-blocking socket is full, what was sealed is kept and sent by the next call;
    /// `WouldBlock` means that nothing of `buf` was taken.
    pub(super) fn write(&self, sock: impl Write + Copy, buf: &[u8]) -> io::Result<usize> {
        let mut out = self.out.lock().expect("no panic under this lock");
        out.send(sock)?;
        let taken = {
            let mut conn = self.conn.lock().expect("no panic under this lock");
            let n = conn.writer().write(&buf[..buf.len().min(SEAL_BYTES)])?;
            while conn.wants_write() {
                conn.write_tls(&mut out.bytes)?;
            }
            n
        };
        match out.send(sock) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(taken),
            Err(e) => Err(e),
            Ok(()) => Ok(taken),
        }
    }

    pub(super) fn flush(&self, sock: impl Write) -> io::Result<()> {
        self.out.lock().expect("no panic under this lock").send(sock)
    }

    pub(super) fn wants_write(&self) -> bool {
        !self
            .out
            .lock()
            .expect("no panic under this lock")
            .bytes
            .is_empty()
    }
}
