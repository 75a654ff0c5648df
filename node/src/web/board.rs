//! One look at the cluster for all who watch it.
//!
//! **Decides**: when hosts are asked, and what watchers get. **Flow**: somebody watches ([`Board::join`]) -> once a second this host's status,
//! every two seconds each other host's ([`Request::Look`]) -> one [`Sight`], put into bytes once -> every stream sends those bytes.
//! **Invariants**: 1. while nobody watches nothing is asked and nothing is made. 2. what a look costs does not depend on how many watch. 3. nobody who
//! watches makes another one, or a VM, wait: a stream that is late gets the newest sight, and none in between. 4. a host that was
//! silent for [`SILENT`] is shown as silent. **Not here**: what is in a sight (`view`), writing it to somebody (`stream`).

use super::meaning;
use super::view::{Heard, overview};
use crate::daemon::{Daemon, members, telling};
use crate::vm::ask_host;
use bytes::Bytes;
use dunlin_api::{Answer, Event, HostStatus, Overview, Request};
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use utoipa::ToSchema;

/// How often this host is looked at, while somebody watches.
const PERIOD: Duration = Duration::from_secs(1);
/// How often another host is asked, and how long it may take over each part of its answer.
const ASK_EVERY: Duration = Duration::from_secs(2);
const ANSWERS: Duration = Duration::from_secs(5);
/// A host that is asked again and again was asked within this time.
const STALE: Duration = Duration::from_secs(3);
/// What a host has said is believed for so long.
const SILENT: Duration = Duration::from_secs(6);
/// Whoever asks for one sight waits no longer for it.
const FRESH: Duration = Duration::from_secs(3);
/// Nobody watched for so long: looks again whether anybody does.
const REST: Duration = Duration::from_secs(60);
/// Events that somebody who comes gets at once; no more are kept.
const MOST_EVENTS: usize = 200;

/// An event with its meaning.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Happened {
    /// The event.
    pub event: Event,
    /// What the event means for whoever looks after the VM. Empty if its text says everything.
    pub meaning: &'static str,
    /// How serious it is.
    pub tone: meaning::Tone,
}

/// What there is to see at one moment.
#[derive(Default)]
pub struct Sight {
    /// Rises when something in `overview` has changed; 0: nothing was seen yet.
    pub number: u64,
    /// The overview.
    pub overview: Overview,
    /// The same as it is streamed.
    pub frame: Bytes,
    /// The last events, numbered, as they are streamed.
    pub events: Arc<VecDeque<(u64, Bytes)>>,
    /// The number of the next event.
    pub next_event: u64,
}

/// What is seen, and who watches.
pub struct Board {
    daemon: Arc<Daemon>,
    watchers: watch::Sender<usize>,
    sight: watch::Sender<Arc<Sight>>,
    /// When the last look began.
    looked: watch::Sender<Option<Instant>>,
    /// A host was heard that had not been asked for long: a look is worth it at once.
    news: Notify,
    others: Mutex<BTreeMap<String, Other>>,
}

/// Another host, as it was heard last.
#[derive(Default)]
struct Other {
    heard: Heard,
    /// When it answered last, and when it was asked last, with an answer or without.
    at: Option<Instant>,
    asked: Option<Instant>,
    next_seq: u64,
    /// Events that are in no sight yet: no more than it tells at once.
    news: Vec<Event>,
}

/// Somebody watches as long as this is kept.
pub struct Watcher {
    board: Arc<Board>,
    /// The newest sight.
    pub sight: watch::Receiver<Arc<Sight>>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.board.watchers.send_modify(|count| *count -= 1);
    }
}

impl Board {
    /// Begins; asks nobody before somebody watches. On the runtime that serves the page.
    pub fn start(daemon: &Arc<Daemon>) -> Arc<Self> {
        let board = Arc::new(Self {
            daemon: daemon.clone(),
            watchers: watch::Sender::new(0),
            sight: watch::Sender::new(Arc::default()),
            looked: watch::Sender::new(None),
            news: Notify::new(),
            others: Mutex::default(),
        });
        let others = daemon.host.cluster.hosts.iter();
        for host in others.filter(|host| host.name != daemon.host.name) {
            tokio::spawn(ask_again_and_again(board.clone(), host.name.clone()));
        }
        tokio::spawn(look_again_and_again(board.clone()));
        board
    }

