//! The host was told to end: each VM that is served here goes to its backup first, as by `dunlin switchover`.
//!
//! * **Decides:** how long a VM is waited for, and which one ends with the host because nobody could take it.
//! * **Flow:** SIGTERM -> [`all`] -> for each VM, all at once: handed over, or tried again when it is protected again.
//! * **Invariants:** 1. a backup that is lost in that moment, as on a busy machine, costs time and not the service: while another
//!   host could bring the VM in, it runs on here and is waited for. 2. all of it has one bound, and a second signal cuts it short.
//! * **Not here:** the switchover itself (`vm/primary`).

use super::Daemon;
use crate::vm::VmHandle;
use crate::vm::event::{Command, LoopEvent};
use crossbeam_channel::{Receiver, TryRecvError, bounded};
use dunlin_api::{Answer, EventKind, JoinProblem, Role, VmStatus};
use std::time::{Duration, Instant};

/// How long a daemon that was told to end waits for its VMs to be handed over. A backup that was lost has to be brought in first.
const AT_MOST: Duration = Duration::from_secs(60);
/// So long no host that could run the VM is linked: nobody will take it.
const ALONE: Duration = Duration::from_secs(3);
/// The VMs are looked at so often.
const LOOK: Duration = Duration::from_millis(5);

/// Waits until no VM is served here any more, or nobody takes what is left.
pub fn all(daemon: &Daemon, signals: &Receiver<i32>) {
    let names: Vec<String> = daemon.vms().keys().cloned().collect();
    let mut leaving: Vec<Leaving> = names.into_iter().map(Leaving::new).collect();
    let deadline = Instant::now() + AT_MOST;
    loop {
        leaving.retain_mut(|vm| !vm.is_done(daemon));
        if leaving.is_empty() || Instant::now() > deadline || signals.recv_timeout(LOOK).is_ok() {
            break;
        }
    }
    for vm in leaving {
        let why = vm.why.unwrap_or_else(|| "it was not protected in time".into());
        daemon.host.events.push(&vm.name, EventKind::NotHandedOver, why);
    }
}

/// A VM on its way to another host.
struct Leaving {
    name: String,
    /// It was asked to go, and will answer.
    asked: Option<Receiver<Answer>>,
    /// Why it did not go when it was asked.
    why: Option<String>,
    /// Whether people were told that it is waited for.
    told: bool,
    alone_since: Option<Instant>,
}

impl Leaving {
    fn new(name: String) -> Self {
        Self {
            name,
            asked: None,
            why: None,
            told: false,
            alone_since: None,
        }
    }

    /// Takes the next step; whether there is no further one.
    fn is_done(&mut self, daemon: &Daemon) -> bool {
        let vms = daemon.vms();
        let Some(handle) = vms.get(&self.name) else {
            return true;
        };
        if let Some(answers) = self.asked.take() {
            match answers.try_recv() {
                Ok(Answer::Failed { why, .. }) => self.why = Some(why),
                Ok(_) | Err(TryRecvError::Disconnected) => return true,
                Err(TryRecvError::Empty) => {
                    self.asked = Some(answers);
                    return false;
                }
            }
        }
        let status = handle.status();
        if status.role != Role::Primary {
            return true;
        }
        // What keeps a program without a second copy again and again seldom goes by itself.
        let problem = status.join_problem.as_ref();
        let is_kept_alone = status.program.is_some() && problem.is_some_and(JoinProblem::is_for_good);
        let may_be_joined = status.wants_protection && !is_kept_alone;
        let may_be_protected = status.protected || may_be_joined;
        if !may_be_protected || self.is_alone(handle, &status) {
            daemon.host.events.push(
                &self.name,
                EventKind::EndsHere,
                "no other host takes the VM: it ends with this host's daemon",
            );
            return true;
        }
        if status.protected {
            let (reply, answers) = bounded(1);
            handle.send(LoopEvent::Command(Command::Failover, reply));
            self.asked = Some(answers);
            return false;
        }
        if !std::mem::replace(&mut self.told, true) {
            daemon.host.events.push(
                &self.name,
                EventKind::WaitsForBackup,
                format!(
                    "the VM has no backup now: this host ends when it has one and has handed it over, in {} s at the latest, or at a \
                     second signal",
                    AT_MOST.as_secs()
                ),
            );
        }
        false
    }

    /// Also of a VM that counts as protected: without a majority its backup is not dropped, and cannot take it either.
    fn is_alone(&mut self, handle: &VmHandle, status: &VmStatus) -> bool {
        if handle.has_another_host(status) {
            self.alone_since = None;
            return false;
        }
        self.alone_since.get_or_insert_with(Instant::now).elapsed() > ALONE
    }
}
