//! Logs that programs share: who makes and removes them, and who is let in to them.
//!
//! * **Flow:** `create` asks every host (`Prepare`), then tells every host (`Install`), and takes back what it made if one refuses. A
//!   writer is served here if this host leads the log, else by the host that does. A reader is served here.
//! * **Invariants:** 1. of two creations of one name at once each host has one, and each takes back only its own (by its id): one
//!   wins, or none. 2. a log is on each host that it names, or nobody is told that it was made.
//! * **Not here:** the log's loop and conversations (`crate::logs`).

use super::error::by_control_alone;
use super::{Daemon, peers, reservations};
use crate::control::server::AnswerTo;
use crate::logs::session::{self, LEADER};
use crate::logs::{LogHandle, LogPort, MOST_LOGS, MOST_SESSIONS, store};
use crate::vm;
use dunlin_api::log::{LogAnswer, LogRecord, LogRequest};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_core::consensus::MAX_MEMBERS;
use dunlin_core::units::Term;
use dunlin_fabric::link::{Purpose, ReadHalf, Stream, WriteHalf};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A side that says nothing for so long is gone: both say something more often.
const SILENT: Duration = Duration::from_secs(60);
/// How often it is looked at whether the host that a writer was passed on to still leads.
const LOOK: Duration = Duration::from_millis(200);
/// A writer that says nothing for so long is spoken for.
const QUIET: Duration = Duration::from_secs(20);

/// Takes part in what is kept, when the daemon begins. One that cannot be read is told of, and stops nothing else.
pub fn start_all(daemon: &Arc<Daemon>) {
    for (name, record) in store::all(&daemon.host.state) {
        let begun = match record {
            Ok(record) => LogHandle::start(&daemon.host, record).map_err(|error| error.to_string()),
            Err(why) => Err(why.to_string()),
        };
        match begun {
            Ok(handle) => drop(daemon.logs().insert(name, handle)),
            Err(why) => daemon
                .host
                .events
                .push(&crate::logs::hello_name(&name), EventKind::Failed, why),
        }
    }
}

/// What a program or a person on this host asks by the control socket.
pub fn serve(daemon: &Arc<Daemon>, ask: LogRequest, mut stream: &UnixStream) {
    // A side that does not listen is not waited for.
    if stream.set_write_timeout(Some(SILENT)).is_err() {
        return;
    }
    match ask {
        LogRequest::Write { log, by } => {
            if let Err(why) = write(daemon, &log, by, stream) {
                // Whoever asked may have gone: here and below.
                let _ = stream.answer(&why);
            }
        }
        ask => converse(daemon, ask, &mut stream),
    }
}

/// What is answered by lines alone.
pub fn converse(daemon: &Daemon, ask: LogRequest, to: &mut dyn Write) {
    let answer = match ask {
        LogRequest::Create { log, hosts } => create(daemon, log, hosts),
        LogRequest::Remove { log } => remove(daemon, &log),
        LogRequest::Status { log } => status(daemon, log.as_deref(), to),
        LogRequest::Read {
            log,
            from,
            follow,
            most,
        } => match port(daemon, &log) {
            Ok(port) => return drop(session::read(&port, from, follow, most, to)),
            Err(why) => why,
        },
        LogRequest::Write { .. } => by_control_alone(),
        LogRequest::Prepare { .. } | LogRequest::Install { .. } | LogRequest::Forget { .. } => {
            Answer::refused("this is for other hosts to ask")
        }
    };
    let _ = to.answer(&answer);
}

/// What another daemon asks.
pub fn from_peer(daemon: &Daemon, ask: LogRequest) -> Answer {
    match ask {
        LogRequest::Prepare { record } => could_take_part(daemon, &record),
        LogRequest::Install { record } => install(daemon, record),
        LogRequest::Forget { log, id } => forget(daemon, &log, &id),
        _ => Answer::refused("this is not for other hosts to ask"),
    }
}

