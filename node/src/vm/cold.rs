//! After the loss of all hosts: no copy of the VM is alive anywhere. Which host boots it, from its disk?
//!
//! Flow: nobody leads, and the log says that the VM has lived -> an *inquest*: how new are the disks here, and what do the
//! other hosts hold? -> the host with the newest consistent disk stands for election (its *mandate*) -> elected, it looks
//! at what is agreed, has "I alone am complete" agreed, and boots. The others join it as after any loss.
//!
//! Invariants:
//! 1. Nobody boots while a copy may be alive: every host that can run the VM has said that it holds none, or a person has
//!    said that those who say nothing are dead (`promote --force --from-disk`).
//! 2. All judge by the same answers and the same order, so at most one host has a mandate. If the answers changed in
//!    between and two have it, the election makes it one, as always.
//! 3. A mandate ends with the first leader: it is not good for a later loss.
//! 4. What a host knows of who was complete counts, though it has no disk (a witness) or its log is lost (its note, `noted`): a
//!    disk that is known to be older boots only where a person says that it is to (`--force-stale`).
//!
//! Source: ARCHITECTURE.md, "Failures": the persisted log says who was last. Not here: how new an image is (the guest's
//! `disk`), what a leader may do (`agreement`, `primary`).

mod judgement;

use super::connect::ask_host;
use super::disks::{Disks, DisksError};
use super::event::{Command, LoopEvent, LoopSender};
use super::remains::StillThere;
use super::run::{Role, VmLoop};
use super::{Host, Shared, command};
use crate::config::VmConfig;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, DiskStanding, EventKind, Request, Standing};
use dunlin_core::agreed::Life;
use dunlin_core::consensus::Role as ConsensusRole;
use dunlin_core::replica::leadership::Mandate;
use dunlin_core::units::ReplicaId;
use judgement::{Verdict, judge};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Nobody leads for this long: an election takes a tenth of it.
const LEADERLESS_US: u64 = 1_000_000;
/// Between two inquests.
const AGAIN_US: u64 = 2_000_000;
/// How long another host may take to open its disks.
const PATIENCE: Duration = Duration::from_secs(20);

/// How far this host is with it.
#[derive(Default)]
pub struct Cold {
    leaderless_since_us: Option<u64>,
    next_us: u64,
    asking: bool,
    /// Why this host stands for election without a living copy.
    mandate: Option<String>,
    /// ... and from a disk that is known to be older.
    stale: bool,
    /// A person wants the VM to boot here.
    order: Option<Order>,
    complaint: String,
}

struct Order {
    force_stale: bool,
    reply: Sender<Answer>,
}

impl Cold {
    /// What is agreed contradicts it.
    pub fn end_mandate(&mut self) {
        self.mandate = None;
        self.stale = false;
    }

    /// Whether this host may be elected to boot the VM.
    pub fn mandate(&self) -> Mandate {
        match (&self.mandate, self.stale) {
            (None, _) => Mandate::None,
            (Some(_), false) => Mandate::Newest,
            (Some(_), true) => Mandate::Stale,
        }
    }
}

/// Why it is not known what another host holds.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Its own words, or those of whoever asked it.
    #[error("{0}")]
    Refused(String),
    /// It says something else.
    #[error("host '{0}' does not say what it holds")]
    NotSaid(String),
    /// Whoever asked has broken off.
    #[error("no answer")]
    NoAnswer,
}

