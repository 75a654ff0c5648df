//! A host's way into a cluster: a token for one host, and a door that only whoever has it can use.
//!
//! **Decides**: whom the joining host believes, and what a token says. **Flow**: `dunlin cluster init` draws a [`Token`] for each other host and
//! opens a [`Door`] -> a person carries the token -> `dunlin cluster join` [`knock`]s -> TLS -> what is said then is the node's.
//! **Invariants**: 1. the joining host says nothing, its token's secret included, before the door has shown a certificate of the authority whose
//! fingerprint the token carries. 2. no private key is in a token or on the connection: a host sends a request that it has signed. 3. a token
//! with one character changed is no token.
//! **Source**: TLS 1.3 by rustls; the fingerprint is SHA-256 over the authority's certificate, as in RFC 7469's idea of a pin.
//! **Not here**: how often and how long a token is good (node), links between hosts (`link`).

use crate::keys::{KeyError, KeyedCert, fingerprint, is_host_name, random};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig,
    ServerConnection, SignatureScheme, StreamOwned,
};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a token begins with, and its version.
const MARK: &str = "dunlin1-";
const CHECK_BYTES: usize = 4;
const SECRET_BYTES: usize = 16;

/// Why a host does not come in. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    /// Not what a door has given out.
    #[error("this is no token of 'dunlin cluster': copy it whole, on one line")]
    NoToken,
    /// Nobody there.
    #[error(
        "{door} is not reached ({why}): does 'dunlin cluster init' or 'dunlin cluster token' still wait there, and does the network let it through?"
    )]
    Unreachable {
        /// Where.
        door: SocketAddr,
        /// Why.
        why: io::Error,
    },
    /// Somebody there who is not the one.
    #[error("who answers at {0} is not of the cluster that made this token: nothing was told to it")]
    Stranger(SocketAddr),
    /// The door's own keys.
    #[error("this host's keys cannot be used: {0}")]
    BadKeys(String),
    /// What makes and signs keys.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A host's one way in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// The host that it is for.
    pub host: String,
    /// The address that this host will have in the cluster.
    pub address: SocketAddr,
    /// The host whose door it is.
    pub issuer: String,
    /// Where that is.
    pub door: SocketAddr,
    /// In seconds since 1970.
    pub until_s: u64,
    /// What nobody else knows.
    pub secret: [u8; SECRET_BYTES],
    /// SHA-256 of the authority's certificate.
    pub authority: [u8; 32],
}

impl Token {
    /// One that nobody has seen.
    ///
    /// # Errors
    /// No random numbers, or no certificate.
    pub fn draw(
        host: (&str, SocketAddr),
        issuer: (&str, SocketAddr),
        until_s: u64,
        ca_pem: &str,
    ) -> Result<Self, KeyError> {
        Ok(Self {
            host: host.0.to_owned(),
            address: host.1,
            issuer: issuer.0.to_owned(),
            door: issuer.1,
            until_s,
            secret: random()?,
            authority: fingerprint(ca_pem)?,
        })
    }

    /// For a person to carry: one word of letters, digits, `-` and `_`.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut bytes = Vec::new();
        for text in [
            &self.host,
            &self.address.to_string(),
            &self.issuer,
            &self.door.to_string(),
        ] {
            // Names and addresses are shorter than 256 bytes.
            bytes.push(text.len() as u8);
            bytes.extend(text.as_bytes());
        }
        bytes.extend(self.until_s.to_be_bytes());
        bytes.extend(self.secret);
        bytes.extend(self.authority);
        let check = digest(&SHA256, &bytes);
        bytes.extend(&check.as_ref()[..CHECK_BYTES]);
        format!("{MARK}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// What `encode` made.
    ///
    /// # Errors
    /// It did not.
    pub fn decode(text: &str) -> Result<Self, EnrollError> {
        Self::read(text.trim()).ok_or(EnrollError::NoToken)
    }

    fn read(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(MARK)?).ok()?;
        let (mut rest, check) = bytes.split_at_checked(bytes.len().checked_sub(CHECK_BYTES)?)?;
        if digest(&SHA256, rest).as_ref()[..CHECK_BYTES] != *check {
            return None;
        }
        let mut text = || {
            let (&length, more) = rest.split_first()?;
            let (text, more) = more.split_at_checked(length.into())?;
            rest = more;
            std::str::from_utf8(text).ok().map(str::to_owned)
        };
        let (host, address, issuer, door) = (text()?, text()?, text()?, text()?);
        let (until, rest) = rest.split_at_checked(8)?;
        let (secret, authority) = rest.split_at_checked(SECRET_BYTES)?;
        let token = Self {
            host,
            address: address.parse().ok()?,
            issuer,
            door: door.parse().ok()?,
            until_s: u64::from_be_bytes(until.try_into().ok()?),
            secret: secret.try_into().ok()?,
            authority: authority.try_into().ok()?,
        };
        (is_host_name(&token.host) && is_host_name(&token.issuer)).then_some(token)
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Where hosts come in.
pub struct Door(Arc<ServerConfig>);

/// A connection to whoever came in.
pub type Visitor = StreamOwned<ServerConnection, Visit>;
/// A connection to the door.
pub type Host = StreamOwned<ClientConnection, Visit>;

/// A connection that ends at a set time, however it is kept alive: who sends a byte now and then holds a place no longer than the others.
pub struct Visit {
    tcp: TcpStream,
    until: Instant,
}

impl Visit {
    fn new(tcp: TcpStream, patience: Duration) -> io::Result<Self> {
        tcp.set_nodelay(true)?;
        let until = Instant::now() + patience;
        Ok(Self { tcp, until })
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }
}

impl Read for Visit {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.tcp.set_read_timeout(self.left()?)?;
        self.tcp.read(into)
    }
}

impl Write for Visit {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tcp.set_write_timeout(self.left()?)?;
        self.tcp.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tcp.flush()
    }
}

