//! The services and the loads on them: each service with its usual client, and the cases where matching is hard.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::link::Link;

/// What a case is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A service under its usual load: part of the geometric mean.
    Service,
    /// A load that is hard for two copies to answer alike; judged one by one.
    Hard,
}

/// Who makes the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// `redis-benchmark` with these words.
    Redis(&'static [&'static str]),
    /// `redis-benchmark` counting on one key, which is read before and after: each INCR must have counted once.
    Counter,
    /// Our own client: one thread for each connection, nine `get` to one `set` of 64 bytes, each value checked.
    Memcached,
    /// `pgbench` with these words.
    Pgbench(&'static [&'static str]),
    /// `sysbench oltp_read_write`.
    Sysbench,
    /// `wrk` on this path.
    Http(&'static str),
    /// `wrk` on this path over TLS.
    Https(&'static str, Handshakes),
    /// `wrk` on files of 2 to 60 KiB, whose order is the same in each window.
    Short {
        /// Else each request has a connection of its own.
        keeps_connections: bool,
    },
    /// OpenSSH's client: a line there and back.
    Ssh(Handshakes),
    /// Our own client: one thread for each connection. Its requests are MiB, its latencies those of whole transfers.
    Bulk(Bulk),
    /// iperf3 over one connection. Its requests are MiB.
    Iperf3(Way, Wire),
}

/// Many bytes in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bulk {
    /// Whose they are.
    pub way: Way,
    /// Of each transfer.
    pub bytes: usize,
    /// Else each transfer has a connection of its own.
    pub keeps_connections: bool,
}

/// Who sends what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The VM: files of nginx's.
    Down,
    /// The client: values for redis.
    Up,
}

/// What carries iperf3's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// A stream.
    Tcp,
    /// Datagrams, as many as are asked for.
    Udp,
}

/// How often a client and a service agree on keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshakes {
    /// Once for each connection, which is kept.
    Kept,
    /// For each request, with nothing of an earlier one.
    Each,
}

/// One load on one service.
#[derive(Clone, Debug)]
pub struct Case {
    /// The service, by the name of its guest image.
    pub service: &'static str,
    /// What is asked of it.
    pub name: &'static str,
    /// Parallel connections.
    pub connections: u32,
    /// What it is for.
    pub kind: Kind,
    /// Who makes the load.
    pub load: Load,
    /// What lies between the clients and the VM's network.
    pub link: Link,
}

/// The eight services, in the order in which reports show them.
pub const SERVICES: [&str; 8] = [
    "redis",
    "memcached",
    "postgresql",
    "mariadb",
    "nginx",
    "php",
    "nodejs",
    "tomcat",
];

const SET: &[&str] = &["-t", "set", "-r", "10000", "-d", "64"];
const GET: &[&str] = &["-t", "get", "-r", "10000", "-d", "64"];

/// Where a report shows a service: one that has hard cases only comes last.
pub fn place(service: &str) -> usize {
    let found = SERVICES.iter().position(|&name| name == service);
    found.unwrap_or(SERVICES.len())
}

/// Service, name and load, all at 16 connections.
const HARD: [(&str, &str, Load); 10] = [
    ("redis", "counter", Load::Counter),
    ("redis", "time", Load::Redis(&["TIME"])),
    (
        "redis",
        "reconnect",
        Load::Redis(&["-k", "0", "-t", "set", "-r", "10000", "-d", "64"]),
    ),
    (
        "redis",
        "pipeline",
        Load::Redis(&["-P", "16", "-t", "set", "-r", "10000", "-d", "64"]),
    ),
    (
        "redis",
        "set-16k",
        Load::Redis(&["-t", "set", "-r", "1000", "-d", "16384"]),
    ),
    (
        "redis",
        "get-16k",
        Load::Redis(&["-t", "get", "-r", "1000", "-d", "16384"]),
    ),
    ("nginx", "tls-kept", Load::Https("/", Handshakes::Kept)),
    ("nginx", "tls-handshake", Load::Https("/", Handshakes::Each)),
    ("ssh", "ssh-echo", Load::Ssh(Handshakes::Kept)),
    ("ssh", "ssh-login", Load::Ssh(Handshakes::Each)),
];

/// Service, name, direction, bytes, and whether connections are kept; all with one connection at a time. Not among `all`.
const BULK: [(&str, &str, Way, usize, bool); 10] = [
    ("nginx", "down-64m", Way::Down, 64 << 20, true),
    ("nginx", "down-1m", Way::Down, 1 << 20, true),
    ("nginx", "down-1m-fresh", Way::Down, 1 << 20, false),
    ("nginx", "down-100k", Way::Down, 100 << 10, true),
    ("nginx", "down-100k-fresh", Way::Down, 100 << 10, false),
    ("redis", "up-64m", Way::Up, 64 << 20, true),
    ("redis", "up-1m", Way::Up, 1 << 20, true),
    ("redis", "up-1m-fresh", Way::Up, 1 << 20, false),
    ("redis", "up-100k", Way::Up, 100 << 10, true),
    ("redis", "up-100k-fresh", Way::Up, 100 << 10, false),
];

