//! The system calls that a request costs the primary's daemon, by `strace`. It slows what it looks at, so its window is one of its own, and has
//! no other figure.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// For one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// Requests in all.
    pub requests: u64,
    /// Name -> how many, how many in vain, and the share of the time in calls in percent.
    pub each: BTreeMap<String, (f64, f64, f64)>,
}

/// Whether there is a strace.
///
/// # Errors
/// In one line that says what to do.
pub fn ready() -> Result<()> {
    let found = Command::new("strace").arg("-V").stdout(Stdio::null()).status();
    match found {
        Ok(status) if status.success() => Ok(()),
        _ => bail!("--syscalls needs strace: apt-get install strace"),
    }
}

/// A strace on a daemon.
pub struct Trace(Option<Child>);

impl Trace {
    /// From now on, into `file`.
    pub fn begin(daemon: u32, file: &Path) -> Result<Self> {
        let child = Command::new("strace")
            .args(["-c", "-f", "-p", &daemon.to_string(), "-o"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run strace")?;
        Ok(Self(Some(child)))
    }

    /// Until now.
    pub fn end(mut self, file: &Path, requests: u64) -> Result<Calls> {
        if let Some(mut child) = self.0.take() {
            // On an interrupt it lets go and writes its table.
            kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
            child.wait()?;
        }
        parse(&std::fs::read_to_string(file)?, requests)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `% time     seconds  usecs/call     calls    errors syscall`, the column of errors empty where there are none.
fn parse(text: &str, requests: u64) -> Result<Calls> {
    let mut each = BTreeMap::new();
    let per = |count: f64| count / requests.max(1) as f64;
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (share, calls, errors, name) = match fields[..] {
            [share, _, _, calls, name] => (share, calls, "0", name),
            [share, _, _, calls, errors, name] => (share, calls, errors, name),
            _ => continue,
        };
        if let (Ok(share), Ok(calls), Ok(errors)) = (share.parse(), calls.parse(), errors.parse())
            && name != "total"
        {
            each.insert(name.to_owned(), (per(calls), per(errors), share));
        }
    }
    ensure!(!each.is_empty(), "strace saw nothing of the daemon");
    Ok(Calls { requests, each })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_strace_is_read() {
        let text = "% time     seconds  usecs/call     calls    errors syscall\n------ ----------- ----------- --------- --------- ----------------\n 60.00    0.006000          30       200        50 recvfrom\n 40.00    0.004000          40       100           sendto\n------ ----------- ----------- --------- --------- ----------------\n100.00    0.010000          33       300        50 total\n";
        let calls = parse(text, 100).unwrap();
        assert_eq!(calls.each.len(), 2);
        assert_eq!(calls.each["recvfrom"], (2.0, 0.5, 60.0));
        assert_eq!(calls.each["sendto"], (1.0, 0.0, 40.0));
        assert!(parse("", 1).is_err());
    }
}
