//! The command line's end of the API: HTTP by the socket beside the control socket.
//!
//! **Decides**: which way a command goes. **Flow**: a control socket's path -> the socket beside it -> the request's [`Address`] -> the answer, line by line -> [`Answer`]s, as
//! on the control socket. **Invariants**: 1. a command says what it wants done once: it goes to the control socket instead only where nobody answers by HTTP, or where who
//! answers has done nothing, as a daemon from before that does not answer to [`NAME`]. 2. the other socket is believed if its owner is the control socket's.
//! **Source**: RFC 9112. **Not here**: addresses (`address`), what other daemons ask (`client`).

use super::address::{Address, NAME, beside};
use super::client::{Client, ClientError};
use bytes::BytesMut;
use dunlin_api::{Answer, Request};
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper::{Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use tokio::runtime::{Builder, Runtime};

/// Answers line by line.
const LINES: &str = "application/x-ndjson";
const JSON: &str = "application/json";

/// A conversation of a command with its host's daemon.
pub struct Conversation {
    control: PathBuf,
    way: Way,
}

enum Way {
    /// By HTTP, and nothing is asked yet.
    Open(UnixStream),
    Http(Box<Lines>),
    /// All is known.
    Known(std::vec::IntoIter<Answer>),
    Control(Client<UnixStream>),
}

/// An answer that comes line by line.
struct Lines {
    runtime: Runtime,
    body: Incoming,
    /// What has come of lines that were not given out.
    read: BytesMut,
}

/// Who refuses says this.
#[derive(Deserialize)]
struct Refused {
    why: String,
    code: i32,
}

impl Conversation {
    /// Connects to the daemon with that control socket.
    pub fn connect(control: &Path) -> Result<Self, ClientError> {
        let way = match by_http(control) {
            Some(stream) => Way::Open(stream),
            None => Way::Control(Client::connect(control)?),
        };
        Ok(Self {
            control: control.to_owned(),
            way,
        })
    }

    /// Asks; answers come from `next`.
    pub fn ask(&mut self, request: &Request) -> Result<(), ClientError> {
        if let Way::Open(stream) = &self.way {
            let stream = stream.try_clone()?;
            match Address::of(request) {
                Some(address) => match by_address(stream, request, &address)? {
                    Some(way) => {
                        self.way = way;
                        return Ok(());
                    }
                    None => self.way = Way::Control(Client::connect(&self.control)?),
                },
                None => self.way = Way::Control(Client::connect(&self.control)?),
            }
        }
        match &mut self.way {
            Way::Control(client) => client.ask(request),
            // One conversation is one question.
            _ => Err(ClientError::Gone),
        }
    }

    /// The next line of the answer.
    pub fn next(&mut self) -> Result<Answer, ClientError> {
        match &mut self.way {
            Way::Open(_) => Err(ClientError::Gone),
            Way::Http(lines) => lines.next(),
            Way::Known(answers) => answers.next().ok_or(ClientError::Gone),
            Way::Control(client) => client.next(),
        }
    }

    /// Asks, and gives every line of the answer to `each`; returns the last one.
    pub fn talk(&mut self, request: &Request, mut each: impl FnMut(&Answer)) -> Result<Answer, ClientError> {
        self.ask(request)?;
        loop {
            let answer = self.next()?;
            if answer.is_last() {
                return Ok(answer);
            }
            each(&answer);
        }
    }
}

/// The socket for HTTP, if somebody listens there who may also listen on the control socket.
fn by_http(control: &Path) -> Option<UnixStream> {
    let socket = beside(control);
    let owner = |path: &Path| std::fs::metadata(path).ok().map(|about| about.uid());
    let is_theirs = owner(&socket).is_some_and(|uid| Some(uid) == owner(control));
    is_theirs.then(|| UnixStream::connect(&socket).ok()).flatten()
}

/// Asks by HTTP; none if who answers knows no such address, and has done nothing.
fn by_address(stream: UnixStream, request: &Request, address: &Address) -> Result<Option<Way>, ClientError> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let body = address.body.as_ref().map(ToString::to_string).unwrap_or_default();
    // Of a status there is one line.
    let wanted = match request {
        Request::Status => JSON,
        _ => LINES,
    };
    let asked = hyper::Request::builder()
        .method(&address.method)
        .uri(address.path())
        .header(HOST, NAME)
        .header(ACCEPT, wanted)
        .header(CONTENT_TYPE, JSON)
        .body(body)
        .map_err(io::Error::other)?;
    let response = runtime.block_on(async {
        stream.set_nonblocking(true)?;
        let stream = TokioIo::new(tokio::net::UnixStream::from_std(stream)?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(broken)?;
        tokio::spawn(connection);
        sender.send_request(asked).await.map_err(broken)
    })?;
    let status = response.status();
    let unknown = [
        StatusCode::MISDIRECTED_REQUEST,
        StatusCode::NOT_FOUND,
        StatusCode::METHOD_NOT_ALLOWED,
    ];
    if unknown.contains(&status) {
        return Ok(None);
    }
    let kind = response.headers().get(CONTENT_TYPE);
    let kind = kind
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let mut lines = Lines::of(runtime, response);
    if kind == LINES {
        return Ok(Some(Way::Http(Box::new(lines))));
    }
    let text = lines.whole()?;
    let answers = match (request, kind.as_str()) {
        (Request::Status, JSON) if status.is_success() => {
            vec![Answer::Status(serde_json::from_slice(&text)?), Answer::done("")]
        }
        // Turned away at the door.
        (_, "text/plain") => vec![Answer::refused(String::from_utf8_lossy(&text).trim())],
        _ => {
            let Refused { why, code } = serde_json::from_slice(&text)?;
            vec![Answer::Failed { why, code }]
        }
    };
    Ok(Some(Way::Known(answers.into_iter())))
}

impl Lines {
    fn of(runtime: Runtime, response: Response<Incoming>) -> Self {
        Self {
            runtime,
            body: response.into_body(),
            read: BytesMut::new(),
        }
    }

    fn next(&mut self) -> Result<Answer, ClientError> {
        let mut looked_at = 0;
        loop {
            let end = self.read[looked_at..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end {
                let line = self.read.split_to(looked_at + end + 1);
                return Ok(serde_json::from_slice(&line)?);
            }
            looked_at = self.read.len();
            let piece = self.piece()?.ok_or(ClientError::Gone)?;
            self.read.extend_from_slice(&piece);
        }
    }

    /// All that comes.
    fn whole(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut text = Vec::new();
        while let Some(piece) = self.piece()? {
            text.extend_from_slice(&piece);
        }
        Ok(text)
    }

    fn piece(&mut self) -> Result<Option<Bytes>, ClientError> {
        let Self { runtime, body, .. } = self;
        let frame = runtime.block_on(poll_fn(|context| Pin::new(&mut *body).poll_frame(context)));
        match frame {
            None => Ok(None),
            // What is no data is no line.
            Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
            Some(Err(error)) => Err(broken(error)),
        }
    }
}

/// What an error of HTTP is for a person.
fn broken(error: hyper::Error) -> ClientError {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        // The daemon has ended.
        Some(io::ErrorKind::UnexpectedEof) => ClientError::Gone,
        Some(kind) => ClientError::Io(kind.into()),
        None if error.is_incomplete_message() || error.is_canceled() || error.is_closed() => {
            ClientError::Gone
        }
        None => ClientError::Io(io::Error::other(error)),
    }
}

#[cfg(test)]
mod tests;
