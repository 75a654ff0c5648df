//! The testbed itself, the guest image and the clients, on a plain QEMU without Dunlin: what all other tests stand on.
//!
//! Needs root and what `cargo xtask setup` installs; told as skipped without root.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::client::{Connection, Counter, CounterSpec, load};
use dunlin_vmtest::testbed::{Capture, CpuShare, Node, Shape, SmallDisk, Testbed, TestbedSpec};
use dunlin_vmtest::{image, is_root, paths};

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

fn skip() -> bool {
    let skip = !is_root();
    if skip {
        skipped::skip("network namespaces need root");
    }
    skip
}

fn guest() -> SocketAddr {
    let address = image::GUEST_ADDRESS.split('/').next().unwrap();
    SocketAddr::new(address.parse().unwrap(), image::REDIS_PORT)
}

/// Whether `to` answers `from` within a time.
fn answers(to: &Node, from: &Node, within: Duration) -> Result<bool> {
    let to = SocketAddr::new(to.address().into(), 7);
    // A closed port answers with a reset at once: that is an answer.
    let result = from.spawn("probe", move || std::net::TcpStream::connect_timeout(&to, within))?;
    let error = result.join().unwrap()?.err();
    Ok(error.is_none_or(|error| error.kind() == std::io::ErrorKind::ConnectionRefused))
}

/// A way that was mended a moment ago may need a second SYN, or a second question for the address.
fn reaches(from: &Node, to: &Node) -> Result<bool> {
    answers(to, from, Duration::from_secs(10))
}

fn is_cut_off(from: &Node, to: &Node) -> Result<bool> {
    Ok(!answers(to, from, Duration::from_millis(300))?)
}

#[test]
fn hosts_reach_each_other_until_a_fault_parts_them() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let [a, b, client] = ["a", "b", "client"].map(|name| testbed.node(name));
    assert!(reaches(a, b)? && reaches(client, a)?);
    testbed.cut_link("a")?;
    assert!(is_cut_off(b, a)? && reaches(client, b)?);
    testbed.restore_link("a")?;
    assert!(reaches(b, a)?);
    testbed.partition(&["a"], &["b", "c"])?;
    assert!(is_cut_off(a, b)? && is_cut_off(b, a)? && reaches(client, a)? && reaches(client, b)?);
    testbed.heal()?;
    assert!(reaches(a, b)?);
    // One way only: what a says is lost, what b says is not; and who asks must be answered.
    testbed.lose(&[(&["a"], &["b"])])?;
    assert!(is_cut_off(a, b)? && is_cut_off(b, a)? && reaches(a, client)? && reaches(client, b)?);
    testbed.heal()?;
    assert!(reaches(a, b)?);
    testbed.close()
}

#[test]
fn a_slow_cable_is_slow_until_it_is_mended_and_a_small_disk_is_full_until_it_is_freed() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let qdiscs = |testbed: &Testbed| -> Result<String> {
        let output = testbed
            .node("a")
            .command("tc")?
            .args(["qdisc", "show", "dev", "up0"])
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    testbed.slow_link("a", 5000, 50)?;
    assert!(qdiscs(&testbed)?.contains("rate 5Mbit"), "{}", qdiscs(&testbed)?);
    assert!(reaches(testbed.node("a"), testbed.node("b"))?);
    testbed.mend_link("a")?;
    assert!(!qdiscs(&testbed)?.contains("tbf"), "{}", qdiscs(&testbed)?);
    let folder = testbed.dir().join("small");
    let small = SmallDisk::mount(&folder, 4)?;
    std::fs::write(folder.join("before"), "some")?;
    small.fill()?;
    let error = std::fs::write(folder.join("after"), "some").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(28), "no space left: {error}");
    small.free()?;
    std::fs::write(folder.join("after"), "some")?;
    assert_eq!(std::fs::read(folder.join("before"))?, b"some");
    // Left to the testbed: it goes with it.
    std::mem::forget(small);
    testbed.close()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    assert!(!mounts.contains(&*folder.to_string_lossy()), "{mounts}");
    Ok(())
}

