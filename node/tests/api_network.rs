//! The API on the network and on its own socket: who is let in, as whom, and who is refused in one line.
//!
//! Other users need root; told as skipped without it.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use daemon::{Host, OPERATOR, ROOT, STRANGER, User, VIEWER};
use dunlin_fabric::keys::person::{self, PersonRole};
use dunlin_fabric::keys::{self, Authority, KeyedCert};
use dunlin_vmtest::{free_address, is_root};
use http::{Said, request};
use serde_json::json;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

#[path = "common/callers.rs"]
mod callers;
#[path = "common/daemon.rs"]
mod daemon;
#[path = "common/http.rs"]
mod http;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);
const FAR: u64 = 4_000_000_000;
/// Connections of one person, and more than there may be.
const MOST: usize = 64;

/// A host with its API on the network; the authority's key is in its folder.
struct Served {
    host: Host,
    api: SocketAddr,
}

impl Served {
    fn start(more: &str) -> Result<Self> {
        let mut host = Host::new()?;
        let api = free_address()?;
        host.configure(&format!("page = \"off\"\napi = \"{api}\"\n{more}"))?;
        let folder = host.file().parent().context("its folder")?.to_owned();
        let all = folder.parent().context("the cluster's")?;
        fs::copy(all.join("ca-key.pem"), folder.join("ca-key.pem"))?;
        host.start()?;
        Ok(Self { host, api })
    }

    fn read(&self, name: &str) -> Result<String> {
        let path = self.host.file().with_file_name(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    fn authority(&self) -> Result<Authority> {
        let keys = KeyedCert {
            cert_pem: self.read("ca.pem")?,
            key_pem: self.read("ca-key.pem")?,
        };
        let cluster = "one".to_owned();
        Ok(Authority { cluster, keys })
    }

    /// As a person makes one, by the command line.
    fn person(&self, name: &str, role: &str) -> Result<KeyedCert> {
        let out = self.host.file().with_file_name(format!("{name}-{role}.pem"));
        let path = out.to_str().context("a path of text")?;
        self.cluster(&["person", name, "--role", role, "--out", path])?;
        let text = fs::read_to_string(&out)?;
        Ok(KeyedCert {
            cert_pem: keys::bundle(&text).first().context("a certificate")?.clone(),
            key_pem: text,
        })
    }

    fn cluster(&self, words: &[&str]) -> Result<String> {
        let folder = self.host.file().with_file_name("");
        let folder = folder.to_str().context("a path of text")?;
        let said = self
            .host
            .say(ROOT, &[&["cluster"], words, &["--dir", folder]].concat())?;
        ensure!(
            said.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&said.stderr)
        );
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }

    fn connect(&self, shows: Option<&KeyedCert>) -> Result<StreamOwned<ClientConnection, TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.read("ca.pem")?.as_bytes())?)?;
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match shows {
            None => config.with_no_client_auth(),
            Some(shown) => config.with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(shown.cert_pem.as_bytes())?],
                PrivateKeyDer::from_pem_slice(shown.key_pem.as_bytes())?,
            )?,
        };
        let tls = ClientConnection::new(Arc::new(config), ServerName::try_from("a")?)?;
        let stream = TcpStream::connect(self.api)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(StreamOwned::new(tls, stream))
    }

    /// What is answered; an error is TLS' own word.
    fn say(&self, shows: Option<&KeyedCert>, text: &str) -> Result<Said> {
        let mut stream = self.connect(shows)?;
        stream.write_all(text.as_bytes())?;
        Said::of(&read_all(&mut stream)?)
    }

    fn get(&self, shows: &KeyedCert, path: &str) -> Result<Said> {
        self.say(Some(shows), &request("GET", path, &[("Host", "a")], ""))
    }

    fn post(&self, shows: &KeyedCert, path: &str, body: serde_json::Value) -> Result<Said> {
        let me = self.get(shows, "/api/v1/me")?.json()?;
        let headers = [
            ("Host", "a"),
            ("X-Dunlin-Token", me["token"].as_str().context("a token")?),
        ];
        self.say(Some(shows), &request("POST", path, &headers, &body.to_string()))
    }
}

