//! The windows of a service's cases, round after round, and what becomes of those that fail.
//!
//! * **Decides:** what a failure costs: a client's wrong answer the policy's case; any other its window, which is tried once more; two lost
//!   windows in a row end the policy for that case, and the baseline's end that of all, whose figures would have nothing beside them.
//! * **Flow:** [`windows`] (one guest, policies change) or [`fresh`] (a guest for each policy and round) -> `told`.
//! * **Invariants:** (1) what one policy cannot do costs no other its figures; (2) a service that does not end as it should keeps them.
//! * **Not here:** one window ([`super::window`]).

use std::time::Instant;

use anyhow::Result;

use super::BenchSpec;
use super::case::Case;
use super::order::Order;
use super::report::{self, BASELINE, policy_of};
use super::standing::{Service, with_service};
use super::syscalls::Calls;
use super::window::{self, Lost, Outcome};

/// So many lost windows in a row end a policy for a case: each costs up to two minutes.
const IN_A_ROW: u32 = 2;

/// What a run tells as it goes: of which case and policy (by their places).
pub enum Told {
    /// A window, its round and its partner's policy.
    Window(u32, Option<usize>, Box<Outcome>),
    /// A window that is tried once more.
    Again(u32, Lost),
    /// The policy is measured no more in this case.
    Ended(String),
    /// The window under strace.
    Calls(Result<Calls, Lost>),
}

/// Takes what is told.
pub type Tell<'a> = dyn FnMut(usize, usize, Told) + 'a;

/// The order of a case's windows.
pub fn order(spec: &BenchSpec, case: &Case) -> Order {
    let base = report::base(&spec.policies);
    Order::of(spec.policies.len(), base, spec.seed, &case.title())
}

/// Boots `cases`' service once, and makes each load in windows of every policy.
///
/// # Errors
/// The outer when the VM cannot be had at all; the inner when it did not end as it should.
pub fn windows(spec: &BenchSpec, cases: &[Case], tell: &mut Tell<'_>) -> Result<Result<()>> {
    // The daemon takes a VM up as replicated: one that never was has a group of its own kind.
    let boot = spec
        .policies
        .iter()
        .map(|label| policy_of(label))
        .find(|policy| *policy != BASELINE);
    let boot = boot.unwrap_or(BASELINE);
    let ((), ended) = with_service(spec, cases, boot, |service| {
        let mut now = boot.to_owned();
        if let Some(first) = cases.first() {
            // What is translated or compiled when it first runs. Whether it goes well is seen by the windows.
            let _ = service.clients.run(first, spec.warm_up_seconds, None);
        }
        for (at, case) in cases.iter().enumerate() {
            of_case(service, case, &mut now, &mut |policy, told| {
                tell(at, policy, told)
            });
        }
    })?;
    Ok(ended)
}

fn of_case(service: &Service<'_>, case: &Case, now: &mut String, tell: &mut dyn FnMut(usize, Told)) {
    let spec = service.spec;
    let order = order(spec, case);
    let base = report::base(&spec.policies);
    let mut failing = Failing::new(spec.policies.len());
    for round in 1..=spec.rounds {
        for planned in order.round(round) {
            if failing.skips(planned.policy, planned.beside, base) {
                continue;
            }
            let policy = policy_of(&spec.policies[planned.policy]);
            let mut attempt = || -> Outcome {
                window::change_to(service, now, policy)?;
                let begun = window::lead_in(service, case, policy)?;
                window::one(service, case, policy, round, begun)
            };
            let mut outcome = attempt();
            if let Err(first) = outcome {
                outcome = if first.wrong {
                    Err(first)
                } else {
                    tell(planned.policy, Told::Again(round, first));
                    attempt()
                };
            }
            if outcome.is_err() {
                service
                    .cluster
                    .keep_logs(&format!("bench-{}-{}-{policy}", case.service, case.name));
            }
            let ended = failing.after(planned.policy, outcome.as_ref().err());
            tell(
                planned.policy,
                Told::Window(round, planned.beside, Box::new(outcome)),
            );
            if let Some(why) = ended {
                tell(planned.policy, Told::Ended(why));
            }
        }
    }
    if spec.syscalls {
        for (at, label) in spec.policies.iter().enumerate() {
            if !failing.skips(at, None, base) {
                let policy = policy_of(label);
                let calls = window::change_to(service, now, policy)
                    .map_err(Lost::from)
                    .and_then(|()| window::traced(service, case, policy));
                tell(at, Told::Calls(calls));
            }
        }
    }
}

