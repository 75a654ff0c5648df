//! How far long work is, for whoever waits for it: a bar or a spinner on a terminal; in a file or a pipe few lines, and no escape sequence.
//!
//! **Decides**: what is shown where. **Flow**: a command learns how far its work is -> [`Teller`] -> standard error, if that is a terminal, else lines on
//! standard output. **Invariants**: 1. nothing of it is left on the terminal when it is dropped, so whoever prints a result drops it first. 2. a
//! line that is the same as the one before is not printed again. **Not here**: what is waited for (`talk`, `keys`).

use anyhow::Result;
use dunlin_api::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// How often a spinner turns.
const TURN: Duration = Duration::from_millis(120);

/// Says how far long work is. On a terminal it is gone when this is dropped.
pub struct Teller {
    bar: ProgressBar,
    bytes: ProgressStyle,
    hosts: ProgressStyle,
    spinner: ProgressStyle,
    said: String,
}

impl Teller {
    pub fn new() -> Result<Self> {
        let style = |template: &str| -> Result<ProgressStyle> {
            Ok(ProgressStyle::with_template(template)?.progress_chars("=> "))
        };
        Ok(Self {
            bar: ProgressBar::new(0),
            bytes: style("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}")?,
            hosts: style("{msg} [{bar:30}] {pos}/{len} hosts")?,
            spinner: style("{spinner} {msg} ({elapsed})")?,
            said: String::new(),
        })
    }

    /// What is waited for, whose end nobody can tell; a line of it where there is no terminal.
    pub fn step(&mut self, what: &str) {
        self.waits(what);
        self.say(what.to_owned());
    }

    /// The same, on a terminal only.
    pub fn waits(&self, what: &str) {
        self.bar.set_style(self.spinner.clone());
        self.bar.set_message(what.to_owned());
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(TURN);
        }
    }

    /// How many bytes are done; without a terminal a line for each tenth of them.
    pub fn progress(&mut self, progress: &Progress) {
        let Progress { what, done, total } = progress;
        self.bar.disable_steady_tick();
        self.bar.set_style(self.bytes.clone());
        self.bar.set_message(what.clone());
        self.bar.set_length(*total);
        self.bar.set_position(*done);
        if progress.tenth() > 0 {
            let percent = progress.tenth() * 10;
            self.say(format!("{what}: {percent} % of {} MiB", total >> 20));
        }
    }

    /// So many hosts are to be gone through. On a terminal only: each host that is through has a line of its own.
    pub fn hosts(&self, what: &str, count: usize) {
        self.bar.set_style(self.hosts.clone());
        self.bar.set_message(what.to_owned());
        self.bar.set_length(count as u64);
        self.bar.set_position(0);
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(TURN);
        }
    }

    /// One more host is through.
    pub fn host_done(&self) {
        self.bar.inc(1);
    }

    /// A line that stays, above what is shown.
    pub fn line(&self, line: &str) {
        self.bar.suspend(|| println!("{line}"));
    }

    /// The same of what went wrong.
    pub fn wrong(&self, line: &str) {
        self.bar.suspend(|| eprintln!("dunlin: {line}"));
    }

    fn say(&mut self, line: String) {
        if self.bar.is_hidden() && line != self.said {
            println!("{line}");
            self.said = line;
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
