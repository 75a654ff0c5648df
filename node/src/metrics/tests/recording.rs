//! The recording of a real run (`cargo xtask record`, `monitoring/recording.om.gz`): Prometheus' own tools take it, it has what alarms
//! and dashboard ask for, and the alarms of a death ring on it.

use super::promtool;
use dunlin_vmtest::paths;
use dunlin_vmtest::recording::{self, EVERY, KILLED, Recording, STEP};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

/// What a run has nothing of in which no `notify_url` is told of events.
const NOT_IN_THIS_RUN: [&str; 2] = ["dunlin_notifications_lost_total", "dunlin_notifications_waiting"];

fn kept() -> (String, Recording) {
    let packed = std::fs::read(recording::kept()).expect("the recording");
    assert!(packed.len() < 400_000, "{} bytes", packed.len());
    let text = recording::unpack(&packed).expect("a gzip");
    let recording = Recording::parse(&text).expect("OpenMetrics");
    (text, recording)
}

/// When a step of the story began.
fn began(recording: &Recording, step: &str) -> u64 {
    let mut steps = recording.of(STEP);
    let (_, values) = steps
        .find(|(series, _)| series.label("step") == step)
        .expect(step);
    *values.values().next().expect("a time") as u64
}

#[test]
fn promtool_makes_blocks_of_the_recording() {
    let (text, _) = kept();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("recording.om");
    let make = |text: &str, into: &str| {
        std::fs::write(&file, text).expect("written");
        let into = folder.path().join(into);
        let (file, into) = (file.to_string_lossy(), into.to_string_lossy().into_owned());
        promtool(&["tsdb", "create-blocks-from", "openmetrics", &file, &into], "")
    };
    if let Some((good, words)) = make(&text, "data") {
        assert!(good, "{words}");
        let blocks = std::fs::read_dir(folder.path().join("data")).expect("blocks");
        assert!(blocks.count() > 0, "{words}");
        // It does look.
        let cut = text.strip_suffix("# EOF\n").expect("an end");
        assert!(make(cut, "cut").is_some_and(|(good, _)| !good));
    }
}

#[test]
fn every_metric_of_alarms_and_dashboard_was_recorded() {
    let (_, recording) = kept();
    let recorded: BTreeSet<String> = recording
        .series()
        .map(|(series, _)| series.name.clone())
        .collect();
    let wanted = recording::spoken_of().expect("alarms and dashboard");
    let missing: Vec<&String> = wanted.difference(&recorded).collect();
    assert_eq!(missing, NOT_IN_THIS_RUN);
}

#[test]
fn the_host_that_died_was_primary_and_the_other_one_served_alone_until_protected_again() {
    let (_, recording) = kept();
    let killed = began(&recording, KILLED);
    let back = began(&recording, recording::BACK);
    let at = |name: &str, host: &str, role: &str, look: u64| {
        let found = recording.of(name).find(|(series, _)| {
            series.label("instance") == host && (role.is_empty() || series.label("role") == role)
        });
        found.and_then(|(_, values)| values.get(&look).copied())
    };
    let looks: Vec<u64> = recording.looks().collect();
    let primary = |look: u64| ["a", "b"].map(|host| at("dunlin_role", host, "primary", look) == Some(1.0));
    let before = looks.iter().rfind(|&&look| look < killed).expect("a look before");
    let (died, survived) = match primary(*before) {
        [true, false] => ("a", "b"),
        [false, true] => ("b", "a"),
        other => panic!("primaries before the kill: {other:?}"),
    };
    // The first second is the take-over's.
    let dead: Vec<u64> = looks
        .iter()
        .copied()
        .filter(|&look| look > killed + EVERY && look < back)
        .collect();
    assert!(dead.len() as u64 * EVERY >= 120, "{} looks", dead.len());
    for look in dead {
        assert_eq!(at("up", died, "", look), Some(0.0), "{look}");
        assert_eq!(at("dunlin_role", died, "primary", look), None, "{look}");
        assert_eq!(at("dunlin_role", survived, "primary", look), Some(1.0), "{look}");
        assert_eq!(at("dunlin_protected", survived, "", look), Some(0.0), "{look}");
        assert_eq!(
            at("dunlin_wants_protection", survived, "", look),
            Some(1.0),
            "{look}"
        );
    }
    let last = looks.last().expect("a last look");
    assert_eq!(at("dunlin_protected", survived, "", *last), Some(1.0));
}

