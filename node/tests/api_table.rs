//! What docs/api.md says of each command's addresses is what the command really asks: each is said to a daemon that has what it wants, and what comes
//! in at the socket is compared with the table.
//!
//! Needs root, as whom the daemon's own user is asked.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write, copy, sink};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use daemon::Host;
use dunlin_vmtest::is_root;
use http::{Said, request};
use serde_json::{Map, Value, json};

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests have other users")]
mod daemon;
#[path = "common/http.rs"]
#[allow(dead_code, reason = "other tests have TCP")]
mod http;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);
const TABLE: &str = include_str!("../../docs/api.md");
/// A person follows events until there is nothing more to wait for.
const NUDGE: Duration = Duration::from_millis(20);

/// A daemon between a command and the real one: it answers itself what needs a VM, and notes what it is asked.
struct Between {
    folder: tempfile::TempDir,
    /// Somebody is to be at the control socket, and nobody answers there.
    _control: UnixListener,
    asked: Arc<Mutex<BTreeSet<String>>>,
    /// Connections of which nobody knows yet what they ask.
    unread: Arc<AtomicUsize>,
}

/// What those who answer know.
struct Known {
    real: PathBuf,
    document: Value,
    asked: Arc<Mutex<BTreeSet<String>>>,
    /// There is a VM until it is ended.
    has_vm: Mutex<bool>,
}

impl Between {
    fn start(real: PathBuf) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let control = UnixListener::bind(folder.path().join("dunlin.sock"))?;
        let listener = UnixListener::bind(folder.path().join("api.sock"))?;
        let asked = Arc::new(Mutex::default());
        let unread = Arc::new(AtomicUsize::new(0));
        let count = unread.clone();
        let known = Arc::new(Known {
            document: by_socket(&real, "/api/v1/openapi.json")?,
            real,
            asked: Arc::clone(&asked),
            has_vm: Mutex::new(true),
        });
        spawn(move || {
            for stream in listener.incoming().flatten() {
                let (known, unread) = (known.clone(), Unread::new(&count));
                // Whoever asked may have gone.
                spawn(move || known.answer(stream, unread).ok());
            }
        });
        Ok(Self {
            folder,
            _control: control,
            asked,
            unread,
        })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("dunlin.sock")
    }

    fn asked(&self) -> BTreeSet<String> {
        self.asked.lock().clone()
    }

    /// What was asked since the last time; also by a command that was ended a moment ago.
    fn take(&self) -> Result<BTreeSet<String>> {
        // Connections are taken in their order: those from before this one are known when it is hung up on.
        let mut last = UnixStream::connect(self.folder.path().join("api.sock"))?;
        last.shutdown(Shutdown::Write)?;
        last.read_to_end(&mut Vec::new())?;
        let until = Instant::now() + PATIENCE;
        while self.unread.load(Ordering::Acquire) > 0 {
            ensure!(Instant::now() < until, "a request is not read");
            sleep(NUDGE);
        }
        Ok(std::mem::take(&mut *self.asked.lock()))
    }
}

/// One of them.
struct Unread(Arc<AtomicUsize>);

