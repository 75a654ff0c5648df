//! A real daemon's session goes before the other sessions of its host.
//!
//! Needs root and what `cargo xtask setup` installs; told as skipped without root, and where this kernel knows no autogroups.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use daemon::Host;
use dunlin_vmtest::cluster::in_a_testbed;
use dunlin_vmtest::is_root;
use dunlin_vmtest::testbed::TestbedSpec;

#[allow(dead_code, reason = "no user says anything here")]
#[path = "common/daemon.rs"]
mod daemon;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// The nice value of a process' session among the others; empty for a process in no session of its own since the machine booted (the file is
/// empty there, as in a build machine whose first process starts everything), nothing where the kernel knows no autogroups.
fn session(pid: &str) -> Result<Option<String>> {
    match fs::read_to_string(format!("/proc/{pid}/autogroup")) {
        Ok(text) if text.is_empty() => Ok(Some(String::new())),
        Ok(text) => {
            let (_, nice) = text.trim().rsplit_once(" nice ").with_context(|| text.clone())?;
            Ok(Some(nice.to_owned()))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[test]
fn the_daemons_session_goes_before_the_others() -> Result<()> {
    if !is_root() {
        skipped::skip("network namespaces need root");
        return Ok(());
    }
    let Some(own) = session("self")? else {
        skipped::skip("this kernel knows no autogroups");
        return Ok(());
    };
    let dunlin = Path::new(env!("CARGO_BIN_EXE_dunlin"));
    in_a_testbed("priority", &TestbedSpec::three_hosts(), dunlin, |cluster| {
        cluster.start_hosts()?;
        let pid = cluster.pid("a").context("host a's daemon")?;
        let nice = session(&pid.to_string())?;
        ensure!(
            nice.as_deref() == Some("-15"),
            "the daemon's session has {nice:?}"
        );
        Ok(())
    })?;
    ensure!(
        session("self")?.as_deref() == Some(&own),
        "who started it keeps what it had"
    );
    Ok(())
}

#[test]
fn a_daemon_whose_session_is_not_in_its_pid_namespace_starts() -> Result<()> {
    if !is_root() {
        skipped::skip("PID namespaces need root");
        return Ok(());
    }
    let own = session("self")?;
    let mut host = Host::new()?;
    host.start_by(&["unshare", "--pid", "--fork", "--kill-child", "--"])?;
    ensure!(
        session("self")? == own,
        "a session that is not the daemon's keeps what it had"
    );
    Ok(())
}
