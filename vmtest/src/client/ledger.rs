//! Clients that move money in PostgreSQL and remember every commit that they were told of.
//!
//! * **Decides:** what a ledger may show at the end: each transfer that was told is there, none is there that was not sent, every
//!   balance is what the transfers make it, and the sum has not changed.
//! * **Flow:** a worker for each connection -> one transaction after the other, each numbered -> [`Ledger::finish`] compares.
//! * **Invariants:** a transfer counts as told when the server's COMMIT was read whole; a worker keeps its one connection.
//! * **Not here:** which hosts die meanwhile.

use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;

use super::Boots;
use super::postgres::Postgres;
use crate::testbed::Node;

/// As whom, and where.
const USER: &str = "service";
const DATABASE: &str = "bench";
const ACCOUNTS: u64 = 64;
const EACH: i64 = 1000;
/// Bytes in each transfer's note: a table that grows makes the disk's writes spread.
const NOTE_BYTES: u64 = 200;

/// What was found at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LedgerReport {
    /// Commits that clients were told of.
    pub told: u64,
    /// Of these, not in the table.
    pub lost: u64,
    /// In the table, and neither told nor on their way when a connection broke.
    pub unknown: u64,
    /// Connections that broke.
    pub resets: u64,
    /// Answers that were errors.
    pub refused: u64,
    /// Workers that had no answer for too long.
    pub stuck: u64,
    /// Accounts whose balance is not what the transfers make it.
    pub unbalanced: u64,
    /// The sum of all balances is what it was.
    pub sum_is_right: bool,
}

impl LedgerReport {
    /// Whether each promise was kept.
    pub fn is_clean(&self) -> bool {
        let wrong = self.lost + self.unknown + self.resets + self.refused + self.stuck + self.unbalanced;
        wrong == 0 && self.sum_is_right && self.told > 0
    }
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    told: AtomicU64,
    lock: Mutex<()>,
    more: Condvar,
}

#[derive(Default)]
struct Record {
    /// Transfers `0..next` were sent, and told of but for those in doubt.
    next: u64,
    /// Sent on a connection that broke before they had an answer: whether they happened is not known.
    in_doubt: BTreeSet<u64>,
    report: LedgerReport,
    /// When each commit was told.
    at: Vec<Instant>,
}

/// Workers at work.
pub struct Ledger {
    shared: Arc<Shared>,
    target: SocketAddr,
    give_up: Duration,
    workers: Vec<JoinHandle<Result<Record>>>,
}

/// Waits until PostgreSQL answers, and makes the accounts.
pub fn set_up(node: &Node, target: SocketAddr, at_most: Duration) -> Result<()> {
    let made = node.spawn("ledger-set-up", move || -> Result<()> {
        let deadline = Instant::now() + at_most;
        let mut server = loop {
            match Postgres::open(target, USER, DATABASE, Duration::from_secs(5)) {
                Ok(server) => break server,
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context("PostgreSQL does not answer");
                }
                // Nothing tells a client that a server has started: it has to ask.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        for text in [
            "create table accounts (id int primary key, balance bigint not null)".to_owned(),
            format!("insert into accounts select id, {EACH} from generate_series(0, {}) id", ACCOUNTS - 1),
            "create table transfers (client int, number int, giver int, taker int, amount bigint, note text, \
             primary key (client, number))"
                .to_owned(),
            "create extension if not exists amcheck".to_owned(),
            "checkpoint".to_owned(),
        ] {
            server
                .query(&text, Duration::from_secs(60))
                .with_context(|| format!("'{text}'"))?;
        }
        Ok(())
    })?;
    made.join().map_err(|_| anyhow!("a client thread panicked"))??
}

impl Record {
    fn doubt(&mut self) {
        self.in_doubt.insert(self.next);
        self.next += 1;
    }
}

