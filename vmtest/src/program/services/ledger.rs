//! Few clients that write into a database, and remember what they were told: PostgreSQL's and MariaDB's.
//!
//! * **Decides:** what passes: each transaction that was told of is there, none is there twice, none that was not asked for, and every sum
//!   is what the entries make it.
//! * **Flow:** tables -> each client one transaction after the other, each with its number -> all of it is read at last.
//! * **Not here:** a VM's ledger ([`crate::client::ledger`]), which moves money between many accounts.

use anyhow::{Context, Result, anyhow, ensure};

use super::clients::Ask;
use crate::client::mariadb::Mariadb;
use crate::client::postgres::Postgres;
use crate::demo::service;
use crate::program::PATIENCE;
use crate::testbed::Node;

/// As whom, and where: what the services' directories were prepared for.
const USER: &str = "service";
const DATABASE: &str = "bench";
/// The row of `totals` that all clients have in common; a client's own has its number.
const COMMON: usize = 1000;

type Rows = Vec<Vec<Option<String>>>;

/// A connection to either.
enum Database {
    Postgres(Postgres),
    Mariadb(Mariadb),
}

impl Database {
    fn open(kind: Kind) -> Result<Self> {
        Ok(match kind {
            Kind::Postgres => Self::Postgres(Postgres::open(service(), USER, DATABASE, PATIENCE)?),
            Kind::Mariadb => Self::Mariadb(Mariadb::open(service(), USER, DATABASE, PATIENCE)?),
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
pub(super) enum Kind {
    Postgres,
    Mariadb,
}

/// A number that a query brings.
fn number(rows: &Rows) -> Result<u64> {
    let value = rows.first().and_then(|row| row.first());
    let value = value.context("no row")?.as_deref().context("a null")?;
    Ok(value.parse()?)
}

/// Makes the tables, with a row for each client, when the database answers.
pub(super) fn set_up(node: &Node, kind: Kind, clients: usize) -> Result<()> {
    on(node, move || {
        let mut database = Database::open(kind)?;
        database.run("create table entries (client int, number int, primary key (client, number))")?;
        database.run("create table totals (id int primary key, total bigint not null)")?;
        for id in (0..clients).chain([COMMON]) {
            database.run(&format!("insert into totals values ({id}, 0)"))?;
        }
        Ok(())
    })
}

/// One transaction after the other: an entry, the client's own sum, and with `common` one row that all write, after which they wait for
/// each other until the first one's commit.
pub(super) fn writes(kind: Kind, client: usize, common: bool) -> Result<Ask> {
    let mut database = Database::open(kind)?;
    Ok(Box::new(move |turn| {
        database.run("begin")?;
        database.run(&format!("insert into entries values ({client}, {turn})"))?;
        if common {
            database.run(&format!(
                "update totals set total = total + 1 where id = {COMMON}"
            ))?;
        }
        database.run(&format!(
            "update totals set total = total + 1 where id = {client}"
        ))?;
        let total = number(&database.run(&format!("select total from totals where id = {client}"))?)?;
        ensure!(total == turn, "a total of {total} instead of {turn}");
        if common {
            let all = number(&database.run(&format!("select total from totals where id = {COMMON}"))?)?;
            ensure!(
                all >= turn,
                "all have written {all} times, and this one {turn} times"
            );
        }
        database.run("commit")?;
        Ok(())
    }))
}

/// What is there at last is what the clients were told of: `told` by client.
pub(super) fn check(node: &Node, kind: Kind, told: &[u64], common: bool) -> Result<()> {
    let told = told.to_vec();
    on(node, move || {
        let mut database = Database::open(kind)?;
        for (client, &told) in told.iter().enumerate() {
            let mut ask = |what: &str| number(&database.run(&format!("select {what} = {client}"))?);
            let entries = ask("count(*) from entries where client")?;
            let newest = ask("max(number) from entries where client")?;
            let total = ask("total from totals where id")?;
            ensure!(
                (entries, newest, total) == (told, told, told),
                "client {client} was told of {told} commits: there are {entries} entries, the newest is {newest}, the sum is {total}"
            );
        }
        if common {
            let all = number(&database.run(&format!("select total from totals where id = {COMMON}"))?)?;
            let sum: u64 = told.iter().sum();
            ensure!(
                all == sum,
                "{sum} commits were told of, and the common sum is {all}"
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
