//! What a program's loop shows of itself: as a VM's, and what was compared.

use super::SHOW_US;
use super::data::Marks;
use super::state::{Past, ProgramLoop, Role};
use crate::vm::group;
use crate::vm::session::talker::Talker;
use dunlin_api::{ProgramStatus, QueueFigures, Standing, State, SyncStatus, VmStatus};
use dunlin_core::agreed::Life;
use dunlin_core::consensus::Role as ConsensusRole;
use dunlin_core::output::compare::Counters;
use dunlin_core::output::gate::Voice;
use dunlin_program::data::mark::Mark;

impl ProgramLoop {
    /// What was compared so far.
    pub(super) fn counters(&self) -> Counters {
        self.net.compared.total()
    }

    /// What the loop itself knows, for another host.
    pub(super) fn standing(&self) -> Standing {
        let last = self.group.appended();
        Standing {
            alive: self.role != Role::None,
            may_lead: None,
            led: self.group.leader().is_some(),
            last: (last.term.0, last.index.0),
            complete: self.agreement.leadership.appended_complete().0,
            // One that cannot be read counts as half of one.
            disks: super::images::told(self.mark()),
            noted: None,
            recovering: self.group.role() == ConsensusRole::Recovering,
            ended_after: match self.shown.failure {
                Some(_) => self.own.last_inputs.lines(),
                None => Vec::new(),
            },
            ended: self.shown.failure.is_some(),
            begins_again: self.shown.failure.is_some() && self.own.restart.waits(),
        }
    }

    /// How new the image of its data is here.
    fn mark(&self) -> Option<Mark> {
        let read = |marks: Marks| {
            marks.read().unwrap_or_else(|why| {
                tracing::warn!("{why}");
                Some(Mark {
                    torn: true,
                    ..Mark::default()
                })
            })
        };
        self.marks().and_then(read)
    }

    /// Brings what others see up to date, not too often.
    pub(super) fn show(&mut self, now_us: u64) {
        if now_us.saturating_sub(self.shown.at_us) < SHOW_US {
            return;
        }
        self.shown.at_us = now_us;
        let role = match self.role {
            Role::Primary => dunlin_api::Role::Primary,
            Role::Backup => dunlin_api::Role::Backup,
            Role::None if self.is_witness() => dunlin_api::Role::Witness,
            Role::None => dunlin_api::Role::None,
        };
        let (state, why) = match &self.shown.failure {
            Some(why) if self.own.restart.waits() => (State::Restarting, why.as_str()),
            Some(why) => (State::Failed, why.as_str()),
            None => self.state(),
        };
        let complete = self.agreement.state().complete.len() > 1;
        let listens = self.own.running.as_ref().is_some_and(|running| running.ready);
        let serves = match self.role {
            Role::Primary => self.net.door.is_some(),
            Role::Backup => listens,
            Role::None => true,
        };
        // For who waits for its start.
        let alone =
            self.role == Role::Primary && self.net.door.is_some() && self.net.output.voice() == Voice::Alone;
        let join_problem = self.join_problem().filter(|_| alone);
        let status = VmStatus {
            name: self.config.name.clone(),
            role,
            state,
            why: why.to_owned(),
            protected: complete && serves && self.backup.ended.is_none() && self.group.leader().is_some(),
            wants_protection: true,
            policy: self.config.policy.name().to_owned(),
            leader: self.group.leader().map(|id| self.config.host_name(id).to_owned()),
            term: self.group.term().0,
            epoch: self.net.output.epoch().0,
            committed: self.group.committed().0,
            applied: self.agreement.applied.0,
            held_frames: self.net.output.held_frames(),
            log_entries: self.group.appended().index.0 - self.group.snapshot().last.index.0,
            frames_in: self.net.frames_in,
            frames_out: self.net.frames_out,
            peers: group::peers(&self.group, &self.config, self.me),
            protocol: self.group.protocol(),
            standby: self.config.standby_host().map(str::to_owned),
            sync: SyncStatus::default(),
            failover: self.shown.failover,
            join_problem,
            queues: self.queues(),
            program: Some(self.program_status()),
            ..VmStatus::default()
        };
        *self.shared.status.lock() = status;
    }

    fn state(&self) -> (State, &'static str) {
        let listens = self.own.running.as_ref().is_some_and(|running| running.ready);
        let state = match (self.role, self.net.output.voice()) {
            (Role::None, _) if self.agreement.state().life == Life::Down => State::Stopped,
            (Role::None, _) if self.backup.expected.is_some() => State::Joining,
            (Role::None, _)
                if !self.is_witness() && self.own.past == Past::RanHere && self.own.notes.is_none() =>
            {
                return (State::Lost, "its copy here has ended with the daemon");
            }
            (Role::None, _) => State::Waiting,
            _ if !listens => State::Starting,
            (Role::Backup, _) => State::Running,
            (Role::Primary, Voice::Shut) => State::QuorumLost,
            (Role::Primary, Voice::Alone) => State::Alone,
            (Role::Primary, _) if self.is_bringing() => State::Alone,
            (Role::Primary, _) => State::Running,
        };
        (state, "")
    }

    fn program_status(&self) -> ProgramStatus {
        let counters = self.counters();
        let inputs = self.own.running.as_ref().map(|running| *running.gate.counters());
        let inputs = inputs.unwrap_or_default();
        ProgramStatus {
            matched: counters.matched,
            differing: counters.differences(),
            inputs: inputs.inputs,
            together: inputs.together,
            not_read: inputs.impatient,
            lost: inputs.lost,
            begun_again: self.own.restart.count,
        }
    }

    fn queues(&self) -> Vec<QueueFigures> {
        let ((_, log), (_, log_limit)) = (self.group.log_size(), self.group.log_limits());
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        let waiting = self.own.running.as_ref().map(|running| &running.gate);
        let queues = [
            ("log", (log, log_limit, 0)),
            ("links", self.group.link_queue()),
            (
                "inbound",
                waiting.map_or((0, 0, 0), |gate| {
                    (
                        gate.waiting_bytes(),
                        gate.most_waiting_bytes(),
                        gate.counters().lost,
                    )
                }),
            ),
            ("outbound", self.net.output.held()),
            ("retransmit", self.net.output.retransmit()),
            ("compared", self.net.output.compared()),
            ("words-in", self.inbox.to_loop.words()),
            ("words-out", talker.map(Talker::queue).unwrap_or_default()),
        ];
        queues.map(|(name, held)| QueueFigures::new(name, held)).into()
    }
}
