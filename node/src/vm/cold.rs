//! After the loss of all hosts: no copy of the VM is alive anywhere. Which host boots it, from its disk?
//!
//! Flow: nobody leads, and the log says that the VM has lived -> an *inquest*: how new are the disks here, and what do the
//! other hosts hold? -> the host with the newest consistent disk stands for election (its *mandate*) -> elected, it looks
//! at what is agreed, has "I alone am complete" agreed, and boots. The others join it as after any loss.
//!
//! Invariants:
//! 1. Nobody boots while a copy may be alive: every host that can run the VM has said that it holds none, or a person has
//!    said that those who say nothing are dead (`protect --alone --from-disk`).
//! 2. All judge by the same answers and the same order, so at most one host has a mandate. If the answers changed in
//!    between and two have it, the election makes it one, as always.
//! 3. A mandate ends with the first leader: it is not good for a later loss.
//!
//! Source: ARCHITECTURE.md, "Failures": the persisted log says who was last. Not here: how new an image is (the guest's
//! `disk`), what a leader may do (`agreement`, `primary`).

use super::connect::ask_host;
use super::disks::Disks;
use super::event::{Command, LoopEvent, LoopSender};
use super::run::{Role, VmLoop};
use super::{Host, Shared, command};
use crate::config::VmConfig;
use crate::control::{Answer, DiskStanding, Request, Standing};
use crossbeam_channel::Sender;
use dunlin_core::agreed::{Agreed, Life, ReplicaSet};
use dunlin_core::consensus::Role as ConsensusRole;
use dunlin_core::units::ReplicaId;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
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
    /// A person wants the VM to boot here.
    order: Option<Sender<Answer>>,
    complaint: String,
}

impl Cold {
    /// What is agreed contradicts it.
    pub fn end_mandate(&mut self) {
        self.mandate = None;
    }

    /// Whether this host may be elected to boot the VM.
    pub fn has_mandate(&self) -> bool {
        self.mandate.is_some()
    }
}

/// What was found out.
pub struct Inquest {
    disks: Result<Vec<DiskStanding>, String>,
    others: Vec<(ReplicaId, Result<Standing, String>)>,
}

/// What this host holds of a VM, to be asked from other threads.
#[derive(Clone)]
pub struct Holding {
    to_loop: LoopSender,
    shared: Arc<Shared>,
    config: Arc<VmConfig>,
    folder: PathBuf,
}

impl Holding {
    /// Of this VM.
    pub(super) fn new(to_loop: LoopSender, shared: Arc<Shared>, config: Arc<VmConfig>, host: &Host) -> Self {
        let folder = host.state.join("vms").join(&config.name);
        Self {
            to_loop,
            shared,
            config,
            folder,
        }
    }

    /// What another host hears. Opens the disks if no VM has them.
    pub fn standing(&self) -> Answer {
        match command(&self.to_loop, Command::Standing) {
            Answer::Standing(standing) if !standing.alive && !standing.led => match self.disks() {
                Ok(disks) => Answer::Standing(Standing { disks, ..standing }),
                Err(why) => Answer::failed(why),
            },
            answer => answer,
        }
    }

    fn disks(&self) -> Result<Vec<DiskStanding>, String> {
        let _alone = self
            .shared
            .opening_disks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Disks::look(&self.config, &self.folder)
    }
}

impl VmLoop {
    /// What the loop itself knows.
    pub(super) fn standing(&self) -> Standing {
        let last = self.group.core().appended();
        Standing {
            alive: !matches!(self.role, Role::None),
            led: self.group.leader().is_some(),
            last: (last.term.0, last.index.0),
            complete: self.agreement.appended_complete.0,
            disks: Vec::new(),
        }
    }

