//! The primary brings in a copy of the running program: the loop's side. Its steps are in `carrying`.
//!
//! * **Decides:** when a copy is taken, and when it counts.
//! * **Flow:** no second copy, and the other host is there -> it makes room -> no more inputs until the last one was read -> the program
//!   stands still, is dumped, and runs on (a line is drawn through what it says; what it says from there on waits) -> its copy gets what
//!   was agreed since, and says what this one has said -> the group agrees that both are complete.
//! * **Invariants:** 1. while a dump is taken nothing reaches the copy's card, and nothing that was agreed waits for it: the copy on the
//!   other host goes on with the entry behind the last one that was applied here; 2. nothing leaves from the line on that the new copy
//!   has not said: a client would acknowledge what that one's kernel has not sent, and the kernel throws such segments away; 3. each
//!   step has a bound, and what fails is tried again, later each time.
//! * **Source:** as a VM's join (`vm::primary::joining`); CRIU (`dunlin_program::guard`).
//! * **Not here:** the host that gets the copy (`joined`).

use super::carrying::Carrier;
use super::state::{ProgramLoop, Role};
use crate::vm::program::state::{Backup, Join, Phase, Tries, Word};
use crate::vm::program::told::JoinStep;
use crate::vm::session::link::SyncLink;
use crossbeam_channel::bounded;
use dunlin_api::{EventKind, JoinProblem};
use dunlin_core::agreed::{Agreed, Life, ReplicaSet};
use dunlin_core::output::gate::Voice;
use dunlin_core::program::order::Order;
use dunlin_program::guard::Place;
use std::sync::Arc;

/// In the program's: what is carried to the other host.
pub(super) const FOLDER: &str = "join";

/// What a session for a join says of itself when it connects.
pub(super) const FOR_A_JOIN: &[u8] = b"join";

/// What a host says that has not heard yet what was agreed: it has when it is asked again.
pub(super) const NOT_YET: &str = "it does not know the program as a running one yet";

/// A program that has just lost its second copy is left alone for so long; after each join that failed twice as long, up to that.
const REST_US: (u64, u64) = (500_000, 64_000_000);
/// A second copy that stood for so long was no failure.
const STOOD_US: u64 = 60_000_000;
/// The inputs under way have been read by then: each is waited for no longer than the program's patience.
const QUIET_US: u64 = 3_000_000;
/// The thread that carries a copy is told to dump it, and where the line is: it never waits for room.
const WORDS: usize = 2;
/// The other host makes room, or the program is dumped: who does that has bounds of its own.
const CARRIED_US: u64 = 240_000_000;
/// As the first, with an image of its data: each of its pieces has a bound of its own.
const WITH_DATA_US: u64 = 12 * 3600 * 1_000_000;
/// The copy runs by then: its clients wait.
const BROUGHT_US: u64 = 10_000_000;
/// The group has agreed by then, or will not.
const AGREED_US: u64 = 3_000_000;
/// What ends both copies is taken for that where the second end comes so soon. What the program says waits meanwhile.
const ENDS_ALIKE_US: u64 = 200_000;

impl ProgramLoop {
    /// Brings in a second copy where there is none, and gets on with that.
    pub(super) fn bring_in_backup(&mut self) {
        if self.backup.join.is_some() {
            return self.get_on();
        }
        let now_us = self.now_us();
        let serves = self.role == Role::Primary && self.agreement.leads() && self.net.door.is_some();
        let alone = self.net.output.voice() == Voice::Alone && self.backup.session.is_none();
        let lives = self.agreement.state().life == Life::Running && self.ending.ended.is_none();
        let asked_for_else =
            self.ending.shutdown.is_ordered() || self.backup.switchover.is_some() || self.is_carrying();
        if !serves || !alone || !lives || asked_for_else || now_us < self.backup.tries.at_us {
            return;
        }
        if !self
            .other()
            .is_some_and(|other| self.is_connected(other) && self.may_have_a_copy(other))
        {
            return;
        }
        if let Some(why) = self.waits_for_an_upgrade() {
            return self.join_fails_before_it_began(&why.to_string());
        }
        let (words, _) = bounded(WORDS);
        let join = Join {
            session: 0,
            phase: Phase::Asked,
            until_us: now_us + self.asked_us(),
            words,
            epoch: self.net.output.epoch(),
            quiet_at_us: 0,
            quiet_us: 0,
            stood: None,
            carried_bytes: 0,
        };
        self.backup.join = Some(join);
        self.connect_session(FOR_A_JOIN);
        if let Some(join) = &mut self.backup.join {
            join.session = self.inbox.next_session;
        }
    }

