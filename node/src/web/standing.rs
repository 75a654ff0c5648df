//! Whether the certificate that a person has shown still counts, while their connection stands.
//!
//! **Decides**: until when a person is answered. **Flow**: TLS has let them in -> [`Standing::look`] before each request, and every [`LOOK`](super::door) while
//! the connection stands -> who counts no more reads one line: 401, or the last of a stream ([`told_why`]) -> the connection ends.
//! **Invariants**: 1. whether it counts is decided as at the door, by the authorities and the revocation lists of that moment. 2. whoever has counted no more
//! once, on this connection never does again. **Not here**: TLS (`dunlin_fabric::link`), roles (`daemon::roles`).

use super::answers::refused;
use super::lines;
use axum::body::{Body, Bytes};
use axum::http::header::{CONNECTION, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use dunlin_api::Answer;
use dunlin_fabric::link::{Identity, PersonError};
use futures_util::future::{Either, select};
use futures_util::stream::{StreamExt, unfold};
use serde_json::json;
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_rustls::rustls::pki_types::CertificateDer;

/// A person's certificate counts no more.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "person '{name}': {why}: 'dunlin cluster person {name}' makes a new one, on the host with the authority's key"
)]
pub struct CountsNoMore {
    name: String,
    #[source]
    why: Arc<PersonError>,
}

/// A person's certificate, on one connection.
pub struct Standing {
    name: String,
    identity: Identity,
    /// With the certificates between it and an authority.
    shown: Vec<CertificateDer<'static>>,
    /// Why it counts no more.
    ended: watch::Sender<Option<CountsNoMore>>,
}

impl Standing {
    /// Of one whom TLS has let in just now.
    pub fn new(name: &str, identity: Identity, shown: &[CertificateDer<'_>]) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            identity,
            shown: shown.iter().cloned().map(CertificateDer::into_owned).collect(),
            ended: watch::Sender::new(None),
        })
    }

    /// Looks again; why it counts no more, in a line.
    pub fn look(&self) -> Result<(), CountsNoMore> {
        if let Some(why) = &*self.ended.borrow() {
            return Err(why.clone());
        }
        let Err(why) = self.identity.person_counts(&self.shown) else {
            return Ok(());
        };
        let why = CountsNoMore {
            name: self.name.clone(),
            why: Arc::new(why),
        };
        tracing::info!("{why}");
        self.ended.send_replace(Some(why.clone()));
        Err(why)
    }

    /// Waits until a look has found that it counts no more.
    async fn ends(&self) -> String {
        let mut ended = self.ended.subscribe();
        // Its sender is in here, so there is a word.
        let why = ended.wait_for(Option::is_some).await;
        why.ok()
            .and_then(|why| why.as_ref().map(CountsNoMore::to_string))
            .unwrap_or_default()
    }
}

/// The answer to whoever counts no more; the connection ends with it.
pub fn over(why: &str) -> Response {
    let mut response = refused(StatusCode::UNAUTHORIZED, why, 2);
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(CONNECTION, close);
    response
}

/// An answer that goes on ends when its asker counts no more, with a last word that says why.
pub fn told_why(response: Response, standing: &Arc<Standing>) -> Response {
    let kind = response.headers().get(CONTENT_TYPE);
    let last: fn(&str) -> String = match kind.and_then(|kind| kind.to_str().ok()) {
        Some("text/event-stream") => |why| format!("event: ended\ndata: {}\n\n", json!({"why": why})),
        Some(lines::KIND) => |why| {
            let line = serde_json::to_string(&Answer::refused(why));
            line.map(|line| line + "\n").unwrap_or_default()
        },
        _ => return response,
    };
    let (parts, body) = response.into_parts();
    let pieces = body.into_data_stream();
    let state = Some((pieces, standing.clone(), true));
    let pieces = unfold(state, move |state| async move {
        let (mut pieces, standing, is_whole) = state?;
        let piece = if is_whole {
            let ends = pin!(standing.ends());
            match select(ends, pieces.next()).await {
                Either::Left((why, _)) => return Some((Ok(Bytes::from(last(&why))), None)),
                Either::Right((piece, _)) => piece?,
            }
        } else {
            // In the middle of a line nothing else is said.
            pieces.next().await?
        };
        let is_whole = piece.as_ref().is_ok_and(|piece| piece.ends_with(b"\n"));
        Some((piece, Some((pieces, standing, is_whole))))
    });
    Response::from_parts(parts, Body::from_stream(pieces))
}
