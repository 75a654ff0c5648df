//! What is asked about logs that programs share. A writer has the control socket: it says more than one line.

use super::super::lines::{self, How};
use super::{App, Asker, Done, Refused, ends, gather, read, refused, said};
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use dunlin_api::log::{LogAnswer, LogRequest, LogStatus};
use dunlin_api::{Answer, Request};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The logs of a host.
#[derive(Serialize, ToSchema)]
struct Logs {
    /// The logs, sorted by name.
    logs: Vec<LogStatus>,
}

/// A log to create.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewLog {
    /// The log's name.
    log: String,
    /// The log's hosts. All of them have to answer.
    hosts: Vec<String>,
}

/// Which entries to return.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct Entries {
    /// The first index to return; 0: the oldest that is still kept.
    #[serde(default)]
    from: u64,
    /// At most this many entries.
    most: Option<u64>,
    /// Go on with entries that are agreed later.
    #[serde(default)]
    follow: bool,
}

fn statuses(answers: Vec<Answer>) -> impl Iterator<Item = LogStatus> {
    answers.into_iter().filter_map(|answer| match answer {
        Answer::Log(LogAnswer::Status(status)) => Some(*status),
        _ => None,
    })
}

fn done(mut answers: Vec<Answer>) -> Response {
    answers.pop().map_or_else(ends, said)
}

/// Shows the logs in which this host has a part.
#[utoipa::path(get, path = "/api/v1/logs",
    responses((status = 200, content((Logs = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn logs(State(web): App, Extension(who): Asker, how: How) -> Response {
    let request = Request::Log(LogRequest::Status { log: None });
    gather(web, who, how, request, |answers| {
        let logs = statuses(answers).collect();
        Json(Logs { logs }).into_response()
    })
    .await
}

/// Shows one log of this host.
#[utoipa::path(get, path = "/api/v1/logs/{log}", params(("log" = String, Path)),
    responses((status = 200, content((LogStatus = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn log(State(web): App, Extension(who): Asker, how: How, Path(log): Path<String>) -> Response {
    let request = Request::Log(LogRequest::Status { log: Some(log) });
    gather(web, who, how, request, |answers| {
        let status = statuses(answers).next();
        status.map_or_else(ends, |status| Json(status).into_response())
    })
    .await
}

/// Creates a log on these hosts.
///
/// For administrators.
#[utoipa::path(post, path = "/api/v1/logs", request_body = NewLog,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn make_log(State(web): App, Extension(who): Asker, how: How, body: Bytes) -> Response {
    match read::<NewLog>(&body) {
        Ok(NewLog { log, hosts }) => {
            let request = Request::Log(LogRequest::Create { log, hosts });
            gather(web, who, how, request, done).await
        }
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Removes a log from all its hosts, with all its entries.
///
/// For administrators.
#[utoipa::path(delete, path = "/api/v1/logs/{log}", params(("log" = String, Path)),
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn remove_log(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(log): Path<String>,
) -> Response {
    let request = Request::Log(LogRequest::Remove { log });
    gather(web, who, how, request, done).await
}

/// Shows the agreed entries of a log of this host.
///
/// Each line is an `Answer`. With `follow` it goes on with entries that are agreed later. For operators.
#[utoipa::path(get, path = "/api/v1/logs/{log}/entries", params(("log" = String, Path), Entries),
    responses((status = 200, content_type = "application/x-ndjson", body = Answer), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn entries(
    State(web): App,
    Extension(who): Asker,
    Path(log): Path<String>,
    which: Result<Query<Entries>, QueryRejection>,
) -> Response {
    let Entries { from, most, follow } = match which {
        Ok(Query(which)) => which,
        Err(error) => return refused(StatusCode::BAD_REQUEST, &error.body_text(), 2),
    };
    let request = Request::Log(LogRequest::Read {
        log,
        from,
        follow,
        most,
    });
    lines::converse(web, who, request).await
}
