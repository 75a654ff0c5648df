//! The process that keeps one copy: it makes the namespaces and the card, then starts the program behind its walls.
//!
//! Flow: `dunlin program inside`, standard input is the tester's socket -> namespaces, view, card -> `Ready` -> `Go` -> pid 1
//! of the copy (`init`) -> the program.
//!
//! Invariants:
//! 1. It has one thread: only so may it enter a user namespace, and fork without a care.
//! 2. When the tester dies, by whatever signal, it dies (PR_SET_PDEATHSIG), with it pid 1, and with that, by the kernel's
//!    rule, everything in the copy's pid namespace. Namespaces, mounts and the card go with the last process.
//! 3. What is made is the same in every copy: addresses, names, process ids.
//!
//! Source: namespaces(7), user_namespaces(7), pid_namespaces(7). Not here: what the tester does with a copy.

mod card;
mod clock;
pub(crate) mod filter;
mod held;
mod init;
pub(crate) mod injected;
pub(crate) mod listens;
mod ptrace;
pub(crate) mod signal;
pub(crate) mod stranger;
pub(crate) mod tracked;
mod tsc;
mod usual;
mod view;
mod visit;
mod waited;

pub(crate) use card::address_of_host;
pub(crate) use visit::{BY_SIGNAL, enter, first_id as first_visitor, is_visitor};

use crate::message::{Go, Heard, Spec, receive, send};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, getegid, geteuid, getppid, sethostname, setsid};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink, socket_with};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;

/// What went wrong, and what to do: it reaches the user as it is.
pub(crate) type Failure = String;

/// `step: error`.
pub(crate) fn failed<E: std::fmt::Display>(step: &str) -> impl Fn(E) -> Failure + '_ {
    move |error| format!("{step}: {error}")
}

/// What a visitor is refused, as the program is; chance and time are answered for the program alone.
pub(crate) fn filter_of_a_visitor() -> filter::Filter {
    filter::Filter::new(false, false)
}

/// What `dunlin program inside` does. Only `Copy::start` calls it.
#[must_use]
pub fn main() -> ExitCode {
    // Whoever started the daemon may have left it descriptors that are passed on by exec. None is the program's, and one that leads out of
    // its view cannot be copied with it.
    // SAFETY: this process has just begun: beyond the first three nobody here has opened any.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    let stdin = io::stdin();
    let socket = stdin.as_fd();
    match keep(socket) {
        Ok(code) => code,
        Err(why) => {
            // The tester may have gone; then nobody wants to know.
            let _ = send(socket, &Heard::Failed(why), &[]);
            ExitCode::FAILURE
        }
    }
}

fn keep(socket: BorrowedFd<'_>) -> Result<ExitCode, Failure> {
    die_with_parent(None)?;
    let parent = getppid();
    let Some((spec, _)) = receive::<Spec>(socket).map_err(failed("the tester's word"))? else {
        return Ok(ExitCode::FAILURE);
    };
    setsid().map_err(failed("a session of its own"))?;
    enter_namespaces(&spec)?;
    // A change of credentials clears it.
    die_with_parent(Some(parent))?;
    let tap = card::make(&spec.card)?;
    let diag = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )
    .map_err(failed(
        "a sock_diag socket (is the kernel's module inet_diag there?)",
    ))?;
    let view = match &spec.walls {
        Some(walls) => {
            let view = view::build(walls, &spec.directory)?;
            sethostname("program").map_err(failed("its host name"))?;
            Some(view)
        }
        None => None,
    };
    let mut descriptors = vec![tap.as_fd(), diag.as_fd()];
    descriptors.extend(view.iter().flat_map(view::View::descriptors));
    send(socket, &Heard::Ready, &descriptors).map_err(failed("the tester's socket"))?;
    drop((tap, diag, view));
    let begins = match receive::<Go>(socket).map_err(failed("the tester's word"))? {
        Some((Go::Start, _)) => true,
        Some((Go::Vacate, _)) => false,
        Some((Go::Adopt(_) | Go::Tsc(_), _)) | None => return Ok(ExitCode::FAILURE),
    };
    // SAFETY: this process has one thread (invariant 1).
    match unsafe { fork() }.map_err(failed("its first process"))? {
        ForkResult::Child if begins => init::run(socket, &spec),
        ForkResult::Child => init::await_copy(socket),
        ForkResult::Parent { child } => loop {
            match waitpid(child, None) {
                Ok(WaitStatus::Exited(_, code)) => {
                    return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
                }
                Ok(WaitStatus::Signaled(..)) => return Ok(ExitCode::FAILURE),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(format!("waiting for its first process: {error}")),
            }
        },
    }
}

/// SIGKILL when the parent ends; at once, if it is not `parent` any more.
pub(crate) fn die_with_parent(parent: Option<nix::unistd::Pid>) -> Result<(), Failure> {
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(failed("PR_SET_PDEATHSIG"))?;
    match parent {
        Some(parent) if getppid() != parent => Err("the tester has gone".to_owned()),
        _ => Ok(()),
    }
}

fn enter_namespaces(spec: &Spec) -> Result<(), Failure> {
    let (uid, gid) = (geteuid(), getegid());
    let mut flags = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS;
    if spec.walls.is_some() {
        flags |= CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    }
    if !uid.is_root() {
        flags |= CloneFlags::CLONE_NEWUSER;
    }
    unshare(flags).map_err(|error| {
        let hint = match uid.is_root() {
            true => "run it as root on a kernel with namespaces; dunlin's systemd unit wants /usr/share/dunlin/programs.conf for them",
            false => {
                "this host lets only root make namespaces (sysctl user.max_user_namespaces, \
                      kernel.apparmor_restrict_unprivileged_userns): run it as root"
            }
        };
        format!("namespaces: {error}: {hint}")
    })?;
    if !uid.is_root() {
        let write = |file: &str, text: String| {
            fs::write(format!("/proc/self/{file}"), text).map_err(failed("the user namespace"))
        };
        write("setgroups", "deny".to_owned())?;
        write("uid_map", format!("0 {uid} 1"))?;
        write("gid_map", format!("0 {gid} 1"))?;
    }
    view::make_private()
}
