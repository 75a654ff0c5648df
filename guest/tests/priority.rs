//! The first thread that has something started may go before all others; what it starts may not.

use std::process::{Command, Stdio};

use dunlin_guest::qemu::spawn::spawn;

/// Nice value and scheduling policy of a process, as proc(5) has them.
fn scheduling(pid: u32) -> (i64, i64) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    // The third field comes first here.
    let field = |number: usize| {
        rest.split_ascii_whitespace()
            .nth(number - 3)
            .unwrap()
            .parse()
            .unwrap()
    };
    (field(19), field(41))
}

#[test]
fn what_is_started_has_the_daemons_priority_and_not_its_threads() {
    let own = scheduling(std::process::id());
    let asked = std::thread::spawn(move || {
        // As the loop of a VM does, and as a thread does that must never be late.
        rustix::process::setpriority_process(None, -15).unwrap();
        let parameter = libc::sched_param { sched_priority: 1 };
        // SAFETY: a live structure; 0 is the calling thread.
        let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) };
        if result != 0 {
            eprintln!(
                "only with a nice value: no real-time scheduling here: {}",
                std::io::Error::last_os_error()
            );
        }
        let mut command = Command::new("sleep");
        command.arg("60").stdin(Stdio::null());
        spawn(command, vec![], None).unwrap()
    });
    let mut child = asked.join().unwrap();
    let its = scheduling(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(its, own, "nice value and scheduling policy");
}
