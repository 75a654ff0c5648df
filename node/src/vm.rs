//! One VM on one host: its loop, and what the rest of the daemon sees of it.
//!
//! `run` waits and dispatches; `agreement` applies the log; `primary` and `backup` are the two roles; `nics` is the
//! network; `session` are the threads between a primary and its backup; `connect` keeps the links.

mod agreement;
mod backup;
mod care;
mod cold;
mod connect;
pub mod disks;
mod ending;
pub mod event;
mod fault_at;
mod frames;
mod group;
mod hosts;
mod machine;
mod nics;
mod noted;
mod primary;
mod program;
mod queues;
mod remains;
pub use cold::Holding;
pub use connect::{Connector, ask_host, open};
pub use ending::lets_not_go;
pub use fault_at::{Asked, FaultAt, Line, NoSuchFault};
pub use group::BUSY;
pub use primary::AGAIN;
pub use program::PRINTED;
pub use program::copies::Visited;
mod run;
mod session;
mod speculating;
mod status;
mod verification;
mod wait;
mod watch;

use crate::config::{Cluster, VmConfig};
use crate::events::Events;
use crossbeam_channel::{Sender, bounded};
use dunlin_api::{Answer, SyncFigures, VmStatus};
use dunlin_core::wire::WireError;
use dunlin_fabric::group::GroupError;
use dunlin_fabric::link::Identity;
use event::{Command, LoopEvent, LoopSender};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// A file in the VM's folder: this host is to become a member of a group that runs. It founds none, and believes nobody's
/// list of members but the group's.
pub const NEWCOMER: &str = "newcomer";

/// In a VM's folder: its file, with the hosts that it has now.
pub const FILE: &str = "vm.toml";

/// What all VMs of a host share.
pub struct Host {
    /// Its name.
    pub name: String,
    /// The cluster.
    pub cluster: Cluster,
    /// How it shows itself to others.
    pub identity: Identity,
    /// What happened here.
    pub events: Events,
    /// Where VMs are kept.
    pub state: PathBuf,
    /// Told when a VM's loop has ended for good, with whether the VM is to be forgotten.
    pub ended: Sender<Ended>,
}

/// A loop has ended.
pub struct Ended {
    /// Which VM.
    pub vm: String,
    /// The VM was shut down: forget it.
    pub forget: bool,
}

/// What the daemon holds of a VM.
pub struct VmHandle {
    to_loop: LoopSender,
    shared: Arc<Shared>,
    holding: Holding,
    config: Arc<VmConfig>,
    thread: Option<JoinHandle<()>>,
}

/// What a loop shows to others.
#[derive(Default)]
pub(crate) struct Shared {
    status: Mutex<VmStatus>,
    /// Since the VM's hosts have moved.
    config: Mutex<Option<Arc<VmConfig>>>,
    recent_syncs: Mutex<VecDeque<SyncFigures>>,
    /// Where the copies of a bare program differed, and what they said there.
    differences: Mutex<program::difference::Differences>,
    /// Held while the disks are opened: by a start of the VM, or to see how new they are.
    opening_disks: Mutex<()>,
    /// Of machines that have ended here.
    remains: remains::Remains,
    fault_at: Arc<FaultAt>,
    /// How often the loop has turned.
    turns: AtomicU64,
}

impl Shared {
    fn config(&self) -> MutexGuard<'_, Option<Arc<VmConfig>>> {
        self.config.lock()
    }
}

