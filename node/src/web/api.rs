//! REST: what a person asks of a daemon, as requests of HTTP.
//!
//! **Decides**: addresses, and which status an answer has. **Flow**: a request that `guard` let through, with who asks -> the same [`Request`] as on
//! the control socket -> the same roles, the same answers. **Invariants**: 1. nothing is done here that the command line does not do, and nothing
//! without `Roles::check`. 2. no more than [`WRITES`](super::shares::WRITES) requests that take long are under way, [`WRITES_EACH`] of them one user's, and none is waited for longer than [`ANSWER`]; whoever asks for
//! lines has a place in `lines`. 3. the document at `/api/v1/openapi.json` is made of these functions and types. **Not here**: what requests do
//! (`daemon::requests`), which address a command asks (`control::address`).

mod cluster;
mod logs;
mod vms;

use super::Web;
use super::answers::{Done, Refused, busy, ends, later, refused, said};
use super::board::Happened;
use super::lines::{self, How};
use super::shares::{Full, WRITES_EACH};
use super::stream;
use crate::daemon::roles::{Role, Who};
use crate::daemon::{peers, requests, starting, telling};
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use dunlin_api::files::{ClusterFile, HostFile, VmFile};
use dunlin_api::{Answer, Event, HostStatus, Request};
use dunlin_api::{Overview, VmView};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Nobody waits longer for an answer; what was begun goes on, and events tell of it.
const ANSWER: Duration = Duration::from_secs(150);
/// Events in one answer.
const MOST_EVENTS: usize = 10_000;

/// The document's head.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Dunlin",
        version = "1",
        description = "The API of one host's daemon. Roles are those of the control socket. A request that is not a GET has to carry the header X-Dunlin-Token with the token from GET /api/v1/me; on the Unix socket no token is needed. Where application/x-ndjson is offered, each line is one Answer, sent as soon as there is something to say. The asked host itself answers then. The last line is done, failed or keys. Without lines you may ask any host about any VM. VmFile, HostFile and ClusterFile describe the content of the TOML files that people write. A VM's file is sent as its TOML text."
    ),
    components(schemas(Happened, VmFile, HostFile, ClusterFile))
)]
struct Head;

/// The user who asks.
#[derive(Serialize, ToSchema)]
struct Me {
    /// The user's name on this host, or the name in their certificate.
    user: String,
    /// What the user may do.
    role: Role,
    /// The token for the header X-Dunlin-Token. It is valid until the daemon ends.
    token: String,
    /// This host's name.
    host: String,
    /// The version of Dunlin on this host.
    version: &'static str,
}

/// Events of this host.
#[derive(Serialize, ToSchema)]
struct Past {
    /// The events, oldest first.
    events: Vec<Event>,
}

/// Which events to return.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct Which {
    /// Only events since this time, in milliseconds since 1970.
    #[serde(default)]
    since_ms: u64,
    /// At most this many events: the last ones. Not with lines.
    limit: Option<usize>,
    /// Only events of this VM. Not with lines.
    vm: Option<String>,
    /// Go on with new events. Only with lines.
    #[serde(default)]
    follow: bool,
    /// Only new events. Only with lines.
    #[serde(default)]
    from_now: bool,
}

type App = State<Arc<Web>>;
type Asker = Extension<Arc<Who>>;

/// All addresses of the API, and the document about them.
pub fn router() -> (axum::Router<Arc<Web>>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(me))
        .routes(routes!(all))
        .routes(routes!(one))
        .routes(routes!(status))
        .routes(routes!(events))
        .routes(routes!(stream))
        .routes(routes!(vms::up))
        .routes(routes!(vms::check))
        .routes(routes!(vms::switchover))
        .routes(routes!(vms::protect))
        .routes(routes!(vms::down))
        .routes(routes!(vms::policy))
        .routes(routes!(vms::verify_disk))
        .routes(routes!(vms::replace))
        .routes(routes!(vms::move_to))
        .routes(routes!(vms::inject))
        .routes(routes!(vms::printed))
        .routes(routes!(cluster::hosts))
        .routes(routes!(cluster::keys, cluster::keys_step))
        .routes(routes!(logs::logs, logs::make_log))
        .routes(routes!(logs::log, logs::remove_log))
        .routes(routes!(logs::entries))
        .split_for_parts()
}