impl Door {
    /// A door of the host with these keys, in the cluster of that authority.
    ///
    /// # Errors
    /// The keys do not fit together.
    pub fn new(keys: &KeyedCert, ca_pem: &str) -> Result<Self, EnrollError> {
        let bad = |error: &dyn std::fmt::Display| EnrollError::BadKeys(error.to_string());
        let cert = CertificateDer::from_pem_slice(keys.cert_pem.as_bytes()).map_err(|e| bad(&e))?;
        let ca = CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(|e| bad(&e))?;
        let key = PrivateKeyDer::from_pem_slice(keys.key_pem.as_bytes()).map_err(|e| bad(&e))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| bad(&e))?
            .with_no_client_auth()
            .with_single_cert(vec![cert, ca], key)
            .map_err(|e| bad(&e))?;
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    /// Talks TLS with who came in, for so long at most.
    ///
    /// # Errors
    /// The connection's.
    pub fn open(&self, tcp: TcpStream, patience: Duration) -> io::Result<Visitor> {
        let session = ServerConnection::new(self.0.clone()).map_err(io::Error::other)?;
        Ok(StreamOwned::new(session, Visit::new(tcp, patience)?))
    }
}

/// Goes to the token's door and sees that it is the right one. Nothing has been said yet when this returns. The visit lasts no longer
/// than `patience`.
///
/// # Errors
/// Nobody is there, or somebody else.
pub fn knock(token: &Token, patience: Duration) -> Result<Host, EnrollError> {
    let unreachable = |why| EnrollError::Unreachable {
        door: token.door,
        why,
    };
    let bad = |error: rustls::Error| EnrollError::BadKeys(error.to_string());
    let tcp = TcpStream::connect_timeout(&token.door, patience).map_err(unreachable)?;
    let visit = Visit::new(tcp, patience).map_err(unreachable)?;
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(bad)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned {
            authority: token.authority,
            provider: provider(),
        }))
        .with_no_client_auth();
    let name = ServerName::try_from(token.issuer.clone()).map_err(|_| EnrollError::NoToken)?;
    let session = ClientConnection::new(Arc::new(config), name).map_err(bad)?;
    let mut host = StreamOwned::new(session, visit);
    while host.conn.is_handshaking() {
        host.conn
            .complete_io(&mut host.sock)
            .map_err(|why| match why.kind() {
                // rustls' own errors; whoever speaks no TLS is a stranger, too.
                io::ErrorKind::InvalidData => EnrollError::Stranger(token.door),
                _ => unreachable(why),
            })?;
    }
    Ok(host)
}

