//! `dunlin events --follow` of all running hosts, as one stream that wakes whoever waits for a change.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::Result;

use super::Cluster;

/// One follower per host; they end with this value.
pub struct Events {
    followers: Vec<Child>,
    lines: Receiver<()>,
}

impl Events {
    /// Starts to follow every running host.
    pub fn follow(cluster: &Cluster<'_>) -> Result<Self> {
        let (sender, lines) = mpsc::channel();
        let mut followers = Vec::new();
        for host in cluster.running() {
            let mut command = cluster.command(&host, &["events", "--follow", "--json"])?;
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
            let stdout = child.stdout.take().expect("a piped stdout");
            let sender = sender.clone();
            std::thread::spawn(move || {
                for _ in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(()).is_err() {
                        break;
                    }
                }
            });
            followers.push(child);
        }
        Ok(Self { followers, lines })
    }

    /// Returns at the next event, or after `at_most`.
    pub fn await_one(&self, at_most: Duration) {
        if self.lines.recv_timeout(at_most).is_ok() {
            // What came together is looked at together.
            while self.lines.try_recv().is_ok() {}
        } else if self.followers.is_empty() {
            std::thread::sleep(at_most);
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        for child in &mut self.followers {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
