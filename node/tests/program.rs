//! `dunlin program check` with real servers: what it finds, what it says of poor programs, and that nothing of it stays.
//!
//! The poor servers and their client are this executable again: `a_server` and `a_client` are no tests of their own.

#[path = "common/processes.rs"]
mod processes;
#[path = "common/servers.rs"]
mod servers;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

use processes::{ends, processes_with};
use rustix::process::{Pid, Signal, kill_process};
use skipped::skip;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const PORT: u16 = 7000;
/// Nothing here takes so long, even on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(60);

/// Whether this machine lets us make namespaces and cards.
fn can_run() -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/net/tun").exists();
    if !may {
        skip("bare programs are tested as root, with /dev/net/tun");
    }
    may
}

fn check(options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
    command
        .args(["program", "check", "--seconds", "300"])
        .args(options)
        .arg("--")
        .args(program)
        .stdin(Stdio::null());
    command
}

struct Outcome {
    code: Option<i32>,
    report: String,
    said: String,
}

impl Outcome {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            report: String::from_utf8_lossy(&output.stdout).into_owned(),
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// A number of the report.
    fn number(&self, name: &str) -> u64 {
        let report: serde_json::Value = serde_json::from_str(&self.report).expect("a report as JSON");
        report[name].as_u64().expect(name)
    }

    #[track_caller]
    fn comes_to(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "{}\n{}", self.report, self.said);
        self
    }

    /// Its one line that says what went wrong.
    #[track_caller]
    fn complains_of(&self, words: &str) {
        let complaints = self.said.lines().filter(|line| line.starts_with("dunlin: "));
        assert!(
            complaints.clone().any(|line| line.contains(words)),
            "{}",
            self.said
        );
        assert_eq!(complaints.count(), 1, "{}", self.said);
    }
}

fn run(options: &[&str], program: &[&str]) -> Outcome {
    Outcome::of(check(options, program).output().expect("dunlin runs"))
}

/// This executable as a server of some kind, or as the client with so many connections and questions on each, and seconds for an answer.
fn this(test: &str, name: &str, value: &str) -> Vec<String> {
    let own = std::env::current_exe().expect("it runs");
    let words = [
        "env",
        &format!("{name}={value}"),
        own.to_str().expect("a path of text"),
        "--exact",
        test,
        "--ignored",
        "--nocapture",
    ];
    words.map(str::to_owned).to_vec()
}

/// Runs a server of this kind, with this client.
fn poor(kind: &str, clients: &str, options: &[&str]) -> Outcome {
    let client = this("a_client", "ASKS", clients).join(" ");
    let server = this("a_server", "KIND", kind);
    let server: Vec<&str> = server.iter().map(String::as_str).collect();
    let port = PORT.to_string();
    let options = [&["--json", "--port", &port, "--client", &client], options].concat();
    run(&options, &server)
}

#[test]
#[ignore = "a server for the other tests"]
fn a_server() {
    let Ok(kind) = std::env::var("KIND") else { return };
    if kind == "tells" {
        servers::tell();
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT)).expect("its port");
    for (n, stream) in listener.incoming().enumerate() {
        let mut stream = stream.expect("a connection");
        if kind == "closes" {
            continue;
        }
        if kind == "deaf" {
            std::mem::forget(stream);
            continue;
        }
        if kind == "ends" && n == 1 {
            // Its root's device is the one thing by which a copy can be told from the other.
            let device = fs::metadata("/").expect("a root").dev();
            std::process::exit((device & 0x7f) as i32);
        }
        let kind = kind.clone();
        thread::spawn(move || serve(&mut stream, &kind));
    }
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Answers each byte with a line of eight characters.
fn serve(stream: &mut TcpStream, kind: &str) {
    let mut byte = [0];
    while matches!(stream.read(&mut byte), Ok(1)) {
        let number = match kind {
            // Reads, is interrupted, and writes: what others counted meanwhile is lost.
            "races" => {
                let before = COUNTER.load(Ordering::SeqCst);
                for _ in 0..50 {
                    thread::yield_now();
                }
                COUNTER.store(before + 1, Ordering::SeqCst);
                before
            }
            "clock" => {
                let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                since.expect("after 1970").as_micros() as u64
            }
            "chance" => {
                let mut device = [0; 4];
                let mut file = fs::File::open("/dev/urandom").expect("/dev/urandom");
                file.read_exact(&mut device).expect("chance");
                // Its keys come from getrandom.
                let state = std::hash::RandomState::new();
                let hash = std::hash::BuildHasher::hash_one(&state, 1);
                hash ^ u64::from(u32::from_ne_bytes(device))
            }
            "tsc" => servers::time_stamp(),
            _ => COUNTER.fetch_add(1, Ordering::SeqCst),
        };
        if stream
            .write_all(format!("{:07}\n", number % 10_000_000).as_bytes())
            .is_err()
        {
            return;
        }
    }
}