fn read_all(stream: &mut impl Read) -> Result<String> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        // A server that has said all hangs up without a word of TLS.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof && !said.is_empty() => {}
        read => drop(read?),
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

fn one_line(said: &Said, status: u16, words: &str) -> Result<()> {
    let why = said.json()?["why"].as_str().context("a reason")?.to_owned();
    ensure!(
        said.status == status && why.contains(words) && !why.contains('\n'),
        "wanted {status}, {words}: {said:?}"
    );
    Ok(())
}

/// The word of TLS for who is refused.
fn alert(said: Result<Said>, word: &str) -> Result<()> {
    let why = format!("{:#}", said.err().context("it was let in")?);
    ensure!(why.contains(word) && !why.contains('\n'), "wanted {word}: {why}");
    Ok(())
}

#[test]
fn people_have_the_role_that_their_certificate_says() -> Result<()> {
    let served = Served::start("")?;
    let (ann, bob) = (served.person("ann", "viewer")?, served.person("bob", "operator")?);
    let me = served.get(&ann, "/api/v1/me")?.json()?;
    ensure!(me["user"] == "ann" && me["role"] == "viewer", "{me}");
    ensure!(served.get(&bob, "/api/v1/me")?.json()?["role"] == "operator");
    for path in [
        "/",
        "/page.js",
        "/api/v1/overview",
        "/api/v1/events",
        "/api/v1/openapi.json",
    ] {
        let said = served.get(&ann, path)?;
        ensure!(said.status == 200, "{path}: {said:?}");
    }
    let said = served.post(&ann, "/api/v1/vms/shop/switchover", json!({}))?;
    one_line(&said, 403, "person 'ann' may not do that ('failover')")?;
    one_line(&said, 403, "--role operator")?;
    // What an operator asks is looked at: there is no such VM.
    let said = served.post(&bob, "/api/v1/vms/shop/switchover", json!({}))?;
    ensure!(said.status == 400, "{said:?}");
    for (path, body) in [
        ("/api/v1/vms/shop/down", json!({"force": true})),
        ("/api/v1/vms/shop/protect", json!({"alone": true})),
        ("/api/v1/vms/shop/replace", json!({"host": "b"})),
        ("/api/v1/vms/shop/move", json!({"witness": "b"})),
    ] {
        one_line(&served.post(&bob, path, body)?, 403, "root, on the host itself")?;
    }
    let said = served.post(&bob, "/api/v1/vms", json!({"text": "name = \"shop\""}))?;
    one_line(
        &said,
        403,
        "person 'bob' may start only VMs that root has prepared",
    )?;
    // A change without the token, and a name of another host.
    let said = served.say(
        Some(&bob),
        &request("POST", "/api/v1/vms/shop/down", &[("Host", "a")], "{}"),
    )?;
    one_line(&said, 403, "X-Dunlin-Token")?;
    for name in ["localhost", "evil.example"] {
        let said = served.say(Some(&bob), &request("GET", "/", &[("Host", name)], ""))?;
        one_line(&said, 421, "it is called 'a'")?;
    }
    Ok(())
}

