//! Clients that send more than a VM can take.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::client::EVERYBODY;
use crate::testbed::Node;

/// Nobody listens there.
const CLOSED: u16 = 9;
/// How long a flooding client waits for a connection that it does not want.
const BRIEFLY: Duration = Duration::from_millis(50);
/// So many clients open connections at once.
const OPENERS: usize = 8;

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flood {
    /// Datagrams of that many bytes to a port where nobody listens.
    Datagrams(usize),
    /// Datagrams to everybody in the network: each host's daemon gets them on its VM's card as well.
    Broadcasts,
    /// Connections that are opened and closed.
    Connections,
}

impl Flood {
    /// One of them.
    pub fn of(variant: u64) -> Self {
        match variant % 4 {
            0 => Self::Datagrams(16),
            1 => Self::Datagrams(1400),
            2 => Self::Broadcasts,
            _ => Self::Connections,
        }
    }

    /// Sends as fast as this machine can, for so long. Returns how often.
    pub fn run(self, node: &Node, target: SocketAddr, lasts: Duration) -> Result<u64> {
        let senders = if self == Self::Connections { OPENERS } else { 1 };
        let mut threads = Vec::new();
        for _ in 0..senders {
            threads.push(node.spawn("flood", move || self.send(target, Instant::now() + lasts))?);
        }
        let mut sent = 0;
        for thread in threads {
            sent += thread.join().map_err(|_| anyhow!("a flood panicked"))???;
        }
        ensure!(sent > 0, "nothing of the flood was sent: mend the test");
        Ok(sent)
    }

    fn send(self, target: SocketAddr, until: Instant) -> Result<u64> {
        let mut sent = 0;
        let (to, bytes) = match self {
            Self::Datagrams(bytes) => (SocketAddr::new(target.ip(), CLOSED), bytes),
            Self::Broadcasts => (EVERYBODY.parse()?, 64),
            Self::Connections => {
                while Instant::now() < until {
                    sent += match TcpStream::connect_timeout(&target, BRIEFLY) {
                        Ok(_) => 1,
                        // It was asked for: the answer may wait for a sync.
                        Err(error) if error.kind() == ErrorKind::TimedOut => 1,
                        Err(_) => 0,
                    };
                }
                return Ok(sent);
            }
        };
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_broadcast(true)?;
        let datagram = vec![0x64; bytes];
        while Instant::now() < until {
            // A full queue, or word that nobody listens: the next one.
            sent += u64::from(socket.send_to(&datagram, to).is_ok());
        }
        Ok(sent)
    }
}
