//! A network that is never silent: broadcasts of a client that no service listens to, as any office's network is full of.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use crate::testbed::Node;

/// To the discard port of everybody on the testbed's network.
pub const EVERYBODY: &str = "10.77.255.255:9";
/// How often: as much as a large office's network has of them.
const PAUSE: Duration = Duration::from_millis(10);
const BYTES: usize = 400;

/// Broadcasts that are being sent.
pub struct Broadcasts {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Result<u64>>>,
}

impl Broadcasts {
    /// From that node, until [`Broadcasts::finish`].
    pub fn start(node: &Node) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let thread = node.spawn("broadcasts", move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_broadcast(true)?;
            let mut sent = 0;
            while !until.load(Ordering::Relaxed) {
                socket.send_to(&[0; BYTES], EVERYBODY).context("a broadcast")?;
                sent += 1;
                // The load's rate; nothing is waited for.
                std::thread::sleep(PAUSE);
            }
            Ok(sent)
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends them. A run in which there were none has shown nothing.
    pub fn finish(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self
            .thread
            .join()
            .map_err(|_| anyhow!("the thread that broadcasts panicked"))???;
        ensure!(sent > 100, "only {sent} broadcasts were sent");
        Ok(())
    }
}