impl Unread {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Known {
    fn answer(&self, mut stream: UnixStream, unread: Unread) -> Result<()> {
        let text = one_request(&mut stream)?;
        let mut words = text.split(' ');
        let (method, target) = (words.next().context("a method")?, words.next().context("a path")?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let template = self.template(path)?;
        let name = format!("{method} {template}");
        self.asked.lock().insert(name);
        drop(unread);
        let mut has_vm = self.has_vm.lock();
        *has_vm = match (method, template.as_str()) {
            ("POST", "/api/v1/vms/{vm}/down") => false,
            ("POST", _) => true,
            _ => *has_vm,
        };
        let is_there = *has_vm;
        drop(has_vm);
        match template.as_str() {
            "/api/v1/status" => say(
                &mut stream,
                "application/json",
                &self.status(is_there)?.to_string(),
            ),
            "/api/v1/events" if query.contains("follow=true") => {
                say(&mut stream, "application/x-ndjson", "")?;
                loop {
                    stream.write_all(b"{\"answer\":\"alive\"}\n")?;
                    sleep(NUDGE);
                }
            }
            template
                if template.starts_with("/api/v1/vms")
                    || template == "/api/v1/check"
                    || template == "/api/v1/events" =>
            {
                say(
                    &mut stream,
                    "application/x-ndjson",
                    "{\"answer\":\"done\",\"text\":\"\"}\n",
                )
            }
            _ => {
                let mut real = UnixStream::connect(&self.real)?;
                real.write_all(text.as_bytes())?;
                let (mut from, mut to) = (stream.try_clone()?, real.try_clone()?);
                spawn(move || {
                    let _ = copy(&mut from, &mut to);
                    to.shutdown(Shutdown::Both)
                });
                copy(&mut real, &mut stream)?;
                Ok(())
            }
        }
    }

    /// The address of the document that this path is one of.
    fn template(&self, path: &str) -> Result<String> {
        let fits = |template: &&String| {
            let (one, other) = (template.split('/'), path.split('/'));
            one.clone().count() == other.clone().count()
                && one
                    .zip(other)
                    .all(|(one, other)| one == other || one.starts_with('{'))
        };
        let templates = self.document["paths"]
            .as_object()
            .context("the document's addresses")?;
        // A word before a name.
        let mut fitting: Vec<&String> = templates.keys().filter(fits).collect();
        fitting.sort_by_key(|template| template.matches('{').count());
        Ok((*fitting
            .first()
            .with_context(|| format!("no such address: {path}"))?)
        .clone())
    }

    /// A host with a VM that is protected, under the policy of which the test speaks.
    fn status(&self, is_there: bool) -> Result<Value> {
        let schemas = &self.document["components"]["schemas"];
        let mut status = least(schemas, &schemas["HostStatus"])?;
        let mut vm = least(schemas, &schemas["VmStatus"])?;
        for (key, value) in [
            ("name", json!("shop")),
            ("role", json!("primary")),
            ("state", json!("running")),
            ("policy", json!("remus")),
            ("protected", json!(true)),
            ("wants_protection", json!(true)),
        ] {
            vm[key] = value;
        }
        status["host"] = json!("a");
        status["vms"] = if is_there { json!([vm]) } else { json!([]) };
        Ok(status)
    }
}

/// The shortest value of that type.
fn least(schemas: &Value, schema: &Value) -> Result<Value> {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap_or_default();
        return least(schemas, &schemas[name]);
    }
    if let Some(first) = schema["enum"].get(0) {
        return Ok(first.clone());
    }
    if let Some(all) = schema["allOf"].as_array() {
        let mut whole = Map::new();
        for one in all {
            whole.extend(least(schemas, one)?.as_object().cloned().unwrap_or_default());
        }
        return Ok(whole.into());
    }
    if let Some(first) = schema["oneOf"].get(0) {
        return least(schemas, first);
    }
    Ok(match &schema["type"] {
        Value::Array(kinds) if kinds.contains(&json!("null")) => Value::Null,
        Value::String(kind) => match kind.as_str() {
            "string" => json!(""),
            "boolean" => json!(false),
            "integer" | "number" => json!(0),
            "null" => Value::Null,
            "array" => {
                let places = schema["prefixItems"].as_array().into_iter().flatten();
                places.map(|place| least(schemas, place)).collect::<Result<_>>()?
            }
            "object" => {
                let required = schema["required"].as_array().into_iter().flatten();
                let names = required.filter_map(Value::as_str);
                let fields =
                    names.map(|name| Ok((name.to_owned(), least(schemas, &schema["properties"][name])?)));
                Value::Object(fields.collect::<Result<_>>()?)
            }
            other => bail!("a type {other}"),
        },
        _ => bail!("no type: {schema}"),
    })
}

/// Head and body.
fn one_request(stream: &mut UnixStream) -> Result<String> {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let head = head.to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.map_or(Ok(0), str::parse)? {
                return Ok(text);
            }
        }
        let read = stream.read(&mut piece)?;
        ensure!(read > 0, "it went away");
        bytes.extend_from_slice(&piece[..read]);
    }
}

fn say(stream: &mut UnixStream, kind: &str, body: &str) -> Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n");
    Ok(stream.write_all((head + body).as_bytes())?)
}

fn by_socket(api: &Path, path: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(api)?;
    stream.write_all(request("GET", path, &[], "").as_bytes())?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Said::of(&said)?.json()
}

