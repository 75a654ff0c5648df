//! `check`: what this host lacks, or with a VM's file what all of its hosts lack, before anything is started.

use crate::certificates;
use crate::config::{HostConfig, VmConfig};
use crate::control::http::Conversation;
use crate::daemon::BadInput;
use crate::heartbeats;
use anyhow::{Result, bail};
use dunlin_api::Found;
use dunlin_api::{Answer, Request};
use dunlin_guest::VmSpec;
use dunlin_guest::probe;
use std::path::Path;
use std::process::ExitCode;

/// Where the package's service looks for its configuration.
pub const USUAL_CONFIG: &str = "/etc/dunlin/host.toml";

/// The guest RAM that a host is asked for where no VM is named.
const SMALL_MIB: u64 = 512;

/// Looks at this host, without a daemon: prints every finding; fails if something is missing.
pub fn run(vm: Option<&Path>, config: &Path, json: bool) -> Result<ExitCode> {
    let mut findings = probe::host(&spec(vm)?, 0);
    findings.push(heartbeats::finding());
    let mut found: Vec<Found> = findings
        .into_iter()
        .map(|finding| Found {
            host: String::new(),
            ok: finding.ok,
            what: finding.what,
            mend: finding.mend,
        })
        .collect();
    // Before there is a cluster there is no file.
    if config.exists() {
        found.extend(match HostConfig::load(config) {
            Ok(host) => certificates::found("", &certificates::of(&host.trust)),
            Err(error) => vec![Found {
                host: String::new(),
                ok: false,
                what: format!("configuration: {error}"),
                mend: "correct it".into(),
            }],
        });
    } else if config != Path::new(USUAL_CONFIG) {
        return Err(BadInput(format!("{}: there is no such file", config.display())).into());
    }
    show(&found, json, "on this host")
}

/// Asks this host's daemon, which asks the VM's others.
pub fn all(socket: &Path, file: &Path, json: bool) -> Result<ExitCode> {
    let text =
        std::fs::read_to_string(file).map_err(|error| BadInput(format!("{}: {error}", file.display())))?;
    let origin = file.display().to_string();
    let mut all = Vec::new();
    let last = Conversation::connect(socket)?.talk(&Request::Check { text, origin }, |answer| {
        if let Answer::Found(found) = answer {
            if !json {
                print(found);
            }
            all.push(found.clone());
        }
    })?;
    match last {
        Answer::Failed { why, code: 2 } => return Err(BadInput(why).into()),
        Answer::Failed { why, .. } => bail!("{why}"),
        _ => {}
    }
    if json {
        return show(&all, true, "");
    }
    Ok(verdict(&all, "for this VM"))
}

fn show(found: &[Found], json: bool, whereto: &str) -> Result<ExitCode> {
    if json {
        let list: Vec<_> = found
            .iter()
            .map(|found| match found.host.is_empty() {
                true => serde_json::json!({"what": found.what, "ok": found.ok, "mend": found.mend}),
                false => serde_json::json!({"host": found.host, "what": found.what, "ok": found.ok, "mend": found.mend}),
            })
            .collect();
        println!("{}", serde_json::to_string(&list)?);
    } else {
        found.iter().for_each(print);
    }
    Ok(verdict(found, whereto))
}

/// Says how many things are missing, if any.
fn verdict(found: &[Found], whereto: &str) -> ExitCode {
    let missing = found.iter().filter(|found| !found.ok).count();
    if missing == 0 {
        return ExitCode::SUCCESS;
    }
    eprintln!("dunlin: {} missing {whereto}", counted(missing));
    ExitCode::FAILURE
}

fn counted(missing: usize) -> String {
    match missing {
        1 => "1 thing is".to_owned(),
        more => format!("{more} things are"),
    }
}

fn print(found: &Found) {
    let mark = match (found.ok, found.mend.is_empty()) {
        (true, true) => "ok     ",
        (true, false) => "NOTE   ",
        (false, _) => "MISSING",
    };
    let host = match found.host.as_str() {
        "" => String::new(),
        host => format!("host {host}: "),
    };
    let mend = match found.mend.as_str() {
        "" => String::new(),
        mend => format!(": {mend}"),
    };
    println!("{mark} {host}{}{mend}", found.what);
}

/// The VM of that file, or a small VM. All of the file is checked but whether its hosts are in the cluster: there may be none yet.
fn spec(vm: Option<&Path>) -> Result<VmSpec> {
    let Some(path) = vm else {
        return Ok(VmSpec::new("", SMALL_MIB));
    };
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| BadInput(format!("{origin}: {error}")))?;
    let config = VmConfig::parse_alone(&text, &origin).and_then(|config| config.with_whole_paths(&origin));
    let config = config.map_err(|error| BadInput(error.to_string()))?;
    if config.program.is_some() {
        return Err(BadInput(format!(
            "{origin}: --vm is for VMs, and this is a bare program: 'dunlin check {origin}' asks the daemons of its hosts"
        ))
        .into());
    }
    Ok(config.spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_one_thing() {
        assert_eq!([1, 2].map(counted), ["1 thing is", "2 things are"]);
    }

    #[test]
    fn a_mistake_in_a_vms_file_is_told_with_its_file_and_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("shop.toml");
        std::fs::write(&file, "name = \"shop\"\n[vm]\nmemory_mib = \"much\"\n").expect("written");
        let why = spec(Some(&file)).map(drop).expect_err("no number").to_string();
        assert!(why.starts_with(&format!("{}: line 3: ", file.display())), "{why}");
        let good = "name = \"shop\"\nmembers = [\"a\", \"b\"]\nwitness = \"c\"\n[vm]\nmemory_mib = 64\n\
                    kernel = \"/boot/vmlinuz\"\n";
        std::fs::write(&file, good).expect("written");
        assert!(
            spec(Some(&file)).is_ok(),
            "no cluster is known, and none is needed"
        );
        for (right, wrong, says) in [
            ("witness", "witnes", "unknown field `witnes`"),
            ("witness = \"c\"", "", "needs two hosts in members, and a witness"),
            ("64", "0", "memory_mib"),
            (
                "/boot/vmlinuz",
                "vmlinuz",
                "vm.kernel: \"vmlinuz\" is no whole path",
            ),
        ] {
            std::fs::write(&file, good.replace(right, wrong)).expect("written");
            let why = spec(Some(&file)).map(drop).expect_err(says).to_string();
            assert!(
                why.contains(says) && why.starts_with(&*file.to_string_lossy()),
                "{why}"
            );
        }
        let program = "name = \"p\"\nmembers = [\"a\", \"b\"]\nwitness = \"c\"\n[program]\ncommand = [\"/bin/cat\"]\n\
                       [[program.nics]]\nmac = \"52:54:00:12:34:57\"\naddress = \"10.0.0.57/24\"\n";
        std::fs::write(&file, program).expect("written");
        let why = spec(Some(&file)).map(drop).expect_err("no VM").to_string();
        assert!(why.contains("this is a bare program"), "{why}");
        assert!(spec(None).is_ok());
    }

    #[test]
    fn the_example_of_the_documentation_is_a_good_file() {
        let page = include_str!("../../../docs/configuration.md");
        let example = page
            .split("```toml\n")
            .nth(1)
            .and_then(|rest| rest.split("```").next());
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("shop.toml");
        std::fs::write(&file, example.expect("an example")).expect("written");
        let spec = spec(Some(&file)).expect("a good file");
        assert_eq!((spec.disks.len(), spec.nics.len()), (1, 1));
    }
}
