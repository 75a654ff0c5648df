//! A real Chromium on a host of the testbed, steered through `vmtest/browser/look.mjs`.
//!
//! * **Decides:** nothing; it says what is to be done and gives back what came of it.
//! * **Flow:** [`Browser::open`] -> one line of JSON for each thing to do, one for its answer -> [`Browser::close`].
//! * **Invariants:** (1) no answer is waited for longer than [`PATIENCE`]; (2) a browser that is dropped is killed with all that it started, as
//!   the testbed kills what runs on its hosts.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cluster::Cluster;

/// Pictures and checks of one state take a while on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(240);
/// No state of the page is waited for longer.
const SHOWS: Duration = Duration::from_secs(120);

/// What it needs, as `cargo xtask page` has prepared it.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Node.
    pub node: PathBuf,
    /// Chromium.
    pub chromium: PathBuf,
    /// look.mjs, with its libraries beside it.
    pub script: PathBuf,
    /// Where pictures go.
    pub pictures: PathBuf,
}

/// A browser with two windows before one page.
pub struct Browser {
    child: Child,
    words: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Browser {
    /// Opens the page of `host` on that host; also says which browser it is.
    ///
    /// # Errors
    /// When it does not start, or the page does not load.
    pub fn open(cluster: &Cluster<'_>, tools: &Tools, host: &str) -> Result<(Self, String)> {
        let node = cluster.testbed().node(host);
        let own = node.home().join("browser");
        std::fs::create_dir_all(&own)?;
        let log = std::fs::File::create(node.home().join("browser.log"))?;
        let mut child = node
            .command(&tools.node)?
            .arg(&tools.script)
            .arg(&tools.chromium)
            .arg(own.join("profile"))
            .arg(&tools.pictures)
            // Whatever it leaves goes with the testbed.
            .env("HOME", &own)
            .env("TMPDIR", &own)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot run {}", tools.node.display()))?;
        let said = child.stdout.take().context("its output")?;
        // One answer for one question.
        let (tell, answers) = sync_channel(1);
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let words = child.stdin.take();
        let mut browser = Self {
            child,
            words,
            answers,
        };
        let said = browser.does(json!({"do": "open", "url": "http://localhost:7702/"}))?;
        let version = said.as_str().unwrap_or("a browser").to_owned();
        Ok((browser, version))
    }

    /// Waits until a place of the page says that.
    pub fn awaits(&mut self, css: &str, says: &str) -> Result<()> {
        let patience_ms = SHOWS.as_millis() as u64;
        self.does(json!({"do": "await", "css": css, "says": says, "patience_ms": patience_ms}))
            .map(drop)
    }

    /// Takes the pictures of a state, and fails for what is serious in it. What is less is returned.
    pub fn shoot(&mut self, state: &str) -> Result<Vec<String>> {
        let said = self.does(json!({"do": "shoot", "state": state}))?;
        serde_json::from_value(said).context("what axe-core found")
    }

    /// Goes through all that can be used with the tabulator; how much that was.
    pub fn tabs(&mut self) -> Result<u64> {
        Ok(self.does(json!({"do": "tabs"}))?.as_u64().unwrap_or_default())
    }

    /// Is asked a second time, and leaves it.
    pub fn leaves(&mut self, vm: &str, what: &str) -> Result<()> {
        self.does(json!({"do": "leave", "vm": vm, "what": what}))
            .map(drop)
    }

    /// Presses what cannot be done now, and is told why.
    pub fn cannot(&mut self, vm: &str, what: &str, says: &str) -> Result<()> {
        self.does(json!({"do": "cannot", "vm": vm, "what": what, "says": says}))
            .map(drop)
    }

    /// Orders it by keyboard, and says how it went. Pictures of a refusal are taken as `state`.
    pub fn order(&mut self, vm: &str, what: &str, state: Option<&str>) -> Result<String> {
        let said = self.does(json!({"do": "order", "vm": vm, "what": what, "state": state}))?;
        Ok(said.as_str().unwrap_or_default().to_owned())
    }

    /// These texts of events are shown as they are.
    pub fn harmless(&mut self, texts: &[String]) -> Result<()> {
        self.does(json!({"do": "harmless", "texts": texts})).map(drop)
    }

    /// Closes it. What the page did meanwhile that it must not do is an error.
    pub fn close(mut self) -> Result<()> {
        self.does(json!({"do": "close"}))?;
        // It ends with its input.
        self.words = None;
        self.child.wait()?;
        Ok(())
    }

    fn does(&mut self, what: Value) -> Result<Value> {
        let name = what["do"].as_str().unwrap_or_default().to_owned();
        let words = self.words.as_mut().context("the browser is closed")?;
        writeln!(words, "{what}").context("the browser has ended: see browser.log")?;
        let line = self
            .answers
            .recv_timeout(PATIENCE)
            .with_context(|| format!("{name}: the browser does not answer"))?;
        let mut answer: Value = serde_json::from_str(&line).with_context(|| format!("{name}: {line}"))?;
        match answer["ok"] == true {
            true => Ok(answer["said"].take()),
            false => bail!("{name}: {}", answer["why"].as_str().unwrap_or(&line)),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.words = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
