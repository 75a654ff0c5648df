//! Which system calls of the program are not the kernel's business alone.
//!
//! Decides:    what is not there: io_uring (its reads are no reads that `rqueue` tells of, and no dump can hold them); user namespaces, in which a
//!             program that is root would have rights over its own limits (cgroups v1); the kernel's keys and AF_VSOCK, which are the whole host's and
//!             no namespace's; huge pages of the host's pool, which no limit counts. Which calls the tester answers.
//! Flow:       between fork and exec of the program -> the kernel; the listener -> tester.
//! Invariants: 1. it holds for everything that the program starts; 2. another architecture's numbers are refused, so that they
//!             are no way around it.
//! Source:     seccomp(2), seccomp_unotify(2). Not here: the answers (`crate::answers`).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Numbers from here on are the x32 ABI's.
const X32: u32 = 0x4000_0000;
/// Where `struct seccomp_data` has the number and the architecture.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
/// The lower half of the first argument; the next ones follow each other by eight bytes.
const ARGUMENTS: u32 = 16;

/// A signal does not take back a call that is being answered: what was drawn for it would be lost to one copy alone.
pub(crate) const LISTENS: libc::c_ulong =
    libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
const SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;

const IO_URING: [libc::c_long; 3] = [
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];
const CLOCK: [libc::c_long; 3] = [libc::SYS_clock_gettime, libc::SYS_gettimeofday, libc::SYS_time];
/// What may be asked of the listener.
pub(crate) const ANSWERED: [libc::c_long; 4] = [libc::SYS_getrandom, CLOCK[0], CLOCK[1], CLOCK[2]];

/// The keys of a user are the same in all namespaces but a user's.
const KEYS: [libc::c_long; 3] = [libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key];

/// A call that is refused by one of its arguments: its number, which argument (the first is 0), how that is looked at, and the error.
const REFUSED: [(libc::c_long, u32, Looks, i32); 6] = [
    (
        libc::SYS_unshare,
        0,
        Looks::Has(libc::CLONE_NEWUSER as u32),
        libc::EPERM,
    ),
    (
        libc::SYS_clone,
        0,
        Looks::Has(libc::CLONE_NEWUSER as u32),
        libc::EPERM,
    ),
    (
        libc::SYS_socket,
        0,
        Looks::Is(libc::AF_VSOCK as u32),
        libc::EAFNOSUPPORT,
    ),
    // As where the pool is empty.
    (
        libc::SYS_mmap,
        3,
        Looks::Has(libc::MAP_HUGETLB as u32),
        libc::ENOMEM,
    ),
    (
        libc::SYS_memfd_create,
        1,
        Looks::Has(libc::MFD_HUGETLB),
        libc::ENOMEM,
    ),
    (
        libc::SYS_shmget,
        2,
        Looks::Has(libc::SHM_HUGETLB as u32),
        libc::ENOMEM,
    ),
];

#[derive(Clone, Copy)]
enum Looks {
    /// One of these bits is set.
    Has(u32),
    /// It is this.
    Is(u32),
}

/// The filter as the kernel takes it; made before the fork.
pub(crate) struct Filter {
    program: Vec<libc::sock_filter>,
    listens: bool,
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

/// Goes on with the next statement where the accumulator is `k`, else skips it.
fn only_if_equal(k: u32) -> libc::sock_filter {
    libc::sock_filter {
        jf: 1,
        ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k)
    }
}

impl Filter {
    /// Refuses what is not there; asks the listener about chance and the clock, where they are agreed.
    pub(crate) fn new(chance: bool, clock: bool) -> Self {
        let answer = |action| statement(libc::BPF_RET | libc::BPF_K, action);
        let not_there = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        let load = |at| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at);
        let mut program = vec![load(ARCH)];
        let is_native = libc::sock_filter {
            jt: 1,
            ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, AUDIT_ARCH_X86_64)
        };
        program.extend([is_native, answer(not_there), load(NUMBER)]);
        let is_x32 = libc::sock_filter {
            jf: 1,
            ..statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32)
        };
        program.extend([is_x32, answer(not_there)]);
        let mut rule = |number: libc::c_long, action| {
            program.extend([only_if_equal(number as u32), answer(action)]);
        };
        IO_URING
            .iter()
            .chain(&KEYS)
            .for_each(|number| rule(*number, not_there));
        // Its flags lie in memory, where a filter cannot look. Who calls it goes on with clone(2).
        rule(libc::SYS_clone3, not_there);
        if chance {
            rule(libc::SYS_getrandom, libc::SECCOMP_RET_USER_NOTIF);
        }
        if clock {
            CLOCK
                .iter()
                .for_each(|number| rule(*number, libc::SECCOMP_RET_USER_NOTIF));
        }
        for (number, argument, looks, error) in REFUSED {
            let (code, k) = match looks {
                Looks::Has(bits) => (libc::BPF_JSET, bits),
                Looks::Is(value) => (libc::BPF_JEQ, value),
            };
            let only_if = libc::sock_filter {
                jf: 1,
                ..statement(libc::BPF_JMP | code | libc::BPF_K, k)
            };
            program.extend([
                libc::sock_filter {
                    jf: 4,
                    ..only_if_equal(number as u32)
                },
                load(ARGUMENTS + 8 * argument),
                only_if,
                answer(libc::SECCOMP_RET_ERRNO | error as u32),
                load(NUMBER),
            ]);
        }
        program.push(answer(libc::SECCOMP_RET_ALLOW));
        Self {
            program,
            listens: chance || clock,
        }
    }

    /// As the kernel takes them, one after the other: eight bytes each.
    pub(crate) fn statements(&self) -> Vec<u8> {
        let bytes = |of: &libc::sock_filter| {
            let mut bytes = [0; 8];
            bytes[..2].copy_from_slice(&of.code.to_ne_bytes());
            (bytes[2], bytes[3]) = (of.jt, of.jf);
            bytes[4..].copy_from_slice(&of.k.to_ne_bytes());
            bytes
        };
        self.program.iter().flat_map(bytes).collect()
    }

    /// From now on this process and all that it starts are filtered. The listener, if something listens.
    pub(crate) fn install(&self) -> io::Result<Option<OwnedFd>> {
        let program = libc::sock_fprog {
            len: self.program.len() as u16,
            filter: self.program.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel reads the filter, which outlives the call.
        let install = |flags: libc::c_ulong| unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            )
        };
        let result = match self.listens {
            false => install(0),
            // Linux before 5.19 does not know it.
            true => match install(LISTENS) {
                ..0 => install(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER),
                fd => fd,
            },
        };
        match result {
            ..0 => Err(io::Error::last_os_error()),
            // SAFETY: the kernel has just made it for us.
            fd if self.listens => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })),
            _ => Ok(None),
        }
    }
}
