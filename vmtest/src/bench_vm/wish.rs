//! A policy as a bench is asked for it: with what only a VM's file says.
//!
//! * **Decides:** what a label means: `remus`, `remus@50` (a sync each 50 ms), `remus+spec` (with speculative communication), `remus+spec@25`.
//! * **Not here:** which policies there are: the daemon says so.

use anyhow::{Context, Result, ensure};
use dunlin_api::files::VmFile;

use super::report::policy_of;

/// What a label asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wish<'label> {
    /// The policy, by the daemon's name.
    pub policy: &'label str,
    /// With `speculative = true`.
    pub speculative: bool,
    /// With `sync.period_ms`.
    pub period_ms: Option<f64>,
}

impl<'label> Wish<'label> {
    /// Reads a label, whose marks do not matter.
    ///
    /// # Errors
    /// A period that is no number of milliseconds.
    pub fn of(label: &'label str) -> Result<Self> {
        let label = policy_of(label);
        let (policy, period) = match label.split_once('@') {
            Some((policy, period)) => (policy, Some(period)),
            None => (label, None),
        };
        let period_ms: Option<f64> = period
            .map(|digits| {
                digits
                    .parse()
                    .with_context(|| format!("policy '{label}': '@{digits}' is no time in ms"))
            })
            .transpose()?;
        ensure!(
            period_ms.is_none_or(|ms| ms > 0.0 && ms.is_finite()),
            "policy '{label}': a period is more than nothing"
        );
        let plain = policy.strip_suffix("+spec");
        Ok(Self {
            policy: plain.unwrap_or(policy),
            speculative: plain.is_some(),
            period_ms,
        })
    }

    /// Whether a VM that runs cannot be given it: it is in the VM's file.
    pub fn is_of_the_file(&self) -> bool {
        self.speculative || self.period_ms.is_some()
    }

    /// `file`, as it says so.
    pub fn into_file(self, mut file: VmFile) -> VmFile {
        file.speculative = self.speculative;
        if self.period_ms.is_some() {
            file.sync.period_ms = self.period_ms;
        }
        file
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::VmPlan;

    #[test]
    fn labels_say_what_is_in_the_file() {
        let of = |label| Wish::of(label).unwrap();
        assert_eq!(
            (of("plover'").policy, of("plover'").is_of_the_file()),
            ("plover", false)
        );
        let wish = of("remus+spec@25");
        assert_eq!(
            (wish.policy, wish.speculative, wish.period_ms),
            ("remus", true, Some(25.0))
        );
        assert!(wish.is_of_the_file() && of("remus@50").is_of_the_file());
        let file = wish.into_file(VmPlan::file());
        assert_eq!((file.speculative, file.sync.period_ms), (true, Some(25.0)));
        let file = of("dunlin").into_file(VmPlan::file());
        assert_eq!((file.speculative, file.sync.period_ms), (false, None));
        for label in ["remus@", "remus@soon", "remus@0", "remus@-5", "remus@inf"] {
            assert!(Wish::of(label).is_err(), "{label}");
        }
    }
}
