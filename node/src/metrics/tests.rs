use super::*;
use crate::skipped;
use dunlin_api::*;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

mod recording;

/// A host whose every figure has a value.
fn status() -> HostStatus {
    let vm = VmStatus {
        name: "shop".into(),
        role: "primary".into(),
        state: State::Stalled,
        why: "the backup's word".into(),
        queues: vec![QueueFigures {
            name: "inbound".into(),
            bytes: 5,
            limit_bytes: 9,
            dropped: 2,
        }],
        disks: vec![DiskFigures {
            light_ns: 1_500_000_000,
            ..DiskFigures::default()
        }],
        peers: vec![PeerStatus {
            host: "b".into(),
            connected: true,
            ..PeerStatus::default()
        }],
        failover: Some(FailoverStatus {
            detected_us: 2_500,
            ..FailoverStatus::default()
        }),
        verify: VerifyStatus {
            last: Some(Verified {
                ended_ms: 1_769_903_999_500,
                extents: 4096,
                differing: 3,
                ..Verified::default()
            }),
            ..VerifyStatus::default()
        },
        full: 4,
        answers: Some(AnswerFigures {
            samples: 250,
            p50_us: 1_250,
            p99_us: 40_000,
        }),
        unsaid: 1,
        program: Some(ProgramStatus {
            matched: 40,
            differing: 2,
            together: 4,
            not_read: 1,
            ..ProgramStatus::default()
        }),
        bad_input: BadInput {
            too_short: 3,
            links_broken: 1,
            ..BadInput::default()
        },
        ..VmStatus::default()
    };
    HostStatus {
        host: "a".into(),
        vms: vec![vm],
        refused: [("other-cluster".to_owned(), 7)].into(),
        certificates: vec![dunlin_api::Certificate {
            what: "host".into(),
            expires_s: 1_900_000_000,
        }],
        notify: Some(NotifyStatus {
            sent: 11,
            ..NotifyStatus::default()
        }),
        ..HostStatus::default()
    }
}

#[test]
fn each_figure_has_its_labels_its_unit_and_its_value() {
    let page = page(&status()).expect("a page");
    for line in [
        "dunlin_bad_input_total{vm=\"shop\",what=\"message-too-short\"} 3",
        "dunlin_bad_input_total{vm=\"shop\",what=\"message-too-long\"} 0",
        "dunlin_bad_input_total{vm=\"shop\",what=\"link-broken\"} 1",
        "dunlin_queue_bytes{queue=\"inbound\",vm=\"shop\"} 5",
        "dunlin_queue_limit_bytes{queue=\"inbound\",vm=\"shop\"} 9",
        "dunlin_queue_dropped_total{queue=\"inbound\",vm=\"shop\"} 2",
        "dunlin_queue_waits_total{vm=\"shop\"} 4",
        "dunlin_disks_compared_timestamp_seconds{vm=\"shop\"} 1769903999.5",
        "dunlin_disks_compared_extents{vm=\"shop\"} 4096",
        "dunlin_disks_differing_extents{vm=\"shop\"} 3",
        "dunlin_log_refused_total{vm=\"shop\"} 1",
        "dunlin_answer_median_seconds{vm=\"shop\"} 0.00125",
        "dunlin_answer_p99_seconds{vm=\"shop\"} 0.04",
        "dunlin_outputs_matched_total{vm=\"shop\"} 40",
        "dunlin_output_differences_total{vm=\"shop\"} 2",
        "dunlin_program_inputs_together_total{vm=\"shop\"} 4",
        "dunlin_program_inputs_not_read_total{vm=\"shop\"} 1",
        "dunlin_refused_connections_total{what=\"other-cluster\"} 7",
        "dunlin_disk_light_seconds_total{disk=\"0\",vm=\"shop\"} 1.5",
        "dunlin_peer_connected{peer=\"b\",vm=\"shop\"} 1",
        "dunlin_failover_seconds{step=\"detected\",vm=\"shop\"} 0.0025",
        "dunlin_role{role=\"primary\",vm=\"shop\"} 1",
        "dunlin_state{state=\"stalled\",vm=\"shop\"} 1",
        "dunlin_syncs_by_reason_total{reason=\"idle\",vm=\"shop\"} 0",
        "dunlin_notifications_sent_total 11",
        "dunlin_certificate_expiry_timestamp_seconds{what=\"host\"} 1900000000",
        "# TYPE dunlin_queue_waits_total counter",
        "# TYPE dunlin_queue_bytes gauge",
    ] {
        assert!(page.lines().any(|found| found == line), "no {line} in {page}");
    }
}

/// Name and type of each metric of a page.
fn types(page: &str) -> BTreeMap<&str, &str> {
    page.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect()
}