/// Shows the user who asks, their role, and the token for changes.
#[utoipa::path(get, path = "/api/v1/me", responses((status = 200, body = Me)))]
async fn me(State(web): App, Extension(who): Asker) -> Response {
    let Some(role) = who.role() else {
        // Who has no role does not come here.
        return refused(StatusCode::FORBIDDEN, "no role", 2);
    };
    Json(Me {
        user: who.name().to_owned(),
        role,
        token: web.token.clone(),
        host: web.daemon.host.name.clone(),
        version: env!("CARGO_PKG_VERSION"),
    })
    .into_response()
}

/// Shows all hosts and VMs of the cluster, as this host sees them.
#[utoipa::path(get, path = "/api/v1/overview", responses((status = 200, body = Overview)))]
async fn all(State(web): App) -> Response {
    Json(&web.board.now().await.overview).into_response()
}

/// Shows one VM of the overview.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", params(("vm" = String, Path)),
    responses((status = 200, body = VmView), (status = 404, body = Refused)))]
async fn one(State(web): App, Path(vm): Path<String>) -> Response {
    let sight = web.board.now().await;
    match sight.overview.vms.iter().find(|known| known.name == vm) {
        Some(vm) => Json(vm).into_response(),
        None => unknown(&vm),
    }
}

/// Shows this host and its VMs with all figures, like `dunlin status --json`.
#[utoipa::path(get, path = "/api/v1/status", responses((status = 200, body = HostStatus)))]
async fn status(State(web): App) -> Response {
    match spawn_blocking(move || telling::status(&web.daemon)).await {
        Ok(status) => Json(status).into_response(),
        Err(_) => ends(),
    }
}

