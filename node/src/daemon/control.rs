//! The control socket: JSON lines for the commands that need more than HTTP has, and for whoever came before the API.
//!
//! **Decides**: who gets a conversation. **Flow**: a connection -> a place for its user (`roles`) -> one request, if it is theirs to ask -> the same answers as
//! by HTTP (`requests::converse`). **Not here**: what is answered.

use super::{Daemon, exec, logs, requests};
use crate::control::server::{AnswerTo, read_request};
use dunlin_api::{Answer, Request};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

/// Whoever is not root says what they want within this time, and listens to each answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// When no connection could be taken.
const AGAIN: Duration = Duration::from_millis(100);

/// Accepts people on a thread of its own.
pub fn accept(daemon: &Arc<Daemon>, listener: UnixListener) -> anyhow::Result<()> {
    let daemon = daemon.clone();
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // As when there are no more descriptors: somebody may give one back.
                    std::thread::sleep(AGAIN);
                    continue;
                };
                let daemon = daemon.clone();
                let Some(place) = daemon.roles.enter(&stream) else {
                    turn_away(&stream);
                    continue;
                };
                let work = move || {
                    let _place = place;
                    serve(&daemon, &stream);
                };
                if let Err(error) = std::thread::Builder::new().name("request".into()).spawn(work) {
                    tracing::error!("a thread for a request: {error}");
                }
            }
        })?;
    Ok(())
}

/// A user who has too many conversations; nobody waits for this one.
fn turn_away(mut stream: &UnixStream) {
    let refusal =
        Answer::refused("this user has too many open conversations with the daemon: end one of them");
    let _ = stream
        .set_nonblocking(true)
        .and_then(|()| stream.answer(&refusal));
}

/// What is asked, if it is this user's to ask.
fn read_allowed(daemon: &Daemon, stream: &UnixStream) -> Result<Option<Request>, Answer> {
    let who = daemon.roles.of(stream);
    let who = who.map_err(|why| Answer::refused(why.to_string()))?;
    let patience = (!who.is_administrator()).then_some(PATIENCE);
    if stream.set_read_timeout(patience).is_err() || stream.set_write_timeout(patience).is_err() {
        return Ok(None);
    }
    let Some(request) = read_request(stream)? else {
        return Ok(None);
    };
    daemon.roles.check(&who, &request)?;
    // A conversation of many lines may rest as long as it likes: it has its place.
    let _ = stream.set_read_timeout(None);
    Ok(Some(request))
}

fn serve(daemon: &Arc<Daemon>, mut stream: &UnixStream) {
    let answer = match read_allowed(daemon, stream) {
        Ok(Some(Request::Exec { vm, command })) => exec::serve(daemon, &vm, command, stream),
        Ok(Some(Request::Log(ask))) => return logs::serve(daemon, ask, stream),
        Ok(Some(request)) => return requests::converse(daemon, request, &mut stream),
        Ok(None) => return,
        Err(refusal) => refusal,
    };
    // Whoever asked may have gone.
    let _ = stream.answer(&answer);
}
