//! The report as tables for the terminal.

use std::fmt::Write;

use super::paired::Ratio;
use super::report::{BASELINE, BenchReport, Row};

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
    let mut text = format!("{}\n\n", report.note);
    loads(&mut text, report);
    syncs(&mut text, report);
    means(&mut text, report);
    targets(&mut text, report);
    text
}

fn loads(text: &mut String, report: &BenchReport) {
    let _ = writeln!(
        text,
        "{:10} {:9} {:>5} {:8} {:>9} {:>9} {:>9} {:>8}  cpu % of a, b, c    {:24} p50, times none",
        "service", "case", "conns", "policy", "per s", "p50 ms", "p99 ms", "syncs/s", "share of none"
    );
    let mut last: Option<&Row> = None;
    for row in &report.rows {
        if last.is_some_and(|last| !last.same_case(row)) {
            text.push('\n');
        }
        last = Some(row);
        let _ = write!(
            text,
            "{:10} {:9} {:>5} {:8} ",
            row.service, row.case, row.connections, row.policy
        );
        let Some(median) = &row.median else {
            let why = row.failures.first().map_or("not measured", String::as_str);
            let _ = writeln!(text, "FAILED {why}");
            continue;
        };
        let words = |ratio: Option<Ratio>| ratio.map_or(String::new(), |ratio| ratio.in_words());
        let (share, times) = (words(row.of_baseline), words(row.latency_of_baseline));
        let cpu = row.samples.first().map_or([0.0; 3], |sample| sample.cpu_percent);
        let _ = writeln!(
            text,
            "{:>9.0} {:>9.2} {:>9.2} {:>8.1}  {:>5.0} {:>5.0} {:>5.0}    {share:24} {times}",
            median.per_second, median.p50_ms, median.p99_ms, median.syncs_per_second, cpu[0], cpu[1], cpu[2]
        );
    }
}

fn syncs(text: &mut String, report: &BenchReport) {
    let with_syncs: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.policy != BASELINE && row.median.is_some())
        .collect();
    if with_syncs.is_empty() {
        return;
    }
    text.push_str(
        "\nOne sync (means over each load; times in ms, pages of 4 KiB; p50: median of the pauses)\n",
    );
    let _ = write!(
        text,
        "{:10} {:9} {:>5} {:8} {:>6} {:>6}",
        "service", "case", "conns", "policy", "p50", "pause"
    );
    for (name, _) in STEPS {
        let _ = write!(text, " {name:>5}");
    }
    for name in ["hash", "total", "every"] {
        let _ = write!(text, " {name:>6}");
    }
    for name in ["dirtyP", "dirtyB", "united", "diverg", "KiB"] {
        let _ = write!(text, " {name:>6}");
    }
    text.push_str("  reasons; what left by a match and by a sync, differences, changes of manner\n");
    for row in with_syncs {
        sync_line(text, row);
    }
}

fn sync_line(text: &mut String, row: &Row) {
    let Some(median) = &row.median else { return };
    let value = |name: &str| median.sync.get(name).copied().unwrap_or(0.0);
    let _ = write!(
        text,
        "{:10} {:9} {:>5} {:8} {:>6.2} {:>6.2}",
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
    for key in ["hash_us", "total_us", "interval_us"] {
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
            median.manners.join(" ")
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
        let show =
            |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0));
        let _ = writeln!(
            text,
            "{:8} loaded (16 connections and more) {:>7}   one connection {:>7}   over {} services",
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
        let worst = if target.worst.is_empty() {
            String::new()
        } else {
            format!(" ({})", target.worst)
        };
        let _ = writeln!(
            text,
            "{:12} {value:>6}, {} {:.2}: {}{worst}",
            target.verdict, target.sense, target.bar, target.name
        );
    }
    for failure in report.failures() {
        let _ = writeln!(text, "FAILED {failure}");
    }
}
