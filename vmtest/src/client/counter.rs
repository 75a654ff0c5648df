//! A client that counts: INCR on a key of its own, one connection, every answer checked.
//!
//! Asked to, it counts on one key of all workers too, in the same request: answers that depend on the order in which
//! connections were served, so that two copies of a VM say different things.
//!
//! Nobody else touches a worker's key, so each answer must be the last one plus one. A smaller one means that
//! acknowledged writes were **lost**; a larger one that a write was carried out twice (**doubled**). After a broken
//! connection (**reset**) the one INCR that had no answer may or may not have happened; both are right.

use parking_lot::{Condvar, Mutex};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;

use super::boots::{Boots, TRY_AGAIN};
use super::resp::{Answer, Connection};
use crate::testbed::Node;

/// What to count with.
#[derive(Clone, Debug)]
pub struct CounterSpec {
    /// The service.
    pub target: SocketAddr,
    /// Workers, each with one connection and one key.
    pub connections: usize,
    /// Whether they count on a common key as well.
    pub together: bool,
    /// An answer later than this is a failure of its own (`stuck`), and ends the worker.
    pub give_up: Duration,
}

/// What the clients saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CounterReport {
    /// INCRs that were answered.
    pub acknowledged: u64,
    /// Acknowledged INCRs that the service did not know any more.
    pub lost: u64,
    /// INCRs that were carried out more often than they were sent.
    pub doubled: u64,
    /// Connections that broke.
    pub resets: u64,
    /// Answers that were errors.
    pub refused: u64,
    /// Workers that had no answer for too long.
    pub stuck: u64,
    /// The longest time that any one connection was without an answer, in microseconds.
    pub longest_gap_us: u64,
    /// Median time from INCR to answer, in microseconds.
    pub latency_p50_us: u64,
    /// 99th percentile of it.
    pub latency_p99_us: u64,
}

impl CounterReport {
    /// Whether each promise to the clients was kept.
    pub fn is_clean(&self) -> bool {
        self.lost + self.doubled + self.resets + self.refused + self.stuck == 0
    }
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    acknowledged: AtomicU64,
    /// Waiters are woken when this many are acknowledged.
    goal: AtomicU64,
    lock: Mutex<()>,
    reached: Condvar,
}

/// One worker's record.
#[derive(Default)]
struct Record {
    report: CounterReport,
    /// When each answer came, in microseconds since the start.
    answered_us: Vec<u64>,
    latencies_us: Vec<u32>,
}

/// Workers at work.
pub struct Counter {
    shared: Arc<Shared>,
    begun: Instant,
    begun_wall: SystemTime,
    workers: Vec<JoinHandle<Result<Record>>>,
}

/// All answers of all workers, for questions about times.
pub struct Answers {
    begun: Instant,
    begun_wall: SystemTime,
    per_worker_us: Vec<Vec<u64>>,
}

impl Counter {
    /// Starts the workers in `node`'s network.
    pub fn start(node: &Node, spec: &CounterSpec) -> Result<Self> {
        Self::start_over_boots(node, spec, &Boots::never())
    }

    /// As [`Self::start`], in a guest that may boot meanwhile: while it does not listen yet, or says that it loads what it had
    /// written, a client tries again. What was acknowledged must be there all the same.
    pub fn start_over_boots(node: &Node, spec: &CounterSpec, boots: &Boots) -> Result<Self> {
        let shared = Arc::new(Shared {
            goal: AtomicU64::new(u64::MAX),
            ..Shared::default()
        });
        let (begun, begun_wall) = (Instant::now(), SystemTime::now());
        let mut workers = Vec::new();
        for number in 0..spec.connections {
            let (shared, spec, boots) = (Arc::clone(&shared), spec.clone(), boots.clone());
            let key = format!("dunlin:counter:{number}");
            workers.push(node.spawn(&format!("counter-{number}"), move || {
                work(&spec, &key, begun, &shared, &boots)
            })?);
        }
        Ok(Self {
            shared,
            begun,
            begun_wall,
            workers,
        })
    }

    /// How many clients there are: each has one INCR on its way at most.
    pub fn connections(&self) -> u64 {
        self.workers.len() as u64
    }

    /// How many INCRs were acknowledged so far, by all workers.
    pub fn acknowledged(&self) -> u64 {
        self.shared.acknowledged.load(Ordering::Relaxed)
    }

