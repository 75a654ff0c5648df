//! The API of a real daemon, as programs and hostile pages speak to it: answers are what the document says, roles are those of the control socket, and
//! whoever is slow, greedy or from elsewhere gets nothing and disturbs nobody.
//!
//! Other users need root; told as skipped without it. Three hosts: `api_cluster.rs`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use daemon::{Host, OPERATOR, ROOT, STRANGER, User, VIEWER};
use document::Document;
use dunlin_api::files::{VmFile, VmTable};
use dunlin_guest::probe;
use dunlin_vmtest::is_root;
use http::{Said, request, speak};
use serde_json::{Value, json};

#[path = "common/daemon.rs"]
mod daemon;
#[path = "common/document.rs"]
mod document;
#[path = "common/http.rs"]
mod http;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// Method, address, headers, and the status of the answer.
type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], u16);
/// Requests of one who reads no answer: together many megabytes.
const ASKED: usize = 400;
/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);

/// Hosts that were started: each has an address of its own, so that no port of it is somebody else's.
static STARTED: AtomicU8 = AtomicU8::new(0);

/// A host with a page.
struct Served {
    host: Host,
    page: SocketAddr,
}

impl Served {
    fn start(more: &str) -> Result<Self> {
        let mut host = Host::new()?;
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let [.., high, low] = std::process::id().to_be_bytes();
        let page = SocketAddr::from(([127, 1 + high % 250, low, 1 + number], 7702));
        host.configure(&format!("page = \"{page}\"\n{more}"))?;
        host.start()?;
        Ok(Self { host, page })
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.page)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn say(&self, text: &str) -> Result<Said> {
        let mut stream = self.connect()?;
        stream.write_all(text.as_bytes())?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        Said::of(&said)
    }

    fn get(&self, path: &str) -> Result<Said> {
        self.say(&request("GET", path, &[], ""))
    }

    fn token(&self) -> Result<String> {
        let me = self.get("/api/v1/me")?.json()?;
        Ok(me["token"].as_str().context("a token")?.to_owned())
    }

    /// What changes something.
    fn order(&self, method: &str, path: &str, body: &Value) -> Result<Said> {
        let token = self.token()?;
        self.say(&request(
            method,
            path,
            &[("X-Dunlin-Token", &token)],
            &body.to_string(),
        ))
    }

    /// The same by a process of that user.
    fn say_as(&self, user: User, text: &str) -> Result<Said> {
        let mut shell = Command::new("/bin/bash");
        shell.uid(user.1).gid(user.2).current_dir("/");
        speak(shell, self.page, text)
    }
}

