//! What the daemon weighs against the other sessions of its host.
//!
//! Where `kernel.sched_autogroup_enabled` is 1 (as Debian has it), Linux shares the cores between *sessions*, and a thread's nice value counts
//! only within its own: a VM's loop at nice -15 waits behind anybody's build. So the daemon's session gets that value, too. Its QEMUs are
//! sessions of their own, and keep the weight of everybody else.
//!
//! Source: sched(7), "The autogroup feature". Not here: the priorities of threads (`vm::run`, `dunlin_guest::qemu`, `dunlin_fabric::group`). Under a
//! control group with the CPU controller there are no autogroups: there `CPUWeight` of the unit counts.

use std::io::ErrorKind;

use nix::unistd::{getpid, getsid};

/// As the VMs' loops have it.
const NICE: &str = "-15";

/// The daemon's session goes before the others. A daemon that somebody started by hand in a session with other things leaves it alone.
pub fn session_first() {
    // 0 where the session's leader is outside of the daemon's PID namespace, as in a container.
    if getsid(None) != Ok(getpid()) {
        return;
    }
    match std::fs::write("/proc/self/autogroup", NICE) {
        Ok(()) => {}
        // No autogroups here, or not this daemon's to say.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            tracing::debug!("the priority of the daemon's session: {error}");
        }
        Err(error) => tracing::warn!("the priority of the daemon's session: {error}"),
    }
}