/// What `iperf3` is: in both directions. Not among `all`.
const IPERF3: [(&str, Way, Wire); 4] = [
    ("iperf3-down", Way::Down, Wire::Tcp),
    ("iperf3-up", Way::Up, Wire::Tcp),
    ("iperf3-udp-down", Way::Down, Wire::Udp),
    ("iperf3-udp-up", Way::Up, Wire::Udp),
];

/// The one case that stands for a service where there is no time for all.
const USUAL: [&str; 8] = [
    "set", "get-set", "tpcb", "oltp-rw", "static", "page", "json", "servlet",
];
/// The answers of a web server that the paper of speculative communication measures (VEE'12, figure 8: SPECweb2005, 100 connections), in small. Not among
/// `all`.
const SHORT: [(&str, bool); 2] = [("http-short", true), ("http-short-fresh", false)];
const SHORT_CONNECTIONS: u32 = 100;
/// A transaction is many questions, and sixteen that wait for each other's rows end in crowds: less sees too few of them.
const TRANSACTIONS_S: f64 = 3.0;

impl Case {
    /// How long a window is whose length is `seconds` where nothing else is known.
    pub fn window_s(&self, seconds: f64) -> f64 {
        match self.load {
            // Nor does a transfer of 64 MiB end in less.
            Load::Pgbench(_) | Load::Sysbench | Load::Bulk(_) | Load::Iperf3(..) => {
                seconds.max(TRANSACTIONS_S)
            }
            _ => seconds,
        }
    }

    /// Its name in a report: `set`, and over another link than the plain one `set 5ms`.
    pub fn label(&self) -> String {
        match self.link == Link::Lan {
            true => self.name.to_owned(),
            false => format!("{} {}", self.name, self.link),
        }
    }

    /// `redis set c=16`
    pub fn title(&self) -> String {
        format!("{} {} c={}", self.service, self.label(), self.connections)
    }
}

/// Every case, in the order of measurement.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    // 4, 16 and 48 are the numbers of clients of PLOVER's dissertation.
    for connections in [1, 4, 16, 48] {
        for (name, load) in [("set", Load::Redis(SET)), ("get", Load::Redis(GET))] {
            cases.push(case("redis", name, connections, load));
        }
    }
    for (service, name, load) in HARD {
        cases.push(Case {
            kind: Kind::Hard,
            ..case(service, name, 16, load)
        });
    }
    for connections in [1, 16] {
        cases.push(case("memcached", "get-set", connections, Load::Memcached));
        cases.push(case("postgresql", "tpcb", connections, Load::Pgbench(&[])));
        cases.push(case("postgresql", "select", connections, Load::Pgbench(&["-S"])));
        cases.push(case("mariadb", "oltp-rw", connections, Load::Sysbench));
        cases.push(case("nginx", "static", connections, Load::Http("/")));
        cases.push(case("php", "page", connections, Load::Http("/index.php?n=400")));
        cases.push(case("nodejs", "json", connections, Load::Http("/orders")));
        let servlet = "/examples/servlets/servlet/HelloWorldExample";
        cases.push(case("tomcat", "servlet", connections, Load::Http(servlet)));
    }
    cases
}

fn case(service: &'static str, name: &'static str, connections: u32, load: Load) -> Case {
    Case {
        service,
        name,
        connections,
        kind: Kind::Service,
        load,
        link: Link::Lan,
    }
}

/// Each of `cases` over each of `links`: link by link for each service, so that a cable is changed seldom. No link is the plain one.
pub fn over(cases: &[Case], links: &[Link]) -> Vec<Case> {
    if links.is_empty() {
        return cases.to_vec();
    }
    let services = cases.chunk_by(|a, b| a.service == b.service);
    services
        .flat_map(|cases| {
            let over = |&link| cases.iter().map(move |case| Case { link, ..case.clone() });
            links.iter().flat_map(over)
        })
        .collect()
}

