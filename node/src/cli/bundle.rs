//! `support-bundle`: what whoever helps needs to see of a host, in one file, without a secret.
//!
//! **Decides**: what goes in, and what is taken out of it. **Flow**: each part is made by itself (a file, a command's words, a daemon's
//! answer) -> [`Scrubber`] -> a `.tar.gz` for its owner alone.
//! **Invariants**: 1. no byte gets into the file but through the scrubber. 2. key files and secrets are read to know what to take out, and are no
//! part themselves; of a certificate only its end is told. 3. a part that cannot be had is a line that says why, and
//! nothing else is missing for it. 4. each part, and the time that it takes, is bounded.
//! **Not here**: sending it anywhere.

mod error;
mod scrub;
mod threads;

use super::talk;
use crate::config::{HostConfig, Trust};
use crate::control::http::Conversation;
use crate::daemon::BadInput;
use crate::events::{now_ms, utc};
use anyhow::{Context, Result};
use dunlin_api::files::HostFile;
use dunlin_api::{Answer, Request};
use error::PartError;
use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;
use scrub::Scrubber;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Of one part the end counts.
const MOST_BYTES: u64 = 16 << 20;
/// No command and no daemon that is asked takes longer, or it is stuck.
const PATIENCE: Duration = Duration::from_secs(20);
/// Lines of the journal.
const JOURNAL_LINES: &str = "20000";

/// What the machine says of itself: the file's name, and the command.
const COMMANDS: [(&str, &[&str]); 8] = [
    (
        "journal.txt",
        &[
            "journalctl",
            "--no-pager",
            "--quiet",
            "--unit",
            "dunlin",
            "--lines",
            JOURNAL_LINES,
        ],
    ),
    ("kernel.txt", &["uname", "-a"]),
    ("memory.txt", &["cat", "/proc/meminfo"]),
    ("processor.txt", &["lscpu"]),
    ("links.txt", &["ip", "-details", "link", "show"]),
    ("bridges.txt", &["bridge", "link", "show"]),
    ("qemu.txt", &["qemu-system-x86_64", "--version"]),
    ("disks.txt", &["df", "-h"]),
];

/// Writes the file and says what is in it.
pub fn run(socket: &Path, config: &Path, output: Option<PathBuf>) -> Result<ExitCode> {
    let host = HostConfig::load(config);
    let name = host.as_ref().map_or("host", |host| host.name.as_str());
    let stamp: String = utc(now_ms()).chars().filter(char::is_ascii_digit).collect();
    let top = format!("dunlin-{name}-{stamp}");
    let output = output.unwrap_or_else(|| PathBuf::from(format!("{top}.tar.gz")));
    let scrubber = Scrubber::new(secrets(config, host.as_ref().ok()));
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&output)
        .map_err(|error| BadInput(format!("{}: {error}", output.display())))?;
    let written = write(file, &top, &scrubber, &parts(socket, config, host.as_ref().ok()));
    if written.is_err() {
        // Half of it is none.
        let _ = std::fs::remove_file(&output);
    }
    written.with_context(|| output.display().to_string())?;
    println!(
        "{} is written: status of host and cluster, events, logs, metrics, the daemon's threads, configuration and VMs' files of this host, \
         without keys and secrets (what was not to be had is a line there, with the reason); read it before you give it away",
        output.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// A part's name in the file, and its words.
type Part = (String, Vec<u8>);

fn write(file: File, top: &str, scrubber: &Scrubber, parts: &[Part]) -> std::io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    for (name, words) in parts {
        let words = scrubber.scrub(words);
        let mut header = tar::Header::new_gnu();
        header.set_size(words.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now_ms() / 1000);
        archive.append_data(&mut header, format!("{top}/{name}"), &words[..])?;
    }
    archive.into_inner()?.finish()?.sync_all()
}

