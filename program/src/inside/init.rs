//! pid 1 of a copy: starts the program behind its walls, and collects what ends.
//!
//! Decides:    nothing.
//! Flow:       keeper -> here -> fork, walls, exec; its end -> tester. Or, for a copy of a program that runs elsewhere: keeper ->
//!             here -> it is restored beside this process, and becomes its child -> its end -> node.
//! Invariants: 1. the program is pid 2 in every copy; 2. what it leaves behind is collected, and told; 3. the program has no
//!             capability that reaches beyond its namespaces, and none more by exec (no_new_privs).
//! Source:     pid_namespaces(7), capabilities(7). Not here: what it sees (`view`), which system calls are answered (`filter`).

use super::filter::Filter;
use super::ptrace::{Change, Traced};
use super::tsc::{self, Tsc};
use super::waited::{Waited, wait};
use super::{Failure, card, clock, die_with_parent, failed, usual, view};
use crate::chance::of_number;
use crate::message::{Go, Heard, Spec, Walls, receive, send};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

/// The bytes that a copy's /dev/urandom has where chance is agreed; a program that reads more meets its end.
const DEVICE_BYTES: usize = 1 << 20;

/// What a server may need as root of its own namespaces, by the numbers of capabilities(7): change owners and modes, kill, become
/// somebody else, bind low ports, change its root.
const KEPT_CAPABILITIES: [libc::c_ulong; 9] = [0, 1, 3, 4, 5, 6, 7, 10, 18];
const MOST_CAPABILITIES: libc::c_ulong = 64;

/// The program's first process (invariant 1).
const PROGRAM: Pid = Pid::from_raw(2);
const CHOOSING: &str = "choosing the next process id (a kernel without CONFIG_CHECKPOINT_RESTORE?)";
/// Far beyond the ids of a program's processes, which count from 1; the least that a kernel's greatest id may be is above it.
const FAR_PID: u32 = 30_000;
/// So many ids are for who brings a copy.
const BELOW_VISITORS: u32 = 1_000;

/// Never returns to the keeper's code: its result is the process's end.
pub(super) fn run(socket: BorrowedFd<'_>, spec: &Spec) -> Result<ExitCode, Failure> {
    die_with_parent(None)?;
    view::mount_proc()?;
    if let Some(seed) = spec.walls.as_ref().and_then(|walls| walls.agreed_chance) {
        view::replace_chance(&crate::chance::device(of_number(seed), DEVICE_BYTES))?;
    }
    if spec.walls.is_some() {
        view::protect_proc()?;
    }
    // Standard input becomes /dev/null in the program, before the listener is sent.
    let socket = socket
        .try_clone_to_owned()
        .map_err(failed("the tester's socket"))?;
    let child = match start(&socket, spec) {
        Ok(child) => child,
        Err(error) => {
            let program = &spec.command[0];
            return Err(format!("{program}: {error}"));
        }
    };
    if let Some(walls) = spec.walls.as_ref().filter(|walls| walls.has_page()) {
        clock::give(child, walls.leads(), walls.chance)
            .map_err(failed("its agreed clock or chance (\"own\" does without)"))?;
    }
    send(socket.as_fd(), &Heard::Started, &[]).map_err(failed("the tester's socket"))?;
    let change = spec.walls.as_ref().and_then(change);
    let tells_tsc = spec.walls.as_ref().is_some_and(|walls| walls.tells_tsc);
    let mut traced = match change {
        Some(change) => {
            let tester = tells_tsc.then(|| socket.try_clone()).transpose();
            let tester = tester.map_err(failed("the tester's socket"))?;
            Some(Traced::new(change, child, tester.map(Tsc::new)))
        }
        None => None,
    };
    collect(child, &socket, &mut traced)
}

/// Instead of starting the program, until a copy of one is here.
pub(super) fn await_copy(socket: BorrowedFd<'_>) -> Result<ExitCode, Failure> {
    die_with_parent(None)?;
    view::mount_proc()?;
    let socket = socket
        .try_clone_to_owned()
        .map_err(failed("the tester's socket"))?;
    let last_pid = LastPid::open()?;
    // Before anything of the program is here: what it has open is opened anew, by its path, and would lie under what is put over it later.
    view::protect_proc()?;
    // Who brings the copy has ids of this namespace meanwhile: none that a process of the copy has.
    // Nor one that a person's command has; where this kernel takes no such number, another that is far away.
    last_pid
        .set(super::visit::first_id() - BELOW_VISITORS)
        .or_else(|_| last_pid.set(FAR_PID))?;
    send(socket.as_fd(), &Heard::Vacant, &[]).map_err(failed("the tester's socket"))?;
    let adopted = match receive::<Go>(socket.as_fd()).map_err(failed("the tester's word"))? {
        Some((Go::Adopt(adopted), _)) => adopted,
        _ => return Ok(ExitCode::FAILURE),
    };
    for (address, hardware) in &adopted.neighbours {
        card::neighbour(*address, *hardware).map_err(failed("whom it spoke with"))?;
    }
    last_pid.set(adopted.last_pid)?;
    drop(last_pid);
    judge_all().map_err(failed("what is ended where memory is short"))?;
    // To all but itself.
    nix::sys::signal::kill(Pid::from_raw(-1), Signal::SIGCONT).map_err(failed("letting the copy run"))?;
    // As another host has it: what is no process' number would be all of them, or a group.
    let stopped = adopted.stopped.iter().filter_map(|pid| i32::try_from(*pid).ok());
    for pid in stopped.filter(|pid| *pid > 1) {
        // One that has ended needs it no more.
        let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGSTOP);
    }
    send(socket.as_fd(), &Heard::Started, &[]).map_err(failed("the tester's socket"))?;
    collect(PROGRAM, &socket, &mut None)
}

