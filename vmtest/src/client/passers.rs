//! Clients that come and go: connect, a few INCRs on a key of their own, close, and again, all the time.
//!
//! What a worker may expect is what [`super::counter`] says; here connections that began a moment ago, or are about to
//! end, are under way whenever a host dies. A connection may be closed by the worker only: any other end is a reset. A
//! step (connecting, or one answer) that takes longer than `stall` is a stall.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Serialize;

use super::counter::{CounterReport, final_count, judge};
use super::resp::{Answer, Connection};
use crate::testbed::Node;

/// Who comes and goes.
#[derive(Clone, Debug)]
pub struct PassersSpec {
    /// The service.
    pub target: SocketAddr,
    /// Workers, each with one key.
    pub workers: usize,
    /// INCRs on each connection: from 1 to this many, in turn.
    pub most_incrs: u64,
    /// A worker begins a connection not more often than this.
    pub every: Duration,
    /// A step that takes longer than this is a stall.
    pub stall: Duration,
    /// A step that takes longer than this ends the worker (`stuck`).
    pub give_up: Duration,
}

/// What they saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PassersReport {
    /// Connections that were opened, used and closed.
    pub connections: u64,
    /// As for clients that stay.
    pub counted: CounterReport,
    /// Steps that took too long.
    pub stalls: u64,
    /// The longest step, in microseconds.
    pub longest_step_us: u64,
}

/// Workers at work.
pub struct Passers {
    stop: Arc<AtomicBool>,
    connections: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<PassersReport>>>,
}

impl Passers {
    /// Starts the workers in `node`'s network.
    ///
    /// # Errors
    /// If a thread cannot be started there.
    pub fn start(node: &Node, spec: &PassersSpec) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(AtomicU64::new(0));
        let mut workers = Vec::new();
        for number in 0..spec.workers {
            let (spec, stop, connections) = (spec.clone(), stop.clone(), connections.clone());
            let key = format!("dunlin:passer:{number}");
            workers.push(node.spawn(&format!("passer-{number}"), move || {
                work(&spec, &key, &stop, &connections)
            })?);
        }
        Ok(Self {
            stop,
            connections,
            workers,
        })
    }

    /// Connections that were opened, used and closed so far.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Waits until `more` further connections were opened, used and closed.
    ///
    /// # Errors
    /// If that takes longer than `at_most`.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let goal = self.connections.load(Ordering::Relaxed) + more;
        let deadline = Instant::now() + at_most;
        while self.connections.load(Ordering::Relaxed) < goal {
            if Instant::now() > deadline {
                bail!(
                    "clients did not get {more} more connections within {} s",
                    at_most.as_secs()
                );
            }
            // A look is enough: nothing is measured here.
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Ends the load, asks the service for the final counts and returns what was seen.
    ///
    /// # Errors
    /// If a worker panicked or could not enter its network.
    pub fn finish(self) -> Result<PassersReport> {
        self.stop.store(true, Ordering::SeqCst);
        let mut total = PassersReport::default();
        for worker in self.workers {
            let report = worker.join().map_err(|_| anyhow!("a client panicked"))??;
            total.connections += report.connections;
            total.stalls += report.stalls;
            total.longest_step_us = total.longest_step_us.max(report.longest_step_us);
            let (all, one) = (&mut total.counted, &report.counted);
            all.acknowledged += one.acknowledged;
            all.lost += one.lost;
            all.doubled += one.doubled;
            all.resets += one.resets;
            all.refused += one.refused;
            all.stuck += one.stuck;
        }
        Ok(total)
    }
}

fn work(spec: &PassersSpec, key: &str, stop: &AtomicBool, connections: &AtomicU64) -> PassersReport {
    let mut report = PassersReport::default();
    let mut last = 0;
    // An INCR that was sent on a connection which then broke.
    let mut unanswered = false;
    let mut incrs = 1;
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let opened = Connection::open(spec.target, spec.give_up);
        step(spec, &mut report, begun);
        let Ok(mut connection) = opened else {
            report.counted.stuck += 1;
            return report;
        };
        for _ in 0..incrs {
            let sent = Instant::now();
            let answer = connection
                .send(&["INCR", key])
                .and_then(|()| connection.receive(sent + spec.give_up));
            step(spec, &mut report, sent);
            match answer {
                Ok(Answer::Integer(value)) => {
                    judge(&mut report.counted, last, value, unanswered);
                    unanswered = false;
                    last = value;
                    report.counted.acknowledged += 1;
                }
                Ok(_) => report.counted.refused += 1,
                Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                    report.counted.stuck += 1;
                    return report;
                }
                Err(_) => {
                    report.counted.resets += 1;
                    unanswered = true;
                    break;
                }
            }
        }
        report.connections += 1;
        connections.fetch_add(1, Ordering::Relaxed);
        incrs = incrs % spec.most_incrs + 1;
        // The pace is the load's own; nothing is waited for.
        std::thread::sleep(spec.every.saturating_sub(begun.elapsed()));
    }
    let mut connection = Connection::open(spec.target, spec.give_up).ok();
    match final_count(connection.as_mut(), key, spec.give_up) {
        Ok(count) => judge(&mut report.counted, last - 1, count, unanswered),
        Err(_) => report.counted.stuck += 1,
    }
    report
}

fn step(spec: &PassersSpec, report: &mut PassersReport, begun: Instant) {
    let took = begun.elapsed();
    report.stalls += u64::from(took > spec.stall);
    let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    report.longest_step_us = report.longest_step_us.max(took_us);
}