/// How a command of the table is said, so that it does all that it may have to: each of these after the other.
fn ways(command: &str, file: &str, dir: &str) -> Vec<Vec<String>> {
    let bundle = format!("{dir}/bundle.tar.gz");
    let config = format!("{dir}/host.toml");
    let ways: Vec<Vec<&str>> = match command {
        "status" => vec![vec![], vec!["--watch"]],
        "check" | "up" => vec![vec![file]],
        "switchover" | "protect" | "verify-disk" | "down" | "logs" => vec![vec!["shop"]],
        "policy" => vec![vec!["shop", "remus"]],
        "promote" => vec![vec!["shop", "--force"]],
        "replace" => vec![vec!["shop", "b"]],
        "move" => vec![vec!["shop", "--backup", "b"]],
        "inject" => vec![vec!["shop", "none"]],
        "log create" => vec![vec!["work", "a"]],
        "log read" | "log remove" => vec![vec!["work"]],
        "log status" => vec![vec![], vec!["work"]],
        "cluster rotate" => vec![vec!["--dir", dir]],
        "cluster revoke" | "cluster token" => vec![vec!["b", "--dir", dir]],
        "support-bundle" => vec![vec!["--output", &bundle, "--config", &config]],
        _ => vec![vec![]],
    };
    let words = |way: Vec<&str>| command.split(' ').chain(way).map(str::to_owned).collect();
    ways.into_iter().map(words).collect()
}

/// Ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Until it ends. What goes on until a person ends it, ends when it has asked all that is wanted.
fn run(between: &Between, words: &[String], wanted: &BTreeSet<String>) -> Result<()> {
    let program = env!("CARGO_BIN_EXE_dunlin");
    let mut command = Command::new(program);
    if words[0] == "top" {
        // It wants a terminal.
        let line = format!("{program} --socket {} top", between.socket().display());
        command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm");
    } else {
        command.arg("--socket").arg(between.socket()).args(words);
    }
    let child = command
        .current_dir(between.folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("{words:?}"))?;
    let mut running = Running(child);
    let mut said = BufReader::new(running.0.stdout.take().context("its output")?);
    if words[..2.min(words.len())] == ["cluster", "token"] {
        come_in(&mut said, between.folder.path())?;
    }
    // What nobody reads would stop it.
    spawn(move || copy(&mut said, &mut sink()));
    let until = Instant::now() + PATIENCE;
    while running.0.try_wait()?.is_none() {
        let asked = between.asked();
        let goes_on = words[0] == "top" || words.last().is_some_and(|word| word == "--watch");
        if goes_on && asked == *wanted {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "{words:?} goes on, and has asked {asked:?}"
        );
        sleep(NUDGE);
    }
    Ok(())
}

/// The host that was told to join does so.
fn come_in(said: &mut impl BufRead, folder: &Path) -> Result<()> {
    let mut line = String::new();
    while said.read_line(&mut line)? > 0 {
        if let Some(token) = line.split_whitespace().find(|word| word.starts_with("dunlin1-")) {
            let joined = Command::new(env!("CARGO_BIN_EXE_dunlin"))
                .args(["cluster", "join", token, "--dir"])
                .arg(folder.join("b"))
                .output()?;
            let why = String::from_utf8_lossy(&joined.stderr);
            ensure!(joined.status.success(), "{why}");
            return Ok(());
        }
        line.clear();
    }
    bail!("it printed no token")
}

fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn each_command_asks_the_addresses_that_the_table_says_and_no_others() -> Result<()> {
    if !is_root() {
        skipped::skip("root's own sockets need root");
        return Ok(());
    }
    // Nobody is there who could be host b: its keys are asked for all the same.
    let mut host = Host::beside(&[("b", 9)])?;
    host.configure("page = \"off\"")?;
    host.start()?;
    let dir = host.file().parent().context("its folder")?.to_owned();
    for file in ["ca-key.pem", "issued.pem"] {
        fs::copy(dir.with_file_name(file), dir.join(file)).context(file)?;
    }
    let file = dir.join("shop.toml");
    fs::write(&file, "name = \"shop\"\n")?;
    let between = Between::start(host.socket().with_file_name("api.sock"))?;
    let section = TABLE.split("\n## Commands\n").nth(1).context("the section")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let (mut said, mut wrong) = (0, Vec::new());
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let (commands, asks) = row.trim_matches('|').split_once(" | ").context("two cells")?;
        let wanted: BTreeSet<String> = quoted(asks)
            .filter(|word| word.contains(" /"))
            .map(str::to_owned)
            .collect();
        if wanted.is_empty() {
            continue;
        }
        // The last one first: there has to be a host's certificate left that a token replaces.
        for command in quoted(commands).collect::<Vec<_>>().into_iter().rev() {
            let (file, dir) = (file.to_str().context("text")?, dir.to_str().context("text")?);
            between.take()?;
            for words in ways(command, file, dir) {
                run(&between, &words, &wanted)?;
            }
            let asked = between.take()?;
            if asked != wanted {
                wrong.push(format!(
                    "'{command}' asks {asked:?}, and docs/api.md says {wanted:?}"
                ));
            }
            said += 1;
        }
    }
    ensure!(said > 20, "only {said} commands are in the table");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
