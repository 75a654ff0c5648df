//! How a shadow socket finds its rate: Reno until its first loss, then CUBIC. What the host has chosen for itself is not asked.
//!
//! Decides:    when.
//! Invariants: 1. slow start ends by a loss, and by nothing else. 2. a loss that the kernel is still mending is not one yet: it may take it back.
//! Source:     net/ipv4/tcp_cubic.c (HyStart), net/ipv4/tcp_bbr.c; RFC 9438. Both guess when the link is full, from round trips that grow or from rates
//!             that do not. A socket that gets an epoch at a time, through a loop that makes checkpoints as well, has uneven round trips, and a client's
//!             window is small at first: both guess too early here, and go on from some 20 Mbit a second. HyStart cannot be switched off for a socket;
//!             Reno does not guess, but takes long to grow after a loss. BBR after it is faster over a link that loses frames, until this loop is late: it
//!             holds no more in flight than the shortest round trip asks for, and stood at 2 MiB a second on a cable.
//! Not here:   bytes.

use rustix::io::Errno;
use rustix::net::sockopt::set_tcp_congestion;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

const BEGINS_WITH: &str = "reno";
const GOES_ON_WITH: &str = "cubic";
/// The kernel's word for a slow start that has not ended yet.
const INFINITE: u32 = 0x7fff_ffff;
/// TCP_CA_Open: nothing is being mended.
const OPEN: u8 = 0;

/// For a socket that is to begin.
pub(crate) fn begin(socket: &OwnedFd) -> io::Result<()> {
    set_tcp_congestion(socket, BEGINS_WITH).map_err(io::Error::from)
}

/// Gives the socket what it goes on with if it has lost something. Whether that is done: it need not be asked again.
pub(crate) fn look(socket: &OwnedFd) -> bool {
    if !info(socket).is_some_and(|info| is_over(&info)) {
        return false;
    }
    match set_tcp_congestion(socket, GOES_ON_WITH) {
        // A kernel that was built without it: slower after a loss, and right.
        Ok(()) | Err(Errno::NOENT) => true,
        Err(_) => false,
    }
}

fn is_over(info: &libc::tcp_info) -> bool {
    info.tcpi_ca_state == OPEN && info.tcpi_snd_ssthresh < INFINITE
}

fn info(socket: &OwnedFd) -> Option<libc::tcp_info> {
    // SAFETY: numbers, for which zero is a value; an older kernel fills the beginning.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` lives through the call and is `length` bytes long.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    (got == 0).then_some(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_start_is_over_when_a_loss_is_mended() {
        // SAFETY: numbers.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        info.tcpi_snd_ssthresh = INFINITE;
        assert!(!is_over(&info), "nothing was lost");
        (info.tcpi_ca_state, info.tcpi_snd_ssthresh) = (3, 20);
        assert!(!is_over(&info), "invariant 2");
        info.tcpi_ca_state = OPEN;
        assert!(is_over(&info));
        info.tcpi_snd_ssthresh = INFINITE;
        assert!(!is_over(&info), "taken back: it was only late");
    }
}
