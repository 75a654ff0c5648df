//! A bare program's loop: its part in what `run` is for a VM. One loop for each program on each host of its group.
//!
//! * **Decides:** when the copies begin, who serves, when the second copy counts no more. The order of reading is core's
//!   `program::order`, what may leave and what was said alike core's `output`.
//! * **Flow:** the primary's TAP -> `Agreed::Frames` -> on both hosts, in log order, through the order of reading into the copy's card;
//!   a copy's card -> held on the primary until the backup's copy has said the same, kept on the backup for a take-over.
//! * **Invariants:**
//!   1. Both copies get every agreed input: they begin by the same entry of the log, from nothing, or one is made of the other between
//!      two entries.
//!   2. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//!   3. A backup that is lost, says something else or does not get on is dropped from the complete set by an agreed entry before
//!      outputs leave without it.
//!   4. No input is taken before each copy that counts as complete listens: one that comes earlier would be refused by one and
//!      taken by the other.
//!   5. A program runs once: neither a restarted daemon nor an entry that was in its log before begins it again. What was lost on all
//!      hosts is begun again by a new entry, where it has data or its file says so.
//! * **Source:** APUS (SoCC'17): agree on inputs, compare outputs. docs/programs.md says how this differs.
//! * **Not here:** data that outlives the copies; the namespaces, and how a running program is copied (`dunlin_program`).

mod agreement;
mod ahead;
mod backlog;
mod carrying;
mod clock;
mod comparing;
mod copies;
pub mod data;
pub mod difference;
mod ending;
pub mod error;
mod frames;
mod hearing;
mod hosts;
mod images;
mod joined;
mod joining;
mod poison;
mod preparing;
mod restart;
mod serving;
pub(in crate::vm) mod state;
mod status;
pub mod told;
mod unmatched;
mod waiting;
use super::error::StartError;
use super::event::{Command, LoopEvent, LoopSender};
use super::group;
use super::shared::{Ended, Host, NEWCOMER, Shared};
use super::state::agreement::Agreement;
use super::state::ending::Ending;
use super::state::hosts::Peers;
use crate::config::{ProgramSpec, VmConfig};
use backlog::Backlog;
use crossbeam_channel::{Receiver, Sender};
use difference::Compared;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::Life;
use dunlin_core::output::Output;
use dunlin_core::output::announcements::Announcements;
use dunlin_core::output::gate::Voice;
use dunlin_core::units::{Epoch, ReplicaId};
use dunlin_fabric::clock::HostClock;
use dunlin_fabric::link::{Purpose, Stream};
use dunlin_guest::frames::Announcer;
use dunlin_program::limits;
use poison::LastInputs;
pub use preparing::PRINTED;
use preparing::{RAN, note_that_it_ran};
use restart::Restart;
use state::{Backup, Images, Inbox, Network, Own, Past, ProgramLoop, Ready, Role, Shown, TimeAndChance};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The status is brought up to date at least this often while something happens.
const SHOW_US: u64 = 20_000;

/// A copy that was on its way when an earlier daemon was killed: all of a program's memory.
fn forget_what_was_carried(folder: &Path) {
    for name in [joining::FOLDER, joined::FOLDER] {
        // What cannot be removed now is removed before the next one.
        let _ = std::fs::remove_dir_all(folder.join(name));
    }
}

