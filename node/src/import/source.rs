//! Where the XML comes from: a file, or libvirt by its own tool.
//!
//! **Decides**: how much is read, and how long `virsh` may take. **Not here**: what is in it.

use super::xml::shown;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A domain's XML is some ten kilobytes. A parser's time grows with the square of the number of one element's attributes.
pub const MOST_BYTES: usize = 256 << 10;
/// libvirt answers at once, or its daemon does not run.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why what is there is no domain's XML.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No domain has so much.
    #[error("longer than {} KiB: no domain's XML is", MOST_BYTES >> 10)]
    TooLong,
    /// Something else.
    #[error("it is not UTF-8 text")]
    NotText,
}

/// Why there is no XML of a domain.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file.
    #[error("{which}: {error}")]
    File {
        /// Which.
        which: String,
        /// Why not.
        #[source]
        error: TextError,
    },
    /// Neither a file, nor somebody to ask.
    #[error(
        "{name} is no file, and virsh is not here to ask libvirt: on the machine that has the domain say 'virsh dumpxml {name} > \
         {name}.xml', and import that file"
    )]
    NoVirsh {
        /// The domain's.
        name: String,
    },
    /// The system does not let it.
    #[error("virsh cannot be run: {0}")]
    NotRun(#[source] io::Error),
    /// It waits for libvirt's daemon.
    #[error("virsh does not answer within {} s: is libvirt's daemon running?", .0.as_secs())]
    Silent(Duration),
    /// Nobody knows how it has ended.
    #[error(transparent)]
    Lost(#[from] io::Error),
    /// What it prints.
    #[error("virsh: {0}")]
    Text(#[source] TextError),
    /// It fails: its own words.
    #[error("virsh: {0}")]
    Refused(String),
}

/// The XML of `which`: a file, or the name of a domain that libvirt knows.
pub fn read(which: &str) -> Result<String, SourceError> {
    let path = Path::new(which);
    if which.contains('/') || which.ends_with(".xml") || path.is_file() {
        let text = File::open(path).map_err(TextError::Io).and_then(limited);
        return text.map_err(|error| SourceError::File {
            which: which.to_owned(),
            error,
        });
    }
    dump(Path::new("virsh"), which, PATIENCE)
}

/// All of `from`, if that is not too much.
fn limited(from: impl Read) -> Result<String, TextError> {
    let mut bytes = Vec::new();
    from.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MOST_BYTES {
        return Err(TextError::TooLong);
    }
    String::from_utf8(bytes).map_err(|_| TextError::NotText)
}

/// Asks libvirt. What it would start the domain with the next time, not what runs.
fn dump(virsh: &Path, name: &str, patience: Duration) -> Result<String, SourceError> {
    let mut child = Command::new(virsh)
        .args(["--quiet", "dumpxml", "--inactive", "--domain", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SourceError::NoVirsh {
                name: name.to_owned(),
            },
            _ => SourceError::NotRun(error),
        })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (sender, answers) = crossbeam_channel::bounded(1);
    let reader = std::thread::spawn(move || {
        let said = stderr.map(|stderr| std::thread::spawn(move || limited(stderr)));
        let xml = stdout.map_or(Ok(String::new()), limited);
        let said = said.and_then(|thread| thread.join().ok()?.ok());
        // Whoever waits may have lost patience.
        let _ = sender.send((xml, said.unwrap_or_default()));
    });
    let Ok((xml, said)) = answers.recv_timeout(patience) else {
        end(&mut child);
        return Err(SourceError::Silent(patience));
    };
    // What is longer than it may be is not read to its end.
    if xml.is_err() {
        end(&mut child);
    }
    let _ = reader.join();
    let status = child.wait()?;
    let xml = xml.map_err(SourceError::Text)?;
    if !status.success() {
        let first = said.lines().find(|line| !line.trim().is_empty());
        let words = shown(first.unwrap_or("it fails and says nothing").trim());
        return Err(SourceError::Refused(words));
    }
    Ok(xml)
}

fn end(child: &mut Child) {
    // It may have ended by itself: as good.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn virsh(folder: &Path, script: &str) -> std::path::PathBuf {
        let (text, path) = (folder.join("text"), folder.join("virsh"));
        std::fs::write(&text, format!("#!/bin/sh\n{script}\n")).expect("a script");
        // Not by this process: what it has open for writing, a child that another test starts just then has open too, and nobody may execute it.
        let copied = Command::new("cp").args([&text, &path]).status();
        assert!(copied.expect("cp runs").success());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        path
    }

    #[test]
    fn no_more_is_read_than_a_domain_can_have() {
        // Endless: the test would not end.
        assert!(matches!(limited(io::repeat(b'<')), Err(TextError::TooLong)));
        let longest = vec![b'x'; MOST_BYTES];
        assert_eq!(limited(&longest[..]).expect("text").len(), MOST_BYTES);
        assert!(limited(&[0xff, 0xfe][..]).is_err());
    }

    #[test]
    fn libvirt_is_asked_for_what_it_would_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let patience = Duration::from_secs(60);
        let asked = virsh(folder.path(), "echo \"<domain>$*</domain>\"");
        let xml = dump(&asked, "shop", patience).expect("it answers");
        assert_eq!(xml, "<domain>--quiet dumpxml --inactive --domain shop</domain>\n");
        let unknown = virsh(folder.path(), "echo 'error: failed to get domain' >&2; exit 1");
        let said = |virsh: &Path, patience| {
            let failed = dump(virsh, "shop", patience);
            failed.expect_err("no domain").to_string()
        };
        assert_eq!(said(&unknown, patience), "virsh: error: failed to get domain");
        let endless = virsh(folder.path(), "exec cat /dev/zero");
        assert_eq!(said(&endless, patience), format!("virsh: {}", TextError::TooLong));
        let hangs = virsh(folder.path(), "exec sleep 3600");
        let why = said(&hangs, Duration::from_millis(50));
        assert!(why.contains("does not answer"), "{why}");
        let missing = said(&folder.path().join("none"), patience);
        assert!(
            missing.contains("virsh dumpxml shop > shop.xml") && !missing.contains('\n'),
            "{missing}"
        );
    }
}
