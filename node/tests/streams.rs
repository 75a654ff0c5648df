//! Standard streams that nobody reads, or that take nothing.

use std::fs::File;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use daemon::{Host, ROOT};

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod daemon;

#[test]
fn a_command_whose_reader_has_gone_says_nothing_of_it() -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_dunlin"))
        .arg("check")
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()?
        .wait_with_output()?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{}: {words}", output.status);
    ensure!(!words.contains("panicked"), "{words}");
    Ok(())
}

#[test]
fn a_full_disk_under_its_words_does_not_end_a_daemon() -> Result<()> {
    let host = Host::new()?;
    host.configure("page = \"off\"")?;
    let full = || File::options().write(true).open("/dev/full").context("/dev/full");
    let mut daemon = Command::new(host.binary())
        .arg("host")
        .arg(host.file())
        .stdin(Stdio::null())
        .stdout(full()?)
        .stderr(full()?)
        .spawn()?;
    // It cannot say that it is ready: whoever asks waits until it listens.
    let begun = std::time::Instant::now();
    let answers = || -> Result<bool> { Ok(host.say(ROOT, &["status"])?.status.success()) };
    let outcome = loop {
        if answers()? {
            break Ok(());
        }
        if let Some(status) = daemon.try_wait()? {
            break Err(anyhow::anyhow!("it has ended: {status}"));
        }
        if begun.elapsed().as_secs() > 90 {
            break Err(anyhow::anyhow!("it does not answer"));
        }
    };
    daemon.kill()?;
    daemon.wait()?;
    outcome
}
