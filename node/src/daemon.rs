//! One daemon per host: it listens for the other hosts and for people, and holds the VMs' loops.

mod control;
pub mod examine;
mod exec;
pub mod identity;
pub mod logs;
mod members;
mod moving;
pub mod peers;
mod priority;
mod program;
pub mod requests;
mod reservations;
pub mod roles;
mod service;
mod standby;
mod store;
mod switchover;

use crate::certificates;
use crate::config::{HostConfig, VmConfig};
use crate::control::server::ControlSocket;
use crate::events::{Events, now_ms};
use crate::heartbeats;
use crate::logs::LogHandle;
use crate::metrics;
use crate::notify::{Notify, Patience};
use crate::vm::event::LoopEvent;
use crate::vm::{self, Ended, Host, StartError, VmHandle};
use crate::web;
use anyhow::{Context, Result, anyhow};
use crossbeam_channel::{Receiver, select, tick, unbounded};
use dunlin_api::EventKind;
use dunlin_fabric::link::{LinkError, Listener, Refusals};
use identity::OwnKeys;
use parking_lot::{Mutex, MutexGuard};
use reservations::Reservations;
use roles::Roles;
use service::Service;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The daemon.
pub struct Daemon {
    /// What the VMs share.
    pub host: Arc<Host>,
    vms: Mutex<BTreeMap<String, VmHandle>>,
    logs: Mutex<BTreeMap<String, LogHandle>>,
    /// One log is made or removed here at a time. VMs do not wait for its disk.
    changing_logs: Mutex<()>,
    /// One person's request that changes the set of VMs at a time.
    changing: Mutex<()>,
    /// Names under which VMs are being started.
    reservations: Mutex<Reservations>,
    /// Who was refused, once this host listens.
    refusals: OnceLock<Refusals>,
    /// Posts events to somebody else, if that is asked for.
    notify: Option<Notify>,
    /// Who may ask what.
    roles: Arc<Roles>,
    /// What this host shows to the others, and whom it believes.
    keys: OwnKeys,
}

/// How often certificates are looked at.
const DAY: Duration = Duration::from_secs(86_400);

/// How long the end of a daemon may wait until its last events are posted.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Bad input: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(pub String);

impl Daemon {
    fn vms(&self) -> MutexGuard<'_, BTreeMap<String, VmHandle>> {
        self.vms.lock()
    }

    /// Who may ask what.
    pub fn roles(&self) -> &Arc<Roles> {
        &self.roles
    }

    /// Whether this host has a part in that VM.
    pub fn has_vm(&self, name: &str) -> bool {
        self.vms().contains_key(name)
    }

    fn logs(&self) -> MutexGuard<'_, BTreeMap<String, LogHandle>> {
        self.logs.lock()
    }

    fn reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations.lock()
    }

    /// Takes part in a VM's group.
    fn start_vm(&self, config: VmConfig) -> Result<(), StartError> {
        let name = config.name.clone();
        let mut vms = self.vms();
        if vms.contains_key(&name) {
            return Err(StartError::AlreadyHere(name));
        }
        vms.insert(name, VmHandle::start(&self.host, config)?);
        Ok(())
    }

    /// How often each VM's loop has turned. A log's does not count: no VM is to end because a log hangs.
    fn turns(&self) -> service::Turns {
        self.vms()
            .iter()
            .map(|(name, handle)| (name.clone(), handle.turns()))
            .collect()
    }

    /// Connections that were refused, by what was wrong; every kind is there from the start.
    fn refused(&self) -> BTreeMap<String, u64> {
        let counts = self.refusals.get().map(Refusals::counts).unwrap_or_default();
        LinkError::KINDS
            .into_iter()
            .map(|kind| (kind.to_owned(), counts.get(kind).copied().unwrap_or(0)))
            .collect()
    }

    /// An event for each certificate that ends soon, or has ended.
    fn tell_of_certificates(&self) {
        for certificate in &self.keys.certificates() {
            if let Some((words, _)) = certificates::word(certificate, now_ms() / 1000) {
                let words = format!("{words}: {}", certificates::MEND);
                self.host.events.push("", EventKind::CertificateExpires, words);
            }
        }
    }

    /// A loop has ended: for good, or with the daemon.
    fn vm_ended(&self, ended: &Ended) {
        // It is listed until it is forgotten: whoever waits for its end may start one of the same name at once.
        let thread = self.vms().get_mut(&ended.vm).and_then(VmHandle::take_thread);
        vm::join(thread);
        if ended.forget
            && let Err(error) = store::forget(&self.host.state, &ended.vm)
        {
            self.host.events.push(
                &ended.vm,
                EventKind::StateLeft,
                format!("the VM's state could not be removed: {error}"),
            );
        }
        self.vms().remove(&ended.vm);
        if ended.forget {
            self.host.events.push(
                &ended.vm,
                EventKind::Forgotten,
                "this host has no part in the VM any more",
            );
        }
    }
}