/// Shows the last 10,000 events of this host.
#[utoipa::path(get, path = "/api/v1/events", params(Which),
    responses((status = 200, content((Past = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
async fn events(
    State(web): App,
    Extension(who): Asker,
    how: How,
    which: Result<Query<Which>, QueryRejection>,
) -> Response {
    let which = match which {
        Ok(Query(which)) => which,
        Err(error) => return refused(StatusCode::BAD_REQUEST, &error.body_text(), 2),
    };
    let has_end = !which.follow && !which.from_now;
    match how {
        How::Lines if which.vm.is_none() && which.limit.is_none() => {
            let request = Request::Events {
                follow: which.follow,
                from_now: which.from_now,
                since_ms: Some(which.since_ms),
            };
            return lines::converse(web, who, request).await;
        }
        How::Whole if has_end => {}
        _ => {
            let why = "'follow' and 'from_now' are answered by lines alone (Accept: application/x-ndjson), 'vm' and 'limit' are not";
            return refused(StatusCode::BAD_REQUEST, why, 2);
        }
    }
    let found = spawn_blocking(move || {
        let mut events = web.daemon.host.events.since(0, None, 0);
        events.retain(|event| {
            event.time_ms >= which.since_ms && which.vm.as_ref().is_none_or(|vm| *vm == event.vm)
        });
        let most = which.limit.unwrap_or(MOST_EVENTS);
        events.drain(..events.len().saturating_sub(most));
        events
    });
    match found.await {
        Ok(events) => Json(Past { events }).into_response(),
        Err(_) => ends(),
    }
}

/// Streams events and the overview as they change.
///
/// The stream consists of server-sent events. It begins with the last events of all hosts that are reached, each as `happened` (a `Happened`), then
/// `overview` (an `Overview`). After that come each new event, and the overview whenever it has changed.
#[utoipa::path(get, path = "/api/v1/stream",
    responses((status = 200, content_type = "text/event-stream", body = String)))]
async fn stream(State(web): App) -> Response {
    let body = Body::from_stream(stream::new(&web.board));
    let kind = HeaderValue::from_static("text/event-stream");
    ([(CONTENT_TYPE, kind)], body).into_response()
}

/// The body is not what is asked for there.
#[derive(Debug, thiserror::Error)]
#[error("the body: {0}")]
struct BodyError(#[source] serde_json::Error);

/// The body; one that may be left out is as if nothing was said in it.
fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, BodyError> {
    let body: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(BodyError)
}

/// Asks what takes long, of the host that can do it. By lines it is this host's daemon that answers, as on the control socket.
async fn ask(web: Arc<Web>, who: Arc<Who>, how: How, request: Request) -> Response {
    if how == How::Lines {
        return lines::converse(web, who, request).await;
    }
    long(web, who, request, |web, request| {
        let daemon = &web.daemon;
        let answer = match request {
            Request::Up { text, origin, from } => starting::up(daemon, &text, &origin, from.as_deref()),
            request => match elsewhere(web, &request) {
                Some(host) => peers::ask(daemon, &host, &request),
                None => requests::from_person(daemon, request, &mut |_| {}),
            },
        };
        said(answer)
    })
    .await
}

/// The host to be asked about a VM in which this one has no part.
fn elsewhere(web: &Web, request: &Request) -> Option<String> {
    let vm = request.vm()?;
    let is_about_this_host = matches!(
        request,
        Request::Protect { alone: true, .. } | Request::Down { force: true, .. }
    );
    let is_here = is_about_this_host || web.daemon.has_vm(vm);
    web.board.leader_of(vm).filter(|_| !is_here)
}

/// Asks this host, and makes one object of all that it answers, the last answer included.
async fn gather(
    web: Arc<Web>,
    who: Arc<Who>,
    how: How,
    request: Request,
    whole: fn(Vec<Answer>) -> Response,
) -> Response {
    if how == How::Lines {
        return lines::converse(web, who, request).await;
    }
    long(web, who, request, move |web, request| {
        let mut lines = Vec::new();
        requests::converse(&web.daemon, request, &mut lines);
        let answers = serde_json::Deserializer::from_slice(&lines).into_iter();
        let answers: Vec<Answer> = answers.map_while(Result::ok).collect();
        match answers.last() {
            Some(failed @ Answer::Failed { .. }) => said(failed.clone()),
            _ => whole(answers),
        }
    })
    .await
}

/// Does what takes long on a thread of its own, if it is theirs to ask, and waits for it for a while.
async fn long(
    web: Arc<Web>,
    who: Arc<Who>,
    request: Request,
    work: impl FnOnce(&Web, Request) -> Response + Send + 'static,
) -> Response {
    let place = match web.writes.take(&who) {
        Ok(place) => place,
        Err(Full::All) => return busy(),
        Err(Full::Own) => {
            let why = format!(
                "{} '{}' has {WRITES_EACH} requests under way already: say it again when one of them has ended",
                who.kind(),
                who.name()
            );
            return later(refused(StatusCode::TOO_MANY_REQUESTS, &why, 1));
        }
    };
    let (tell, told) = oneshot::channel();
    let shared = web.clone();
    let taken = web.hands.take(move || {
        let _place = place;
        let response = match shared.daemon.roles().check(&who, &request) {
            Ok(()) => work(&shared, request),
            Err(Answer::Failed { why, code }) => refused(StatusCode::FORBIDDEN, &why, code),
            Err(other) => said(other),
        };
        // Whoever asked may have gone.
        let _ = tell.send(response);
    });
    if !taken {
        return ends();
    }
    match timeout(ANSWER, told).await {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => ends(),
        Err(_) => {
            let text = "it is under way; events tell how it ends".to_owned();
            (StatusCode::ACCEPTED, Json(Done { text })).into_response()
        }
    }
}

fn unknown(vm: &str) -> Response {
    let why = format!("no host that is heard has a VM '{vm}'");
    refused(StatusCode::NOT_FOUND, &why, 2)
}
