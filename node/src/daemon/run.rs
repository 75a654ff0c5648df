//! A daemon from its first moment to its last.
//!
//! **Decides**: in which order all begins and ends. **Flow**: host.toml -> the [`Daemon`] -> its VMs and logs -> who listens -> a signal -> the VMs go to
//! their backups -> the end. **Not here**: what any of them does.

use super::changes::Changes;
use super::identity::{self, OwnKeys};
use super::roles::Roles;
use super::service::Service;
use super::threads::await_all;
use super::{
    BadInput, Daemon, control, descriptors, incoming, logs, priority, renewal, standby, store, switchover,
};
use crate::config::{HostConfig, VmConfig};
use crate::control::server::ControlSocket;
use crate::events::Events;
use crate::heartbeats;
use crate::logs::LogHandle;
use crate::metrics;
use crate::notify::{Notify, Patience};
use crate::vm::event::LoopEvent;
use crate::vm::{Ended, HeldMemory, Host, VmHandle};
use crate::web;
use anyhow::{Context, Result, anyhow};
use crossbeam_channel::{Receiver, select, tick, unbounded};
use dunlin_api::EventKind;
use dunlin_fabric::link::{LinkError, Listener};
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often certificates are looked at.
const DAY: Duration = Duration::from_secs(86_400);

/// How long the end of a daemon may wait until its last events are posted.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// How long it waits for its VMs' loops: for `machine-ends`, and for what their logs have still to write.
const LOOPS_END: Duration = Duration::from_secs(20);

/// Runs a host until a signal ends it.
pub fn run(path: &Path) -> Result<()> {
    die_whole();
    // From the first moment on: a signal ends a VM's part in an orderly way, or comes before there is any.
    let signals = watch_signals()?;
    priority::session_first();
    descriptors::as_many_as_wanted();
    let heartbeats = heartbeats::finding();
    if !heartbeats.mend.is_empty() {
        tracing::warn!("{}: {}", heartbeats.what, heartbeats.mend);
    }
    dunlin_guest::map_large_buffers();
    let config = HostConfig::load(path).map_err(|error| BadInput(error.to_string()))?;
    // What programs print, and files with what VMs are started with, are nobody else's.
    let mut state = std::fs::DirBuilder::new();
    state
        .recursive(true)
        .mode(0o750)
        .create(&config.state)
        .with_context(|| format!("{}: the state folder", config.state.display()))?;
    let _only_one = store::lock(&config.state).map_err(|error| BadInput(error.to_string()))?;
    let identity = identity::at_start(&config)?;
    let (ended, endings) = unbounded();
    let host = Arc::new(Host {
        name: config.name.clone(),
        events: Events::open(&config.name, &config.state),
        identity: identity.clone(),
        state: config.state.clone(),
        cluster: config.cluster.clone(),
        held_memory: HeldMemory::default(),
        ended,
    });
    let notify = config
        .notify_url
        .as_deref()
        .map(|url| Notify::start(url, host.events.clone(), &config.state, Patience::default()))
        .transpose()
        .context("a thread for notify_url")?;
    let daemon = Arc::new(Daemon {
        host,
        notify,
        roles: Roles::new(&config).map_err(|error| BadInput(error.to_string()))?,
        keys: OwnKeys::new(&config.trust),
        vms: Mutex::default(),
        logs: Mutex::default(),
        changing_logs: Mutex::default(),
        changing: Changes::default(),
        reservations: Mutex::default(),
        refusals: OnceLock::new(),
    });
    let address = config
        .cluster
        .host(&config.name)
        .map(|host| host.address)
        .context("checked with the file")?;
    let listener = Listener::bind_with(address, identity, incoming::policy(&daemon))
        .map_err(|error| not_listening(address, &error))?;
    listener.keep_places_for(config.cluster.hosts.iter().map(|host| host.address.ip()));
    // Nobody else sets it.
    let _ = daemon.refusals.set(listener.refusals());
    let socket = ControlSocket::bind(&config.control, daemon.roles.is_open())
        .map_err(|error| BadInput(error.to_string()))?;
    if let Some(address) = config.metrics {
        metrics::serve(address, &daemon)?;
    }
    // Kept to the end: the socket's file goes with it.
    let doors = web::Doors::open(&config, &daemon)?;
    for (name, text) in store::all(&config.state).context("reading the VMs that this host takes part in")? {
        if let Err(why) = begin_kept(&daemon, &name, text) {
            daemon.host.events.push(&name, EventKind::Failed, why);
        }
    }
    logs::start_all(&daemon);
    daemon
        .host
        .events
        .push("", EventKind::HostBegins, "this host's daemon begins");
    daemon.tell_of_certificates();
    incoming::accept(&daemon, listener)?;
    renewal::hear_of_revocations(&daemon).context("a thread for revocation lists")?;
    standby::watch(&daemon).context("a thread for standbys")?;
    control::accept(
        &daemon,
        socket.listener.try_clone().context("the control socket")?,
    )?;
    // Nobody is told of a host without its VMs: whoever came before waits in the kernel's queue, as at the control socket.
    web::serve(&doors, &daemon).context("the page and the API")?;
    let ready = format!(
        "ready: host {} of cluster {} at {address}, control socket {}\n",
        config.name,
        config.cluster.name,
        config.control.display()
    );
    // Whoever waits for the line may be a pipe, and may have gone: no VM ends with it.
    let mut stdout = std::io::stdout();
    if let Err(error) = stdout.write_all(ready.as_bytes()).and_then(|()| stdout.flush()) {
        tracing::warn!("saying that the host is ready: {error}");
    }
    let service = Service::ready(&format!(
        "host {} of cluster {}",
        config.name, config.cluster.name
    ));
    wait_for_end(&daemon, &endings, &signals, service)
}

