//! Speculative communication between two real kernels: downloads and uploads whose hashes are right, whatever the network, the options and
//! the client do, and wherever the host dies.

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

#[allow(dead_code, reason = "the pitfalls use the rest")]
mod lab;

use lab::{Lab, Plan};
use nix::mount::{MsFlags, mount};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sha2::{Digest, Sha256};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(300);
const V4: &str = "10.9.0.1:80";
const V6: &str = "[fd09::1]:80";

/// What a client asks for; eight bytes say how much.
const DOWNLOAD: u8 = b'D';
const UPLOAD: u8 = b'U';
/// So much, and when the client has said that it is there, a reset.
const RESET: u8 = b'R';

/// Bytes that depend on their place.
fn stream(length: u64) -> impl Iterator<Item = Vec<u8>> {
    let mut left = length;
    let mut state = length ^ 0x5851_f42d_4c95_7f2d;
    std::iter::from_fn(move || {
        let n = left.min(16 << 10) as usize;
        left -= n as u64;
        let mut bytes = Vec::with_capacity(n + 8);
        while bytes.len() < n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bytes.extend((state >> 16).to_le_bytes());
        }
        bytes.truncate(n);
        (n > 0).then_some(bytes)
    })
}

fn hash_of(length: u64) -> [u8; 32] {
    let mut hash = Sha256::new();
    stream(length).for_each(|bytes| hash.update(bytes));
    hash.finalize().into()
}

fn hash_of_read(from: &mut impl Read, most: u64) -> std::io::Result<([u8; 32], u64)> {
    let (mut hash, mut total) = (Sha256::new(), 0);
    let mut buffer = vec![0; 64 << 10];
    while total < most {
        let n = from.read(&mut buffer[..(most - total).min(64 << 10) as usize])?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
        total += n as u64;
    }
    Ok((hash.finalize().into(), total))
}

fn patient(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// Closing resets the connection.
fn abort(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(stream.as_fd(), Some(Duration::ZERO)).expect("SO_LINGER");
}

/// The VM's service: how each connection ended.
fn serve(lab: &Lab) -> Receiver<std::io::Result<u64>> {
    let (tell, ends) = channel();
    let listener = lab
        .vm
        .run(|| TcpListener::bind("[::]:80").expect("port 80 of the VM"));
    lab.vm.spawn(move || {
        for stream in listener.incoming() {
            let (stream, tell) = (stream.expect("a connection"), tell.clone());
            std::thread::spawn(move || tell.send(answer(stream)));
        }
    });
    ends
}

fn answer(mut connection: TcpStream) -> std::io::Result<u64> {
    patient(&connection)?;
    let mut request = [0; 9];
    connection.read_exact(&mut request)?;
    let length = u64::from_be_bytes(request[1..].try_into().expect("eight bytes"));
    match request[0] {
        UPLOAD => {
            let (hash, _) = hash_of_read(&mut connection, length)?;
            connection.write_all(&hash)?;
        }
        kind => {
            for bytes in stream(length) {
                connection.write_all(&bytes)?;
            }
            if kind == RESET {
                connection.read_exact(&mut [0])?;
                abort(connection);
                return Ok(length);
            }
        }
    }
    connection.shutdown(Shutdown::Write)?;
    let (_, rest) = hash_of_read(&mut connection, u64::MAX)?;
    Ok(rest)
}

fn ask(to: &str, kind: u8, length: u64) -> std::io::Result<TcpStream> {
    let mut connection = TcpStream::connect(to)?;
    patient(&connection)?;
    connection.write_all(&[&[kind][..], &length.to_be_bytes()].concat())?;
    Ok(connection)
}

fn download(to: &str, length: u64) -> std::io::Result<()> {
    let mut connection = ask(to, DOWNLOAD, length)?;
    let (hash, total) = hash_of_read(&mut connection, u64::MAX)?;
    assert_eq!(total, length, "a download ended early");
    assert_eq!(hash, hash_of(length), "a download has other bytes");
    Ok(())
}

fn upload(to: &str, length: u64) -> std::io::Result<()> {
    let mut connection = ask(to, UPLOAD, length)?;
    for bytes in stream(length) {
        connection.write_all(&bytes)?;
    }
    let mut hash = [0; 32];
    connection.read_exact(&mut hash)?;
    assert_eq!(hash, hash_of(length), "an upload has other bytes");
    Ok(())
}

/// A lab, or a word why there is none.
fn lab(plan: Plan) -> Option<Lab> {
    Lab::start(plan).map_err(|why| skipped::skip(&why)).ok()
}

/// Both ways at once, IPv4 and IPv6.
fn both_ways(lab: &Lab, length: u64) {
    let ends = serve(lab);
    let mut threads = vec![];
    for to in [V4, V6] {
        threads.push(lab.client.spawn(move || download(to, length)));
        threads.push(lab.client.spawn(move || upload(to, length)));
    }
    let count = threads.len();
    for thread in threads {
        thread.join().expect("no panic").expect("no error of a client");
    }
    for _ in 0..count {
        let end = ends.recv_timeout(PATIENCE).expect("every connection ends");
        end.expect("no error in the VM");
    }
}

#[test]
fn downloads_and_uploads_are_whole() {
    let Some(lab) = lab(Plan::default()) else { return };
    both_ways(&lab, 4 << 20);
    let counts = lab.end();
    assert_eq!((counts.begun, counts.failed), (4, 0), "{counts:?}");
}

/// Of a daemon whose unit keeps it from the host's settings (systemd.exec(5), ProtectKernelTunables).
#[test]
fn with_read_only_settings_of_the_host() {
    const NONE: Option<&str> = None;
    let guarded = || -> nix::Result<()> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
        mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
        let sys = "/proc/sys";
        mount(Some(sys), sys, NONE, MsFlags::MS_BIND, NONE)?;
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        mount(NONE, sys, NONE, flags, NONE)
    };
    let played = std::thread::spawn(move || {
        if let Err(error) = guarded() {
            return skipped::skip(&format!("mounts of its own: {error} (root is needed)"));
        }
        let refused = std::fs::write("/proc/sys/net/ipv4/tcp_ecn", "0").map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::ReadOnlyFilesystem));
        let Some(lab) = lab(Plan::default()) else { return };
        both_ways(&lab, 256 << 10);
        assert_eq!(lab.end().begun, 4);
    });
    played.join().expect("no panic");
}