impl Ledger {
    /// Starts the workers in `node`'s network.
    pub fn start(
        node: &Node,
        target: SocketAddr,
        connections: u64,
        give_up: Duration,
        boots: &Boots,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut workers = Vec::new();
        for number in 0..connections {
            let (shared, boots) = (Arc::clone(&shared), boots.clone());
            workers.push(node.spawn(&format!("ledger-{number}"), move || {
                work(target, number, give_up, &boots, &shared)
            })?);
        }
        Ok(Self {
            shared,
            target,
            give_up,
            workers,
        })
    }

    /// Commits that clients were told of so far.
    pub fn told(&self) -> u64 {
        self.shared.told.load(Ordering::SeqCst)
    }

    /// Waits until `more` further commits were told.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let goal = self.told() + more;
        let mut guard = self.shared.lock.lock();
        let too_few = |(): &mut ()| self.told() < goal;
        self.shared.more.wait_while_for(&mut guard, too_few, at_most);
        if self.told() < goal {
            bail!(
                "clients were told of {} of {goal} commits within {} s",
                self.told(),
                at_most.as_secs()
            );
        }
        Ok(())
    }

    /// Ends the load, reads the whole ledger and compares. Also returns when each commit was told, by worker.
    pub fn finish(self, node: &Node) -> Result<(LedgerReport, Vec<Vec<Instant>>)> {
        self.shared.stop.store(true, Ordering::SeqCst);
        let mut records = Vec::new();
        for worker in self.workers {
            records.push(
                worker
                    .join()
                    .map_err(|_| anyhow!("a ledger's worker panicked"))??,
            );
        }
        let times = records
            .iter_mut()
            .map(|record| std::mem::take(&mut record.at))
            .collect();
        let (target, give_up) = (self.target, self.give_up);
        let checked = node.spawn("ledger-check", move || check_all(target, records, give_up))?;
        let report = checked
            .join()
            .map_err(|_| anyhow!("the ledger's check panicked"))???;
        Ok((report, times))
    }
}

/// The same transfer for the same number, whoever asks: `(giver, taker, amount)`.
fn transfer(client: u64, number: u64) -> (u64, u64, i64) {
    let mut word = (client << 32 | number)
        .wrapping_add(1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^= word >> 29;
    word = word.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let giver = (word >> 8) % ACCOUNTS;
    let taker = (giver + 1 + (word >> 20) % (ACCOUNTS - 1)) % ACCOUNTS;
    (giver, taker, 1 + (word >> 40) as i64 % 20)
}

/// Locks are taken in the accounts' order, so two clients never wait for each other.
fn statements(client: u64, number: u64) -> String {
    let (giver, taker, amount) = transfer(client, number);
    let mut updates = [(giver, -amount), (taker, amount)];
    updates.sort_unstable();
    let [(first, a), (second, b)] = updates;
    format!(
        "begin; update accounts set balance = balance + ({a}) where id = {first}; \
         update accounts set balance = balance + ({b}) where id = {second}; \
         insert into transfers values ({client}, {number}, {giver}, {taker}, {amount}, repeat('x', {NOTE_BYTES})); commit"
    )
}

fn work(target: SocketAddr, client: u64, give_up: Duration, boots: &Boots, shared: &Shared) -> Record {
    let mut record = Record::default();
    let mut server: Option<(Instant, Postgres)> = None;
    while !shared.stop.load(Ordering::SeqCst) {
        let Some((opened, open)) = server.as_mut() else {
            let opened = Instant::now();
            match Postgres::open_over_boots(target, USER, DATABASE, give_up, boots) {
                Ok(fresh) => server = Some((opened, fresh)),
                Err(_) => {
                    record.report.stuck += 1;
                    return record;
                }
            }
            continue;
        };
        let opened = *opened;
        match open.query(&statements(client, record.next), give_up) {
            Ok(rows) if rows.tag == "COMMIT" => {
                record.next += 1;
                record.at.push(Instant::now());
                let _guard = shared.lock.lock();
                shared.told.fetch_add(1, Ordering::SeqCst);
                shared.more.notify_all();
            }
            Ok(_) => record.report.refused += 1,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                record.doubt();
                record.report.stuck += 1;
                return record;
            }
            Err(error) if error.kind() == ErrorKind::Other => {
                record.report.refused += 1;
                server = None;
            }
            Err(_) => {
                record.doubt();
                server = None;
                if !boots.excuse(opened) {
                    record.report.resets += 1;
                    return record;
                }
            }
        }
    }
    record
}