#[test]
fn whoever_has_no_certificate_that_counts_is_refused_in_one_line() -> Result<()> {
    let served = Served::start("")?;
    let ask = request("GET", "/api/v1/overview", &[("Host", "a")], "");
    let said = served.say(None, &ask)?;
    one_line(&said, 403, "people who show a certificate of this cluster")?;
    ensure!(!said.body.contains("hosts"), "{said:?}");
    // A host's is no person's.
    let host = KeyedCert {
        cert_pem: served.read("cert.pem")?,
        key_pem: served.read("key.pem")?,
    };
    one_line(
        &served.say(Some(&host), &ask)?,
        403,
        "people who show a certificate",
    )?;
    // Of another cluster with the same names; one that is over; one that was revoked.
    let foreign = person::make(&keys::make_ca("one")?, "ann", PersonRole::Operator, FAR)?;
    alert(served.say(Some(&foreign), &ask), "UnknownCA")?;
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let over = person::make(&served.authority()?, "ann", PersonRole::Operator, now_s - 3600)?;
    alert(served.say(Some(&over), &ask), "CertificateExpired")?;

    let (ann, bob) = (served.person("ann", "viewer")?, served.person("bob", "viewer")?);
    ensure!(served.get(&ann, "/api/v1/overview")?.status == 200);
    // One who watches when it happens.
    let mut watching = served.connect(Some(&ann))?;
    watching.write_all(request("GET", "/api/v1/stream", &[("Host", "a")], "").as_bytes())?;
    let mut first = [0; 15];
    watching.read_exact(&mut first)?;
    ensure!(first == *b"HTTP/1.1 200 OK", "{first:?}");
    let said = served.cluster(&["revoke", "--person", "ann"])?;
    ensure!(said.contains("1 certificates of ann count no more"), "{said}");
    let begun = Instant::now();
    read_all(&mut watching)?;
    ensure!(
        begun.elapsed() < Duration::from_secs(30),
        "they watched on for {:?}",
        begun.elapsed()
    );
    alert(served.say(Some(&ann), &ask), "CertificateRevoked")?;
    // Nobody else's.
    ensure!(served.get(&bob, "/api/v1/overview")?.status == 200);
    // A new one for the same name counts.
    let again = served.person("ann", "operator")?;
    ensure!(served.get(&again, "/api/v1/me")?.json()?["role"] == "operator");
    // HTTP without TLS is no conversation.
    let mut plain = TcpStream::connect(served.api)?;
    plain.set_read_timeout(Some(PATIENCE))?;
    plain.write_all(ask.as_bytes())?;
    let mut said = Vec::new();
    let _ = plain.read_to_end(&mut said);
    ensure!(!String::from_utf8_lossy(&said).contains("HTTP"), "{said:?}");
    Ok(())
}

/// What is said on a connection that is kept alive.
fn again(stream: &mut StreamOwned<ClientConnection, TcpStream>, path: &str) -> Result<Said> {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes())?;
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        text.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&text).to_ascii_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.context("a length")?.parse()?];
    stream.read_exact(&mut body)?;
    text.extend(body);
    Said::of(&String::from_utf8_lossy(&text))
}

/// Asks until something else than 200 is answered, after which the connection has to be over.
fn asks_to_the_end(mut stream: StreamOwned<ClientConnection, TcpStream>, words: &str) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let said = loop {
        let said = again(&mut stream, "/api/v1/me")?;
        if said.status != 200 {
            break said;
        }
        ensure!(Instant::now() < until, "they are answered for ever");
        sleep(Duration::from_millis(100));
    };
    one_line(&said, 401, words)?;
    ensure!(said.head.contains("connection: close"), "{said:?}");
    let rest = read_all(&mut stream).unwrap_or_default();
    ensure!(rest.is_empty(), "after the last answer: {rest}");
    Ok(())
}

/// One who watches, and has heard something.
fn follows(
    served: &Served,
    who: &KeyedCert,
    path: &str,
    accept: &str,
) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    let mut stream = served.connect(Some(who))?;
    let asked = request("GET", path, &[("Host", "a"), ("Accept", accept)], "");
    stream.write_all(asked.as_bytes())?;
    let mut first = [0; 15];
    stream.read_exact(&mut first)?;
    ensure!(first == *b"HTTP/1.1 200 OK", "{first:?}");
    Ok(stream)
}

/// Both kinds of streams end with their reason, once the certificate has.
fn streams_say_why(
    watching: &mut impl Read,
    following: &mut impl Read,
    ended: Instant,
    words: &str,
) -> Result<()> {
    let (seen, lines) = (read_all(watching)?, read_all(following)?);
    ensure!(
        ended.elapsed() < Duration::from_secs(30),
        "they watched on for {:?}",
        ended.elapsed()
    );
    for (said, before) in [
        (seen, "event: ended\ndata: {\"why\":\""),
        (lines, "{\"answer\":\"failed\",\"why\":\""),
    ] {
        let (_, last) = said
            .rsplit_once(before)
            .with_context(|| format!("no '{before}' in {said}"))?;
        ensure!(
            last.contains(words) && last.trim().lines().filter(|line| line.contains("why")).count() == 0,
            "{last}"
        );
    }
    Ok(())
}

