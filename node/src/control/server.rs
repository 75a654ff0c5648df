//! The daemon's end of the control socket.

use dunlin_api::{Answer, Request};
use rustix::fs::{Mode, chmod};
use std::fs::DirBuilder;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// No request is longer: a vm.toml is a few hundred bytes.
const MOST_REQUEST_BYTES: u64 = 1 << 20;

/// Why the control socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon answers there.
    #[error("{0}: another daemon answers on this control socket; stop it first")]
    InUse(String),
    /// The system refuses.
    #[error("{0}: the control socket cannot be made: {1}")]
    Io(String, #[source] io::Error),
}

/// The listening control socket; the file goes when it is dropped.
pub struct ControlSocket {
    /// Accept here.
    pub listener: UnixListener,
    path: PathBuf,
    /// The folder, if it was made for it.
    made: Option<PathBuf>,
}

impl ControlSocket {
    /// Makes the socket, and its folder if there is none: for this user alone, or for whoever is let in by what is asked then
    /// (`daemon::roles`). One that a killed daemon left behind is replaced.
    pub fn bind(path: &Path, is_open: bool) -> Result<Self, SocketError> {
        let name = path.display().to_string();
        let io = |error| SocketError::Io(name.clone(), error);
        if UnixStream::connect(path).is_ok() {
            return Err(SocketError::InUse(name));
        }
        let made = make_folder(path).map_err(io)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(io)?;
        let this = Self {
            listener,
            path: path.to_owned(),
            made,
        };
        let mode = match is_open {
            true => 0o666,
            false => 0o600,
        };
        chmod(path, Mode::from_raw_mode(mode)).map_err(|error| io(error.into()))?;
        Ok(this)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = std::fs::remove_file(&self.path);
        if let Some(folder) = &self.made {
            // Somebody else's file may be there by now.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Under systemd /run/dunlin is there already. Without it a folder below one that exists is made, and no more of a path than that.
fn make_folder(path: &Path) -> io::Result<Option<PathBuf>> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(None);
    };
    match DirBuilder::new().mode(0o755).create(folder) {
        Ok(()) => Ok(Some(folder.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where answers go.
pub trait AnswerTo {
    /// Sends one line; an error means that nobody listens any more.
    fn answer(&mut self, answer: &Answer) -> io::Result<()>;
}

impl<W: Write + ?Sized> AnswerTo for W {
    fn answer(&mut self, answer: &Answer) -> io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.write_all(&line)?;
        self.flush()
    }
}

/// What a daemon says of a request that it does not know, as one of an earlier version.
pub const NOT_UNDERSTOOD: &str = "the request cannot be understood";

/// Reads one request; what cannot be understood is refused with its reason.
pub fn read_request(stream: impl Read) -> Result<Option<Request>, Answer> {
    let mut line = String::new();
    match BufReader::new(stream.take(MOST_REQUEST_BYTES)).read_line(&mut line) {
        Ok(0) | Err(_) => return Ok(None),
        Ok(_) => {}
    }
    serde_json::from_str(&line).map(Some).map_err(|error| {
        Answer::refused(format!(
            "the request cannot be understood (another version?): {error}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_folder_is_made_and_goes_with_it_and_another_s_stays() {
        let run = tempfile::tempdir().expect("a folder");
        let path = run.path().join("dunlin/dunlin.sock");
        let socket = ControlSocket::bind(&path, false).expect("in a folder that it makes");
        assert!(
            ControlSocket::bind(&path, false).is_err(),
            "somebody answers there"
        );
        drop(socket);
        assert!(!run.path().join("dunlin").exists());

        std::fs::create_dir(run.path().join("dunlin")).expect("as systemd makes it");
        drop(ControlSocket::bind(&path, true).expect("in a folder that is there"));
        assert!(run.path().join("dunlin").exists() && !path.exists());
        ControlSocket::bind(&run.path().join("no/such/dunlin.sock"), false)
            .err()
            .expect("one folder is made, not a path");
    }
}
