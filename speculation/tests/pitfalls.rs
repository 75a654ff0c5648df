//! What only two real kernels show beside whole streams: a client that is gone for good, an end that was rebooted, questions to a silent end, congestion on
//! a client's way, and with what a shadow socket begins.

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

#[allow(dead_code, reason = "the tests of whole streams use all of it")]
mod lab;

use lab::{Lab, Place, Plan};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(300);
const VM: &str = "10.9.0.1:80";
const CLIENT: &str = "10.9.0.2:80";
const GREETING: &[u8] = b"hello";

fn lab() -> Option<Lab> {
    Lab::start(Plan::default())
        .map_err(|why| skipped::skip(&why))
        .ok()
}

fn patient(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A connection from a port of one's own choice, as NFS and others use.
fn connect_from(port: u16, to: &str) -> std::io::Result<TcpStream> {
    // No other program that is started meanwhile is to hold it.
    let socket = net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddr::from(([0, 0, 0, 0], port)))?;
    let to: SocketAddr = to.parse().map_err(std::io::Error::other)?;
    net::connect(&socket, &to)?;
    patient(socket.into())
}

/// Its kernel knows nothing of the connection from now on, and has said nothing of it.
fn forget(place: &Place, stream: TcpStream) {
    place.vanish();
    sockopt::set_socket_linger(stream.as_fd(), Some(Duration::ZERO)).expect("SO_LINGER");
    drop(stream);
    place.is_back();
}

/// Greets whoever comes, and tells how each connection ended. `asks`: it asks a silent client each second whether it is there.
fn serve(place: &Place, at: &'static str, asks: bool) -> Receiver<ErrorKind> {
    let (tell, ends) = channel();
    let listener = place.run(move || TcpListener::bind(at).expect("its port"));
    place.spawn(move || {
        for stream in listener.incoming() {
            let (stream, tell): (_, Sender<ErrorKind>) = (stream.expect("a connection"), tell.clone());
            std::thread::spawn(move || {
                let end = echo(stream, asks).expect_err("it never ends by itself");
                tell.send(end.kind())
            });
        }
    });
    ends
}

/// Says everything twice.
fn echo(stream: TcpStream, asks: bool) -> std::io::Result<()> {
    let mut stream = patient(stream)?;
    sockopt::set_socket_keepalive(&stream, asks)?;
    sockopt::set_tcp_keepidle(&stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(&stream, 8)?;
    stream.write_all(GREETING)?;
    let mut buffer = [0; 64 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => stream.write_all(&[&buffer[..n], &buffer[..n]].concat())?,
        }
    }
}

fn greeted(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut heard = [0; GREETING.len()];
    stream.read_exact(&mut heard)?;
    assert_eq!(heard, GREETING);
    Ok(())
}

fn answers(stream: &mut TcpStream, question: &[u8]) -> std::io::Result<()> {
    stream.write_all(question)?;
    let mut heard = vec![0; 2 * question.len()];
    stream.read_exact(&mut heard)?;
    assert_eq!(heard, [question, question].concat());
    Ok(())
}

fn end_of(ends: &Receiver<ErrorKind>) -> ErrorKind {
    ends.recv_timeout(PATIENCE).expect("an end")
}

/// ETIMEDOUT of the shadow socket.
#[test]
fn a_client_that_is_gone_is_given_up_and_learns_it_when_it_is_back() {
    let Some(lab) = lab() else { return };
    let ends = serve(&lab.vm, VM, false);
    let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
    greeted(&mut stream).expect("a greeting");
    lab::set_for_shadow_sockets("ipv4/tcp_retries2", "3");
    // Its last word still leaves; it hears no answer any more.
    lab.client.goes_deaf();
    stream.write_all(b"?").expect("a question");
    assert_eq!(end_of(&ends), ErrorKind::ConnectionReset);
    lab.client.is_back();
    let heard = answers(&mut stream, b"again").map_err(|error| error.kind());
    assert!(
        matches!(heard, Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)),
        "{heard:?}"
    );
    assert_eq!(lab.end().failed, 1);
}

