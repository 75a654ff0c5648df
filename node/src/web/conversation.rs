//! All requests of one connection.
//!
//! **Decides**: whether a visitor has a place, what a request may be, and how long it may take. **Flow**: a [`Visitor`] -> a place for them -> each request
//! past the `guard`, whole, with the user's role -> whoever answers it, and the headers that all answers have. **Not here**: who comes in (`door`), what
//! is answered (`assets`, `api`).

use super::answers::refused;
use super::farewell::turn_away;
use super::standing::{self, Standing};
use super::{Web, guard};
use crate::daemon::roles::{Place, Who};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use dunlin_api::{Answer, Request as Asked};
use dunlin_fabric::keys::person::Person;
use dunlin_fabric::link;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;

/// How long it may take until a connection's user is known.
pub const KNOWN: Duration = Duration::from_secs(10);
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
/// Whoever comes with no certificate for people.
const STRANGER: &str = "this is for people who show a certificate of this cluster: 'dunlin cluster person NAME --role viewer', on the host \
                            where the cluster was begun, makes one";

/// Whose connection it is.
pub enum Visitor {
    /// A user of this machine, by a loopback address.
    User(u32),
    /// The same, by the socket: the kernel says the group, too.
    Local(u32, u32),
    /// A person with a certificate, by the network.
    Person(Person, Arc<Standing>),
    /// Somebody without one, by the network.
    Stranger,
}

/// The place of one whom nobody knows yet.
pub(super) struct Stranger {
    _here: Option<OwnedSemaphorePermit>,
    _outside: Option<link::Place>,
}

impl Stranger {
    pub(super) fn of_this_machine(place: OwnedSemaphorePermit) -> Self {
        Self {
            _here: Some(place),
            _outside: None,
        }
    }

    pub(super) fn of_the_network(place: link::Place) -> Self {
        Self {
            _here: None,
            _outside: Some(place),
        }
    }
}

/// All requests of one connection.
pub(super) async fn converse<S>(
    web: Arc<Web>,
    files: Router,
    mut stream: S,
    visitor: Visitor,
    stranger: Stranger,
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
        Visitor::Stranger => return Err(refused(StatusCode::FORBIDDEN, STRANGER, 2)),
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
