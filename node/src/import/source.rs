//! Where the XML comes from: a file, or libvirt by its own tool.
//!
//! **Decides**: how much is read, and how long `virsh` may take. **Not here**: what is in it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A domain's XML is some ten kilobytes. A parser's time grows with the square of the number of one element's attributes.
pub const MOST_BYTES: usize = 256 << 10;
/// libvirt answers at once, or its daemon does not run.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is said of XML that is too long.
pub fn too_long() -> String {
    format!("longer than {} KiB: no domain's XML is", MOST_BYTES >> 10)
}

/// The XML of `which`: a file, or the name of a domain that libvirt knows.
pub fn read(which: &str) -> Result<String, String> {
    let path = Path::new(which);
    if which.contains('/') || which.ends_with(".xml") || path.is_file() {
        let file = File::open(path).map_err(|error| format!("{which}: {error}"))?;
        return limited(file).map_err(|why| format!("{which}: {why}"));
    }
    dump(Path::new("virsh"), which, PATIENCE)
}

/// All of `from`, if that is not too much.
fn limited(from: impl Read) -> Result<String, String> {
    let mut bytes = Vec::new();
    from.take(MOST_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    if bytes.len() > MOST_BYTES {
        return Err(too_long());
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}

/// Asks libvirt. What it would start the domain with the next time, not what runs.
fn dump(virsh: &Path, name: &str, patience: Duration) -> Result<String, String> {
    let mut child = Command::new(virsh)
        .args(["--quiet", "dumpxml", "--inactive", "--domain", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                format!(
                    "{name} is no file, and virsh is not here to ask libvirt: on the machine that has the domain say 'virsh dumpxml {name} > \
                     {name}.xml', and import that file"
                )
            }
            _ => format!("virsh cannot be run: {error}"),
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
        return Err(format!(
            "virsh does not answer within {} s: is libvirt's daemon running?",
            patience.as_secs()
        ));
    };
    // What is longer than it may be is not read to its end.
    if xml.is_err() {
        end(&mut child);
    }
    let _ = reader.join();
    let status = child.wait().map_err(|error| error.to_string())?;
    let xml = xml.map_err(|why| format!("virsh: {why}"))?;
    if !status.success() {
        let first = said.lines().find(|line| !line.trim().is_empty());
        return Err(format!(
            "virsh: {}",
            super::shown(first.unwrap_or("it fails and says nothing").trim())
        ));
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
        let path = folder.join("virsh");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        path
    }

    #[test]
    fn no_more_is_read_than_a_domain_can_have() {
        // Endless: the test would not end.
        assert_eq!(limited(io::repeat(b'<')), Err(too_long()));
        let longest = vec![b'x'; MOST_BYTES];
        assert_eq!(limited(&longest[..]).map(|text| text.len()), Ok(MOST_BYTES));
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
        assert_eq!(
            dump(&unknown, "shop", patience),
            Err("virsh: error: failed to get domain".into())
        );
        let endless = virsh(folder.path(), "exec cat /dev/zero");
        assert_eq!(
            dump(&endless, "shop", patience),
            Err(format!("virsh: {}", too_long()))
        );
        let hangs = virsh(folder.path(), "exec sleep 3600");
        let why = dump(&hangs, "shop", Duration::from_millis(50)).expect_err("it hangs");
        assert!(why.contains("does not answer"), "{why}");
        let missing = dump(&folder.path().join("none"), "shop", patience).expect_err("not there");
        assert!(
            missing.contains("virsh dumpxml shop > shop.xml") && !missing.contains('\n'),
            "{missing}"
        );
    }
}
