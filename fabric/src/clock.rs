//! The clock by which a group and its owner count.
//!
//! Decides: that time in which this host sleeps counts. A primary whose host was suspended, and that took that for no time, would speak
//! by a lease that is long over, while another host serves its VM.
//!
//! Invariant: a group and its owner go by this clock, or their difference would not be one number (core's `consensus::Standby`).
//!
//! Source: `CLOCK_BOOTTIME`, clock_gettime(2). Not here: a host that is itself a VM and is paused by its hypervisor: no clock of its own
//! shows that (docs/consensus.md).

/// Time since some moment.
#[derive(Clone, Copy, Debug)]
pub struct HostClock {
    began_us: u64,
}

impl HostClock {
    /// It begins now.
    #[must_use]
    pub fn begin() -> Self {
        Self {
            began_us: boottime_us(),
        }
    }

    /// Microseconds since then.
    #[must_use]
    pub fn now_us(self) -> u64 {
        boottime_us().saturating_sub(self.began_us)
    }
}

fn boottime_us() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes into `now`, which lives across the call.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    assert_eq!(done, 0, "every Linux that this runs on has this clock");
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_host_sleeps_counts() {
        let uptime =
            std::fs::read_to_string("/proc/uptime").expect("the time since the system began, sleep included");
        let seconds = uptime.split('.').next().and_then(|word| word.parse::<u64>().ok());
        let seconds = seconds.expect("whole seconds");
        let now_s = boottime_us() / 1_000_000;
        assert!(
            (seconds..=seconds + 10).contains(&now_s),
            "{seconds} s, {now_s} s"
        );
    }

    #[test]
    fn it_begins_at_nothing_and_goes_on() {
        let clock = HostClock::begin();
        let first_us = clock.now_us();
        assert!(first_us < 10_000_000, "{first_us}");
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(clock.now_us() >= first_us + 2_000);
    }
}
