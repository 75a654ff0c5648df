//! The page and the API: HTTP for people and programs.
//!
//! **Decides**: who gets a connection, and how long it may take over what. **Flow**: a connection -> whose it is (`door`, `owner`) -> a place for them
//! (`daemon::roles`) -> each request past the `guard`, with the user's role -> a file of the page (`assets`), or the API (`api`), which looks by
//! the `board` and changes by `daemon::requests`.
//! **Invariants**: 1. nobody is answered who has no role on this host: roles are those of the control socket. 2. other machines are listened to by TLS alone, and only where host.toml says so (`api`). 3. connections, what one of them may send, hold and wait for are bounded; whoever is slow waits alone. 4. no VM waits for anything here:
//! threads of low priority look for all; the socket, by which commands come, is served by a thread of the daemon's own priority, and what is ordered has a thread
//! of its own (`hands`). **Source**: RFC 9110, 9112. **Not here**: metrics, which have no secrets
//! (`metrics`).

mod api;
mod assets;
mod board;
mod door;
mod farewell;
mod guard;
mod hands;
mod lines;
pub mod meaning;
mod owner;
mod shares;
mod standing;
mod stream;
mod view;

use crate::control::address::NAME;
use crate::daemon::Daemon;
use crate::daemon::roles::{Place, Who};
use anyhow::{Context, Result};
use api::refused;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use board::Board;
pub use door::Doors;
use door::{Listeners, Visitor};
use dunlin_api::{Answer, Request as Asked};
use dunlin_fabric::keys;
use farewell::turn_away;
use hands::Hands;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use lines::Places;
use shares::Shares;
use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;

/// Connections whose user is not known yet, and how long that may take.
const STRANGERS: usize = 32;
const KNOWN: Duration = Duration::from_secs(10);
/// Connections of administrators, by the page and by the socket: a browser keeps no command out. Other users have the places of `daemon::roles`.
const ADMINISTRATORS: usize = 128;
const ADMINISTRATORS_HERE: usize = 256;
/// A request's head: how long it may take, its size, its lines. A connection on which nothing is asked for so long ends.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 16 << 10;
const HEAD_LINES: usize = 64;
/// A request's body.
const BODY: Duration = Duration::from_secs(10);
const BODY_BYTES: usize = 1 << 20;
/// Whoever takes nothing of an answer for so long is hung up on.
const TAKES: Duration = Duration::from_secs(10);
/// The same by the socket. Root is waited for.
const TAKES_HERE: Duration = Duration::from_secs(60);
/// A person whose certificate counts no more has so long to read why.
const FAREWELL_PERSON: Duration = Duration::from_secs(5);
/// When no connection could be taken.
const AGAIN: Duration = Duration::from_millis(100);
/// What the kernel holds of an answer for one who is slow.
const SEND_BYTES: usize = 128 << 10;
/// Threads that ask daemons, and look up users.
const ASKING: usize = 48;
/// Behind everything else that this machine has to do.
const NICE: i32 = 10;

/// What all connections share.
pub struct Web {
    /// The daemon.
    pub daemon: Arc<Daemon>,
    board: Arc<Board>,
    /// What a request shows that changes something.
    token: String,
    /// Places for requests that take long.
    writes: Shares,
    /// Who carries these out.
    hands: Hands,
    /// Places for conversations by lines.
    places: Places,
    administrators: Arc<Semaphore>,
    administrators_here: Arc<Semaphore>,
    /// What this host is called in requests of this machine, by the socket, and in those of others.
    names: Vec<String>,
    names_here: Vec<String>,
    names_outside: Vec<String>,
}

/// Serves at these doors until the daemon ends.
pub fn serve(doors: &Doors, daemon: &Arc<Daemon>) -> Result<()> {
    if !doors.is_any_open() {
        return Ok(());
    }
    let token: [u8; 16] = keys::random()?;
    let token = token.map(|byte| format!("{byte:02x}")).concat();
    let (far, near) = (runtime("page-asks")?, runtime("api-asks")?);
    // Threads for what is ordered have this thread's priority.
    let hands = Hands::start(2 * api::WRITES + lines::CONVERSATIONS)?;
    let mut listeners = doors.listeners().context("the doors of the page and the API")?;
    let socket = listeners.take_socket();
    let web = {
        // Whoever looks at the cluster for the page has the page's priority.
        let _page = far.enter();
        Web::new(daemon.clone(), doors.addresses(), token, hands)
    };
    let files = files(&web);
    let (page_web, page_files) = (web.clone(), files.clone());
    let page = move || {
        // Of this thread alone, and those that it starts.
        if let Err(error) = rustix::process::nice(NICE) {
            tracing::debug!("the page's priority: {error}");
        }
        serve_at(&far, listeners, &page_web, &page_files);
    };
    std::thread::Builder::new().name("page".into()).spawn(page)?;
    // Commands come by the socket: whoever moves a VM away from a busy host does not wait behind that host's guests.
    let api = move || serve_at(&near, socket, &web, &files);
    std::thread::Builder::new().name("api".into()).spawn(api)?;
    Ok(())
}

fn runtime(asks: &str) -> Result<Runtime> {
    Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(ASKING)
        .thread_name(asks)
        .build()
        .context("a runtime")
}

/// Serves on this thread until the daemon ends.
fn serve_at(runtime: &Runtime, listeners: Listeners, web: &Arc<Web>, files: &Router) {
    runtime.block_on(async {
        match listeners.accept(web, files) {
            Ok(()) => pending().await,
            Err(error) => tracing::error!("the page's sockets: {error}"),
        }
    });
}