    /// The same for another thread, also when this has ended.
    pub fn acknowledged_until_now(&self) -> impl Fn() -> u64 + Send + use<> {
        let shared = self.shared.clone();
        move || shared.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until `more` further INCRs are acknowledged.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let goal = self.acknowledged() + more;
        self.shared.goal.store(goal, Ordering::SeqCst);
        let mut guard = self.shared.lock.lock();
        let too_few = |(): &mut ()| self.acknowledged() < goal;
        self.shared.reached.wait_while_for(&mut guard, too_few, at_most);
        self.shared.goal.store(u64::MAX, Ordering::SeqCst);
        if self.acknowledged() < goal {
            bail!(
                "clients got {} of {goal} answers within {} s",
                self.acknowledged(),
                at_most.as_secs()
            );
        }
        Ok(())
    }

    /// Ends the load, asks the service for the final counts and returns what was seen.
    pub fn finish(self) -> Result<(CounterReport, Answers)> {
        self.shared.stop.store(true, Ordering::SeqCst);
        let mut total = CounterReport::default();
        let mut per_worker_us = Vec::new();
        let mut latencies = Vec::new();
        for worker in self.workers {
            let record = worker
                .join()
                .map_err(|_| anyhow!("a counter worker panicked"))??;
            total.acknowledged += record.report.acknowledged;
            total.lost += record.report.lost;
            total.doubled += record.report.doubled;
            total.resets += record.report.resets;
            total.refused += record.report.refused;
            total.stuck += record.report.stuck;
            latencies.extend(record.latencies_us);
            per_worker_us.push(record.answered_us);
        }
        latencies.sort_unstable();
        let rank = |percent: usize| latencies.get(latencies.len().saturating_sub(1) * percent / 100);
        total.latency_p50_us = rank(50).map_or(0, |&latency| u64::from(latency));
        total.latency_p99_us = rank(99).map_or(0, |&latency| u64::from(latency));
        let answers = Answers {
            begun: self.begun,
            begun_wall: self.begun_wall,
            per_worker_us,
        };
        total.longest_gap_us = answers.longest_gap_us(self.begun, Instant::now());
        Ok((total, answers))
    }
}

impl Answers {
    /// How many answers came after `from` and before `to`, by the machine's clock, which the daemons' events go by too.
    pub fn count_between(&self, from: SystemTime, to: SystemTime) -> usize {
        let since = |at: SystemTime| {
            let span = at.duration_since(self.begun_wall).unwrap_or_default();
            u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
        };
        let (from, to) = (since(from), since(to));
        let all = self.per_worker_us.iter().flatten();
        all.filter(|&&at| at > from && at < to).count()
    }

    /// The longest time without an answer on any one connection that overlaps with `from..to`.
    pub fn longest_gap_us(&self, from: Instant, to: Instant) -> u64 {
        let since = |at: Instant| {
            u64::try_from(at.saturating_duration_since(self.begun).as_micros()).unwrap_or(u64::MAX)
        };
        let (from, to) = (since(from), since(to));
        let gaps = self.per_worker_us.iter().flat_map(|times| times.windows(2));
        gaps.filter(|pair| pair[1] >= from && pair[0] <= to)
            .map(|pair| pair[1] - pair[0])
            .max()
            .unwrap_or(0)
    }
}

/// The key of all workers.
const TOGETHER: &str = "dunlin:counter:together";

