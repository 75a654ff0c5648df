//! Small wrappers over the kernel's calls that the rest of the crate shares.
//!
//! Decides:    nothing. Flow: used by every module that owns a descriptor.
//! Invariants: 1. every descriptor made here is close-on-exec; 2. a wait has a deadline.
//! Source:     memfd_create(2), F_ADD_SEALS of fcntl(2), poll(2), unix(7).
//! Not here:   ioctls of one purpose only (they stand beside their use).

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// An unlinked file in memory.
pub fn memfd(name: &str) -> io::Result<File> {
    Ok(File::from(memfd_create(name, MemfdFlags::CLOEXEC)?))
}

/// An unlinked file in memory of that size, all holes, which nobody can make shorter or longer, whoever has it: who maps it would be killed by what lies past its end.
pub fn memfd_of(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// An unlinked file in memory with this content, its offset at the start.
pub fn memfd_with(name: &str, content: &mut impl Read) -> io::Result<File> {
    let mut file = memfd(name)?;
    io::copy(content, &mut file)?;
    file.flush()?;
    file.rewind()?;
    Ok(file)
}

/// Waits until `fd` is readable or the deadline has passed; says which.
pub fn wait_readable(fd: BorrowedFd<'_>, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Round up: a poll of 0 ms would spin for the last fraction of a millisecond.
        let millis = (left + Duration::from_micros(999))
            .as_millis()
            .min(i32::MAX as u128) as i32;
        let mut waited = libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd on the stack.
        match unsafe { libc::poll(&mut waited, 1, millis) } {
            0 if left.is_zero() => return Ok(false),
            0 => continue,
            n if n > 0 => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Receives one descriptor by SCM_RIGHTS, blocking until a message or the end of the socket comes.
pub fn receive_descriptor(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut byte = 0u8;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // 64 bytes, aligned as cmsghdr wants, are more than CMSG_SPACE(4).
    let mut control = [0u64; 8];
    // SAFETY: an all-zero msghdr is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the message points at live buffers of the given lengths.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    match received {
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        n if n < 0 => return Err(io::Error::last_os_error()),
        _ => {}
    }
    // SAFETY: the kernel filled the control buffer; the macros stay inside msg_controllen.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null()
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || (*header).cmsg_level != libc::SOL_SOCKET
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message without a descriptor",
            ));
        }
        Ok(OwnedFd::from_raw_fd(
            libc::CMSG_DATA(header).cast::<i32>().read_unaligned(),
        ))
    }
}

/// An `int` answered by an ioctl on a socket (FIONREAD, SIOCOUTQ).
pub fn socket_queue_bytes(fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut bytes) } {
        0 => Ok(bytes as u32),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A buffer of so many bytes and more goes back to the kernel as soon as it is freed.
const MAPPED_BYTES: libc::c_int = 512 << 10;

/// Large buffers are mapped for themselves. Without that glibc takes the largest one that was ever freed for what is usual, keeps
/// up to its double for each thread that came and went, and a daemon grows with every join (`mallopt(3)`, `M_MMAP_THRESHOLD`).
/// What is made while a VM stands is to be kept by its owner. To be called once, before there are threads.
pub fn map_large_buffers() {
    // SAFETY: a number for the allocator; no memory of ours is touched.
    let taken = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES) };
    debug_assert_eq!(taken, 1);
}
