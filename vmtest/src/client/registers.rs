//! Clients that read and write a few registers of redis at the same time, and write down what they saw and when.
//!
//! * **Decides:** nothing: whether the history can have happened is for a checker of linearizability to say
//!   (`vmtest/linearizability`).
//! * **Flow:** a worker for each connection -> GET, SET or GETSET of a register that all workers use -> one [`Operation`] each.
//! * **Invariants:** (1) every value is written once in the whole history; (2) an operation whose answer was not read whole is in
//!   the history as one that may have happened at any time since; (3) all times are of one clock.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Serialize;

use super::boots::{Boots, TRY_AGAIN};
use super::resp::{Answer, Connection};
use crate::testbed::Node;

/// So many registers are in use at a time.
const REGISTERS: u64 = 4;
/// After so many operations of a worker the registers are others: a checker's work grows with each one's history.
const TURN: u64 = 400;
/// Between two operations of a worker: a history is to be about order, not about load.
const REST: Duration = Duration::from_millis(2);

/// What a worker did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Reads.
    Get,
    /// Writes.
    Set,
    /// Writes, and reads what was there before.
    GetSet,
}

/// One line of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// By whom.
    pub client: u64,
    /// What.
    pub kind: Kind,
    /// Which register.
    pub key: String,
    /// What was written, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrote: Option<String>,
    /// What was read; nothing where the register was empty, or nothing was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<String>,
    /// When it was asked for, in nanoseconds.
    pub call_ns: u64,
    /// When the answer was here; nothing where there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub return_ns: Option<u64>,
}

/// All that was seen.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// In no order.
    pub operations: Vec<Operation>,
    /// Connections that broke.
    pub resets: u64,
    /// Answers that were errors.
    pub refused: u64,
    /// Workers that had no answer for too long.
    pub stuck: u64,
}

/// Workers at work.
pub struct Registers {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<History>>>,
}

impl Registers {
    /// Starts the workers in `node`'s network.
    pub fn start(
        node: &Node,
        target: SocketAddr,
        clients: u64,
        give_up: Duration,
        boots: &Boots,
    ) -> Result<Self> {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let begun = Instant::now();
        let mut workers = Vec::new();
        for client in 0..clients {
            let (stop, done, boots) = (Arc::clone(&stop), Arc::clone(&done), boots.clone());
            workers.push(node.spawn(&format!("register-{client}"), move || {
                Worker {
                    target,
                    client,
                    give_up,
                    boots,
                    begun,
                    history: History::default(),
                }
                .work(&stop, &done)
            })?);
        }
        Ok(Self { stop, done, workers })
    }

    /// Waits until `more` further operations were answered.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let done = || self.done.load(Ordering::Relaxed);
        let (goal, deadline) = (done() + more, Instant::now() + at_most);
        while done() < goal {
            if Instant::now() > deadline {
                bail!(
                    "{} of {goal} operations on registers were answered within {} s",
                    done(),
                    at_most.as_secs()
                );
            }
            // A look is enough: nothing is measured here.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the load and returns what was seen.
    pub fn finish(self) -> Result<History> {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = History::default();
        for worker in self.workers {
            let history = worker
                .join()
                .map_err(|_| anyhow!("a register's worker panicked"))??;
            total.operations.extend(history.operations);
            total.resets += history.resets;
            total.refused += history.refused;
            total.stuck += history.stuck;
        }
        Ok(total)
    }
}

struct Worker {
    target: SocketAddr,
    client: u64,
    give_up: Duration,
    boots: Boots,
    begun: Instant,
    history: History,
}

impl Worker {
    fn work(mut self, stop: &AtomicBool, done: &AtomicU64) -> History {
        let mut connection: Option<(Instant, Connection)> = None;
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let Some((opened, open)) = connection.as_mut() else {
                let opened = Instant::now();
                match Connection::open_over_boots(self.target, self.give_up, &self.boots) {
                    Ok(fresh) => connection = Some((opened, fresh)),
                    Err(_) => {
                        self.history.stuck += 1;
                        return self.history;
                    }
                }
                continue;
            };
            let opened = *opened;
            match self.one(open, number) {
                Ok(Answer::Error(_)) if self.boots.excuse(opened) => std::thread::sleep(TRY_AGAIN),
                Ok(Answer::Bulk(_) | Answer::Status(_)) => {
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(_) => self.history.refused += 1,
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    self.history.stuck += 1;
                    return self.history;
                }
                Err(_) => {
                    self.history.resets += u64::from(!self.boots.excuse(opened));
                    connection = None;
                }
            }
            number += 1;
            std::thread::sleep(REST);
        }
        self.history
    }

    fn one(&mut self, open: &mut Connection, number: u64) -> std::io::Result<Answer> {
        let mut operation = choose(self.client, number);
        let words: Vec<&str> = match (operation.kind, operation.wrote.as_deref()) {
            (Kind::Set, Some(value)) => vec!["SET", &operation.key, value],
            (Kind::GetSet, Some(value)) => vec!["GETSET", &operation.key, value],
            _ => vec!["GET", &operation.key],
        };
        operation.call_ns = self.now_ns();
        let answer = open.ask(&words, self.give_up);
        match &answer {
            Ok(Answer::Bulk(value)) => {
                operation.read = value
                    .as_ref()
                    .map(|value| String::from_utf8_lossy(value).into_owned());
                operation.return_ns = Some(self.now_ns());
            }
            Ok(Answer::Status(_)) => operation.return_ns = Some(self.now_ns()),
            // Refused: it did not happen.
            Ok(_) => return answer,
            Err(_) => {}
        }
        self.history.operations.push(operation);
        answer
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The same operation for the same number, whoever asks.
fn choose(client: u64, number: u64) -> Operation {
    let mut word = (client << 40 | number)
        .wrapping_add(1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^= word >> 31;
    let kind = [Kind::Get, Kind::Set, Kind::Get, Kind::GetSet][(word >> 8) as usize % 4];
    Operation {
        client,
        kind,
        key: format!("dunlin:register:{}:{}", number / TURN, (word >> 20) % REGISTERS),
        wrote: (kind != Kind::Get).then(|| format!("{client}.{number}")),
        read: None,
        call_ns: 0,
        return_ns: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_value_is_written_twice_and_every_kind_of_operation_and_register_is_used() {
        let all: Vec<Operation> = (0..3)
            .flat_map(|client| (0..TURN).map(move |number| choose(client, number)))
            .collect();
        let written: Vec<&String> = all.iter().filter_map(|one| one.wrote.as_ref()).collect();
        let different: BTreeSet<&String> = written.iter().copied().collect();
        assert_eq!(written.len(), different.len());
        for kind in [Kind::Get, Kind::Set, Kind::GetSet] {
            assert!(
                all.iter().filter(|one| one.kind == kind).count() > 100,
                "{kind:?}"
            );
        }
        let keys: BTreeSet<&String> = all.iter().map(|one| &one.key).collect();
        assert_eq!(keys.len() as u64, REGISTERS);
    }
}
