//! What is asked about the hosts of the cluster.

use super::super::lines::How;
use super::{App, Asker, Refused, ends, gather, read, refused};
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use dunlin_api::keys::{HostKeys, KeysStep};
use dunlin_api::{Answer, Member, Request};
use serde::Serialize;
use utoipa::ToSchema;

/// The hosts of a cluster.
#[derive(Serialize, ToSchema)]
struct Hosts {
    /// The hosts in the order of cluster.toml.
    hosts: Vec<Member>,
}

/// Asks every host of the cluster for its state.
#[utoipa::path(get, path = "/api/v1/cluster",
    responses((status = 200, content((Hosts = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn hosts(State(web): App, Extension(who): Asker, how: How) -> Response {
    gather(web, who, how, Request::Cluster, |answers| {
        let hosts = answers.into_iter().filter_map(|answer| match answer {
            Answer::Member(member) => Some(*member),
            _ => None,
        });
        let hosts = hosts.collect();
        Json(Hosts { hosts }).into_response()
    })
    .await
}

/// Shows the certificate that a host presents, and the authorities that it believes.
///
/// No private key is in the answer.
#[utoipa::path(get, path = "/api/v1/hosts/{host}/keys", params(("host" = String, Path)),
    responses((status = 200, content((HostKeys = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn keys(State(web): App, Extension(who): Asker, how: How, Path(host): Path<String>) -> Response {
    let ask = KeysStep::Show;
    gather(web, who, how, Request::Keys { host, ask }, shown).await
}

/// Takes one step in the exchange of a host's keys.
///
/// `dunlin cluster rotate` takes these steps in their order. For administrators.
#[utoipa::path(post, path = "/api/v1/hosts/{host}/keys", params(("host" = String, Path)), request_body = KeysStep,
    responses((status = 200, content((HostKeys = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn keys_step(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(host): Path<String>,
    body: Bytes,
) -> Response {
    match read(&body) {
        Ok(ask) => gather(web, who, how, Request::Keys { host, ask }, shown).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

fn shown(answers: Vec<Answer>) -> Response {
    let keys = answers.into_iter().find_map(|answer| match answer {
        Answer::Keys(keys) => Some(*keys),
        _ => None,
    });
    keys.map_or_else(ends, |keys: HostKeys| Json(keys).into_response())
}
