//! Keys that are exchanged, refused and given anew while daemons run: `dunlin cluster rotate`, `revoke`, `token` and `join`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Cluster;

/// The host that has the authority's key.
const FIRST: &str = "a";
/// A key that is refused is so within this time, on a machine however busy.
const REFUSES: Duration = Duration::from_secs(30);

impl Cluster<'_> {
    /// The authority's key, and the record of what it signed, go from where `dunlin init` left them to host a.
    pub fn give_authority(&self) -> Result<()> {
        for file in ["ca-key.pem", "issued.pem"] {
            let path = self.dir.join(file);
            fs::rename(&path, self.dir.join(FIRST).join(file)).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// `dunlin cluster` with these words on host a, and what it says.
    ///
    /// # Errors
    /// With the command's own words, when it fails.
    pub fn keys(&self, words: &[&str]) -> Result<String> {
        let dir = self.dir.join(FIRST);
        let words = [&["cluster"], words, &["--dir", dir.to_str().context("a path")?]].concat();
        self.dunlin(FIRST, &words)
    }

    /// Why `asked` does not reach `host`; none if it does.
    pub fn problem(&self, asked: &str, host: &str) -> Result<Option<String>> {
        let output = self.output(asked, &["cluster", "status", "--json"])?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let member: serde_json::Value = serde_json::from_str(line)?;
            if member["host"] == host {
                return Ok(member["problem"].as_str().map(str::to_owned));
            }
        }
        anyhow::bail!("host {asked} does not know of host {host}")
    }

    /// `asked` refuses `host`, in one line with these words; one that is late may be said not to answer at first.
    pub fn refuses(&self, asked: &str, host: &str, words: &str) -> Result<()> {
        let deadline = Instant::now() + REFUSES;
        loop {
            let why = self
                .problem(asked, host)?
                .unwrap_or_else(|| format!("{asked} reaches {host}"));
            if why.contains(words) && !why.contains('\n') {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{why}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// A machine comes in under the name of a host whose daemon does not run: by a token, with keys of its own. Its state folder stays.
    pub fn let_in(&self, host: &str) -> Result<()> {
        let (first, folder) = (self.dir.join(FIRST), self.dir.join(host));
        for name in ["host.toml", "cluster.toml", "key.pem", "cert.pem", "ca.pem"] {
            fs::remove_file(folder.join(name))?;
        }
        let mut door = self
            .command(FIRST, &["cluster", "token", host, "--dir"])?
            .arg(&first)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = BufReader::new(door.stdout.take().context("its output")?);
        let (mut head, mut line) = (String::new(), String::new());
        said.read_line(&mut head)?;
        said.read_line(&mut line)?;
        let token = line.split_whitespace().last().context("a token")?;
        let joined = self
            .testbed
            .node(host)
            .command(&self.binary)?
            .args(["cluster", "join", token, "--control", "control.sock"])
            .args(["--state", "state", "--dir"])
            .arg(&folder)
            .output()?;
        ensure!(
            joined.status.success(),
            "{}",
            String::from_utf8_lossy(&joined.stderr)
        );
        ensure!(door.wait()?.success(), "the door did not close well");
        Ok(())
    }
}
