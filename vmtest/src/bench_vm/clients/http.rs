//! `wrk`, and a look at the page itself before and after: what was counted must have been the right page.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::super::case::Handshakes;
use super::{Clients, Measured, finish, patience, too_slow};

/// A file of each of these sizes, in KiB, is as likely as another: nginx has them by their bytes.
const SHORT_KIB: [u32; 6] = [2, 4, 8, 16, 32, 60];

/// What `wrk` is to ask for.
pub struct Ask {
    path: &'static str,
    tls: bool,
    keeps_connections: bool,
    /// Files of [`SHORT_KIB`]; the path is only looked at before and after.
    short: bool,
}

impl Ask {
    /// A page over kept connections.
    pub fn pages(path: &'static str) -> Self {
        Self {
            path,
            tls: false,
            keeps_connections: true,
            short: false,
        }
    }

    /// A page over TLS: with a handshake for each connection, kept or not.
    pub fn over_tls(path: &'static str, handshakes: Handshakes) -> Self {
        Self {
            tls: true,
            keeps_connections: handshakes == Handshakes::Kept,
            ..Self::pages(path)
        }
    }

    /// Many short answers.
    pub fn short(keeps_connections: bool) -> Self {
        Self {
            keeps_connections,
            short: true,
            ..Self::pages("/")
        }
    }
}

/// Asks for it.
pub fn run(clients: &Clients<'_>, ask: &Ask, connections: u32, seconds: f64) -> Result<Measured> {
    let path = ask.path;
    let before = look(clients, path)?;
    let mut command = clients.command("/usr/bin/wrk")?;
    command
        .args(["-t", "1", "-c", &connections.to_string(), "-d"])
        .arg(format!("{}s", seconds.ceil() as u64))
        .args(["--latency", "--timeout", "30s"]);
    if !ask.keeps_connections {
        command.args(["-H", "Connection: close"]);
    }
    if ask.short {
        const SCRIPT: &str = "short.lua";
        std::fs::write(clients.node.home().join(SCRIPT), short_script())?;
        command.args(["-s", &format!("/work/{SCRIPT}")]);
    }
    command.arg(match ask.tls {
        false => format!("http://{}:{}{path}", clients.guest, clients.port),
        true => format!("https://{}{path}", clients.guest),
    });
    let measured = parse(&finish(command, "wrk", patience(seconds))?)?;
    ensure!(look(clients, path)? == before, "the page at {path} has changed");
    Ok(measured)
}

/// Lua's chance begins with the same seed in each window.
fn short_script() -> String {
    let bytes = SHORT_KIB.map(|kib| (kib << 10).to_string()).join(", ");
    format!(
        "local bytes = {{{bytes}}}\nrequest = function() return wrk.format(\"GET\", \"/bulk/\" .. bytes[math.random(#bytes)]) end\n"
    )
}

fn look(clients: &Clients<'_>, path: &'static str) -> Result<Vec<u8>> {
    let target = clients.target();
    // A first SYN may be lost, and is sent again after a second.
    let asked = clients
        .node
        .spawn("look", move || page(target, path, Duration::from_secs(10)))?;
    asked
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
}

/// The page's body; an error unless there is a connection within `patience`, and the status is 200.
pub fn page(target: SocketAddr, path: &str, patience: Duration) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&target, patience)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: guest\r\nAccept: */*\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .context("no whole HTTP answer")?;
    let status = String::from_utf8_lossy(&answer[..end]);
    let status = status.lines().next().unwrap_or_default();
    ensure!(status.split(' ').nth(1) == Some("200"), "{path}: {status}");
    ensure!(answer.len() > end + 4, "{path}: an empty page");
    Ok(answer.split_off(end + 4))
}

fn parse(text: &str) -> Result<Measured> {
    // "Socket errors: connect 0, read 12, write 0, timeout 3", "Non-2xx or 3xx responses: 5": printed only if any.
    if let Some(line) = text
        .lines()
        .find(|line| line.contains("errors") || line.contains("Non-2xx"))
    {
        bail!("wrk: {}", line.trim());
    }
    let value = |label: &str| -> Result<&str> {
        let line = text.lines().map(str::trim).find(|line| line.starts_with(label));
        let line = line.with_context(|| format!("wrk printed no '{label}'"))?;
        Ok(line[label.len()..].trim())
    };
    let requests: u64 = text
        .lines()
        .find(|line| line.contains(" requests in "))
        .and_then(|line| line.split_whitespace().next())
        .context("wrk printed no number of requests")?
        .parse()?;
    if requests == 0 {
        return Err(too_slow("wrk: no request was answered in its time"));
    }
    Ok(Measured {
        requests,
        in_all: requests,
        per_second: value("Requests/sec:")?.parse()?,
        p50_ms: millis(value("50%")?)?,
        p99_ms: millis(value("99%")?)?,
    })
}

/// `812.00us`, `1.25ms`, `1.02s`, `1.1m`
fn millis(text: &str) -> Result<f64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits
        .parse()
        .with_context(|| format!("'{text}' is no time of wrk"))?;
    match &text[digits.len()..] {
        "us" => Ok(number / 1e3),
        "ms" => Ok(number),
        "s" => Ok(number * 1e3),
        "m" => Ok(number * 6e4),
        _ => bail!("'{text}' is no time of wrk"),
    }
}

#[cfg(test)]
mod tests {
    use super::{millis, parse};

    const GOOD: &str = "Running 2s test @ http://10.77.0.10:80/\n  1 threads and 16 connections\n  Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency     6.91ms    3.86ms  38.19ms   78.12%\n  Latency Distribution\n     50%    6.20ms\n     75%    8.35ms\n     90%   11.33ms\n     99%   21.04ms\n  4734 requests in 2.01s, 11.48MB read\nRequests/sec:   2355.61\nTransfer/sec:      5.71MB\n";

    #[test]
    fn the_answer_of_wrk_is_read() {
        let read = parse(GOOD).unwrap();
        assert_eq!(
            (read.requests, read.per_second, read.p50_ms, read.p99_ms),
            (4734, 2355.61, 6.2, 21.04)
        );
    }

    #[test]
    fn errors_are_no_figures() {
        for line in [
            "  Non-2xx or 3xx responses: 3\n",
            "  Socket errors: connect 0, read 2, write 0, timeout 0\n",
        ] {
            let text = GOOD.replace("Requests/sec", &format!("{line}Requests/sec"));
            assert!(parse(&text).is_err(), "{line}");
        }
    }

    #[test]
    fn times_have_units() {
        for (text, expected) in [("812.00us", 0.812), ("1.25ms", 1.25), ("1.02s", 1020.0)] {
            assert!((millis(text).unwrap() - expected).abs() < 1e-9);
        }
        assert!(millis("fast").is_err());
    }
}
