//! What systemd is told: that the host is ready, that it ends, and that it is alive.
//!
//! * **Decides:** whether the daemon counts as alive: the loop of every VM has turned since it was last said.
//! * **Flow:** `Type=notify` and `WatchdogSec=` of the unit -> [`Service`] -> one datagram each to `$NOTIFY_SOCKET`. Without
//!   systemd all of it does nothing.
//! * **Invariants:** 1. a host with a loop that stands still is not called alive: systemd ends it whole, and the others take
//!   over. Half a host is worse than a dead one.
//! * **Source:** sd_notify(3), sd_watchdog_enabled(3).
//! * **Not here:** what a loop waits for, and how long it may (its own bounds).

use crossbeam_channel::{Receiver, never, tick};
use sd_notify::NotifyState;
use std::collections::BTreeMap;
use std::time::Duration;

/// Turns that the loop of each VM has made.
pub type Turns = BTreeMap<String, u64>;

/// The daemon as systemd knows it.
pub struct Service {
    /// Ticks when it is time to say that the daemon is alive; never where nobody asks.
    pub due: Receiver<std::time::Instant>,
    last: Turns,
}

impl Service {
    /// The host listens, and its VMs are started.
    pub fn ready(status: &str) -> Self {
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        let due = match sd_notify::watchdog_enabled() {
            Some(limit) => tick(period(limit)),
            None => never(),
        };
        Self {
            due,
            last: Turns::new(),
        }
    }

    /// Whether a service manager has started this daemon, and waits for its word.
    pub fn is_one() -> bool {
        std::env::var_os("NOTIFY_SOCKET").is_some()
    }

    /// The host was told to end, and hands its VMs over.
    pub fn ends() {
        tell(&[
            NotifyState::Stopping,
            NotifyState::Status("its VMs go to their backups"),
        ]);
    }

    /// Says that the daemon is alive if it is (invariant 1); returns the VM whose loop stands still, if one does.
    pub fn is_alive(&mut self, turns: Turns) -> Option<String> {
        let stuck = stands_still(&self.last, &turns);
        if stuck.is_none() {
            tell(&[NotifyState::Watchdog]);
        }
        self.last = turns;
        stuck
    }
}

/// A third of the limit: two may be late.
fn period(limit: Duration) -> Duration {
    (limit / 3).max(Duration::from_millis(1))
}

fn stands_still(last: &Turns, now: &Turns) -> Option<String> {
    now.iter()
        .find(|(vm, turns)| last.get(*vm) == Some(turns))
        .map(|(vm, _)| vm.clone())
}

fn tell(words: &[NotifyState]) {
    // A service manager that does not listen will judge by itself.
    if let Err(error) = sd_notify::notify(words) {
        tracing::debug!("systemd was not told: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(of: &[(&str, u64)]) -> Turns {
        of.iter().map(|(vm, turns)| ((*vm).to_owned(), *turns)).collect()
    }

    #[test]
    fn a_loop_that_has_not_turned_is_named_and_a_new_one_is_not() {
        let last = turns(&[("shop", 7), ("mail", 3)]);
        assert_eq!(stands_still(&last, &turns(&[("shop", 8), ("mail", 4)])), None);
        assert_eq!(
            stands_still(&last, &turns(&[("shop", 8), ("mail", 3)])),
            Some("mail".to_owned())
        );
        assert_eq!(stands_still(&last, &turns(&[("new", 0)])), None);
        assert_eq!(stands_still(&last, &turns(&[])), None);
    }

    #[test]
    fn it_is_said_three_times_within_the_limit() {
        assert_eq!(period(Duration::from_secs(30)), Duration::from_secs(10));
        assert!(period(Duration::from_nanos(1)) > Duration::ZERO);
    }
}