/// Boots a VM for each policy and round.
pub fn fresh(spec: &BenchSpec, cases: &[Case], tell: &mut Tell<'_>) -> Result<()> {
    let mut last = Ok(());
    let mut failing: Vec<Failing> = cases.iter().map(|_| Failing::new(spec.policies.len())).collect();
    for round in 1..=spec.rounds {
        let order = Order::of(spec.policies.len(), None, spec.seed, cases[0].service);
        for planned in order.round(round) {
            let at = planned.policy;
            let policy = policy_of(&spec.policies[at]);
            let left: Vec<usize> = (0..cases.len())
                .filter(|&case| !failing[case].ended[at])
                .collect();
            if left.is_empty() {
                continue;
            }
            let begun = Instant::now();
            let measured = with_service(spec, cases, policy, |service| {
                for &case in &left {
                    let outcome = window::lead_in(service, &cases[case], policy)
                        .and_then(|begun| window::one(service, &cases[case], policy, round, begun));
                    if outcome.is_err() {
                        let name = format!("bench-{}-{}-{policy}", cases[case].service, cases[case].name);
                        service.cluster.keep_logs(&name);
                    }
                    let ended = failing[case].after(at, outcome.as_ref().err());
                    tell(case, at, Told::Window(round, None, Box::new(outcome)));
                    if let Some(why) = ended {
                        tell(case, at, Told::Ended(why));
                    }
                }
            });
            match measured {
                Ok(((), ended)) => last = last.and(ended),
                Err(error) => {
                    for case in left {
                        let lost = Lost {
                            wrong: false,
                            why: format!("{error:#}, after {:.0} s", begun.elapsed().as_secs_f64()),
                        };
                        let ended = failing[case].after(at, Some(&lost));
                        tell(case, at, Told::Window(round, None, Box::new(Err(lost))));
                        if let Some(why) = ended {
                            tell(case, at, Told::Ended(why));
                        }
                    }
                }
            }
        }
    }
    last
}

/// Which policies are still measured in a case.
struct Failing {
    in_a_row: Vec<u32>,
    ended: Vec<bool>,
}

impl Failing {
    fn new(policies: usize) -> Self {
        Self {
            in_a_row: vec![0; policies],
            ended: vec![false; policies],
        }
    }

    /// Whether a window would be for nothing.
    fn skips(&self, policy: usize, beside: Option<usize>, base: Option<usize>) -> bool {
        let ended = |at: Option<usize>| at.is_some_and(|at| self.ended[at]);
        ended(Some(policy)) || ended(beside) || ended(base)
    }

    /// Counts a window, after its second try; says so when the policy ends.
    fn after(&mut self, policy: usize, lost: Option<&Lost>) -> Option<String> {
        let Some(lost) = lost else {
            self.in_a_row[policy] = 0;
            return None;
        };
        self.in_a_row[policy] += 1;
        if lost.wrong {
            self.ended[policy] = true;
            return Some("a client saw something wrong".to_owned());
        }
        if self.in_a_row[policy] == IN_A_ROW {
            self.ended[policy] = true;
            return Some(format!("{IN_A_ROW} windows in a row were lost"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(wrong: bool) -> Lost {
        Lost {
            wrong,
            why: String::new(),
        }
    }

    #[test]
    fn two_lost_windows_in_a_row_end_a_policy_and_one_between_others_does_not() {
        let mut failing = Failing::new(3);
        assert_eq!(failing.after(1, Some(&lost(false))), None);
        assert_eq!(failing.after(2, Some(&lost(false))), None);
        assert_eq!(failing.after(1, None), None);
        assert_eq!(failing.after(1, Some(&lost(false))), None);
        assert!(!failing.skips(1, Some(0), Some(0)));
        assert!(failing.after(1, Some(&lost(false))).is_some());
        assert!(failing.skips(1, Some(0), Some(0)));
        assert!(failing.skips(0, Some(1), Some(0)), "a partner without its other");
        assert!(!failing.skips(2, Some(0), Some(0)) && !failing.skips(0, Some(2), Some(0)));
    }

    #[test]
    fn a_wrong_answer_ends_a_policy_at_once_and_the_baselines_end_all() {
        let mut failing = Failing::new(3);
        assert!(failing.after(2, Some(&lost(true))).is_some());
        assert!(failing.skips(2, Some(0), Some(0)) && !failing.skips(1, Some(0), Some(0)));
        failing.after(0, Some(&lost(true)));
        assert!(failing.skips(1, Some(0), Some(0)));
        assert!(!failing.skips(1, None, None));
    }
}
