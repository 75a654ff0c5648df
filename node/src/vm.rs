//! One VM on one host: its loop, and what the rest of the daemon sees of it.
//!
//! `state` is what a loop holds, and `shared` what others see of it; `run` waits and dispatches; `agreement` applies the log; `primary` and `backup`
//! are the two roles; `nics` is the network; `session` are the threads between a primary and its backup; `connect` keeps the links.
//!
//! No file here is in a cycle of more than two that import each other (`cargo xtask verify`): what a file needs of another one's state is in
//! `state`, below both.

mod agreement;
mod ask;
mod backup;
mod care;
mod checkpoint;
mod cold;
mod connect;
pub mod disks;
mod ending;
mod error;
pub mod event;
mod fault_at;
mod frames;
mod group;
mod held_memory;
mod holding;
mod hosts;
mod keeper;
mod machine;
mod nics;
mod noted;
mod primary;
mod program;
mod queues;
mod remains;
mod replacing;
mod run;
mod session;
mod shared;
mod speculating;
mod standby;
mod state;
mod status;
mod verification;
mod wait;
mod watch;

pub use ask::{command, converse};

pub use checkpoint::receiver::receive as receive_checkpoint;

pub use connect::{Connector, ask_host, open};

pub use ending::lets_not_go;
pub use error::StartError;

pub use fault_at::{Asked, FaultAt, Line, NoSuchFault};

pub use group::{AGAIN, BUSY};
pub use held_memory::HeldMemory;
pub use holding::Holding;
pub use program::PRINTED;
pub use program::told::Visited;

pub use shared::{Ended, FILE, Host, NEWCOMER};

use crate::config::VmConfig;
use checkpoint::Feeder;
use dunlin_api::VmStatus;
use event::{LoopEvent, LoopSender};
use parking_lot::Mutex;
use shared::Shared;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What the daemon holds of a VM.
pub struct VmHandle {
    to_loop: LoopSender,
    shared: Arc<Shared>,
    holding: Holding,
    config: Arc<VmConfig>,
    /// Feeds the standby out of a backup's copy.
    feeder: Mutex<Option<Feeder>>,
    thread: Option<JoinHandle<()>>,
}

impl VmHandle {
    /// Takes part in the VM's group from now on.
    pub fn start(host: &Arc<Host>, config: VmConfig) -> Result<Self, StartError> {
        let config = Arc::new(config);
        let shared = Arc::new(Shared::default());
        let (to_loop, events) = LoopSender::channel().map_err(StartError::Eventfd)?;
        let (of_fault, of_remains) = (to_loop.clone(), to_loop.clone());
        shared
            .fault_at
            .tell(move |text| of_fault.send(LoopEvent::Fault(text)));
        shared
            .remains
            .tell(move || of_remains.send(LoopEvent::NothingRemains));
        let (host_of, config_of, shared_of) = (host.clone(), config.clone(), shared.clone());
        let begun = match config.program.clone() {
            Some(program) => {
                let program_loop = program::state::ProgramLoop::new(
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
                let vm_loop = state::VmLoop::new(host_of, config_of, shared_of, to_loop.clone(), events)?;
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
            feeder: Mutex::default(),
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
        status.checkpoint = self.feeder.lock().as_ref().map(Feeder::status);
        status
    }

    /// Whether another host that can run the VM took part in its group by that status.
    #[must_use]
    pub fn has_another_host(&self, status: &VmStatus) -> bool {
        status.peers.iter().any(|peer| peer.connected && !peer.witness)
    }

    /// How often its loop has turned: one that lives does so ten times a second at the least. None of one that is over.
    #[must_use]
    pub fn turns(&self) -> Option<u64> {
        self.shared.turned()
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
