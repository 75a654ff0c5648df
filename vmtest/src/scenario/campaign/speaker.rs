//! One speaker: whether those who were heard at the switch were allowed to speak.
//!
//! Whoever begins to speak after another must have taken over in between, by its own daemon's events; a frame of the old one after
//! the new one's first is a turn that nobody took over for. Only the order counts: clocks are among the faults.

use std::collections::BTreeMap;

use crate::lab::Spoken;

/// How often each host took over, by its daemon's words.
pub type TakeOvers = BTreeMap<String, usize>;

/// Judges from one moment to the next.
#[derive(Default)]
pub struct OneSpeaker {
    turns: TakeOvers,
    took_over: TakeOvers,
}

impl OneSpeaker {
    /// Looks at what was heard and told since the last time.
    ///
    /// # Errors
    /// With the host that spoke without having taken over, and the turns around it.
    pub fn judge(&mut self, heard: &[Spoken], took_over: &TakeOvers) -> Result<(), String> {
        let turns = turns(heard);
        let of = |counts: &TakeOvers, host: &str| counts.get(host).copied().unwrap_or_default();
        for host in turns.keys() {
            let spoke = of(&turns, host) - of(&self.turns, host);
            let allowed = of(took_over, host).saturating_sub(of(&self.took_over, host));
            if spoke > allowed {
                return Err(format!(
                    "two speakers: host {host} began to speak {spoke} times and took over {allowed} times: {}",
                    tell(heard)
                ));
            }
        }
        (self.turns, self.took_over) = (turns, took_over.clone());
        Ok(())
    }
}

/// How often each host began to speak after another. The first of all began with the VM.
fn turns(heard: &[Spoken]) -> TakeOvers {
    let mut turns = TakeOvers::new();
    for next in heard.iter().skip(1) {
        *turns.entry(next.host.clone()).or_default() += 1;
    }
    turns
}

/// The last turns, for a person.
fn tell(heard: &[Spoken]) -> String {
    let from = heard.len().saturating_sub(8);
    let mut words = Vec::new();
    for (at, turn) in heard.iter().enumerate().skip(from) {
        let pause = at
            .checked_sub(1)
            .and_then(|last| turn.first.duration_since(heard[last].last).ok())
            .unwrap_or_default();
        let lasted = turn.last.duration_since(turn.first).unwrap_or_default();
        words.push(format!(
            "+{} ms: {} for {} ms, {} frames",
            pause.as_millis(),
            turn.host,
            lasted.as_millis(),
            turn.frames
        ));
    }
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn spoken(hosts: &[&str]) -> Vec<Spoken> {
        let now = SystemTime::now();
        let one = |host: &&str| Spoken {
            host: (*host).to_owned(),
            first: now,
            last: now,
            frames: 1,
        };
        hosts.iter().map(one).collect()
    }

    fn told(counts: &[(&str, usize)]) -> TakeOvers {
        counts
            .iter()
            .map(|(host, count)| ((*host).to_owned(), *count))
            .collect()
    }

    #[test]
    fn each_turn_needs_a_take_over_of_its_own() {
        let mut judge = OneSpeaker::default();
        judge.judge(&spoken(&["a"]), &told(&[])).unwrap();
        judge.judge(&spoken(&["a", "b"]), &told(&[("b", 1)])).unwrap();
        // The deposed one's last frames, after the new one's first.
        let late = spoken(&["a", "b", "a", "b"]);
        let error = judge.judge(&late, &told(&[("b", 1)])).unwrap_err();
        assert!(error.contains("two speakers: host a"), "{error}");
        // Had both taken over, it would be right.
        judge.judge(&late, &told(&[("a", 1), ("b", 2)])).unwrap();
    }

    #[test]
    fn a_take_over_that_was_never_heard_allows_nothing_later() {
        let mut judge = OneSpeaker::default();
        let counts = told(&[("b", 1)]);
        judge.judge(&spoken(&["a"]), &counts).unwrap();
        assert!(judge.judge(&spoken(&["a", "b"]), &counts).is_err());
    }
}
