use super::*;
use crate::keys::{make_ca, make_host};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(super) const CLUSTER: [u8; 16] = [7; 16];
pub(super) const SHORT: Duration = Duration::from_secs(60);

pub(super) fn plain(host: &str) -> Identity {
    Identity::new(CLUSTER, host, &[], Some(Auth::Insecure)).unwrap()
}

pub(super) fn secret(host: &str, secret: &[u8]) -> Identity {
    Identity::new(
        CLUSTER,
        host,
        &["a".into(), "b".into()],
        Some(Auth::Secret(secret.to_vec())),
    )
    .unwrap()
}

fn tls_of(ca: &keys::Authority, host: &str, certified: &str) -> Result<Identity, LinkError> {
    let k = make_host(ca, certified).unwrap();
    let auth = Auth::Tls {
        cert_pem: k.cert_pem,
        key_pem: k.key_pem,
        ca_pem: ca.keys.cert_pem.clone(),
        crl_pem: None,
    };
    Identity::new(CLUSTER, host, &["a".into(), "b".into()], Some(auth))
}

pub(super) type Attempt = (Result<Stream, LinkError>, Option<(Hello, Stream)>, Option<String>);

pub(super) fn try_link(acceptor: Identity, connector: &Identity, hello: &Hello) -> Attempt {
    let listener = Listener::bind("127.0.0.1:0", acceptor).unwrap();
    let connected = connect(listener.local_addr(), connector, hello, SHORT).map(|(_, s)| s);
    match listener.accept_timeout(SHORT) {
        Some(Ok(pair)) => (connected, Some(pair), None),
        Some(Err(refusal)) => (connected, None, Some(refusal.to_string())),
        None => (connected, None, None),
    }
}

pub(super) fn hello() -> Hello {
    Hello {
        term: 9,
        qemu_version: "10.0.2".into(),
        extra: vec![1, 2],
        ..Hello::new("redis", "a", Purpose::Sync)
    }
}

pub(super) fn all_modes() -> Vec<(&'static str, Identity, Identity)> {
    let ca = make_ca("test").unwrap();
    vec![
        ("insecure", plain("a"), plain("b")),
        (
            "secret",
            secret("a", b"sixteen bytes or more"),
            secret("b", b"sixteen bytes or more"),
        ),
        (
            "tls",
            tls_of(&ca, "a", "a").unwrap(),
            tls_of(&ca, "b", "b").unwrap(),
        ),
    ]
}

