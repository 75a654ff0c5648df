//! What is said at the door between `dunlin cluster init` and `dunlin cluster join`: one JSON object each way, inside TLS.
//!
//! **Decides**: whether a token lets somebody in: it was drawn here, for the host that is asked for, was not used, and has not run out.
//! **Flow**: [`come_in`] -> `Ask` -> [`Tokens::take`] -> the certificate is signed -> `Answer`.
//! **Invariants**: 1. a token is used up before its certificate is signed, so that it never makes two. 2. strangers cost a bounded number of
//! threads, each for a bounded time. 3. a refusal tells nothing but its reason.
//! **Not here**: what a token is (`dunlin_fabric::enroll`), what is written (`cluster`).

use super::issued::Issued;
use crate::daemon::BadInput;
use crate::events::now_ms;
use anyhow::{Context, Result};
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use dunlin_fabric::enroll::{Door, EnrollError, Token, knock};
use dunlin_fabric::keys::{self, Authority, KeyError, KeyedCert};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// A visit lasts no longer, whoever comes and however slowly they talk.
const PATIENCE: Duration = Duration::from_secs(10);
/// When no visitor could be let in.
const AGAIN: Duration = Duration::from_millis(100);
/// Visitors at once.
const PLACES: usize = 16;
/// A request and a certificate have a few kilobytes.
const MOST_BYTES: u64 = 64 << 10;

#[derive(Serialize, Deserialize)]
struct Ask {
    secret: [u8; 16],
    host: String,
    /// For a certificate, in PEM.
    request: String,
}

/// What a host needs to be one of the cluster.
#[derive(Serialize, Deserialize)]
pub struct Welcome {
    /// cluster.toml.
    pub cluster: String,
    /// Its certificate, in PEM.
    pub cert: String,
    /// The authority's.
    pub ca: String,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Welcome(Welcome),
    Refused(String),
}

/// Why a token lets nobody in.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum TokenError {
    /// Nobody here has made it.
    #[error("this token is not known here: it was made by another 'dunlin cluster', which has ended")]
    Unknown,
    /// It lets another host in.
    #[error("this token is for host {host}, and not for {asked}")]
    OtherHost {
        /// That one.
        host: String,
        /// The one that has asked.
        asked: String,
    },
    /// Its time has passed: of this host.
    #[error("this token has run out: 'dunlin cluster token {0}' makes a new one")]
    RunOut(String),
    /// Invariant 1: of this host.
    #[error(
        "this token was used already: 'dunlin cluster token {0}' makes a new one; if it was not you who used it, make new keys"
    )]
    Used(String),
}

/// Why somebody is not let in.
#[derive(Debug, thiserror::Error)]
enum AdmitError {
    /// What was said at the door.
    #[error("it cannot be understood (another version?)")]
    NoAsk,
    /// The token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// What is to be signed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A certificate that is not in the record could not be revoked.
    #[error("{0:#}")]
    Record(anyhow::Error),
}

/// The tokens that were given out.
struct Tokens {
    /// With whether each was used.
    tokens: Vec<(Token, bool)>,
}

impl Tokens {
    /// Uses a token up.
    fn take(&mut self, ask: &Ask, now_s: u64) -> Result<(), TokenError> {
        // Whoever has not the secret learns nothing of who has.
        let found = self
            .tokens
            .iter_mut()
            .find(|(token, _)| same(&token.secret, &ask.secret));
        let Some((token, used)) = found else {
            return Err(TokenError::Unknown);
        };
        if token.host != ask.host {
            return Err(TokenError::OtherHost {
                host: token.host.clone(),
                asked: ask.host.clone(),
            });
        }
        if now_s > token.until_s {
            return Err(TokenError::RunOut(token.host.clone()));
        }
        if std::mem::replace(used, true) {
            return Err(TokenError::Used(token.host.clone()));
        }
        Ok(())
    }

    fn unused(&self) -> Vec<String> {
        let unused = self.tokens.iter().filter(|(_, used)| !used);
        unused.map(|(token, _)| format!("host {}", token.host)).collect()
    }
}

