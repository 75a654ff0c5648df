//! What all threads of the daemon share: its VMs and logs, and what keeps two orders apart.
//!
//! **Decides**: nothing but which VM is here. **Not here**: who begins it all (`run`), what is asked of it (`requests`).

use super::changes::Changes;
use super::identity::OwnKeys;
use super::last_life::{self, Found};
use super::reservations::Reservations;
use super::roles::Roles;
use super::threads::await_all;
use super::{service, store};
use crate::certificates;
use crate::config::VmConfig;
use crate::events::now_ms;
use crate::logs::LogHandle;
use crate::notify::Notify;
use crate::vm::event::LoopSender;
use crate::vm::{self, Ended, Holding, Host, StartError, VmHandle};
use dunlin_api::EventKind;
use dunlin_core::waits::Wait;
use dunlin_fabric::link::{LinkError, Refusals};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// The daemon.
pub struct Daemon {
    /// What the VMs share.
    pub host: Arc<Host>,
    pub(super) vms: Mutex<BTreeMap<String, VmHandle>>,
    pub(super) logs: Mutex<BTreeMap<String, LogHandle>>,
    /// One log is made or removed here at a time. VMs do not wait for its disk.
    pub(super) changing_logs: Mutex<()>,
    /// One order that changes who has a part in a VM, or in a log, at a time for each of them.
    pub(super) changing: Changes,
    /// Names under which VMs are being started.
    pub(super) reservations: Mutex<Reservations>,
    /// Who was refused, once this host listens.
    pub(super) refusals: OnceLock<Refusals>,
    /// Posts events to somebody else, if that is asked for.
    pub(super) notify: Option<Notify>,
    /// Who may ask what.
    pub(super) roles: Arc<Roles>,
    /// What this host shows to the others, and whom it believes.
    pub(super) keys: OwnKeys,
}

impl Daemon {
    pub(super) fn vms(&self) -> MutexGuard<'_, BTreeMap<String, VmHandle>> {
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

    pub(super) fn logs(&self) -> MutexGuard<'_, BTreeMap<String, LogHandle>> {
        self.logs.lock()
    }

    pub(super) fn reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations.lock()
    }

    /// Takes part in a VM's group.
    pub(super) fn start_vm(&self, config: VmConfig) -> Result<(), StartError> {
        let name = config.name.clone();
        let mut vms = self.vms();
        if vms.contains_key(&name) {
            return Err(StartError::AlreadyHere(name));
        }
        vms.insert(name, VmHandle::start(&self.host, config)?);
        Ok(())
    }

    /// How often each VM's loop has turned, but for those that are over: no VM is to end because another one's state folder hangs at its end.
    /// A log's does not count: no VM is to end because a log hangs.
    pub(super) fn turns(&self) -> service::Turns {
        self.vms()
            .iter()
            .filter_map(|(name, handle)| Some((name.clone(), handle.turns()?)))
            .collect()
    }

    /// Connections that were refused, by what was wrong; every kind is there from the start.
    pub(super) fn refused(&self) -> BTreeMap<String, u64> {
        let counts = self.refusals.get().map(Refusals::counts).unwrap_or_default();
        LinkError::KINDS
            .into_iter()
            .map(|kind| (kind.to_owned(), counts.get(kind).copied().unwrap_or(0)))
            .collect()
    }

    /// An event for each certificate that ends soon, or has ended.
    pub(super) fn tell_of_certificates(&self) {
        for certificate in &self.keys.certificates() {
            if let Some((words, _)) = certificates::word(certificate, now_ms() / 1000) {
                let words = format!("{words}: {}", certificates::MEND);
                self.host.events.push("", EventKind::CertificateExpires, words);
            }
        }
    }

    /// A loop has ended: for good, or with the daemon.
    pub(super) fn vm_ended(&self, ended: &Ended, holding: Option<Holding>) {
        // It is listed until it is forgotten: whoever waits for its end may start one of the same name at once.
        let thread = self.vms().get_mut(&ended.vm).and_then(VmHandle::take_thread);
        vm::join(thread);
        if let Some(handle) = self.vms().get(&ended.vm) {
            handle.feed_standby(&self.host);
        }
        if let Some(holding) = holding.filter(|holding| ended.forget && !holding.images().is_empty()) {
            self.note_disks(&ended.vm, holding);
        }
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

    /// Remembers how new the images of a VM are that has ended here, for whoever starts one with them again. Their disk may not answer: it
    /// is not waited for without an end, and that it is not known is remembered as well.
    fn note_disks(&self, vm: &str, holding: Holding) {
        let (life, images) = (store::life(&self.host.state, vm), holding.images());
        let mut found = Found {
            disks: Vec::new(),
            at_most: holding.disks_at_most(),
        };
        let unread = match finish("disks-read", move || holding.disks()) {
            Ok(Ok(disks)) => {
                found.disks = disks;
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(why) => Some(why),
        };
        let state = self.host.state.clone();
        let noted = finish("disks-noted", move || {
            last_life::note(&state, life, &images, &found)
        });
        let unnoted = match noted {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{}: {error}", self.host.state.display())),
            Err(why) => Some(why),
        };
        if let Some(why) = unread.or(unnoted) {
            let words = format!(
                "how new the VM's disks are on this host is not known when it is started again: {why}"
            );
            self.host.events.push(vm, EventKind::StateLeft, words);
        }
    }

    /// Where the loop of that VM listens.
    pub(super) fn sender(&self, vm: &str) -> Option<LoopSender> {
        self.vms().get(vm).map(VmHandle::sender)
    }
}

/// What comes of work that a disk may hold up, which is not waited for without an end.
fn finish<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let done = Arc::new(Mutex::new(None));
    let result = done.clone();
    let thread = std::thread::Builder::new()
        .name(name.into())
        .spawn(move || *result.lock() = Some(work()))
        .map_err(|error| format!("no thread: {error}"))?;
    await_all(vec![thread], Wait::MachineEnds.bound());
    let result = done.lock().take();
    result.ok_or_else(|| "their disk does not answer".into())
}