/// How long a counter or a datagram is waited for.
const PATIENCE: Duration = Duration::from_secs(20);

/// `bytes` from a client to host a by one connection; what came, and how long the handshake took.
fn carried(testbed: &Testbed, bytes: &[u8]) -> Result<(Vec<u8>, Duration)> {
    let (host, client) = (testbed.node("a"), testbed.node("client"));
    let address = host.address();
    let (tell, told) = std::sync::mpsc::channel();
    let taking = host.spawn("take", move || -> Result<Vec<u8>> {
        let listener = std::net::TcpListener::bind((address, 0))?;
        let _ = tell.send(listener.local_addr()?);
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut came = Vec::new();
        stream.read_to_end(&mut came)?;
        Ok(came)
    })?;
    let target = told.recv_timeout(PATIENCE)?;
    let bytes = bytes.to_vec();
    let giving = client.spawn("give", move || -> Result<Duration> {
        // The question for the address is not what is looked at.
        let _ = std::net::UdpSocket::bind("0.0.0.0:0")?.send_to(b"who", target);
        let begun = Instant::now();
        let mut stream = std::net::TcpStream::connect_timeout(&target, PATIENCE)?;
        let took = begun.elapsed();
        stream.write_all(&bytes)?;
        Ok(took)
    })?;
    let took = giving.join().unwrap()??;
    Ok((taking.join().unwrap()??, took))
}

#[test]
fn a_shaped_cable_delays_and_loses_and_the_plain_one_is_there_again() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let bytes: Vec<u8> = (0..4_000_000_u32).map(|at| (at * 7 + at / 251) as u8).collect();
    let shape = Shape {
        delay: Duration::from_millis(5),
        lost_of_million: 0,
        megabits: None,
        seed: 1,
    };
    let shaper = testbed.shape("client", shape)?;
    let (came, took) = carried(&testbed, &bytes)?;
    // Never sooner: each way takes at least as long as was asked for.
    assert!(
        came == bytes && took >= 2 * shape.delay,
        "{} bytes, {took:?}",
        came.len()
    );
    let counts = shaper.finish()?;
    // What went in large frames is counted as a wire would carry it only where frames are lost.
    assert!(
        counts.came > 60 && (counts.lost, counts.crowded_out) == (0, 0),
        "{counts:?}"
    );

    let lossy = Shape {
        delay: Duration::ZERO,
        lost_of_million: 20_000,
        ..shape
    };
    let shaper = testbed.shape("client", lossy)?;
    let (came, _) = carried(&testbed, &bytes)?;
    assert!(came == bytes, "{} bytes", came.len());
    let counts = shaper.finish()?;
    // Each of 2,800 segments is drawn for. 56 are lost in the mean; as few as 10 once in 10^13 times.
    assert!(
        counts.came >= 2_700 && counts.lost > 10 && counts.crowded_out == 0,
        "{counts:?}"
    );

    let slow = Shape {
        delay: Duration::ZERO,
        megabits: NonZeroU32::new(100),
        ..shape
    };
    let shaper = testbed.shape("client", slow)?;
    let begun = Instant::now();
    let (came, _) = carried(&testbed, &bytes)?;
    let took = begun.elapsed();
    // Never sooner: 32 megabits take 0.32 s.
    assert!(
        came == bytes && took >= Duration::from_millis(320),
        "{} bytes, {took:?}",
        came.len()
    );
    assert_eq!(shaper.finish()?.crowded_out, 0);

    let (came, _) = carried(&testbed, &bytes)?;
    assert!(came == bytes, "over the plain cable");
    assert!(reaches(testbed.node("client"), testbed.node("b"))?);
    // One that is not put back goes with the testbed all the same.
    drop(testbed.shape("client", lossy)?);
    testbed.close()
}

