//! A TAP in the current network namespace: the VM's door to the host's bridge.
//!
//! Decides:    nothing.
//! Flow:       bridge -> TAP -> node (proposes); node (released) -> TAP -> bridge.
//! Invariants: 1. not persistent: it vanishes with its descriptor, so also with a killed daemon.
//! Source:     Documentation/networking/tuntap.rst; netdevice(7); the bridge's SIOCBRADDIF.
//! Not here:   addresses: the TAP has none of its own.

use std::ffi::c_char;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use super::rx_filter::ADDRESSES_MAX;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
const TUNSETTXFILTER: libc::Ioctl = 0x4004_54d1;
const SIOCBRADDIF: libc::Ioctl = 0x89a2;

/// The kernel's `struct tun_filter`.
#[repr(C)]
struct TunFilter {
    flags: u16,
    count: u16,
    addresses: [[u8; 6]; ADDRESSES_MAX],
}

/// Every multicast address passes, and so does broadcast.
const TUN_FLT_ALLMULTI: u16 = 1;

/// What the kernel may leave to us: checksums, and TCP over IPv4 and IPv6 in large frames, also where the congestion window was reduced (linux/if_tun.h).
const TUN_OFFLOADS: libc::c_ulong = 1 | 2 | 4 | 8;

/// Why there is no TAP.
#[derive(Debug, thiserror::Error)]
#[error("TAP {name:?}: {step}: {error}{hint}")]
pub struct TapError {
    name: String,
    step: &'static str,
    error: io::Error,
    hint: &'static str,
}

/// A TAP without packet information; a read is one frame, a write is one frame.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
}

impl Tap {
    /// Makes the TAP `name` (`dunlin%d`: the kernel counts), puts it into `bridge`, and switches it on. Not blocking.
    pub fn open(name: &str, bridge: Option<&str>) -> Result<Tap, TapError> {
        Tap::make(name, bridge, false)
    }

    /// The same with a header before each frame (`virtio_net_hdr`, 10 bytes), and the kernel leaves checksums and segmentation to us: a read and a write
    /// are a header and a frame.
    pub fn open_with_offloads(name: &str, bridge: Option<&str>) -> Result<Tap, TapError> {
        Tap::make(name, bridge, true)
    }

    fn make(name: &str, bridge: Option<&str>, offloads: bool) -> Result<Tap, TapError> {
        let fail = |step, hint| {
            move |error| TapError {
                name: name.to_owned(),
                step,
                error,
                hint,
            }
        };
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(fail("/dev/net/tun", " (load the module: modprobe tun)"))?;
        let mut request = request_for(name).map_err(fail("its name", ""))?;
        let header = if offloads { libc::IFF_VNET_HDR } else { 0 };
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | header) as i16;
        ioctl(file.as_raw_fd(), TUNSETIFF, &mut request).map_err(fail(
            "making it",
            " (the name is in use, or CAP_NET_ADMIN is missing)",
        ))?;
        let name: String = request
            .ifr_name
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| *c as u8 as char)
            .collect();
        let fail = |step, hint| {
            let name = name.clone();
            move |error| TapError {
                name,
                step,
                error,
                hint,
            }
        };
        if offloads {
            // SAFETY: its argument is a number.
            if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, TUN_OFFLOADS) } == -1 {
                return Err(fail("its offloads", "")(io::Error::last_os_error()));
            }
        }
        let control = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| fail("a control socket", "")(e.into()))?;
        let mut tap_request = request_for(&name).map_err(fail("its name", ""))?;
        if let Some(bridge) = bridge {
            ioctl(control.as_raw_fd(), libc::SIOCGIFINDEX, &mut tap_request)
                .map_err(fail("its index", ""))?;
            let mut bridge_request = request_for(bridge).map_err(fail("the bridge's name", ""))?;
            // SAFETY: SIOCGIFINDEX has just filled the index.
            bridge_request.ifr_ifru.ifru_ifindex = unsafe { tap_request.ifr_ifru.ifru_ifindex };
            ioctl(control.as_raw_fd(), SIOCBRADDIF, &mut bridge_request).map_err(fail(
                "joining the bridge",
                " (is vm.nics.bridge the name of a bridge on this host? ip link add br0 type bridge)",
            ))?;
        }
        ioctl(control.as_raw_fd(), libc::SIOCGIFFLAGS, &mut tap_request).map_err(fail("its flags", ""))?;
        // SAFETY: SIOCGIFFLAGS has just filled the flags.
        unsafe { tap_request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16 };
        ioctl(control.as_raw_fd(), libc::SIOCSIFFLAGS, &mut tap_request)
            .map_err(fail("switching it on", ""))?;
        Ok(Tap { file, name })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// From now on only frames to one of these addresses come by it, and to many; without an address every frame does. At most
    /// [`ADDRESSES_MAX`].
    pub fn set_rx_filter(&self, addresses: &[[u8; 6]]) -> io::Result<()> {
        let mut filter = TunFilter {
            flags: TUN_FLT_ALLMULTI,
            count: addresses.len() as u16,
            addresses: [[0; 6]; ADDRESSES_MAX],
        };
        filter.addresses[..addresses.len()].copy_from_slice(addresses);
        // SAFETY: the kernel reads the header and as many addresses as it counts.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETTXFILTER, &raw const filter) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// The next frame, into `buffer`; `None` when there is none.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.file).read(buffer) {
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends one frame. False when the kernel had no room: the frame is lost, as on any wire.
    pub fn write(&self, frame: &[u8]) -> io::Result<bool> {
        self.write_pieces(&[IoSlice::new(frame)])
    }

    /// The same of a frame in pieces.
    pub(super) fn write_pieces(&self, frame: &[IoSlice<'_>]) -> io::Result<bool> {
        match (&self.file).write_vectored(frame) {
            Ok(_) => Ok(true),
            Err(e)
                if matches!(e.kind(), io::ErrorKind::WouldBlock)
                    || e.raw_os_error() == Some(libc::ENOBUFS) =>
            {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

fn request_for(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "an interface's name has 1 to 15 characters",
        ));
    }
    request
        .ifr_name
        .iter_mut()
        .zip(name.bytes())
        .for_each(|(to, from)| *to = from as c_char);
    Ok(request)
}

fn ioctl(fd: RawFd, number: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: all requests used here take a struct ifreq.
    match unsafe { libc::ioctl(fd, number, std::ptr::from_mut(request)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
pub(super) mod tests;