#[test]
fn without_offloads_and_with_a_small_window_too() {
    let mut plan = Plan {
        offload: false,
        ..Plan::default()
    };
    plan.limits.window_bytes = 64 << 10;
    let Some(lab) = lab(plan) else { return };
    both_ways(&lab, 512 << 10);
    assert_eq!(lab.end().begun, 4);
}

#[test]
fn with_one_percent_of_loss_on_both_ways() {
    let Some(lab) = lab(Plan::default()) else { return };
    let rules = "table inet lossy {\n\
        chain in { type filter hook input priority 0; numgen random mod 100 < 1 drop; }\n\
        chain out { type filter hook output priority 0; numgen random mod 100 < 1 drop; }\n}\n";
    lab.client.tool("nft", &["-f", "-"], rules);
    both_ways(&lab, 1 << 20);
    assert_eq!(lab.end().begun, 4);
}

/// What `ss` tells of the shadow socket, between a download and its end.
fn congestion_after_a_download(lab: &Lab) -> String {
    const LENGTH: u64 = 64 << 20;
    let ends = serve(lab);
    let (looks, may_end) = channel::<()>();
    let (tell, came) = channel();
    let client = lab.client.spawn(move || {
        let mut connection = ask(V4, RESET, LENGTH)?;
        let (hash, _) = hash_of_read(&mut connection, LENGTH)?;
        assert_eq!(hash, hash_of(LENGTH));
        tell.send(()).expect("the test waits");
        may_end.recv().expect("the test's word");
        connection.write_all(b"!")
    });
    came.recv_timeout(PATIENCE).expect("a whole download");
    let told = lab::shadow_sockets();
    looks.send(()).expect("the client waits");
    client.join().expect("no panic").expect("no error of the client");
    let end = ends.recv_timeout(PATIENCE).expect("its end");
    end.expect("the VM said all");
    told
}