fn not_here(daemon: &Daemon, log: &str) -> Answer {
    Answer::refused(format!(
        "there is no log '{log}' on host '{}'; 'dunlin log status' lists them",
        daemon.host.name
    ))
}

fn port(daemon: &Daemon, log: &str) -> Result<LogPort, Answer> {
    let logs = daemon.logs();
    let Some(handle) = logs.get(log) else {
        drop(logs);
        return Err(not_here(daemon, log));
    };
    handle.port().ok_or_else(|| {
        Answer::failed(format!(
            "log '{log}' has {MOST_SESSIONS} conversations on this host already; end one first"
        ))
    })
}

fn status(daemon: &Daemon, log: Option<&str>, to: &mut dyn Write) -> Answer {
    let logs = daemon.logs();
    let found: Vec<_> = logs.values().map(LogHandle::status).collect();
    drop(logs);
    let wanted: Vec<_> = found
        .into_iter()
        .filter(|status| log.is_none_or(|log| log == status.name))
        .collect();
    if let (Some(log), true) = (log, wanted.is_empty()) {
        return not_here(daemon, log);
    }
    for status in wanted {
        let _ = to.answer(&Answer::Log(LogAnswer::Status(Box::new(status))));
    }
    Answer::done("")
}

/// Why there can be no such log.
#[derive(Debug, thiserror::Error)]
enum RecordError {
    /// Its name would be no folder's, or no word on a command line.
    #[error("'{0}' is no name for a log: 1 to 64 letters, digits, '-', '_' or '.', not a '.' first")]
    Name(String),
    /// So few or so many cannot agree.
    #[error("a log has 1 to {} hosts, not {count}", MAX_MEMBERS)]
    Count {
        /// How many there are to be.
        count: usize,
    },
    /// Nobody knows its address.
    #[error("host '{0}' is not in the cluster")]
    NotInCluster(String),
    /// It would have two voices.
    #[error("host '{0}' is named twice")]
    Twice(String),
}

fn check(record: &LogRecord, daemon: &Daemon) -> Result<(), RecordError> {
    let name = &record.name;
    let letters = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if name.is_empty() || name.len() > 64 || !name.chars().all(letters) || name.starts_with('.') {
        return Err(RecordError::Name(name.clone()));
    }
    if record.hosts.is_empty() || record.hosts.len() > MAX_MEMBERS {
        let count = record.hosts.len();
        return Err(RecordError::Count { count });
    }
    for (at, host) in record.hosts.iter().enumerate() {
        if daemon.host.cluster.host(host).is_none() {
            return Err(RecordError::NotInCluster(host.clone()));
        }
        if record.hosts[..at].contains(host) {
            return Err(RecordError::Twice(host.clone()));
        }
    }
    Ok(())
}

/// A log is not changed beside itself; a VM may have the same name.
fn changed(log: &str) -> String {
    format!("log {log}")
}

fn create(daemon: &Daemon, name: String, hosts: Vec<String>) -> Answer {
    let changes = daemon.changing.of(&changed(&name));
    let _one_at_a_time = changes.lock();
    let id = match reservations::draw() {
        Ok(ticket) => format!("{ticket:?}"),
        Err(why) => return Answer::failed(why.to_string()),
    };
    let record = LogRecord { name, id, hosts };
    if let Err(why) = check(&record, daemon) {
        return Answer::refused(why.to_string());
    }
    let on = |host: &str, ask: LogRequest| {
        if host == daemon.host.name {
            from_peer(daemon, ask)
        } else {
            peers::ask(daemon, host, &Request::Log(ask))
        }
    };
    for host in &record.hosts {
        let record = record.clone();
        if let failed @ Answer::Failed { .. } = on(host, LogRequest::Prepare { record }) {
            return failed;
        }
    }
    for host in &record.hosts {
        let install = LogRequest::Install {
            record: record.clone(),
        };
        if let Answer::Failed { why, code } = on(host, install) {
            for host in &record.hosts {
                // One that cannot be reached now is told by 'dunlin log remove' once it is back.
                let (log, id) = (record.name.clone(), record.id.clone());
                let _ = on(host, LogRequest::Forget { log, id });
            }
            let why = format!("no log was made: {why}");
            return Answer::Failed { why, code };
        }
    }
    Answer::done(format!("log '{}' is on {}", record.name, record.hosts.join(", ")))
}

