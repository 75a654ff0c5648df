//! Events for somebody else: each one is posted to `notify_url` as the JSON that `dunlin events --json` prints.
//!
//! **Decides**: when an event is sent again, and when it is given up. **Flow**: [`Events`] keeps what happened -> this thread follows it as
//! `dunlin events --follow` does -> one POST after the other, in order.
//! **Invariants**: 1. whoever pushes an event never waits: the queue is the list of kept events itself, whose length is bounded, and what has
//! left it unsent is counted as lost. 2. an event is given up only when the receiver refuses it (4xx) or it has left the list. 3. a
//! receiver that hangs costs one thread, and one attempt at a time. 4. after a restart it goes on where it was, at most an hour back:
//! an event may come twice then.
//! **Not here**: the list (`events`), who reads it, alarms by Prometheus (`monitoring/`).

use crate::events::{Events, now_ms};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use dunlin_api::{Event, NotifyStatus};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use ureq::Agent;

/// How long it looks for events before it looks whether it is to end. A new event wakes it.
const LOOK: Duration = Duration::from_secs(5);
/// After a restart, what is older is not news any more.
const NEWS_MS: u64 = 3_600_000;
/// In the state folder: the number of the next event to send.
const FILE: &str = "notified";

/// How long one attempt may take, and how long it waits between two.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// One attempt, from the name's resolution to the answer.
    pub attempt: Duration,
    /// After the first attempt that failed; doubled after each.
    pub first: Duration,
    /// But no longer than this.
    pub longest: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(10),
            first: Duration::from_secs(1),
            longest: Duration::from_secs(60),
        }
    }
}

/// Why events cannot be posted to an address. It is not told: it may hold a secret.
#[derive(Debug, thiserror::Error)]
pub enum NotifyUrlError {
    /// It is something else.
    #[error("notify_url: {0}")]
    NoUri(#[from] ureq::http::uri::InvalidUri),
    /// Nothing that is posted to.
    #[error("notify_url: write http://HOST:PORT/PATH, or https")]
    NotHttp,
}

/// Whether events can be posted to that address.
///
/// # Errors
/// What is wrong with it. The address itself is not told: it may hold a secret.
pub fn check(url: &str) -> Result<(), NotifyUrlError> {
    let address: ureq::http::Uri = url.parse()?;
    match (address.scheme_str(), address.host()) {
        (Some("http" | "https"), Some(host)) if !host.is_empty() => Ok(()),
        _ => Err(NotifyUrlError::NotHttp),
    }
}

/// The thread that sends.
pub struct Notify {
    shared: Arc<Shared>,
    /// Gone when it is to end: no wait between two attempts any more.
    ending: parking_lot::Mutex<Option<Sender<()>>>,
    ended: Receiver<()>,
}

struct Shared {
    events: Events,
    sent: AtomicU64,
    failed: AtomicU64,
    lost: AtomicU64,
    /// The next event to send.
    next: AtomicU64,
    ends: AtomicBool,
    file: PathBuf,
}

/// What became of one event.
enum Outcome {
    /// Taken, or refused for good.
    Done,
    /// The daemon ends before it could be sent.
    Ends,
}

impl Notify {
    /// Sends what happens from now on, and what was not sent before the daemon ended.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn start(url: &str, events: Events, state: &Path, patience: Patience) -> std::io::Result<Self> {
        let file = state.join(FILE);
        let next = first(&file, &events);
        let shared = Arc::new(Shared {
            events,
            sent: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            next: AtomicU64::new(next),
            ends: AtomicBool::new(false),
            file,
        });
        let (ending, waits) = bounded(0);
        let (done, ended) = bounded(0);
        let (url, sends) = (url.to_owned(), shared.clone());
        std::thread::Builder::new().name("notify".into()).spawn(move || {
            let agent = Agent::config_builder()
                .timeout_global(Some(patience.attempt))
                .http_status_as_error(false)
                .max_redirects(0)
                .build()
                .into();
            let post = |event: &Event| post(&agent, &url, event);
            sends.run(post, patience, &waits);
            drop(done);
        })?;
        Ok(Self {
            shared,
            ending: Some(ending).into(),
            ended,
        })
    }

