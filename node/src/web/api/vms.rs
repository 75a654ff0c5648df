//! What is asked about one VM, or about its file.

use super::super::lines::{self, How};
use super::{App, Asker, Done, Refused, ask, long, read, refused, said};
use crate::daemon::examine;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use dunlin_api::Found;
use dunlin_api::{Answer, Request};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// A VM's file.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct File {
    /// Its text, in TOML: read, it is a `VmFile`. What a person has written in it, comments too, stays as it is.
    #[schema(content_media_type = "application/toml")]
    text: String,
    /// Its name, for messages.
    #[serde(default)]
    origin: String,
}

/// A VM's file, and where it begins.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Begun {
    /// Its text, in TOML: read, it is a `VmFile`. What a person has written in it, comments too, stays as it is.
    #[schema(content_media_type = "application/toml")]
    text: String,
    /// Its name, for messages.
    #[serde(default)]
    origin: String,
    /// The host whose disks count, whatever others have. It boots where its disks are the newest if none is named.
    #[serde(default)]
    from: Option<String>,
}

/// What a file's hosts lack for it.
#[derive(Serialize, ToSchema)]
struct Checked {
    /// Everything that was looked at.
    found: Vec<Found>,
    /// For a person.
    text: String,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Down {
    /// Do not wait for the guest.
    now: bool,
    /// On this host alone, without the group's agreement. For administrators.
    force: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Protect {
    /// "I know that the others are dead." For administrators.
    alone: bool,
    /// ... and the VM is to boot from this host's disk.
    from_disk: bool,
    /// ... though another host's disk is known to be newer.
    force_stale: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SetPolicy {
    /// The policy's name.
    policy: String,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Verify {
    /// Send again what differs.
    repair: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Replace {
    /// The dead host's name, which is the new machine's.
    host: String,
}

/// One of the four.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Move {
    /// The new backup's host.
    backup: Option<String>,
    /// The new witness.
    witness: Option<String>,
    /// The new standby.
    standby: Option<String>,
    /// There is to be no standby any more.
    no_standby: bool,
    /// Though the backup is well, and the VM not protected until the new one has its copy.
    unprotected_meanwhile: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Nothing {}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Inject {
    /// Which disk, in the order of the VM's file.
    #[serde(default)]
    disk: usize,
    /// What, as `write-error=on`.
    fault: String,
}

/// How much of what was printed.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct Printed {
    /// So many lines, the last ones.
    #[serde(default = "usual_lines")]
    lines: u32,
    /// Go on with what it will print.
    #[serde(default)]
    follow: bool,
    /// In its place: where its copies have said something else, and what.
    #[serde(default)]
    differences: bool,
}

fn usual_lines() -> u32 {
    200
}

/// Starts a VM on its hosts. An operator starts those that an administrator has prepared.
#[utoipa::path(post, path = "/api/v1/vms", request_body = Begun,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn up(State(web): App, Extension(who): Asker, how: How, body: Bytes) -> Response {
    match read::<Begun>(&body) {
        Ok(Begun { text, origin, from }) => {
            let origin = named(origin);
            ask(web, who, how, Request::Up { text, origin, from }).await
        }
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// What a VM's hosts lack for it; nothing is started.
#[utoipa::path(post, path = "/api/v1/check", request_body = File,
    responses((status = 200, content((Checked = "application/json"), (Answer = "application/x-ndjson"))), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn check(State(web): App, Extension(who): Asker, how: How, body: Bytes) -> Response {
    let File { text, origin } = match read::<File>(&body) {
        Ok(file) => file,
        Err(why) => return refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    };
    let origin = named(origin);
    let request = Request::Check {
        text: text.clone(),
        origin: origin.clone(),
    };
    if how == How::Lines {
        return lines::converse(web, who, request).await;
    }
    long(web, who, request, move |web, _| {
        let mut found = Vec::new();
        let answer = examine::check(&web.daemon, &text, &origin, &mut |one| found.push(one));
        match answer {
            Answer::Done { text } => Json(Checked { found, text }).into_response(),
            // Something is missing: that is what was asked.
            Answer::Failed { why: text, .. } if !found.is_empty() => {
                Json(Checked { found, text }).into_response()
            }
            other => said(other),
        }
    })
    .await
}

/// Hands a VM over to its backup: `dunlin switchover`.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/switchover", params(("vm" = String, Path)), request_body = Option<Nothing>,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn switchover(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Nothing>(&body) {
        Ok(Nothing {}) => ask(web, who, how, Request::Failover { vm }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Brings a backup in, or serves without any.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/protect", params(("vm" = String, Path)), request_body = Option<Protect>,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn protect(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Protect>(&body) {
        Ok(asked) => {
            let request = Request::Protect {
                vm,
                alone: asked.alone,
                from_disk: asked.from_disk,
                force_stale: asked.force_stale,
            };
            ask(web, who, how, request).await
        }
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Shuts a VM down everywhere.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/down", params(("vm" = String, Path)), request_body = Option<Down>,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn down(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Down>(&body) {
        Ok(Down { now, force }) => ask(web, who, how, Request::Down { vm, now, force }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Replicates a VM in another way from now on.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/policy", params(("vm" = String, Path)), request_body = SetPolicy,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn policy(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<SetPolicy>(&body) {
        Ok(SetPolicy { policy }) => ask(web, who, how, Request::Policy { vm, policy }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Compares the images of both hosts block by block.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/verify-disk", params(("vm" = String, Path)), request_body = Option<Verify>,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn verify_disk(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Verify>(&body) {
        Ok(Verify { repair }) => ask(web, who, how, Request::VerifyDisk { vm, repair }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// A dead host's place is taken by a new machine of the same name. For administrators.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/replace", params(("vm" = String, Path)), request_body = Replace,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn replace(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Replace>(&body) {
        Ok(Replace { host }) => ask(web, who, how, Request::Replace { vm, host }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// A host that has no part in the VM's group gets the one of its backup's host, or of its witness, or is its standby. For administrators.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/move", params(("vm" = String, Path)), request_body = Move,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn move_to(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Move>(&body) {
        Ok(Move {
            backup,
            witness,
            standby,
            no_standby,
            unprotected_meanwhile,
        }) => {
            let order = Request::Move {
                vm,
                backup,
                witness,
                standby,
                no_standby,
                unprotected_meanwhile,
            };
            ask(web, who, how, order).await
        }
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// Tests only: makes a disk of this host misbehave, or its daemon die. Refused unless the daemon was started with `DUNLIN_FAULTS=1`. For administrators.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/inject", params(("vm" = String, Path)), request_body = Inject,
    responses((status = 200, content((Done = "application/json"), (Answer = "application/x-ndjson"))), (status = 202, body = Done), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn inject(
    State(web): App,
    Extension(who): Asker,
    how: How,
    Path(vm): Path<String>,
    body: Bytes,
) -> Response {
    match read::<Inject>(&body) {
        Ok(Inject { disk, fault }) => ask(web, who, how, Request::Inject { vm, disk, fault }).await,
        Err(why) => refused(StatusCode::BAD_REQUEST, &why.to_string(), 2),
    }
}

/// What the copy of a bare program on this host has printed: lines of `Answer`. `follow` goes on with what it will print.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/printed", params(("vm" = String, Path), Printed),
    responses((status = 200, content_type = "application/x-ndjson", body = Answer), (status = "4XX", body = Refused), (status = 503, body = Refused)))]
pub async fn printed(
    State(web): App,
    Extension(who): Asker,
    Path(vm): Path<String>,
    which: Result<Query<Printed>, QueryRejection>,
) -> Response {
    match which {
        Ok(Query(Printed {
            lines,
            follow,
            differences,
        })) => {
            let request = Request::Logs {
                vm,
                lines,
                follow: follow && !differences,
                differences,
            };
            lines::converse(web, who, request).await
        }
        Err(error) => refused(StatusCode::BAD_REQUEST, &error.body_text(), 2),
    }
}

fn named(origin: String) -> String {
    match origin.is_empty() {
        true => "the VM's file".to_owned(),
        false => origin,
    }
}
