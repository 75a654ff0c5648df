//! What the poor servers of `program.rs` say of their processor, and of what they see; what the tester is given that they must not have.

use crate::skipped::skip;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySets, capabilities, set_capabilities};
use std::fs;

/// The processor's own clock, by RDTSC and by RDTSCP.
pub fn time_stamp() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut processor = 0;
        // SAFETY: they read a counter, and a processor's number.
        unsafe { core::arch::x86_64::_rdtsc() + core::arch::x86_64::__rdtscp(&raw mut processor) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// What it sees and may do, on its standard output.
pub fn tell() {
    let status = fs::read_to_string("/proc/self/status").expect("/proc");
    let words = ["NoNewPrivs:", "CapInh:", "CapEff:", "CapBnd:", "Pid:"];
    for line in status
        .lines()
        .filter(|line| words.iter().any(|word| line.starts_with(word)))
    {
        println!("{line}");
    }
    // SAFETY: a refused call touches nothing; one that is not has an empty structure to write to.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, [0_u8; 256].as_mut_ptr()) };
    println!("ring {ring} {:?}", std::io::Error::last_os_error().raw_os_error());
    println!("refused {:?}", refused());
    // To what it is: where it were the host's, nothing would happen to it.
    let same = fs::metadata("/dev/null").map(|about| about.permissions());
    let set = same.and_then(|same| fs::set_permissions("/dev/null", same));
    println!("mode of null {:?}", set.map_err(|error| error.raw_os_error()));
    let null = fs::File::options().read(true).write(true).open("/dev/null");
    println!("writes to null {}", null.is_ok());
    println!(
        "host {}",
        fs::read_to_string("/proc/sys/kernel/hostname")
            .expect("its name")
            .trim()
    );
    println!("wrote {:?}", fs::write("/etc/dunlin-was-here", "x").is_ok());
    let limits = fs::read_to_string("/proc/self/limits").expect("its limits");
    let limit = |name: &str| -> Vec<String> {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        let words = line.expect(name).split_whitespace().take(2);
        words.map(str::to_owned).collect()
    };
    println!("nice {:?}", limit("Max nice priority"));
    println!("real time {:?}", limit("Max realtime priority"));
    let locks = limit("Max locked memory");
    let is_little = |bytes: &String| bytes.parse::<u64>().is_ok_and(|bytes| bytes <= 8 << 20);
    println!("locks little {}", locks.iter().all(is_little));
    let score = fs::read_to_string("/proc/self/oom_score_adj").expect("its score");
    println!("goes last {}", score.starts_with('-'));
    println!("writable {:?}", writable());
    println!(
        "disks {:?}",
        fs::metadata("/dev/sda").is_ok() || fs::metadata("/dev/vda").is_ok()
    );
}

/// The errors of calls that are not for it: a user namespace in two ways, the kernel's keys, a socket to the machine's own host, huge pages, clone3.
fn refused() -> Vec<i32> {
    let errors = |call: &dyn Fn() -> libc::c_long| match call() {
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
        _ => 0,
    };
    // SAFETY: each is refused before it has done anything; where one is not, it makes a namespace of this test's process, or a descriptor that ends with it.
    unsafe {
        [
            errors(&|| libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER)),
            errors(&|| {
                libc::syscall(
                    libc::SYS_clone,
                    libc::CLONE_NEWUSER | libc::CLONE_THREAD,
                    0,
                    0,
                    0,
                    0,
                )
            }),
            errors(&|| libc::syscall(libc::SYS_keyctl, 0, -4, 0, 0, 0)),
            errors(&|| libc::syscall(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
            errors(&|| libc::syscall(libc::SYS_memfd_create, c"huge".as_ptr(), libc::MFD_HUGETLB)),
            errors(&|| libc::syscall(libc::SYS_clone3, 0, 0)),
        ]
        .to_vec()
    }
}

/// What of the kernel's can be opened for writing, though nothing is written: the whole host's.
pub fn writable() -> Vec<String> {
    const PROC: [&str; 7] = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/ns_last_pid",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/proc/mtrr",
        "/proc/dynamic_debug/control",
    ];
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("its mounts");
    let mut found: Vec<String> = Vec::new();
    let mut files: Vec<String> = PROC.map(str::to_owned).to_vec();
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (at, options) = (words[4], words[5]);
        let is_reached = at.starts_with("/sys/") || at == "/sys";
        if is_reached && !options.split(',').any(|option| option == "ro") {
            found.push(format!("{at} ({options})"));
        }
        if is_reached {
            files.push(format!("{at}/cgroup.procs"));
        }
    }
    files.retain(|file| fs::File::options().write(true).open(file).is_ok());
    found.append(&mut files);
    found
}

/// As the daemon is by its unit, where this machine lets us; and as one that was started with capabilities to pass on.
pub fn favoured() {
    for (resource, most) in [
        (Resource::Rtprio, Some(50)),
        (Resource::Nice, Some(35)),
        (Resource::Memlock, None),
    ] {
        let limit = Rlimit {
            current: most,
            maximum: most,
        };
        if setrlimit(resource, limit).is_err() {
            skip("a program's limits are tested where they can be raised before");
        }
    }
    // What it is started with is inherited: of this thread, which starts the tester.
    let has = capabilities(None).expect("told");
    let sets = CapabilitySets {
        inheritable: has.permitted,
        ..has
    };
    set_capabilities(None, sets).expect("its own");
}
