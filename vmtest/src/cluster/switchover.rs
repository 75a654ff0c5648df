//! A switchover, as a person orders it.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::Cluster;

/// A backup may be lost, or an office, in the moment of the order, and a disk be slow in an election. Then the VM stays where it is, whoever ordered it is told
/// so, and says it again: so often.
const TIMES: usize = 3;
/// What is said then, of a VM and of a program.
const STAYS: [&str; 8] = [
    "no complete backup",
    "no second copy to hand over to",
    "not handed over",
    "did not take the lead",
    "was elected itself",
    "nobody leads",
    "does not serve the VM now",
    "does not serve the program",
];

/// What is said where an order came in the moment of an election, or of a change that is not agreed yet, and nothing has changed.
const AGAIN: [&str; 7] = [
    "say it again",
    "try again",
    "nobody leads",
    "leads the group no more",
    "does not serve the",
    "have just changed",
    "is under way",
];
/// Of these, what tells of more than such a moment.
const NO_LUCK: &str = "did not take the VM";
/// An order is said again for so long, and some heartbeats later each time.
const ORDERS: Duration = Duration::from_secs(60);
const BETWEEN: Duration = Duration::from_millis(200);

impl Cluster<'_> {
    /// An order on `host`, said again as a person would where it is refused for what passes.
    ///
    /// # Errors
    /// With the command's own words, when it fails for another reason, or every time.
    pub fn order(&self, host: &str, words: &[&str]) -> Result<String> {
        let until = Instant::now() + ORDERS;
        loop {
            let outcome = self.dunlin(host, words);
            let passes = |why: &str| !why.contains(NO_LUCK) && AGAIN.iter().any(|again| why.contains(again));
            match &outcome {
                Err(error) if passes(&format!("{error:#}")) && Instant::now() < until => {}
                _ => return outcome,
            }
            std::thread::sleep(BETWEEN);
        }
    }

    /// A VM that is protected goes to its backup. Returns who had it, and when it was ordered.
    ///
    /// # Errors
    /// With the command's own words, when it fails for another reason, or every time.
    pub fn switch_over(&self, vm: &str, at_most: Duration) -> Result<(String, Instant)> {
        let mut said = String::new();
        for _ in 0..TIMES {
            let (primary, _) = self.await_protected(vm, at_most)?;
            let at = Instant::now();
            let output = self.output(&primary, &["switchover", vm])?;
            if output.status.success() {
                return Ok((primary, at));
            }
            said = format!(
                "on host {primary}, {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
            if !STAYS.iter().any(|words| said.contains(words)) {
                break;
            }
        }
        bail!("dunlin switchover {vm} {said}")
    }

    /// A VM that is protected is served on that host from here on, which is one of its two.
    ///
    /// # Errors
    /// As [`Self::switch_over`], or when it is not there for longer than that takes.
    pub fn serve_on(&self, vm: &str, host: &str, at_most: Duration) -> Result<()> {
        for _ in 0..TIMES {
            if self.await_protected(vm, at_most)?.0 == host {
                return Ok(());
            }
            let (from, _) = self.switch_over(vm, at_most)?;
            self.await_take_over(vm, &from, at_most)?;
        }
        let (primary, _) = self.await_protected(vm, at_most)?;
        ensure!(
            primary == host,
            "VM {vm} is served on host {primary}, and not on {host}"
        );
        Ok(())
    }
}