fn check_all(target: SocketAddr, records: Vec<Record>, give_up: Duration) -> Result<LedgerReport> {
    let mut server = Postgres::open(target, USER, DATABASE, give_up).context("the ledger cannot be read")?;
    let mut report = LedgerReport::default();
    let mut balances: BTreeMap<u64, i64> = (0..ACCOUNTS).map(|id| (id, EACH)).collect();
    for (client, record) in records.iter().enumerate() {
        let client = client as u64;
        let part = &record.report;
        report.told += record.next - record.in_doubt.len() as u64;
        report.resets += part.resets;
        report.refused += part.refused;
        report.stuck += part.stuck;
        let text = format!(
            "select number, giver, taker, amount, length(note) from transfers where client = {client} order by number"
        );
        let rows = server.query(&text, give_up)?.rows;
        let mut found = BTreeSet::new();
        for row in rows {
            let values: Vec<i64> = row
                .iter()
                .map(|value| value.as_deref().unwrap_or("-1").parse().unwrap_or(-1))
                .collect();
            let number = u64::try_from(values[0]).context("a transfer without a number")?;
            let (giver, taker, amount) = transfer(client, number);
            ensure!(
                values[1..] == [giver as i64, taker as i64, amount, NOTE_BYTES as i64],
                "transfer {number} of client {client} is not what was sent: {values:?}"
            );
            *balances.entry(giver).or_default() -= amount;
            *balances.entry(taker).or_default() += amount;
            report.unknown += u64::from(number >= record.next);
            found.insert(number);
        }
        let told = (0..record.next).filter(|number| !record.in_doubt.contains(number));
        report.lost += told.filter(|number| !found.contains(number)).count() as u64;
    }
    let rows = server
        .query("select id, balance from accounts order by id", give_up)?
        .rows;
    ensure!(
        rows.len() as u64 == ACCOUNTS,
        "{} accounts are left of {ACCOUNTS}",
        rows.len()
    );
    let mut sum = 0;
    for row in rows {
        let [Some(id), Some(balance)] = &row[..] else {
            bail!("an account without a balance: {row:?}");
        };
        let (id, balance): (u64, i64) = (id.parse()?, balance.parse()?);
        sum += balance;
        report.unbalanced += u64::from(balances.get(&id) != Some(&balance));
    }
    report.sum_is_right = sum == ACCOUNTS as i64 * EACH;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_the_same_whenever_it_is_asked_for_and_moves_money_between_two() {
        for (client, number) in [(0, 0), (1, 0), (3, 999_999)] {
            let (giver, taker, amount) = transfer(client, number);
            assert_eq!((giver, taker, amount), transfer(client, number));
            assert!(giver != taker && giver < ACCOUNTS && taker < ACCOUNTS && (1..=20).contains(&amount));
        }
        assert_ne!(statements(0, 1), statements(1, 0));
    }

    #[test]
    fn a_report_is_clean_only_if_nothing_at_all_is_wrong() {
        let good = LedgerReport {
            told: 1,
            sum_is_right: true,
            ..LedgerReport::default()
        };
        assert!(good.is_clean());
        assert!(
            !LedgerReport {
                told: 0,
                ..good.clone()
            }
            .is_clean()
        );
        assert!(
            !LedgerReport {
                lost: 1,
                ..good.clone()
            }
            .is_clean()
        );
        assert!(
            !LedgerReport {
                unbalanced: 1,
                ..good.clone()
            }
            .is_clean()
        );
        assert!(
            !LedgerReport {
                sum_is_right: false,
                ..good
            }
            .is_clean()
        );
    }
}
