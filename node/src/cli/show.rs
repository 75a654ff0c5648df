//! `status` and `events`: for people and for programs.

use super::talk::UNPROTECTED;
use super::{talk, watch};
use crate::events::{now_ms, utc};
use anyhow::Result;
use dunlin_api::{CheckpointStatus, HostStatus, Mode, Request, VmStatus};
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

/// Shows how this host's VMs are; the exit code says whether all are protected that ask for it.
pub fn status(socket: &Path, watch: bool, json: bool) -> Result<ExitCode> {
    let mut last = talk::status(socket)?;
    if watch && !json && std::io::stdout().is_terminal() {
        return Ok(code_of(&watch::run(socket)?));
    }
    show(&last, json)?;
    if watch {
        talk::watch(socket, || {
            last = talk::status(socket)?;
            show(&last, json)?;
            Ok(false)
        })?;
    }
    Ok(code_of(&last))
}

fn code_of(status: &HostStatus) -> ExitCode {
    let unprotected = status.vms.iter().any(|vm| vm.wants_protection && !vm.protected);
    if unprotected {
        ExitCode::from(UNPROTECTED)
    } else {
        ExitCode::SUCCESS
    }
}

fn show(status: &HostStatus, json: bool) -> Result<()> {
    let text = if json {
        serde_json::to_string(status)? + "\n"
    } else {
        table(status)
    };
    let mut out = std::io::stdout().lock();
    write!(out, "{text}")?;
    Ok(out.flush()?)
}

fn table(status: &HostStatus) -> String {
    let mut text = format!("host {}, links protected by {}\n", status.host, status.links);
    if status.vms.is_empty() {
        text.push_str("no VMs; start one with 'dunlin up VM.TOML'\n");
    }
    for vm in &status.vms {
        describe(&mut text, vm);
        other_builds(&mut text, status, vm);
    }
    text
}

/// Hosts of the group that run another build, or speak an older protocol: an upgrade is under way.
fn other_builds(text: &mut String, status: &HostStatus, vm: &VmStatus) {
    for peer in &vm.peers {
        let Some(protocol) = peer.protocol else { continue };
        let build = peer.version.as_deref();
        if protocol == status.protocol && build.is_none_or(|build| build == status.version) {
            continue;
        }
        let build = build.map_or_else(|| "an older dunlin".to_owned(), |build| format!("dunlin {build}"));
        let _ = writeln!(
            text,
            "  host {} runs {build}: protocol {protocol} is spoken with it; this host is dunlin {}, with protocol {}",
            peer.host, status.version, status.protocol
        );
    }
}

