//! Few clients that write into a database, and remember what they were told: PostgreSQL's and MariaDB's.
//!
//! * **Decides:** what passes: each transaction that was told of is there, none is there twice, none that was not asked for, and every sum
//!   is what the entries make it.
//! * **Flow:** tables -> each client one transaction after the other, each with its number -> all of it is read at last.
//! * **Not here:** a VM's ledger ([`crate::client::ledger`]), which moves money between many accounts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::clients::Ask;
use crate::client::mariadb::Mariadb;
use crate::client::postgres::Postgres;
use crate::program::PATIENCE;
use crate::testbed::Node;

/// As whom, and where: what the services' directories were prepared for.
const USER: &str = "service";
const DATABASE: &str = "bench";
/// The row of `totals` that all clients have in common; a client's own has its number.
const COMMON: usize = 1000;
/// The first of as many rows as there are clients: each client writes its own of them, and then the next one's.
const RING: usize = 2000;

type Rows = Vec<Vec<Option<String>>>;

/// A connection to either.
enum Database {
    Postgres(Postgres),
    Mariadb(Mariadb),
}

impl Database {
    fn open(kind: Kind, target: SocketAddr) -> Result<Self> {
        Ok(match kind {
            Kind::Postgres => Self::Postgres(Postgres::open(target, USER, DATABASE, PATIENCE)?),
            Kind::Mariadb => Self::Mariadb(Mariadb::open(target, USER, DATABASE, PATIENCE)?),
        })
    }

    fn run(&mut self, text: &str) -> Result<Rows> {
        let rows = match self {
            Self::Postgres(server) => server.query(text, PATIENCE).map(|found| found.rows),
            Self::Mariadb(server) => server.query(text),
        };
        rows.with_context(|| format!("'{text}'"))
    }
}

/// Which database.
#[derive(Clone, Copy)]
pub(in crate::program) enum Kind {
    Postgres,
    Mariadb,
}

/// Which rows clients write that others write too.
#[derive(Clone, Copy)]
pub(in crate::program) enum Shares {
    Nothing,
    /// One that all write: they wait for each other until the first one's commit.
    Common,
    /// Each its own and the next one's: they may wait for each other in a circle. Whoever the database ends for that begins again.
    Ring,
}

/// A number that a query brings.
fn number(rows: &Rows) -> Result<u64> {
    let value = rows.first().and_then(|row| row.first());
    let value = value.context("no row")?.as_deref().context("a null")?;
    Ok(value.parse()?)
}

/// Makes the tables, with a row for each client, when the database answers.
pub(in crate::program) fn set_up(node: &Node, kind: Kind, target: SocketAddr, clients: usize) -> Result<()> {
    on(node, move || {
        let until = Instant::now() + PATIENCE;
        let mut database = loop {
            match Database::open(kind, target) {
                // It listens before it is ready.
                Err(error) if Instant::now() < until && error.to_string().contains("starting up") => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                opened => break opened?,
            }
        };
        database.run("create table entries (client int, number int, primary key (client, number))")?;
        database.run("create table totals (id int primary key, total bigint not null)")?;
        for id in (0..clients)
            .chain([COMMON])
            .chain((0..clients).map(|id| RING + id))
        {
            database.run(&format!("insert into totals values ({id}, 0)"))?;
        }
        Ok(())
    })
}

/// A client's own row, again and again.
pub(in crate::program) fn reads(kind: Kind, target: SocketAddr, client: usize) -> Result<Ask> {
    let mut database = Database::open(kind, target)?;
    Ok(Box::new(move |_| {
        number(&database.run(&format!("select total from totals where id = {client}"))?).map(drop)
    }))
}

/// A client that writes.
#[derive(Clone)]
pub(in crate::program) struct Writer {
    pub(in crate::program) kind: Kind,
    pub(in crate::program) shares: Shares,
    /// Of how many it is one.
    pub(in crate::program) of: usize,
    /// Transactions that the database ended because they waited for each other in a circle; they were repeated.
    pub(in crate::program) repeated: Arc<AtomicU64>,
}

impl Writer {
    /// One transaction after the other: an entry, the client's own sum, and the rows that it shares with others.
    pub(in crate::program) fn open(&self, target: SocketAddr, client: usize) -> Result<Ask> {
        let mut database = Database::open(self.kind, target)?;
        let newest = format!("select coalesce(max(number), 0) from entries where client = {client}");
        let before = number(&database.run(&newest)?)?;
        let writer = self.clone();
        Ok(Box::new(move |turn| {
            while let Err(error) = writer.transaction(&mut database, client, before + turn) {
                if !format!("{error:#}").to_lowercase().contains("deadlock") {
                    return Err(error);
                }
                writer.repeated.fetch_add(1, Ordering::Relaxed);
                database.run("rollback")?;
            }
            Ok(())
        }))
    }

    fn transaction(&self, database: &mut Database, client: usize, turn: u64) -> Result<()> {
        let adds = |id: usize| format!("update totals set total = total + 1 where id = {id}");
        database.run("begin")?;
        database.run(&format!("insert into entries values ({client}, {turn})"))?;
        match self.shares {
            Shares::Nothing => {}
            Shares::Common => drop(database.run(&adds(COMMON))?),
            Shares::Ring => {
                for id in [client, (client + 1) % self.of] {
                    database.run(&adds(RING + id))?;
                }
            }
        }
        database.run(&adds(client))?;
        let total = number(&database.run(&format!("select total from totals where id = {client}"))?)?;
        ensure!(total == turn, "a total of {total} instead of {turn}");
        if let Shares::Common = self.shares {
            let all = number(&database.run(&format!("select total from totals where id = {COMMON}"))?)?;
            ensure!(
                all >= turn,
                "all have written {all} times, and this one {turn} times"
            );
        }
        database.run("commit").map(drop)
    }
}

/// What is there at last is what the clients were told of: `told` by client.
pub(super) fn check(node: &Node, kind: Kind, target: SocketAddr, told: &[u64], shares: Shares) -> Result<()> {
    let told = told.to_vec();
    on(node, move || {
        let mut database = Database::open(kind, target)?;
        let mut ask = |what: &str, id: usize| number(&database.run(&format!("select {what} = {id}"))?);
        for (client, &told) in told.iter().enumerate() {
            let entries = ask("count(*) from entries where client", client)?;
            let newest = ask("max(number) from entries where client", client)?;
            let total = ask("total from totals where id", client)?;
            ensure!(
                (entries, newest, total) == (told, told, told),
                "client {client} was told of {told} commits: there are {entries} entries, the newest is {newest}, the sum is {total}"
            );
        }
        let wanted: Vec<(usize, u64)> = match shares {
            Shares::Nothing => Vec::new(),
            Shares::Common => vec![(COMMON, told.iter().sum())],
            Shares::Ring => {
                let before = |id: usize| told[(id + told.len() - 1) % told.len()];
                let ring = told.iter().enumerate();
                ring.map(|(id, own)| (RING + id, own + before(id))).collect()
            }
        };
        for (id, wanted) in wanted {
            let all = ask("total from totals where id", id)?;
            ensure!(
                all == wanted,
                "{wanted} commits were told of that write row {id}, and its sum is {all}"
            );
        }
        Ok(())
    })
}

/// In the clients' network.
fn on(node: &Node, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let done = node.spawn("ledger", work)?;
    done.join()
        .map_err(|_| anyhow!("the ledger's client panicked"))??
}