fn work(spec: &CounterSpec, key: &str, begun: Instant, shared: &Shared, boots: &Boots) -> Record {
    let mut record = Record::default();
    let mut connection: Option<Connection> = None;
    let mut opened = Instant::now();
    let mut last = 0;
    let mut last_together = 0;
    // An INCR that was sent on a connection which then broke.
    let mut unanswered = false;
    while !shared.stop.load(Ordering::Relaxed) {
        let Some(open) = connection.as_mut() else {
            opened = Instant::now();
            match Connection::open_over_boots(spec.target, spec.give_up, boots) {
                Ok(fresh) => connection = Some(fresh),
                Err(_) => {
                    record.report.stuck += 1;
                    return record;
                }
            }
            if record.report.acknowledged == 0 && !unanswered {
                // A count from before this run is where this one begins.
                match final_count(connection.as_mut(), key, spec.give_up) {
                    Ok(count) => last = count,
                    Err(_) => connection = None,
                }
            }
            continue;
        };
        let sent = Instant::now();
        let mut ask = || {
            if spec.together {
                open.send(&["INCR", TOGETHER])?;
            }
            open.send(&["INCR", key])?;
            if spec.together {
                match open.receive(sent + spec.give_up)? {
                    // Others count as well: it grows, and by how much is their matter.
                    Answer::Integer(value) if value > last_together => last_together = value,
                    Answer::Integer(value) => record.report.lost += value.abs_diff(last_together + 1),
                    other => return Ok(other),
                }
            }
            open.receive(sent + spec.give_up)
        };
        match ask() {
            Ok(Answer::Integer(value)) => {
                judge(&mut record.report, last, value, unanswered);
                unanswered = false;
                last = value;
                note(&mut record, begun, sent, shared);
            }
            Ok(Answer::Error(words)) if words.starts_with("LOADING") && boots.excuse(opened) => {
                std::thread::sleep(TRY_AGAIN);
            }
            Ok(_) => record.report.refused += 1,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                record.report.stuck += 1;
                return record;
            }
            Err(_) => {
                record.report.resets += u64::from(!boots.excuse(opened));
                unanswered = true;
                connection = None;
            }
        }
    }
    // The last word is the service's own. One that boots may have broken this connection, and others have counted on.
    let asked = Instant::now();
    loop {
        if let Ok(count) = final_count(connection.as_mut(), key, spec.give_up) {
            judge(&mut record.report, last - 1, count, unanswered);
            return record;
        }
        if !boots.excuse(opened) || asked.elapsed() >= spec.give_up {
            record.report.stuck += 1;
            return record;
        }
        std::thread::sleep(TRY_AGAIN);
        opened = Instant::now();
        connection = Connection::open_over_boots(spec.target, spec.give_up, boots).ok();
    }
}

/// Compares an answer with the one that the last one demands.
pub(super) fn judge(report: &mut CounterReport, last: i64, value: i64, unanswered: bool) {
    let expected = last + 1;
    let difference = value.abs_diff(expected);
    if value < expected {
        report.lost += difference;
    } else if value > expected && !(unanswered && difference == 1) {
        report.doubled += difference - u64::from(unanswered);
    }
}

fn note(record: &mut Record, begun: Instant, sent: Instant, shared: &Shared) {
    let now = Instant::now();
    let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    record.answered_us.push(micros(now - begun));
    record
        .latencies_us
        .push(u32::try_from(micros(now - sent)).unwrap_or(u32::MAX));
    record.report.acknowledged += 1;
    let all = shared.acknowledged.fetch_add(1, Ordering::Relaxed) + 1;
    if all >= shared.goal.load(Ordering::Relaxed) {
        let _guard = shared.lock.lock();
        shared.reached.notify_all();
    }
}

pub(super) fn final_count(connection: Option<&mut Connection>, key: &str, timeout: Duration) -> Result<i64> {
    match connection.context("not connected")?.ask(&["GET", key], timeout)? {
        Answer::Bulk(Some(text)) => Ok(String::from_utf8(text)?.parse()?),
        Answer::Bulk(None) => Ok(0),
        other => bail!("GET was answered by {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Answers, CounterReport, judge};
    use std::time::{Duration, Instant, SystemTime};

    #[test]
    fn answers_between_two_moments_are_counted_over_all_connections() {
        let begun_wall = SystemTime::now();
        let answers = Answers {
            begun: Instant::now(),
            begun_wall,
            per_worker_us: vec![vec![1_000, 5_000, 9_000], vec![4_000]],
        };
        let at = |ms| begun_wall + Duration::from_millis(ms);
        assert_eq!(answers.count_between(at(1), at(9)), 2);
        assert_eq!(answers.count_between(at(0), at(100)), 4);
        assert_eq!(answers.count_between(at(9), at(1)), 0);
    }

    #[test]
    fn lost_and_doubled_are_told_apart() {
        // last value, answer, was one INCR left unanswered -> lost, doubled
        let cases = [
            (5, 6, false, 0, 0),
            (5, 5, false, 1, 0),
            (5, 2, false, 4, 0),
            (5, 7, false, 0, 1),
            (5, 7, true, 0, 0),
            (5, 6, true, 0, 0),
            (5, 8, true, 0, 1),
            (5, 5, true, 1, 0),
        ];
        for (last, value, unanswered, lost, doubled) in cases {
            let mut report = CounterReport::default();
            judge(&mut report, last, value, unanswered);
            assert_eq!(
                (report.lost, report.doubled),
                (lost, doubled),
                "{last} {value} {unanswered}"
            );
        }
    }
}