fn could_take_part(daemon: &Daemon, record: &LogRecord) -> Answer {
    let (name, host) = (&record.name, &daemon.host.name);
    if let Err(why) = check(record, daemon) {
        return Answer::refused(format!("host '{host}': {why}"));
    }
    if !record.hosts.contains(host) {
        return Answer::refused(format!("host '{host}' has no part in log '{name}'"));
    }
    let logs = daemon.logs();
    if logs.contains_key(name) {
        return Answer::refused(format!(
            "log '{name}' is on host '{host}' already; 'dunlin log remove {name}' there takes it away"
        ));
    }
    if logs.len() >= MOST_LOGS {
        return Answer::refused(format!("host '{host}' has {MOST_LOGS} logs, and takes no more"));
    }
    Answer::done("it can")
}

fn install(daemon: &Daemon, record: LogRecord) -> Answer {
    // Another creation may have come in between (invariant 1).
    let _one_at_a_time = daemon.changing_logs.lock();
    if let failed @ Answer::Failed { .. } = could_take_part(daemon, &record) {
        return failed;
    }
    let name = record.name.clone();
    let here = |why: String| format!("host '{}': {why}", daemon.host.name);
    if let Err(error) = store::keep(&daemon.host.state, &record) {
        let _ = store::forget(&daemon.host.state, &name);
        let folder = daemon.host.state.display();
        return Answer::failed(here(format!("{folder}: the log cannot be kept: {error}")));
    }
    match LogHandle::start(&daemon.host, record) {
        Ok(handle) => {
            daemon.logs().insert(name, handle);
            Answer::done("it is here")
        }
        Err(why) => {
            let _ = store::forget(&daemon.host.state, &name);
            Answer::failed(here(why.to_string()))
        }
    }
}

fn forget(daemon: &Daemon, log: &str, id: &str) -> Answer {
    let _one_at_a_time = daemon.changing_logs.lock();
    let mut logs = daemon.logs();
    if logs.get(log).is_none_or(|handle| handle.record().id != id) {
        return Answer::done("not here");
    }
    let handle = logs.remove(log);
    drop(logs);
    if let Some(handle) = handle {
        handle.end();
    }
    match store::forget(&daemon.host.state, log) {
        Ok(()) => Answer::done("forgotten"),
        Err(error) => Answer::failed(format!(
            "{}: it could not be removed: {error}",
            store::folder(&daemon.host.state, log).display()
        )),
    }
}

fn remove(daemon: &Daemon, log: &str) -> Answer {
    let changes = daemon.changing.of(&changed(log));
    let _one_at_a_time = changes.lock();
    let Some(record) = daemon.logs().get(log).map(|handle| handle.record().clone()) else {
        return not_here(daemon, log);
    };
    let mut left = Vec::new();
    let (mine, others): (Vec<_>, Vec<_>) = record.hosts.iter().partition(|host| **host == daemon.host.name);
    // This host last: as long as it has the log, the same can be asked here again.
    for host in others.into_iter().chain(mine) {
        let (log, id) = (record.name.clone(), record.id.clone());
        let answer = if *host == daemon.host.name && !left.is_empty() {
            continue;
        } else if *host == daemon.host.name {
            forget(daemon, &log, &id)
        } else {
            peers::ask(daemon, host, &Request::Log(LogRequest::Forget { log, id }))
        };
        if let Answer::Failed { why, .. } = answer {
            left.push(why);
        }
    }
    match left.is_empty() {
        true => Answer::done(format!("log '{log}' is removed from {}", record.hosts.join(", "))),
        false => Answer::failed(format!(
            "log '{log}' is not removed everywhere, ask for it again here: {}",
            left.join("; ")
        )),
    }
}

