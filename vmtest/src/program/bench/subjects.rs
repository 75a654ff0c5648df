//! What `bench programs` measures: each server, what is asked of it, and on how many connections.
//!
//! * **Decides:** the list. * **Not here:** how it is measured (`super`), what a server's plan is (`services`).

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;

use crate::program::Plan;
use crate::program::services::clients::{Ask, Open, asks_pages, counts, fetches_one, increments};
use crate::program::services::ledger::{self, Kind, Shares, Writer};
use crate::program::services::{go, lighttpd, mariadb, memcached, nginx, node, postgresql};
use crate::testbed::{Node, Testbed};

/// Rows that a database is given; no load has more connections.
const ROWS: usize = 64;

/// What is asked.
#[derive(Clone, Copy)]
pub(in crate::program) enum Load {
    /// redis-benchmark's SET of 64 bytes.
    RedisBenchmark,
    /// A thread for each connection, one request at a time.
    Own(Open),
    /// A thread for each connection, one query of one row at a time.
    Reads(Kind),
    /// A thread for each connection, one transaction at a time, which writes a row among others that more of them write.
    Writes(Kind, Shares),
}

impl Load {
    /// How one of `of` clients is connected.
    pub(in crate::program) fn opener(
        self,
        of: usize,
    ) -> impl Fn(SocketAddr, usize) -> Result<Ask> + Clone + Send {
        move |target, client| match self {
            Self::RedisBenchmark => increments(target, client),
            Self::Own(open) => open(target, client),
            Self::Reads(kind) => ledger::reads(kind, target, client),
            Self::Writes(kind, shares) => {
                let writer = Writer {
                    kind,
                    shares,
                    of,
                    repeated: Arc::default(),
                };
                writer.open(target, client)
            }
        }
    }
}

/// One load of a server.
pub(in crate::program) struct Asked {
    pub(in crate::program) what: &'static str,
    pub(in crate::program) load: Load,
    /// Parallel connections, where nobody says how many.
    pub(in crate::program) connections: &'static [u32],
}

/// A server.
pub(in crate::program) struct Subject {
    pub(in crate::program) name: &'static str,
    pub(in crate::program) plan: fn(&Testbed, u16) -> Result<Option<Plan>>,
    pub(in crate::program) loads: &'static [Asked],
    /// Its tables, before anything is asked.
    pub(in crate::program) database: Option<Kind>,
}

const CONNECTIONS: &[u32] = &[1, 16, 50];
/// More than a few writers of a common row wait for each other, with or without Dunlin.
const FEW: &[u32] = &[1, 2, 4, 16];

pub(in crate::program) static SUBJECTS: [Subject; 8] = [
    Subject {
        name: "redis",
        plan: redis,
        loads: &[one("SET of 64 bytes", Load::RedisBenchmark)],
        database: None,
    },
    Subject {
        name: "memcached",
        plan: memcached,
        loads: &[one("incr", Load::Own(counts))],
        database: None,
    },
    Subject {
        name: "nginx",
        plan: nginx,
        loads: &[one("a file of 700 bytes", Load::Own(fetches_one))],
        database: None,
    },
    Subject {
        name: "lighttpd",
        plan: lighttpd,
        loads: &[one("a page of php-cgi with a session", Load::Own(asks_pages))],
        database: None,
    },
    Subject {
        name: "node",
        plan: node,
        loads: &[one("INCR", Load::Own(increments))],
        database: None,
    },
    Subject {
        name: "go",
        plan: go,
        loads: &[one("INCR", Load::Own(increments))],
        database: None,
    },
    Subject {
        name: "postgresql",
        plan: postgresql,
        loads: &database(Kind::Postgres),
        database: Some(Kind::Postgres),
    },
    Subject {
        name: "mariadb",
        plan: mariadb,
        loads: &database(Kind::Mariadb),
        database: Some(Kind::Mariadb),
    },
];

const fn one(what: &'static str, load: Load) -> Asked {
    Asked {
        what,
        load,
        connections: CONNECTIONS,
    }
}

const fn database(kind: Kind) -> [Asked; 3] {
    let writes = Asked {
        what: "transactions of six statements, one of a row that all write",
        load: Load::Writes(kind, Shares::Common),
        connections: FEW,
    };
    let circles = Asked {
        what: "transactions that may wait for each other in a circle",
        load: Load::Writes(kind, Shares::Ring),
        connections: &[4],
    };
    [one("a row by its key", Load::Reads(kind)), writes, circles]
}

fn redis(testbed: &Testbed, _: u16) -> Result<Option<Plan>> {
    Plan::redis(testbed).map(Some)
}

impl Subject {
    /// So that what is asked finds its tables.
    pub(in crate::program) fn set_up(&self, client: &Node, target: SocketAddr) -> Result<()> {
        match self.database {
            Some(kind) => ledger::set_up(client, kind, target, ROWS),
            None => Ok(()),
        }
    }

    /// Its copies take locks in an order of their own, so they may differ: that is told, and a round in which they did is repeated.
    pub(in crate::program) fn may_differ(&self) -> bool {
        self.database.is_some()
    }
}