fn describe(text: &mut String, vm: &VmStatus) {
    let protection = match (vm.wants_protection, vm.protected) {
        (true, true) => "PROTECTED",
        (true, false) => "NOT PROTECTED",
        (false, _) => "no protection asked for",
    };
    let leader = vm.leader.as_deref().unwrap_or("nobody");
    // Writing to a String does not fail: here and below.
    let _ = writeln!(
        text,
        "\n{}: {} ({}), {protection}",
        vm.name,
        vm.role,
        vm.state_in_words()
    );
    let _ = writeln!(
        text,
        "  policy {}, served by {leader}, term {}, epoch {}",
        vm.policy, vm.term, vm.epoch
    );
    let lag = vm.committed.saturating_sub(vm.applied);
    let _ = writeln!(
        text,
        "  frames: {} in, {} out, {} held{}; log: {} agreed, {lag} to apply",
        vm.frames_in,
        vm.frames_out,
        vm.held_frames,
        vm.nic_backend
            .as_ref()
            .map_or(String::new(), |backend| format!(", {backend} cards")),
        vm.committed
    );
    if let Some(answers) = &vm.answers {
        let ms = |us: u64| us as f64 / 1e3;
        let _ = writeln!(
            text,
            "  clients waited {:.1} ms (median) and {:.1} ms (99th percentile) for it in the last second, by {} samples",
            ms(answers.p50_us),
            ms(answers.p99_us),
            answers.samples
        );
    }
    if let Some(speculation) = &vm.speculation {
        let _ = writeln!(
            text,
            "  speculation: {} connections, {} begun, {} held as before, {} given up",
            speculation.connections, speculation.begun, speculation.held, speculation.failed
        );
    }
    if vm.leader.is_none() {
        let _ = writeln!(
            text,
            "  nobody leads its group: 'dunlin events' says why, and what can be done"
        );
    }
    for peer in &vm.peers {
        let _ = writeln!(
            text,
            "  host {}: {}",
            peer.host,
            if peer.connected {
                "connected"
            } else {
                "NOT CONNECTED"
            }
        );
    }
    if let Some(standby) = &vm.standby {
        let _ = writeln!(text, "  host {standby}: standby");
    }
    if let Some(checkpoint) = &vm.checkpoint {
        let _ = writeln!(text, "  {}", checkpoint_line(checkpoint));
    }
    for (number, disk) in vm.disks.iter().enumerate() {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let _ = writeln!(
            text,
            "  disk {number}: {}{}, a peer may lack {:.0} MiB, backup's memory {:.1} MiB (peak {:.1}), settled {:.1} when idle + {:.1} by syncs",
            disk.role,
            if disk.consistent {
                ""
            } else {
                " (a copy is under way)"
            },
            mib(disk.dirty_bytes),
            mib(disk.held_bytes),
            mib(disk.peak_bytes),
            mib(disk.settled_bytes),
            mib(disk.committed_bytes),
        );
    }
    compared_disks(text, vm);
    if let Some(problem) = &vm.join_problem {
        let _ = writeln!(text, "  no backup joins: {}", problem.why);
    }
    if let Some(progress) = &vm.progress {
        let percent = 100 * progress.done / progress.total.max(1);
        let _ = writeln!(text, "  {}: {percent} %", progress.what);
    }
    let sync = &vm.sync;
    if sync.count > 0 {
        let median = &sync.median;
        let _ = writeln!(
            text,
            "  syncs: {} ({} when idle, {} on a difference, {} at the limit), {} given up; medians: pause {:.1} ms, whole {:.1} ms, \
             dirty {} + {} pages, divergent {}, {} KiB sent",
            sync.count,
            sync.reasons.idle,
            sync.reasons.differs,
            sync.reasons.limit,
            sync.aborted,
            median.pause_us as f64 / 1e3,
            median.total_us as f64 / 1e3,
            median.dirty_primary,
            median.dirty_backup,
            median.divergent,
            (median.bytes + median.device_bytes) / 1024,
        );
    }
    let compared = &sync.compared;
    if compared.released > 0 && sync.mode != Mode::None {
        let _ = writeln!(
            text,
            "  outputs: kept alike by {}; {} left, {} because both VMs said them, {} by a sync; held {:.1} ms on average; \
             {} differences, {} change-overs",
            sync.mode,
            compared.released,
            compared.matched + compared.free,
            compared.by_sync,
            compared.held_us as f64 / compared.released as f64 / 1e3,
            compared.differences,
            sync.change_overs,
        );
    }
    if let Some(program) = &vm.program {
        let _ = writeln!(
            text,
            "  outputs: {} compared, {} equal, {} differing; inputs: {}, of which {} went beside others and {} were not read in time, {} frames lost",
            program.matched + program.differing,
            program.matched,
            program.differing,
            program.inputs,
            program.together,
            program.not_read,
            program.lost,
        );
    }
    if let Some(failover) = &vm.failover {
        let _ = writeln!(
            text,
            "  last take-over here: detected {:.1} ms, elected {:.1} ms, applied {:.1} ms, announced {:.1} ms",
            failover.detected_us as f64 / 1e3,
            failover.elected_us as f64 / 1e3,
            failover.applied_us as f64 / 1e3,
            failover.announced_us as f64 / 1e3,
        );
    }
}

/// When both hosts' disks were compared, and what was found.
fn checkpoint_line(checkpoint: &CheckpointStatus) -> String {
    let host = &checkpoint.host;
    let Some(at_ms) = checkpoint.at_ms else {
        return format!("checkpoint at host {host}: none yet");
    };
    format!(
        "checkpoint at host {host}: {} MiB, as of {}; round {} sent {} MiB in {:.1} s",
        checkpoint.memory_bytes >> 20,
        utc(at_ms),
        checkpoint.rounds,
        checkpoint.sent_bytes >> 20,
        checkpoint.took_ms as f64 / 1e3
    )
}

