//! Builds of several versions that meet. A peer of version 2 is written out here, and held against what a real one said.

use super::handshake::{initiate_on, respond_on};
use super::tests::{CLUSTER, SHORT, all_modes, hello, plain, secret, try_link};
use super::*;
use ring::hmac;
use std::io::{Read, Write};
use std::net::TcpListener;

const SECRET: &[u8] = b"sixteen bytes or more";

/// What a build of commit fa32a56, the last one of version 2, said as host b to host a in [`hello`]: without protection, and with
/// [`SECRET`]; then the answers of one as host a.
const RECORDED: [(&str, &str); 2] = [
    (
        "44554e4c494e00020007070707070707070707070707070707cdef649712e14f5f965a4744d9ad11215d06820e6fe47316c5bb3f81d47d784100320707070707070707070707070707070702000000000000000900057265646973000162000161000631302e302e32000201020000000000000000000000000000000000000000000000000000000000000000",
        "44554e4c494e000200001a7bab9d425407bedf75fa58b178376e9a8b13fa2625f8bdb85bb302555789ef00000000000000000000000000000000000000000000000000000000000000000000050001610000",
    ),
    (
        "44554e4c494e00020107070707070707070707070707070707c1599c0063cdee49dfd3e63f863a9add08b8ab620a2bc8f141141657411320b100320707070707070707070707070707070702000000000000000900057265646973000162000161000631302e302e3200020102230be9254816257e625d98cc1c081c88749a30160908c52d00a52b79a8ec7e8e",
        "44554e4c494e00020001d33272994a270e8a69a3bf4867f3a1e70066ff322adf3e330f091c4171718a9c57b75692759a0dbe00d28af09999bd9aeeea10d244bf519a04094530b6089ee20000050001610000",
    ),
];

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2);
    pairs
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// A build of version 2: what it says, and what it takes.
struct Second<'a> {
    identity: &'a Identity,
    nonce: [u8; 32],
}

impl Second<'_> {
    fn mode(&self) -> u8 {
        self.identity.0.mode as u8
    }

    fn proof(&self, label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
        if self.identity.0.mode != Mode::Secret {
            return [0; 32];
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET);
        let all = [&[label], parts].concat().concat();
        hmac::sign(&key, &all).as_ref().try_into().unwrap()
    }

    fn greeting(&self) -> Vec<u8> {
        [b"DUNLIN\x00\x02", &[self.mode()][..], &CLUSTER, &self.nonce].concat()
    }

    /// The acceptor's answer to a greeting, and what both have said then.
    fn answer(&self, greeting: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let said = [greeting, &[self.mode()], &self.nonce].concat();
        let proof = self.proof(b"dunlin acceptor", &[&said]);
        let answer = [b"DUNLIN\x00\x02\x00", &said[57..], &proof].concat();
        (answer, said)
    }

    fn hello(&self, said: &[u8]) -> Vec<u8> {
        let mut body = Vec::new();
        let from = self.identity.host().to_owned();
        Hello { from, ..hello() }.encode(&CLUSTER, &mut body);
        let proof = self.proof(b"dunlin connector", &[said, &body]);
        [&(body.len() as u16).to_be_bytes()[..], &body, &proof].concat()
    }

    fn stream(&self, tcp: TcpStream, tls: Option<rustls::Connection>) -> Stream {
        Stream::new(tcp, tls, String::new(), Spoken::within_this_build())
    }

    /// Connects, and returns what was answered to its hello.
    fn connect(&self, mut tcp: TcpStream) -> Vec<u8> {
        tcp.set_read_timeout(Some(SHORT)).unwrap();
        let greeting = self.greeting();
        tcp.write_all(&greeting).unwrap();
        let mut answer = [0; 74];
        tcp.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..9], *b"DUNLIN\x00\x02\x00");
        let said = [&greeting, &answer[9..42]].concat();
        assert_eq!(answer[42..], self.proof(b"dunlin acceptor", &[&said]));
        let tls = self.identity.tls().map(|configs| {
            let mut conn = configs.client("a").unwrap();
            tls::handshake(&mut conn, &mut tcp).unwrap();
            conn
        });
        let mut stream = self.stream(tcp, tls);
        stream.write_all(&self.hello(&said)).unwrap();
        stream.flush().unwrap();
        let mut welcome = [0; 8];
        stream.read_exact(&mut welcome).unwrap();
        welcome.to_vec()
    }

    /// Accepts one connection, as strict as it was, and returns the hello.
    fn accept(&self, mut tcp: TcpStream) -> Hello {
        tcp.set_read_timeout(Some(SHORT)).unwrap();
        let mut greeting = [0; 57];
        tcp.read_exact(&mut greeting).unwrap();
        assert_eq!(
            greeting[..25],
            [b"DUNLIN\x00\x02", &[self.mode()][..], &CLUSTER].concat()
        );
        let (answer, said) = self.answer(&greeting);
        tcp.write_all(&answer).unwrap();
        let tls = self.identity.tls().map(|configs| {
            let mut conn = configs.server().unwrap();
            tls::handshake(&mut conn, &mut tcp).unwrap();
            conn
        });
        let mut stream = self.stream(tcp, tls);
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut body = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut body).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        // With TLS it did not look.
        if self.identity.0.mode != Mode::Tls {
            assert_eq!(proof, self.proof(b"dunlin connector", &[&said, &body]));
        }
        stream.write_all(b"\x00\x00\x05\x00\x01a\x00\x00").unwrap();
        stream.flush().unwrap();
        Hello::decode(&body).unwrap().1
    }
}