#[test]
fn what_is_answered_is_what_the_document_says() -> Result<()> {
    let served = Served::start("")?;
    let document = Document::of(served.get("/api/v1/openapi.json")?.json()?)?;
    let mut asked = 0;
    for path in [
        "/api/v1/me",
        "/api/v1/overview",
        "/api/v1/status",
        "/api/v1/events",
        "/api/v1/events?limit=1&since_ms=1",
        "/api/v1/cluster",
        "/api/v1/logs",
    ] {
        let said = served.get(path)?;
        ensure!(said.status == 200, "{path}: {said:?}");
        document.check(
            "get",
            path.split('?').next().unwrap_or(path),
            said.status,
            &said.json()?,
        )?;
        asked += 1;
    }
    ensure!(
        served.get("/api/v1/events?limit=1")?.json()?["events"]
            .as_array()
            .map(Vec::len)
            == Some(1)
    );
    let refusals = [
        ("GET", "/api/v1/vms/{vm}", json!(null), 404),
        ("GET", "/api/v1/events?limit=many", json!(null), 400),
        ("GET", "/api/v1/events?sinse=1", json!(null), 400),
        ("POST", "/api/v1/vms/{vm}/switchover", json!({}), 400),
        ("POST", "/api/v1/vms/{vm}/protect", json!({"alone": true}), 400),
        ("POST", "/api/v1/vms/{vm}/protect", json!({"alne": true}), 400),
        ("POST", "/api/v1/vms/{vm}/down", json!({"now": 3}), 400),
        ("POST", "/api/v1/vms/{vm}/down", json!({}), 400),
        ("POST", "/api/v1/vms/{vm}/policy", json!({"policy": "remus"}), 400),
        ("POST", "/api/v1/vms/{vm}/policy", json!({}), 400),
        ("POST", "/api/v1/vms/{vm}/verify-disk", json!({}), 400),
        ("POST", "/api/v1/vms/{vm}/replace", json!({"host": "b"}), 400),
        ("POST", "/api/v1/vms/{vm}/move", json!({"backup": "d"}), 400),
        ("POST", "/api/v1/vms", json!({"text": "name = 3"}), 400),
        (
            "POST",
            "/api/v1/check",
            json!({"text": "name = 3", "origin": "shop.toml"}),
            400,
        ),
        ("POST", "/api/v1/check", json!("no object"), 400),
        ("GET", "/api/v1/events?follow=true", json!(null), 400),
        ("POST", "/api/v1/vms/{vm}/inject", json!({"fault": "none"}), 400),
        ("GET", "/api/v1/vms/{vm}/printed?lines=1", json!(null), 400),
        ("GET", "/api/v1/vms/{vm}/printed?lines=all", json!(null), 400),
        ("GET", "/api/v1/hosts/{host}/keys", json!(null), 400),
        ("POST", "/api/v1/hosts/{host}/keys", json!({"step": "lose"}), 400),
        ("POST", "/api/v1/logs", json!({"log": "jobs"}), 400),
        (
            "POST",
            "/api/v1/logs",
            json!({"log": "jobs", "hosts": ["b"]}),
            400,
        ),
        ("GET", "/api/v1/logs/{log}", json!(null), 400),
        ("GET", "/api/v1/logs/{log}/entries", json!(null), 400),
        ("GET", "/api/v1/logs/{log}/entries?frm=1", json!(null), 400),
        ("DELETE", "/api/v1/logs/{log}", json!(null), 400),
    ];
    for (method, path, body, status) in refusals {
        let real = ["{vm}", "{host}", "{log}"]
            .iter()
            .fold(path.to_owned(), |path, name| {
                path.replace(name, "no%20such%0aname")
            });
        let said = match method {
            "GET" => served.get(&real)?,
            method => served.order(method, &real, &body)?,
        };
        ensure!(said.status == status, "{method} {real} {body}: {said:?}");
        let answer = said.json()?;
        document.check(
            &method.to_lowercase(),
            path.split('?').next().unwrap_or(path),
            status,
            &answer,
        )?;
        ensure!(
            answer["why"].as_str().is_some_and(|why| !why.is_empty()),
            "{answer}"
        );
        asked += 1;
    }
    ensure!(
        document.unused().is_empty(),
        "in the document and not asked for: {:?}",
        document.unused()
    );
    println!("{asked} answers are what the document says");
    for (method, path, status) in [
        ("GET", "/api/v1/nothing", 404),
        ("POST", "/page.js", 405),
        ("PUT", "/api/v1/me", 405),
    ] {
        let token = served.token()?;
        let said = served.say(&request(method, path, &[("X-Dunlin-Token", &token)], ""))?;
        ensure!(said.status == status, "{method} {path}: {said:?}");
    }
    Ok(())
}

#[test]
fn a_host_says_whether_vms_get_kvm_there() -> Result<()> {
    let served = Served::start("")?;
    let status = served.get("/api/v1/status")?.json()?;
    ensure!(status["kvm"] == json!(probe::has_kvm()), "{status}");
    Ok(())
}

#[test]
fn the_files_that_people_write_are_what_the_document_says() -> Result<()> {
    let served = Served::start("")?;
    let document = Document::of(served.get("/api/v1/openapi.json")?.json()?)?;
    let host = served.host.file();
    let cluster = host.with_file_name("cluster.toml");
    let fits = |kind: &str, toml: &str| document.check_type(kind, &toml::from_str(toml)?);
    fits("HostFile", &std::fs::read_to_string(&host)?)?;
    fits("ClusterFile", &std::fs::read_to_string(cluster)?)?;
    let vm = "name = \"v\"\nmembers = [\"a\"]\npolicy = \"none\"\n[sync]\nquiet_ms = 500\n[vm]\nmemory_mib = 64\nkernel = \"/k\"\n\
              [[vm.disks]]\npath = \"/d\"\n[[vm.nics]]\nmac = \"52:54:00:12:34:56\"\n";
    fits("VmFile", vm)?;
    // What another program fills and writes is taken as well.
    let filled = VmFile {
        vm: Some(VmTable::new(64)),
        ..VmFile::new("v", &["a"])
    };
    fits("VmFile", &toml::to_string(&filled)?)?;
    document.check_type("VmFile", &serde_json::to_value(&filled)?)?;
    for (good, bad) in [
        ("memory_mib", "memroy_mib"),
        ("\"none\"", "\"nobody\""),
        ("[vm]", "[vm]\nmachine = \"mac\""),
        ("name = \"v\"\n", ""),
    ] {
        ensure!(fits("VmFile", &vm.replace(good, bad)).is_err(), "{bad} is taken");
    }
    Ok(())
}

