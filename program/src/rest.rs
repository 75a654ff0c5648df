//! Whether the processes of a copy are done with what they have read: all of their threads sleep.
//!
//! Each is looked at by itself, and one that was found asleep may have been woken by one that is looked at later. So it is also read, before the
//! first look and after the last one, how much processor time each process has had. If that is the same, and the threads are those of the look
//! before, none of them ran in between, and there was a moment at which all slept. A thread that hands work to another one has woken it before it
//! sleeps itself, so nothing was under way then.
//!
//! Decides:    nothing.
//! Invariants: 1. whatever cannot be seen is no rest. A thread that sleeps for a while of its own accord, and would then go on, is taken for one
//!             that is done; 2. one that sleeps until this host answers its call (`answers`) is at work: the kernel shows it as it shows who waits for
//!             an input, until its call is taken up; 3. a thread that has ended since is no rest: what it did last is in nobody's processor time.
//! Source:     proc(5): `stat`, `children`; `syscall`, which unlike `stat` tells who is on his way to sleep from who sleeps; clock_getcpuclockid(3),
//!             whose clock has all that a thread ran until it slept.
//! Not here:   what waits for rest (`dunlin_core::program::order`).

use crate::inside::filter::ANSWERED;
use crate::proc::{has_gone, text};
use nix::sys::time::TimeSpec;
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use std::fs;
use std::io;

/// What is new is looked at once more, when its time is known.
const LOOKS: usize = 2;

/// The threads that a copy was found to have, each behind its process.
#[derive(Default)]
pub(crate) struct Watcher(Vec<(u32, u32)>);

impl Watcher {
    /// Whether all processes of the copy whose first process is the only child of this one are at rest.
    pub(crate) fn is_at_rest(&mut self, keeper: u32) -> io::Result<bool> {
        self.all_sleep(|| first_of(keeper))
    }

    fn all_sleep(&mut self, first: impl Fn() -> io::Result<Option<Vec<u32>>>) -> io::Result<bool> {
        for _ in 0..LOOKS {
            let before = worked(&self.0);
            let Some(first) = first()? else {
                return Ok(false);
            };
            let Some(found) = asleep(first)? else {
                return Ok(false);
            };
            if found == self.0 {
                // Invariant 1: nobody's time is known who has ended.
                return Ok(!before.contains(&None) && worked(&found) == before);
            }
            self.0 = found;
        }
        Ok(false)
    }
}

/// How much processor time each process has had, all of its threads; none of one that has ended.
fn worked(threads: &[(u32, u32)]) -> Vec<Option<TimeSpec>> {
    let of_one = |process: u32| {
        let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(process).ok()?)).ok()?;
        clock.now().ok()
    };
    let processes = threads.chunk_by(|one, next| one.0 == next.0);
    processes.map(|threads| of_one(threads[0].0)).collect()
}