/// Runs a host until a signal ends it.
pub fn run(path: &Path) -> Result<()> {
    die_whole();
    priority::session_first();
    let heartbeats = heartbeats::finding();
    if !heartbeats.mend.is_empty() {
        tracing::warn!("{}: {}", heartbeats.what, heartbeats.mend);
    }
    dunlin_guest::map_large_buffers();
    let config = HostConfig::load(path).map_err(|error| BadInput(error.to_string()))?;
    std::fs::create_dir_all(&config.state)
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
        changing: Mutex::default(),
        reservations: Mutex::default(),
        refusals: OnceLock::new(),
    });
    let address = config
        .cluster
        .host(&config.name)
        .map(|host| host.address)
        .context("checked with the file")?;
    let listener = Listener::bind_with(address, identity, peers::policy(&daemon))
        .map_err(|error| not_listening(address, &error))?;
    listener.keep_places_for(config.cluster.hosts.iter().map(|host| host.address.ip()));
    // Nobody else sets it.
    let _ = daemon.refusals.set(listener.refusals());
    let socket = ControlSocket::bind(&config.control, daemon.roles.is_open())
        .map_err(|error| BadInput(error.to_string()))?;
    if let Some(address) = config.metrics {
        metrics::serve(address, &daemon)
            .map_err(|error| BadInput(format!("metrics at {address}: {error}")))?;
    }
    // Kept to the end: the socket's file goes with it.
    let doors = web::Doors::open(&config, &daemon)?;
    for (name, text) in store::all(&config.state).context("reading the VMs that this host takes part in")? {
        match VmConfig::parse(&text, &name, &config.cluster) {
            Ok(vm) => daemon
                .start_vm(vm)
                .unwrap_or_else(|why| daemon.host.events.push(&name, EventKind::Failed, why.to_string())),
            Err(error) => daemon
                .host
                .events
                .push(&name, EventKind::Failed, error.to_string()),
        }
    }
    logs::start_all(&daemon);
    daemon
        .host
        .events
        .push("", EventKind::HostBegins, "this host's daemon begins");
    daemon.tell_of_certificates();
    peers::accept(&daemon, listener)?;
    identity::hear_of_revocations(&daemon).context("a thread for revocation lists")?;
    standby::watch(&daemon).context("a thread for standbys")?;
    control::accept(
        &daemon,
        socket.listener.try_clone().context("the control socket")?,
    )?;
    // Nobody is told of a host without its VMs: whoever came before waits in the kernel's queue, as at the control socket.
    web::serve(&doors, &daemon).context("the page and the API")?;
    println!(
        "ready: host {} of cluster {} at {address}, control socket {}",
        config.name,
        config.cluster.name,
        config.control.display()
    );
    // Whoever waits for the line may be a pipe.
    std::io::stdout()
        .flush()
        .context("saying that the host is ready")?;
    let service = Service::ready(&format!(
        "host {} of cluster {}",
        config.name, config.cluster.name
    ));
    wait_for_end(&daemon, &endings, service)
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

fn wait_for_end(daemon: &Daemon, endings: &Receiver<Ended>, mut service: Service) -> Result<()> {
    let (signalled, signals) = unbounded();
    let mut watched = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("watching signals")?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in watched.forever() {
                if signalled.send(signal).is_err() {
                    break;
                }
            }
        })?;
    let daily = tick(DAY);
    loop {
        select! {
            recv(daily) -> _ => daemon.tell_of_certificates(),
            recv(endings) -> ended => if let Ok(ended) = ended { daemon.vm_ended(&ended) },
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
    switchover::all(daemon, &signals);
    let mut handles: Vec<VmHandle> = std::mem::take(&mut *daemon.vms()).into_values().collect();
    handles.iter().for_each(|handle| handle.send(LoopEvent::Shutdown));
    handles
        .iter_mut()
        .for_each(|handle| vm::join(handle.take_thread()));
    if let Some(notify) = &daemon.notify {
        notify.end(LAST_WORDS);
    }
    let logs = std::mem::take(&mut *daemon.logs());
    logs.into_values().for_each(LogHandle::end);
    Ok(())
}