#[test]
fn members_connect_and_bytes_flow_both_ways_at_once_over_split_halves() {
    for (mode, a, b) in all_modes() {
        let (connected, accepted, _) = try_link(a, &b, &hello());
        let connected = connected.unwrap_or_else(|e| panic!("{mode}: {e}"));
        let (said, accepted) = accepted.unwrap();
        assert_eq!(
            said,
            Hello {
                from: "b".into(),
                ..hello()
            },
            "{mode}"
        );
        assert_eq!((connected.peer(), accepted.peer()), ("a", "b"));
        assert_eq!(connected.is_encrypted(), mode == "tls");
        let bytes: Vec<u8> = (0..3_000_000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let mut threads = Vec::new();
        for stream in [connected, accepted] {
            let (mut reader, mut writer) = stream.split();
            let (mine, theirs) = (bytes.clone(), bytes.clone());
            threads.push(std::thread::spawn(move || {
                writer.write_all(&mine).unwrap();
                writer.flush().unwrap();
            }));
            threads.push(std::thread::spawn(move || {
                let mut got = vec![0; theirs.len()];
                reader.read_exact(&mut got).unwrap();
                assert!(got == theirs);
            }));
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}

#[test]
fn non_blocking_streams_lose_nothing_when_the_socket_is_full() {
    for (mode, a, b) in all_modes() {
        let (connected, accepted, _) = try_link(a, &b, &hello());
        let (mut tx, (_, mut rx)) = (connected.unwrap(), accepted.unwrap());
        tx.set_nonblocking(true).unwrap();
        rx.set_nonblocking(true).unwrap();
        let total = 8_000_000usize;
        let byte = |i: usize| (i.wrapping_mul(31) >> 3) as u8;
        let (mut sent, mut got, mut full) = (0, 0, 0);
        let mut buf = vec![0; 100_000];
        let started = Instant::now();
        while got < total {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{mode}: {sent} sent, {got} got"
            );
            while sent < total {
                let chunk: Vec<u8> = (sent..(sent + 50_000).min(total)).map(byte).collect();
                match tx.write(&chunk) {
                    Ok(n) => sent += n,
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                        full += 1;
                        break;
                    }
                    Err(e) => panic!("{mode}: {e}"),
                }
            }
            let _ = tx.flush();
            loop {
                match rx.read(&mut buf) {
                    Ok(n) => {
                        assert!(n > 0, "{mode}: end of stream at {got}");
                        assert!(
                            buf[..n].iter().enumerate().all(|(i, b)| *b == byte(got + i)),
                            "{mode}"
                        );
                        got += n;
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(e) => panic!("{mode}: {e}"),
                }
            }
        }
        assert!(full > 0, "{mode}: the test must fill the socket");
        assert!(!tx.wants_write());
    }
}

#[test]
fn every_refusal_has_its_own_clear_line() {
    let ca = make_ca("test").unwrap();
    let other_ca = make_ca("other").unwrap();
    let good = b"sixteen bytes or more".as_slice();
    let stranger = Identity::new([8; 16], "b", &[], Some(Auth::Insecure)).unwrap();
    let outsider = |auth| Identity::new(CLUSTER, "zed", &[], Some(auth)).unwrap();
    let elsewhere = Hello {
        to: "c".into(),
        ..hello()
    };
    let cases: Vec<(&str, Identity, Identity, Hello)> = vec![
        ("another cluster", plain("a"), stranger, hello()),
        (
            "does not know this cluster's secret",
            secret("a", good),
            secret("b", b"another sixteen bytes"),
            hello(),
        ),
        ("protects its links with", secret("a", good), plain("b"), hello()),
        (
            "protects its links with",
            tls_of(&ca, "a", "a").unwrap(),
            secret("b", good),
            hello(),
        ),
        (
            "certificate is not accepted",
            tls_of(&ca, "a", "a").unwrap(),
            tls_of(&other_ca, "b", "b").unwrap(),
            hello(),
        ),
        (
            "\"zed\" is not a member",
            secret("a", good),
            outsider(Auth::Secret(good.to_vec())),
            hello(),
        ),
        (
            "this is host \"a\", not \"c\"",
            plain("a"),
            plain("b"),
            elsewhere.clone(),
        ),
        (
            "not valid for name",
            tls_of(&ca, "a", "a").unwrap(),
            tls_of(&ca, "b", "b").unwrap(),
            elsewhere,
        ),
    ];
    for (expected, a, b, hello) in cases {
        let (connected, accepted, refusal) = try_link(a, &b, &hello);
        let text = connected.map(|_| ()).expect_err(expected).to_string();
        assert!(
            text.contains(expected),
            "{expected:?} expected, connector says {text:?}"
        );
        assert!(!text.contains('\n'));
        assert!(accepted.is_none() && refusal.is_some(), "{expected}");
    }
}

#[test]
fn a_host_cannot_speak_for_another() {
    let ca = make_ca("test").unwrap();
    assert!(
        matches!(tls_of(&ca, "b", "a"), Err(LinkError::BadKeys(_))),
        "noticed at start"
    );
    // A connector that lies although its certificate is a's: built by hand, since `Identity` refuses to.
    let k = make_host(&ca, "a").unwrap();
    let auth = Auth::Tls {
        cert_pem: k.cert_pem,
        key_pem: k.key_pem,
        ca_pem: ca.keys.cert_pem.clone(),
        crl_pem: None,
    };
    let mut liar = Identity::new(CLUSTER, "a", &[], Some(auth)).unwrap();
    std::sync::Arc::get_mut(&mut liar.0).unwrap().host = "b".into();
    let (connected, accepted, refusal) = try_link(tls_of(&ca, "a", "a").unwrap(), &liar, &hello());
    assert!(connected.is_err() && accepted.is_none());
    assert!(refusal.unwrap().contains("calls itself \"b\""));
}

#[test]
fn nothing_starts_unprotected_by_omission() {
    assert!(matches!(
        Identity::new(CLUSTER, "a", &[], None),
        Err(LinkError::NoSecret)
    ));
    assert!(matches!(
        Identity::new(CLUSTER, "a", &[], Some(Auth::Secret(vec![1; 5]))),
        Err(LinkError::BadKeys(_))
    ));
    assert!(matches!(
        Identity::new(CLUSTER, "A b", &[], Some(Auth::Insecure)),
        Err(LinkError::BadKeys(_))
    ));
}

#[test]
fn other_versions_get_a_clear_answer_on_both_sides() {
    let listener = Listener::bind("127.0.0.1:0", plain("a")).unwrap();
    let mut tcp = TcpStream::connect(listener.local_addr()).unwrap();
    tcp.write_all(b"DUNLIN\x00\x63").unwrap();
    let refusal = listener.accept_timeout(SHORT).unwrap().err().unwrap();
    assert!(
        refusal
            .to_string()
            .contains("peer speaks protocol version 99, this host versions 2 to 7"),
        "{refusal}"
    );
    let mut head = [0; 9];
    tcp.read_exact(&mut head).unwrap();
    assert_eq!(&head[..8], b"DUNLIN\x00\x07");

    let future = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = future.local_addr().unwrap();
    let peer = std::thread::spawn(move || {
        let (mut tcp, _) = future.accept().unwrap();
        tcp.write_all(b"DUNLIN\x00\x63\x06").unwrap();
        let _ = tcp.read(&mut [0; 100]);
    });
    let e = connect(addr, &plain("b"), &hello(), SHORT).err().unwrap();
    assert!(
        matches!(e, LinkError::OtherVersion { ours: Versions::OURS, theirs } if theirs == Versions::only(99)),
        "{e}"
    );
    peer.join().unwrap();
}

/// Threads that open one silent connection after the other, each from an address of its own.
struct Strangers {
    over: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Strangers {
    fn at(target: SocketAddr) -> Self {
        let mut strangers = Self {
            over: Arc::default(),
            opened: Arc::default(),
            threads: Vec::new(),
        };
        for number in 1..=4 {
            let (over, opened) = (Arc::clone(&strangers.over), Arc::clone(&strangers.opened));
            let from = Ipv4Addr::new(127, 0, 1, number);
            let call = move || {
                let mut held = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    let Ok(tcp) = connect_from(from, target) else {
                        continue;
                    };
                    held.push_back(tcp);
                    opened.fetch_add(1, Ordering::Relaxed);
                    // As many at once as one process may well have.
                    if held.len() > 100 {
                        held.pop_front();
                    }
                }
            };
            strangers.threads.push(std::thread::spawn(call));
        }
        strangers
    }

    /// Waits until so many connections were opened.
    fn await_opened(&self, count: usize) {
        let until = Instant::now() + 20 * SHORT;
        while self.opened.load(Ordering::Relaxed) < count {
            assert!(Instant::now() < until, "strangers cannot even connect");
            std::thread::yield_now();
        }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The whole of 127/8 is this machine's.
fn connect_from(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    use std::os::fd::FromRawFd;
    let raw = |address: Ipv4Addr, port: u16| libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(address).to_be(),
        },
        sin_zero: [0; 8],
    };
    let SocketAddr::V4(to) = to else { unreachable!() };
    let length = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: both calls read one sockaddr_in of the given length; the descriptor is owned from its making on.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let tcp = TcpStream::from_raw_fd(fd);
        let (here, there) = (raw(from, 0), raw(*to.ip(), to.port()));
        if libc::bind(fd, (&raw const here).cast(), length) != 0
            || libc::connect(fd, (&raw const there).cast(), length) != 0
        {
            return Err(std::io::Error::last_os_error());
        }
        Ok(tcp)
    }
}

#[test]
fn thousands_of_strangers_neither_block_members_nor_fill_the_log() {
    let listener = Listener::bind("127.0.0.1:0", plain("a")).unwrap();
    let target = listener.local_addr();
    // Only the member's own address has places of its own; strangers come from others.
    listener.keep_places_for([target.ip()]);
    let strangers = Strangers::at(target);
    strangers.await_opened(2000);
    for round in 1..=20 {
        // The first try succeeds, each time, while thousands more are opened.
        let (welcome, _stream) = connect(target, &plain("b"), &hello(), SHORT)
            .unwrap_or_else(|error| panic!("member's try {round}: {error}"));
        assert_eq!(welcome.host, "a");
    }
    strangers.await_opened(4000);
    let (mut members, mut reported) = (0, 0);
    while members < 20 {
        match listener.accept_timeout(SHORT).expect("all members come through") {
            Ok((hello, _)) => {
                assert_eq!(hello.from, "b");
                members += 1;
            }
            Err(_) => reported += 1,
        }
    }
    assert!(reported <= 4, "{reported} reports: one per address and minute");
    let counts = listener.refusals().counts();
    assert!(counts["too-many"] > 1000, "{counts:?}");
}

#[test]
fn a_stranger_is_reported_once_and_counted_each_time() {
    let listener = Listener::bind("127.0.0.1:0", plain("a")).unwrap();
    for _ in 0..10 {
        let mut tcp = TcpStream::connect(listener.local_addr()).unwrap();
        tcp.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // Until it is closed: so its place is free again, or is about to be.
        let _ = tcp.read_to_end(&mut Vec::new());
    }
    let counted = || {
        let counts = listener.refusals().counts();
        let of = |kind| counts.get(kind).copied().unwrap_or(0);
        of("garbage") + of("too-many")
    };
    let until = Instant::now() + SHORT;
    while counted() < 10 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(counted(), 10);
    let mut reported = 0;
    while listener.accept_timeout(Duration::from_millis(100)).is_some() {
        reported += 1;
    }
    assert_eq!(reported, 1, "one report per address and minute");
}

#[test]
fn the_owner_may_refuse_with_a_reason() {
    let policy: Policy = std::sync::Arc::new(|h: &Hello| match h.vm.as_str() {
        "redis" => Err(NotWelcome("no VM called \"redis\" here".into())),
        _ => Ok(Welcome {
            host: String::new(),
            qemu_version: "7.2".into(),
        }),
    });
    let listener = Listener::bind_with("127.0.0.1:0", plain("a"), policy).unwrap();
    let e = connect(listener.local_addr(), &plain("b"), &hello(), SHORT)
        .err()
        .unwrap();
    assert_eq!(e.to_string(), "the peer refused: no VM called \"redis\" here");
    let other = Hello {
        vm: "pg".into(),
        ..hello()
    };
    let (welcome, _s) = connect(listener.local_addr(), &plain("b"), &other, SHORT).unwrap();
    assert_eq!(
        welcome,
        Welcome {
            host: "a".into(),
            qemu_version: "7.2".into()
        }
    );
}

#[test]
fn hello_decodes_only_what_encode_makes() {
    let mut bytes = Vec::new();
    let h = Hello {
        from: "b".into(),
        ..hello()
    };
    h.encode(&CLUSTER, &mut bytes);
    assert_eq!(Hello::decode(&bytes), Some((CLUSTER, h)));
    for n in 0..bytes.len() {
        assert_eq!(Hello::decode(&bytes[..n]), None, "cut at {n}");
    }
    let mut state = 1u64;
    for _ in 0..20_000 {
        let mut damaged = bytes.clone();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % damaged.len();
            damaged[at] = (state >> 20) as u8;
        }
        if let Some((cluster, h)) = Hello::decode(&damaged) {
            let mut again = Vec::new();
            h.encode(&cluster, &mut again);
            assert_eq!(again, damaged);
        }
    }
}