/// Takes the same time wherever they differ.
fn same(one: &[u8; 16], other: &[u8; 16]) -> bool {
    one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Lets hosts in until all tokens are used or have run out; returns the hosts that have not come.
pub fn let_in(
    (listener, issued): (TcpListener, Issued),
    tokens: Vec<Token>,
    authority: &Authority,
    keyed: &KeyedCert,
    cluster: &str,
    joined: &mut dyn FnMut(&str),
) -> Result<Vec<String>> {
    let until_s = tokens.iter().map(|token| token.until_s).max().unwrap_or(0);
    let tokens = tokens.into_iter().map(|token| (token, false)).collect();
    let room = Arc::new(Room {
        tokens: Mutex::new(Tokens { tokens }),
        door: Door::new(keyed, &authority.keys.cert_pem).map_err(|error| BadInput(error.to_string()))?,
        authority: authority.clone(),
        issued: Mutex::new(issued),
        cluster: cluster.to_owned(),
    });
    let (tell, news) = bounded(PLACES);
    let (give, places) = bounded(PLACES);
    (0..PLACES)
        .try_for_each(|_| give.send(()))
        .context("places for visitors")?;
    let visited = room.clone();
    // It ends with the command: an accept has no end of its own.
    std::thread::Builder::new().name("door".into()).spawn(move || {
        for tcp in listener.incoming() {
            let Ok(tcp) = tcp else {
                // As when there are no more descriptors: a visitor that goes gives some back.
                std::thread::sleep(AGAIN);
                continue;
            };
            // One that finds no place is hung up on, and may come again.
            if places.try_recv().is_err() {
                continue;
            }
            let (room, tell, give) = (visited.clone(), tell.clone(), give.clone());
            let visit = move || {
                room.visit(tcp, &tell);
                let _ = give.send(());
            };
            // Without a thread the place is lost, as the thread is.
            let _ = std::thread::Builder::new().name("visitor".into()).spawn(visit);
        }
    })?;
    let unused = || room.tokens.lock().unused();
    let (mut waits_for, mut missed) = (unused().len(), Vec::new());
    while waits_for > 0 {
        let left = Duration::from_millis((until_s * 1000).saturating_sub(now_ms()));
        match news.recv_timeout(left) {
            Ok(Came { host, sent }) => {
                match sent {
                    true => joined(&host),
                    false => missed.push(format!("host {host}")),
                }
                waits_for -= 1;
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    missed.extend(unused());
    Ok(missed)
}

/// A host whose token is used up.
struct Came {
    host: String,
    /// Whether it has its certificate.
    sent: bool,
}

struct Room {
    tokens: Mutex<Tokens>,
    door: Door,
    authority: Authority,
    issued: Mutex<Issued>,
    cluster: String,
}

impl Room {
    fn visit(&self, tcp: TcpStream, tell: &Sender<Came>) {
        let from = tcp.peer_addr();
        let Ok(mut visitor) = self.door.open(tcp, PATIENCE) else {
            return;
        };
        let mut line = String::new();
        if BufReader::new((&mut visitor).take(MOST_BYTES))
            .read_line(&mut line)
            .is_err()
        {
            return;
        }
        let ask = serde_json::from_str::<Ask>(&line);
        let outcome = ask
            .as_ref()
            .map_err(|_| AdmitError::NoAsk)
            .and_then(|ask| self.admit(ask));
        let host = outcome
            .is_ok()
            .then(|| ask.map(|ask| ask.host).unwrap_or_default());
        if let (Err(why), Ok(from)) = (&outcome, from) {
            eprintln!("{from} is refused: {why}");
        }
        let answer = outcome.map_or_else(|why| Answer::Refused(why.to_string()), Answer::Welcome);
        let sent = serde_json::to_vec(&answer).is_ok_and(|mut line| {
            line.push(b'\n');
            let told = visitor.write_all(&line).and_then(|()| visitor.flush());
            visitor.conn.send_close_notify();
            let _ = visitor.conn.complete_io(&mut visitor.sock);
            told.is_ok()
        });
        if let Some(host) = host {
            if !sent {
                eprintln!(
                    "host {host} did not get its answer: its token is used up, and 'dunlin cluster token {host}' makes a new one"
                );
            }
            // The command may have ended.
            let _ = tell.send(Came { host, sent });
        }
    }

    fn admit(&self, ask: &Ask) -> Result<Welcome, AdmitError> {
        self.tokens.lock().take(ask, now_ms() / 1000)?;
        let cert = keys::sign_host(&self.authority, &ask.host, &ask.request)?;
        let issued = self.issued.lock();
        issued.note(&cert).map_err(AdmitError::Record)?;
        Ok(Welcome {
            cluster: self.cluster.clone(),
            cert,
            ca: self.authority.keys.cert_pem.clone(),
        })
    }
}

/// Shows the token, and asks for a certificate.
pub fn come_in(token: &Token, request: &str) -> Result<Welcome> {
    let ask = Ask {
        secret: token.secret,
        host: token.host.clone(),
        request: request.to_owned(),
    };
    let mut host = knock(token, PATIENCE).map_err(|error| match error {
        EnrollError::Unreachable { .. } => {
            anyhow::anyhow!("{error}; a token that was used or has run out opens no door")
        }
        other => BadInput(other.to_string()).into(),
    })?;
    let mut line = serde_json::to_vec(&ask)?;
    line.push(b'\n');
    host.write_all(&line)
        .and_then(|()| host.flush())
        .context("asking for a certificate")?;
    let mut answer = String::new();
    BufReader::new(host.take(MOST_BYTES))
        .read_line(&mut answer)
        .context("waiting for a certificate")?;
    let answer: Answer = serde_json::from_str(&answer)
        .map_err(|_| BadInput("the door's answer cannot be understood (another version?)".into()))?;
    match answer {
        Answer::Welcome(welcome) => Ok(welcome),
        Answer::Refused(why) => Err(BadInput(format!("host {} refuses: {why}", token.issuer)).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(host: &str, until_s: u64, authority: &Authority, door: std::net::SocketAddr) -> Token {
        let address = "127.0.0.1:7700".parse().expect("an address");
        Token::draw((host, address), ("a", door), until_s, &authority.keys.cert_pem).expect("a token")
    }

    #[test]
    fn a_token_is_good_once_for_its_host_and_for_a_while() {
        let authority = keys::make_ca("mine").expect("an authority");
        let door = "127.0.0.1:7701".parse().expect("an address");
        let (b, c) = (
            token("b", 100, &authority, door),
            token("c", 100, &authority, door),
        );
        let stranger = token("b", 100, &authority, door);
        let mut tokens = Tokens {
            tokens: vec![(b.clone(), false), (c.clone(), false)],
        };
        let ask = |token: &Token, host: &str| Ask {
            secret: token.secret,
            host: host.into(),
            request: String::new(),
        };
        let says = |outcome: Result<(), TokenError>, words: &str| {
            assert!(
                outcome.as_ref().is_err_and(|why| why.to_string().contains(words)),
                "{outcome:?}"
            )
        };
        says(tokens.take(&ask(&stranger, "b"), 50), "not known here");
        says(tokens.take(&ask(&b, "c"), 50), "for host b, and not for c");
        says(tokens.take(&ask(&b, "b"), 101), "has run out");
        assert_eq!(
            tokens.unused(),
            ["host b", "host c"],
            "none of these has used it up"
        );
        assert_eq!(tokens.take(&ask(&b, "b"), 100), Ok(()));
        says(tokens.take(&ask(&b, "b"), 50), "used already");
        assert_eq!(tokens.unused(), ["host c"]);
        assert!(same(&[7; 16], &[7; 16]) && !same(&[7; 16], &b.secret));
    }

    #[test]
    fn strangers_at_the_door_keep_nobody_out_and_the_wait_ends() {
        let authority = keys::make_ca("mine").expect("an authority");
        let keyed = keys::make_host(&authority, "a").expect("a host");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let door = listener.local_addr().expect("its address");
        let soon = now_ms() / 1000 + 600;
        let good = token("b", soon, &authority, door);
        let known = vec![good.clone()];
        let (host_key, request) = keys::request_host("b").expect("a request");
        let folder = tempfile::tempdir().expect("a folder");
        let inside = std::thread::spawn(move || {
            let mut came = Vec::new();
            let left = let_in(
                (listener, Issued::beside_key(folder.path())),
                known,
                &authority,
                &keyed,
                "the cluster's file",
                &mut |host| came.push(host.to_owned()),
            );
            (left, came)
        });
        let silent = TcpStream::connect(door).expect("a connection");
        let mut garbled = TcpStream::connect(door).expect("a connection");
        garbled.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("written");
        let mut wrong = good.clone();
        wrong.secret[0] ^= 1;
        let why = come_in(&wrong, &request).err().expect("refused").to_string();
        assert!(why.contains("not known here"), "{why}");
        let welcome = come_in(&good, &request).expect("it comes in");
        assert_eq!(welcome.cluster, "the cluster's file");
        assert!(welcome.cert.contains("BEGIN CERTIFICATE") && !welcome.cert.contains(&host_key));
        let (left, came) = inside.join().expect("it ends");
        assert!(left.expect("no error").is_empty() && came == ["b"]);
        drop(silent);
    }
}