fn compared_disks(text: &mut String, vm: &VmStatus) {
    let verify = &vm.verify;
    if let Some(last) = &verify.last {
        let what = match (last.differing, last.repaired) {
            (0, _) => "equal",
            (_, false) => "DIFFERENT",
            (_, true) => "DIFFERENT, and sent again",
        };
        let _ = writeln!(
            text,
            "  disks compared {}: {what}; {} pieces of 1 MiB, {} differed",
            utc(last.ended_ms),
            last.extents,
            last.differing
        );
    }
    if let Some(under_way) = &verify.under_way {
        let percent = 100 * under_way.done / under_way.total.max(1);
        let _ = writeln!(text, "  {}: {percent} %", under_way.what);
    } else if let Some(due_ms) = verify.due_ms {
        let _ = writeln!(text, "  disks compared next: {}", utc(due_ms));
    }
    if let Some(problem) = &verify.problem {
        let _ = writeln!(text, "  disks not compared: {problem}");
    }
}

/// Something else than a moment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no moment: write 10m, 2h, 1day, or a time in UTC such as '2026-01-31 23:59:59'")]
pub struct NoMoment(String);

/// A moment on the command line, in milliseconds since 1970: so long ago, or a time in UTC.
pub fn moment(text: &str) -> Result<u64, NoMoment> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(now_ms().saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX)));
    }
    // As events are printed, and as RFC 3339 has them.
    let time = humantime::parse_rfc3339_weak(text.trim_end_matches(" UTC"));
    let since = time.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .ok_or_else(|| NoMoment(text.to_owned()))
}

/// Shows what happened on this host, since then if a moment is given.
pub fn events(socket: &Path, follow: bool, since_ms: Option<u64>, json: bool) -> Result<ExitCode> {
    let mut out = std::io::stdout();
    let asked = Request::Events {
        follow,
        from_now: false,
        since_ms,
    };
    talk::follow(socket, &asked, |event| {
        let Some(event) = event else { return Ok(!follow) };
        if json {
            writeln!(out, "{}", serde_json::to_string(event)?)?;
        } else {
            // Events of days ago are kept too.
            let at = utc(event.time_ms).replace(" UTC", "");
            let ms = event.time_ms % 1000;
            writeln!(out, "{at}.{ms:03} {} {}: {}", event.vm, event.kind, event.text)?;
        }
        out.flush()?;
        Ok(false)
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_frames_go_to_the_cards_is_told_while_the_vm_runs() {
        let mut vm = VmStatus::default();
        let told = |vm: &VmStatus| {
            let mut text = String::new();
            describe(&mut text, vm);
            text
        };
        assert!(
            told(&vm).contains("frames: 0 in, 0 out, 0 held; log:"),
            "{}",
            told(&vm)
        );
        vm.nic_backend = Some("vhost-user".into());
        assert!(
            told(&vm).contains("0 held, vhost-user cards; log:"),
            "{}",
            told(&vm)
        );
    }

    #[test]
    fn hosts_of_other_builds_are_named_while_an_upgrade_is_under_way() {
        use dunlin_api::PeerStatus;
        let peer = |host: &str, protocol, version: Option<&str>| PeerStatus {
            host: host.into(),
            connected: true,
            protocol,
            version: version.map(str::to_owned),
            ..PeerStatus::default()
        };
        let vm = VmStatus {
            peers: vec![
                peer("b", Some(3), Some("1.1")),
                peer("c", Some(2), None),
                peer("d", Some(3), Some("1.2")),
                peer("e", None, None),
            ],
            ..VmStatus::default()
        };
        let status = HostStatus {
            version: "1.1".into(),
            protocol: 3,
            ..HostStatus::default()
        };
        let mut text = String::new();
        other_builds(&mut text, &status, &vm);
        assert_eq!(
            text,
            "  host c runs an older dunlin: protocol 2 is spoken with it; this host is dunlin 1.1, with protocol 3\n  \
             host d runs dunlin 1.2: protocol 3 is spoken with it; this host is dunlin 1.1, with protocol 3\n"
        );
    }

    #[test]
    fn a_moment_is_so_long_ago_or_a_time_as_events_show_it() {
        assert_eq!(moment("2026-01-31 23:59:59"), Ok(1_769_903_999_000));
        assert_eq!(moment("2026-01-31T23:59:59.250Z"), Ok(1_769_903_999_250));
        assert_eq!(moment(&utc(1_709_251_199_000)), Ok(1_709_251_199_000));
        let before = now_ms();
        let hour_ago = moment("1h").expect("a moment");
        assert!((before - 3_600_000..=now_ms() - 3_600_000).contains(&hour_ago));
        for wrong in [
            "",
            "yesterday",
            "10",
            "-1h",
            "2026-13-01 00:00:00",
            "999999999999999999999d",
        ] {
            let why = moment(wrong).expect_err(wrong).to_string();
            assert!(why.contains("write 10m") && !why.contains('\n'), "{why}");
        }
    }
}