fn parts(socket: &Path, config: &Path, host: Option<&HostConfig>) -> Vec<Part> {
    // The threads first: what they are at by themselves, before anything is asked of them.
    let mut parts = vec![
        part("version.json", Ok(super::manual::version_json().into_bytes())),
        part(
            "threads.txt",
            of_daemon(socket, |socket| Ok(threads::of(socket)?)),
        ),
        part("status.json", of_daemon(socket, status)),
        part("cluster.jsonl", cluster(socket)),
        part("events.jsonl", events(socket, host)),
        part("metrics.txt", metrics(host)),
        part("host.toml", without_secrets(config)),
    ];
    for (name, command) in COMMANDS {
        parts.push(part(name, output(command, PATIENCE)));
    }
    let Some(host) = host else { return parts };
    if let Ok(file) = std::fs::read_to_string(config)
        && let Ok(file) = toml::from_str::<HostFile>(&file)
    {
        let cluster = config.parent().unwrap_or(Path::new(".")).join(file.cluster);
        parts.push(part("cluster.toml", end_of(&cluster)));
    }
    parts.push(part("certificates.txt", certificates(host)));
    let vms = std::fs::read_dir(host.state.join("vms"))
        .into_iter()
        .flatten()
        .flatten();
    for vm in vms {
        let name = format!("vms/{}.toml", vm.file_name().to_string_lossy());
        parts.push(part(&name, end_of(&vm.path().join("vm.toml"))));
    }
    parts
}

/// A part that cannot be had says so in its place.
fn part(name: &str, words: Result<Vec<u8>, PartError>) -> Part {
    let words = words.unwrap_or_else(|why| format!("not to be had: {why}\n").into_bytes());
    (name.to_owned(), words)
}

/// What `work` comes to, if it comes to it in time; if not, its thread is left to itself.
fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, done) = crossbeam_channel::bounded(1);
    std::thread::spawn(move || {
        // Whoever waits may have lost patience.
        let _ = sender.send(work());
    });
    done.recv_timeout(patience).ok()
}

/// What is to be had by the daemon's socket. One that hangs is a reason, and the bundle is wanted then most of all.
fn of_daemon(
    socket: &Path,
    ask: impl FnOnce(&Path) -> Result<Vec<u8>, PartError> + Send + 'static,
) -> Result<Vec<u8>, PartError> {
    let socket = socket.to_owned();
    within(PATIENCE, move || ask(&socket)).unwrap_or(Err(PartError::TooLate(PATIENCE)))
}

fn status(socket: &Path) -> Result<Vec<u8>, PartError> {
    let status = talk::status(socket)?;
    Ok(serde_json::to_vec_pretty(&status)?)
}

/// All lines of one kind that the daemon answers with, or those that came in time.
fn lines(
    socket: &Path,
    asked: Request,
    line: impl Fn(&Answer) -> Option<serde_json::Result<Vec<u8>>> + Send + 'static,
) -> Result<Vec<u8>, PartError> {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (socket, hears) = (socket.to_owned(), heard.clone());
    let last = within(PATIENCE, move || {
        Conversation::connect(&socket)?.talk(&asked, |answer| {
            let mut heard = hears.lock();
            if let Some(Ok(mut line)) = line(answer)
                && (heard.len() as u64) < MOST_BYTES
            {
                heard.append(&mut line);
                heard.push(b'\n');
            }
        })
    });
    let mut heard = std::mem::take(&mut *heard.lock());
    let why = match last {
        Some(Ok(Answer::Failed { why, .. })) => PartError::Refused(why),
        Some(Ok(_)) => return Ok(heard),
        Some(Err(error)) => PartError::Client(error),
        None => PartError::TooLate(PATIENCE),
    };
    if heard.is_empty() {
        return Err(why);
    }
    heard.extend_from_slice(format!("the rest is not to be had: {why}\n").as_bytes());
    Ok(heard)
}

/// How every host of the cluster is.
fn cluster(socket: &Path) -> Result<Vec<u8>, PartError> {
    lines(socket, Request::Cluster, |answer| match answer {
        Answer::Member(member) => Some(serde_json::to_vec(member)),
        _ => None,
    })
}

/// What the daemon says; of one that does not run, what it has kept.
fn events(socket: &Path, host: Option<&HostConfig>) -> Result<Vec<u8>, PartError> {
    let asked = Request::Events {
        follow: false,
        from_now: false,
        since_ms: None,
    };
    let said = lines(socket, asked, |answer| match answer {
        Answer::Event(event) => Some(serde_json::to_vec(event)),
        _ => None,
    });
    match (said, host) {
        (Err(_), Some(host)) => end_of(&host.state.join("events.jsonl")),
        (said, _) => said,
    }
}