#[test]
fn a_connection_that_is_kept_alive_ends_when_its_person_s_certificate_does() -> Result<()> {
    let served = Served::start("")?;
    let bob = served.person("bob", "viewer")?;
    let mut other = served.connect(Some(&bob))?;
    ensure!(again(&mut other, "/api/v1/me")?.status == 200);
    // Long enough to come in on a busy machine.
    let until_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() + 15;
    let ann = person::make(&served.authority()?, "ann", PersonRole::Viewer, until_s)?;
    let mut kept = served.connect(Some(&ann))?;
    ensure!(again(&mut kept, "/api/v1/me")?.status == 200);
    let mut watching = follows(&served, &ann, "/api/v1/stream", "text/event-stream")?;
    let mut following = follows(
        &served,
        &ann,
        "/api/v1/events?follow=true",
        "application/x-ndjson",
    )?;
    asks_to_the_end(kept, "person 'ann': this certificate is over")?;
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    ensure!(now_s >= until_s, "{} s too early", until_s - now_s);
    streams_say_why(
        &mut watching,
        &mut following,
        Instant::now(),
        "this certificate is over",
    )?;
    // Nobody else's.
    ensure!(served.get(&bob, "/api/v1/me")?.status == 200);
    Ok(())
}

#[test]
fn a_connection_that_is_kept_alive_ends_when_its_person_is_revoked_and_no_other_does() -> Result<()> {
    let served = Served::start("")?;
    let (ann, bob) = (served.person("ann", "viewer")?, served.person("bob", "viewer")?);
    let (mut kept, mut other) = (served.connect(Some(&ann))?, served.connect(Some(&bob))?);
    for stream in [&mut kept, &mut other] {
        ensure!(again(stream, "/api/v1/me")?.status == 200);
    }
    let mut watching = follows(&served, &ann, "/api/v1/stream", "text/event-stream")?;
    let mut following = follows(
        &served,
        &ann,
        "/api/v1/events?follow=true",
        "application/x-ndjson",
    )?;
    // Bob asks all the time: a connection on which nothing is asked ends for that.
    let (tell, told) = mpsc::channel::<()>();
    let others = std::thread::spawn(move || {
        while told.recv_timeout(Duration::from_millis(100)) == Err(mpsc::RecvTimeoutError::Timeout) {
            let said = again(&mut other, "/api/v1/me")?;
            ensure!(said.status == 200, "{said:?}");
        }
        Ok(())
    });
    let ending =
        std::thread::spawn(move || asks_to_the_end(kept, "person 'ann': this certificate was revoked"));
    served.cluster(&["revoke", "--person", "ann"])?;
    let revoked = Instant::now();
    streams_say_why(
        &mut watching,
        &mut following,
        revoked,
        "this certificate was revoked",
    )?;
    ending.join().map_err(|_| anyhow!("it panicked"))??;
    // Some seconds after the lists have changed.
    sleep(Duration::from_secs(3));
    drop(tell);
    others.join().map_err(|_| anyhow!("it panicked"))?
}

#[test]
fn one_person_s_connections_are_bounded_and_are_nobody_else_s() -> Result<()> {
    let served = Served::start("")?;
    let (ann, bob) = (served.person("ann", "viewer")?, served.person("bob", "viewer")?);
    let mut held = Vec::new();
    for _ in 0..MOST {
        let mut stream = served.connect(Some(&ann))?;
        stream.write_all(request("GET", "/api/v1/stream", &[("Host", "a")], "").as_bytes())?;
        let mut first = [0; 12];
        stream.read_exact(&mut first)?;
        ensure!(first == *b"HTTP/1.1 200", "{first:?}");
        held.push(stream);
    }
    let said = served.get(&ann, "/api/v1/me")?;
    ensure!(said.status == 503 && said.body.contains("too many"), "{said:?}");
    ensure!(served.get(&bob, "/api/v1/me")?.status == 200);
    drop(held);
    let until = Instant::now() + PATIENCE;
    while served.get(&ann, "/api/v1/me")?.status != 200 {
        ensure!(Instant::now() < until, "her places do not come back");
    }
    Ok(())
}