/// Why this host takes no part in a VM's group, or a program's.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It does already.
    #[error("VM '{0}' is here already")]
    AlreadyHere(String),
    /// Its loop would be woken by it.
    #[error("an eventfd: {0}")]
    Eventfd(#[source] io::Error),
    /// The VM's file names others.
    #[error("this host is not in the VM's group")]
    NotInVm,
    /// The program's file names others.
    #[error("this host is not in the program's group")]
    NotInProgram,
    /// The group's log, or its links.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// What was agreed is not understood.
    #[error("the log's snapshot: {0}")]
    Snapshot(#[from] WireError),
    /// The program's data.
    #[error(transparent)]
    Data(#[from] program::data::DataError),
    /// Its loop would run there.
    #[error("a thread for the VM: {0}")]
    Thread(#[source] io::Error),
}

impl VmHandle {
    /// Takes part in the VM's group from now on.
    pub fn start(host: &Arc<Host>, config: VmConfig) -> Result<Self, StartError> {
        let config = Arc::new(config);
        let shared = Arc::new(Shared::default());
        let (to_loop, events) = LoopSender::channel().map_err(StartError::Eventfd)?;
        shared.fault_at.tell(to_loop.clone());
        shared.remains.tell(to_loop.clone());
        let (host_of, config_of, shared_of) = (host.clone(), config.clone(), shared.clone());
        let begun = match config.program.clone() {
            Some(program) => {
                let program_loop = program::ProgramLoop::new(
                    host_of,
                    config_of,
                    program,
                    shared_of,
                    to_loop.clone(),
                    events,
                )?;
                named("program-loop", &config.name).spawn(move || program_loop.run())
            }
            None => {
                let vm_loop = run::VmLoop::new(host_of, config_of, shared_of, to_loop.clone(), events)?;
                named("vm", &config.name).spawn(move || vm_loop.run())
            }
        };
        let thread = begun.map_err(StartError::Thread)?;
        let holding = Holding::new(to_loop.clone(), shared.clone(), config.clone(), host);
        Ok(Self {
            to_loop,
            shared,
            holding,
            config,
            thread: Some(thread),
        })
    }

    /// The VM as its file says, with the hosts that it has now.
    #[must_use]
    pub fn config(&self) -> Arc<VmConfig> {
        self.shared
            .config()
            .clone()
            .unwrap_or_else(|| self.config.clone())
    }

    /// Sends something to the loop.
    pub fn send(&self, event: LoopEvent) {
        self.to_loop.send(event);
    }

    /// To ask what this host holds of the VM.
    #[must_use]
    pub fn holding(&self) -> Holding {
        self.holding.clone()
    }

    /// Where to send things to the loop without holding the handle.
    #[must_use]
    pub fn sender(&self) -> LoopSender {
        self.to_loop.clone()
    }

    /// Tests only: a fault when this host comes to that line.
    pub fn fault_at(&self, asked: Asked) {
        self.shared.fault_at.choose(asked);
    }

    /// Where the copies of a bare program differed, and what both said there.
    #[must_use]
    pub fn differences(&self) -> String {
        let differences = &self.shared.differences;
        differences.lock().text()
    }

    /// How the VM is, with medians.
    #[must_use]
    pub fn status(&self) -> VmStatus {
        let mut status = self.shared.status.lock().clone();
        // Copied: the loop must not wait while medians are made.
        let recent = self.shared.recent_syncs.lock().clone();
        status.sync.median = status::median(&recent);
        status
    }

    /// Whether another host that can run the VM took part in its group by that status.
    #[must_use]
    pub fn has_another_host(&self, status: &VmStatus) -> bool {
        status.peers.iter().any(|peer| peer.connected && !peer.witness)
    }

    /// How often its loop has turned: one that lives does so ten times a second at the least.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// The loop's thread, to wait for its end without holding the handle; once.
    pub fn take_thread(&mut self) -> Option<JoinHandle<()>> {
        self.thread.take()
    }
}

fn named(kind: &str, vm: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(format!("{kind}-{vm}"))
}

/// Waits until a loop has ended.
pub fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread {
        // A panic in the loop has been printed by its thread already.
        let _ = thread.join();
    }
}

/// Answers under way to whoever asked. The loop gives one to each command; a comparison of disks, which tells its progress,
/// has a thread of its own and may wait.
const ANSWERS: usize = 64;

/// Asks the loop for something and waits for its answer.
pub fn command(to_loop: &LoopSender, command: Command) -> Answer {
    converse(to_loop, command, |_| {})
}

/// As [`command`]; what comes before the last answer goes to `each`.
pub fn converse(to_loop: &LoopSender, command: Command, mut each: impl FnMut(&Answer)) -> Answer {
    let (reply, answers) = bounded(ANSWERS);
    let ends = matches!(command, Command::Down { .. });
    to_loop.send(LoopEvent::Command(command, reply));
    for answer in answers {
        if answer.is_last() {
            return answer;
        }
        each(&answer);
    }
    // It ended before it came to this command.
    match (to_loop.is_vm_shut_down(), ends) {
        (true, true) => Answer::done("the VM is ended"),
        (true, false) => Answer::failed("the VM has just been shut down"),
        (false, _) => Answer::failed("the VM's loop has ended; see 'dunlin events'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

    #[test]
    fn whoever_asks_and_does_not_listen_costs_no_more_than_a_few_answers() {
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        let (go_on, waits) = bounded::<()>(0);
        let stuck = std::thread::spawn(move || {
            converse(&to_loop, Command::VerifyDisk { repair: false }, |_| {
                // It takes the first answer, and nothing more until it is let go; then all of them.
                let _ = waits.recv_timeout(PATIENCE);
            })
        });
        let Ok(LoopEvent::Command(_, reply)) = events.recv_timeout(PATIENCE) else {
            panic!("no command came");
        };
        reply.send(Answer::Alive).expect("it listens");
        while !reply.is_empty() {
            // Until it has the first one in its hand.
            std::thread::yield_now();
        }
        let taken = (0..10 * ANSWERS).take_while(|_| reply.try_send(Answer::Alive).is_ok());
        assert_eq!(taken.count(), ANSWERS);
        drop(go_on);
        reply.send(Answer::done("")).expect("it listens");
        assert!(matches!(stuck.join(), Ok(Answer::Done { .. })));
    }

    #[test]
    fn whoever_meets_the_vms_end_hears_of_it() {
        let down = Command::Down { now: true };
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        drop(events);
        // A loop that ended for another reason.
        assert!(matches!(command(&to_loop, down.clone()), Answer::Failed { .. }));
        to_loop.vm_is_shut_down();
        assert!(matches!(command(&to_loop, down), Answer::Done { .. }));
        assert!(matches!(
            command(&to_loop, Command::Failover),
            Answer::Failed { .. }
        ));
    }
}
