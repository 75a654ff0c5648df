//! The page and the API: HTTP for people and programs on this machine.
//!
//! **Decides**: who gets a connection, and how long it may take over what. **Flow**: a connection -> whose it is (`owner`) -> a place for that user
//! (`daemon::roles`) -> each request past the `guard`, with the user's role -> a file of the page (`assets`), or the API (`api`), which looks by
//! the `board` and changes by `daemon::requests`.
//! **Invariants**: 1. nobody is answered who has no role on this host: roles are those of the control socket. 2. it listens on this machine's own
//! addresses alone. 3. connections, what one of them may send, hold and wait for are bounded; whoever is slow waits alone. 4. no VM waits for anything here:
//! threads of low priority look for all; what is ordered has a thread of its own (`hands`). **Source**: RFC 9110, 9112. **Not here**: metrics, which have no secrets
//! (`metrics`).

mod api;
mod assets;
mod board;
mod guard;
mod hands;
mod meaning;
mod owner;
mod stream;
mod view;

use crate::control::{Answer, Request as Asked};
use crate::daemon::Daemon;
use anyhow::{Context, Result};
use api::refused;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use board::Board;
use dunlin_fabric::keys;
use hands::Hands;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;

/// Connections whose user is not known yet, and how long that may take.
const STRANGERS: usize = 32;
const KNOWN: Duration = Duration::from_secs(10);
/// Connections of administrators; other users have the places of `daemon::roles`.
const ADMINISTRATORS: usize = 128;
/// A request's head: how long it may take, its size, its lines. A connection on which nothing is asked for so long ends.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 16 << 10;
const HEAD_LINES: usize = 64;
/// A request's body.
const BODY: Duration = Duration::from_secs(10);
const BODY_BYTES: usize = 1 << 20;
/// Whoever takes nothing of an answer for so long is hung up on.
const TAKES: Duration = Duration::from_secs(10);
/// Whoever is turned away hears why, if that is quick.
const FAREWELL: Duration = Duration::from_secs(1);
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
    writes: Arc<Semaphore>,
    /// Who carries these out.
    hands: Hands,
    administrators: Arc<Semaphore>,
    /// What this host is called in requests.
    names: Vec<String>,
}

/// Listens, and serves until the daemon ends.
pub fn serve(address: SocketAddr, daemon: &Arc<Daemon>) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Those that are accepted have the same.
    set_socket_send_buffer_size(&listener, SEND_BYTES)?;
    let token: [u8; 16] = keys::random()?;
    let token = token.map(|byte| format!("{byte:02x}")).concat();
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(ASKING)
        .thread_name("page-asks")
        .build()
        .context("a runtime")?;
    // Before this thread's priority is another's.
    let hands = Hands::start(api::WRITES)?;
    let daemon = daemon.clone();
    let serve = move || {
        // Of this thread alone, and those that it starts.
        if let Err(error) = rustix::process::nice(NICE) {
            tracing::debug!("the page's priority: {error}");
        }
        runtime.block_on(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(&Web::new(daemon, address, token, hands), &listener).await,
                Err(error) => tracing::error!("the page's socket: {error}"),
            }
        });
    };
    std::thread::Builder::new().name("page".into()).spawn(serve)?;
    Ok(())
}

impl Web {
    fn new(daemon: Arc<Daemon>, address: SocketAddr, token: String, hands: Hands) -> Arc<Self> {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        Arc::new(Self {
            board: Board::start(&daemon),
            daemon,
            token,
            writes: Arc::new(Semaphore::new(api::WRITES)),
            hands,
            administrators: Arc::new(Semaphore::new(ADMINISTRATORS)),
            names: names.into_iter().chain([address.ip().to_string()]).collect(),
        })
    }
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

async fn accept(web: &Arc<Web>, listener: &tokio::net::TcpListener) {
    let files = files(web);
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
        // Never closed.
        let Ok(place) = strangers.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, there)) => {
                let (web, files) = (web.clone(), files.clone());
                tokio::spawn(async move {
                    let user = timeout(KNOWN, user_of(&stream, there)).await.ok().flatten();
                    drop(place);
                    converse(web, files, stream, user).await;
                });
            }
            Err(error) => {
                // As when there are no more descriptors: somebody may give one back.
                tracing::debug!("the page: {error}");
                sleep(AGAIN).await;
            }
        }
    }
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

/// All requests of one connection.
async fn converse(web: Arc<Web>, files: Router, mut stream: TcpStream, user: Option<u32>) {
    let Some(uid) = user else {
        return turn_away(
            &mut stream,
            "403 Forbidden",
            "nobody on this machine has this connection open",
        )
        .await;
    };
    let many = "this user has too many open connections to the daemon: end one of them";
    let roles = web.daemon.roles();
    let Some(_place) = roles.enter_user(uid) else {
        return turn_away(&mut stream, "503 Service Unavailable", many).await;
    };
    let administrator = match roles.is_administrator(uid) {
        true => match web.administrators.clone().try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => return turn_away(&mut stream, "503 Service Unavailable", many).await,
        },
        false => None,
    };
    // A delayed word costs a person's patience; without the option all is as well.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(TAKES));
    let service = service_fn(|request| {
        let (web, files) = (web.clone(), files.clone());
        async move { Ok::<_, Infallible>(answer(&web, files, uid, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    if let Err(error) = served.await {
        tracing::debug!("a connection to the page: {error}");
    }
    drop(administrator);
}

/// Says why, if the other end listens, and hangs up.
async fn turn_away(stream: &mut TcpStream, status: &str, why: &str) {
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{why}\n",
        why.len() + 1
    );
    let _ = timeout(FAREWELL, stream.write_all(text.as_bytes())).await;
}

async fn answer(
    web: &Arc<Web>,
    mut files: Router,
    uid: u32,
    request: hyper::Request<hyper::body::Incoming>,
) -> Response {
    let mut response = match admitted(web, uid, request).await {
        Ok(request) => match files.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
        Err(refusal) => refusal,
    };
    for (name, value) in guard::HEADERS {
        let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
        response.headers_mut().insert(name, value);
    }
    response
}

/// The request, whole, with who asks; or why it is refused.
async fn admitted(
    web: &Arc<Web>,
    uid: u32,
    request: hyper::Request<hyper::body::Incoming>,
) -> Result<Request, Response> {
    let (parts, body) = request.into_parts();
    guard::check(
        &parts.method,
        parts.uri.path(),
        &parts.headers,
        &web.names,
        &web.token,
    )
    .map_err(|(status, why)| refused(status, &why, 2))?;
    // By the system's lists as they are now; these may be on another machine.
    let roles = web.daemon.roles().clone();
    let look = spawn_blocking(move || {
        let who = roles.of_user(uid, None);
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
    let mut request = Request::from_parts(parts, Body::from(body));
    request.extensions_mut().insert(Arc::new(who));
    Ok(request)
}