/// A writer on this host.
fn write(daemon: &Arc<Daemon>, log: &str, by: Option<String>, stream: &UnixStream) -> Result<(), Answer> {
    if let Some(why) = session::name_fault(by.as_ref()) {
        return Err(Answer::refused(why));
    }
    let port = port(daemon, log)?;
    let leader = port
        .leader(LEADER)
        .map_err(|state| Answer::failed(format!("log '{log}' takes nothing now: {state}; try again")))?;
    let broken = |error: io::Error| Answer::failed(format!("the control socket: {error}"));
    let out = stream.try_clone().map_err(broken)?;
    if leader == daemon.host.name {
        let mut out = out;
        let _ = out.answer(&Answer::Log(LogAnswer::Open { leader }));
        session::write(&port, by, stream, out, |out| {
            let _ = out.shutdown(Shutdown::Both);
        });
        return Ok(());
    }
    let there = |why: String| {
        Answer::failed(format!(
            "host '{leader}', which leads log '{log}': {why}; try again"
        ))
    };
    let peer = vm::open(&daemon.host, "", &leader, Purpose::Control, Term(0), Vec::new());
    let peer = peer.map_err(|why| there(why.to_string()))?;
    let request = Request::Log(LogRequest::Write { log: log.into(), by });
    let still_leads = || port.leader(Duration::ZERO).as_ref() == Ok(&leader);
    pass_to(peer, &request, stream, &out, still_leads).map_err(|error| there(error.to_string()))
}

/// Passes a writer's words on to the host that leads, for as long as it does: one that stands still says nothing of its fall.
fn pass_to(
    mut peer: Stream,
    request: &Request,
    near: &UnixStream,
    out: &UnixStream,
    still_leads: impl Fn() -> bool + Sync,
) -> io::Result<()> {
    peer.set_read_timeout(Some(LOOK))?;
    peer.set_write_timeout(Some(SILENT))?;
    near.set_read_timeout(Some(QUIET))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    peer.write_all(&line)?;
    peer.flush()?;
    let (mut from_peer, mut to_peer) = peer.split();
    let still_leads = &still_leads;
    std::thread::scope(|scope| {
        let answers = std::thread::Builder::new().name("log-answers".into());
        let started = answers.spawn_scoped(scope, move || {
            answers_back(&mut from_peer, out, still_leads);
            from_peer.shutdown();
            // Whoever has heard no answer says it again.
            let _ = out.shutdown(Shutdown::Both);
        });
        if started.is_ok() {
            session::pass_on(near, &mut to_peer);
        }
        to_peer.shutdown();
    });
    Ok(())
}

fn answers_back(from: &mut impl Read, mut to: &UnixStream, still_leads: impl Fn() -> bool) {
    let mut buffer = vec![0; 64 << 10];
    let mut heard = Instant::now();
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => {
                heard = Instant::now();
                if to.write_all(&buffer[..bytes]).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if !still_leads() || heard.elapsed() >= SILENT {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// A writer of another host, which believes that this one leads.
pub fn write_here(daemon: &Arc<Daemon>, log: &str, by: Option<String>, read: ReadHalf, mut out: WriteHalf) {
    let refusal = match (session::name_fault(by.as_ref()), port(daemon, log)) {
        (Some(why), _) => Answer::refused(why),
        (None, Err(why)) => why,
        (None, Ok(port)) => match port.leader(LEADER) {
            Ok(leader) if leader == daemon.host.name => {
                let _ = out.answer(&Answer::Log(LogAnswer::Open { leader }));
                return session::write(&port, by, read, out, |out| out.shutdown());
            }
            // Never passed on twice: the asker learns of the new leader by itself.
            Ok(leader) => Answer::failed(format!("host '{leader}' leads log '{log}' now; try again")),
            Err(state) => Answer::failed(format!("log '{log}' takes nothing now: {state}; try again")),
        },
    };
    let _ = out.answer(&refusal);
}
