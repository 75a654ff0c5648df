//! Packet sockets: frames as they pass a device, or any of a network namespace.
//!
//! * **Decides:** nothing.
//! * **Source:** packet(7).
//! * **Not here:** what is done with the frames (`capture`, and a bench's relay).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// One that hears nothing before it is bound; `more` is for socket(2).
pub(crate) fn socket(more: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the result is checked and owned by nobody else.
    unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | more, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sets an option.
pub(crate) fn set<T>(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the value, and what a filter points at, live across the call; the kernel copies them.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const *value).cast(),
            size_of::<T>() as u32,
        )
    };
    done(rc)
}

/// From now on it hears every frame of that device, or of all in this network namespace.
pub(crate) fn bind(socket: &OwnedFd, device: Option<&str>) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: device.map_or(Ok(0), index_of)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address lives across the call and has the length that is said.
    let rc = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as u32,
        )
    };
    done(rc)
}

fn index_of(device: &str) -> io::Result<libc::c_int> {
    let name = CString::new(device)?;
    // SAFETY: a name that ends with zero.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index as libc::c_int),
    }
}

fn done(rc: libc::c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