    /// How long all may take that goes ahead while the program runs.
    fn asked_us(&self) -> u64 {
        match self.program.data {
            Some(_) => WITH_DATA_US,
            None => CARRIED_US,
        }
    }

    /// The stream to the other host stands.
    pub(super) fn join_connected(&mut self, link: &SyncLink) {
        let folder = self.folder().join(FOLDER);
        let marks = self.marks();
        let (Some(running), Some(join)) = (&self.own.running, &mut self.backup.join) else {
            return;
        };
        let place = match Place::of(&running.copy) {
            Ok(place) => place,
            Err(error) => return self.join_fails(&error.to_string()),
        };
        // From here on what is said is known: what the kernel says again behind the line, because its acknowledgement waits while no input
        // is taken, is then no news, and needs no word of a copy that has heard it in time.
        self.net.output.compare_from(self.net.output.epoch());
        let (words, heard) = bounded(WORDS);
        join.words = words;
        let carrier = Carrier {
            session: join.session,
            link: link.ends(),
            words: heard,
            to_loop: self.inbox.to_loop.clone(),
            place,
            folder,
            term: self.group.term(),
            marks,
            whole: self.backup.tries.next_is_whole(),
            _busy: Arc::clone(&self.backup.busy),
        };
        let spawned = std::thread::Builder::new()
            .name("program-join".into())
            .spawn(move || carrier.run());
        if let Err(error) = spawned {
            self.join_fails(&format!("a thread for the join: {error}"));
        }
    }

    /// Whether no input may come near the program now (invariant 1).
    pub(super) fn is_quiet(&self) -> bool {
        let quiet = |join: &Join| matches!(join.phase, Phase::Quieting | Phase::Dumping);
        self.backup.join.as_ref().is_some_and(quiet)
    }

    /// Whether a thread for a join is at work still, be it one that was given up.
    pub(super) fn is_carrying(&self) -> bool {
        Arc::strong_count(&self.backup.busy) > 1
    }

    /// Whether a copy is on its way, and does not run yet: nobody is lost when its session ends, and the thread that carries it tells why.
    pub(super) fn is_bringing(&self) -> bool {
        self.backup
            .join
            .as_ref()
            .is_some_and(|join| join.phase < Phase::Agreeing)
    }

    fn get_on(&mut self) {
        let now_us = self.now_us();
        let leads = self.agreement.leads() && self.role == Role::Primary;
        let Some(join) = &mut self.backup.join else { return };
        if !leads {
            return self.join_is_void();
        }
        if now_us > join.until_us {
            let why = match join.phase {
                Phase::Asked | Phase::Dumping | Phase::Sending => "it takes too long",
                Phase::Quieting => "the program does not read its inputs",
                Phase::Agreeing => "the group does not agree",
            };
            // What has taken all of its time does so again.
            self.backup.tries.in_a_row = self.backup.tries.in_a_row.max(JoinProblem::FOR_GOOD - 1);
            return self.join_fails(why);
        }
        let gate_is_idle = self
            .own
            .running
            .as_ref()
            .is_some_and(|running| running.gate.is_idle());
        let all_applied = self.agreement.applied == self.group.appended().index;
        if join.phase == Phase::Quieting && gate_is_idle && all_applied {
            join.phase = Phase::Dumping;
            join.until_us = now_us + CARRIED_US;
            // A thread that has gone has told so.
            let _ = join.words.send(Word::Dump);
        }
    }

    /// The thread that carries the copy got on.
    pub(super) fn join_step(&mut self, session: u64, step: JoinStep) {
        let now_us = self.now_us();
        if let JoinStep::StandsStill(why) = &step {
            // Whatever became of the join: it was the copy that runs here, and no other has begun while a thread is at work.
            if self.own.running.is_some() {
                self.fails(why);
            }
            return;
        }
        let Some(join) = self.backup.join.as_mut().filter(|join| join.session == session) else {
            return;
        };
        match step {
            JoinStep::RoomIsMade => {
                join.phase = Phase::Quieting;
                join.until_us = now_us + QUIET_US;
                join.quiet_at_us = now_us;
            }
            JoinStep::Stands => self.draw_line(),
            JoinStep::RunsOn(stood) => {
                join.stood = Some(stood);
                join.phase = Phase::Sending;
                join.quiet_us = now_us - join.quiet_at_us;
                join.until_us = now_us + BROUGHT_US;
            }
            JoinStep::Loaded { bytes } => {
                join.phase = Phase::Agreeing;
                join.until_us = now_us + AGREED_US;
                join.carried_bytes = bytes;
                let epoch = join.epoch;
                self.net.output.line_is_covered();
                self.net.output.backup_loaded(epoch);
                self.backup.ready = true;
                self.backup.followed_us = now_us;
                let Some(other) = self.other() else { return };
                let set = ReplicaSet::one(self.me).with(other);
                if !self.propose(&Agreed::Complete { set, epoch }) {
                    self.join_fails("the group's log does not take it");
                }
            }
            // The second one was told above.
            JoinStep::Failed(why) | JoinStep::StandsStill(why) => self.join_fails(&why),
        }
    }

