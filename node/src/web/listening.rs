//! A port for other machines, and who may come in there that nobody knows yet.
//!
//! **Decides**: what an address means that this machine has not: it may come yet, as while the machine starts, so it is asked for again and again, and
//! no VM waits with it. **Flow**: an address -> [`Listening`] -> each connection, with its [`Place`]. **Invariant**: one address has a few of the places,
//! never all ([`Places`]). **Not here**: what visitors want.

use dunlin_fabric::link::{Place, Places};
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::sleep;

/// When no connection could be taken.
const AGAIN: Duration = Duration::from_millis(100);
/// An address that this machine has not is asked for this often.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// What the kernel holds of an answer for one who is slow.
const SEND_BYTES: usize = 128 << 10;

/// The port; perhaps there is none yet.
pub struct Listening {
    address: SocketAddr,
    listener: Option<TcpListener>,
}

impl Listening {
    /// Listens there, or will.
    ///
    /// # Errors
    /// Any but that this machine has not that address.
    pub fn at(address: SocketAddr) -> io::Result<Self> {
        let listener = match listen(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => None,
            listener => Some(listener?),
        };
        Ok(Self { address, listener })
    }

    /// Why nobody can come in yet; none where they can.
    pub fn complaint(&self) -> Option<String> {
        let waits = self.listener.is_none();
        waits.then(|| {
            format!(
                "no interface of this host has the address {} (now); it is tried again",
                self.address
            )
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same, for a runtime of its own.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            address: self.address,
            listener: self.listener.as_ref().map(TcpListener::try_clone).transpose()?,
        })
    }

    /// Lets visitors in for ever. Whoever finds no place is hung up on, and may come again.
    pub async fn let_in(self, come: impl Fn(TcpStream, SocketAddr, Place)) {
        let (listener, places) = (self.listens().await, Places::default());
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    if let Some(place) = places.take(from.ip()) {
                        come(stream, from, place);
                    }
                }
                Err(error) => none_now(&error).await,
            }
        }
    }

    async fn listens(mut self) -> tokio::net::TcpListener {
        loop {
            match self.listener.take().map(tokio::net::TcpListener::from_std) {
                Some(Ok(listener)) => return listener,
                Some(Err(error)) => tracing::warn!("listening at {}: {error}", self.address),
                None => {}
            }
            sleep(ASK_AGAIN).await;
            self.listener = listen(self.address).ok();
        }
    }
}

pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Those that are accepted have the same.
    set_socket_send_buffer_size(&listener, SEND_BYTES)?;
    Ok(listener)
}

/// As when there are no more descriptors: somebody may give one back.
pub(super) async fn none_now(error: &io::Error) {
    tracing::debug!("no connection could be taken: {error}");
    sleep(AGAIN).await;
}
