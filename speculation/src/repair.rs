//! A socket put into the middle of a connection (TCP_REPAIR).
//!
//! Decides:    the order of the options, each of which needs the ones before it.
//! Invariants: 1. when `establish` returns the socket is established, has said nothing, and believes that the byte before the first was
//!                not sent yet. 2. `vanish` ends it without a word.
//! Source:     net/ipv4/tcp.c; CRIU's page on TCP_REPAIR.
//! Not here:   which numbers.

use super::congestion;
use dunlin_core::speculation::Socket;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

const TCP_REPAIR: libc::c_int = 19;
const TCP_REPAIR_QUEUE: libc::c_int = 20;
const TCP_QUEUE_SEQ: libc::c_int = 21;
const TCP_REPAIR_OPTIONS: libc::c_int = 22;
const TCP_TIMESTAMP: libc::c_int = 24;
const TCP_REPAIR_WINDOW: libc::c_int = 29;
const NO_QUEUE: libc::c_int = 0;
const RECV_QUEUE: libc::c_int = 1;
const SEND_QUEUE: libc::c_int = 2;
/// Ends the repair without the window probe that the kernel would send.
const REPAIR_OFF_NO_WP: libc::c_int = -1;
const IPV6_2292PKTOPTIONS: libc::c_int = 6;
const IPV6_2292HOPLIMIT: libc::c_int = 8;
const IPV6_TRANSPARENT: libc::c_int = 75;
/// What the kernel may keep of one stream: more is written when there is room.
const SEND_BUFFER_BYTES: libc::c_int = 4 << 20;

/// `struct tcp_repair_opt`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RepairOption {
    code: u32,
    value: u32,
}

/// `struct tcp_repair_window`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RepairWindow {
    snd_wl1: u32,
    snd_wnd: u32,
    max_window: u32,
    rcv_wnd: u32,
    rcv_wup: u32,
}

/// `struct cmsghdr` with a hop limit.
#[repr(C)]
#[derive(Clone, Copy)]
struct HopLimit {
    length: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: libc::c_int,
    padding: libc::c_int,
}

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {error}")]
pub struct RepairError {
    step: &'static str,
    error: io::Error,
}

/// Sets an option to the bytes of `values`.
fn set<T: Copy>(socket: &OwnedFd, level: libc::c_int, name: libc::c_int, values: &[T]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of_val(values)).map_err(io::Error::other)?;
    // SAFETY: `values` lives through the call and is `length` bytes long; the kernel copies it. Its types are `repr(C)` or numbers.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, values.as_ptr().cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The socket `spec` in the network namespace of the calling thread.
