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
    /// The file's text, in TOML. Parsed, it is a `VmFile`. The text is kept as it is, with its comments.
    #[schema(content_media_type = "application/toml")]
    text: String,
    /// The file's name, for messages.
    #[serde(default)]
    origin: String,
}

/// A VM's file, and where the VM starts.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Begun {
    /// The file's text, in TOML. Parsed, it is a `VmFile`. The text is kept as it is, with its comments.
    #[schema(content_media_type = "application/toml")]
    text: String,
    /// The file's name, for messages.
    #[serde(default)]
    origin: String,
    /// Start with this host's disks, whatever the other hosts have. For administrators. Without it, a VM that was shut down boots where its disks are newest.
    #[serde(default)]
    from: Option<String>,
}

/// What the hosts of a VM lack for it.
#[derive(Serialize, ToSchema)]
struct Checked {
    /// Everything that was checked.
    found: Vec<Found>,
    /// The result, as text for people.
    text: String,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Down {
    /// End it at once, without asking the guest to shut down.
    now: bool,
    /// Remove the VM from this host alone, without the agreement of its group. For administrators.
    force: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Protect {
    /// Serve the VM alone, without a majority: you confirm that the other hosts are dead. For administrators.
    alone: bool,
    /// With `alone`, if no copy of the VM is alive anywhere: boot it from this host's disk.
    from_disk: bool,
    /// With `from_disk`: boot from it even if another host's disk is known to be newer.
    force_stale: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SetPolicy {
    /// The name of the new policy.
    policy: String,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Verify {
    /// Send the blocks that differ again.
    repair: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Replace {
    /// The dead host's name, which the new machine has too.
    host: String,
}

/// The part that moves, and where to. Give exactly one of `backup`, `witness`, `standby` and `no_standby`.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct Move {
    /// The host of the new backup.
    backup: Option<String>,
    /// The host of the new witness.
    witness: Option<String>,
    /// The new standby.
    standby: Option<String>,
    /// Have no standby any more.
    no_standby: bool,
    /// Allow this although the backup is well. The VM is not protected until the new backup has its copy.
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
    /// The fault, such as `write-error=on`.
    fault: String,
}

/// How much of the output to return.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct Printed {
    /// How many of the last lines to return.
    #[serde(default = "usual_lines")]
    lines: u32,
    /// Go on with what the copy prints next.
    #[serde(default)]
    follow: bool,
    /// Return instead where the outputs of its copies differed, and what each of them was.
    #[serde(default)]
    differences: bool,
}

fn usual_lines() -> u32 {
    200
}

/// Starts a VM on its hosts.
///
/// An operator may start the VMs that an administrator has prepared.
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

/// Checks what the hosts of a VM lack for it.
///
/// Nothing is started.
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

/// Moves a VM to its backup, like `dunlin switchover`.
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

/// Has a backup join at once, or serves the VM alone.
///
/// Only administrators may have it served alone (`alone`).
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

/// Shuts a VM down on all its hosts.
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

/// Changes how a VM is replicated while it runs.
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

/// Compares the disks of a VM's two hosts, block by block.
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

/// Brings in a new machine in place of a dead host of the same name.
///
/// For administrators.
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

/// Makes another host the backup, the witness or the standby of a VM, or ends its standby.
///
/// The other host must have no part in the VM's group. For administrators.
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

/// Makes a disk of this host misbehave, or makes its daemon die or step down, for tests.
///
/// Refused unless the daemon was started with `DUNLIN_FAULTS=1`. For administrators.
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

/// Shows what the copy of a bare program on this host has printed.
///
/// Each line is an `Answer`. With `follow` it goes on with what the copy prints next. For operators.
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
