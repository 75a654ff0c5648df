//! The handshake between hosts, either side of it, against a peer that has said all that it will say.

use dunlin_fabric::link::{Auth, Hello, Identity, Purpose, Welcome, parts};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

fn identity(secret: bool) -> Identity {
    let auth = if secret {
        Auth::Secret(vec![7; 32])
    } else {
        Auth::Insecure
    };
    Identity::new([9; 16], "a", &["a".into(), "b".into()], Some(auth)).expect("an identity")
}

/// First byte: which side, and whether a secret is asked for. The rest: what the peer says.
pub fn link(bytes: &[u8]) {
    let Some((how, says)) = bytes.split_first() else {
        return;
    };
    let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    theirs
        .write_all(&says[..says.len().min(64 << 10)])
        .expect("64 KiB fit");
    theirs.shutdown(Shutdown::Write).expect("shut down");
    // Only reads, writes and time-outs are used: a Unix socket knows them, too.
    let ours = TcpStream::from(OwnedFd::from(ours));
    let until = Instant::now() + Duration::from_secs(5);
    let identity = identity(how & 2 != 0);
    if how & 1 == 0 {
        let said = parts::respond(ours, &identity, until, &|_| Ok(Welcome::default()));
        match &said {
            Ok((hello, stream)) => {
                assert_eq!(
                    (hello.to.as_str(), hello.from.as_str(), stream.peer()),
                    ("a", "b", "b")
                );
                assert_eq!(how & 2, 0, "nobody can know the proof");
            }
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
        drop(said);
        let mut answer = Vec::new();
        let _end = theirs.read_to_end(&mut answer); // an error, if it closed before it had read all
        assert!(answer.len() < 40 << 10);
    } else {
        match parts::initiate(ours, &identity, &Hello::new("vm", "b", Purpose::Log), until) {
            Ok((welcome, _)) => assert_eq!(welcome.host, "b"),
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
    if let Some((cluster, hello)) = Hello::decode(says) {
        let mut again = Vec::new();
        hello.encode(&cluster, &mut again);
        assert_eq!(again, says, "what decodes is what encodes");
    }
}
