//! The report as a table for the terminal.

use super::{BenchReport, Row};

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
    text.push_str(&format!(
        "{:8} {:>5} {:>10} {:>6} {:>9} {:>9} {:>8}  {:>20}\n",
        "policy",
        "conns",
        format!("{}/s", report.test),
        "of",
        "p50 ms",
        "p99 ms",
        "syncs/s",
        "cpu % of a, b, c"
    ));
    for row in &report.rows {
        let ratio = row
            .of_unreplicated
            .map_or(String::new(), |ratio| format!("{:.0}%", ratio * 100.0));
        let cpu = row.samples.first().map_or([0.0; 3], |sample| sample.cpu_percent);
        text.push_str(&format!(
            "{:8} {:>5} {:>10.0} {:>6} {:>9.2} {:>9.2} {:>8.1}  {:>20}\n",
            row.policy,
            row.connections,
            row.median.per_second,
            ratio,
            row.median.p50_ms,
            row.median.p99_ms,
            row.median.syncs_per_second,
            format!("{:.0} {:.0} {:.0}", cpu[0], cpu[1], cpu[2])
        ));
    }
    text.push_str("\nOne sync (medians; times in ms, pages of 4 KiB)\n");
    text.push_str(&format!("{:8} {:>5} {:>7}", "policy", "conns", "pause"));
    for (name, _) in STEPS {
        text.push_str(&format!(" {name:>6}"));
    }
    for name in [
        "hash", "total", "every", "dirty P", "dirty B", "united", "diverg.", "KiB",
    ] {
        text.push_str(&format!(" {name:>7}"));
    }
    text.push('\n');
    for row in report
        .rows
        .iter()
        .filter(|row| !row.median.sync.is_empty() && row.policy != "none")
    {
        text.push_str(&sync_line(row));
    }
    text
}

fn sync_line(row: &Row) -> String {
    let value = |name: &str| row.median.sync.get(name).copied().unwrap_or(0);
    let ms = |name: &str| value(name) as f64 / 1e3;
    let mut line = format!("{:8} {:>5} {:>7.2}", row.policy, row.connections, ms("pause_us"));
    for (_, key) in STEPS {
        line.push_str(&format!(" {:>6.2}", ms(key)));
    }
    for key in ["hash_us", "total_us", "interval_us"] {
        line.push_str(&format!(" {:>7.2}", ms(key)));
    }
    for key in ["dirty_primary", "dirty_backup", "united", "divergent"] {
        line.push_str(&format!(" {:>7}", value(key)));
    }
    line.push_str(&format!(" {:>7}\n", value("bytes") / 1024));
    line
}
