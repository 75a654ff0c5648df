//! iperf3 itself, over one connection: what its receiving end has got.
//!
//! Its requests are MiB, as those of our own bulk client; it tells no latencies. The server's bytes are random, made anew for each test: of a
//! protected VM they differ in both copies until the first sync, and are equal then.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::super::case::{Way, Wire};
use super::{Clients, Measured, finish, patience, too_slow};

/// As much as datagrams are sent of, in bits a second: more than what some of the ways carry, whatever is sent, is only lost.
const DATAGRAMS: &str = "100M";
/// The greeting with which a client names its test.
const COOKIE_BYTES: usize = 37;
/// The server's word that the test's parameters may come.
const PARAMETERS: u8 = 9;

/// The load.
pub fn run(clients: &Clients<'_>, way: Way, wire: Wire, seconds: f64) -> Result<Measured> {
    let mut command = clients.command("/usr/bin/iperf3")?;
    command.args(["-J", "-c", &clients.guest.to_string(), "-p"]);
    command.args([&clients.port.to_string(), "-t", &format!("{}", seconds.ceil())]);
    if way == Way::Down {
        command.arg("-R");
    }
    if wire == Wire::Udp {
        command.args(["-u", "-b", DATAGRAMS]);
    }
    received(&finish(
        command,
        "iperf3",
        patience(seconds) + Duration::from_secs(10),
    )?)
}

/// What came, of its words.
fn received(said: &str) -> Result<Measured> {
    let said: Value = serde_json::from_str(said).context("iperf3 says no JSON")?;
    if let Some(error) = said["error"].as_str() {
        anyhow::bail!("iperf3: {error}");
    }
    let sum = &said["end"]["sum_received"];
    let figure = |name: &str| {
        let figure = sum[name].as_f64();
        figure.with_context(|| format!("iperf3 does not say {name}"))
    };
    let (bytes, seconds) = (figure("bytes")?, figure("seconds")?);
    ensure!(seconds > 0.0, "iperf3 took no time");
    let mib = bytes / f64::from(1 << 20);
    if mib < 1.0 {
        return Err(too_slow("less than a MiB came"));
    }
    Ok(Measured {
        requests: mib as u64,
        in_all: mib as u64,
        per_second: mib / seconds,
        ..Measured::default()
    })
}

/// A client's greeting.
pub fn cookie() -> [u8; COOKIE_BYTES] {
    let mut cookie = [b'a'; COOKIE_BYTES];
    cookie[COOKIE_BYTES - 1] = 0;
    cookie
}

/// Whether it is answered as it should.
pub fn greets(answer: &[u8]) -> bool {
    answer == [PARAMETERS]
}

#[cfg(test)]
mod tests {
    use super::received;

    #[test]
    fn what_the_receiving_end_has_got_counts() {
        let said = r#"{"end": {"sum_sent": {"bytes": 9000000, "seconds": 2.0},
            "sum_received": {"start": 0, "seconds": 2.0, "bytes": 8388608, "bits_per_second": 33554432}}}"#;
        let measured = received(said).unwrap();
        assert_eq!((measured.requests, measured.per_second), (8, 4.0));
    }

    #[test]
    fn an_error_and_a_test_in_which_nothing_came_have_no_figure() {
        let refused = received(r#"{"error": "the server is busy"}"#).unwrap_err();
        assert_eq!(refused.to_string(), "iperf3: the server is busy");
        assert!(received(r#"{"end": {}}"#).is_err());
        let nothing = r#"{"end": {"sum_received": {"seconds": 2.0, "bytes": 8388}}}"#;
        assert!(received(nothing).unwrap_err().is::<super::super::TooSlow>());
    }
}
