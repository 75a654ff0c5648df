//! Where HTTP comes in, and from whom.
//!
//! **Decides**: at which doors the daemon listens, and who stands there. **Flow**: host.toml -> [`Doors`]: a loopback address (people's browsers), a socket
//! beside the control socket (programs), an address of the network, by TLS (people with certificates; off unless `api` says where) ->
//! [`Visitor`] -> `converse`. **Invariants**: 1. who nobody is known at, is answered one line and nothing else. 2. over the network nothing is said
//! but by TLS, with the keys that this host shows to the others; a certificate that counts no more ends its connections, too (`standing`).
//! **Source**: RFC 8446; unix(7), SO_PEERCRED. **Not here**: what visitors may do (`daemon::roles`), what they ask for (`api`).

use super::conversation::{KNOWN, Stranger, Visitor, converse};
use super::farewell::turn_away;
use super::listening::{Listening, listen, none_now};
use super::standing::Standing;
use super::{Web, owner};
use crate::config::{HostConfig, PageAt, Trust};
use crate::control::address::beside;
use crate::control::server::ControlSocket;
use crate::daemon::{BadInput, Daemon};
use anyhow::Result;
use axum::Router;
use dunlin_api::EventKind;
use dunlin_fabric::keys::person;
use dunlin_fabric::link::Place;
use rustix::net::sockopt::socket_peercred;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Connections of this machine whose user is not known yet.
const STRANGERS: usize = 32;
/// A person whose certificate counts no more has so long to read why.
const FAREWELL_PERSON: Duration = Duration::from_secs(5);
/// Whether a person's certificate still counts is looked at this often, besides before each request.
const LOOK: Duration = Duration::from_secs(1);

/// Where it is listened.
pub struct Doors {
    page: Option<TcpListener>,
    /// The file goes with it.
    socket: Option<ControlSocket>,
    network: Option<Listening>,
}

impl Doors {
    /// Listens where host.toml says. Where it says nothing, what is not free is told, and done without.
    pub fn open(config: &HostConfig, daemon: &Daemon) -> Result<Self> {
        let without = |what: &str, why: &dyn std::fmt::Display| {
            let text = format!("{what}: {why}");
            daemon.host.events.push("", EventKind::NoPage, text);
        };
        let page = match config.page {
            PageAt::Nowhere => None,
            PageAt::Address(address) => {
                Some(listen(address).map_err(|error| BadInput(format!("page at {address}: {error:#}")))?)
            }
            PageAt::Usual => listen(PageAt::USUAL)
                .inspect_err(|error| {
                    without(&format!("the page is not served: {}", PageAt::USUAL), error);
                })
                .ok(),
        };
        let socket = ControlSocket::bind(&beside(&config.control), daemon.roles().is_open())
            .inspect_err(|error| without("programs have no socket for HTTP", error))
            .ok();
        let network = match (config.api, &config.trust) {
            (None, _) => None,
            (Some(address), Trust::Tls { .. }) => {
                let network =
                    Listening::at(address).map_err(|error| BadInput(format!("api at {address}: {error}")))?;
                if let Some(why) = network.complaint() {
                    without("the API is not served yet", &why);
                }
                Some(network)
            }
            (Some(_), _) => {
                let why = "api: it is served with certificates alone, and this host has none (key, cert and ca in host.toml)";
                return Err(BadInput(why.into()).into());
            }
        };
        Ok(Self {
            page,
            socket,
            network,
        })
    }

    /// Whether anybody could come in.
    pub fn is_any_open(&self) -> bool {
        self.page.is_some() || self.socket.is_some() || self.network.is_some()
    }

    /// The loopback address, and that of the network.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let page = self.page.as_ref().and_then(|page| page.local_addr().ok());
        (page, self.network.as_ref().map(Listening::address))
    }

    /// The same, for a runtime of its own. The socket's file stays with this one.
    pub fn listeners(&self) -> io::Result<Listeners> {
        let socket = |socket: &ControlSocket| {
            let socket = socket.listener.try_clone()?;
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(socket)
        };
        Ok(Listeners {
            page: self.page.as_ref().map(TcpListener::try_clone).transpose()?,
            socket: self.socket.as_ref().map(socket).transpose()?,
            network: self.network.as_ref().map(Listening::try_clone).transpose()?,
        })
    }
}

/// All doors' listeners.
pub struct Listeners {
    page: Option<TcpListener>,
    socket: Option<UnixListener>,
    network: Option<Listening>,
}