#[test]
fn lines_are_what_the_document_says_and_end_with_the_last_answer() -> Result<()> {
    let served = Served::start("")?;
    let document = Document::of(served.get("/api/v1/openapi.json")?.json()?)?;
    let token = served.token()?;
    // Without chunks: the answer is what stands there.
    let lines = |method: &str, path: &str, body: &str| {
        let headers = [
            ("Accept", "application/x-ndjson"),
            ("X-Dunlin-Token", token.as_str()),
        ];
        let text = request(method, path, &headers, body).replacen("HTTP/1.1", "HTTP/1.0", 1);
        served.say(&text)
    };
    let cases = [
        ("GET", "/api/v1/events", "", "host-begins", "done"),
        ("GET", "/api/v1/cluster", "", "\"host\":\"a\"", "done"),
        (
            "GET",
            "/api/v1/hosts/{host}/keys",
            "",
            "BEGIN CERTIFICATE",
            "keys",
        ),
        (
            "POST",
            "/api/v1/logs",
            "{\"log\":\"jobs\",\"hosts\":[\"a\"]}",
            "is on a",
            "done",
        ),
        ("GET", "/api/v1/logs", "", "\"name\":\"jobs\"", "done"),
        ("GET", "/api/v1/logs/{log}", "", "\"said\":\"status\"", "done"),
        ("GET", "/api/v1/logs/{log}/entries", "", "", "done"),
        ("DELETE", "/api/v1/logs/{log}", "", "jobs", "done"),
    ];
    for (method, path, body, wanted, last) in cases {
        let real = path.replace("{host}", "a").replace("{log}", "jobs");
        let said = lines(method, &real, body)?;
        ensure!(
            said.status == 200 && said.head.contains("content-type: application/x-ndjson"),
            "{method} {real}: {said:?}"
        );
        document.check_lines(&method.to_lowercase(), path, &said.body)?;
        let line: Value = serde_json::from_str(said.body.lines().last().context("a line")?)?;
        ensure!(
            said.body.contains(wanted) && line["answer"] == last,
            "{method} {real}: {said:?}"
        );
    }
    // What nothing was done of is refused as all else is.
    let said = lines("POST", "/api/v1/vms/shop/switchover", "{}")?;
    ensure!(said.status == 400 && said.json()?["code"] == 2, "{said:?}");
    document.check("post", "/api/v1/vms/{vm}/switchover", 400, &said.json()?)
}