/// The page that Prometheus reads, if there is one.
fn metrics(host: Option<&HostConfig>) -> Result<Vec<u8>, PartError> {
    let host = host.ok_or(PartError::NoHost)?;
    let address = host.metrics.ok_or(PartError::NoMetrics)?;
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .max_redirects(0)
        // It is this host.
        .proxy(None)
        .build()
        .into();
    let read = || -> Result<Vec<u8>, ureq::Error> {
        let mut answer = agent.get(format!("http://{address}/metrics")).call()?;
        answer.body_mut().with_config().limit(MOST_BYTES).read_to_vec()
    };
    read().map_err(|error| PartError::Metrics { address, error })
}

/// The end of a file, as far as a part goes.
fn end_of(path: &Path) -> Result<Vec<u8>, PartError> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(length.saturating_sub(MOST_BYTES)))?;
        let mut words = Vec::new();
        file.take(MOST_BYTES).read_to_end(&mut words)?;
        Ok(words)
    };
    read().map_err(PartError::of(path))
}

/// The host's file with the address of `notify_url` taken out, whatever else is wrong with it.
fn without_secrets(config: &Path) -> Result<Vec<u8>, PartError> {
    let text = std::fs::read_to_string(config).map_err(PartError::of(config))?;
    let mut table: toml::Table = toml::from_str(&text).map_err(|_| PartError::NotToml)?;
    if let Some(url) = table.get_mut("notify_url") {
        *url = toml::Value::String(scrub::REMOVED.into());
    }
    Ok(toml::to_string(&table)?.into_bytes())
}

/// Everything that must not be in the file.
fn secrets(config: &Path, host: Option<&HostConfig>) -> Vec<Vec<u8>> {
    let mut secrets = Vec::new();
    let mut read = |path: &Path| secrets.extend(std::fs::read(path));
    match host.map(|host| &host.trust) {
        Some(Trust::Tls { key, .. }) => read(key),
        Some(Trust::Secret(path)) => read(path),
        _ => {}
    }
    // The authority's, on the host where it lies.
    read(&config.parent().unwrap_or(Path::new(".")).join("ca-key.pem"));
    secrets.extend(
        host.and_then(|host| host.notify_url.clone())
            .map(String::into_bytes),
    );
    secrets
}

/// How long each certificate is good.
fn certificates(host: &HostConfig) -> Result<Vec<u8>, PartError> {
    let mut words = Vec::new();
    for certificate in crate::certificates::of(&host.trust) {
        // Writing to a Vec does not fail.
        let _ = writeln!(
            words,
            "{}: good until {}",
            certificate.what,
            utc(certificate.expires_s.saturating_mul(1000))
        );
    }
    Ok(words)
}

