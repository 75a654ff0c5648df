use super::super::{beside::beside, case, plot, table};
use super::*;

fn sample(per_second: f64, p50_ms: f64) -> Sample {
    Sample {
        round: 1,
        beside: String::new(),
        load: Measured {
            requests: 100,
            in_all: 100,
            per_second,
            p50_ms,
            p99_ms: p50_ms * 3.0,
        },
        took_s: 2.0,
        settled: true,
        syncs: Syncs {
            count: 80,
            mean: [("pause_us".to_owned(), 3000.0), ("stop_us".to_owned(), 500.0)].into(),
            pauses: [(1984, 79), (8192, 1)].into(),
            reasons: [("idle".to_owned(), 80)].into(),
            ..Syncs::default()
        },
        cpu_percent: [50.0, 45.0, 3.0],
        machine: 0.7,
        cost: Cost {
            cpu_us: [(
                "a".to_owned(),
                [("loop".to_owned(), 12.0), ("vcpu".to_owned(), 70.0)].into(),
            )]
            .into(),
            bytes_between: 900.0,
            bytes_to_client: 80.0,
        },
        status: BTreeMap::new(),
    }
}

/// Six rounds of it, in all of which the machine has another speed.
fn six(row: &mut Row, share: f64, p50_ms: f64) {
    row.planned = 6;
    row.samples = (1..=6)
        .map(|round| {
            let speed = 1.0 + f64::from(round % 3);
            Sample {
                round,
                ..sample(1000.0 * share * speed, p50_ms / speed)
            }
        })
        .collect();
}

/// All cases, each policy with its share of 1,000 requests a second.
fn report(shares: &[(&str, f64)]) -> BenchReport {
    report_of(&case::all(), shares)
}

fn report_of(cases: &[Case], shares: &[(&str, f64)]) -> BenchReport {
    let mut rows = Vec::new();
    for case in cases {
        for (policy, share) in shares {
            let mut row = Row::new(case, policy);
            six(&mut row, *share, 1.0 / share);
            rows.push(row);
        }
    }
    let mut report = BenchReport {
        on: Machine {
            processor: "fair & square".to_owned(),
            host_cpu_percent: 60,
            ..Machine::default()
        },
        rounds: 6,
        seed: 1,
        policies: shares.iter().map(|(policy, _)| (*policy).to_owned()).collect(),
        rows,
        ends: Vec::new(),
        geometric_means: Vec::new(),
        targets: Vec::new(),
        itself: None,
    };
    report.conclude();
    report
}

fn row<'a>(report: &'a mut BenchReport, policy: &str, case: &str) -> &'a mut Row {
    let mut rows = report.rows.iter_mut();
    rows.find(|row| row.policy == policy && row.case == case).unwrap()
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
    assert_eq!(
        verdicts(&good),
        [
            "met",
            "met",
            "met",
            "met",
            "met",
            "missed",
            "met",
            "met",
            "not measured",
            "not measured",
            "not measured"
        ]
    );
    let slow = report(&[("none", 1.0), ("plover", 0.99), ("dunlin", 0.6)]);
    assert_eq!(verdicts(&slow)[..3], ["missed", "missed", "missed"]);
    let without = report(&[("none", 1.0), ("remus", 0.5)]);
    assert_eq!(verdicts(&without), ["not measured"; 11]);
    let mean = &good.geometric_means[2];
    assert_eq!(mean.services, 8);
    let loaded = mean.loaded.unwrap();
    assert!(
        (loaded.median - 0.95).abs() < 1e-9 && loaded.interval.is_some(),
        "{loaded:?}"
    );
}

#[test]
fn bulk_transfers_have_their_own_targets() {
    let cases = case::choose(&["bulk".to_owned()], None).unwrap();
    let bulk = |shares: &[(&str, f64)]| verdicts(&report_of(&cases, shares))[8..].join(", ");
    // 1 ms of `none` for a transfer, and 1 / share here.
    assert_eq!(
        bulk(&[("none", 1.0), ("remus+spec@50", 0.95), ("dunlin", 0.5)]),
        "met, met, missed"
    );
    assert_eq!(
        bulk(&[("none", 1.0), ("remus+spec@50", 0.004), ("dunlin", 0.95)]),
        "missed, missed, met"
    );
}

#[test]
fn one_slow_hard_case_is_enough_to_miss() {
    let mut report = report(&[("none", 1.0), ("remus", 0.5), ("dunlin", 0.95)]);
    six(row(&mut report, "dunlin", "counter"), 0.1, 10.0);
    report.conclude();
    assert_eq!(verdicts(&report)[..2], ["met", "missed"]);
    assert_eq!(report.targets[1].worst, "redis counter c=16, beside remus");
    let (low, high) = report.targets[1].interval.unwrap();
    assert!(
        (low - 0.2).abs() < 1e-9 && (high - 0.2).abs() < 1e-9,
        "{low} {high}"
    );
}