impl Listeners {
    /// The socket alone, for a runtime of its own.
    pub fn take_socket(&mut self) -> Self {
        Self {
            page: None,
            socket: self.socket.take(),
            network: None,
        }
    }

    /// Lets visitors in, on the runtime that serves them, until the daemon ends.
    pub fn accept(self, web: &Arc<Web>, files: &Router) -> io::Result<()> {
        if let Some(listener) = self.page {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let (web, files) = (web.clone(), files.clone());
            tokio::spawn(async move {
                let come = |(stream, there), place| {
                    tokio::spawn(from_loopback(web.clone(), files.clone(), stream, there, place));
                };
                again_and_again(|| listener.accept(), come).await;
            });
        }
        if let Some(listener) = self.socket {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            let (web, files) = (web.clone(), files.clone());
            tokio::spawn(async move {
                let come = |(stream, _), place| {
                    tokio::spawn(from_socket(web.clone(), files.clone(), stream, place));
                };
                again_and_again(|| listener.accept(), come).await;
            });
        }
        if let Some(network) = self.network {
            let (web, files) = (web.clone(), files.clone());
            tokio::spawn(async move {
                let come = |stream, there, place| {
                    tokio::spawn(from_network(web.clone(), files.clone(), stream, there, place));
                };
                network.let_in(come).await;
            });
        }
        Ok(())
    }
}

/// Each door of this machine's has places of its own for those whom nobody knows yet.
async fn again_and_again<S, A: Future<Output = io::Result<S>>>(
    accept: impl Fn() -> A,
    come: impl Fn(S, Stranger),
) {
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
        // Never closed.
        let Ok(place) = strangers.clone().acquire_owned().await else {
            return;
        };
        match accept().await {
            Ok(visitor) => come(visitor, Stranger::of_this_machine(place)),
            Err(error) => none_now(&error).await,
        }
    }
}

async fn from_loopback(
    web: Arc<Web>,
    files: Router,
    mut stream: TcpStream,
    there: SocketAddr,
    place: Stranger,
) {
    let user = timeout(KNOWN, user_of(&stream, there)).await.ok().flatten();
    let Some(uid) = user else {
        let why = "nobody on this machine has this connection open";
        return turn_away(&mut stream, "403 Forbidden", why).await;
    };
    // A delayed word costs a person's patience; without the option all is as well.
    let _ = stream.set_nodelay(true);
    converse(web, files, stream, Visitor::User(uid), place).await;
}

async fn user_of(stream: &TcpStream, there: SocketAddr) -> Option<u32> {
    let here = stream.local_addr().ok()?;
    spawn_blocking(move || owner::of(here, there))
        .await
        .ok()?
        .inspect_err(|error| tracing::warn!("whose a connection to the page is: {error}"))
        .ok()
        .flatten()
}

async fn from_socket(web: Arc<Web>, files: Router, stream: tokio::net::UnixStream, place: Stranger) {
    // Whoever has connected; the kernel knows them for as long as the connection stands.
    let Ok(peer) = socket_peercred(&stream) else {
        return;
    };
    let visitor = Visitor::Local(peer.uid.as_raw(), peer.gid.as_raw());
    converse(web, files, stream, visitor, place).await;
}

async fn from_network(web: Arc<Web>, files: Router, stream: TcpStream, there: SocketAddr, place: Place) {
    let identity = web.daemon.host.identity.clone();
    let Some(keys) = identity.for_people() else { return };
    let _ = stream.set_nodelay(true);
    let stream = match timeout(KNOWN, TlsAcceptor::from(keys).accept(stream)).await {
        Ok(Ok(stream)) => stream,
        // The other end was told why, by an alert.
        Ok(Err(error)) => return tracing::debug!("{there} is refused at the API: {error}"),
        Err(_) => return tracing::debug!("{there} began no TLS at the API in time"),
    };
    let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let Some(person) = shown.first().and_then(|own| person::of_der(own)) else {
        return converse(
            web,
            files,
            stream,
            Visitor::Stranger,
            Stranger::of_the_network(place),
        )
        .await;
    };
    let standing = Standing::new(&person.name, identity, shown);
    let visitor = Visitor::Person(person, standing.clone());
    let mut conversation = Box::pin(converse(
        web,
        files,
        stream,
        visitor,
        Stranger::of_the_network(place),
    ));
    while timeout(LOOK, &mut conversation).await.is_err() {
        if standing.look().is_err() {
            // Whoever follows something has read why by then, and who asks something else reads it.
            let _ = timeout(FAREWELL_PERSON, conversation).await;
            return;
        }
    }
}
