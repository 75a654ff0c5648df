//! Where metrics are asked for: plain HTTP, for whoever reaches the port.
//!
//! **Decides**: how many may ask at once, what a question may be, and how long all of it may take. **Flow**: host.toml's address -> a connection -> a
//! place for it -> one request, whose body nobody reads -> the page, and the end of the connection. **Invariants**: 1. nothing that is said here ends the
//! daemon, or keeps others from asking for longer than [`PATIENCE`]. 2. an address that this machine has not is waited for, and no VM waits with it.
//! **Source**: RFC 9112. **Not here**: what the page says (`page`).

use crate::daemon::{BadInput, Daemon, telling};
use crate::web::{Place, Places};
use anyhow::{Context, Result};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::Response;
use dunlin_api::EventKind;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

const CONTENT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
/// A connection, from its first word to the last that is taken of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 16 << 10;
const HEAD_LINES: usize = 64;
/// When no connection could be taken.
const AGAIN: Duration = Duration::from_millis(100);
/// An address that this machine has not is asked for this often.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Serves metrics until the daemon ends, on a thread of its own.
pub fn serve(address: SocketAddr, daemon: &Arc<Daemon>) -> Result<()> {
    let listener = match listen(address) {
        Ok(listener) => Some(listener),
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            let text = format!(
                "metrics are not served yet: no interface of this host has the address {address} (now); it is tried again"
            );
            daemon.host.events.push("", EventKind::NoPage, text);
            None
        }
        Err(error) => return Err(BadInput(format!("metrics at {address}: {error}")).into()),
    };
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.context("a runtime for metrics")?;
    let daemon = daemon.clone();
    let work = move || {
        crate::web::goes_behind();
        runtime.block_on(answer_all(address, listener, daemon));
    };
    std::thread::Builder::new().name("metrics".into()).spawn(work)?;
    Ok(())
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn answer_all(address: SocketAddr, mut listener: Option<TcpListener>, daemon: Arc<Daemon>) {
    let listener = loop {
        match listener.take().map(tokio::net::TcpListener::from_std) {
            Some(Ok(listener)) => break listener,
            Some(Err(error)) => tracing::warn!("metrics at {address}: {error}"),
            None => sleep(ASK_AGAIN).await,
        }
        listener = listen(address).ok();
    };
    let places = Places::default();
    loop {
        match listener.accept().await {
            // Whoever finds no place is hung up on, and may come again.
            Ok((stream, from)) => {
                if let Some(place) = places.take(from.ip()) {
                    tokio::spawn(converse(daemon.clone(), stream, place));
                }
            }
            Err(error) => {
                // As when there are no more descriptors: somebody may give one back.
                tracing::debug!("metrics: {error}");
                sleep(AGAIN).await;
            }
        }
    }
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
