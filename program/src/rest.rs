//! Whether the processes of a copy are done with what they have read: all of their threads sleep.
//!
//! A thread that hands work to another one has woken it before it sleeps itself, so there is no moment between the two in which all sleep.
//!
//! Decides:    nothing.
//! Invariants: 1. whatever cannot be seen is no rest. A thread that sleeps for a while of its own accord, and would then go on, is taken for one
//!             that is done; 2. one that sleeps until this host answers its call (`answers`) is at work: the kernel shows it as it shows who waits for
//!             an input, until its call is taken up.
//! Source:     proc(5): `stat`, `children`, `syscall`. Not here: what waits for rest (`dunlin_core::program::order`).

use crate::inside::filter::ANSWERED;
use crate::proc::{has_gone, text};
use std::fs;
use std::io;

/// The program's first processes: those that its copy's own first process has started, the only child of this one. None where there is no such copy.
fn first_of(keeper: u32) -> io::Result<Option<Vec<u32>>> {
    let mut all = Vec::new();
    // Invariant 1: it has one as long as there is something to look at.
    if children(keeper, keeper)?.is_empty() {
        return Ok(None);
    }
    for first in children(keeper, keeper)? {
        all.extend(children(first, first)?);
    }
    Ok(Some(all))
}

/// Whether all processes of the copy whose first process is the only child of this one are.
pub(crate) fn is_at_rest(keeper: u32) -> io::Result<bool> {
    first_of(keeper)?.map_or(Ok(false), sleep)
}

/// All processes of the program of that copy.
pub(crate) fn processes(keeper: u32) -> io::Result<Vec<u32>> {
    let mut all = first_of(keeper)?.unwrap_or_default();
    let mut next = 0;
    while let Some(process) = all.get(next).copied() {
        next += 1;
        for thread in threads(process)? {
            all.extend(children(process, thread)?);
        }
    }
    Ok(all)
}

fn threads(process: u32) -> io::Result<Vec<u32>> {
    let found = gone_is_none(fs::read_dir(format!("/proc/{process}/task")))?;
    let names = found
        .into_iter()
        .flatten()
        .flatten()
        .map(|thread| thread.file_name());
    Ok(names.filter_map(|name| name.to_str()?.parse().ok()).collect())
}

/// These, and all that they have started.
fn sleep(mut to_look_at: Vec<u32>) -> io::Result<bool> {
    while let Some(process) = to_look_at.pop() {
        for thread in threads(process)? {
            let path = format!("/proc/{process}/task/{thread}/stat");
            let Some(stat) = gone_is_none(text(&path))? else {
                continue;
            };
            if !sleeps(&stat) || is_to_be_answered(process, thread)? {
                return Ok(false);
            }
            to_look_at.extend(children(process, thread)?);
        }
    }
    Ok(true)
}

/// Invariant 2. Of themselves these calls wait for nothing.
fn is_to_be_answered(process: u32, thread: u32) -> io::Result<bool> {
    match gone_is_none(text(format!("/proc/{process}/task/{thread}/syscall"))) {
        Ok(line) => Ok(line.as_deref().is_some_and(is_answered)),
        // Invariant 1.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(true),
        Err(error) => Err(error),
    }
}

/// By the number that the line begins with; one that waits in no call has a word or -1 there.
fn is_answered(line: &str) -> bool {
    let number = line.split_whitespace().next().and_then(|word| word.parse().ok());
    number.is_some_and(|number| ANSWERED.contains(&number))
}

fn children(process: u32, thread: u32) -> io::Result<Vec<u32>> {
    let all = gone_is_none(text(format!("/proc/{process}/task/{thread}/children")))?;
    let words = all.as_deref().unwrap_or_default().split_whitespace();
    Ok(words.filter_map(|word| word.parse().ok()).collect())
}

/// What has ended meanwhile does nothing.
fn gone_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if has_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// By the letter behind the name, which may have any characters in it. A zombie does nothing either.
fn sleeps(stat: &str) -> bool {
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with(['S', 'Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inside::filter::Filter;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_that_runs_or_waits_for_a_disk_is_not_done() {
        assert!(sleeps("7 (redis) S 1 7"));
        assert!(sleeps("7 (a) R (b) S 1 7"), "its name is odd");
        assert!(!sleeps("7 (redis) R 1 7"));
        assert!(!sleeps("7 (redis) D 1 7"));
        assert!(!sleeps("7 (redis) T 1 7"), "it stands still, and is not done");
        assert!(!sleeps("nonsense"));
    }

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("/bin/bash");
        shell.args(["-c", script]).stdin(Stdio::piped());
        shell
    }

    fn is_found(script: &str, wanted: bool) {
        let mut program = shell(script).spawn().expect("a shell");
        let until = Instant::now() + Duration::from_secs(20);
        let look = || sleep(vec![program.id()]).expect("proc");
        // It is still being started.
        let found = loop {
            let found = look();
            if found == wanted || Instant::now() > until {
                break found;
            }
            std::thread::yield_now();
        };
        program.kill().expect("it runs");
        program.wait().expect("it ends");
        assert_eq!(found, wanted, "{script}");
    }

    #[test]
    fn a_program_is_at_rest_while_it_waits_and_not_while_a_child_of_it_works() {
        is_found("read", true);
        // It ends with its parent's standard input, which nobody else has.
        is_found("(while ! read -t 0; do :; done) <&0 & wait $!", false);
    }

    /// The tester's redis, which asked for the time: on a busy machine its call was taken up milliseconds later, it counted as at rest without an
    /// answer, and the next input came with the next time.
    #[test]
    fn a_program_whose_call_nobody_has_taken_up_yet_is_at_work() {
        let filter = Filter::new(true, false);
        let mut asks = shell("echo $SRANDOM; read");
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            asks.pre_exec(move || {
                nix::sys::prctl::set_no_new_privs()?;
                let listener = filter.install()?.expect("it listens");
                // It holds this itself, and so asks nobody, for ever.
                rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty())?;
                std::mem::forget(listener);
                Ok(())
            });
        }
        let mut asks = asks.spawn().expect("a shell");
        let until = Instant::now() + Duration::from_secs(20);
        let process = asks.id();
        let stat = || text(format!("/proc/{process}/stat")).expect("it runs");
        let asked = || text(format!("/proc/{process}/syscall")).is_ok_and(|line| is_answered(&line));
        while !(sleeps(&stat()) && asked()) && Instant::now() < until {
            std::thread::yield_now();
        }
        let (seems, found) = (sleeps(&stat()), sleep(vec![process]).expect("proc"));
        asks.kill().expect("it runs");
        asks.wait().expect("it ends");
        assert!(seems, "it waits for its call's answer");
        assert!(!found, "and goes on when it has that");
    }

    #[test]
    fn a_call_is_known_by_its_number() {
        assert!(is_answered("228 0x0 0x7ffc 0x0 0x0 0x0 0x0 0x7ffd 0x7f01\n"));
        assert!(!is_answered("232 0x5 0x7ffc 0x0 0x0 0x0 0x0 0x7ffd 0x7f01\n"));
        assert!(!is_answered("running\n"));
        assert!(!is_answered("-1 0x7ffd 0x7f01\n"));
        assert!(!is_answered(""));
    }
}