/// What the host took part in when its daemon ended. One that cannot be read keeps no other one from beginning.
fn begin_kept(daemon: &Daemon, name: &str, text: Result<String, store::ReadError>) -> Result<(), String> {
    let text = text.map_err(|error| error.to_string())?;
    let vm = VmConfig::parse(&text, name, &daemon.host.cluster).map_err(|error| error.to_string())?;
    daemon.start_vm(vm).map_err(|why| why.to_string())
}

/// An address that this machine has not may come yet, as while it starts: a service manager is to try again. All else is bad input.
fn not_listening(address: SocketAddr, error: &LinkError) -> anyhow::Error {
    let words = format!("{address}: {error}");
    match error {
        LinkError::Io { source, .. } if source.kind() == std::io::ErrorKind::AddrNotAvailable => {
            anyhow!("{words}: no interface of this host has that address (now)")
        }
        _ => BadInput(words).into(),
    }
}

/// A host whose daemon has lost a thread is half dead: the others must see it dead, and take over.
fn die_whole() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

/// The signals that end a daemon. A service has no terminal that could hang up: there SIGHUP is somebody's wish that it read its files anew, which it does not.
fn watch_signals() -> Result<Receiver<i32>> {
    let (signalled, signals) = unbounded();
    let mut watched = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("watching signals")?;
    let is_service = Service::is_one();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in watched.forever() {
                if signal == SIGHUP && is_service {
                    tracing::warn!(
                        "SIGHUP: files are read when the daemon starts; 'systemctl restart dunlin' does that"
                    );
                } else if signalled.send(signal).is_err() {
                    break;
                }
            }
        })?;
    Ok(signals)
}

/// Puts away what is left of a VM whose loop has ended, on a thread of its own: its state folder may not answer, and no other VM of this host
/// waits for that.
fn put_away(daemon: &Arc<Daemon>, ended: Ended) -> Option<JoinHandle<()>> {
    let ended = Arc::new(ended);
    // Now: when the daemon ends nobody finds it any more.
    let holding = daemon.vms().get(&ended.vm).map(VmHandle::holding);
    let (its_daemon, its_end, its_holding) = (daemon.clone(), ended.clone(), holding.clone());
    let work = move || its_daemon.vm_ended(&its_end, its_holding);
    let thread = std::thread::Builder::new().name("vm-ends".into()).spawn(work);
    if thread.is_err() {
        // The system has no thread left.
        daemon.vm_ended(&ended, holding);
    }
    thread.ok()
}

fn wait_for_end(
    daemon: &Arc<Daemon>,
    endings: &Receiver<Ended>,
    signals: &Receiver<i32>,
    mut service: Service,
) -> Result<()> {
    let daily = tick(DAY);
    let mut ending: Vec<JoinHandle<()>> = Vec::new();
    loop {
        select! {
            recv(daily) -> _ => daemon.tell_of_certificates(),
            recv(endings) -> ended => if let Ok(ended) = ended {
                ending.retain(|thread| !thread.is_finished());
                ending.extend(put_away(daemon, ended));
            },
            recv(signals) -> _ => break,
            recv(service.due) -> _ => if let Some(vm) = service.is_alive(daemon.turns()) {
                daemon.host.events.push(&vm, EventKind::LoopStandsStill, "the VM's loop does not turn: systemd will end this daemon");
            },
        }
    }
    Service::ends();
    daemon.host.events.push(
        "",
        EventKind::HostEnds,
        "this host's daemon ends; its VMs go to their backups first",
    );
    switchover::all(daemon, signals);
    let mut handles: Vec<VmHandle> = std::mem::take(&mut *daemon.vms()).into_values().collect();
    handles.iter().for_each(|handle| handle.send(LoopEvent::Shutdown));
    ending.extend(handles.iter_mut().filter_map(VmHandle::take_thread));
    let late = await_all(ending, LOOPS_END);
    if late > 0 {
        tracing::warn!("{late} VMs have not ended in time: a disk of this host does not answer");
    }
    if let Some(notify) = &daemon.notify {
        notify.end(LAST_WORDS);
    }
    let logs = std::mem::take(&mut *daemon.logs());
    logs.into_values().for_each(LogHandle::end);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_hangs_at_its_end_keeps_no_daemon() {
        let hangs = std::thread::spawn(|| std::thread::park_timeout(Duration::from_secs(60)));
        let disk = hangs.thread().clone();
        let done = std::thread::spawn(|| {});
        while !done.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(await_all(vec![hangs, done], Duration::from_secs(1)), 1);
        disk.unpark();
        assert_eq!(await_all(Vec::new(), Duration::ZERO), 0);
    }
}
