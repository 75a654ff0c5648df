//! Whether heartbeats go before all else on this host, told by `dunlin check`: of the daemon where it is asked, else of whoever asks.

use dunlin_guest::probe::Finding;

/// Not a fault where it is not allowed: only less sure on a host that is busy.
pub fn finding() -> Finding {
    let (what, mend) = match dunlin_fabric::group::may_be_real_time() {
        Ok(()) => ("heartbeats: at real-time priority".to_owned(), ""),
        Err(error) => (
            format!(
                "heartbeats: at ordinary priority ({error}); where this host is very busy its VMs may move away"
            ),
            "run the daemon as root, or with CAP_SYS_NICE or LimitRTPRIO=1",
        ),
    };
    Finding {
        topic: "heartbeats",
        what,
        ok: true,
        mend: mend.to_owned(),
    }
}