    /// No copy here and nobody leads: is that so everywhere?
    pub(super) fn look_after_loss(&mut self) {
        let me = self.me;
        let lost = matches!(self.role, Role::None)
            && !self.witness
            && self.failure.is_none()
            && self.agreement.state.life != Life::Down
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
             waits for a host that does. If no copy of the VM is alive anywhere, 'dunlin protect --alone --from-disk {vm}' \
             boots it from the disk of the host where it is said; 'dunlin down --force {vm}' takes it away"
        );
        if self.cold.complaint != why {
            self.event("waiting", &*why);
            self.cold.complaint = why;
        }
    }

    fn end_inquest(&mut self, why: &str) {
        if let Some(reply) = std::mem::take(&mut self.cold).order {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::refused(why));
        }
    }

    fn hold_inquest(&mut self) {
        self.cold.asking = true;
        let (host, to_loop) = (self.host.clone(), self.to_loop.clone());
        let holding = Holding::new(to_loop.clone(), self.shared.clone(), self.config.clone(), &host);
        let me = self.me;
        let work = move || {
            let vm = &holding.config.name;
            let others = holding.config.group.iter();
            let others = others.filter(|peer| peer.member.id != me && !peer.member.witness);
            let others = others
                .map(|peer| {
                    let request = Request::Standing { vm: vm.clone() };
                    let said = match ask_host(&host, &peer.name, &request, PATIENCE, &mut |_| {}) {
                        Answer::Standing(standing) => Ok(standing),
                        Answer::Failed { why, .. } => Err(why),
                        _ => Err(format!("host '{}' does not say what it holds", peer.name)),
                    };
                    (peer.member.id, said)
                })
                .collect();
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
        let order = self.cold.order.take();
        match (verdict, order) {
            (Verdict::Boot(why), None) => {
                if self.cold.mandate.as_ref() != Some(&why) {
                    self.event("cold-start", &*why);
                }
                self.cold.mandate = Some(why);
            }
            (Verdict::Boot(why) | Verdict::Silent(why), Some(reply)) => {
                self.event("cold-start", format!("by a person's order: {why}"));
                self.cold.mandate = Some(why);
                if let Some(answer) = self.stand_alone(&reply) {
                    self.cold.mandate = None;
                    // Whoever asked may have gone: here and below.
                    let _ = reply.send(answer);
                }
            }
            (Verdict::NotHere(why), Some(reply)) => {
                self.cold.mandate = None;
                let _ = reply.send(Answer::refused(why));
            }
            (Verdict::NotHere(why) | Verdict::Silent(why), None) => {
                self.cold.mandate = None;
                if self.cold.complaint != why {
                    self.event("waiting", &*why);
                    self.cold.complaint = why;
                }
            }
        }
    }

    /// A person wants the VM to boot from this host's disk.
    pub(super) fn boot_by_order(&mut self, reply: &Sender<Answer>) -> Option<Answer> {
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
        self.cold.order = Some(reply.clone());
        self.cold.next_us = 0;
        None
    }

    /// Elected with a mandate, and the agreed state does not contradict it.
    pub(super) fn may_boot_cold(&self) -> bool {
        let state = self.agreement.state;
        let agreed = match state.life {
            Life::Fresh => true,
            Life::Running => state.complete.contains(self.me),
            Life::Down => false,
        };
        self.cold.has_mandate() && agreed
    }

    pub(super) fn boot_cold(&mut self) {
        self.propose(&Agreed::Complete {
            set: ReplicaSet::one(self.me),
            epoch: self.agreement.state.epoch,
        });
    }
}

enum Verdict {
    /// This host boots the VM.
    Boot(String),
    /// It would, if a host that says nothing were dead.
    Silent(String),
    /// It does not.
    NotHere(String),
}

/// Invariants 1 and 2.
fn judge(vm_loop: &VmLoop, inquest: Inquest) -> Verdict {
    let name = |id: ReplicaId| vm_loop.config.host_name(id);
    let mine = match inquest.disks {
        Ok(disks) => Standing {
            disks,
            ..vm_loop.standing()
        },
        Err(why) => return Verdict::NotHere(format!("the VM's disk here cannot be read: {why}")),
    };
    let mut standings = vec![(vm_loop.me, mine)];
    let mut silent = Vec::new();
    for (id, said) in inquest.others {
        match said {
            Ok(standing) if standing.alive || standing.led => {
                return Verdict::NotHere(format!(
                    "host '{}' holds a living copy of the VM, or knows who leads",
                    name(id)
                ));
            }
            Ok(standing) => standings.push((id, standing)),
            Err(why) => silent.push(format!("host '{}' ({why})", name(id))),
        }
    }
    let complete = newest_set(&standings);
    let best = best(&standings, complete);
    if best != vm_loop.me {
        return Verdict::NotHere(format!(
            "no copy of the VM is alive here; host '{}' has the newest disk and boots it",
            name(best)
        ));
    }
    if !complete.is_empty() && !complete.contains(best) {
        return Verdict::NotHere(
            "the log says that another host went on without this one; its disk may lack what clients were told".into(),
        );
    }
    if standings[0].1.disks.iter().any(|disk| !disk.consistent) {
        return Verdict::NotHere("the VM's disk here is an unfinished copy".into());
    }
    if silent.is_empty() {
        Verdict::Boot(format!(
            "no host holds a living copy of the VM; it boots here, from the newest disk ({}); what was only in its memory is \
             gone",
            describe(&standings[0].1)
        ))
    } else {
        Verdict::Silent(format!(
            "no copy of the VM is alive here, and {} may hold one; if it is dead for good, 'dunlin protect --alone \
             --from-disk {}' boots the VM from this host's disk ({})",
            silent.join(", "),
            vm_loop.config.name,
            describe(&standings[0].1)
        ))
    }
}

