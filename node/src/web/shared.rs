//! What all connections to the page and the API share.

use super::board::Board;
use super::hands::Hands;
use super::lines::Places;
use super::shares::{Shares, WRITES, WRITES_EACH};
use crate::control::address::NAME;
use crate::daemon::Daemon;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Connections of administrators, by the page and by the socket: a browser keeps no command out. Other users have the places of `daemon::roles`.
const ADMINISTRATORS: usize = 128;
const ADMINISTRATORS_HERE: usize = 256;

/// What all connections share.
pub struct Web {
    /// The daemon.
    pub daemon: Arc<Daemon>,
    pub(super) board: Arc<Board>,
    /// What a request shows that changes something.
    pub(super) token: String,
    /// Places for requests that take long.
    pub(super) writes: Shares,
    /// Who carries these out.
    pub(super) hands: Hands,
    /// Places for conversations by lines.
    pub(super) places: Places,
    pub(super) administrators: Arc<Semaphore>,
    pub(super) administrators_here: Arc<Semaphore>,
    /// What this host is called in requests of this machine, by the socket, and in those of others.
    pub(super) names: Vec<String>,
    pub(super) names_here: Vec<String>,
    pub(super) names_outside: Vec<String>,
}

impl Web {
    pub(super) fn new(
        daemon: Arc<Daemon>,
        (page, network): (Option<SocketAddr>, Option<SocketAddr>),
        token: String,
        hands: Hands,
    ) -> Arc<Self> {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        let address = |address: Option<SocketAddr>| address.map(|address| address.ip().to_string());
        let own = daemon.host.name.clone();
        let names: Vec<String> = names.into_iter().chain(address(page)).collect();
        Arc::new(Self {
            board: Board::start(&daemon),
            daemon,
            token,
            writes: Shares::new(WRITES, WRITES_EACH),
            hands,
            places: Places::new(),
            administrators: Arc::new(Semaphore::new(ADMINISTRATORS)),
            administrators_here: Arc::new(Semaphore::new(ADMINISTRATORS_HERE)),
            names_here: names.iter().cloned().chain([NAME.to_owned()]).collect(),
            names,
            names_outside: [own].into_iter().chain(address(network)).collect(),
        })
    }
}