    /// How far it is.
    #[must_use]
    pub fn status(&self) -> NotifyStatus {
        let shared = &self.shared;
        NotifyStatus {
            sent: shared.sent.load(Ordering::Relaxed),
            failed: shared.failed.load(Ordering::Relaxed),
            lost: shared.lost.load(Ordering::Relaxed),
            waiting: shared
                .events
                .next_seq()
                .saturating_sub(shared.next.load(Ordering::Relaxed)),
        }
    }

    /// Sends what there is, each event once, and ends; no longer than that.
    pub fn end(&self, at_most: Duration) {
        self.shared.ends.store(true, Ordering::SeqCst);
        drop(self.ending.lock().take());
        self.shared.events.nudge();
        // Either way it ends with the daemon.
        let _ = self.ended.recv_timeout(at_most);
    }
}

/// Where the last daemon was, if that is not long ago.
fn first(file: &Path, events: &Events) -> u64 {
    let next = events.next_seq();
    let kept = std::fs::read_to_string(file)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let Some(kept) = kept.filter(|kept| *kept <= next) else {
        return next;
    };
    let since = now_ms().saturating_sub(NEWS_MS);
    let unsent = events.since(kept, None, 0);
    let news = unsent.iter().find(|event| event.time_ms >= since);
    news.map_or(next, |event| event.seq)
}

impl Shared {
    fn run(&self, post: impl Fn(&Event) -> Result<(), Failure>, patience: Patience, waits: &Receiver<()>) {
        loop {
            let next = self.next.load(Ordering::Relaxed);
            // In this order: an end that is told after the look is a nudge that ends the wait.
            let nudges = self.events.nudges();
            let ends = self.ends.load(Ordering::SeqCst);
            let found = self.events.since(next, (!ends).then_some(LOOK), nudges);
            if found.is_empty() && ends {
                return;
            }
            for event in found {
                let expected = self.next.load(Ordering::Relaxed);
                self.lost
                    .fetch_add(event.seq.saturating_sub(expected), Ordering::Relaxed);
                match self.deliver(&event, &post, patience, waits) {
                    Outcome::Done => self.went_on(event.seq + 1),
                    Outcome::Ends => return,
                }
            }
        }
    }

    fn went_on(&self, next: u64) {
        self.next.store(next, Ordering::Relaxed);
        let new = self.file.with_extension("new");
        let kept = std::fs::write(&new, next.to_string()).and_then(|()| std::fs::rename(&new, &self.file));
        if let Err(error) = kept {
            tracing::debug!("{}: {error}", self.file.display());
        }
    }

    fn deliver(
        &self,
        event: &Event,
        post: impl Fn(&Event) -> Result<(), Failure>,
        patience: Patience,
        waits: &Receiver<()>,
    ) -> Outcome {
        let mut wait = patience.first;
        let mut told = false;
        loop {
            match post(event) {
                Ok(()) => {
                    self.sent.fetch_add(1, Ordering::Relaxed);
                    if told {
                        tracing::info!("notify_url takes events again");
                    }
                    return Outcome::Done;
                }
                Err(Failure::Refused(status)) => {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(
                        "notify_url refuses an event ({}, {status}): it is not sent again",
                        event.kind
                    );
                    return Outcome::Done;
                }
                Err(Failure::Passing(why)) => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    if !told {
                        tracing::warn!("notify_url does not take events: {why}; tried again until it does");
                    }
                    told = true;
                }
            }
            if waits.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                return Outcome::Ends;
            }
            wait = (2 * wait).min(patience.longest);
        }
    }
}

enum Failure {
    /// It never will be taken.
    Refused(u16),
    /// It may be another time.
    Passing(String),
}