#[test]
#[ignore = "a client for the other tests"]
fn a_client() {
    let Ok(asks) = std::env::var("ASKS") else { return };
    let numbers = asks
        .split('x')
        .map(|number| number.parse::<u64>().expect("a number"));
    let numbers: Vec<u64> = numbers.collect();
    let [connections, questions, ref seconds @ ..] = numbers[..] else {
        panic!("{asks} is not CONNECTIONSxQUESTIONS");
    };
    let patience = seconds.first().copied().map_or(BOUND, Duration::from_secs);
    let server = std::env::var("SERVER").expect("the tester names it");
    let ask = move || {
        let mut stream = TcpStream::connect((server.as_str(), PORT)).expect("a connection");
        stream.set_read_timeout(Some(patience)).expect("a patience");
        let mut answer = [0; 8];
        for _ in 0..questions {
            if stream.write_all(b"?").is_err() || stream.read_exact(&mut answer).is_err() {
                return;
            }
        }
    };
    let threads: Vec<_> = (0..connections).map(|_| thread::spawn(ask.clone())).collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().expect("a client"));
}

#[test]
fn redis_with_many_clients_says_the_same_where_reads_are_ordered() {
    if !can_run() {
        return;
    }
    for clients in ["16", "50"] {
        let bench = format!("redis-benchmark -h $SERVER -t incr -c {clients} -n 3000 -q >/dev/null");
        let options = ["--json", "--patience-ms", "9000", "--client", &bench];
        let outcome = run(&options, &redis());
        outcome.comes_to(0);
        assert!(outcome.number("outputs") >= 3000);
        assert_eq!(outcome.number("differing"), 0);
    }
}

/// redis-server is the same executable as redis-check-rdb, which redis-tools brings: its name says what it is.
fn redis() -> [&'static str; 6] {
    let run = "exec -a redis-server redis-check-rdb \"$@\"";
    ["bash", "-c", run, "redis-server", "--protected-mode", "no"]
}

#[test]
fn three_copies_of_memcached_say_the_same_to_one_client() {
    if !can_run() || !is_there("memcached") {
        return;
    }
    let client = "exec 3<>/dev/tcp/$SERVER/11211; for n in 1 2 3 4 5 6 7 8; do \
                  printf 'set k 0 0 1\\r\\n%s\\r\\n' $n >&3; read -r stored <&3; \
                  printf 'get k\\r\\n' >&3; read -r a <&3; read -r b <&3; read -r c <&3; done";
    let client = format!("exec bash -c '{}'", client.replace('\'', "'\\''"));
    let memcached = ["memcached", "-u", "root", "-t", "4"];
    let options = ["--json", "--copies", "3", "--port", "11211", "--client", &client];
    let outcome = run(&options, &memcached);
    outcome.comes_to(0);
    assert_eq!(outcome.number("copies"), 3);
    assert!(outcome.number("outputs") >= 16);
}

