//! What each thread of the daemon is at: for a loop that stands still, and a daemon that does not answer.
//!
//! **Flow**: the socket says which process listens there -> /proc. **Invariants**: 1. the daemon is not asked and has nothing to do for it. 2. what the
//! kernel does not show is told once, with the reason, and the rest is there. **Source**: proc(5). **Not here**: what is taken out of it (`scrub`).

use super::error::ThreadsError;
use rustix::net::sockopt::socket_peercred;
use std::fmt::Write;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A daemon has some for each VM.
const MOST_THREADS: usize = 4096;

/// The threads of whoever listens at the socket.
pub fn of(socket: &Path) -> Result<Vec<u8>, ThreadsError> {
    let who = UnixStream::connect(socket).and_then(|stream| Ok(socket_peercred(&stream)?));
    let who = who.map_err(|error| ThreadsError::NoDaemon {
        socket: socket.to_owned(),
        error,
    })?;
    let pid = who.pid.as_raw_nonzero();
    told(&PathBuf::from(format!("/proc/{pid}/task")))
}

fn told(tasks: &Path) -> Result<Vec<u8>, ThreadsError> {
    let failed = |error: io::Error| ThreadsError::Tasks {
        tasks: tasks.to_owned(),
        error,
    };
    let mut ids = Vec::new();
    for task in std::fs::read_dir(tasks).map_err(failed)?.take(MOST_THREADS) {
        let name = task.map_err(failed)?.file_name();
        ids.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    ids.sort_unstable();
    let (mut words, mut refusal) = (String::new(), None);
    for id in ids {
        let task = tasks.join(id.to_string());
        let read = |name: &str| std::fs::read_to_string(task.join(name));
        // It may have ended since.
        let (Ok(name), Ok(status)) = (read("comm"), read("status")) else {
            continue;
        };
        let state = status.lines().find_map(|line| line.strip_prefix("State:"));
        let waits = match read("wchan").unwrap_or_default() {
            function if matches!(function.trim(), "" | "0") => "nowhere that the kernel shows".to_owned(),
            function => function,
        };
        // Writing to a String does not fail.
        let _ = writeln!(
            words,
            "{id} {}: {}, waits in {}",
            name.trim_end(),
            state.unwrap_or("state unknown").trim(),
            waits.trim()
        );
        match read("stack") {
            Ok(stack) => stack.lines().for_each(|line| {
                let _ = writeln!(words, "    {line}");
            }),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    let first = match refusal {
        Some(error) => format!("kernel stacks: not to be had: {error}\n"),
        None => String::new(),
    };
    Ok((first + &words).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;

    #[test]
    fn whoever_listens_is_told_thread_by_thread() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        // Nobody takes the connection, as in a daemon that hangs.
        let _listens = UnixListener::bind(&socket).expect("a socket");
        let (ends, waits) = channel::<()>();
        let (begun, begins) = channel();
        let thread = std::thread::Builder::new().name("stands-still".into());
        let thread = thread.spawn(move || {
            begun.send(()).expect("it is waited for");
            waits.recv().expect_err("until the other end is gone");
        });
        begins.recv().expect("it has begun");
        let told = String::from_utf8(of(&socket).expect("our own threads")).expect("text");
        drop(ends);
        thread.expect("a thread").join().expect("it ends");
        let line = told
            .lines()
            .find(|line| line.contains("stands-still: "))
            .expect(&told);
        assert!(line.contains(" (") && line.contains(", waits in "), "{line}");
        // As root the kernel shows its stacks, where it was built to.
        assert!(
            told.contains("[<0>]") || told.starts_with("kernel stacks: not to be had: "),
            "{told}"
        );
    }

    #[test]
    fn nobody_and_a_process_that_has_ended_are_a_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let nobody = of(&folder.path().join("socket"))
            .expect_err("nobody listens")
            .to_string();
        assert!(nobody.starts_with("no daemon answers at "), "{nobody}");
        assert!(told(&folder.path().join("task")).is_err());
    }

    #[test]
    fn what_is_not_shown_is_told_once() {
        let folder = tempfile::tempdir().expect("a folder");
        for (id, name) in [("12", "b"), ("3", "a")] {
            let task = folder.path().join(id);
            std::fs::create_dir(&task).expect("a folder");
            std::fs::write(task.join("comm"), format!("{name}\n")).expect("written");
            std::fs::write(task.join("status"), "Name:\tx\nState:\tS (sleeping)\n").expect("written");
            std::fs::write(task.join("wchan"), "0").expect("written");
        }
        // One that ends while it is looked at.
        std::fs::create_dir(folder.path().join("4")).expect("a folder");
        let told = String::from_utf8(told(folder.path()).expect("two threads")).expect("text");
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines.len(), 3, "{told}");
        assert!(lines[0].starts_with("kernel stacks: not to be had: "));
        assert_eq!(
            lines[1],
            "3 a: S (sleeping), waits in nowhere that the kernel shows"
        );
        assert!(lines[2].starts_with("12 b: "));
    }
}