#[test]
fn neither_the_policy_itself_nor_the_baseline_is_another_policy() {
    let report = report(&[("none", 1.0), ("none'", 1.0), ("dunlin", 0.6), ("dunlin'", 0.9)]);
    assert_eq!(report.targets[1].verdict, "not measured");
}

#[test]
fn the_best_other_is_judged_by_pairs_of_one_round_and_not_by_speeds_of_another_time() {
    // Both have half of what none has in each round; colo's first windows, of the machine's fastest times, are lost.
    let mut report = report(&[("none", 1.0), ("colo", 0.5), ("dunlin", 0.5)]);
    for row in report.rows.iter_mut().filter(|row| row.policy == "colo") {
        row.samples.retain(|sample| sample.round % 3 != 2);
        row.planned = 4;
    }
    report.conclude();
    let value = report.targets[1].value.unwrap();
    assert!((value - 1.0).abs() < 1e-9, "{value}");
}

#[test]
fn what_a_client_saw_leaves_no_figure_of_its_case() {
    let mut report = report(&[("none", 1.0), ("dunlin", 0.95)]);
    row(&mut report, "dunlin", "set")
        .failures
        .push("round 2: wrk: Non-2xx responses: 3".to_owned());
    report.conclude();
    let row = row(&mut report, "dunlin", "set");
    assert!(row.median.is_none() && row.of_baseline.is_none());
    assert_eq!(report.failures().len(), 1);
    assert!(table(&report).contains("FAILED"), "{}", table(&report));
}

#[test]
fn a_lost_window_costs_itself_and_its_pair_up_to_a_tenth() {
    let mut report = report(&[("none", 1.0), ("remus", 0.5), ("dunlin", 0.95)]);
    let ten = |row: &mut Row| {
        row.planned = 10;
        row.samples = (1..=10)
            .map(|round| Sample {
                round,
                ..row.samples[0].clone()
            })
            .collect();
    };
    for policy in ["none", "dunlin", "remus"] {
        ten(row(&mut report, policy, "set"));
    }
    // One of none's costs each policy one pair, and no policy its figures.
    row(&mut report, "none", "set").samples.pop();
    report.conclude();
    let dunlin = row(&mut report, "dunlin", "set");
    assert_eq!((dunlin.of_baseline.unwrap().pairs, dunlin.failure()), (9, None));
    assert!(table(&report).contains("9/10 windows"));
    assert!(report.failures().is_empty());
    // Two of ten are too many.
    row(&mut report, "none", "set").samples.pop();
    report.conclude();
    assert_eq!(report.failures().len(), 1);
    assert_eq!(row(&mut report, "dunlin", "set").of_baseline, None);
    assert!(row(&mut report, "dunlin", "set").median.is_some());
}

#[test]
fn a_window_is_compared_with_its_partner_and_with_no_other_of_its_round() {
    let mut report = report(&[("none", 1.0), ("remus", 0.5), ("dunlin", 0.5)]);
    for row in &mut report.rows {
        if row.policy != "none" {
            row.samples
                .iter_mut()
                .for_each(|sample| sample.beside = "none".to_owned());
            continue;
        }
        let beside = |policy: &str, speed: f64| {
            let mut samples = row.samples.clone();
            for sample in &mut samples {
                sample.beside = policy.to_owned();
                sample.load.per_second *= speed;
            }
            samples
        };
        let (one, other) = (beside("remus", 0.5), beside("dunlin", 2.0));
        row.samples = [one, other].concat();
        row.planned = 12;
    }
    report.conclude();
    let share = |report: &mut BenchReport, policy| row(report, policy, "set").of_baseline.unwrap();
    let (remus, dunlin) = (share(&mut report, "remus"), share(&mut report, "dunlin"));
    assert!((remus.median - 1.0).abs() < 1e-9 && (dunlin.median - 0.25).abs() < 1e-9);
    assert_eq!((remus.pairs, dunlin.pairs), (6, 6));
}

#[test]
fn cases_of_another_run_are_added_and_measured_ones_stay() {
    let mut new = report(&[("none", 1.0), ("dunlin", 0.9)]);
    new.rows
        .retain(|row| row.service == "nginx" || row.kind == Kind::Hard);
    let old = report(&[("none", 1.0), ("dunlin", 0.5)]);
    new.add_from(old.clone()).unwrap();
    assert_eq!(new.rows.len(), case::all().len() * 2);
    let mut share = |case: &str| row(&mut new, "dunlin", case).of_baseline.unwrap().median;
    // The hard cases are redis', too, and cost redis nothing of what was there.
    assert_eq!((share("static"), share("counter")), (0.9, 0.9));
    assert_eq!((share("page"), share("set")), (0.5, 0.5));
    let unlike = BenchReport {
        on: Machine {
            seconds: 3.0,
            ..old.on.clone()
        },
        ..old
    };
    assert!(new.add_from(unlike).unwrap_err().contains("seconds"));
}

