//! `check`: what this host lacks, before anything is started.

use crate::daemon::BadInput;
use anyhow::Result;
use dunlin_guest::VmSpec;
use dunlin_guest::probe::{self, Finding};
use std::path::Path;
use std::process::ExitCode;

/// Prints every finding; fails if something is missing.
pub fn run(vm: Option<&Path>, json: bool) -> Result<ExitCode> {
    let mut findings = probe::host(&spec(vm)?);
    findings.push(heartbeats());
    if json {
        let list: Vec<_> = findings
            .iter()
            .map(|finding| serde_json::json!({"what": finding.what, "ok": finding.ok, "mend": finding.mend}))
            .collect();
        println!("{}", serde_json::to_string(&list)?);
    } else {
        findings.iter().for_each(print);
    }
    let missing = findings.iter().filter(|finding| !finding.ok).count();
    if missing == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("dunlin: {} missing on this host", counted(missing));
    Ok(ExitCode::FAILURE)
}

fn counted(missing: usize) -> String {
    match missing {
        1 => "1 thing is".to_owned(),
        more => format!("{more} things are"),
    }
}

/// Not a fault where it is not allowed: only less sure on a host that is busy.
fn heartbeats() -> Finding {
    let (what, mend) = match dunlin_fabric::group::may_be_real_time() {
        Ok(()) => ("heartbeats: at real-time priority".to_owned(), ""),
        Err(error) => (
            format!(
                "heartbeats: at ordinary priority ({error}); where this host is very busy its VMs may move away"
            ),
            "run the daemon as root, or with CAP_SYS_NICE or LimitRTPRIO=1",
        ),
    };
    Finding {
        topic: "heartbeats",
        what,
        ok: true,
        mend: mend.to_owned(),
    }
}

fn print(finding: &Finding) {
    let mark = match (finding.ok, finding.mend.is_empty()) {
        (true, true) => "ok     ",
        (true, false) => "NOTE   ",
        (false, _) => "MISSING",
    };
    let mend = if finding.mend.is_empty() {
        String::new()
    } else {
        format!(": {}", finding.mend)
    };
    println!("{mark} {}{mend}", finding.what);
}

/// The VM's own table, or a small VM.
fn spec(vm: Option<&Path>) -> Result<VmSpec> {
    let text = match vm {
        Some(path) => {
            std::fs::read_to_string(path).map_err(|error| BadInput(format!("{}: {error}", path.display())))?
        }
        None => "vm = { memory_mib = 512 }".to_owned(),
    };
    let bad = |error: toml::de::Error| BadInput(error.message().to_owned());
    let mut table: toml::Table = toml::from_str(&text).map_err(bad)?;
    let vm = table
        .remove("vm")
        .ok_or_else(|| BadInput("the file has no [vm] table".into()))?;
    Ok(vm.try_into().map_err(bad)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_one_thing() {
        assert_eq!([1, 2].map(counted), ["1 thing is", "2 things are"]);
    }
}
