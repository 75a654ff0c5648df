//! How far long work is, as a real command shows it: a bar or a spinner on a terminal, and no escape sequence in a pipe.
//!
//! The terminal is a real one (a pty, by `script`); the daemon is real, too, of a cluster of one host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use daemon::Host;

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod daemon;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

const ESCAPE: u8 = 0x1b;

/// A daemon that runs on the host with the authority's key; that host's folder.
fn start() -> Result<(Host, PathBuf)> {
    let mut host = Host::new()?;
    let dir = host.file().parent().context("its folder")?.to_path_buf();
    for name in ["ca-key.pem", "issued.pem"] {
        let carried = dir.parent().context("a folder")?.join(name);
        if carried.exists() {
            fs::rename(carried, dir.join(name))?;
        }
    }
    host.start()?;
    Ok((host, dir))
}

fn command(host: &Host, words: &[&str]) -> Vec<String> {
    let mut command = vec![
        host.binary().display().to_string(),
        "--socket".to_owned(),
        host.socket().display().to_string(),
    ];
    command.extend(words.iter().map(|word| (*word).to_owned()));
    command
}

fn in_pipes(host: &Host, words: &[&str]) -> Result<Output> {
    let command = command(host, words);
    Ok(Command::new(&command[0])
        .args(&command[1..])
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()?)
}

/// All that a terminal gets; nothing where there is no `script`.
fn on_a_terminal(host: &Host, words: &[&str]) -> Result<Option<Output>> {
    if !Path::new("/usr/bin/script").exists() {
        skipped::skip("a terminal needs /usr/bin/script (bsdutils)");
        return Ok(None);
    }
    let output = Command::new("/usr/bin/script")
        .args(["--quiet", "--return", "--command"])
        .arg(command(host, words).join(" "))
        .arg("/dev/null")
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()?;
    Ok(Some(output))
}

fn has_no_escape(output: &Output) -> Result<()> {
    let all = [&output.stdout[..], &output.stderr].concat();
    ensure!(
        !all.contains(&ESCAPE),
        "an escape byte in a pipe: {:?}",
        String::from_utf8_lossy(&all)
    );
    Ok(())
}

#[test]
fn rotating_keys_counts_hosts_on_a_terminal_and_tells_each_in_a_line_elsewhere() -> Result<()> {
    let (host, dir) = start()?;
    let dir = dir.to_str().context("a path")?;
    let words = ["cluster", "rotate", "--dir", dir];
    if let Some(shown) = on_a_terminal(&host, &words)? {
        let text = String::from_utf8_lossy(&shown.stdout);
        ensure!(shown.status.success(), "{text}");
        for part in ["\u{1b}[", "new keys [", "0/1 hosts", "host a has new keys"] {
            ensure!(text.contains(part), "no {part:?} in {text:?}");
        }
        // The bar is gone at the end.
        ensure!(!text.trim_end().ends_with("hosts"), "{text:?}");
    }
    for words in [&words[..], &[&words[..], &["--authority"]].concat()] {
        let piped = in_pipes(&host, words)?;
        has_no_escape(&piped)?;
        let text = String::from_utf8_lossy(&piped.stdout);
        ensure!(piped.status.success() && piped.stderr.is_empty(), "{piped:?}");
        ensure!(
            text.contains("host a has new keys\n") && text.lines().count() <= 4 && !text.contains('['),
            "{text}"
        );
    }
    Ok(())
}

#[test]
fn whoever_waits_for_an_end_sees_for_what_on_a_terminal_and_only_the_result_elsewhere() -> Result<()> {
    let (host, _) = start()?;
    let words = ["down", "nobody"];
    if let Some(shown) = on_a_terminal(&host, &words)? {
        let text = String::from_utf8_lossy(&shown.stdout);
        ensure!(!shown.status.success(), "{text}");
        for part in [
            "\u{1b}[",
            "VM 'nobody' is asked to switch itself off",
            "there is no VM 'nobody'",
        ] {
            ensure!(text.contains(part), "no {part:?} in {text:?}");
        }
    }
    let piped = in_pipes(&host, &words)?;
    has_no_escape(&piped)?;
    let why = String::from_utf8_lossy(&piped.stderr);
    ensure!(piped.stdout.is_empty(), "{piped:?}");
    ensure!(
        why.lines().count() == 1 && why.contains("there is no VM 'nobody'"),
        "{why}"
    );
    Ok(())
}