#[test]
fn every_metric_is_documented_with_its_type_and_no_other_is() {
    let page = page(&status()).expect("a page");
    let documented: BTreeMap<&str, &str> = include_str!("../../../docs/monitoring.md")
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("| `dunlin_")?.split_once('`')?;
            let kind = rest.split('|').nth(1)?.trim();
            let start = line.find("dunlin_")?;
            Some((&line[start..start + "dunlin_".len() + name.len()], kind))
        })
        .collect();
    assert_eq!(documented, types(&page));
}

#[test]
fn alarms_and_dashboard_speak_of_metrics_that_there_are() {
    let page = page(&status()).expect("a page");
    let known: BTreeSet<&str> = types(&page).into_keys().collect();
    for (file, text) in [
        ("alerts.yml", include_str!("../../../monitoring/alerts.yml")),
        (
            "dashboard.json",
            include_str!("../../../monitoring/dashboard.json"),
        ),
    ] {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let named: BTreeSet<&str> = words.filter(|word| word.starts_with("dunlin_")).collect();
        assert!(named.len() > 8, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} asks for {unknown:?}");
    }
}

#[test]
fn every_alarm_is_documented_and_tried_and_no_other_is() {
    let after = |text: &'static str, mark: &str| -> BTreeSet<&'static str> {
        text.split(mark)
            .skip(1)
            .filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next())
            .collect()
    };
    let alarms = after(include_str!("../../../monitoring/alerts.yml"), "- alert: ");
    assert!(alarms.len() > 8, "{alarms:?}");
    assert_eq!(
        alarms,
        after(include_str!("../../../docs/monitoring.md"), "| **"),
        "documented"
    );
    assert_eq!(
        alarms,
        after(include_str!("../../../monitoring/alerts-test.yml"), "alertname: "),
        "tried"
    );
}

#[test]
fn the_dashboard_is_one_that_grafana_reads() {
    let board: serde_json::Value =
        serde_json::from_str(include_str!("../../../monitoring/dashboard.json")).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    assert!(panels.len() > 6 && board["title"].is_string() && board["schemaVersion"].is_u64());
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "ids differ");
    for panel in panels {
        let (x, w) = (&panel["gridPos"]["x"], &panel["gridPos"]["w"]);
        assert!(
            x.as_u64().zip(w.as_u64()).is_some_and(|(x, w)| x + w <= 24),
            "{panel}"
        );
        let asked = panel["targets"].as_array().expect("targets");
        assert!(
            !asked.is_empty() && asked.iter().all(|target| target["expr"].is_string()),
            "{panel}"
        );
    }
}

/// Prometheus' own tool: of the path, or where `cargo xtask setup` unpacks it.
fn promtool(arguments: &[&str], input: &str) -> Option<(bool, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace");
    let of_run = std::env::current_exe().ok().and_then(|program| {
        let target = program
            .ancestors()
            .find(|folder| folder.join("CACHEDIR.TAG").exists());
        target.map(Path::to_path_buf)
    });
    let unpacked = of_run
        .unwrap_or(root.join("target"))
        .join("tools/usr/bin/promtool");
    let program = Some(unpacked).filter(|path| path.exists());
    let program = program.unwrap_or("promtool".into());
    let child = Command::new(program)
        .args(arguments)
        .current_dir(root.join("monitoring"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        skipped::skip("promtool is not here: 'cargo xtask setup' fetches it");
        return None;
    };
    child
        .stdin
        .take()
        .expect("a pipe")
        .write_all(input.as_bytes())
        .expect("written");
    let output = child.wait_with_output().expect("it ends");
    let words = [output.stdout, output.stderr].concat();
    Some((
        output.status.success(),
        String::from_utf8_lossy(&words).into_owned(),
    ))
}

#[test]
fn promtool_finds_nothing_to_mend_in_the_page() {
    let page = page(&status()).expect("a page");
    if let Some((good, words)) = promtool(&["check", "metrics"], &page) {
        assert!(good && words.trim().is_empty(), "{words}");
        // It does look.
        let wrong = page.replace("_seconds", "_milliseconds");
        assert!(promtool(&["check", "metrics"], &wrong).is_some_and(|(good, _)| !good));
    }
}

#[test]
fn promtool_sees_every_alarm_ring_when_it_should() {
    for (arguments, words) in [
        (["check", "rules", "alerts.yml"], "SUCCESS"),
        (["test", "rules", "alerts-test.yml"], "SUCCESS"),
    ] {
        if let Some((good, said)) = promtool(&arguments, "") {
            assert!(good && said.contains(words), "{said}");
        }
    }
}