#[test]
fn a_client_that_was_rebooted_connects_from_the_same_port() {
    let Some(lab) = lab() else { return };
    let ends = serve(&lab.vm, VM, false);
    for _ in 0..2 {
        let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
        greeted(&mut stream).expect("a greeting");
        answers(&mut stream, b"?").expect("an answer");
        forget(&lab.client, stream);
    }
    // The first one's: the client answered the VM's challenge with a reset.
    assert_eq!(end_of(&ends), ErrorKind::ConnectionReset);
    lab.end();
}

#[test]
fn a_vm_that_was_rebooted_connects_from_the_same_port() {
    let Some(lab) = lab() else { return };
    let ends = serve(&lab.client, CLIENT, false);
    for _ in 0..2 {
        let mut stream = lab.vm.run(|| connect_from(4444, CLIENT)).expect("a connection");
        greeted(&mut stream).expect("a greeting");
        answers(&mut stream, b"?").expect("an answer");
        forget(&lab.vm, stream);
    }
    assert_eq!(end_of(&ends), ErrorKind::ConnectionReset);
    lab.end();
}

#[test]
fn a_client_of_a_vm_that_was_rebooted_is_reset() {
    let Some(lab) = lab() else { return };
    let listener = lab.vm.run(|| TcpListener::bind(VM).expect("its port"));
    let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
    let (other, _) = listener.accept().expect("a connection");
    forget(&lab.vm, other);
    let heard = answers(&mut stream, b"?").map_err(|error| error.kind());
    assert_eq!(heard, Err(ErrorKind::ConnectionReset));
    lab.end();
}

/// Linux asks once a second here, and gives up after eight questions without an answer: a busy machine may stand still for some seconds.
#[test]
fn a_silent_client_is_asked_by_its_vm_and_taken_for_dead_only_where_it_is() {
    let Some(lab) = lab() else { return };
    let ends = serve(&lab.vm, VM, true);
    let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
    greeted(&mut stream).expect("a greeting");
    let begun = Instant::now();
    while lab.vm.counter("TcpExt", "TCPKeepAlive") < 6 {
        assert!(begun.elapsed() < PATIENCE, "the VM asks nothing");
        assert_eq!(ends.recv_timeout(Duration::from_millis(50)).ok(), None);
    }
    answers(&mut stream, b"?").expect("it lives");
    lab.client.vanish();
    assert_eq!(end_of(&ends), ErrorKind::TimedOut);
    lab.client.is_back();
    lab.end();
}

/// The marks are of the client's own bytes: the VM hears of them, and the client hears it when the epoch is safe.
#[test]
fn congestion_on_the_clients_way_is_told_to_the_client() {
    let Some(lab) = lab() else { return };
    lab.vm.sysctl("ipv4/tcp_ecn", "1");
    lab.client.sysctl("ipv4/tcp_ecn", "1");
    let rules = "table ip busy {\n\
        chain out { type filter hook output priority 0; ip ecn ect0 numgen inc mod 8 0 ip ecn set ce; }\n}\n";
    lab.client.tool("nft", &["-f", "-"], rules);
    let _ends = serve(&lab.vm, VM, false);
    let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
    greeted(&mut stream).expect("a greeting");
    for round in 0..8 {
        answers(&mut stream, &[round; 20_000]).expect("an answer");
    }
    assert!(lab.vm.counter("IpExt", "InCEPkts") > 0, "nothing was marked");
    assert!(
        lab.client.counter("TcpExt", "TCPDeliveredCE") > 0,
        "the client heard nothing"
    );
    lab.end();
}

/// The kernel gives a repaired socket 524 bytes a segment, and three seconds until a first loss is mended.
#[test]
fn a_shadow_socket_begins_with_whole_segments_and_a_round_trip_time() {
    let Some(lab) = lab() else { return };
    let _ends = serve(&lab.vm, VM, false);
    let mut stream = lab.client.run(|| connect_from(4444, VM)).expect("a connection");
    greeted(&mut stream).expect("a greeting");
    let told = lab::shadow_sockets();
    let number = |name: &str| -> f64 {
        let word = told.split_whitespace().find_map(|word| word.strip_prefix(name));
        word.and_then(|digits| digits.parse().ok())
            .unwrap_or_else(|| panic!("{name} in {told}"))
    };
    assert_eq!(number("mss:"), 1448.0, "{told}");
    assert!(number("rto:") < 1000.0, "{told}");
    lab.end();
}