/// Why it is not known how new the disks here are.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// A machine that has ended still has them.
    #[error(transparent)]
    Remains(#[from] StillThere),
    /// They cannot be opened.
    #[error(transparent)]
    Disks(#[from] DisksError),
}

/// What was found out.
pub struct Inquest {
    disks: Result<Vec<DiskStanding>, LookError>,
    others: Vec<(ReplicaId, Result<Standing, AskError>)>,
}

/// What this host holds of a VM, to be asked from other threads.
#[derive(Clone)]
pub struct Holding {
    to_loop: LoopSender,
    shared: Arc<Shared>,
    config: Arc<VmConfig>,
    state: PathBuf,
    is_witness: bool,
}

impl Holding {
    /// Of this VM.
    pub(super) fn new(to_loop: LoopSender, shared: Arc<Shared>, config: Arc<VmConfig>, host: &Host) -> Self {
        let state = host.state.clone();
        let is_witness = config.member(&host.name).is_some_and(|member| member.witness);
        Self {
            to_loop,
            shared,
            config,
            state,
            is_witness,
        }
    }

    /// What another host hears. Opens the disks if no VM has them.
    pub fn standing(&self) -> Answer {
        match command(&self.to_loop, Command::Standing) {
            Answer::Standing(standing)
                if !standing.alive && !standing.led && !self.is_witness && self.config.program.is_none() =>
            {
                match self.disks() {
                    Ok(disks) => Answer::Standing(Standing { disks, ..standing }),
                    Err(why) => Answer::failed(why.to_string()),
                }
            }
            answer => answer,
        }
    }

    fn disks(&self) -> Result<Vec<DiskStanding>, LookError> {
        self.shared.remains.await_none()?;
        let _alone = self.shared.opening_disks.lock();
        Ok(Disks::look(&self.config, &self.state)?)
    }
}

impl VmLoop {
    /// What the loop itself knows.
    pub(super) fn standing(&self) -> Standing {
        let last = self.group.appended();
        Standing {
            alive: !matches!(self.role, Role::None),
            led: self.group.leader().is_some(),
            last: (last.term.0, last.index.0),
            complete: self.agreement.leadership.appended_complete().0,
            disks: Vec::new(),
            noted: self.notebook.newest(),
            recovering: self.group.role() == ConsensusRole::Recovering,
            ended_after: Vec::new(),
            ended: false,
            begins_again: false,
        }
    }

    /// No copy here and nobody leads: is that so everywhere?
    pub(super) fn look_after_loss(&mut self) {
        let me = self.me;
        let lost = matches!(self.role, Role::None)
            && !self.witness
            && self.failure.is_none()
            && self.agreement.state().life != Life::Down
            && self.group.leader().is_none_or(|leader| leader == me);
        if !lost {
            if self.cold.leaderless_since_us.is_some() {
                self.end_inquest("another host leads the VM's group, or the VM runs");
            }
            return;
        }
        let now_us = self.now_us();
        let since_us = *self.cold.leaderless_since_us.get_or_insert(now_us);
        if self.cold.asking || now_us < self.cold.next_us || self.group.is_leader() {
            return;
        }
        let by_itself = now_us - since_us > LEADERLESS_US
            && !self.agreement.is_fresh()
            // Without its log it does not know what became of the VM, nor does it vote.
            && self.group.role() != ConsensusRole::Recovering;
        if by_itself || self.cold.order.is_some() {
            self.hold_inquest();
        } else if now_us - since_us > LEADERLESS_US && self.group.role() == ConsensusRole::Recovering {
            self.complain_of_oblivion();
        }
    }

    /// The log was in memory only, and nobody is there who could tell what it said.
    fn complain_of_oblivion(&mut self) {
        let vm = &self.config.name;
        let why = format!(
            "nobody leads the VM's group, and this host does not know any more what was agreed (durability = \"memory\"): it \
             waits for a host that does. If no copy of the VM is alive anywhere, 'dunlin promote --force --from-disk {vm}' \
             boots it from the disk of the host where it is said; 'dunlin down --force {vm}' takes it away"
        );
        if self.cold.complaint != why {
            self.event(EventKind::Waiting, &*why);
            self.cold.complaint = why;
        }
    }

    fn end_inquest(&mut self, why: &str) {
        if let Some(order) = std::mem::take(&mut self.cold).order {
            // Whoever asked may have gone.
            let _ = order.reply.send(Answer::refused(why));
        }
    }

    fn hold_inquest(&mut self) {
        self.cold.asking = true;
        let (host, to_loop) = (self.host.clone(), self.to_loop.clone());
        let holding = Holding::new(to_loop.clone(), self.shared.clone(), self.config.clone(), &host);
        let me = self.me;
        let work = move || {
            let (vm, host) = (&holding.config.name, &host);
            let others = holding.config.group.iter().filter(|peer| peer.member.id != me);
            // At once: a dead host is waited for, and may not be the only one.
            let others = std::thread::scope(|scope| {
                let asked: Vec<_> = others
                    .map(|peer| {
                        (
                            peer.member.id,
                            scope.spawn(move || ask_standing(host, &peer.name, vm)),
                        )
                    })
                    .collect();
                let said = asked.into_iter();
                said.map(|(id, answer)| (id, answer.join().unwrap_or(Err(AskError::NoAnswer))))
                    .collect()
            });
            let disks = holding.disks();
            to_loop.send(LoopEvent::Inquest(Inquest { disks, others }));
        };
        if let Err(error) = std::thread::Builder::new().name("inquest".into()).spawn(work) {
            self.cold.asking = false;
            tracing::error!("a thread to ask the other hosts: {error}");
        }
    }

    /// The answers are here.
    pub(super) fn inquest_done(&mut self, inquest: Inquest) {
        self.cold.asking = false;
        self.cold.next_us = self.now_us() + AGAIN_US;
        if self.cold.leaderless_since_us.is_none() {
            return;
        }
        let verdict = judge(self, inquest);
        match self.cold.order.take() {
            Some(order) => self.obey(verdict, &order),
            None => match verdict {
                Verdict::Boot(why) => {
                    if self.cold.mandate.as_ref() != Some(&why) {
                        self.event(EventKind::ColdStart, &*why);
                    }
                    self.cold.mandate = Some(why);
                }
                Verdict::NotHere(why) | Verdict::Stale(why) | Verdict::Silent(why) => {
                    self.cold.end_mandate();
                    if self.cold.complaint != why {
                        self.event(EventKind::Waiting, &*why);
                        self.cold.complaint = why;
                    }
                }
            },
        }
    }

    fn obey(&mut self, verdict: Verdict, order: &Order) {
        self.cold.end_mandate();
        let (why, stale) = match verdict {
            Verdict::Boot(why) | Verdict::Silent(why) => (why, false),
            Verdict::Stale(why) if order.force_stale => (format!("from an older disk: {why}"), true),
            Verdict::Stale(why) => {
                let why = format!(
                    "{why}. If that host is gone for good, 'dunlin promote --force --from-disk --force-stale {}' boots the VM \
                     from the older disk here, and what clients were told since then is lost",
                    self.config.name
                );
                // Whoever asked may have gone: here and below.
                let _ = order.reply.send(Answer::refused(why));
                return;
            }
            Verdict::NotHere(why) => {
                let _ = order.reply.send(Answer::refused(why));
                return;
            }
        };
        self.event(EventKind::ColdStart, format!("by a person's order: {why}"));
        self.cold.mandate = Some(why);
        self.cold.stale = stale;
        if let Some(answer) = self.stand_alone(&order.reply) {
            self.cold.end_mandate();
            let _ = order.reply.send(answer);
        }
    }

    /// A person wants the VM to boot from this host's disk.
    pub(super) fn boot_by_order(&mut self, force_stale: bool, reply: &Sender<Answer>) -> Option<Answer> {
        if self.witness || !matches!(self.role, Role::None) {
            return Some(Answer::refused(
                "this host has no disk of the VM that it could boot from now",
            ));
        }
        if let Some(why) = &self.failure {
            return Some(Answer::refused(format!(
                "the VM has failed here: {why}; end this host's daemon and start it again first"
            )));
        }
        self.cold.order = Some(Order {
            force_stale,
            reply: reply.clone(),
        });
        self.cold.next_us = 0;
        None
    }
}

/// What another host holds of a VM or a program.
///
/// # Errors
/// Where it does not say so.
pub(super) fn ask_standing(host: &Host, peer: &str, vm: &str) -> Result<Standing, AskError> {
    let request = Request::Standing { vm: vm.to_owned() };
    match ask_host(host, peer, &request, PATIENCE, &mut |_| {}) {
        Answer::Standing(standing) => Ok(standing),
        Answer::Failed { why, .. } => Err(AskError::Refused(why)),
        _ => Err(AskError::NotSaid(peer.to_owned())),
    }
}