/// Believes a certificate of one authority, known by its fingerprint, for the name that is asked for.
#[derive(Debug)]
struct Pinned {
    authority: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = || rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let is_it = |cert: &&CertificateDer<'_>| digest(&SHA256, cert).as_ref() == self.authority;
        let authority = intermediates.iter().find(is_it).ok_or_else(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|_| unknown())?
            .verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Authority, make_ca, make_host};
    use std::net::TcpListener;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn token(authority: &Authority, issuer: &str, door: SocketAddr) -> Token {
        let host = ("b", "10.0.0.2:7700".parse().unwrap());
        Token::draw(host, (issuer, door), 1_800_000_000, &authority.keys.cert_pem).unwrap()
    }

    #[test]
    fn a_token_is_one_word_and_no_other_word_is_one() {
        let token = token(&make_ca("mine").unwrap(), "a", "10.0.0.1:7701".parse().unwrap());
        let word = token.encode();
        assert!(
            word.chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'),
            "{word}"
        );
        assert_eq!(Token::decode(&format!("  {word}\n")).unwrap(), token);
        for place in 0..word.len() {
            let mut other = word.clone().into_bytes();
            other[place] = if other[place] == b'A' { b'B' } else { b'A' };
            let other = String::from_utf8(other).unwrap();
            assert!(
                matches!(Token::decode(&other), Err(EnrollError::NoToken)),
                "{place}: {other}"
            );
            assert!(Token::decode(&word[..place]).is_err());
        }
        assert!(
            Token::decode("dunlin1-").is_err()
                && Token::decode("").is_err()
                && Token::decode("dunlin1-AAAAAA").is_err()
        );
    }

    /// A door of host `a` that says one word to whoever comes in.
    fn door(authority: &Authority) -> (SocketAddr, std::thread::JoinHandle<io::Result<Vec<u8>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let door = Door::new(&make_host(authority, "a").unwrap(), &authority.keys.cert_pem).unwrap();
        let opened = std::thread::spawn(move || {
            let mut visitor = door.open(listener.accept()?.0, PATIENCE)?;
            let mut said = [0; 5];
            visitor.read_exact(&mut said)?;
            visitor.write_all(b"come in")?;
            visitor.flush()?;
            Ok(said.to_vec())
        });
        (address, opened)
    }

    #[test]
    fn the_right_door_is_believed() {
        let authority = make_ca("mine").unwrap();
        let (address, opened) = door(&authority);
        let mut host = knock(&token(&authority, "a", address), PATIENCE).unwrap();
        host.write_all(b"hello").unwrap();
        let mut said = [0; 7];
        host.read_exact(&mut said).unwrap();
        assert_eq!(
            (&said, &opened.join().unwrap().unwrap()[..]),
            (b"come in", &b"hello"[..])
        );
    }

    #[test]
    fn who_drips_bytes_is_shown_out_when_the_visit_is_over() {
        let authority = make_ca("mine").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut drips = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drips.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let dripping = std::thread::spawn(move || {
            // The longest record there is, never whole: each byte comes before anybody would lose patience with it.
            let mut record = [0x16, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(0));
            let mut answer = [0; 64];
            loop {
                let byte = [record.next().expect("it has no end")];
                if drips.write_all(&byte).is_err() || matches!(drips.read(&mut answer), Ok(0)) {
                    return;
                }
            }
        });
        let door = Door::new(&make_host(&authority, "a").unwrap(), &authority.keys.cert_pem).unwrap();
        let mut visitor = door
            .open(listener.accept().unwrap().0, Duration::from_millis(300))
            .unwrap();
        assert!(visitor.read(&mut [0; 5]).is_err(), "the visit is over");
        drop(visitor);
        dripping.join().unwrap();
    }

    #[test]
    fn another_authority_and_another_name_hear_nothing() {
        let (mine, other) = (make_ca("mine").unwrap(), make_ca("mine").unwrap());
        for (authority, issuer) in [(&other, "a"), (&mine, "z")] {
            let (address, opened) = door(&mine);
            let knocked = knock(&token(authority, issuer, address), PATIENCE);
            assert!(matches!(knocked, Err(EnrollError::Stranger(_))), "{issuer}");
            assert!(opened.join().unwrap().is_err(), "not one word was said");
        }
    }

    #[test]
    fn nobody_and_somebody_else_are_told_apart() {
        let authority = make_ca("mine").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let other = std::thread::spawn(move || {
            listener
                .accept()
                .and_then(|(mut tcp, _)| tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        });
        let knocked = knock(&token(&authority, "a", address), PATIENCE);
        assert!(matches!(knocked, Err(EnrollError::Stranger(_))));
        other.join().unwrap().unwrap();
        let knocked = knock(&token(&authority, "a", address), PATIENCE);
        let why = knocked.err().unwrap().to_string();
        assert!(why.contains("is not reached") && !why.contains('\n'), "{why}");
    }
}
