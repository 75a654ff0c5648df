//! Whoever looks at the metrics of all hosts, as Prometheus does: at even times, whatever happens.
//!
//! Beside the hosts' own figures it records `up` (as Prometheus would), how many answers the clients had, and when the
//! story's steps began.

use parking_lot::{Condvar, Mutex};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, ensure};

use super::{ANSWERS, EVERY, Recording, STEP, UP};
use crate::cluster::scrape;
use crate::testbed::Node;

/// The job that the hosts are in, as in docs/monitoring.md.
const JOB: &str = "dunlin";
/// A host that does not answer within this time is down. It is shorter than the time between two looks.
const ANSWER: Duration = Duration::from_millis(900);
/// A look that is late by more than this does not come at all.
const LATE: Duration = Duration::from_secs(60);

/// What the story tells.
enum Word {
    Step(String, SystemTime),
    Clients(Box<dyn Fn() -> u64 + Send>),
}

#[derive(Default)]
struct Looks {
    made: Mutex<u64>,
    one_more: Condvar,
}

/// A thread in a client's network.
pub(super) struct Scraper {
    words: Sender<Word>,
    looks: Arc<Looks>,
    thread: JoinHandle<Result<Result<Recording>>>,
}

impl Scraper {
    /// Begins to look at these hosts.
    pub(super) fn start(node: &Node, hosts: Vec<(String, SocketAddr)>) -> Result<Self> {
        let (words, told) = mpsc::channel();
        let looks = Arc::<Looks>::default();
        let made = looks.clone();
        let thread = node.spawn("scraper", move || record(&hosts, &told, &made))?;
        Ok(Self { words, looks, thread })
    }

    /// A step of the story begins now.
    pub(super) fn step(&self, name: &str) {
        // If the thread has ended, `finish` says why.
        let _ = self.words.send(Word::Step(name.to_owned(), SystemTime::now()));
    }

    /// From now on the clients' answers are counted so.
    pub(super) fn count(&self, answers: impl Fn() -> u64 + Send + 'static) {
        let _ = self.words.send(Word::Clients(Box::new(answers)));
    }

    /// Waits for so many further looks.
    pub(super) fn await_looks(&self, more: u64) -> Result<()> {
        let mut made = self.looks.made.lock();
        let goal = *made + more;
        let at_most = Duration::from_secs(EVERY * more) + LATE;
        self.looks
            .one_more
            .wait_while_for(&mut made, |made| *made < goal, at_most);
        ensure!(*made >= goal, "nobody looks at the metrics any more");
        Ok(())
    }

    /// Ends it.
    ///
    /// # Errors
    /// What went wrong meanwhile.
    pub(super) fn finish(self) -> Result<Recording> {
        drop(self.words);
        self.thread
            .join()
            .map_err(|_| anyhow!("the scraper panicked"))??
    }
}

fn record(hosts: &[(String, SocketAddr)], told: &Receiver<Word>, looks: &Looks) -> Result<Recording> {
    let mut recording = Recording::default();
    recording.describe(UP, "gauge", "1 if the host's daemon answered");
    recording.describe(ANSWERS, "counter", "Answers that the clients had");
    recording.describe(
        STEP,
        "gauge",
        "When a step of the story began, in seconds since 1970",
    );
    let (mut steps, mut answers) = (Vec::new(), None);
    let mut look = 0;
    loop {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        // Even times, in whole seconds: they are the same for all series, and need little room. One that is missed is missed.
        look = (now.as_secs() / EVERY * EVERY).max(look) + EVERY;
        loop {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
            match told.recv_timeout(Duration::from_secs(look).saturating_sub(now)) {
                Ok(Word::Step(name, at)) => steps.push((name, at)),
                Ok(Word::Clients(count)) => answers = Some(count),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Ok(recording),
            }
        }
        for (host, address) in hosts {
            let labels = [("instance", host.as_str()), ("job", JOB)];
            // A dead host is nothing that went wrong here.
            let page = scrape(*address, ANSWER);
            recording.set(look, UP, &labels, f64::from(u8::from(page.is_ok())));
            if let Ok((_, page)) = page {
                recording
                    .add_page(look, &labels, &page)
                    .with_context(|| format!("the metrics of host {host}"))?;
            }
        }
        if let Some(answers) = &answers {
            recording.set(look, ANSWERS, &[], answers() as f64);
        }
        for (name, at) in steps.drain(..) {
            let at = at.duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
            recording.set(look, STEP, &[("step", &name)], at as f64 / 1e3);
        }
        *looks.made.lock() += 1;
        looks.one_more.notify_all();
    }
}