fn two_sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

fn soon() -> Instant {
    Instant::now() + SHORT
}

#[test]
fn the_peer_of_version_2_in_these_tests_says_what_a_real_one_said() {
    let identities = [
        (plain("a"), plain("b")),
        (secret("a", SECRET), secret("b", SECRET)),
    ];
    for ((a, b), (connector, acceptor)) in identities.iter().zip(RECORDED) {
        let (connector, acceptor) = (bytes(connector), bytes(acceptor));
        let second = |identity, nonce: &[u8]| Second {
            identity,
            nonce: nonce.try_into().unwrap(),
        };
        let (b, a) = (second(b, &connector[25..57]), second(a, &acceptor[10..42]));
        assert_eq!(b.greeting(), connector[..57]);
        let (answer, said) = a.answer(&connector[..57]);
        assert_eq!(answer, acceptor[..74]);
        assert_eq!(b.hello(&said), connector[57..]);
        assert_eq!(acceptor[74..], *b"\x00\x00\x05\x00\x01a\x00\x00");
    }
}

#[test]
fn a_recorded_connection_of_version_2_is_answered_as_it_was_then() {
    let (connector, acceptor) = (bytes(RECORDED[0].0), bytes(RECORDED[0].1));
    let (mut theirs, ours) = two_sockets();
    theirs.write_all(&connector).unwrap();
    let (said, stream) = respond_on(ours, &plain("a"), soon(), &|_| Ok(Welcome::default())).unwrap();
    assert_eq!((said.from.as_str(), said.vm.as_str()), ("b", "redis"));
    assert_eq!((stream.spoken().version, &stream.spoken().build), (2, &None));
    let mut answer = vec![0; acceptor.len()];
    theirs.read_exact(&mut answer).unwrap();
    answer[10..42].copy_from_slice(&acceptor[10..42]); // the nonce
    assert_eq!(answer, acceptor);
}

#[test]
fn a_host_of_version_2_connects_and_is_connected_to_whatever_protects_the_link() {
    for (mode, a, b) in all_modes() {
        let nonce = [0x42; 32];
        let (theirs, ours) = two_sockets();
        std::thread::scope(|scope| {
            let (old, nonce) = (&b, nonce);
            let old = scope.spawn(move || Second { identity: old, nonce }.connect(theirs));
            let (_, stream) = respond_on(ours, &a, soon(), &|_| Ok(Welcome::default()))
                .unwrap_or_else(|e| panic!("{mode}: {e}"));
            assert_eq!(stream.spoken().version, 2, "{mode}");
            assert_eq!(old.join().unwrap(), b"\x00\x00\x05\x00\x01a\x00\x00", "{mode}");
        });
        let (ours, theirs) = two_sockets();
        std::thread::scope(|scope| {
            let (old, nonce) = (&a, nonce);
            let old = scope.spawn(move || Second { identity: old, nonce }.accept(theirs));
            let (welcome, stream) =
                initiate_on(ours, &b, &hello(), soon()).unwrap_or_else(|e| panic!("{mode}: {e}"));
            assert_eq!(
                (welcome.host.as_str(), stream.spoken().version),
                ("a", 2),
                "{mode}"
            );
            assert_eq!(stream.spoken().build, None, "{mode}");
            assert_eq!(old.join().unwrap().from, "b", "{mode}");
        });
    }
}