/// Who was complete, as the newest log has it.
fn newest_set(standings: &[(ReplicaId, Standing)]) -> ReplicaSet {
    let newest = standings.iter().max_by_key(|(_, standing)| standing.last);
    ReplicaSet(newest.map_or(0, |(_, standing)| standing.complete))
}

/// The host to boot: in the complete set, then the newest consistent disks, then the first in the VM's list.
fn best(standings: &[(ReplicaId, Standing)], complete: ReplicaSet) -> ReplicaId {
    let rank = |(id, standing): &&(ReplicaId, Standing)| {
        (
            complete.contains(*id),
            standing.disks.clone(),
            std::cmp::Reverse(id.0),
        )
    };
    standings
        .iter()
        .max_by_key(rank)
        .map_or(ReplicaId(0), |(id, _)| *id)
}

fn describe(standing: &Standing) -> String {
    match standing.disks.first() {
        Some(disk) => format!(
            "term {}, {}",
            disk.term,
            if disk.primary {
                "as primary".to_owned()
            } else {
                format!("as backup up to epoch {}", disk.epoch)
            }
        ),
        None => "it has none: it boots as at first".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(id: u8, last: (u64, u64), complete: u8, disk: DiskStanding) -> (ReplicaId, Standing) {
        let standing = Standing {
            last,
            complete,
            disks: vec![disk],
            ..Standing::default()
        };
        (ReplicaId(id), standing)
    }

    fn disk(consistent: bool, term: u64, primary: bool, epoch: u64) -> DiskStanding {
        DiskStanding {
            consistent,
            term,
            primary,
            epoch,
        }
    }

    fn chosen(standings: &[(ReplicaId, Standing)]) -> u8 {
        best(standings, newest_set(standings)).0
    }

    #[test]
    fn the_primarys_disk_is_newer_than_its_backups() {
        let primary = standing(1, (3, 90), 0b11, disk(true, 3, true, 0));
        let backup = standing(0, (3, 90), 0b11, disk(true, 3, false, 40));
        assert_eq!(chosen(&[backup.clone(), primary.clone()]), 1);
        assert_eq!(chosen(&[primary, backup]), 1, "whoever asks");
    }

    #[test]
    fn a_host_that_was_dropped_does_not_boot_though_it_does_not_know_it() {
        // Host 0 died first; host 1 went on alone and said so, which host 0 never heard.
        let old = standing(0, (3, 90), 0b11, disk(true, 3, true, 0));
        let new = standing(1, (4, 120), 0b10, disk(true, 4, true, 0));
        assert_eq!(chosen(&[old, new]), 1);
    }

    #[test]
    fn an_unfinished_copy_is_not_chosen_and_without_disks_the_first_host_is() {
        let half = standing(0, (5, 10), 0b11, disk(false, 9, false, 9));
        let whole = standing(1, (5, 10), 0b11, disk(true, 5, true, 0));
        assert_eq!(chosen(&[half, whole]), 1);
        let bare = |id| {
            let (id, standing) = standing(id, (5, 10), 0b11, disk(true, 0, false, 0));
            (
                id,
                Standing {
                    disks: Vec::new(),
                    ..standing
                },
            )
        };
        assert_eq!(chosen(&[bare(1), bare(0)]), 0);
    }
}