#[test]
fn one_policy_against_itself_holds_or_does_not() {
    let same = report(&[("none", 1.0), ("none'", 1.0)]).itself.unwrap();
    assert!(same.holds && same.cases == case::all().len(), "{same:?}");
    assert!(!report(&[("none", 1.0), ("none'", 0.93)]).itself.unwrap().holds);
    assert!(report(&[("dunlin", 1.0), ("dunlin'", 1.0)]).itself.unwrap().holds);
    assert!(report(&[("none", 1.0), ("dunlin", 1.0)]).itself.is_none());
    // An interval that holds everything says nothing.
    let mut wide = report(&[("none", 1.0), ("none'", 1.0)]);
    for row in wide.rows.iter_mut().filter(|row| row.policy == "none'") {
        for (sample, share) in row.samples.iter_mut().zip([0.2, 0.9, 0.9, 0.9, 0.9, 5.0]) {
            sample.load.per_second *= share;
        }
    }
    wide.rows.truncate(2);
    wide.conclude();
    let wide = wide.itself.unwrap();
    let (low, high) = wide.throughput.interval.unwrap();
    assert!(low < 1.0 && 1.0 < high && !wide.holds, "{wide:?}");
}

#[test]
fn two_reports_are_near_each_other_where_their_shares_are() {
    let this = report(&[("none", 1.0), ("dunlin", 0.9), ("colo", 0.5)]);
    let mut other = report(&[("none", 1.0), ("dunlin", 0.85), ("colo", 0.6), ("remus", 0.1)]);
    let text = beside(&this, &other);
    let cells = case::all().len();
    assert_eq!(
        text.lines().filter(|line| line.ends_with("FAR")).count(),
        cells,
        "{text}"
    );
    assert!(text.contains("redis set c=1 dunlin"), "{text}");
    let told = format!("{cells} of {} shares that both have are within 10 %", 2 * cells);
    assert!(text.contains(&told), "{text}");
    // What only one of them has is no part of it.
    other.rows.retain(|row| row.case != "set");
    other.conclude();
    let text = beside(&this, &other);
    assert!(!text.contains("redis set "), "{text}");
}

#[test]
fn few_pairs_are_marked() {
    let mut report = report(&[("none", 1.0), ("dunlin", 0.9)]);
    for row in &mut report.rows {
        row.samples.truncate(5);
        row.planned = 5;
    }
    report.conclude();
    let share = row(&mut report, "dunlin", "set").of_baseline.unwrap();
    assert_eq!((share.interval, share.is_wide()), (None, true));
    assert!(table(&report).contains("0.90 (of 5) WIDE"));
}

#[test]
fn added_latency_and_what_bounds_are_told() {
    let mut report = report(&[("none", 1.0), ("dunlin", 0.5)]);
    let row = row(&mut report, "dunlin", "set");
    // 1 ms more at the slowest speed, half and a third of that at the others.
    assert!((row.added_p50_us.unwrap().median - 500.0).abs() < 1e-9, "{row:?}");
    assert!((row.added_p99_us.unwrap().median - 1500.0).abs() < 1e-9);
    let bound = &row.median.as_ref().unwrap().bound;
    assert!((bound.host_a - 50.0 / 60.0).abs() < 1e-9 && (bound.paused - 0.12).abs() < 1e-9);
    assert_eq!(bound.by, "client");
    let median = row.median.as_ref().unwrap();
    assert!(
        (median.pause_p50_ms - 2.0155).abs() < 1e-9,
        "{}",
        median.pause_p50_ms
    );
    for sample in &mut row.samples {
        sample.cpu_percent[0] = 58.0;
    }
    report.conclude();
    assert!(table(&report).contains("CPU of host a"));
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
        "p50 added",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let plots = plot::draw(&report).unwrap();
    for wanted in ["throughput-services.svg", "cost-redis.svg", "cost-tomcat.svg"] {
        assert!(plots.iter().any(|(name, _)| name == wanted), "{wanted}");
    }
    for (name, svg) in plots {
        assert!(svg.starts_with("<svg") && svg.contains("plover"), "{name}");
        assert!(!svg.contains("NaN"), "{name}");
    }
    let again: BenchReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(table(&again), text);
}

#[test]
fn medians_of_few_values() {
    assert!((median_of(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
    assert!((median_of(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    assert!(median_of(Vec::new()).abs() < 1e-9);
}

#[test]
fn a_share_is_the_median_of_the_pairs_own_shares() {
    // The machine has another speed in each round, for both: the shares are alike.
    let mut report = report(&[("none", 1.0), ("dunlin", 0.8)]);
    let share = row(&mut report, "dunlin", "set").of_baseline.unwrap();
    let (low, high) = share.interval.unwrap();
    assert!(
        (share.median - 0.8).abs() < 1e-9 && (high - low).abs() < 1e-9,
        "{share:?}"
    );
    assert_eq!(share.pairs, 6);
}
