use super::super::{case, plot, table};
use super::*;

fn sample(per_second: f64, p50_ms: f64) -> Sample {
    Sample {
        round: 1,
        load: Measured {
            requests: 100,
            per_second,
            p50_ms,
            p99_ms: p50_ms * 3.0,
        },
        took_s: 2.0,
        syncs: Syncs {
            count: 80,
            mean: [("pause_us".to_owned(), 3000.0), ("stop_us".to_owned(), 500.0)].into(),
            median: [("pause_us".to_owned(), 2900)].into(),
            reasons: [("idle".to_owned(), 80)].into(),
            ..Syncs::default()
        },
        cpu_percent: [60.0, 55.0, 3.0],
        status: BTreeMap::new(),
    }
}

/// All cases, each policy with its share of 1,000 requests a second.
fn report(shares: &[(&str, f64)]) -> BenchReport {
    let mut rows = Vec::new();
    for case in case::all() {
        for (policy, share) in shares {
            let mut row = Row::new(&case, policy);
            row.samples = vec![sample(1000.0 * share, 1.0 / share)];
            rows.push(row);
        }
    }
    let mut report = BenchReport {
        note: "fair & square".to_owned(),
        cores: 2,
        kernel: "6.18".to_owned(),
        host_cpu_percent: 60,
        rounds: 1,
        seconds: 2.0,
        policies: shares.iter().map(|(policy, _)| (*policy).to_owned()).collect(),
        rows,
        geometric_means: Vec::new(),
        targets: Vec::new(),
    };
    report.conclude();
    report
}

fn verdicts(report: &BenchReport) -> Vec<&str> {
    report
        .targets
        .iter()
        .map(|target| target.verdict.as_str())
        .collect()
}

#[test]
fn targets_are_met_missed_or_not_measured() {
    let good = report(&[("none", 1.0), ("plover", 0.5), ("dunlin", 0.95)]);
    assert_eq!(verdicts(&good), ["met", "met", "met", "met"]);
    let slow = report(&[("none", 1.0), ("plover", 0.99), ("dunlin", 0.6)]);
    assert_eq!(verdicts(&slow), ["missed", "missed", "missed", "met"]);
    let without = report(&[("none", 1.0), ("remus", 0.5)]);
    assert_eq!(verdicts(&without), ["not measured"; 4]);
    let mean = &good.geometric_means[2];
    assert_eq!(mean.services, 8);
    assert!((mean.loaded.unwrap() - 0.95).abs() < 1e-9);
}

#[test]
fn one_slow_hard_case_is_enough_to_miss() {
    let mut report = report(&[("none", 1.0), ("remus", 0.5), ("dunlin", 0.95)]);
    let row = report
        .rows
        .iter_mut()
        .find(|row| row.policy == "dunlin" && row.case == "counter")
        .unwrap();
    row.samples = vec![sample(100.0, 10.0)];
    report.conclude();
    assert_eq!(verdicts(&report)[..2], ["met", "missed"]);
    assert_eq!(report.targets[1].worst, "redis counter c=16, beside remus");
}

#[test]
fn a_failed_round_leaves_no_figure_of_its_case() {
    let mut report = report(&[("none", 1.0), ("dunlin", 0.95)]);
    let row = report.rows.iter_mut().find(|row| row.policy == "dunlin").unwrap();
    row.failures.push("round 2: wrk: Non-2xx responses: 3".to_owned());
    report.conclude();
    let row = report.rows.iter().find(|row| row.policy == "dunlin").unwrap();
    assert!(row.median.is_none() && row.of_baseline.is_none());
    assert_eq!(report.failures().len(), 1);
    assert!(table(&report).contains("FAILED"), "{}", table(&report));
}

#[test]
fn services_of_another_run_are_added_and_measured_ones_stay() {
    let mut new = report(&[("none", 1.0), ("dunlin", 0.9)]);
    new.rows.retain(|row| row.service == "nginx");
    let old = report(&[("none", 1.0), ("dunlin", 0.5)]);
    new.add_from(old);
    assert_eq!(new.rows.len(), case::all().len() * 2);
    let shares: Vec<f64> = new
        .rows
        .iter()
        .filter(|row| row.policy == "dunlin" && (row.service == "nginx" || row.service == "php"))
        .filter_map(|row| row.of_baseline.map(|share| share.median))
        .collect();
    assert_eq!(shares, [0.9, 0.9, 0.5, 0.5]);
}

#[test]
fn a_report_is_shown_whole() {
    let report = report(&[("none", 1.0), ("plover", 0.25)]);
    let text = table(&report);
    for part in [
        "0.25 [0.25, 0.25]",
        "plover",
        "tomcat",
        "geometric mean",
        "not measured",
        "fair & square",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let plots = plot::draw(&report).unwrap();
    assert!(plots.iter().any(|(name, _)| name == "throughput-services.svg"));
    for (name, svg) in plots {
        assert!(svg.starts_with("<svg") && svg.contains("plover"), "{name}");
        assert!(!svg.contains("NaN"), "{name}");
    }
}

#[test]
fn medians_of_few_values() {
    assert!((median_of(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
    assert!((median_of(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    assert!(median_of(Vec::new()).abs() < 1e-9);
}

#[test]
fn a_share_is_the_median_of_the_rounds_own_shares() {
    // The machine is half as fast in the second round, for both.
    let mut report = report(&[("none", 1.0), ("dunlin", 0.8)]);
    for row in &mut report.rows {
        let first = row.samples[0].clone();
        let speeds = [1.0, 0.5, 1.0];
        let rounds = speeds.iter().zip(1..).map(|(speed, round)| {
            let mut sample = first.clone();
            sample.round = round;
            sample.load.per_second *= speed;
            sample
        });
        row.samples = rounds.collect();
    }
    // A round in which the baseline has no figure has no share.
    report
        .rows
        .iter_mut()
        .find(|row| row.policy == "none")
        .unwrap()
        .samples
        .pop();
    report.conclude();
    let row = report.rows.iter().find(|row| row.policy == "dunlin").unwrap();
    let share = row.of_baseline.unwrap();
    assert!(
        (share.median - 0.8).abs() < 1e-9 && (share.high - share.low).abs() < 1e-9,
        "{share:?}"
    );
    assert_eq!(share.pairs, 2);
}