/// The program's first processes: those that its copy's own first process has started, the only child of this one. None where there is no such copy.
fn first_of(keeper: u32) -> io::Result<Option<Vec<u32>>> {
    let copies = children(keeper, keeper)?;
    // Invariant 1: it has one as long as there is something to look at.
    if copies.is_empty() {
        return Ok(None);
    }
    let mut all = Vec::new();
    for first in copies {
        all.extend(children(first, first)?);
    }
    Ok(Some(all))
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

/// The threads of these, and of all that they have started; none where one does not sleep.
fn asleep(mut to_look_at: Vec<u32>) -> io::Result<Option<Vec<(u32, u32)>>> {
    let mut found = Vec::new();
    while let Some(process) = to_look_at.pop() {
        for thread in threads(process)? {
            let folder = format!("/proc/{process}/task/{thread}");
            let stat = gone_is_none(text(format!("{folder}/stat")))?;
            // Invariant 3.
            if !stat.as_deref().is_some_and(sleeps) || !waits(&folder)? {
                return Ok(None);
            }
            found.push((process, thread));
            to_look_at.extend(children(process, thread)?);
        }
    }
    found.sort_unstable();
    Ok(Some(found))
}

/// Whether it waits, and not for this host's answer (invariant 2): of themselves the calls that are answered here wait for nothing.
fn waits(folder: &str) -> io::Result<bool> {
    match gone_is_none(text(format!("{folder}/syscall"))) {
        Ok(line) => Ok(line.is_some_and(|line| call_of(&line) == Waits::Elsewhere)),
        // Whoever may not look may write no answer either (both are a tracer's right): nobody is asked.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(true),
        Err(error) => Err(error),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Waits {
    ForAnswer,
    Elsewhere,
    /// It runs still, or again.
    NoMore,
}

/// By the number that the line begins with: -1 where it sleeps in no call (a page that is not there yet).
fn call_of(line: &str) -> Waits {
    let word = line.split_whitespace().next().unwrap_or_default();
    match word.parse() {
        Ok(number) if ANSWERED.contains(&number) => Waits::ForAnswer,
        Ok(_) => Waits::Elsewhere,
        Err(_) => Waits::NoMore,
    }
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

/// By the letter behind the name, which may have any characters in it. A zombie does nothing either; the kernel says that it is in no call.
fn sleeps(stat: &str) -> bool {
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with(['S', 'Z']))
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
        let mut watcher = Watcher::default();
        let mut look = || {
            let found = watcher.all_sleep(|| Ok(Some(vec![program.id()])));
            found.expect("proc")
        };
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
        let call = || text(format!("/proc/{process}/syscall"));
        let asked = || call().is_ok_and(|line| call_of(&line) == Waits::ForAnswer);
        while !(sleeps(&stat()) && asked()) && Instant::now() < until {
            std::thread::yield_now();
        }
        let (seems, found) = (
            sleeps(&stat()),
            Watcher::default().all_sleep(|| Ok(Some(vec![process]))),
        );
        asks.kill().expect("it runs");
        asks.wait().expect("it ends");
        assert!(seems, "it waits for its call's answer");
        assert!(!found.expect("proc"), "and goes on when it has that");
    }

    #[test]
    fn a_call_is_known_by_its_number() {
        let waits = [
            ("228 0x0 0x7ffc 0x0 0x0 0x0 0x0 0x7ffd 0x7f01\n", Waits::ForAnswer),
            ("232 0x5 0x7ffc 0x0 0x0 0x0 0x0 0x7ffd 0x7f01\n", Waits::Elsewhere),
            ("-1 0x7ffd 0x7f01\n", Waits::Elsewhere),
            ("running\n", Waits::NoMore),
            ("", Waits::NoMore),
        ];
        for (line, wanted) in waits {
            assert_eq!(call_of(line), wanted, "{line}");
        }
    }

    /// PostgreSQL's processes with a few writers: a lock went from one to the next while they were looked at.
    #[test]
    fn those_who_hand_work_to_each_other_are_never_found_asleep_together() {
        const LOOKS: usize = 20_000;
        // Two that pass a byte on without end; the shell that waits for them has nothing to do.
        let script = "coproc there { while read -r x; do echo $x; done; }; exec 5<&${there[0]} 6>&${there[1]}; echo ball >&6; \
                      while read -r x <&5; do echo $x >&6; done & read";
        let mut players = shell(script).process_group(0).spawn().expect("a shell");
        let until = Instant::now() + Duration::from_secs(20);
        // Until both are there: then a look finds two children.
        let both = || children(players.id(), players.id()).is_ok_and(|found| found.len() == 2);
        while !both() && Instant::now() < until {
            std::thread::yield_now();
        }
        let is_there = both();
        let mut watcher = Watcher::default();
        let rest = (0..LOOKS)
            .filter(|_| {
                let found = watcher.all_sleep(|| Ok(Some(vec![players.id()])));
                found.expect("proc")
            })
            .count();
        let all = rustix::process::Pid::from_child(&players);
        rustix::process::kill_process_group(all, rustix::process::Signal::KILL).expect("they run");
        players.wait().expect("it ends");
        assert!(is_there, "they play");
        assert_eq!(rest, 0, "of {LOOKS} looks");
    }
}