impl Web {
    fn new(
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
            writes: Shares::new(api::WRITES, api::WRITES_EACH),
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

/// The OpenAPI document.
#[cfg(test)]
pub fn document() -> utoipa::openapi::OpenApi {
    api::router().1
}

/// All that is served.
fn files(web: &Arc<Web>) -> Router {
    let (routes, document) = api::router();
    let document = Arc::new(document);
    let rest = Router::new().route(
        "/api/v1/openapi.json",
        get(move || async move { Json(document.as_ref().clone()) }),
    );
    let rest = rest.fallback(|request: Request| async move {
        match assets::at(request.uri().path()) {
            Some(file) if matches!(*request.method(), Method::GET | Method::HEAD) => file,
            Some(_) => refused(StatusCode::METHOD_NOT_ALLOWED, "this can only be read", 2),
            None => refused(StatusCode::NOT_FOUND, "there is nothing at this address", 2),
        }
    });
    rest.merge(routes.with_state(web.clone()))
}

/// All requests of one connection.
async fn converse<S>(
    web: Arc<Web>,
    files: Router,
    mut stream: S,
    visitor: Visitor,
    stranger: OwnedSemaphorePermit,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let many = "this user has too many open connections to the daemon: end one of them";
    let roles = web.daemon.roles();
    let (uid, place) = match &visitor {
        Visitor::User(uid) | Visitor::Local(uid, _) => (Some(*uid), roles.enter_user(*uid)),
        Visitor::Person(person, _) => (None, roles.enter_person(&person.name)),
        // They keep the place of one whom nobody knows.
        Visitor::Stranger => (None, Some(Place::default())),
    };
    let Some(_place) = place else {
        return turn_away(&mut stream, "503 Service Unavailable", many).await;
    };
    let is_administrator = uid.is_some_and(|uid| roles.is_administrator(uid));
    let is_here = matches!(visitor, Visitor::Local(..));
    let administrators = if is_here {
        &web.administrators_here
    } else {
        &web.administrators
    };
    let administrator = match is_administrator {
        true => match administrators.clone().try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => return turn_away(&mut stream, "503 Service Unavailable", many).await,
        },
        false => None,
    };
    let is_known = !matches!(visitor, Visitor::Stranger);
    let _stranger = (!is_known).then_some(stranger);
    let mut stream = TimeoutStream::new(stream);
    // A command may be read page by page, as from the control socket.
    let takes = if is_here { TAKES_HERE } else { TAKES };
    stream.set_write_timeout((!(is_here && is_administrator)).then_some(takes));
    let visitor = Arc::new(visitor);
    let service = service_fn(|request| {
        let (web, files, visitor) = (web.clone(), files.clone(), visitor.clone());
        async move { Ok::<_, Infallible>(answer(&web, files, &visitor, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .keep_alive(is_known)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    if let Err(error) = served.await {
        tracing::debug!("a connection to the page: {error}");
    }
    drop(administrator);
}

async fn answer(
    web: &Arc<Web>,
    mut files: Router,
    visitor: &Visitor,
    request: hyper::Request<hyper::body::Incoming>,
) -> Response {
    let mut response = match admitted(web, visitor, request).await {
        Ok(request) => match files.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
        Err(refusal) => refusal,
    };
    if let Visitor::Person(_, standing) = visitor {
        response = standing::told_why(response, standing);
    }
    for (name, value) in guard::HEADERS {
        let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
        response.headers_mut().insert(name, value);
    }
    response
}

/// The request, whole, with who asks; or why it is refused.
async fn admitted(
    web: &Arc<Web>,
    visitor: &Visitor,
    request: hyper::Request<hyper::body::Incoming>,
) -> Result<Request, Response> {
    let token = Some(web.token.as_str());
    let (names, token, user) = match visitor {
        Visitor::User(uid) => (&web.names, token, Ok((*uid, None))),
        Visitor::Local(uid, gid) => (&web.names_here, None, Ok((*uid, Some(*gid)))),
        Visitor::Person(person, _) => (&web.names_outside, token, Err(Who::person(person))),
        Visitor::Stranger => return Err(refused(StatusCode::FORBIDDEN, door::STRANGER, 2)),
    };
    let (parts, body) = request.into_parts();
    guard::check(&parts.method, parts.uri.path(), &parts.headers, names, token)
        .map_err(|(status, why)| refused(status, &why, 2))?;
    // By the system's lists as they are now; these may be on another machine.
    let roles = web.daemon.roles().clone();
    let look = spawn_blocking(move || {
        let who = user.map_or_else(|known| known, |(uid, gid)| roles.of_user(uid, gid));
        roles.check(&who, &Asked::Status).map(|()| who)
    });
    let who = match timeout(KNOWN, look).await {
        Ok(Ok(Ok(who))) => who,
        Ok(Ok(Err(Answer::Failed { why, code }))) => {
            return Err(refused(StatusCode::FORBIDDEN, &why, code));
        }
        _ => {
            let why = "this machine does not say who asks";
            return Err(refused(StatusCode::SERVICE_UNAVAILABLE, why, 1));
        }
    };
    let body: Bytes = match timeout(BODY, axum::body::to_bytes(Body::new(body), BODY_BYTES)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => {
            let why = format!("a body has {BODY_BYTES} bytes at most");
            return Err(refused(StatusCode::PAYLOAD_TOO_LARGE, &why, 2));
        }
        Err(_) => {
            let why = "the body did not come in time";
            return Err(refused(StatusCode::REQUEST_TIMEOUT, why, 2));
        }
    };
    // Last of all: the connection, and the body, may have taken their time.
    if let Visitor::Person(_, standing) = visitor {
        standing.look().map_err(|why| standing::over(&why.to_string()))?;
    }
    let mut request = Request::from_parts(parts, Body::from(body));
    request.extensions_mut().insert(Arc::new(who));
    Ok(request)
}
