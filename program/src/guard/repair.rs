//! Connections that a CRIU which was killed has left in repair: they say nothing and hear nothing, and the program's reads of them fail.
//!
//! Decides:    nothing.
//! Flow:       a dump has failed, the program stands still -> each socket of each of its processes -> it is taken out of repair -> the program runs on.
//! Invariants: 1. a socket that is in no repair stays as it is; 2. one that cannot be mended keeps no other one from it.
//! Source:     TCP_REPAIR of Linux (`do_tcp_setsockopt`), CRIU's `tcp_unlock_one`; pidfd_getfd(2). It is the socket's state, and not CRIU's: it
//!             outlives who has set it. Not here: when a dump has failed (`node`).

use super::{GuardError, Place};
use crate::proc::has_gone;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

const STEP: &str = "connections that CRIU has left in repair";

/// Lets a copy's connections go on, after a dump that has failed: a CRIU that has ended by itself has left none that would need it.
///
/// # Errors
/// The first that cannot be mended; all others are.
pub fn mend(place: &Place) -> Result<(), GuardError> {
    let mut seen = BTreeSet::new();
    let mut first = Ok(());
    for process in place.numbers()? {
        match mend_all_of(process, &mut seen) {
            Err(error) if !has_gone(&error) => first = first.and(Err(GuardError::of(STEP, &error))),
            _ => {}
        }
    }
    first
}

/// Of a process. `seen`: sockets that were looked at already, since processes share them.
fn mend_all_of(process: u32, seen: &mut BTreeSet<OsString>) -> io::Result<()> {
    let handle = i32::try_from(process).ok().and_then(Pid::from_raw);
    let handle = pidfd_open(handle.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    let mut first = Ok(());
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let entry = entry?;
        // One that was closed meanwhile is none.
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let number: Option<RawFd> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let target = target.into_os_string();
        let is_socket = target.to_str().is_some_and(|name| name.starts_with("socket:"));
        let Some(number) = number.filter(|_| is_socket && !seen.contains(&target)) else {
            continue;
        };
        match mend_one(&handle, number) {
            Ok(()) => {
                seen.insert(target);
            }
            Err(error) => first = first.and(Err(error)),
        }
    }
    first
}

fn mend_one(process: &OwnedFd, number: RawFd) -> io::Result<()> {
    let socket = match pidfd_getfd(process, number, PidfdGetfdFlags::empty()) {
        // It was closed meanwhile.
        Err(rustix::io::Errno::BADF) => return Ok(()),
        socket => socket?,
    };
    // Other kinds of sockets know no repair, and need none.
    if !getsockopt(&socket, sockopt::TcpRepair).is_ok_and(|repair| repair != 0) {
        return Ok(());
    }
    setsockopt(&socket, sockopt::TcpRepair, &0)?;
    // What it was before repair is lost. A server's connections have it, so that the server can be begun again beside them; it changes nothing of one
    // that is there.
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn a_connection_that_was_left_in_repair_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let (mut server, _) = listener.accept().expect("accepted");
        for end in [&client, &server] {
            let within = Some(Duration::from_secs(60));
            end.set_read_timeout(within).expect("a bound");
        }
        if setsockopt(&server, sockopt::TcpRepair, &1).is_err() {
            // Only who has CAP_NET_ADMIN may do that.
            return;
        }
        client.write_all(b"ping").expect("room");
        server.read(&mut [0; 4]).expect_err("it is in repair");
        mend_all_of(std::process::id(), &mut BTreeSet::new()).expect("mended");
        let mut heard = [0; 4];
        server.read_exact(&mut heard).expect("it hears");
        assert_eq!(&heard, b"ping");
        server.write_all(b"pong").expect("it says");
        client.read_exact(&mut heard).expect("it is heard");
        assert_eq!(&heard, b"pong");
        // One that is in no repair stays as it is.
        let reuses = getsockopt(&client, sockopt::ReuseAddr).expect("told");
        assert!(!reuses);
        let left = getsockopt(&server, sockopt::TcpRepair).expect("told");
        assert_eq!(left, 0);
    }
}
