//! A TUN or a TAP whose packets carry a virtio-net header.
//!
//! Decides:    nothing.
//! Invariants: 1. not persistent: it goes with its descriptor. 2. what does not fit into the kernel's queue is lost, as on a wire.
//! Source:     Documentation/networking/tuntap.rst; virtio 1.2, 5.1.6.
//! Not here:   addresses and routes.

use dunlin_core::offload::Offload;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;

/// A device made by this process.
#[derive(Debug)]
pub struct Tun {
    file: File,
}

impl Tun {
    /// A TUN (IP packets) in the network namespace of the calling thread; `offload`: the kernel may leave cutting and checksums to
    /// the reader.
    ///
    /// # Errors
    /// Those of /dev/net/tun: CAP_NET_ADMIN is needed.
    pub fn open(name: &str, offload: bool) -> io::Result<Self> {
        Self::make(name, libc::IFF_TUN, offload)
    }

    /// A TAP (Ethernet frames).
    ///
    /// # Errors
    /// As `open`.
    pub fn tap(name: &str, offload: bool) -> io::Result<Self> {
        Self::make(name, libc::IFF_TAP, offload)
    }

    fn make(name: &str, kind: libc::c_int, offload: bool) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        // SAFETY: an all-zero ifreq is valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.is_empty() || name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        // SAFETY: TUNSETIFF takes a struct ifreq, which lives through the call.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let features = match offload {
            true => TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6,
            false => 0,
        };
        // SAFETY: TUNSETOFFLOAD takes a number.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, features) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file })
    }

    /// The next packet with its header, into `buffer`; none if there is none.
    ///
    /// # Errors
    /// Those of read(2), but for EAGAIN.
    pub fn read<'b>(&self, buffer: &'b mut [u8]) -> io::Result<Option<(Offload, &'b [u8])>> {
        match (&self.file).read(buffer) {
            Ok(n) => Ok(buffer[..n]
                .split_first_chunk()
                .map(|(header, packet)| (Offload::read(header), packet))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a packet; false if the kernel had no room for it.
    ///
    /// # Errors
    /// Those of write(2), but for a full queue.
    pub fn write(&self, offload: Offload, packet: &[u8]) -> io::Result<bool> {
        let header = offload.to_bytes();
        let parts = [IoSlice::new(&header), IoSlice::new(packet)];
        match (&self.file).write_vectored(&parts) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EINVAL)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
