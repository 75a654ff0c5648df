//! The private network namespace: one thread that lives in it and makes there what belongs to it.
//!
//! Decides:    nothing.
//! Flow:       `Namespace::enter` starts the thread, which makes the namespace, the TUN and its routes; then it builds sockets on request.
//! Invariants: 1. no address is configured: whatever the TUN delivers is local, whatever is sent goes into the TUN.
//!             2. it ends with its last descriptor and this thread.
//! Source:     namespaces(7), ip-rule(8).
//! Not here:   a user namespace: the kernel refuses one to a process with several threads; the daemon has CAP_SYS_ADMIN.

use super::repair::{self, RepairError};
use super::sockets::SocketsError;
use super::tun::Tun;
use dunlin_core::speculation::Socket;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

const DEVICE: &str = "sh0";
/// Sysctls of the namespace; those that a kernel has not are left out.
const SETTINGS: [(&str, &str); 9] = [
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/tcp_slow_start_after_idle", "0"),
    ("ipv4/tcp_wmem", "4096 1048576 33554432"),
    ("ipv4/tcp_no_metrics_save", "1"),
    ("ipv4/tcp_ecn", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/router_solicitations", "0"),
    ("ipv6/conf/default/addr_gen_mode", "1"),
];

type Request = (Box<Socket>, SyncSender<Result<OwnedFd, RepairError>>);

/// The thread that lives in the namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    requests: SyncSender<Request>,
}

impl Namespace {
    /// Makes it, with a TUN of this MTU.
    pub(crate) fn enter(mtu: u16, offload: bool) -> Result<(Self, Tun), SocketsError> {
        let (made, wait) = sync_channel(1);
        let (requests, receiver) = sync_channel(1);
        std::thread::Builder::new()
            .name("shadow-sockets".into())
            .spawn(move || match make(mtu, offload) {
                Ok(tun) => {
                    if made.send(Ok(tun)).is_ok() {
                        serve(&receiver);
                    }
                }
                Err(error) => drop(made.send(Err(error))),
            })
            .map_err(|error| SocketsError::new("its thread", error))?;
        let tun = wait
            .recv()
            .unwrap_or_else(|_| Err(SocketsError::new("its thread", std::io::Error::other("it ended"))))?;
        Ok((Self { requests }, tun))
    }

    /// A socket in the namespace.
    pub(crate) fn build(&self, spec: &Socket) -> Result<OwnedFd, SocketsError> {
        let (answer, wait) = sync_channel(1);
        let gone = || SocketsError::new("its thread", std::io::Error::other("it ended"));
        self.requests
            .send((Box::new(*spec), answer))
            .map_err(|_| gone())?;
        wait.recv().map_err(|_| gone())?.map_err(SocketsError::from)
    }
}

fn serve(requests: &Receiver<Request>) {
    for (spec, answer) in requests {
        // Who asked may be gone: then the socket goes, too, without a word.
        if let Err(unheard) = answer.send(repair::establish(&spec))
            && let Ok(socket) = unheard.0
        {
            repair::vanish(socket);
        }
    }
}

fn make(mtu: u16, offload: bool) -> Result<Tun, SocketsError> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|error| SocketsError::new("a network namespace (CAP_SYS_ADMIN is missing)", error.into()))?;
    if statvfs("/proc/sys/net").is_ok_and(|about| about.f_flag.contains(StatVfsMountFlags::RDONLY)) {
        own_proc().map_err(|error| {
            SocketsError::new("a /proc of its own (CAP_SYS_ADMIN is missing)", error.into())
        })?;
    }
    for (name, value) in SETTINGS {
        // This thread's namespace is the one that /proc/sys/net shows it.
        let path = format!("/proc/sys/net/{name}");
        if std::path::Path::new(&path).exists() {
            std::fs::write(&path, value).map_err(|error| SocketsError::new(name, error))?;
        }
    }
    let tun = Tun::open(DEVICE, offload)
        .map_err(|error| SocketsError::new("a TUN (modprobe tun; CAP_NET_ADMIN)", error))?;
    let mut batch = format!("link set dev lo up\nlink set dev {DEVICE} mtu {mtu} txqueuelen 10000 up\n");
    batch += &format!("rule add iif {DEVICE} lookup 100\nroute add local default dev {DEVICE} table 100\n");
    batch += &format!("route add default dev {DEVICE}\n");
    ip(&[], &batch)?;
    if std::path::Path::new("/proc/sys/net/ipv6").exists() {
        let mut batch =
            format!("rule add iif {DEVICE} lookup 100\nroute add local default dev {DEVICE} table 100\n");
        batch += &format!("route add default dev {DEVICE}\n");
        ip(&["-6"], &batch)?;
    }
    Ok(tun)
}

/// A /proc for this thread and its children alone. The daemon's may be read only (`ProtectKernelTunables` of its unit), for the sake of the
/// host's settings; those of a namespace of its own are a thread's own.
fn own_proc() -> nix::Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, NONE)
}

/// `ip -batch`, in the namespace of the calling thread.
fn ip(family: &[&str], batch: &str) -> Result<(), SocketsError> {
    let fail = |error| SocketsError::new("ip (apt-get install iproute2)", error);
    let mut child = Command::new("ip")
        .args(family)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(batch.as_bytes()).map_err(fail)?;
    }
    let output = child.wait_with_output().map_err(fail)?;
    match output.status.success() {
        true => Ok(()),
        false => Err(fail(std::io::Error::other(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ))),
    }
}