impl ProgramLoop {
    /// A loop that is ready to run.
    pub fn new(
        host: Arc<Host>,
        config: Arc<VmConfig>,
        program: ProgramSpec,
        shared: Arc<Shared>,
        to_loop: LoopSender,
        events: Receiver<LoopEvent>,
    ) -> Result<Self, StartError> {
        let member = config.member(&host.name).ok_or(StartError::NotInProgram)?;
        let folder = host.state.join("vms").join(&config.name);
        let newcomer = folder.join(NEWCOMER).exists();
        let members = match newcomer {
            true => Vec::new(),
            false => config.group.iter().map(|host| host.member).collect(),
        };
        let past = Past::found(newcomer, folder.join(RAN).exists());
        if newcomer {
            // Over restarts as well.
            note_that_it_ran(&folder)?;
        }
        forget_what_was_carried(&folder);
        limits::forget_the_dead();
        let group = group::open(&host, &config, member.id, members, host.cluster.durability)?;
        let first = config.group[0].member.id;
        let agreement = Agreement::found(&group, &member, first)?;
        let connectors = group::connectors(&host, &config, member.id, &to_loop);
        let marks = data::Marks::of(&program).filter(|_| !member.witness);
        let notes = marks.map(data::Notes::begin).transpose()?;
        let mut this = Self {
            me: member.id,
            own: Own {
                order: program.reading.order,
                found: group.appended().index,
                past,
                begins_by_us: None,
                begun_in: None,
                starting: None,
                running: None,
                notes,
                images: Images::default(),
                backlog: Backlog::default(),
                untaken_at_us: None,
                agreed: TimeAndChance::default(),
                last_inputs: LastInputs::default(),
                restart: Restart::default(),
            },
            group,
            peers: Peers {
                connectors,
                newcomer,
                ..Peers::default()
            },
            agreement,
            role: Role::None,
            backup: Backup::default(),
            net: Network {
                door: None,
                announcer: Announcer::new(program.card.mac),
                announcements: Announcements::default(),
                output: Output::new(Voice::Shut, Epoch(1)).with_budget(config.memory.outbound_bytes()),
                compared: Compared::default(),
                frames_in: 0,
                frames_out: 0,
                impatient_told: (0, None),
                not_agreed: 0,
                taken_us: 0,
                buffer: vec![0; frames::FRAME_BYTES],
            },
            ending: Ending::default(),
            inbox: Inbox {
                events,
                to_loop,
                next_session: 0,
                born: HostClock::begin(),
                ready: Ready::default(),
            },
            shown: Shown::default(),
            shared,
            host,
            config,
            program,
        };
        this.follow_hosts();
        this.show(SHOW_US);
        Ok(this)
    }