#[test]
fn a_socket_begins_with_reno_and_goes_on_with_cubic_after_a_loss() {
    let Some(lossless) = lab(Plan::default()) else {
        return;
    };
    let told = congestion_after_a_download(&lossless);
    // Two busy cores may have lost something.
    assert!(told.contains(" reno ") || told.contains(" ssthresh:"), "{told}");
    lossless.end();
    let Some(lossy) = lab(Plan::default()) else { return };
    // A socket is looked at when it gets more to send and nothing is being mended: so the losses end long before the bytes do.
    let rules = "table inet lossy {\n\
        chain in { type filter hook input priority 0; quota until 4 mbytes numgen inc mod 40 20 drop; }\n}\n";
    lossy.client.tool("nft", &["-f", "-"], rules);
    let told = congestion_after_a_download(&lossy);
    assert!(told.contains(" cubic "), "{told}");
    lossy.end();
}

#[test]
fn with_few_options_and_small_segments() {
    for (name, value) in [
        ("ipv4/tcp_timestamps", "0"),
        ("ipv4/tcp_sack", "0"),
        ("ipv4/tcp_window_scaling", "0"),
    ] {
        let Some(lab) = lab(Plan::default()) else { return };
        lab.vm.sysctl(name, value);
        both_ways(&lab, 256 << 10);
        assert_eq!(lab.end().begun, 4, "{name}");
    }
    let Some(lab) = lab(Plan::default()) else { return };
    lab.client
        .ip("route replace 10.9.0.0/24 dev eth0 advmss 536 src 10.9.0.2\n");
    both_ways(&lab, 256 << 10);
    assert_eq!(lab.end().begun, 4);
}

/// A guest's MTU may be the only thing that says how much a network carries (VXLAN), and a bridge tells nobody what it has dropped.
#[test]
fn frames_are_no_larger_than_the_vms_own() {
    let plan = Plan {
        offload: false,
        ..Plan::default()
    };
    let Some(lab) = lab(plan) else { return };
    lab.vm.ip("link set dev eth0 mtu 1400\n");
    let rules = "table inet narrow {\n\
        chain in { type filter hook input priority 0; meta length > 1400 drop; }\n}\n";
    lab.client.tool("nft", &["-f", "-"], rules);
    both_ways(&lab, 256 << 10);
    assert_eq!(lab.end().begun, 4);
}

#[test]
fn a_client_that_takes_little_gets_all() {
    let mut plan = Plan::default();
    plan.limits.window_bytes = 64 << 10;
    let Some(lab) = lab(plan) else { return };
    lab.client.sysctl("ipv4/tcp_rmem", "2048 4096 8192");
    both_ways(&lab, 256 << 10);
    assert_eq!(lab.end().begun, 4);
}

#[test]
fn resets_of_either_side_arrive_after_the_bytes_before_them() {
    let Some(lab) = lab(Plan::default()) else { return };
    let ends = serve(&lab);
    for to in [V4, V6] {
        // The VM's: all that it said before has come.
        let reset = lab.client.spawn(move || {
            let mut connection = ask(to, RESET, 100_000)?;
            let (hash, _) = hash_of_read(&mut connection, 100_000)?;
            assert_eq!(hash, hash_of(100_000));
            connection.write_all(b"!")?;
            connection.read(&mut [0])
        });
        let error = reset.join().expect("no panic").expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        ends.recv_timeout(PATIENCE)
            .expect("its end")
            .expect("the VM said all");
        // The client's: the VM that goes on saying hears of it.
        let gone = lab.client.spawn(move || {
            let mut connection = ask(to, DOWNLOAD, 64 << 20)?;
            connection.read_exact(&mut [0; 5000])?;
            abort(connection);
            Ok::<_, std::io::Error>(())
        });
        gone.join().expect("no panic").expect("a begin");
        let end = ends.recv_timeout(PATIENCE).expect("its end");
        assert_eq!(end.expect_err("a reset").kind(), ErrorKind::ConnectionReset);
    }
    lab.end();
}

