//! Answers line by line: what the control socket says, by HTTP.
//!
//! **Decides**: how an answer is wanted, and who has a place for a conversation. **Flow**: a request with `Accept: application/x-ndjson` -> a place
//! -> a thread of the daemon's own priority (`hands`) -> roles -> `requests::converse`, as for the control socket -> the lines, as they come.
//! **Invariants**: 1. what follows events, or what a program prints, has places of its own: however much is followed, orders are taken. 2. administrators
//! have places of their own. 3. an asker that does not read stops its own thread alone. **Source**: RFC 9110, "Accept"; NDJSON. **Not here**: what is answered.

use super::Web;
use super::answers::{busy, ends, refused, said};
use crate::daemon::requests;
use crate::daemon::roles::Who;
use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dunlin_api::log::LogRequest;
use dunlin_api::{Answer, Request};
use futures_util::stream::unfold;
use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// What lines are called in a header.
pub const KIND: &str = "application/x-ndjson";
/// Conversations that end by themselves; of administrators, and of all others.
const ENDING: usize = 128;
/// Conversations that go on until the asker goes; the same.
const FOLLOWING: usize = 128;
/// Threads for conversations, at most.
pub const CONVERSATIONS: usize = 2 * (ENDING + FOLLOWING);
/// Pieces of an answer that are not written yet: each is a line, or a few KiB of them.
const WAITING: usize = 16;

/// How an answer is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// One object, when all is known.
    Whole,
    /// Line by line, each an [`Answer`].
    Lines,
}

impl<S: Send + Sync> FromRequestParts<S> for How {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let accepted = parts.headers.get_all(ACCEPT).iter();
        let mut kinds = accepted
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|kind| kind.split(';').next());
        Ok(match kinds.any(|kind| kind.trim().eq_ignore_ascii_case(KIND)) {
            true => Self::Lines,
            false => Self::Whole,
        })
    }
}

/// Places for conversations.
pub struct Places {
    administrators: Kinds,
    others: Kinds,
}

struct Kinds {
    ending: Arc<Semaphore>,
    following: Arc<Semaphore>,
}

impl Kinds {
    fn new() -> Self {
        Self {
            ending: Arc::new(Semaphore::new(ENDING)),
            following: Arc::new(Semaphore::new(FOLLOWING)),
        }
    }
}

impl Places {
    /// All are free.
    pub fn new() -> Self {
        Self {
            administrators: Kinds::new(),
            others: Kinds::new(),
        }
    }

    fn take(&self, who: &Who, request: &Request) -> Option<OwnedSemaphorePermit> {
        let kinds = match who.is_administrator() {
            true => &self.administrators,
            false => &self.others,
        };
        let places = match follows(request) {
            true => &kinds.following,
            false => &kinds.ending,
        };
        places.clone().try_acquire_owned().ok()
    }
}

/// Whether it goes on until the asker goes.
fn follows(request: &Request) -> bool {
    matches!(
        request,
        Request::Events { follow: true, .. }
            | Request::Logs { follow: true, .. }
            | Request::Log(LogRequest::Read { follow: true, .. })
    )
}

/// What is written goes to the asker, in pieces.
struct Pieces(mpsc::Sender<Bytes>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.blocking_send(Bytes::copy_from_slice(bytes)) {
            Ok(()) => Ok(bytes.len()),
            // Nobody listens any more.
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Asks on a thread of its own, if it is theirs to ask, and passes on what is answered. What is refused before anything was done is answered as all
/// refusals are; what goes wrong later is the last line.
pub async fn converse(web: Arc<Web>, who: Arc<Who>, request: Request) -> Response {
    let Some(place) = web.places.take(&who, &request) else {
        return busy();
    };
    let (tell, mut told) = mpsc::channel(WAITING);
    let (refuse, refusal) = oneshot::channel();
    let shared = web.clone();
    let taken = web.hands.take(move || {
        let _place = place;
        // Here and not on a thread before: each that is handed on to costs a command its turn on a busy host.
        match shared.daemon.roles().check(&who, &request) {
            Ok(()) => requests::converse(&shared.daemon, request, &mut Pieces(tell)),
            // Whoever asked may have gone.
            Err(answer) => drop(refuse.send(answer)),
        }
    });
    if !taken {
        return ends();
    }
    let Some(first) = told.recv().await else {
        return match refusal.await {
            Ok(Answer::Failed { why, code }) => refused(StatusCode::FORBIDDEN, &why, code),
            _ => ends(),
        };
    };
    // More than one line is no answer to this question.
    if let Ok(answer @ Answer::Failed { .. }) = serde_json::from_slice(&first) {
        return said(answer);
    }
    let pieces = unfold((Some(first), told), |(first, mut told)| async move {
        let piece = match first {
            Some(first) => first,
            None => told.recv().await?,
        };
        Some((Ok::<_, Infallible>(piece), (None, told)))
    });
    let kind = HeaderValue::from_static(KIND);
    ([(CONTENT_TYPE, kind)], Body::from_stream(pieces)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::server::AnswerTo;
    use dunlin_fabric::keys::person::{Person, PersonRole};

    fn events(follow: bool) -> Request {
        Request::Events {
            follow,
            from_now: false,
            since_ms: None,
        }
    }

    #[test]
    fn however_much_is_followed_orders_and_administrators_have_places() {
        let places = Places::new();
        let person = Who::person(&Person {
            name: "ann".into(),
            role: PersonRole::Operator,
            serial: Vec::new(),
        });
        let order = Request::Failover { vm: "shop".into() };
        let followed: Vec<_> = (0..1000)
            .map_while(|_| places.take(&person, &events(true)))
            .collect();
        assert_eq!(followed.len(), FOLLOWING);
        let orders: Vec<_> = (0..1000).map_while(|_| places.take(&person, &order)).collect();
        assert_eq!(orders.len(), ENDING);
        assert!(
            places.take(&person, &events(false)).is_none(),
            "it ends by itself"
        );
        let root = Who::root();
        assert!(places.take(&root, &order).is_some() && places.take(&root, &events(true)).is_some());
        drop(followed);
        assert!(places.take(&person, &events(true)).is_some());
    }

    #[test]
    fn an_asker_that_reads_nothing_is_sent_a_few_pieces_and_one_that_has_gone_is_noticed() {
        let (tell, mut told) = mpsc::channel(WAITING);
        let telling = std::thread::spawn(move || {
            let mut pieces = Pieces(tell);
            (0..1000).find(|_| pieces.answer(&Answer::Alive).is_err())
        });
        assert_eq!(told.blocking_recv().expect("a piece"), "{\"answer\":\"alive\"}\n");
        drop(told);
        let ended_at = telling.join().expect("it ends").expect("it notices");
        assert!(ended_at <= WAITING + 1, "{ended_at} pieces for nobody");
    }
}