/// They were started by CRIU, which the daemon has started.
fn judge_all() -> io::Result<()> {
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let number: Option<u32> = name.to_str().and_then(|name| name.parse().ok());
        let Some(number) = number.filter(|number| *number > 1) else {
            continue;
        };
        let file = std::ffi::CString::new(format!("/proc/{number}/oom_score_adj"))?;
        match usual::judge(&file) {
            // It has ended.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {}
            judged => judged?,
        }
    }
    Ok(())
}

/// Where the next process id of this namespace is chosen, opened before /proc is read only.
struct LastPid(File);

impl LastPid {
    fn open() -> Result<Self, Failure> {
        let file = File::options().write(true).open("/proc/sys/kernel/ns_last_pid");
        file.map(Self).map_err(failed(CHOOSING))
    }

    /// The next one follows `pid`.
    fn set(&self, pid: u32) -> Result<(), Failure> {
        // At the beginning: a number written behind another one counts for nothing.
        self.0
            .write_all_at(pid.to_string().as_bytes(), 0)
            .map_err(failed(CHOOSING))
    }
}

fn change(walls: &Walls) -> Option<Change> {
    let change = Change {
        // The vDSO's clock is the processor's own.
        hide_clock: walls.agreed_clock || walls.tells_tsc,
        chance: walls.agreed_chance,
    };
    (change.hide_clock || change.chance.is_some()).then_some(change)
}

fn start(socket: &OwnedFd, spec: &Spec) -> io::Result<Pid> {
    let mut command = Command::new(&spec.command[0]);
    command
        .args(&spec.command[1..])
        .current_dir(&spec.directory)
        .env_clear()
        .envs(spec.environment.iter().cloned())
        .stdin(Stdio::null());
    let socket = socket.try_clone()?;
    let walls = spec.walls.clone();
    let in_child = move || {
        nix::unistd::setsid()?;
        let Some(walls) = &walls else { return Ok(()) };
        behind(walls)?;
        let filter = Filter::new(walls.draws_agreed(), walls.agreed_clock);
        if change(walls).is_some() || walls.has_page() {
            nix::sys::ptrace::traceme()?;
        }
        if let Some(listener) = filter.install()? {
            send(socket.as_fd(), &Heard::Listener, &[listener.as_fd()])?;
        }
        if walls.tells_tsc {
            tsc::is_a_fault()?;
        }
        Ok(())
    };
    // SAFETY: it is forked from a process with one thread, so it may do whatever that may.
    unsafe { command.pre_exec(in_child) };
    let child = command.spawn()?;
    // `collect` waits for it, by its number, with all others.
    Ok(Pid::from_raw(child.id() as i32))
}

/// The program's own process gives up what it must not have.
pub(super) fn behind(walls: &Walls) -> io::Result<()> {
    usual::take()?;
    for capability in (0..MOST_CAPABILITIES).filter(|capability| !KEPT_CAPABILITIES.contains(capability)) {
        // SAFETY: a plain system call. One that this kernel does not know is refused, and not had.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    inherit_nothing()?;
    if walls.draws_agreed() {
        // Where it lies in memory is chance as well.
        // SAFETY: a plain system call.
        unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) };
    }
    if let Some((uid, gid)) = walls.user {
        let (uid, gid) = (nix::unistd::Uid::from_raw(uid), nix::unistd::Gid::from_raw(gid));
        nix::unistd::setgroups(&[gid])?;
        nix::unistd::setresgid(gid, gid, gid)?;
        nix::unistd::setresuid(uid, uid, uid)?;
    }
    nix::sys::prctl::set_no_new_privs()?;
    Ok(())
}

/// Root has, after exec, also what it inherits, whatever it is bounded to: what the daemon was started with would be the program's.
fn inherit_nothing() -> io::Result<()> {
    clear_ambient_capability_set()?;
    let has = capabilities(None)?;
    let sets = CapabilitySets {
        inheritable: CapabilitySet::empty(),
        ..has
    };
    Ok(set_capabilities(None, sets)?)
}

/// Until nothing is left.
fn collect(program: Pid, socket: &OwnedFd, traced: &mut Option<Traced>) -> Result<ExitCode, Failure> {
    loop {
        let (pid, waited) = match wait(None, 0) {
            Ok(Some(waited)) => waited,
            Ok(None) => continue,
            // No child is left.
            Err(Errno::ECHILD) => return Ok(ExitCode::SUCCESS),
            Err(error) => return Err(format!("waiting for the program: {error}")),
        };
        let tracing = failed("tracing the program (for the agreed clock and chance)");
        let (code, signal) = match waited {
            Waited::Exited(code) => (Some(code), None),
            Waited::Killed(signal) => (None, Some(signal)),
            Waited::Stopped(signal) => {
                if let Some(traced) = traced {
                    traced.stopped(pid, signal).map_err(tracing)?;
                }
                continue;
            }
            Waited::Event(event) => {
                if let Some(traced) = traced {
                    traced.event(pid, event).map_err(tracing)?;
                }
                continue;
            }
            Waited::AtSystemCall | Waited::Continued => continue,
        };
        if let Some(traced) = traced {
            traced.gone(pid);
        }
        if pid == program {
            let flags =
                WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
            // One that a real-time signal has ended is an error here, and a child.
            let others = waitid(Id::All, flags) != Err(Errno::ECHILD);
            let ended = Heard::Ended { code, signal, others };
            if send(socket.as_fd(), &ended, &[]).is_err() {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
}
