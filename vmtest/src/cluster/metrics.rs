//! A daemon's page of metrics, asked for as Prometheus does.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Cluster;

/// Where hosts serve their metrics.
const PORT: u16 = 9177;

impl Cluster<'_> {
    /// The host's daemon serves its metrics at the address that is returned, once it is started after this.
    pub fn serve_metrics(&self, host: &str) -> Result<SocketAddr> {
        let address = SocketAddr::new(self.testbed.node(host).address().into(), PORT);
        let file = self.host_file(host);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        fs::write(&file, format!("metrics = \"{address}\"\n{text}"))?;
        Ok(address)
    }
}

/// What is served there to a thread that reaches it: the answer's head, and the page.
///
/// # Errors
/// When nobody answers within `at_most`, or with something else.
pub fn scrape(address: SocketAddr, at_most: Duration) -> Result<(String, String)> {
    let mut tcp = TcpStream::connect_timeout(&address, at_most)?;
    tcp.set_read_timeout(Some(at_most))?;
    // In HTTP/1.0 a long answer comes in one piece.
    write!(tcp, "GET /metrics HTTP/1.0\r\nHost: dunlin\r\n\r\n")?;
    let mut answer = String::new();
    tcp.read_to_string(&mut answer)?;
    let (head, page) = answer
        .split_once("\r\n\r\n")
        .context("an answer without an end")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.contains(" 200 "), "metrics are answered by: {status}");
    Ok((head.to_owned(), page.to_owned()))
}