#[test]
fn datagrams_over_a_lossy_cable_keep_their_order_and_as_many_are_missing_as_are_told() -> Result<()> {
    if skip() {
        return Ok(());
    }
    const DATAGRAMS: u64 = 200;
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let shaper = testbed.shape(
        "client",
        Shape {
            delay: Duration::from_millis(1),
            lost_of_million: 250_000,
            megabits: None,
            seed: 3,
        },
    )?;
    let (host, client) = (testbed.node("a"), testbed.node("client"));
    let address = host.address();
    let opened = host.spawn("datagrams", move || std::net::UdpSocket::bind((address, 0)))?;
    let socket = opened.join().unwrap()??;
    let target = socket.local_addr()?;
    // Nobody need ask for the address: only what is sent here is to be lost.
    let words = [
        "neigh",
        "replace",
        &address.to_string(),
        "lladdr",
        "02:d0:00:00:01:01",
        "dev",
        "up0",
    ];
    assert!(client.command("ip")?.args(words).status()?.success());
    let sending = client.spawn("send", move || -> Result<()> {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        for number in 0..DATAGRAMS {
            socket.send_to(&number.to_be_bytes(), target)?;
        }
        Ok(())
    })?;
    sending.join().unwrap()??;
    let deadline = Instant::now() + PATIENCE;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let (mut came, mut buffer): (Vec<u64>, [u8; 8]) = (Vec::new(), [0; 8]);
    let missing = |came: &[u64]| {
        let counts = shaper.counts();
        // What else the client's system says of itself may be lost as well, so fewer datagrams may be.
        counts.came < DATAGRAMS || (came.len() as u64) < DATAGRAMS - counts.lost
    };
    while missing(&came) {
        assert!(
            Instant::now() < deadline,
            "{} came, {:?}",
            came.len(),
            shaper.counts()
        );
        if let Ok(length) = socket.recv(&mut buffer) {
            assert_eq!(length, 8);
            came.push(u64::from_be_bytes(buffer));
        }
    }
    assert!(came.is_sorted() && came.len() < DATAGRAMS as usize, "{came:?}");
    let counts = shaper.finish()?;
    assert!(counts.lost > 0 && counts.crowded_out == 0, "{counts:?}");
    testbed.close()
}

#[test]
fn who_speaks_is_heard_at_the_port_where_it_speaks() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let capture = Capture::start(&testbed, [0x02, 0xd0, 0x00, 0x00, 0x01, 0x01])?;
    // What only others say is not heard.
    assert!(reaches(testbed.node("b"), testbed.node("c"))?);
    let deadline = Instant::now() + Duration::from_secs(20);
    while capture.heard().spoken.is_empty() {
        assert!(reaches(testbed.node("a"), testbed.node("b"))?);
        assert!(Instant::now() < deadline, "nothing is heard");
    }
    let heard = capture.finish()?;
    let hosts: Vec<&str> = heard.spoken.iter().map(|spoken| spoken.host.as_str()).collect();
    assert_eq!((hosts, heard.missed), (vec!["a"], 0));
    assert!(heard.spoken[0].frames > 0 && heard.spoken[0].first <= heard.spoken[0].last);
    testbed.close()
}