    /// Watches from now on.
    pub fn join(self: &Arc<Self>) -> Watcher {
        let sight = self.sight.subscribe();
        self.watchers.send_modify(|count| *count += 1);
        Watcher {
            board: self.clone(),
            sight,
        }
    }

    /// What there is to see now: by a look that is no older than they are while somebody watches, at all hosts, if that takes no longer than
    /// [`FRESH`].
    pub async fn now(self: &Arc<Self>) -> Arc<Sight> {
        let watcher = self.join();
        let begun = Instant::now();
        let mut looked = self.looked.subscribe();
        let is_fresh = |looked: &Option<Instant>| looked.is_some_and(|looked| self.is_fresh(looked, begun));
        if timeout(FRESH, looked.wait_for(is_fresh)).await.is_err() {
            tracing::debug!("not every host was heard in time");
        }
        watcher.sight.borrow().clone()
    }

    /// Whether a look was at all hosts as they are at that moment.
    fn is_fresh(&self, looked: Instant, now: Instant) -> bool {
        let others = self.others();
        let mut names = self.daemon.host.cluster.hosts.iter().map(|host| &host.name);
        looked + PERIOD >= now
            && names.all(|name| {
                let asked = others.get(name).and_then(|other| other.asked);
                *name == self.daemon.host.name
                    || asked.is_some_and(|asked| asked <= looked && asked + STALE >= now)
            })
    }

    /// The host that leads that VM, if this host has no part in it.
    pub fn leader_of(&self, vm: &str) -> Option<String> {
        let sight = self.sight.borrow();
        let vm = sight.overview.vms.iter().find(|known| known.name == vm)?;
        vm.primary.clone()
    }

    fn others(&self) -> MutexGuard<'_, BTreeMap<String, Other>> {
        self.others.lock()
    }

    async fn is_watched(&self) {
        let mut watchers = self.watchers.subscribe();
        // Its sender is in this board.
        while !matches!(
            timeout(REST, watchers.wait_for(|count| *count > 0)).await,
            Ok(Ok(_))
        ) {}
    }

    /// Asks another host.
    fn ask(&self, name: &str) {
        let since = self.others().get(name).map_or(0, |other| other.next_seq);
        let (mut status, mut member, mut news) = (None, None, Vec::new());
        let answer = ask_host(
            &self.daemon.host,
            name,
            &Request::Look { since },
            ANSWERS,
            &mut |answer| match answer {
                Answer::Status(said) => status = Some((**said).clone()),
                Answer::Member(said) => member = Some((**said).clone()),
                // However much it says.
                Answer::Event(event) if news.len() < MOST_EVENTS => news.push(event.clone()),
                _ => {}
            },
        );
        let mut others = self.others();
        let other = others.entry(name.to_owned()).or_default();
        if other
            .asked
            .replace(Instant::now())
            .is_none_or(|asked| asked.elapsed() > STALE)
        {
            self.news.notify_one();
        }
        match answer {
            Answer::Done { .. } => {
                other.at = Some(Instant::now());
                other.heard = Heard {
                    status,
                    member,
                    problem: None,
                };
                if let Some(last) = news.last() {
                    other.next_seq = last.seq + 1;
                }
                other.news.extend(news);
                let surplus = other.news.len().saturating_sub(MOST_EVENTS);
                other.news.drain(..surplus);
            }
            Answer::Failed { why, .. } => other.heard.problem = Some(why),
            _ => other.heard.problem = Some(format!("host '{name}' says something else than how it is")),
        }
    }

    /// Looks at this host, and puts it together with what the others have said.
    fn look(&self, own_next: &mut u64) {
        let begun = Instant::now();
        self.see(own_next);
        self.looked.send_replace(Some(begun));
    }

    fn see(&self, own_next: &mut u64) {
        let status: HostStatus = telling::status(&self.daemon);
        let member = members::this(&self.daemon);
        let mut news = telling::last_events(&self.daemon, *own_next);
        if let Some(last) = news.last() {
            *own_next = last.seq + 1;
        }
        let here = self.daemon.host.name.as_str();
        let mut heard = BTreeMap::new();
        for (name, other) in self.others().iter_mut() {
            news.append(&mut other.news);
            heard.insert(name.clone(), other.heard());
        }
        heard.insert(
            here.to_owned(),
            Heard {
                status: Some(status),
                member: Some(member),
                problem: None,
            },
        );
        news.sort_by_key(|event| event.time_ms);
        let overview = overview(&self.daemon.host.cluster, here, &heard);
        let before = self.sight.borrow().clone();
        let is_new = before.number == 0 || before.overview != overview;
        if !is_new && news.is_empty() {
            return;
        }
        let (events, next_event) = with_news(&before, news);
        let frame = match is_new {
            true => frame("overview", None, &overview),
            false => before.frame.clone(),
        };
        self.sight.send_replace(Arc::new(Sight {
            number: before.number + u64::from(is_new),
            overview,
            frame,
            events,
            next_event,
        }));
    }
}

