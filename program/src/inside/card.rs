//! The card of a namespace: a TAP with an address, and the settings that make all copies behave alike.
//!
//! Decides:    nothing.
//! Flow:       keeper, in its own network namespace -> the TAP's descriptor -> tester.
//! Invariants: 1. nothing speaks by itself on it: no IPv6 discovery, no multipath TCP.
//! Source:     netdevice(7), Documentation/networking/ip-sysctl.rst. Not here: who reads the frames.

use super::{Failure, failed};
use crate::message::Card;
use dunlin_guest::frames::Tap;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::ffi::c_char;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

/// What the card is called inside.
const NAME: &str = "eth0";

/// Makes it.
pub(super) fn make(card: &Card) -> Result<Tap, Failure> {
    // Before the card is there: so it never speaks IPv6. A kernel without one of them has nothing to switch off.
    for (setting, value) in [
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("mptcp/enabled", "0"),
    ] {
        let _ = fs::write(format!("/proc/sys/net/{setting}"), value);
    }
    may_open("/dev/net/tun")?;
    let tap = Tap::open(NAME, None).map_err(|error| error.to_string())?;
    let control = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(failed("a control socket"))?;
    let set = |name: &str, step: &'static str, number, fill: &dyn Fn(&mut libc::ifreq)| {
        set(&control, name, number, fill).map_err(failed(step))
    };
    set("lo", "the loopback", libc::SIOCSIFFLAGS, &|request| {
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    })?;
    // A card's address can be changed while it is down only.
    set(NAME, "its flags", libc::SIOCSIFFLAGS, &|request| {
        request.ifr_ifru.ifru_flags = 0
    })?;
    set(NAME, "its hardware address", libc::SIOCSIFHWADDR, &|request| {
        let mut address = plain(libc::ARPHRD_ETHER, [0; 14]);
        let bytes = address.sa_data.iter_mut().zip(card.mac);
        bytes.for_each(|(to, from)| *to = from as c_char);
        request.ifr_ifru.ifru_hwaddr = address;
    })?;
    set(NAME, "its MTU", libc::SIOCSIFMTU, &|request| {
        request.ifr_ifru.ifru_mtu = i32::from(card.mtu)
    })?;
    address(&control, NAME, card.address, card.prefix).map_err(failed("its address"))?;
    set(NAME, "switching it on", libc::SIOCSIFFLAGS, &|request| {
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    })?;
    if let Some(gateway) = card.gateway {
        route(&control, gateway).map_err(failed("its gateway"))?;
    }
    Ok(tap)
}

/// An ordinary user may, on most hosts.
fn may_open(device: &str) -> Result<(), Failure> {
    match fs::File::options().read(true).write(true).open(device) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(format!(
            "{device}: {error}: run it as root, or let this user open it"
        )),
        // What else is wrong is told by who needs it.
        _ => Ok(()),
    }
}

/// Gives the host's end of a wire, `name`, an address.
pub(crate) fn address_of_host(name: &str, own: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let control = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    address(&control, name, own, prefix)
}

fn address(control: &OwnedFd, name: &str, own: Ipv4Addr, prefix: u8) -> io::Result<()> {
    set(control, name, libc::SIOCSIFADDR, &|request| {
        request.ifr_ifru.ifru_addr = inet(own)
    })?;
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
    set(control, name, libc::SIOCSIFNETMASK, &|request| {
        request.ifr_ifru.ifru_netmask = inet(Ipv4Addr::from_bits(mask));
    })
}

/// Tells this network namespace a neighbour's hardware address: one that it will look at again by itself.
pub(super) fn neighbour(own: Ipv4Addr, hardware: [u8; 6]) -> io::Result<()> {
    let control = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: an all-zero arpreq is valid.
    let mut request: libc::arpreq = unsafe { std::mem::zeroed() };
    request.arp_pa = inet(own);
    request.arp_ha = plain(libc::ARPHRD_ETHER, [0; 14]);
    let bytes = request.arp_ha.sa_data.iter_mut().zip(hardware);
    bytes.for_each(|(to, from)| *to = from as c_char);
    request.arp_flags = libc::ATF_COM;
    let bytes = request.arp_dev.iter_mut().zip(NAME.bytes());
    bytes.for_each(|(to, from)| *to = from as c_char);
    // SAFETY: SIOCSARP reads a struct arpreq.
    match unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCSARP, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn plain(family: u16, data: [c_char; 14]) -> libc::sockaddr {
    libc::sockaddr {
        sa_family: family,
        sa_data: data,
    }
}

/// `address` as a plain sockaddr: two bytes of port, then the address.
fn inet(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    let bytes = data[2..].iter_mut().zip(address.octets());
    bytes.for_each(|(to, from)| *to = from as c_char);
    plain(libc::AF_INET as u16, data)
}

fn set(
    control: &OwnedFd,
    name: &str,
    number: libc::Ioctl,
    fill: &dyn Fn(&mut libc::ifreq),
) -> io::Result<()> {
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = request.ifr_name.iter_mut().zip(name.bytes());
    bytes.for_each(|(to, from)| *to = from as c_char);
    fill(&mut request);
    // SAFETY: all requests used here read a struct ifreq.
    match unsafe { libc::ioctl(control.as_raw_fd(), number, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn route(control: &OwnedFd, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: an all-zero rtentry is valid.
    let mut request: libc::rtentry = unsafe { std::mem::zeroed() };
    request.rt_dst = inet(Ipv4Addr::UNSPECIFIED);
    request.rt_genmask = inet(Ipv4Addr::UNSPECIFIED);
    request.rt_gateway = inet(gateway);
    request.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: SIOCADDRT reads a struct rtentry.
    match unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCADDRT, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
