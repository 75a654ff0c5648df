//! Keeps a log link to a peer: connects, hands the stream to the loop (of a VM or a log), and connects again when the loop says that it
//! is lost. Of two hosts the one earlier in the group connects.

use super::shared::Host;
use crate::control::client::Client;
use crossbeam_channel::{Receiver, Sender, bounded};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_core::units::Term;
use dunlin_fabric::link::{Hello, LinkError, Purpose, Stream, connect};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a connection may take, and how long to wait before the next try.
const TRY: Duration = Duration::from_millis(500);
const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// A link that was lost sooner than this was hardly one: a host that has no part in the group any more, and has not heard of that, is let in and hung
/// up on. It rests longer after each of them, up to this.
const STANDS: Duration = Duration::from_secs(1);

/// How long a connection for a request may take.
const ASK: Duration = Duration::from_secs(5);

/// Why there is no stream to another host.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody knows its address.
    #[error("host '{0}' is not in the cluster")]
    Unknown(String),
    /// It is not reached, or refuses.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Says that the link is lost; dropping it ends the connector.
pub struct Connector {
    lost: Sender<()>,
}

impl Connector {
    /// Starts connecting; each stream goes to `deliver`.
    pub fn start(
        host: Arc<Host>,
        vm: String,
        peer_name: String,
        deliver: impl Fn(Stream) + Send + 'static,
    ) -> Self {
        let (lost, lost_receiver) = bounded(1);
        let work = move || keep_connected(&host, &vm, &peer_name, &deliver, &lost_receiver);
        // Without the thread there is no link, which every part of the group survives and shows.
        if let Err(error) = std::thread::Builder::new().name("log-connect".into()).spawn(work) {
            tracing::error!("a thread to connect to another host: {error}");
        }
        Self { lost }
    }

    /// The link is lost: connect again.
    pub fn link_lost(&self) {
        // Full: it is connecting already.
        let _ = self.lost.try_send(());
    }
}

fn keep_connected(host: &Host, vm: &str, peer_name: &str, deliver: &dyn Fn(Stream), lost: &Receiver<()>) {
    let mut complaint = String::new();
    let mut hardly = 0;
    loop {
        let rest = match open(host, vm, peer_name, Purpose::Log, Term(0), Vec::new()) {
            Ok(stream) => {
                complaint.clear();
                deliver(stream);
                let since = Instant::now();
                #[expect(clippy::disallowed_methods, reason = "nothing is owed while the link stands")]
                let ended = lost.recv().is_err();
                if ended {
                    return;
                }
                if since.elapsed() >= STANDS {
                    hardly = 0;
                    continue;
                }
                hardly += 1;
                rest_after(hardly)
            }
            Err(why) => {
                let why = why.to_string();
                if why != complaint {
                    host.events
                        .push(vm, EventKind::LinkRefused, format!("host '{peer_name}': {why}"));
                    complaint = why;
                }
                BETWEEN_TRIES
            }
        };
        // A pause between tries, which the end of the loop cuts short.
        match lost.recv_timeout(rest) {
            Err(crossbeam_channel::RecvTimeoutError::Disconnected) => return,
            Ok(()) | Err(crossbeam_channel::RecvTimeoutError::Timeout) => {}
        }
    }
}

/// After so many links in a row that were hardly ones.
fn rest_after(hardly: u32) -> Duration {
    let doubled = 1 << hardly.saturating_sub(1).min(8);
    (BETWEEN_TRIES * doubled).min(STANDS)
}

/// Connects to a host for some purpose; `extra` is the purpose's own.
pub fn open(
    host: &Host,
    vm: &str,
    peer_name: &str,
    purpose: Purpose,
    term: Term,
    extra: Vec<u8>,
) -> Result<Stream, ConnectError> {
    let address = host
        .cluster
        .host(peer_name)
        .ok_or_else(|| ConnectError::Unknown(peer_name.to_owned()))?;
    let mut hello = Hello::new(vm, peer_name, purpose);
    hello.term = term.0;
    hello.extra = extra;
    let (_, stream) = connect(address.address, &host.identity, &hello, TRY)?;
    Ok(stream)
}

/// Asks another host's daemon, which has `patience` for each line of its answer; all but the last go to `each`.
pub fn ask_host(
    host: &Host,
    peer: &str,
    request: &Request,
    patience: Duration,
    each: &mut dyn FnMut(&Answer),
) -> Answer {
    let Some(known) = host.cluster.host(peer) else {
        return Answer::refused(format!("host '{peer}' is not in the cluster"));
    };
    let hello = Hello::new("", peer, Purpose::Control);
    let stream = match connect(known.address, &host.identity, &hello, ASK) {
        Ok((_, stream)) => stream,
        Err(error) => return Answer::failed(format!("host '{peer}' at {}: {error}", known.address)),
    };
    if let Err(error) = stream.set_read_timeout(Some(patience)) {
        return Answer::failed(format!("host '{peer}': {error}"));
    }
    match Client::over(stream).talk(request, each) {
        Ok(answer) => answer,
        Err(error) => Answer::failed(format!("host '{peer}': {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_hung_up_on_knocks_more_and_more_rarely() {
        assert_eq!(rest_after(1), BETWEEN_TRIES);
        assert_eq!(rest_after(2), 2 * BETWEEN_TRIES);
        assert_eq!(rest_after(5), 16 * BETWEEN_TRIES);
        assert_eq!((rest_after(6), rest_after(u32::MAX)), (STANDS, STANDS));
    }

    #[test]
    fn a_link_that_is_lost_twice_is_made_once() {
        let (lost, connecting) = bounded(1);
        let connector = Connector { lost };
        (0..1000).for_each(|_| connector.link_lost());
        assert_eq!(connecting.len(), 1);
    }
}