    /// The program stands still: all that it has said is on the card, and belongs to the epoch that ends.
    fn draw_line(&mut self) {
        self.read_all_of_card();
        let epoch = self.net.output.epoch();
        let connections = self.net.output.draw_line();
        let (Some(join), Some(running)) = (&mut self.backup.join, &self.own.running) else {
            return;
        };
        let drawn = running.source.as_ref().map(|source| source.drawn()).transpose();
        let drawn = match drawn {
            Ok(drawn) => drawn,
            Err(error) => return self.join_fails(&format!("how much chance it has drawn: {error}")),
        };
        let seed = running.source.as_ref().map(|source| source.seed());
        join.epoch = epoch;
        // A thread that has gone has told so.
        let _ = join.words.send(Word::LineDrawn {
            epoch,
            applied: self.agreement.applied,
            connections,
            order: running.gate.table(),
            one_at_a_time: self.program.reading.adapts && self.own.order == Order::Read,
            time: running.time,
            chance: seed.zip(drawn),
        });
        // What was said before the line leaves as ever; invariant 2 for what comes.
        self.release();
        self.net.output.set_voice(Voice::Protected);
    }

    /// The group has agreed that both are complete.
    pub(super) fn backup_is_in(&mut self) {
        let now_us = self.now_us();
        self.net.output.set_voice(Voice::Protected);
        let Some(join) = self.backup.join.take() else {
            return;
        };
        if self.net.output.epoch() > join.epoch {
            self.net.output.acknowledged(join.epoch);
        }
        self.backup.tries = Tries {
            failures: self.backup.tries.failures,
            stands_since_us: Some(now_us),
            ..Tries::default()
        };
        let host = self.other().map_or("?", |other| self.config.host_name(other));
        let stood = join.stood.map_or(String::new(), |stood| format!("; {stood}"));
        let text = format!(
            "a copy of the running program was brought to host '{host}' ({:.1} MiB): no input was taken for {:.0} ms{stood}",
            join.carried_bytes as f64 / f64::from(1 << 20),
            join.quiet_us as f64 / 1e3
        );
        self.event(EventKind::Joined, text);
        self.event(
            EventKind::Protected,
            "a second copy of the program runs on the same inputs",
        );
    }

    /// It is alone from now on.
    pub(super) fn rests(&mut self) {
        let now_us = self.now_us();
        self.backup.rests(now_us);
    }

    /// What keeps it without a second copy, for who waits for its start or asks.
    pub(super) fn join_problem(&self) -> Option<JoinProblem> {
        let why = self.backup.tries.why.clone()?;
        Some(JoinProblem {
            passes: why.ends_with(NOT_YET),
            why: format!("it has no second copy: {why}"),
            times: self.backup.tries.in_a_row,
        })
    }

    pub(super) fn join_fails(&mut self, why: &str) {
        if !self.is_bringing() {
            // The group may have taken it in.
            return self.backup_is_lost(why);
        }
        self.join_is_void();
        if !why.ends_with(NOT_YET) {
            // It may be what goes ahead that the other host cannot do with, or has no room for.
            self.backup.tries.not_brought(why);
        }
        self.join_fails_before_it_began(why);
    }

    fn join_fails_before_it_began(&mut self, why: &str) {
        let now_us = self.now_us();
        self.backup.tries.failures += 1;
        self.backup.tries.in_a_row += u32::from(!why.ends_with(NOT_YET));
        self.backup.tries.at_us = now_us + rest_us(self.backup.tries.failures);
        // Who waits for a start is told each time.
        self.shown.told.set(true);
        // Once for each reason: it is tried again and again.
        if self.backup.tries.is_news(why) {
            let host = self.other().map_or("?", |other| self.config.host_name(other));
            let text =
                format!("no copy of the running program is on host '{host}': {why}; it is tried again");
            self.event(EventKind::JoinFailed, text);
        }
    }

    /// Nothing of it counts any more. If the group was not asked yet, this host's copy is the only one, as before.
    pub(super) fn join_is_void(&mut self) {
        let was_bringing = self.is_bringing();
        if self.backup.join.take().is_none() {
            return;
        }
        self.backup.session = None;
        if was_bringing && self.net.output.voice() != Voice::Shut {
            self.net.output.set_voice(Voice::Alone);
        }
    }
}