#[test]
fn a_killed_host_has_no_process_left_and_a_frozen_one_does_not_run() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec {
        host_cpu: Some(CpuShare::percent(20)),
        ..TestbedSpec::three_hosts()
    })?;
    let host = testbed.node("a");
    // A process that leaves its session and its parent, as a daemon's child might.
    let mut child = host
        .command("sh")?
        .args(["-c", "setsid sh -c 'while :; do :; done' & wait"])
        .spawn()?;
    while host.pids().len() < 2 {
        std::thread::yield_now();
    }
    let frozen = host.freeze()?;
    let last_counted = Instant::now();
    // What it used last may be counted a little later.
    let mut before = host.cpu_time();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = host.cpu_time();
        if now == before {
            break;
        }
        ensure!(
            last_counted.elapsed() < Duration::from_secs(20),
            "a frozen host goes on using the CPU"
        );
        before = now;
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(host.cpu_time(), before, "a frozen host used the CPU");
    drop(frozen);
    // A machine of others counts to a process what it took from it: not in each of ten windows.
    let window = || {
        let (begun, used) = (Instant::now(), host.cpu_time().unwrap_or_default());
        std::thread::sleep(Duration::from_millis(500));
        (host.cpu_time().unwrap_or_default() - used).as_secs_f64() / begun.elapsed().as_secs_f64()
    };
    assert!(
        (0..10).any(|_| window() < 0.35),
        "a host with 20 % of a core used more than 35 % all the time"
    );
    host.kill_all()?;
    assert!(host.pids().is_empty());
    child.wait()?;
    testbed.close()
}

