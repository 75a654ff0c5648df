//! The page and the API: HTTP for people and programs.
//!
//! **Decides**: who gets a connection, and how long it may take over what. **Flow**: a connection -> whose it is (`door`, `owner`) -> a place for them
//! (`daemon::roles`) -> each request past the `guard` (`conversation`), with the user's role -> a file of the page (`assets`), or the API (`api`), which looks by
//! the `board` and changes by `daemon::requests`.
//! **Invariants**: 1. nobody is answered who has no role on this host: roles are those of the control socket. 2. other machines are listened to by TLS alone, and only where host.toml says so (`api`). 3. connections, what one of them may send, hold and wait for are bounded; whoever is slow waits alone. 4. no VM waits for anything here:
//! threads of low priority look for all; the socket, by which commands come, is served by a thread of the daemon's own priority, and what is ordered has a thread
//! of its own (`hands`). **Source**: RFC 9110, 9112. **Not here**: metrics, which have no secrets
//! (`metrics`).

mod answers;
mod api;
mod assets;
mod board;
mod conversation;
mod door;
mod farewell;
mod guard;
mod hands;
mod lines;
mod listening;
pub mod meaning;
mod owner;
mod shared;
mod shares;
mod standing;
mod stream;
mod view;

use crate::daemon::Daemon;
use answers::refused;
use anyhow::{Context, Result};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::routing::get;
use axum::{Json, Router};
pub use door::Doors;
use door::Listeners;
use dunlin_fabric::keys;
use hands::Hands;
pub use listening::Listening;
pub use shared::Web;
use shares::WRITES;
use std::future::pending;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};

/// Threads that ask daemons, and look up users.
const ASKING: usize = 48;
/// Behind everything else that this machine has to do.
const NICE: i32 = 10;

/// Serves at these doors until the daemon ends.
pub fn serve(doors: &Doors, daemon: &Arc<Daemon>) -> Result<()> {
    if !doors.is_any_open() {
        return Ok(());
    }
    let token: [u8; 16] = keys::random()?;
    let token = token.map(|byte| format!("{byte:02x}")).concat();
    let (far, near) = (runtime("page-asks")?, runtime("api-asks")?);
    // Threads for what is ordered have this thread's priority.
    let hands = Hands::start(2 * WRITES + lines::CONVERSATIONS)?;
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
        goes_behind();
        serve_at(&far, listeners, &page_web, &page_files);
    };
    std::thread::Builder::new().name("page".into()).spawn(page)?;
    // Commands come by the socket: whoever moves a VM away from a busy host does not wait behind that host's guests.
    let api = move || serve_at(&near, socket, &web, &files);
    std::thread::Builder::new().name("api".into()).spawn(api)?;
    Ok(())
}

/// This thread goes behind everything else, with those that it starts.
pub fn goes_behind() {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::debug!("the priority of who only looks: {error}");
    }
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