///
/// # Errors
/// The step that failed: CAP_NET_ADMIN is missing, or the namespace has a socket between these ends.
pub(crate) fn establish(spec: &Socket) -> Result<OwnedFd, RepairError> {
    let fail = |step| move |error| RepairError { step, error };
    let v6 = spec.flow.vm.is_ipv6();
    let family = if v6 {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)
        .map_err(|error| fail("a socket")(error.into()))?;
    let tcp = |name, value: libc::c_int| set(&socket, libc::IPPROTO_TCP, name, &[value]);

    set(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, &[1_i32]).map_err(fail("SO_REUSEADDR"))?;
    match v6 {
        true => set(&socket, libc::IPPROTO_IPV6, IPV6_TRANSPARENT, &[1_i32]),
        false => set(&socket, libc::IPPROTO_IP, libc::IP_TRANSPARENT, &[1_i32]),
    }
    .map_err(fail("IP_TRANSPARENT (CAP_NET_ADMIN is missing)"))?;
    set(
        &socket,
        libc::SOL_SOCKET,
        libc::SO_SNDBUFFORCE,
        &[SEND_BUFFER_BYTES],
    )
    .map_err(fail("SO_SNDBUFFORCE"))?;
    tcp(libc::TCP_NODELAY, 1).map_err(fail("TCP_NODELAY"))?;
    congestion::begin(&socket).map_err(fail("TCP_CONGESTION"))?;

    tcp(TCP_REPAIR, 1).map_err(fail("TCP_REPAIR"))?;
    let sequences = [
        (SEND_QUEUE, spec.start.wrapping_sub(1)),
        (RECV_QUEUE, spec.peer_start),
    ];
    for (queue, number) in sequences {
        tcp(TCP_REPAIR_QUEUE, queue).map_err(fail("TCP_REPAIR_QUEUE"))?;
        set(&socket, libc::IPPROTO_TCP, TCP_QUEUE_SEQ, &[number]).map_err(fail("TCP_QUEUE_SEQ"))?;
    }
    tcp(TCP_REPAIR_QUEUE, NO_QUEUE).map_err(fail("TCP_REPAIR_QUEUE"))?;

    net::bind(&socket, &spec.flow.vm).map_err(|error| fail("bind")(error.into()))?;
    net::connect(&socket, &spec.flow.peer).map_err(|error| fail("connect")(error.into()))?;

    let mut options = vec![RepairOption {
        code: 2,
        value: u32::from(spec.mss),
    }];
    if let Some((snd, rcv)) = spec.scale {
        options.push(RepairOption {
            code: 3,
            value: u32::from(snd) | u32::from(rcv) << 16,
        });
    }
    if spec.sack {
        options.push(RepairOption { code: 4, value: 0 });
    }
    if spec.stamp.is_some() {
        options.push(RepairOption { code: 8, value: 0 });
    }
    set(&socket, libc::IPPROTO_TCP, TCP_REPAIR_OPTIONS, &options).map_err(fail("TCP_REPAIR_OPTIONS"))?;
    resync_mss(&socket, v6).map_err(fail("IP_OPTIONS"))?;
    if let Some(stamp) = spec.stamp {
        set(&socket, libc::IPPROTO_TCP, TCP_TIMESTAMP, &[stamp & !1]).map_err(fail("TCP_TIMESTAMP"))?;
    }
    let window = RepairWindow {
        snd_wl1: spec.peer_start,
        snd_wnd: spec.window,
        max_window: spec.window.max(1),
        rcv_wnd: 65535,
        rcv_wup: spec.peer_start,
    };
    set(&socket, libc::IPPROTO_TCP, TCP_REPAIR_WINDOW, &[window]).map_err(fail("TCP_REPAIR_WINDOW"))?;
    tcp(TCP_REPAIR, REPAIR_OFF_NO_WP).map_err(fail("the end of TCP_REPAIR"))?;
    Ok(socket)
}

/// The segment size stays at the smallest until something makes the kernel compute it anew, which costs two rounds of slow start.
fn resync_mss(socket: &OwnedFd, v6: bool) -> io::Result<()> {
    if !v6 {
        return set::<u8>(socket, libc::IPPROTO_IP, libc::IP_OPTIONS, &[]);
    }
    let limit = HopLimit {
        length: size_of::<HopLimit>() - size_of::<libc::c_int>(),
        level: libc::IPPROTO_IPV6,
        kind: IPV6_2292HOPLIMIT,
        value: 64,
        padding: 0,
    };
    // Older kernels refuse it: slower at first, and right.
    if set(socket, libc::IPPROTO_IPV6, IPV6_2292PKTOPTIONS, &[limit]).is_ok() {
        set::<u8>(socket, libc::IPPROTO_IPV6, IPV6_2292PKTOPTIONS, &[])?;
    }
    Ok(())
}

/// Ends the socket without a word.
pub(crate) fn vanish(socket: OwnedFd) {
    // A socket in repair sends neither FIN nor RST when it is closed. One that the kernel has ended already refuses, and says nothing either.
    let _ended = set(&socket, libc::IPPROTO_TCP, TCP_REPAIR, &[1_i32]);
    drop(socket);
}

/// Why the kernel gave the socket up.
pub(crate) fn error_of(socket: impl AsFd) -> Option<io::Error> {
    match net::sockopt::socket_error(socket) {
        Ok(Ok(())) => None,
        Ok(Err(error)) | Err(error) => Some(error.into()),
    }
}