#[test]
fn nothing_is_left_of_a_testbed_whose_process_was_killed() -> Result<()> {
    if skip() {
        return Ok(());
    }
    // This test's executable runs the helper below as a process of its own, which is then killed.
    let mut victim = std::process::Command::new(std::env::current_exe()?)
        .args([
            "--exact",
            "helper_that_builds_a_testbed_and_waits",
            "--nocapture",
            "--ignored",
        ])
        .env("DUNLIN_LAB_VICTIM", "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = std::io::BufReader::new(victim.stdout.take().context("piped")?);
    let run = std::io::BufRead::lines(stdout)
        .map_while(Result::ok)
        .find_map(|line| line.split_once("testbed is ").map(|(_, run)| run.to_owned()))
        .context("the helper built no lab")?;
    let run = dunlin_vmtest::testbed::RunId::of(&run).context("a run's name")?;
    assert!(!Testbed::leftovers(&run).is_empty());
    victim.kill()?;
    victim.wait()?;
    let deadline = Instant::now() + Duration::from_secs(90);
    while !Testbed::leftovers(&run).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(Testbed::leftovers(&run), Vec::<String>::new());
    Ok(())
}

#[test]
fn only_what_a_run_has_made_itself_counts_as_left() -> Result<()> {
    if skip() {
        return Ok(());
    }
    // Somebody else's, made while a testbed runs.
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let foreign = Foreign::make()?;
    testbed.node("a").command("true")?.status()?;
    testbed.close()?;
    drop(foreign);

    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let host = testbed.node("a");
    assert_eq!(host.traces()?, Vec::<String>::new());
    let untidy = "echo > /run/dunlin.sock; echo > /dev/shm/dunlin-ram; ip tuntap add dunlin7 mode tap";
    assert!(host.command("sh")?.args(["-c", untidy]).status()?.success());
    assert!(!std::path::Path::new("/dev/shm/dunlin-ram").exists());
    let left = testbed.close().unwrap_err().to_string();
    for thing in ["interface dunlin7", "/run/dunlin.sock", "/dev/shm/dunlin-ram"] {
        assert!(left.contains(&format!("host a: {thing}")), "{thing}: {left}");
    }
    Ok(())
}

/// An interface and files of another program on this machine, with names that could be ours.
struct Foreign(String);

impl Foreign {
    fn make() -> Result<Self> {
        let name = format!("dunlin{}", std::process::id());
        let foreign = Self(name.clone());
        let made = std::process::Command::new("ip")
            .args(["link", "add", &name, "type", "bridge"])
            .status()?;
        assert!(made.success(), "no interface could be made");
        for file in foreign.files() {
            std::fs::write(file, "")?;
        }
        Ok(foreign)
    }

    fn files(&self) -> [String; 2] {
        ["/run", "/dev/shm"].map(|place| format!("{place}/{}", self.0))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip")
            .args(["link", "del", &self.0])
            .status();
        for file in self.files() {
            let _ = std::fs::remove_file(file);
        }
    }
}

#[test]
#[ignore = "not a test: the helper of nothing_is_left_of_a_testbed_whose_process_was_killed"]
fn helper_that_builds_a_testbed_and_waits() -> Result<()> {
    if std::env::var_os("DUNLIN_LAB_VICTIM").is_none() {
        return Ok(());
    }
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    testbed.node("a").command("sleep")?.arg("1000").spawn()?;
    println!("testbed is {}", testbed.run().as_str());
    loop {
        std::thread::park();
    }
}

#[test]
fn the_guest_boots_on_a_plain_qemu_and_the_clients_count_on_it() -> Result<()> {
    if skip() {
        return Ok(());
    }
    let image = image::ensure(&paths::guest_images(), &mut |line| eprintln!("{line}"))?;
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let host = testbed.node("a");
    let disk = host.home().join("disk.img");
    image::data_disk(&disk, 64)?;
    let serial = host.home().join("serial.log");
    let ifup = host.home().join("ifup");
    std::fs::write(&ifup, "#!/bin/sh\nip link set \"$1\" master br0 up\n")?;
    std::fs::set_permissions(&ifup, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let mut qemu = host
        .command("qemu-system-x86_64")?
        .args([
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-m",
            "256",
            "-machine",
            "pc",
            "-nodefaults",
            "-no-user-config",
        ])
        .args([
            "-display",
            "none",
            "-vga",
            "none",
            "-device",
            "virtio-net-pci,netdev=n0,romfile=",
        ])
        .arg("-netdev")
        .arg(format!("tap,id=n0,script={},downscript=no", ifup.display()))
        .arg("-drive")
        .arg(format!("file={},format=raw,if=virtio", disk.display()))
        .args([
            "-serial",
            &format!("file:{}", serial.display()),
            "-append",
            &image.append,
        ])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .stdin(Stdio::null())
        .spawn()
        .context("qemu-system-x86_64 is not here: cargo xtask setup")?;
    let client = testbed.node("client");
    let begun = Instant::now();
    let booted = client.spawn("boot", move || await_pong(guest(), Duration::from_secs(240)))?;
    booted
        .join()
        .unwrap()?
        .with_context(|| std::fs::read_to_string(&serial).unwrap_or_default())?;
    eprintln!("boot to PONG: {:.1} s", begun.elapsed().as_secs_f64());
    assert!(std::fs::read_to_string(&serial)?.contains("dunlin-guest: disk mounted"));

    let spec = CounterSpec {
        target: guest(),
        connections: 2,
        together: false,
        give_up: Duration::from_secs(120),
    };
    let counter = Counter::start(client, &spec)?;
    counter.await_more(100, Duration::from_secs(120))?;
    // A pause of the host is a gap for the clients, and nothing worse.
    let paused = Instant::now();
    let frozen = host.freeze()?;
    std::thread::sleep(Duration::from_millis(400));
    drop(frozen);
    counter.await_more(100, Duration::from_secs(120))?;
    let (report, answers) = counter.finish()?;
    eprintln!("{report:?}");
    assert!(report.is_clean() && report.acknowledged >= 200);
    let gap = answers.longest_gap_us(paused, Instant::now());
    assert!(gap >= 350_000, "gap of {gap} us");

    let spec = load::LoadSpec {
        target: guest(),
        test: "set".into(),
        connections: 4,
        about: Duration::from_secs(1),
    };
    let measured = load::run(client, &spec)?;
    eprintln!("{measured:?}");
    assert!(measured.per_second > 50.0 && measured.p50_ms > 0.0);
    host.kill_all()?;
    qemu.wait()?;
    testbed.close()
}

/// Waits until redis in the guest answers; each try ends by itself.
fn await_pong(target: SocketAddr, at_most: Duration) -> Result<()> {
    let deadline = Instant::now() + at_most;
    loop {
        let tried = Connection::open(target, Duration::from_millis(500))
            .and_then(|mut connection| connection.ask(&["PING"], Duration::from_secs(5)));
        match tried {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                return Err(error).context("the guest does not answer");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
