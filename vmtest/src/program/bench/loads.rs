//! One load of a server, and what the machine paid for it.
//!
//! * **Decides:** nothing. * **Flow:** counters of all hosts -> requests for about so long -> counters again.
//! * **Invariants:** all connections stand, and whoever measures is ready, before the first one asks.
//! * **Not here:** what is asked (`subjects`).

use std::net::SocketAddr;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::median;
use super::subjects::Load;
use crate::bench_vm::cost::{Cost, Reading};
use crate::client::load::{LoadSpec, run_requests};
use crate::testbed::{Node, Testbed};

/// The requests of a first, rough measure.
const LEAST_REQUESTS: u64 = 1000;

/// What came of one load.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    pub(super) per_second: f64,
    /// The median of a request's time.
    pub(super) p50_ms: f64,
    /// Of the client, for one request.
    pub(super) client_us: f64,
    /// Of the hosts, for one request.
    pub(super) cost: Cost,
}

/// Where, and how much.
pub(super) struct Window<'a> {
    pub(super) testbed: &'a Testbed,
    pub(super) target: SocketAddr,
    pub(super) connections: u32,
    pub(super) about: Duration,
}

impl Window<'_> {
    /// `ready` is called when all connections stand, where those are ours.
    pub(super) fn measure(&self, load: Load, ready: impl FnOnce() -> Result<()>) -> Result<Measured> {
        let client = self.testbed.node("client");
        match load {
            Load::RedisBenchmark => {
                ready()?;
                self.redis_benchmark(client)
            }
            _ => self.own(client, load, ready),
        }
    }

    /// A first load says how many requests the time holds: a handful of them says too little.
    fn redis_benchmark(&self, client: &Node) -> Result<Measured> {
        let spec = LoadSpec {
            target: self.target,
            test: "set".to_owned(),
            connections: self.connections,
            about: self.about,
        };
        let first = run_requests(client, &spec, LEAST_REQUESTS)?;
        let requests = (first.per_second * self.about.as_secs_f64()) as u64;
        let (before, own) = (Reading::take(self.testbed)?, own_cpu()?);
        let report = run_requests(client, &spec, requests.max(LEAST_REQUESTS))?;
        let (client_us, after) = (own_cpu()? - own, Reading::take(self.testbed)?);
        Ok(Measured {
            per_second: report.per_second,
            p50_ms: report.p50_ms,
            client_us: client_us / report.requests.max(1) as f64,
            cost: before.until(&after, report.requests),
        })
    }

    fn own(&self, client: &Node, load: Load, ready: impl FnOnce() -> Result<()>) -> Result<Measured> {
        let (target, about) = (self.target, self.about);
        let open = load.opener(self.connections as usize);
        // The counters are read when all connections stand.
        let barrier = Arc::new(Barrier::new(self.connections as usize + 1));
        let mut workers = Vec::new();
        for number in 0..self.connections {
            let (barrier, open) = (Arc::clone(&barrier), open.clone());
            let work = move || -> Result<Vec<u64>> {
                let opened = open(target, number as usize);
                barrier.wait();
                barrier.wait();
                let (mut ask, until) = (opened?, Instant::now() + about);
                let (mut turn, mut times_us) = (0, Vec::new());
                while Instant::now() < until {
                    turn += 1;
                    let asked = Instant::now();
                    ask(turn)?;
                    times_us.push(asked.elapsed().as_micros() as u64);
                }
                Ok(times_us)
            };
            workers.push(client.spawn(&format!("bench-{number}"), work)?);
        }
        barrier.wait();
        let ready = ready();
        let (before, own) = (Reading::take(self.testbed), own_cpu()?);
        barrier.wait();
        let (begun, mut times_us) = (Instant::now(), Vec::new());
        for worker in workers {
            times_us.extend(worker.join().map_err(|_| anyhow!("a client panicked"))???);
        }
        // Who waits for another one's transaction is done later than was asked for.
        let took = begun.elapsed();
        let (client_us, after) = (own_cpu()? - own, Reading::take(self.testbed)?);
        ready?;
        let requests = times_us.len();
        Ok(Measured {
            per_second: requests as f64 / took.as_secs_f64(),
            p50_ms: median(times_us.iter().map(|us| *us as f64 / 1e3)),
            client_us: client_us / requests.max(1) as f64,
            cost: before?.until(&after, requests as u64),
        })
    }
}

/// Microseconds that this process and its children that have ended have used.
fn own_cpu() -> Result<f64> {
    let mut used = 0;
    for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
        let usage = getrusage(who)?;
        used += usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    }
    Ok(used as f64)
}