#[test]
fn hosts_of_neighbouring_versions_speak_the_highest_one_that_both_have_and_say_which_build_they_are() {
    for (theirs, common) in [
        ((2, 7), 7),
        ((2, 6), 6),
        ((2, 5), 5),
        ((2, 4), 4),
        ((2, 2), 2),
        ((2, 3), 3),
        ((7, 8), 7),
        ((3, 3), 3),
    ] {
        for (mode, a, b) in all_modes() {
            let (a, b) = (a.of_build("1.0"), b.speaking(theirs.0, theirs.1).of_build("2.0"));
            let (connected, accepted, refusal) = try_link(a.clone(), &b, &hello());
            let connected = connected.unwrap_or_else(|e| panic!("{mode}, {theirs:?}: {e}; {refusal:?}"));
            let (_, accepted) = accepted.unwrap();
            let told = |build: &str| Spoken {
                version: common,
                build: (common >= 3).then(|| build.to_owned()),
            };
            assert_eq!(connected.spoken(), &told("1.0"), "{mode}, {theirs:?}");
            assert_eq!(accepted.spoken(), &told("2.0"), "{mode}, {theirs:?}");
            let (connected, ..) = try_link(b, &a, &Hello::new("redis", "b", Purpose::Log));
            assert_eq!(connected.unwrap().spoken(), &told("2.0"), "{mode}, {theirs:?}");
        }
    }
}

#[test]
fn hosts_without_a_common_version_say_so_on_both_sides() {
    let (older, newer) = (plain("a"), plain("b").speaking(8, 9));
    let (connected, _, refusal) = try_link(older.clone(), &newer, &hello());
    assert_eq!(
        connected.err().unwrap().to_string(),
        "the peer speaks protocol version 7, this host versions 8 to 9: upgrade the peer to a dunlin version that knows one of these, or run \
         the same on all hosts"
    );
    let refusal = refusal.unwrap();
    assert!(
        refusal.contains("this host versions 2 to 7: upgrade this host to"),
        "{refusal}"
    );
    let (connected, _, refusal) = try_link(newer, &older, &Hello::new("redis", "b", Purpose::Log));
    let said = connected.err().unwrap().to_string();
    assert!(
        said.contains("version 8, this host versions 2 to 7: upgrade this host"),
        "{said}"
    );
    let refusal = refusal.unwrap();
    assert!(
        refusal.contains("versions 2 to 7, this host versions 8 to 9: upgrade the peer"),
        "{refusal}"
    );
}

/// Passes a connection's greetings on, changed, and everything after them as it is.
fn between(listener: TcpListener, to: SocketAddr, change: Change) {
    let mut near = listener.accept().unwrap().0;
    let mut far = TcpStream::connect(to).unwrap();
    for side in [&near, &far] {
        side.set_read_timeout(Some(SHORT)).unwrap();
    }
    let (mut greeting, mut answer) = ([0; 57], [0; 74]);
    near.read_exact(&mut greeting).unwrap();
    change(&mut greeting, &mut answer);
    far.write_all(&greeting).unwrap();
    far.read_exact(&mut answer).unwrap();
    change(&mut greeting, &mut answer);
    near.write_all(&answer).unwrap();
    let mut back = (far.try_clone().unwrap(), near.try_clone().unwrap());
    let returning = std::thread::spawn(move || {
        let _ = std::io::copy(&mut back.0, &mut back.1); // until either end has had enough
        let _ = back.1.shutdown(std::net::Shutdown::Both);
    });
    let _ = std::io::copy(&mut near, &mut far);
    let _ = far.shutdown(std::net::Shutdown::Both);
    returning.join().unwrap();
}

/// What somebody between two hosts makes of a greeting, and of its answer.
type Change = fn(&mut [u8; 57], &mut [u8; 74]);

#[test]
fn nobody_between_two_hosts_makes_them_speak_an_older_version() {
    let changes: [Change; 3] = [
        // The connector seems to know no ranges.
        |greeting, _| greeting[47..57].fill(0x11),
        // The acceptor seems to have chosen the older version.
        |_, answer| answer[7] = 2,
        // The connector seems to have nothing newer, and knows ranges.
        |greeting, _| greeting[56] = 2,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        for (mode, a, b) in all_modes() {
            let listener = Listener::bind("127.0.0.1:0", a).unwrap();
            let to = listener.local_addr();
            let ear = TcpListener::bind("127.0.0.1:0").unwrap();
            let addr = ear.local_addr().unwrap();
            let between = std::thread::spawn(move || between(ear, to, change));
            let connected = connect(addr, &b, &hello(), SHORT);
            let what = format!("{mode}, change {number}");
            if mode == "insecure" {
                // Nothing is authenticated: whoever stands between may say anything.
                drop(connected);
                between.join().unwrap();
                continue;
            }
            let said = connected
                .err()
                .unwrap_or_else(|| panic!("{what}: it stands"))
                .to_string();
            let refusal = listener.accept_timeout(SHORT).unwrap().err().unwrap();
            between.join().unwrap();
            if mode == "tls" {
                assert!(matches!(refusal.error, LinkError::Altered), "{what}: {refusal}");
                assert!(said.contains("changed on its way"), "{what}: {said}");
            } else {
                assert!(
                    matches!(refusal.error, LinkError::WrongSecret),
                    "{what}: {refusal}"
                );
            }
        }
    }
}