    /// Runs until the program is ended or the daemon ends.
    pub fn run(mut self) {
        while !self.is_over() {
            let ready = self.wait();
            if ready.waker {
                self.inbox.to_loop.clear();
            }
            self.group.woke(ready.group);
            self.inbox.ready = ready;
            while let Ok(event) = self.inbox.events.try_recv() {
                self.handle(event);
            }
            self.step();
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.ends.store(true, Ordering::Relaxed);
        self.drop_copy();
        self.answer_ended();
        if self.agreement.state().life == Life::Down {
            self.inbox.to_loop.vm_is_shut_down();
        }
        // Whoever forgets the program removes its folder.
        if let Some(keeper) = self.peers.keeper.take() {
            keeper.close();
        }
        self.show(u64::MAX);
        if let Some(ended) = self.ending.ended.take() {
            // The daemon may be ending as well.
            let _ = self.host.ended.send(ended);
        }
    }

    /// Everything that is not an event: descriptors and deadlines.
    fn step(&mut self) {
        self.hear_words();
        self.read_card();
        self.tick();
        self.follow_group();
        self.apply_agreed_entries();
        self.agreement.propose_unsaid(&mut self.group);
        self.hear_copy();
        self.look_whether_it_listens();
        self.begin();
        self.look_after_loss();
        self.look_after_hosts();
        self.watch_backup();
        self.bring_in_backup();
        self.end_untaken_copy();
        self.open_door();
        self.end_by_order();
        // What the last steps proposed leaves now, not a wake-up later.
        self.follow_group();
        self.apply_agreed_entries();
        self.pass();
        self.release();
        // Last: whoever was answered just now may have asked again.
        if self.read_door() {
            self.follow_group();
            self.apply_agreed_entries();
            self.pass();
        }
        self.net.compared.saw(self.net.output.counters());
        let now_us = self.now_us();
        if self.shown.told.take() {
            self.shown.at_us = 0;
            self.show(now_us.max(SHOW_US));
            self.host.events.nudge();
        } else {
            self.show(now_us);
        }
    }

    /// What this host keeps of the program.
    fn folder(&self) -> PathBuf {
        self.host.state.join("vms").join(&self.config.name)
    }

    fn marks(&self) -> Option<data::Marks> {
        self.own.notes.as_ref().map(|notes| notes.marks().clone())
    }

    /// Microseconds since the loop began.
    fn now_us(&self) -> u64 {
        self.inbox.born.now_us()
    }

    fn event(&self, kind: EventKind, text: impl Into<String>) {
        self.shown.told.set(true);
        self.host.events.push(&self.config.name, kind, text);
    }

    fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Accepted(hello, stream) => {
                match self.config.member(&hello.from).map(|member| member.id) {
                    Some(peer) if hello.purpose == Purpose::Log => self.add_log_link(peer, stream),
                    Some(peer) if hello.purpose == Purpose::Sync && hello.extra == joining::FOR_A_JOIN => {
                        self.accept_join(peer, stream);
                    }
                    Some(peer) if hello.purpose == Purpose::Sync => self.accept_session(peer, stream),
                    Some(_) => {}
                    None => self.membership().refuse_stranger(&hello.from),
                }
            }
            LoopEvent::LogLink(peer, stream) => self.add_log_link(peer, stream),
            LoopEvent::Command(command, reply) => self.command(command, reply),
            LoopEvent::Shutdown => {
                self.ending.ended.get_or_insert(Ended {
                    vm: self.config.name.clone(),
                    forget: false,
                });
            }
            LoopEvent::ProgramPrepared(result) => self.prepared(result),
            LoopEvent::SessionConnected { session, result } => self.session_connected(session, result),
            LoopEvent::StreamLent { session, stream } => self.stream_lent(session, stream),
            LoopEvent::SessionStreamEnded { session } => self.session_ended(session),
            LoopEvent::BackupSaid {
                session,
                epoch,
                frames,
            } => self.backup_said(session, epoch, frames),
            LoopEvent::BackupIdle { session, .. } => self.backup_listens(session),
            LoopEvent::ProgramJoin { session, step } => self.join_step(session, step),
            LoopEvent::ProgramImages(found) => self.images_found(found),
            LoopEvent::ProgramBrought { session, result } => self.brought(session, result),
            LoopEvent::Visit(command, reply) => {
                // Whoever asked may have gone.
                let _ = reply.send(self.visited(command).map(Box::new));
            }
            LoopEvent::EndTold(_) => self.forget(false),
            LoopEvent::GoneTold(told) => self.membership().gone_told(told),
            // What only a VM's threads tell.
            _ => {}
        }
    }

    fn command(&mut self, command: Command, reply: Sender<Answer>) {
        let answer = match command {
            Command::Remove => {
                self.agreement.leadership.is_told_of_the_end();
                self.forget(false);
                Answer::done("removed")
            }
            Command::Standing => Answer::Standing(self.standing()),
            Command::Down { .. } => return self.order_down(reply),
            Command::ForceDown => self.force_down(),
            Command::Failover => match self.begin_switchover(&reply) {
                Ok(()) => return,
                Err(why) => Answer::failed(why.to_string()),
            },
            Command::RemoveMember(member) => return self.remove_member(member, reply),
            Command::Move {
                leaves,
                hosts,
                unprotected_meanwhile,
            } => return self.move_part(leaves, hosts, unprotected_meanwhile, reply),
            Command::Standby(hosts) => return self.name_standby(hosts, reply),
            Command::Left { newest } => self.was_left(newest),
            Command::Policy(_)
            | Command::Protect
            | Command::ProtectAlone { .. }
            | Command::VerifyDisk { .. }
            | Command::Inject { .. } => Answer::refused(
                "this is for VMs: a program that runs gets its second copy by itself, as soon as its other host is there",
            ),
        };
        // Whoever asked may have gone.
        let _ = reply.send(answer);
    }

    fn add_log_link(&mut self, peer: ReplicaId, stream: Stream) {
        if let Err(error) = self.group.add_link(peer, stream) {
            let host = self.config.host_name(peer);
            self.event(EventKind::LinkRefused, format!("host '{host}': {error}"));
            self.peers.link_lost(peer);
        }
    }

    fn is_connected(&self, peer: ReplicaId) -> bool {
        group::is_connected(&self.group, peer)
    }

    /// Whether this host agrees, and runs no copy.
    fn is_witness(&self) -> bool {
        let mut witnesses = self.config.group.iter().filter(|host| host.member.witness);
        witnesses.any(|host| host.member.id == self.me)
    }

    /// The other host that can run it.
    fn other(&self) -> Option<ReplicaId> {
        let members = self.config.group.iter().map(|host| host.member);
        members
            .filter(|member| !member.witness && member.id != self.me)
            .map(|member| member.id)
            .next()
    }
}