#[test]
fn nginx_with_its_workers_says_the_same_with_an_agreed_clock() {
    if !can_run() || !is_there("nginx") {
        return;
    }
    let get = "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3 >/dev/null; exec 3>&-";
    let client =
        format!("exec bash -c \"for n in 1 2 3 4 5 6; do exec 3<>/dev/tcp/$SERVER/80; {get}; done\"");
    let nginx = ["nginx", "-g", "daemon off;"];
    let options = ["--json", "--port", "80", "--clock", "agreed", "--client", &client];
    let options = [&options[..], &["--patience-ms", "9000", "--order", "answer"]].concat();
    let outcome = run(&options, &nginx);
    outcome.comes_to(0);
    assert!(outcome.number("outputs") >= 6);
    assert!(outcome.number("connections_ended_alike") >= 6);
}

#[test]
fn tls_handshakes_are_alike_with_agreed_time_and_chance() {
    if !can_run() || !is_there("nginx") || !is_there("openssl") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| {
        folder
            .path()
            .join(name)
            .to_str()
            .expect("a path of text")
            .to_owned()
    };
    let made = Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
        ])
        .args(["-keyout", &at("key.pem"), "-out", &at("certificate.pem")])
        .output();
    assert!(made.expect("openssl runs").status.success());
    let settings = format!(
        "daemon off; user root; worker_processes 1; events {{}} http {{ access_log off; server {{ listen 443 ssl; \
         ssl_certificate {}; ssl_certificate_key {}; location / {{ return 200 hello; }} }} }}",
        at("certificate.pem"),
        at("key.pem")
    );
    fs::write(at("nginx.conf"), settings).expect("the settings");
    let get =
        "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | openssl s_client -quiet -connect $SERVER:443 >/dev/null 2>&1";
    let client = format!("for n in 1 2 3 4; do {get}; done; true");
    let settings = at("nginx.conf");
    let nginx = ["nginx", "-c", &settings];
    let options = ["--json", "--port", "443", "--client", &client];
    let options = [&options[..], &["--patience-ms", "3000", "--order", "answer"]].concat();
    let own = run(&options, &nginx);
    own.comes_to(1);
    let agreed = [&options[..], &["--clock", "agreed", "--chance", "agreed"]].concat();
    let agreed = run(&agreed, &nginx);
    agreed.comes_to(0);
    assert!(agreed.number("outputs") >= 4);
}

fn is_there(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&paths)
        .chain(["/usr/sbin".into()])
        .any(|folder| folder.join(program).exists());
    if !there {
        skip(&format!("{program} is not installed (cargo xtask setup)"));
    }
    there
}

#[test]
fn a_race_is_found_and_shown() {
    if !can_run() {
        return;
    }
    let raced = poor("races", "8x200", &["--order", "delivery"]);
    raced.comes_to(1);
    let report: serde_json::Value = serde_json::from_str(&raced.report).expect("JSON");
    assert!(report["differing"].as_u64() > Some(0), "{report}");
    assert_eq!(report["verdict"], "different");
    let first = &report["first_difference"];
    assert_ne!(first["copy_1"], first["other"]);
    assert!(
        first["input"][0].as_str().is_some_and(|dump| dump.contains("3f")),
        "{first}"
    );
    // One question at a time leaves nothing to race for.
    poor("races", "8x20", &["--patience-ms", "9000", "--order", "answer"]).comes_to(0);
}

#[test]
fn an_agreed_clock_makes_answers_with_the_time_alike() {
    if !can_run() {
        return;
    }
    poor("clock", "1x30", &[]).comes_to(1);
    poor(
        "clock",
        "1x30",
        &["--clock", "agreed", "--patience-ms", "9000", "--order", "answer"],
    )
    .comes_to(0);
}

