//! Asks the other hosts' daemons. What they ask is in `incoming`.

use super::Daemon;
use dunlin_api::{Answer, Request};
use std::time::Duration;

/// A peer that says nothing on a control link for this long is hung up on.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Asks another host's daemon.
pub fn ask(daemon: &Daemon, peer: &str, request: &Request) -> Answer {
    converse(daemon, peer, request, &mut |_| {})
}

/// As [`ask`]; what comes before the last answer goes to `each`.
pub fn converse(daemon: &Daemon, peer: &str, request: &Request, each: &mut dyn FnMut(&Answer)) -> Answer {
    crate::vm::ask_host(&daemon.host, peer, request, PATIENCE, each)
}
