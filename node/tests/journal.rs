//! A real daemon's words in a real journal: by field, by how serious they are, and as text.
//!
//! Needs root and systemd's journald, which runs in a mount namespace of its own; told as skipped without either.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use daemon::Host;
use dunlin_vmtest::is_root;
use serde_json::Value;

#[allow(dead_code, reason = "no user says anything here")]
#[path = "common/daemon.rs"]
mod daemon;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

const JOURNALD: &str = "/lib/systemd/systemd-journald";
/// In memory, and nothing of the machine's own.
const BEGIN: &str = r"
set -e
mount -t tmpfs run /run
mkdir -p /run/systemd/journal /run/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=\n' > /run/systemd/journald.conf.d/test.conf
exec /lib/systemd/systemd-journald";
/// What systemd would do: it says which open file the journal's stream is.
const AS_A_SERVICE: &str = "JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) exec \"$@\"";

/// A journal that ends with this.
struct Journald(Child);

impl Journald {
    fn start(folder: &Path) -> Result<Self> {
        let path = folder.join("notify");
        let ready = UnixDatagram::bind(&path)?;
        ready.set_read_timeout(Some(Duration::from_secs(60)))?;
        let child = Command::new("unshare")
            .args(["--mount", "sh", "-c", BEGIN])
            .env("NOTIFY_SOCKET", &path)
            .stdin(Stdio::null())
            .spawn()?;
        let this = Self(child);
        let mut words = [0; 4096];
        loop {
            let length = ready.recv(&mut words).context("journald is not ready")?;
            if String::from_utf8_lossy(&words[..length]).contains("READY=1") {
                return Ok(this);
            }
        }
    }

    /// What it says to `journalctl`.
    fn said(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("nsenter")
            .args(["--mount", "--target", &self.0.id().to_string(), "journalctl"])
            .args(arguments)
            .output()?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "journalctl {arguments:?}: {words}");
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Journald {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_journal_has_each_event_with_its_fields_and_as_seriously_as_it_is_to_be_taken() -> Result<()> {
    if !is_root() || !Path::new(JOURNALD).exists() {
        skipped::skip("a journal of its own needs root and systemd's journald");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let journald = Journald::start(folder.path())?;
    let mut host = Host::new()?;
    // Another daemon of this machine may have the page's usual address, which is told as a warning.
    host.configure("page = \"off\"")?;
    let file = host.file();
    // Of a VM whose file cannot be used something bad is told.
    let broken = file.parent().context("its folder")?.join("state/vms/broken");
    fs::create_dir_all(&broken)?;
    fs::write(broken.join("vm.toml"), "name = 3\n")?;
    let target = journald.0.id().to_string();
    host.start_by(&[
        "nsenter",
        "--mount",
        "--target",
        &target,
        "sh",
        "-c",
        AS_A_SERVICE,
        "sh",
    ])?;
    journald.said(&["--sync"])?;
    let begins = journald.said(&["DUNLIN_KIND=host-begins", "--output=json"])?;
    let begins: Value =
        serde_json::from_str(&begins).with_context(|| format!("one line of JSON: '{begins}'"))?;
    ensure!(
        begins["SYSLOG_IDENTIFIER"] == "dunlin" && begins["PRIORITY"] == "6",
        "{begins}"
    );
    ensure!(begins["DUNLIN_VM"].is_null(), "{begins}");
    ensure!(
        begins["MESSAGE"]
            .as_str()
            .is_some_and(|words| words.contains("kind=\"host-begins\"")),
        "{begins}"
    );
    let serious = journald.said(&["--priority=warning", "--identifier=dunlin", "--output=json"])?;
    let serious: Value =
        serde_json::from_str(&serious).with_context(|| format!("one line of JSON: '{serious}'"))?;
    ensure!(
        serious["DUNLIN_VM"] == "broken"
            && serious["DUNLIN_KIND"] == "failed"
            && serious["PRIORITY"] == "3"
            && serious["_TRANSPORT"] == "journal",
        "{serious}"
    );
    Ok(())
}
