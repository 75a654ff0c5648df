//! Two reports of the same cells, of two days or of two builds: which figures are the same.
//!
//! * **Decides:** nothing: shares that differ by less than [`NEAR`] are called near. **Not here:** why they are not; machines, and minutes, differ.

use std::fmt::Write;

use super::report::{BASELINE, BenchReport};

/// Two days are to agree within this, as a share of the smaller figure.
const NEAR: f64 = 0.10;

/// The shares of both, cell by cell, and how many are near each other.
pub fn beside(report: &BenchReport, other: &BenchReport) -> String {
    let mut text = format!(
        "{:40} {:24} {:24} {:>6}  (commit {}, beside {})\n",
        "share of none", "this report", "the other one", "ratio", report.on.commit, other.on.commit
    );
    let (mut cells, mut near) = (0, 0);
    for row in report.rows.iter().filter(|row| row.policy != BASELINE) {
        let same = other
            .rows
            .iter()
            .find(|same| same.same_case(row) && same.policy == row.policy);
        let shares = (row.of_baseline, same.and_then(|same| same.of_baseline));
        let (Some(this), Some(that)) = shares else {
            continue;
        };
        let ratio = this.median / that.median;
        let is_near = ratio.max(ratio.recip()) <= 1.0 + NEAR;
        cells += 1;
        near += u32::from(is_near);
        let _ = writeln!(
            text,
            "{:40} {:24} {:24} {ratio:>6.2}{}",
            format!("{} {}", row.title(), row.policy),
            this.in_words(),
            that.in_words(),
            if is_near { "" } else { "  FAR" }
        );
    }
    let _ = writeln!(
        text,
        "\n{near} of {cells} shares that both have are within {:.0} % of each other",
        NEAR * 100.0
    );
    text
}
