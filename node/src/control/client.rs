//! The command line's end of the control socket, and a daemon's end of a control link to another.

use dunlin_api::{Answer, Request};
use serde::Serialize;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A conversation with a daemon.
pub struct Client<S> {
    stream: BufReader<S>,
}

/// Why a daemon could not be talked to.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon there.
    #[error(
        "no daemon answers at {socket}: {source} ('systemctl start dunlin' starts the package's, 'dunlin host HOST.toml' any; --socket \
         names another socket)"
    )]
    NoDaemon {
        /// The socket.
        socket: String,
        /// Why.
        source: io::Error,
    },
    /// It may well run.
    #[error(
        "this user may not connect to {socket}: {source} (say it as root, or see 'viewers' and 'operators' of host.toml)"
    )]
    NotForUser {
        /// The socket.
        socket: String,
        /// Why.
        source: io::Error,
    },
    /// It stopped talking.
    #[error("the daemon closed the connection without an answer; see its log")]
    Gone,
    /// The connection broke.
    #[error("the connection to the daemon broke: {0}")]
    Io(#[from] io::Error),
    /// It says something that this version does not know.
    #[error("the daemon's answer cannot be understood (another version?): {0}")]
    Nonsense(#[from] serde_json::Error),
}

impl Client<UnixStream> {
    /// Connects to the daemon at `socket`.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(socket).map_err(|source| {
            let socket = socket.display().to_string();
            match source.kind() {
                io::ErrorKind::PermissionDenied => ClientError::NotForUser { socket, source },
                _ => ClientError::NoDaemon { socket, source },
            }
        })?;
        Ok(Self::over(stream))
    }
}

impl<S: Read + Write> Client<S> {
    /// A conversation over an open stream.
    pub fn over(stream: S) -> Self {
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// Asks; answers come from `next`.
    pub fn ask(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.say(request) {
            // A daemon that turns somebody away does not wait for the question. Why it did is there to be read.
            Err(ClientError::Io(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            asked => asked,
        }
    }

    /// Says a line of a longer conversation.
    pub fn say(&mut self, value: &impl Serialize) -> Result<(), ClientError> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let stream = self.stream.get_mut();
        stream.write_all(&line)?;
        Ok(stream.flush()?)
    }

    /// The next line of the answer.
    pub fn next(&mut self) -> Result<Answer, ClientError> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(ClientError::Gone);
        }
        Ok(serde_json::from_str(&line)?)
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
