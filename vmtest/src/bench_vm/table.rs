//! The report as tables for the terminal.

use std::fmt::Write;

use super::cost::{DAEMON, GROUPS};
use super::paired::Ratio;
use super::report::{BASELINE, BenchReport, Row, policy_of};

/// Steps of a pause, in the order in which they happen, as the daemon names them.
pub(super) const STEPS: [(&str, &str); 6] = [
    ("stop", "stop_us"),
    ("save", "save_us"),
    ("scan", "scan_us"),
    ("wait", "wait_us"),
    ("copy", "copy_us"),
    ("cont", "cont_us"),
];

/// The whole report as text.
pub fn table(report: &BenchReport) -> String {
    let mut text = format!("{}\n\n", note(report));
    loads(&mut text, report);
    costs(&mut text, report);
    syscalls(&mut text, report);
    syncs(&mut text, report);
    means(&mut text, report);
    targets(&mut text, report);
    text
}

/// What the figures mean.
fn note(report: &BenchReport) -> String {
    let on = &report.on;
    let mut text = format!(
        "{}, {} vCPU in each guest, commit {}. All hosts share one machine: each has its share in every policy, 'none' included, so that a backup \
         takes nothing from its primary; clients have what is left. Medians of {} windows of {} s (3 at the least for transactions), {}. A share is \
         the median of the shares of pairs of windows beside each other, with its 95 % interval; WIDE: the interval is wider than a tenth, or \
         there are fewer than six pairs.",
        on.in_words(),
        on.vcpus,
        on.commit,
        report.rounds,
        on.seconds,
        if on.fresh {
            "each of freshly booted VMs"
        } else {
            "in one guest, in an order of their own for each case (seed in the JSON)"
        },
    );
    if !on.settings.is_empty() {
        let _ = write!(text, " Further settings: {}.", on.settings.join("; "));
    }
    text
}

fn loads(text: &mut String, report: &BenchReport) {
    let _ = writeln!(
        text,
        "{:10} {:20} {:>5} {:14} {:>9} {:>9} {:>9} {:>8}  cpu % of a, b, c    {:24} {:24} bound by",
        "service",
        "case",
        "conns",
        "policy",
        "per s",
        "p50 ms",
        "p99 ms",
        "syncs/s",
        "share of none",
        "p50, times none"
    );
    let mut last: Option<&Row> = None;
    for row in &report.rows {
        if last.is_some_and(|last| !last.same_case(row)) {
            text.push('\n');
        }
        last = Some(row);
        let _ = write!(
            text,
            "{:10} {:20} {:>5} {:14} ",
            row.service, row.case, row.connections, row.policy
        );
        let Some(median) = &row.median else {
            let _ = writeln!(text, "FAILED {}", row.failure().unwrap_or_default());
            continue;
        };
        let words = |ratio: Option<Ratio>| ratio.map_or(String::new(), |ratio| ratio.in_words());
        let (share, times) = (words(row.of_baseline), words(row.latency_of_baseline));
        let percent = f64::from(report.on.host_cpu_percent);
        let cpu_c = row
            .samples
            .iter()
            .map(|sample| sample.cpu_percent[2])
            .sum::<f64>()
            / row.samples.len() as f64;
        // Of so few the 99th percentile is the slowest.
        let about = if median.fewest < 100 { "~" } else { "" };
        let _ = write!(
            text,
            "{:>9} {:>9.2} {:>9} {:>8.1}  {:>5.0} {:>5.0} {:>5.0}    {share:24} {times:24} {}",
            rate(median.per_second),
            median.p50_ms,
            format!("{about}{:.2}", median.p99_ms),
            median.syncs_per_second,
            median.bound.host_a * percent,
            median.bound.host_b * percent,
            cpu_c,
            median.bound.by
        );
        if row.samples.len() < row.planned as usize {
            let _ = write!(text, ", {}", row.windows());
        }
        if median.unsettled > 0 {
            let _ = write!(text, ", {} not settled", median.unsettled);
        }
        text.push('\n');
    }
}

/// Whole numbers, but of few a second two places: of bulk they are MiB.
pub fn rate(per_second: f64) -> String {
    match per_second < 10.0 {
        true => format!("{per_second:.2}"),
        false => format!("{per_second:.0}"),
    }
}

/// What a request costs.
fn costs(text: &mut String, report: &BenchReport) {
    text.push_str(
        "\nOne request: us of CPU on host a by groups of threads, on b and c in all and by their daemons; bytes from host to host; what is added to none's latency, us\n",
    );
    let _ = write!(
        text,
        "{:10} {:20} {:>5} {:14}",
        "service", "case", "conns", "policy"
    );
    for group in GROUPS {
        let _ = write!(text, " {group:>11}");
    }
    let _ = writeln!(
        text,
        " {:>8} {:>8} {:>8} {:>8} {:>9}  {:22} p99 added",
        "b", "b daemon", "c", "c daemon", "bytes", "p50 added"
    );
    for row in &report.rows {
        let Some(median) = &row.median else { continue };
        let cost = &median.cost;
        let _ = write!(
            text,
            "{:10} {:20} {:>5} {:14}",
            row.service, row.case, row.connections, row.policy
        );
        for group in GROUPS {
            let _ = write!(text, " {:>11.1}", cost.on("a", &[group]));
        }
        for host in ["b", "c"] {
            let _ = write!(
                text,
                " {:>8.1} {:>8.1}",
                cost.on(host, &GROUPS),
                cost.on(host, &DAEMON)
            );
        }
        let added = |ratio: Option<Ratio>| ratio.map_or(String::new(), |ratio| ratio.as_difference());
        let _ = writeln!(
            text,
            " {:>9.0}  {:22} {}",
            cost.bytes_between,
            added(row.added_p50_us),
            added(row.added_p99_us)
        );
    }
}