#[test]
fn whoever_reads_the_processors_own_clock_is_told_where() {
    if !can_run() {
        return;
    }
    let own = std::env::current_exe().expect("it runs");
    let own = own.file_name().and_then(|name| name.to_str()).expect("a name");
    let read_by = |outcome: &Outcome| {
        let report: serde_json::Value = serde_json::from_str(&outcome.report).expect("JSON");
        let places = report["tsc"]["places"].as_array().expect("places").clone();
        let is_own = |place: &&serde_json::Value| place[0].as_str().is_some_and(|name| name.contains(own));
        let times = places.iter().filter(is_own).filter_map(|place| place[1].as_u64());
        (
            times.clone().count(),
            times.sum::<u64>(),
            report["tsc"]["reads"].as_u64(),
        )
    };
    // Two instructions an answer, in two copies.
    let (copies, answers, instructions) = (2, 10, 2);
    let wanted = copies * answers * instructions;
    let differing = poor("tsc", "1x10", &["--tsc"]);
    let (places, times, all) = read_by(differing.comes_to(1));
    assert_eq!(
        (places as u64, times),
        (instructions, wanted),
        "{}",
        differing.report
    );
    assert!(all >= Some(wanted));
    // As the agreed time it is alike, and told all the same.
    let agreed = [
        "--tsc",
        "--clock",
        "agreed",
        "--patience-ms",
        "9000",
        "--order",
        "answer",
    ];
    let alike = poor("tsc", "1x10", &agreed);
    assert_eq!(read_by(alike.comes_to(0)).1, wanted);
    // Who counts reads none; the loader may.
    let options = ["--tsc", "--patience-ms", "9000", "--order", "answer"];
    let counts = poor("counts", "2x10", &options);
    assert_eq!(read_by(counts.comes_to(0)), (0, 0, Some(0)));
}

#[test]
fn agreed_chance_makes_answers_with_chance_alike() {
    if !can_run() {
        return;
    }
    poor("chance", "2x10", &[]).comes_to(1);
    poor("chance", "2x10", &["--chance", "agreed"]).comes_to(0);
}

#[test]
fn what_a_program_starts_by_exec_and_fork_is_behind_the_same_walls() {
    if !can_run() {
        return;
    }
    let client = this("a_client", "ASKS", "1x10").join(" ");
    for (kind, source) in [("clock", "--clock"), ("chance", "--chance")] {
        let server = this("a_server", "KIND", kind).join(" ");
        for script in [format!("exec {server}"), format!("{server} & wait")] {
            let options = [
                "--json",
                "--patience-ms",
                "9000",
                "--order",
                "answer",
                source,
                "agreed",
                "--client",
                &client,
            ];
            run(&options, &["sh", "-c", &script]).comes_to(0);
        }
    }
}

#[test]
fn the_walls_hold() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path of text");
    servers::favoured();
    poor("tells", "1x1", &["--logs", logs]).comes_to(0);
    let told: Vec<String> = (1..=2)
        .map(|copy| fs::read_to_string(folder.path().join(format!("copy-{copy}.log"))).expect("its log"))
        .collect();
    assert_eq!(told[0], told[1]);
    for line in [
        "NoNewPrivs:\t1",
        "Pid:\t2",
        "ring -1 Some(38)",
        // EPERM, EPERM, ENOSYS, EAFNOSUPPORT, ENOMEM, ENOSYS.
        "refused [1, 1, 38, 97, 12, 38]",
        "mode of null Err(Some(30))",
        "writes to null true",
        "host program",
        "wrote true",
        "writable []",
        "nice [\"0\", \"0\"]",
        "real time [\"0\", \"0\"]",
        "locks little true",
        "goes last false",
        "disks false",
    ] {
        assert!(told[0].lines().any(|told| told == line), "{line}: {}", told[0]);
    }
    for set in ["CapBnd:\t", "CapEff:\t", "CapInh:\t"] {
        let has = told[0].lines().find_map(|line| line.strip_prefix(set));
        let has = u64::from_str_radix(has.expect("its capabilities"), 16).expect("a number");
        // Not CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_MKNOD.
        assert_eq!(has & (1 << 21 | 1 << 12 | 1 << 19 | 1 << 27), 0, "{set}");
    }
    assert!(!Path::new("/etc/dunlin-was-here").exists());
}