/// What a command says, if it says it in time.
fn output(command: &[&str], patience: Duration) -> Result<Vec<u8>, PartError> {
    let (program, arguments) = command.split_first().ok_or(PartError::NoCommand)?;
    let name = || (*program).to_owned();
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| PartError::Command {
            program: name(),
            error,
        })?;
    let stdout = child.stdout.take();
    let said = within(patience, || {
        let mut words = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MOST_BYTES).read_to_end(&mut words));
        (words, read.is_some_and(|read| read.is_ok()))
    });
    // It has ended, or is stuck, or says more than is wanted.
    let _ = child.kill();
    let _ = child.wait();
    match said {
        Some((words, true)) => Ok(words),
        Some((_, false)) => Err(PartError::Unreadable(name())),
        None => Err(PartError::Stuck {
            program: name(),
            patience,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, socket};
    use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

    fn unpack(file: &Path) -> Vec<(String, String)> {
        let mut archive =
            tar::Archive::new(flate2::read::GzDecoder::new(File::open(file).expect("the file")));
        let entries = archive.entries().expect("an archive");
        entries
            .map(|entry| {
                let mut entry = entry.expect("an entry");
                let name = entry.path().expect("a name").display().to_string();
                let mut text = String::new();
                entry.read_to_string(&mut text).expect("text");
                (name.split_once('/').expect("a folder").1.to_owned(), text)
            })
            .collect()
    }

    #[test]
    fn without_a_daemon_or_a_part_the_rest_is_there_and_no_secret_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = folder.path();
        super::super::init::run(
            &home.join("c"),
            "mine",
            &[("a".into(), "10.0.0.1:7700".parse().expect("an address"))],
            Path::new("control.sock"),
            Path::new("state"),
        )
        .expect("a cluster");
        let config = home.join("c/a/host.toml");
        let mut text = std::fs::read_to_string(&config).expect("the file");
        text.insert_str(
            0,
            "notify_url = \"https://alarms.example.org/hook/s3cret-hook\"\n",
        );
        std::fs::write(&config, text).expect("written");
        let state = home.join("c/a/state");
        std::fs::create_dir_all(state.join("vms/shop")).expect("a folder");
        let key = std::fs::read_to_string(home.join("c/a/key.pem")).expect("the key");
        let line = key.lines().nth(1).expect("a line of the key");
        std::fs::write(
            state.join("vms/shop/vm.toml"),
            format!("name = 'shop'\n# {line}\n{key}"),
        )
        .expect("written");
        std::fs::write(
            state.join("events.jsonl"),
            "{\"text\":\"posted to https://alarms.example.org/hook/s3cret-hook\"}\n",
        )
        .expect("written");
        let file = home.join("bundle.tar.gz");
        run(&home.join("no.sock"), &config, Some(file.clone())).expect("it is written");
        let parts = unpack(&file);
        let words = |name: &str| {
            &parts
                .iter()
                .find(|(found, _)| found == name)
                .unwrap_or_else(|| panic!("no {name}"))
                .1
        };
        for asked in ["status.json", "cluster.jsonl", "threads.txt"] {
            let words = words(asked);
            assert!(
                words.starts_with("not to be had: no daemon answers at "),
                "{words}"
            );
            assert_eq!(words.lines().count(), 1, "{words}");
        }
        assert_eq!(
            words("metrics.txt"),
            "not to be had: host.toml names no address for metrics\n"
        );
        assert!(words("host.toml").contains("host = \"a\"") && words("host.toml").contains(scrub::REMOVED));
        assert!(words("events.jsonl").contains(scrub::REMOVED));
        assert!(words("vms/shop.toml").contains("name = 'shop'"));
        assert!(words("certificates.txt").contains("host: good until"));
        assert!(words("version.json").contains("version"));
        for (name, words) in &parts {
            for secret in [line, "PRIVATE KEY", "s3cret-hook"] {
                assert!(!words.contains(secret), "a secret is in {name}");
            }
        }
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&file).expect("the file").permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
        let again = run(&home.join("no.sock"), &config, Some(file)).expect_err("it is there");
        assert!(again.downcast_ref::<BadInput>().is_some());
    }

    #[test]
    fn a_daemon_that_is_stuck_and_metrics_that_nobody_serves_are_a_line() {
        // Nobody listens at this port, and as long as this has it nobody else can.
        let silent = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        bind(&silent, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let silent = TcpStream::from(silent);
        let gone = silent.local_addr().expect("an address");
        assert!(within(Duration::from_millis(20), || std::thread::park_timeout(PATIENCE)).is_none());
        let folder = tempfile::tempdir().expect("a folder");
        let home = folder.path().join("c");
        super::super::init::run(
            &home,
            "mine",
            &[("a".into(), "10.0.0.1:7700".parse().expect("an address"))],
            Path::new("control.sock"),
            Path::new("state"),
        )
        .expect("a cluster");
        let mut host = HostConfig::load(&home.join("a/host.toml")).expect("a host");
        host.metrics = Some(gone);
        let why = metrics(Some(&host)).expect_err("nobody is there").to_string();
        assert!(
            why.starts_with(&format!("metrics at {gone}: ")) && why.lines().count() == 1,
            "{why}"
        );
        assert!(metrics(None).is_err());
    }

    #[test]
    fn a_command_that_hangs_or_is_not_there_is_a_line() {
        let hangs = output(&["sleep", "3600"], Duration::from_millis(20));
        assert!(hangs.is_err_and(|why| why.to_string().contains("sleep does not end")));
        let missing = output(&["no-such-command"], PATIENCE);
        assert!(missing.is_err_and(|why| why.to_string().contains("no-such-command")));
        assert_eq!(
            output(&["echo", "words"], PATIENCE).expect("its words"),
            b"words\n"
        );
        // One that goes on and on is cut off.
        let endless = output(&["cat", "/dev/zero"], PATIENCE).expect("its words");
        assert_eq!(endless.len() as u64, MOST_BYTES);
    }
}
