//! Everything that clients do to the VM at once, and what they must have seen.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::client::downloads::{Downloads, DownloadsReport};
use crate::client::ledger::{self, Ledger, LedgerReport};
use crate::client::registers::Registers;
use crate::client::{Answers, Boots, Counter, CounterReport, CounterSpec};
use crate::cluster::await_service;
use crate::image::REDIS_PORT;
use crate::linear;
use crate::testbed::Node;

/// The longest that any client waits for one answer before it counts as stuck. Longer than the campaign waits for anything: a client that was not heard
/// sends again a minute later at last.
const GIVE_UP: Duration = Duration::from_secs(300);

/// How many clients of each kind.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Count in redis.
    pub counters: usize,
    /// Use redis' registers.
    pub registers: u64,
    /// Move money in PostgreSQL.
    pub ledger: u64,
    /// Fetch a file from nginx.
    pub downloads: usize,
}

impl Clients {
    /// Some of each.
    pub const SOME: Self = Self {
        counters: 2,
        registers: 3,
        ledger: 2,
        downloads: 1,
    };
}

/// When they were answered.
pub struct Seen {
    /// By redis' counters.
    pub answers: Answers,
    /// By PostgreSQL, of each client its commits.
    pub commits: Vec<Vec<Instant>>,
}

/// Clients at work.
pub struct Loads {
    target: SocketAddr,
    boots: Boots,
    counter: Counter,
    registers: Registers,
    ledger: Ledger,
    downloads: Downloads,
}

/// What they saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LoadsReport {
    /// Of redis' counters.
    pub counters: CounterReport,
    /// Of PostgreSQL's ledger.
    pub ledger: LedgerReport,
    /// Of nginx' file.
    pub downloads: DownloadsReport,
    /// Operations on redis' registers.
    pub register_operations: u64,
    /// What the checker says of them.
    pub linearizable: String,
}

impl Loads {
    /// Waits until the services answer, and begins. `pg_port` is PostgreSQL's; redis' and nginx' are the usual ones.
    pub fn start(
        client: &Node,
        guest: SocketAddr,
        pg_port: u16,
        some: Clients,
        boot: Duration,
    ) -> Result<Self> {
        let at = |port| SocketAddr::new(guest.ip(), port);
        let (redis, postgres) = (at(REDIS_PORT), at(pg_port));
        ledger::set_up(client, postgres, boot)?;
        await_service(client, redis, boot)?;
        let boots = Boots::when_told();
        let counters = CounterSpec {
            target: redis,
            connections: some.counters,
            together: false,
            give_up: GIVE_UP,
        };
        Ok(Self {
            target: redis,
            counter: Counter::start_over_boots(client, &counters, &boots)?,
            registers: Registers::start(client, redis, some.registers, GIVE_UP, &boots)?,
            ledger: Ledger::start(client, postgres, some.ledger, GIVE_UP, &boots)?,
            downloads: Downloads::start(client, at(80), some.downloads, GIVE_UP, &boots)?,
            boots,
        })
    }

    /// Redis' address in the guest.
    pub fn target(&self) -> SocketAddr {
        self.target
    }

    /// What clients may put down to the guest's boots.
    pub fn boots(&self) -> &Boots {
        &self.boots
    }

    /// Somebody is served.
    pub fn await_answers(&self, count: u64, at_most: Duration) -> Result<()> {
        self.counter.await_more(count, at_most)
    }

    /// Each kind of client gets on.
    pub fn await_progress(&self, at_most: Duration) -> Result<()> {
        self.counter.await_more(20, at_most).context("redis' counters")?;
        self.registers
            .await_more(10, at_most)
            .context("redis' registers")?;
        self.ledger.await_more(3, at_most).context("PostgreSQL")?;
        self.downloads.await_more(1, at_most).context("nginx")
    }

    /// What was done so far, for a person.
    pub fn so_far(&self) -> String {
        format!(
            "{} counted, {} commits, {} files",
            self.counter.acknowledged(),
            self.ledger.told(),
            self.downloads.whole()
        )
    }

    /// Ends all of it, and judges. The history of the registers is kept in `dir` if it is not right.
    pub fn finish(self, client: &Node, checker: &Path, dir: PathBuf) -> Result<(LoadsReport, Seen)> {
        let (counters, answers) = self.counter.finish()?;
        let history = self.registers.finish()?;
        let downloads = self.downloads.finish()?;
        let (ledger, commits) = self.ledger.finish(client)?;
        ensure!(counters.is_clean(), "redis' clients were let down: {counters:?}");
        ensure!(
            downloads.is_clean(),
            "nginx' clients were let down: {downloads:?}"
        );
        ensure!(ledger.is_clean(), "the ledger is not right: {ledger:?}");
        let (resets, refused, stuck) = (history.resets, history.refused, history.stuck);
        ensure!(
            resets + refused + stuck == 0,
            "the registers' clients were let down: {resets} connections broken, {refused} answers refused, {stuck} stuck"
        );
        std::fs::create_dir_all(&dir)?;
        let file = dir.join("registers.jsonl");
        let linearizable = linear::check(checker, &history.operations, &file)?;
        std::fs::remove_file(&file)?;
        Ok((
            LoadsReport {
                counters,
                ledger,
                downloads,
                register_operations: history.operations.len() as u64,
                linearizable,
            },
            Seen { answers, commits },
        ))
    }
}

/// The longest times without an answer around some moments, in milliseconds, sorted.
pub fn gaps_ms(answers: &Answers, moments: &[(Instant, Instant)]) -> Vec<u64> {
    let mut gaps: Vec<u64> = moments
        .iter()
        .map(|&(from, to)| answers.longest_gap_us(from, to) / 1000)
        .collect();
    gaps.sort_unstable();
    gaps
}