/// Two hundred of one address that say nothing, and a person at another one.
#[test]
fn who_only_connects_keeps_no_person_out() -> Result<()> {
    let served = Served::start("")?;
    let ann = served.person("ann", "viewer")?;
    let idle = (0..200).filter_map(|_| callers::from(2, served.api).ok());
    let idle: Vec<TcpStream> = idle.collect();
    let begun = Instant::now();
    for _ in 0..10 {
        ensure!(served.get(&ann, "/api/v1/me")?.status == 200);
    }
    // Those who say nothing are hung up on after ten seconds, and would have been waited for.
    ensure!(begun.elapsed() < PATIENCE && idle.len() == 200);
    Ok(())
}

#[test]
fn it_is_off_unless_host_toml_says_where_and_needs_certificates() -> Result<()> {
    let mut host = Host::new()?;
    let api = free_address()?;
    host.configure("page = \"off\"")?;
    host.start()?;
    ensure!(TcpStream::connect(api).is_err());
    host.stop();
    let text = fs::read_to_string(host.file())?;
    let insecure: String = text
        .lines()
        .filter(|line| {
            !["key =", "cert =", "ca ="]
                .iter()
                .any(|key| line.starts_with(key))
        })
        .chain(["insecure = true"])
        .map(|line| format!("{line}\n"))
        .collect();
    for (text, words) in [
        (format!("api = \"{api}\"\n{insecure}"), "with certificates alone"),
        (format!("api = \"here\"\n{text}"), "line 1"),
    ] {
        fs::write(host.file(), text)?;
        let why = host.start().err().context("it starts")?.to_string();
        ensure!(why.contains(words), "{why}");
    }
    // A place that is somebody else's.
    let taken = TcpListener::bind("127.0.0.1:0")?;
    fs::write(host.file(), format!("api = \"{}\"\n{text}", taken.local_addr()?))?;
    let why = host.start().err().context("it starts")?.to_string();
    ensure!(
        why.contains("api at 127.0.0.1") && why.trim().lines().count() == 1,
        "{why}"
    );
    Ok(())
}

fn by_socket(host: &Host, user: User, text: &str) -> Result<Said> {
    http::by_socket(&host.socket().with_file_name("api.sock"), (user.1, user.2), text)
}

#[test]
fn by_the_socket_roles_are_those_of_the_control_socket_and_no_token_is_asked() -> Result<()> {
    if !is_root() {
        skipped::skip("becoming another user needs root");
        return Ok(());
    }
    let mut alone = Host::new()?;
    alone.configure("page = \"off\"")?;
    alone.start()?;
    let look = request("GET", "/api/v1/me", &[], "");
    ensure!(by_socket(&alone, ROOT, &look)?.json()?["role"] == "administrator");
    let refused = by_socket(&alone, VIEWER, &look)
        .err()
        .context("it is open to all")?;
    ensure!(
        refused.to_string().contains("refused: Permission denied"),
        "{refused:#}"
    );
    let socket = alone.socket().with_file_name("api.sock");
    ensure!(UnixStream::connect(&socket).is_ok());
    drop(alone);

    let mut host = Host::new()?;
    host.configure("page = \"off\"\nviewers = \"daemon\"\noperators = \"games\"")?;
    host.start()?;
    for (user, role) in [
        (VIEWER, "viewer"),
        (OPERATOR, "operator"),
        (ROOT, "administrator"),
    ] {
        let me = by_socket(&host, user, &look)?.json()?;
        ensure!(me["user"] == user.0 && me["role"] == role, "{me}");
        let said = by_socket(
            &host,
            user,
            &request("POST", "/api/v1/vms/shop/switchover", &[], "{}"),
        )?;
        match role {
            "viewer" => one_line(&said, 403, "members of group 'games'")?,
            _ => ensure!(said.status == 400, "{said:?}"),
        }
    }
    one_line(
        &by_socket(&host, STRANGER, &look)?,
        403,
        "user 'nobody' may not talk",
    )?;
    // A name that no page of this host has is refused here, too.
    let said = by_socket(&host, ROOT, &request("GET", "/", &[("Host", "evil.example")], ""))?;
    one_line(&said, 421, "it is called 'localhost'")
}