impl Backup {
    /// Its copy has ended. What has ended it may end the copy here in a moment, and then neither is to be dropped: a host that alone was
    /// complete would begin the program again when its daemon is started anew.
    pub(super) fn has_ended(&mut self, now_us: u64, why: String) {
        self.ended = Some((now_us + ENDS_ALIKE_US, why));
    }

    /// Whether it is left to the copy here to end as well.
    pub(super) fn may_end_alike(&self, now_us: u64) -> bool {
        self.ended
            .as_ref()
            .is_some_and(|(until_us, _)| now_us < *until_us)
    }

    /// It is lost.
    pub(super) fn give_up(&mut self, why: &str) {
        self.session = None;
        self.ended = None;
        if self.join.take().is_some() {
            // Lost before the group had agreed on taking it in: it is one of those that are dropped again and again, too.
            self.tries.failures += 1;
            self.tries.in_a_row += 1;
            self.tries.why = Some(why.to_owned());
        }
    }

    /// There is none from now on: the next one is tried when the program has been left alone for a while.
    fn rests(&mut self, now_us: u64) {
        self.ended = None;
        let stood = self.tries.stands_since_us.take();
        if stood.is_some_and(|since_us| now_us - since_us > STOOD_US) {
            self.tries.failures = 0;
        }
        // One that is dropped again and again is brought in less and less often.
        self.tries.failures += u32::from(stood.is_some());
        self.tries.at_us = now_us + rest_us(self.tries.failures);
    }
}

fn rest_us(failures: u32) -> u64 {
    (REST_US.0 << failures.min(8)).min(REST_US.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_core::units::Epoch;

    #[test]
    fn what_fails_is_left_alone_for_longer_each_time_and_never_for_ever() {
        assert_eq!(rest_us(0), 500_000);
        assert_eq!(rest_us(1), 1_000_000);
        assert_eq!(rest_us(7), 64_000_000);
        assert_eq!(rest_us(u32::MAX), 64_000_000);
    }

    /// A copy that runs, and that the group is asked to take in.
    fn asked_for() -> Join {
        Join {
            session: 1,
            phase: Phase::Agreeing,
            until_us: AGREED_US,
            words: bounded(WORDS).0,
            epoch: Epoch(1),
            quiet_at_us: 0,
            quiet_us: 0,
            stood: None,
            carried_bytes: 0,
        }
    }

    /// One that differed at once was brought in again each half second.
    #[test]
    fn a_copy_lost_before_the_group_has_agreed_on_it_has_failed_and_each_next_one_comes_later() {
        let mut backup = Backup::default();
        let mut now_us = 0;
        for (times, pause_us) in (1..).zip([1_000_000, 2_000_000, 4_000_000]) {
            backup.join = Some(asked_for());
            backup.give_up("lost");
            assert!(backup.join.is_none());
            assert_eq!(
                (backup.tries.in_a_row, backup.tries.why.as_deref()),
                (times, Some("lost"))
            );
            backup.rests(now_us);
            assert_eq!(backup.tries.at_us - now_us, pause_us);
            now_us = backup.tries.at_us;
        }
    }

    /// Both copies have ended by one input: the primary's a moment later.
    #[test]
    fn a_copy_that_has_ended_is_dropped_when_the_one_here_has_had_its_time_to_end_as_well() {
        let mut backup = Backup::default();
        assert!(!backup.may_end_alike(0) && backup.ended.is_none());
        backup.has_ended(7, "exit code 0".to_owned());
        assert!(backup.may_end_alike(7 + ENDS_ALIKE_US - 1));
        assert!(!backup.may_end_alike(7 + ENDS_ALIKE_US));
        assert!(
            backup.ended.is_some(),
            "it is lost then, and by what it has said of itself"
        );
        backup.give_up("lost");
        assert!(backup.ended.is_none(), "the next one has not ended");
    }

    #[test]
    fn a_copy_lost_later_has_failed_once_and_what_failed_before_counts_unless_it_stood_for_long() {
        for (stood_us, failures) in [(0, 4), (STOOD_US, 4), (STOOD_US + 1, 1)] {
            let tries = Tries {
                failures: 3,
                stands_since_us: Some(7),
                ..Tries::default()
            };
            let mut backup = Backup {
                tries,
                ..Backup::default()
            };
            backup.give_up("lost");
            backup.rests(7 + stood_us);
            assert_eq!(backup.tries.failures, failures, "{stood_us}");
        }
    }
}