impl Other {
    /// What is believed of it now.
    fn heard(&self) -> Heard {
        match self.at.is_some_and(|at| at.elapsed() <= SILENT) {
            // One question that failed is no silence.
            true => Heard {
                problem: None,
                ..self.heard.clone()
            },
            // Without a problem it is being asked.
            false => Heard {
                problem: self.heard.problem.clone(),
                ..Heard::default()
            },
        }
    }
}

fn with_news(before: &Sight, news: Vec<Event>) -> (Arc<VecDeque<(u64, Bytes)>>, u64) {
    if news.is_empty() {
        return (before.events.clone(), before.next_event);
    }
    let mut events = (*before.events).clone();
    let mut next = before.next_event;
    for event in news {
        let (tone, meaning) = meaning::of(&event.kind);
        let happened = Happened { event, meaning, tone };
        events.push_back((next, frame("happened", Some(next), &happened)));
        next += 1;
    }
    let surplus = events.len().saturating_sub(MOST_EVENTS);
    events.drain(..surplus);
    (Arc::new(events), next)
}

/// One event of a stream, as browsers' EventSource reads it. JSON has no line's end in it.
fn frame(kind: &str, id: Option<u64>, data: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(data).unwrap_or_else(|_| "null".to_owned());
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("event: {kind}\n{id}data: {data}\n\n").into()
}

async fn look_again_and_again(board: Arc<Board>) {
    let mut own_next = 0;
    loop {
        board.is_watched().await;
        let looking = board.clone();
        let look = spawn_blocking(move || {
            looking.look(&mut own_next);
            own_next
        });
        match look.await {
            Ok(next) => own_next = next,
            // The daemon ends.
            Err(_) => return,
        }
        let _ = timeout(PERIOD, board.news.notified()).await;
    }
}

async fn ask_again_and_again(board: Arc<Board>, name: String) {
    loop {
        board.is_watched().await;
        let (asking, of) = (board.clone(), name.clone());
        if spawn_blocking(move || asking.ask(&of)).await.is_err() {
            return;
        }
        sleep(ASK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::EventKind;

    fn event(seq: u64) -> Event {
        Event {
            seq,
            time_ms: seq,
            host: "a".into(),
            vm: "shop".into(),
            kind: EventKind::Protected,
            text: "two\nlines: \u{2028}</script>".into(),
        }
    }

    #[test]
    fn events_are_bounded_and_each_is_one_frame_whatever_its_text() {
        let mut sight = Sight::default();
        for round in 0..10 {
            let news = (0..MOST_EVENTS as u64)
                .map(|seq| event(1000 * round + seq))
                .collect();
            let (events, next_event) = with_news(&sight, news);
            sight = Sight {
                events,
                next_event,
                ..Sight::default()
            };
            assert_eq!(sight.events.len(), MOST_EVENTS);
        }
        assert_eq!(sight.next_event, 10 * MOST_EVENTS as u64);
        for (number, frame) in sight.events.iter() {
            let text = std::str::from_utf8(frame).expect("text");
            let lines: Vec<&str> = text.split('\n').collect();
            assert_eq!(lines.len(), 5, "{text}");
            assert_eq!(lines[1], format!("id: {number}"));
            assert!(lines[2].starts_with("data: {"), "{text}");
        }
    }

    #[test]
    fn a_host_that_was_heard_is_believed_until_it_is_silent() {
        let mut other = Other::default();
        assert!(other.heard().status.is_none() && other.heard().problem.is_none());
        other.heard.problem = Some("refused".into());
        assert_eq!(other.heard().problem.as_deref(), Some("refused"));
        other.heard.status = Some(HostStatus::default());
        other.at = Some(Instant::now());
        let heard = other.heard();
        assert!(heard.status.is_some() && heard.problem.is_none());
        other.at = Instant::now().checked_sub(2 * SILENT);
        let heard = other.heard();
        assert!(heard.status.is_none() && heard.problem.is_some());
    }
}