#[test]
fn pages_of_other_sites_names_of_other_hosts_and_changes_without_a_token_are_refused() -> Result<()> {
    let served = Served::start("")?;
    let token = served.token()?;
    let down = "/api/v1/vms/shop/down";
    let own = format!("http://localhost:{}", served.page.port());
    let host = format!("localhost:{}", served.page.port());
    let cases: [Case; 9] = [
        ("GET", "/", &[("Host", "evil.example")], 421),
        (
            "GET",
            "/api/v1/overview",
            &[("Sec-Fetch-Site", "cross-site")],
            403,
        ),
        (
            "GET",
            "/",
            &[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")],
            200,
        ),
        ("POST", down, &[], 403),
        ("POST", down, &[("X-Dunlin-Token", "0")], 403),
        (
            "POST",
            down,
            &[("X-Dunlin-Token", &token), ("Origin", "https://evil.example")],
            403,
        ),
        (
            "POST",
            down,
            &[("X-Dunlin-Token", &token), ("Host", &host), ("Origin", &own)],
            400,
        ),
        (
            "OPTIONS",
            down,
            &[
                ("Origin", "https://evil.example"),
                ("Access-Control-Request-Method", "POST"),
            ],
            403,
        ),
        ("GET", "/../../etc/passwd", &[], 404),
    ];
    for (method, path, headers, status) in cases {
        let said = served.say(&request(method, path, headers, ""))?;
        ensure!(said.status == status, "{method} {path} {headers:?}: {said:?}");
        ensure!(!said.head.contains("access-control-allow"), "{said:?}");
        for word in [
            "content-security-policy: default-src 'none'",
            "x-content-type-options: nosniff",
            "cache-control: no-store",
        ] {
            ensure!(said.head.contains(word), "{method} {path}: no {word} in {said:?}");
        }
    }
    Ok(())
}

#[test]
fn it_is_served_to_this_machine_alone_or_not_at_all() -> Result<()> {
    for (page, words) in [
        ("0.0.0.0:7702", "for itself alone"),
        ("[::]:7702", "for itself alone"),
        ("localhost", "neither an address"),
    ] {
        let mut host = Host::new()?;
        host.configure(&format!("page = \"{page}\""))?;
        let why = host.start().err().context("it starts")?.to_string();
        ensure!(
            why.contains(words) && why.trim().lines().count() == 1,
            "{page}: {why}"
        );
    }
    let mut host = Host::new()?;
    host.configure("page = \"off\"")?;
    host.start()
}

#[test]
fn roles_are_those_of_the_control_socket() -> Result<()> {
    if !is_root() {
        skipped::skip("becoming another user needs root");
        return Ok(());
    }
    let alone = Served::start("")?;
    for user in [OPERATOR, VIEWER, STRANGER] {
        for path in ["/", "/api/v1/overview", "/api/v1/me"] {
            let said = alone.say_as(user, &request("GET", path, &[], ""))?;
            ensure!(
                said.status == 403 && said.body.contains("may not talk to this daemon"),
                "{} {path}: {said:?}",
                user.0
            );
        }
    }
    ensure!(alone.say_as(ROOT, &request("GET", "/", &[], ""))?.status == 200);
    drop(alone);

    let served = Served::start("viewers = \"daemon\"\noperators = \"games\"")?;
    for (user, role) in [
        (VIEWER, "viewer"),
        (OPERATOR, "operator"),
        (ROOT, "administrator"),
    ] {
        let me = served
            .say_as(user, &request("GET", "/api/v1/me", &[], ""))?
            .json()?;
        ensure!(me["user"] == user.0 && me["role"] == role, "{me}");
        let token = me["token"].as_str().context("a token")?.to_owned();
        let post = |path: &str, body: Value| {
            let headers = [("X-Dunlin-Token", token.as_str())];
            served.say_as(user, &request("POST", path, &headers, &body.to_string()))
        };
        let may_operate = role != "viewer";
        let said = post("/api/v1/vms/shop/switchover", json!({}))?;
        ensure!((said.status != 403) == may_operate, "{role}: {said:?}");
        if !may_operate {
            ensure!(said.body.contains("members of group 'games'"), "{said:?}");
        }
        for (path, body) in [
            ("/api/v1/vms/shop/down", json!({"force": true})),
            ("/api/v1/vms/shop/protect", json!({"alone": true})),
            ("/api/v1/vms", json!({"text": "name = \"shop\""})),
        ] {
            let said = post(path, body)?;
            ensure!((said.status == 403) == (user != ROOT), "{role} {path}: {said:?}");
        }
    }
    let said = served.say_as(STRANGER, &request("GET", "/api/v1/overview", &[], ""))?;
    ensure!(
        said.status == 403 && said.body.contains("user 'nobody' may not talk"),
        "{said:?}"
    );
    Ok(())
}

/// Reads the stream's lines until one is as wanted.
fn await_line(stream: &mut impl BufRead, wanted: impl Fn(&str) -> bool) -> Result<String> {
    let mut line = String::new();
    while stream.read_line(&mut line)? > 0 {
        if wanted(&line) {
            return Ok(line);
        }
        line.clear();
    }
    bail!("the stream has ended")
}

#[test]
fn a_stream_begins_with_what_is_and_goes_on_with_what_happens() -> Result<()> {
    let served = Served::start("")?;
    let mut stream = served.connect()?;
    stream.write_all(request("GET", "/api/v1/stream", &[], "").as_bytes())?;
    let mut lines = BufReader::new(stream);
    let head = await_line(&mut lines, |line| line.to_lowercase().starts_with("content-type"))?;
    ensure!(head.contains("text/event-stream"), "{head}");
    let line = await_line(&mut lines, |line| line.contains("\"kind\":\"host-begins\""))?;
    let event: Value = serde_json::from_str(line.trim_start_matches("data:").trim())?;
    ensure!(
        event["event"]["host"] == "a"
            && event["meaning"] == "This host's daemon was started."
            && event["tone"] == "plain",
        "{event}"
    );
    let line = await_line(&mut lines, |line| line.contains("\"vms\":"))?;
    let overview: Value = serde_json::from_str(line.trim_start_matches("data:").trim())?;
    let document = Document::of(served.get("/api/v1/openapi.json")?.json()?)?;
    document.check_type("Overview", &overview)?;
    document.check_type("Happened", &event)?;
    let made = served.host.say(ROOT, &["log", "create", "jobs", "a"])?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    await_line(&mut lines, |line| line.contains("\"kind\":\"log-leads\""))?;
    Ok(())
}

#[test]
fn whoever_is_slow_or_greedy_is_hung_up_on_and_disturbs_nobody() -> Result<()> {
    let served = Served::start("")?;
    // Connections that say nothing, or half a request, or read nothing of a stream.
    let silent = served.connect()?;
    let mut half = served.connect()?;
    half.write_all(b"GET / HTTP/1.1\r\nHost: loc")?;
    let mut late = served.connect()?;
    late.write_all(b"POST /api/v1/check HTTP/1.1\r\nHost: localhost\r\nX-Dunlin-Token: ")?;
    late.write_all(format!("{}\r\nContent-Length: 9\r\n\r\n{{", served.token()?).as_bytes())?;
    // One that asks and asks, and reads no answer.
    let mut deaf = served.connect()?;
    let again = "GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n";
    deaf.write_all(again.repeat(ASKED).as_bytes())?;
    let begun = Instant::now();
    let mut refused = 0;
    // Heads and bodies that are too large.
    let long = "x".repeat(32 << 10);
    let said = served.say(&request("GET", "/", &[("X-Long", &long)], ""));
    refused += u32::from(said.is_err() || said.is_ok_and(|said| said.status == 431));
    let many: Vec<(String, String)> = (0..200)
        .map(|number| (format!("X-{number}"), "1".into()))
        .collect();
    let many: Vec<(&str, &str)> = many
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let said = served.say(&request("GET", "/", &many, ""));
    refused += u32::from(said.is_err() || said.is_ok_and(|said| said.status == 431));
    let token = served.token()?;
    let headers = [("X-Dunlin-Token", token.as_str())];
    let said = served.say(&request("POST", "/api/v1/check", &headers, &"y".repeat(2 << 20)));
    refused += u32::from(said.is_err() || said.is_ok_and(|said| said.status == 413));
    ensure!(refused == 3, "only {refused} of 3 were refused");
    // As many connections as there may be, and more; each is a stream that is never read.
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut stream = served.connect()?;
        if stream
            .write_all(request("GET", "/api/v1/stream", &[], "").as_bytes())
            .is_ok()
        {
            held.push(stream);
        }
    }
    let mut turned_away = 0;
    for stream in &mut held {
        let mut begin = [0; 12];
        match stream.read_exact(&mut begin) {
            Ok(()) if begin.ends_with(b"503") => turned_away += 1,
            Ok(()) => {}
            Err(_) => turned_away += 1,
        }
    }
    ensure!(
        (60..200).contains(&turned_away),
        "{turned_away} of 200 were turned away"
    );
    let status = served.host.say(ROOT, &["status"])?;
    ensure!(status.status.success(), "the control socket does not answer");
    drop(held);
    // The places are free again.
    let until = Instant::now() + PATIENCE;
    while served.get("/api/v1/me").map(|said| said.status).ok() != Some(200) {
        ensure!(Instant::now() < until, "nobody gets a place any more");
        std::thread::yield_now();
    }
    for mut idle in [silent, half] {
        let mut said = Vec::new();
        idle.read_to_end(&mut said)?;
        let said = String::from_utf8_lossy(&said);
        ensure!(said.is_empty() || said.contains("408"), "{said}");
    }
    // Who is silent has as long as who takes nothing: when one that begins now is hung up on, the deaf one has long been.
    served.connect()?.read_to_end(&mut Vec::new())?;
    let mut heard = Vec::new();
    // What was under way when it was hung up on may be cut off.
    let _ = deaf.read_to_end(&mut heard);
    let heard = String::from_utf8_lossy(&heard).matches("HTTP/1.1 200").count();
    ensure!(
        (1..ASKED).contains(&heard),
        "{heard} of {ASKED} answers were kept for it"
    );
    let mut said = String::new();
    late.read_to_string(&mut said)?;
    ensure!(said.contains(" 408 "), "{said}");
    println!(
        "idle connections were ended after {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
