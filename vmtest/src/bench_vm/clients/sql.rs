//! `pgbench` and `sysbench`.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::{Clients, Measured, finish, patience, too_slow};

/// pgbench's transactions: each one's latency is in its log, from which the percentiles come.
pub fn pgbench(clients: &Clients<'_>, words: &[&str], connections: u32, seconds: f64) -> Result<Measured> {
    const LOG: &str = "pgbench-log";
    let is_log = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(LOG);
    let logs = || -> Result<Vec<std::path::PathBuf>> {
        let entries = fs::read_dir(clients.node.home())?.flatten();
        Ok(entries
            .filter(|entry| is_log(&entry.file_name()))
            .map(|entry| entry.path())
            .collect())
    };
    for old in logs()? {
        fs::remove_file(old)?;
    }
    let mut command = clients.command("/usr/lib/postgresql/15/bin/pgbench")?;
    command
        .args(["-h", &clients.guest.to_string(), "-p", &clients.port.to_string()])
        .args([
            "-U",
            "service",
            "-n",
            "-j",
            "1",
            "-c",
            &connections.to_string(),
            "-T",
        ])
        .arg((seconds.ceil() as u64).to_string())
        .args(["-l", &format!("--log-prefix=/work/{LOG}")])
        .args(words)
        .arg("bench");
    let text = finish(command, "pgbench", patience(seconds))?;
    let (requests, per_second) = parse_pgbench(&text)?;
    let mut latencies_us = Vec::new();
    for log in logs()? {
        let lines = fs::read_to_string(&log)?;
        for line in lines.lines() {
            let latency = line
                .split(' ')
                .nth(2)
                .context("pgbench's log has no third column")?;
            latencies_us.push(
                latency
                    .parse()
                    .with_context(|| format!("pgbench's log: {line}"))?,
            );
        }
    }
    let from_log = Measured::from_latencies(&mut latencies_us, seconds)?;
    Ok(Measured {
        requests,
        in_all: requests,
        per_second,
        ..from_log
    })
}

fn parse_pgbench(text: &str) -> Result<(u64, f64)> {
    let value = |label: &str| -> Result<&str> {
        let rest = text.lines().find_map(|line| line.strip_prefix(label));
        let rest = rest.with_context(|| format!("pgbench printed no '{label}'"))?;
        rest.split_whitespace().next().context("an empty value")
    };
    let failed = value("number of failed transactions:")?;
    ensure!(failed == "0", "pgbench: {failed} failed transactions");
    let processed = value("number of transactions actually processed:")?;
    if processed == "0" {
        return Err(too_slow("pgbench: no transaction ended in its time"));
    }
    Ok((processed.parse()?, value("tps =")?.parse()?))
}

/// sysbench's read-write transactions. A deadlock that MariaDB resolves is rolled back and tried again; sysbench does
/// not count it as a transaction.
pub fn sysbench(clients: &Clients<'_>, connections: u32, seconds: f64) -> Result<Measured> {
    let mut command = clients.command("/usr/bin/sysbench")?;
    command
        .arg("oltp_read_write")
        .arg(format!("--mysql-host={}", clients.guest))
        .arg(format!("--mysql-port={}", clients.port))
        .arg(format!("--threads={connections}"))
        .arg(format!("--time={}", seconds.ceil() as u64))
        .args([
            "--db-driver=mysql",
            "--mysql-user=bench",
            "--mysql-password=bench",
            "--mysql-db=sbtest",
        ])
        .args([
            "--tables=4",
            "--table-size=5000",
            "--histogram=on",
            "--percentile=99",
            "run",
        ]);
    parse_sysbench(&finish(command, "sysbench", patience(seconds))?)
}

fn parse_sysbench(text: &str) -> Result<Measured> {
    if let Some(line) = text.lines().find(|line| line.contains("FATAL")) {
        bail!("sysbench: {line}");
    }
    let value = |label: &str| -> Result<&str> {
        let rest = text.lines().find_map(|line| line.trim().strip_prefix(label));
        Ok(rest
            .with_context(|| format!("sysbench printed no '{label}'"))?
            .trim())
    };
    let reconnects = value("reconnects:")?;
    ensure!(
        reconnects.starts_with("0 "),
        "sysbench: {reconnects} reconnects: connections broke"
    );
    let transactions = value("transactions:")?;
    let (count, rate) = transactions.split_once('(').context("no rate of transactions")?;
    let requests: u64 = count.trim().parse()?;
    if requests == 0 {
        return Err(too_slow("sysbench: no transaction ended in its time"));
    }
    let per_second = rate
        .split_whitespace()
        .next()
        .context("no rate of transactions")?
        .parse()?;
    // "       6.205 |*************                            19": the upper end of a bucket, and how many are in it.
    let mut buckets: Vec<(f64, u64)> = Vec::new();
    for line in text.lines().filter(|line| line.contains(" |")) {
        let (end, rest) = line.split_once('|').unwrap_or_default();
        let many = rest.trim_start_matches('*').trim();
        if let (Ok(end), Ok(many)) = (end.trim().parse(), many.parse()) {
            buckets.push((end, many));
        }
    }
    let in_all: u64 = buckets.iter().map(|(_, many)| many).sum();
    let rank = |percent: u64| {
        let wanted = (in_all * percent).div_ceil(100);
        let mut so_far = 0;
        let found = buckets.iter().find(|(_, many)| {
            so_far += many;
            so_far >= wanted
        });
        found
            .map(|(end, _)| *end)
            .context("sysbench printed no histogram")
    };
    Ok(Measured {
        requests,
        in_all: requests,
        per_second,
        p50_ms: rank(50)?,
        p99_ms: rank(99)?,
    })
}

#[cfg(test)]
mod tests {
    use super::{parse_pgbench, parse_sysbench};

    #[test]
    fn the_answer_of_pgbench_is_read_and_failures_are_no_figures() {
        let text = "number of clients: 16\nnumber of transactions actually processed: 1234\nnumber of failed transactions: 0 (0.000%)\nlatency average = 64.8 ms\ntps = 246.9 (without initial connection time)\n";
        assert_eq!(parse_pgbench(text).unwrap(), (1234, 246.9));
        assert!(parse_pgbench(&text.replace("transactions: 0 ", "transactions: 2 ")).is_err());
        let none = text.replace("processed: 1234", "processed: 0");
        assert!(
            parse_pgbench(&none)
                .unwrap_err()
                .to_string()
                .contains("no transaction")
        );
        assert!(parse_pgbench("tps = 3\n").is_err());
    }

    #[test]
    fn the_answer_of_sysbench_is_read_and_broken_connections_are_no_figures() {
        let text = "Latency histogram (values are in milliseconds)\n       value  ------------- distribution ------------- count\n      10.000 |**********                               10\n      20.000 |****************************************  88\n      90.000 |*                                        2\n\n    transactions:                        100    (20.00 per sec.)\n    ignored errors:                      0      (0.00 per sec.)\n    reconnects:                          0      (0.00 per sec.)\n";
        let read = parse_sysbench(text).unwrap();
        assert_eq!(
            (read.requests, read.per_second, read.p50_ms, read.p99_ms),
            (100, 20.0, 20.0, 90.0)
        );
        assert!(
            parse_sysbench(&text.replace("reconnects:                          0", "reconnects: 3")).is_err()
        );
        assert!(parse_sysbench(&text.replace("  100 ", "  0 ")).is_err());
    }
}