#[test]
fn poor_programs_are_told_in_one_line() {
    if !can_run() {
        return;
    }
    let words = "echo this is all that I do >&2; exit 7";
    let exits = run(&["--client", "true"], &["sh", "-c", words]);
    exits
        .comes_to(2)
        .complains_of("ended with exit code 7 before it served; its last words: this is all that I do");
    let missing = run(&["--client", "true"], &["/does/not/exist"]);
    missing
        .comes_to(2)
        .complains_of("/does/not/exist: No such file or directory");
    let background = run(&["--client", "true"], &["sh", "-c", "sleep 60 &"]);
    background
        .comes_to(2)
        .complains_of("it went into the background; start it in the foreground");
    let mute = run(&["--start-within", "1", "--client", "true"], &["sleep", "60"]);
    mute.comes_to(2).complains_of("listen");
    let nobody = run(&["--client", "true", "--user", "nobody-has-this-name"], &["true"]);
    nobody.comes_to(2).complains_of("there is no such user");
    let bridge = run(&["--bridge", "dunlin-has-none"], &["true"]);
    bridge
        .comes_to(2)
        .complains_of("this host has no bridge of that name");
    let client = run(&["--json", "--client", "exit 3"], &redis());
    client.comes_to(2);
    assert!(
        client.report.contains("client ended with exit code 3"),
        "{}",
        client.report
    );
}

#[test]
fn a_program_that_never_reads_or_only_closes_is_judged_as_it_is() {
    if !can_run() {
        return;
    }
    // Its answer never comes.
    let deaf = poor("deaf", "1x1x2", &[]);
    deaf.comes_to(2);
    assert!(deaf.number("not_waited_for") > 0);
    let closes = poor("closes", "2x1", &[]);
    closes.comes_to(0);
    assert_eq!(closes.number("connections_ended_alike"), 2);
    poor("ends", "2x1", &[]).comes_to(1);
}

/// A tester for clients of this host, as soon as it serves.
fn serving(address: &str, marker: &str) -> Child {
    let mut command = check(&["--json", "--port", "6379", "--address", address], &redis());
    let mut child = command
        .args(["--proc-title-template", &format!("{{title}} {marker}")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("dunlin runs");
    let mut line = String::new();
    let mut said = BufReader::new(child.stderr.as_mut().expect("its words"));
    said.read_line(&mut line).expect("its words");
    assert!(line.contains("serve at"), "{line}");
    child
}

#[test]
fn a_tester_that_is_interrupted_reports_and_leaves_nothing() {
    if !can_run() {
        return;
    }
    let marker = format!("interrupted-{}", std::process::id());
    let tester = serving("10.213.17.2/24", &marker);
    let mut client = TcpStream::connect(("10.213.17.2", 6379)).expect("a connection");
    client.write_all(b"PING\r\n").expect("a question");
    let mut answer = [0; 7];
    client.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"+PONG\r\n");
    let left = processes_with(&marker);
    assert!(left.len() > 2, "the tester and two copies");
    kill_process(Pid::from_child(&tester), Signal::INT).expect("a signal");
    let outcome = Outcome::of(tester.wait_with_output().expect("its end"));
    outcome.comes_to(0);
    assert_eq!(outcome.number("equal"), 1);
    assert!(left.iter().all(|process| ends(process, BOUND)));
}

/// Whether this host has this address.
fn has_address(address: &str) -> bool {
    let known = fs::read_to_string("/proc/net/fib_trie").expect("the host's addresses");
    known.split_whitespace().any(|word| word == address)
}

#[test]
fn a_tester_that_is_killed_leaves_nothing() {
    if !can_run() {
        return;
    }
    let marker = format!("killed-{}", std::process::id());
    let mut tester = serving("10.213.18.2/24", &marker);
    assert!(has_address("10.213.18.1"), "this host's end of the wire");
    let left = processes_with(&marker);
    assert!(left.len() > 2, "the tester and two copies");
    tester.kill().expect("a signal");
    tester.wait().expect("its end");
    assert!(left.iter().all(|process| ends(process, BOUND)));
    assert!(!has_address("10.213.18.1"), "its card is still there");
}