/// A question at a time, and what Prometheus must say: a line of `exp_samples` for each sample.
struct Asked {
    at_s: u64,
    expression: String,
    answers: Vec<(String, f64)>,
}

/// The recording as the input of `promtool test rules`: values, gaps, and Prometheus' mark of a series that has ended.
fn rules_test(recording: &Recording, asked: &[Asked]) -> String {
    let first = recording.looks().next().expect("a look");
    let looks: BTreeSet<u64> = recording.looks().collect();
    let last = *looks.last().expect("a look");
    let alarms = paths::workspace().join("monitoring/alerts.yml");
    let mut test = format!(
        "rule_files: ['{}']\nevaluation_interval: {EVERY}s\ntests:\n- interval: {EVERY}s\n  input_series:\n",
        alarms.display()
    );
    for (series, values) in recording.series() {
        let mut words = Vec::new();
        let mut there = false;
        for look in (first..=last).step_by(EVERY as usize) {
            let value = values.get(&look);
            words.push(match value {
                Some(value) => value.to_string(),
                None if there && looks.contains(&look) => "stale".to_owned(),
                None => "_".to_owned(),
            });
            there = value.is_some() || (there && !looks.contains(&look));
        }
        let _ = writeln!(test, "  - series: '{series}'\n    values: '{}'", words.join(" "));
    }
    test.push_str("  promql_expr_test:\n");
    for Asked {
        at_s,
        expression,
        answers,
    } in asked
    {
        let since = (at_s - first) / EVERY * EVERY;
        let quoted = expression.replace('\'', "''");
        let _ = writeln!(
            test,
            "  - expr: '{quoted}'\n    eval_time: {since}s\n    exp_samples:"
        );
        for (labels, value) in answers {
            let _ = writeln!(test, "    - labels: '{labels}'\n      value: {value}");
        }
    }
    test
}

/// What promtool says of it.
fn judged(recording: &Recording, asked: &[Asked]) -> Option<(bool, String)> {
    let folder = tempfile::tempdir().expect("a folder");
    let file: &Path = &folder.path().join("recording-test.yml");
    std::fs::write(file, rules_test(recording, asked)).expect("written");
    promtool(&["test", "rules", &file.to_string_lossy()], "")
}

/// The alarms that ring at a time: name, and how many series of it.
fn ringing(at_s: u64, alarms: &[(&str, u32)]) -> Asked {
    Asked {
        at_s,
        expression: "count by (alertname) (ALERTS{alertstate=\"firing\"})".to_owned(),
        answers: alarms
            .iter()
            .map(|(name, count)| (format!("{{alertname=\"{name}\"}}"), f64::from(*count)))
            .collect(),
    }
}

#[test]
fn the_alarms_of_a_death_ring_on_it_and_no_others() {
    let (_, recording) = kept();
    let killed = began(&recording, KILLED);
    let back = began(&recording, recording::BACK);
    let took_over = ("DunlinTookOver", 3);
    let asked = [
        // A switchover is an election too.
        ringing(killed - EVERY, &[took_over]),
        ringing(killed + 80, &[("DunlinHostDown", 1), took_over]),
        ringing(
            back - EVERY,
            &[
                ("DunlinHostDown", 1),
                ("DunlinNotProtected", 1),
                // Of the two hosts that are left.
                ("DunlinPeerNotConnected", 2),
                took_over,
            ],
        ),
        ringing(recording.looks().next_back().expect("a look"), &[took_over]),
    ];
    if let Some((good, words)) = judged(&recording, &asked) {
        assert!(good, "{words}");
        // It does look.
        let wrong = [ringing(back - EVERY, &[took_over])];
        assert!(judged(&recording, &wrong).is_some_and(|(good, _)| !good));
    }
}

#[test]
fn every_panel_of_the_dashboard_shows_something_of_it() {
    let (_, recording) = kept();
    // Under load, after a take-over, with both disks in use.
    let at_s = began(&recording, KILLED) - EVERY;
    let board: serde_json::Value =
        serde_json::from_str(include_str!("../../../../monitoring/dashboard.json")).expect("JSON");
    let mut asked = Vec::new();
    for panel in board["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let expression = target["expr"].as_str().expect("an expression");
            let expression = expression.replace("$vm", ".*");
            asked.push(Asked {
                at_s,
                expression: format!("count({expression}) > bool 0"),
                answers: vec![("{}".to_owned(), 1.0)],
            });
        }
    }
    assert!(asked.len() > 8);
    if let Some((good, words)) = judged(&recording, &asked) {
        assert!(good, "{words}");
    }
}