/// The cases that `words` ask for: `all`, `usual` (one of each service), `hard`, services, or single cases such as `counter`; of them those with one
/// of these numbers of connections.
///
/// # Errors
/// With the list of what there is, for a word that names nothing.
pub fn choose(words: &[String], connections: Option<&[u32]>) -> Result<Vec<Case>> {
    let mut every = all();
    let bulk = BULK.map(|(service, name, way, bytes, keeps_connections)| Case {
        kind: Kind::Hard,
        ..case(
            service,
            name,
            1,
            Load::Bulk(Bulk {
                way,
                bytes,
                keeps_connections,
            }),
        )
    });
    let short = SHORT.map(|(name, keeps_connections)| Case {
        kind: Kind::Hard,
        ..case(
            "nginx",
            name,
            SHORT_CONNECTIONS,
            Load::Short { keeps_connections },
        )
    });
    let iperf3 = IPERF3.map(|(name, way, wire)| Case {
        kind: Kind::Hard,
        ..case("iperf3", name, 1, Load::Iperf3(way, wire))
    });
    every.extend(bulk.into_iter().chain(short).chain(iperf3));
    let is_bulk = |case: &Case| matches!(case.load, Load::Bulk(_));
    let is_asked_for_alone =
        |case: &Case| is_bulk(case) || matches!(case.load, Load::Short { .. } | Load::Iperf3(..));
    let matches = |case: &Case, word: &str| match word {
        "all" => !is_asked_for_alone(case),
        "bulk" => is_bulk(case),
        "iperf3" => case.service == word,
        "usual" => case.kind == Kind::Service && USUAL.contains(&case.name),
        "hard" => case.kind == Kind::Hard && !is_asked_for_alone(case),
        _ => case.name == word || case.service == word && case.kind == Kind::Service,
    };
    for word in words {
        if !every.iter().any(|case| matches(case, word)) {
            let hard: Vec<&str> = HARD.iter().map(|(_, name, _)| *name).collect();
            bail!(
                "no service or case '{word}': there are all, usual, {}, hard, {}, bulk, {}, {}, iperf3, {}",
                SERVICES.join(", "),
                hard.join(", "),
                BULK.map(|(_, name, ..)| name).join(", "),
                SHORT.map(|(name, _)| name).join(", "),
                IPERF3.map(|(name, ..)| name).join(", ")
            );
        }
    }
    let mut chosen: Vec<Case> = every
        .into_iter()
        .filter(|case| words.iter().any(|word| matches(case, word)))
        .filter(|case| connections.is_none_or(|wanted| wanted.contains(&case.connections)))
        .collect();
    chosen.sort_by_key(|case| place(case.service));
    if chosen.is_empty() {
        bail!("none of the chosen cases has that number of connections");
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::{Link, SERVICES, all, choose, over};

    #[test]
    fn every_service_has_a_case_at_one_and_at_sixteen_connections() {
        for service in SERVICES {
            for connections in [1, 16] {
                assert!(
                    all()
                        .iter()
                        .any(|case| case.service == service && case.connections == connections),
                    "{service} {connections}"
                );
            }
        }
    }

    #[test]
    fn words_choose_services_and_cases_and_unknown_ones_are_refused() {
        let choose = |words: &[&str], connections: Option<&[u32]>| {
            let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            choose(&words, connections)
        };
        assert_eq!(choose(&["all"], None).unwrap().len(), all().len());
        assert_eq!(choose(&["hard"], None).unwrap().len(), 10);
        assert_eq!(choose(&["bulk"], None).unwrap().len(), 10);
        assert_eq!(choose(&["iperf3"], None).unwrap().len(), 4);
        assert_eq!(choose(&["iperf3-up"], None).unwrap()[0].service, "iperf3");
        assert_eq!(choose(&["up-1m"], None).unwrap()[0].service, "redis");
        let short = choose(&["http-short", "http-short-fresh"], None).unwrap();
        assert_eq!(
            short.iter().map(|case| case.connections).collect::<Vec<_>>(),
            [100, 100]
        );
        assert_eq!(choose(&["tls-handshake"], None).unwrap()[0].service, "nginx");
        let hard = choose(&["hard"], None).unwrap();
        assert_eq!((hard[0].service, hard.last().unwrap().service), ("redis", "ssh"));
        assert_eq!(choose(&["redis"], Some(&[1])).unwrap().len(), 2);
        assert_eq!(choose(&["redis"], Some(&[4, 16, 48])).unwrap().len(), 6);
        let usual = choose(&["usual"], Some(&[1, 16])).unwrap();
        assert_eq!(usual.len(), 16);
        for service in SERVICES {
            assert_eq!(usual.iter().filter(|case| case.service == service).count(), 2);
        }
        assert_eq!(choose(&["counter", "nginx"], None).unwrap().len(), 3);
        let error = choose(&["redsi"], None).unwrap_err().to_string();
        assert!(
            error.contains("'redsi'") && error.contains("memcached"),
            "{error}"
        );
        assert!(choose(&["nginx"], Some(&[48])).is_err());
    }

    #[test]
    fn every_link_comes_once_for_each_service_and_a_plain_one_changes_no_name() {
        let words = ["down-1m", "up-1m", "down-64m"].map(str::to_owned);
        let cases = choose(&words, None).unwrap();
        let links = ["lan", "5ms"].map(|word| word.parse::<Link>().unwrap());
        let labels: Vec<String> = over(&cases, &links).iter().map(super::Case::label).collect();
        let redis = ["up-1m", "up-1m 5ms"];
        let nginx = ["down-64m", "down-1m", "down-64m 5ms", "down-1m 5ms"];
        assert_eq!(labels, [&redis[..], &nginx[..]].concat());
        let plain: Vec<String> = over(&cases, &[]).iter().map(super::Case::label).collect();
        assert_eq!(plain, ["up-1m", "down-64m", "down-1m"]);
    }
}