fn post(agent: &Agent, url: &str, event: &Event) -> Result<(), Failure> {
    let body = serde_json::to_vec(event).map_err(|_| Failure::Refused(0))?;
    let answer = agent
        .post(url)
        .header("Content-Type", "application/json")
        .send(&body[..]);
    match answer.map(|answer| answer.status().as_u16()) {
        Ok(200..300) => Ok(()),
        // Come later.
        Ok(status @ (408 | 425 | 429)) => Err(Failure::Passing(format!("it answers {status}"))),
        Ok(status @ 400..500) => Err(Failure::Refused(status)),
        Ok(status) => Err(Failure::Passing(format!("it answers {status}"))),
        // The library's words may hold the address, and that a secret.
        Err(ureq::Error::Timeout(_)) => Err(Failure::Passing("no answer in time".into())),
        Err(ureq::Error::HostNotFound) => Err(Failure::Passing("its host has no address".into())),
        Err(ureq::Error::Io(error)) => Err(Failure::Passing(error.kind().to_string())),
        Err(_) => Err(Failure::Passing("the connection fails".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{SocketAddr, TcpListener};
    use std::time::Instant;
    use tiny_http::{Response, Server};

    /// No test waits longer for what has to come.
    const BOUND: Duration = Duration::from_secs(60);

    fn quick() -> Patience {
        Patience {
            attempt: BOUND,
            first: Duration::from_millis(5),
            longest: Duration::from_millis(20),
        }
    }

    /// Answers with each status in turn, with the last one for ever; tells what it took.
    fn server(address: SocketAddr, statuses: &'static [u16]) -> (SocketAddr, Receiver<u64>) {
        let until = Instant::now() + BOUND;
        let server = loop {
            match Server::http(address) {
                Ok(server) => break server,
                // A port that was free a moment ago may be somebody else's connection's for a while.
                Err(error) => assert!(Instant::now() < until, "{address}: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let address = server.server_addr().to_ip().expect("an address");
        let (tell, taken) = bounded(100_000);
        std::thread::spawn(move || {
            let mut statuses = statuses.iter().copied().peekable();
            for mut request in server.incoming_requests() {
                let status = statuses.next().unwrap_or(200);
                assert_eq!(request.method(), &tiny_http::Method::Post);
                let event: Event = serde_json::from_reader(request.as_reader()).expect("an event");
                if request.respond(Response::empty(status)).is_ok()
                    && status < 300
                    && tell.send(event.seq).is_err()
                {
                    return;
                }
            }
        });
        (address, taken)
    }

    fn any() -> SocketAddr {
        "127.0.0.1:0".parse().expect("an address")
    }

    fn seqs(taken: &Receiver<u64>, count: usize) -> Vec<u64> {
        (0..count)
            .map(|_| taken.recv_timeout(BOUND).expect("an event"))
            .collect()
    }

    fn push(events: &Events, count: usize) {
        (0..count).for_each(|number| events.push("shop", dunlin_api::EventKind::Started, number.to_string()));
    }

    #[test]
    fn a_server_that_fails_gets_each_event_again_and_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        let (address, taken) = server(any(), &[500, 503, 429, 200, 302, 200]);
        let url = format!("http://{address}/hook?key=secret");
        let notify = Notify::start(&url, events.clone(), folder.path(), quick()).expect("a thread");
        push(&events, 10);
        assert_eq!(seqs(&taken, 10), (0..10).collect::<Vec<_>>());
        notify.end(BOUND);
        let status = notify.status();
        assert_eq!((status.sent, status.lost, status.waiting), (10, 0, 0));
        assert!(status.failed >= 4, "{status:?}");
    }

    #[test]
    fn an_event_that_is_refused_is_given_up_and_the_next_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        let (address, taken) = server(any(), &[200, 400, 200]);
        let url = format!("http://{address}/");
        let notify = Notify::start(&url, events.clone(), folder.path(), quick()).expect("a thread");
        push(&events, 3);
        assert_eq!(seqs(&taken, 2), [0, 2]);
        notify.end(BOUND);
        let status = notify.status();
        assert_eq!((status.sent, status.lost, status.failed), (2, 1, 0));
    }

    #[test]
    fn a_server_that_hangs_holds_nobody_up_and_gets_what_is_kept_when_it_comes_back() {
        const PUSHED: usize = 25_000;
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        // It takes connections, by the kernel, and never says a word.
        let hangs = TcpListener::bind(any()).expect("a socket");
        let address = hangs.local_addr().expect("its address");
        let url = format!("http://{address}/");
        let hasty = Patience {
            attempt: Duration::from_millis(300),
            ..quick()
        };
        let notify = Notify::start(&url, events.clone(), folder.path(), hasty).expect("a thread");
        // More than are kept: pushing never waits, or this would not end.
        push(&events, PUSHED);
        let first_failed = std::iter::from_fn(|| (notify.status().failed == 0).then(std::thread::yield_now));
        first_failed.for_each(drop);
        assert_eq!(notify.status().waiting, PUSHED as u64);
        drop(hangs);
        let (_, taken) = server(address, &[]);
        let mut came = vec![];
        while came.last() != Some(&(PUSHED as u64 - 1)) {
            came.push(taken.recv_timeout(BOUND).expect("an event"));
        }
        assert!(came.is_sorted() && came.len() >= 10_000, "{} came", came.len());
        notify.end(BOUND);
        let status = notify.status();
        assert_eq!(status.sent + status.lost, PUSHED as u64, "{status:?}");
        assert_eq!(status.waiting, 0);
    }

    #[test]
    fn a_new_daemon_goes_on_where_the_last_one_was() {
        let folder = tempfile::tempdir().expect("a folder");
        {
            let events = Events::open("a", folder.path());
            let (address, taken) = server(any(), &[]);
            let url = format!("http://{address}/");
            let notify = Notify::start(&url, events.clone(), folder.path(), quick()).expect("a thread");
            push(&events, 2);
            assert_eq!(seqs(&taken, 2), [0, 1]);
            notify.end(BOUND);
            // It ends, and nobody has taken this one.
            push(&events, 1);
        }
        let file = folder.path().join("events.jsonl");
        while std::fs::read_to_string(&file).unwrap_or_default().lines().count() < 3 {
            std::thread::yield_now();
        }
        let events = Events::open("a", folder.path());
        let (address, taken) = server(any(), &[]);
        let url = format!("http://{address}/");
        let notify = Notify::start(&url, events.clone(), folder.path(), quick()).expect("a thread");
        push(&events, 1);
        assert_eq!(seqs(&taken, 2), [2, 3]);
        notify.end(BOUND);
    }

    #[test]
    fn an_end_does_not_wait_for_a_server_that_is_not_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        let slow = Patience {
            first: Duration::from_secs(3600),
            longest: Duration::from_secs(3600),
            ..quick()
        };
        let notify =
            Notify::start("http://127.0.0.1:9/", events.clone(), folder.path(), slow).expect("a thread");
        push(&events, 2);
        // It waits for an hour between two attempts; this would, too.
        notify.end(BOUND);
        assert_eq!(
            notify.ended.recv_timeout(BOUND),
            Err(RecvTimeoutError::Disconnected)
        );
        assert_eq!(notify.status().sent, 0);
    }

    #[test]
    fn an_address_is_looked_at_and_never_told() {
        assert!(check("https://alarms.example.org/hook/s3cret").is_ok());
        for wrong in [
            "ftp://host/s3cret",
            "s3cret",
            "http:///s3cret",
            "http://a b/s3cret",
            "",
        ] {
            let why = check(wrong).expect_err(wrong).to_string();
            assert!(!why.contains("s3cret") && !why.contains('\n'), "{why}");
        }
    }
}