/// System calls, where they were counted.
fn syscalls(text: &mut String, report: &BenchReport) {
    let counted = report
        .rows
        .iter()
        .filter_map(|row| Some((row, row.syscalls.as_ref()?)));
    for (at, (row, calls)) in counted.enumerate() {
        if at == 0 {
            text.push_str(
                "\nSystem calls of host a's daemon for a request (of these in vain; share of the time in calls), the ten that take most\n",
            );
        }
        let mut each: Vec<_> = calls.each.iter().collect();
        each.sort_by(|a, b| b.1.2.total_cmp(&a.1.2));
        let words = each
            .into_iter()
            .take(10)
            .map(|(name, (count, in_vain, share))| format!("{name} {count:.2} ({in_vain:.2}; {share:.0} %)"));
        let _ = writeln!(
            text,
            "{} {}: {}",
            row.policy,
            row.title(),
            words.collect::<Vec<_>>().join(", ")
        );
    }
}

fn syncs(text: &mut String, report: &BenchReport) {
    let with_syncs: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| policy_of(&row.policy) != BASELINE && row.median.is_some())
        .collect();
    if with_syncs.is_empty() {
        return;
    }
    text.push_str(
        "\nOne sync (means over each load; times in ms, pages of 4 KiB; p50: median of the windows' pauses)\n",
    );
    let _ = write!(
        text,
        "{:10} {:20} {:>5} {:14} {:>6} {:>6}",
        "service", "case", "conns", "policy", "p50", "pause"
    );
    for (name, _) in STEPS {
        let _ = write!(text, " {name:>5}");
    }
    for name in ["hash", "total", "load", "every"] {
        let _ = write!(text, " {name:>6}");
    }
    for name in ["dirtyP", "dirtyB", "united", "diverg", "KiB"] {
        let _ = write!(text, " {name:>6}");
    }
    text.push_str("  reasons; what left by a match and by a sync, differences, changes of mode\n");
    for row in with_syncs {
        sync_line(text, row);
    }
}

fn sync_line(text: &mut String, row: &Row) {
    let Some(median) = &row.median else { return };
    let value = |name: &str| median.sync.get(name).copied().unwrap_or(0.0);
    let _ = write!(
        text,
        "{:10} {:20} {:>5} {:14} {:>6.2} {:>6.2}",
        row.service,
        row.case,
        row.connections,
        row.policy,
        median.pause_p50_ms,
        value("pause_us") / 1e3
    );
    for (_, key) in STEPS {
        let _ = write!(text, " {:>5.2}", value(key) / 1e3);
    }
    for key in ["hash_us", "total_us", "load_us", "interval_us"] {
        let _ = write!(text, " {:>6.1}", value(key) / 1e3);
    }
    for key in ["dirty_primary", "dirty_backup", "united", "divergent"] {
        let _ = write!(text, " {:>6.0}", value(key));
    }
    let _ = write!(text, " {:>6.0} ", value("bytes") / 1024.0);
    for (reason, count) in median.reasons.iter().filter(|(_, count)| **count > 0) {
        let _ = write!(text, " {reason} {count}");
    }
    let compared = |name: &str| median.compared.get(name).copied().unwrap_or(0);
    if compared("matched") + compared("differences") > 0 {
        let _ = write!(
            text,
            "; matched {} by sync {} differences {}",
            compared("matched"),
            compared("by_sync"),
            compared("differences")
        );
    }
    if median.change_overs > 0 {
        let _ = write!(
            text,
            "; {} changes, then {}",
            median.change_overs,
            median.modes.join(" ")
        );
    }
    text.push('\n');
}

fn means(text: &mut String, report: &BenchReport) {
    text.push_str(
        "\nThroughput as a share of none, geometric mean over the services (hard cases not in it)\n",
    );
    for mean in report
        .geometric_means
        .iter()
        .filter(|mean| mean.policy != BASELINE)
    {
        let show = |share: Option<Ratio>| share.map_or("-".to_owned(), |share| share.in_words());
        let _ = writeln!(
            text,
            "{:8} loaded (16 connections and more) {:24}   one connection {:24}   over {} services",
            mean.policy,
            show(mean.loaded),
            show(mean.single),
            mean.services
        );
    }
}

fn targets(text: &mut String, report: &BenchReport) {
    text.push_str("\nTargets\n");
    for target in &report.targets {
        let value = target.value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let interval = target
            .interval
            .map_or(String::new(), |(low, high)| format!(" [{low:.2}, {high:.2}]"));
        let worst = if target.worst.is_empty() {
            String::new()
        } else {
            format!(" ({})", target.worst)
        };
        let _ = writeln!(
            text,
            "{:12} {value:>6}{interval}, {} {:.2}: {}{worst}",
            target.verdict, target.sense, target.bar, target.name
        );
    }
    if let Some(itself) = &report.itself {
        let verdict = if itself.holds { "holds" } else { "DOES NOT HOLD" };
        let little = if itself.throughput.is_wide() {
            ": so wide an interval tells little, take more pairs or a quieter machine"
        } else {
            ""
        };
        let _ = writeln!(
            text,
            "\nA/A {verdict}: one policy has {} of its own throughput, over {} cases (an interval of 99.5 %, which must hold 1 and be no wider than half of the figure){little}",
            itself.throughput.in_words(),
            itself.cases
        );
    }
    for line in &report.ends {
        let _ = writeln!(text, "AT THE END {line}");
    }
    for failure in report.failures() {
        let _ = writeln!(text, "FAILED {failure}");
    }
}
