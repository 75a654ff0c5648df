//! What the clients must have seen.

use std::time::{Instant, SystemTime};

use anyhow::{Result, ensure};

use super::super::Scenario;
use crate::client::{Answers, CounterReport};

/// Nobody was let down, no fault (`moments`) cost more than it may, and nothing left in the `silences`. Returns the worst gap
/// around a fault, in microseconds.
pub(super) fn judge(
    scenario: &Scenario,
    clients: &CounterReport,
    answers: &Answers,
    moments: &[(Instant, Instant)],
    silences: &[(SystemTime, SystemTime)],
) -> Result<u64> {
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let gaps = moments.iter().map(|&(from, to)| answers.longest_gap_us(from, to));
    let worst_gap_us = gaps.max().unwrap_or(0);
    ensure!(
        worst_gap_us <= scenario.gap_limit_ms * 1000,
        "clients waited {} ms, and at most {} ms is allowed",
        worst_gap_us / 1000,
        scenario.gap_limit_ms
    );
    for &(from, to) in silences {
        // An answer that both had said when the backup was frozen may be on its way: one for each client, who says
        // nothing more before it has that.
        let told = answers.count_between(from, to);
        ensure!(
            told <= scenario.connections,
            "{told} answers within {:?} to {} clients, and no backup could have said them",
            to.duration_since(from).unwrap_or_default(),
            scenario.connections
        );
    }
    Ok(worst_gap_us)
}
