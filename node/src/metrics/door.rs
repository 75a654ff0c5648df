//! Where metrics are asked for: plain HTTP, for whoever reaches the port.
//!
//! **Decides**: how many may ask at once, what a question may be, and how long all of it may take. **Flow**: host.toml's address -> a connection -> a
//! place for it -> one request, whose body nobody reads -> the page, and the end of the connection. **Invariant**: nothing that is said here ends the
//! daemon, or keeps others from asking for longer than [`PATIENCE`]. **Source**: RFC 9112.
//! **Not here**: what the page says (`page`), and where nobody can come in yet (`web::listening`).

use crate::daemon::{BadInput, Daemon, telling};
use crate::web::{self, Listening};
use anyhow::{Context, Result};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::Response;
use dunlin_api::EventKind;
use dunlin_fabric::link::Place;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::time::timeout;

const CONTENT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
/// A connection, from its first word to the last that is taken of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 16 << 10;
const HEAD_LINES: usize = 64;

/// Serves metrics until the daemon ends, on a thread of its own.
pub fn serve(address: SocketAddr, daemon: &Arc<Daemon>) -> Result<()> {
    let listening =
        Listening::at(address).map_err(|error| BadInput(format!("metrics at {address}: {error}")))?;
    if let Some(why) = listening.complaint() {
        let text = format!("metrics are not served yet: {why}");
        daemon.host.events.push("", EventKind::NoPage, text);
    }
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.context("a runtime for metrics")?;
    let daemon = daemon.clone();
    let work = move || {
        web::goes_behind();
        let come = |stream, _, place| {
            tokio::spawn(converse(daemon.clone(), stream, place));
        };
        runtime.block_on(listening.let_in(come));
    };
    std::thread::Builder::new().name("metrics".into()).spawn(work)?;
    Ok(())
}

async fn converse(daemon: Arc<Daemon>, stream: TcpStream, _place: Place) {
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let answer = answer(&daemon, request.method(), request.uri().path());
        async move { Ok::<_, Infallible>(answer) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(PATIENCE, served).await {
        Ok(Ok(())) => {}
        // A scraper that has gone asks again.
        Ok(Err(error)) => tracing::debug!("a connection for metrics: {error}"),
        Err(_) => tracing::debug!(
            "a connection for metrics took longer than {} s",
            PATIENCE.as_secs()
        ),
    }
}

fn answer(daemon: &Arc<Daemon>, method: &Method, path: &str) -> Response {
    let (status, text) = match path {
        "/metrics" | "/" if !matches!(*method, Method::GET | Method::HEAD) => (
            StatusCode::METHOD_NOT_ALLOWED,
            "metrics can only be read\n".into(),
        ),
        "/metrics" | "/" => match super::page(&telling::status(daemon)) {
            Ok(text) => (StatusCode::OK, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        },
        _ => (StatusCode::NOT_FOUND, "metrics are at /metrics\n".into()),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, CONTENT);
    response
}