#[test]
fn hosts_die_and_both_streams_are_whole() {
    let plan = Plan {
        kills: vec![150, 400, 700, 1100],
        ..Plan::default()
    };
    let Some(lab) = lab(plan) else { return };
    let rules = "table inet slow {\n\
        chain in { type filter hook input priority 0; numgen random mod 1000 < 3 drop; }\n}\n";
    lab.client.tool("nft", &["-f", "-"], rules);
    while lab.deaths() < 4 {
        both_ways_again(&lab);
    }
    lab.end();
}

/// As `both_ways`, of a service that is there already or not.
fn both_ways_again(lab: &Lab) {
    let listener = lab
        .vm
        .run(|| TcpListener::bind("[::]:0").expect("a port of the VM"));
    let port = listener.local_addr().expect("an address").port();
    lab.vm.spawn(move || {
        for connection in listener.incoming().take(4) {
            let connection = connection.expect("a connection");
            std::thread::spawn(move || answer(connection));
        }
    });
    let mut threads = vec![];
    for to in [format!("10.9.0.1:{port}"), format!("[fd09::1]:{port}")] {
        let other = to.clone();
        threads.push(lab.client.spawn(move || download(&to, 3 << 20)));
        threads.push(lab.client.spawn(move || upload(&other, 3 << 20)));
    }
    for thread in threads {
        thread.join().expect("no panic").expect("no error of a client");
    }
}

#[test]
fn hundreds_of_short_connections() {
    let Some(lab) = lab(Plan::default()) else { return };
    let _ends = serve(&lab);
    let mut threads = vec![];
    for n in 0..25_u64 {
        threads.push(lab.client.spawn(move || {
            for k in 0..8 {
                download(if k % 2 == 0 { V4 } else { V6 }, 2000 + 100 * n)?;
            }
            Ok::<_, std::io::Error>(())
        }));
    }
    for thread in threads {
        thread.join().expect("no panic").expect("no error of a client");
    }
    assert_eq!(lab.end().begun, 200);
}

/// Each has had its bytes when the host dies, and is ended by the VM afterwards.
#[test]
fn thousands_of_connections_outlive_their_host() {
    const MANY: u64 = 2_000;
    const LENGTH: u64 = 4096;
    // A client's, the VM's and the shadow socket of each, and the lab's own.
    let wanted = Some(3 * MANY + 1000);
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.current.max(wanted),
        maximum: limit.maximum.map(|most| most.max(3 * MANY + 1000)),
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        return skipped::skip(&format!("descriptors: {error} (root is needed)"));
    }
    let plan = Plan {
        // However long the connections take: there is one more to come.
        kills: (1..=1000).map(|n| n * 2000).collect(),
        ..Plan::default()
    };
    let Some(lab) = lab(plan) else { return };
    let ends = serve(&lab);
    // Each waits for two epochs, so they are opened beside each other.
    let opens = |from: u64| {
        move || -> std::io::Result<Vec<TcpStream>> {
            let one = |n| {
                let mut connection = ask(if n % 2 == 0 { V4 } else { V6 }, RESET, LENGTH)?;
                let (hash, _) = hash_of_read(&mut connection, LENGTH)?;
                assert_eq!(hash, hash_of(LENGTH));
                Ok(connection)
            };
            (from..from + MANY / 40).map(one).collect()
        }
    };
    let threads: Vec<_> = (0..40)
        .map(|n| lab.client.spawn(opens(n * (MANY / 40))))
        .collect();
    let mut connections = vec![];
    for thread in threads {
        connections.extend(thread.join().expect("no panic").expect("no error of a client"));
    }
    let before = lab.deaths();
    while lab.deaths() == before {
        both_ways_again(&lab);
    }
    for connection in &mut connections {
        connection.write_all(b"!").expect("it is open");
    }
    let reset = |connection: &mut TcpStream| connection.read(&mut [0]).map_err(|error| error.kind());
    let heard: Vec<_> = connections.iter_mut().map(reset).collect();
    assert!(
        heard.iter().all(|end| *end == Err(ErrorKind::ConnectionReset)),
        "{heard:?}"
    );
    for _ in 0..MANY {
        let end = ends.recv_timeout(PATIENCE).expect("every connection ends");
        assert_eq!(end.expect("no error in the VM"), LENGTH);
    }
    assert_eq!(lab.end().failed, 0);
}
