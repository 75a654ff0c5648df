//! Whose image counts: where a program with data begins, and where it begins again when no copy of it is alive anywhere.
//!
//! * **Decides:** on which host: also of a program that has ended everywhere and is to be begun again (`restart`), with data or without. It
//!   begins there alone; the other host gets a copy of the running program, and of its data.
//! * **Flow:** a leader of a program that never ran, or nobody leads one that did -> the marks here and there -> `Agreed::Complete` of one
//!   host, which begins.
//! * **Invariants:** 1. a host whose image may be newer is waited for; 2. a torn image is never begun from; 3. nobody begins again while a
//!   copy may be alive: every other host that is complete by the newest log has said that it has none; 4. both hosts judge alike, and the
//!   election makes it one; 5. what a program that has lived left is waited for where it is not there: nothing is made in its place.
//! * **Source:** as `vm::cold`. **Not here:** marks (`data`); a VM's disks (`vm::cold`).

use super::clock::TooOld;
use super::state::{Past, ProgramLoop, Role};
use crate::vm::cold::ask_standing;
use crate::vm::event::LoopEvent;
use crate::vm::program::error::DataError;
use crate::vm::program::told::Found;
use crate::vm::state::cold::AskError;
use dunlin_api::{DiskStanding, EventKind, Standing};
use dunlin_core::agreed::{Agreed, Life, ReplicaSet};
use dunlin_core::consensus::Role as ConsensusRole;
use dunlin_core::units::{Epoch, Index, ReplicaId};
use dunlin_program::data::mark::Mark;

/// Between two questions.
const AGAIN_US: u64 = 1_000_000;
/// The other host begins within this time, or is looked for anew.
const HANDED_WITHIN_US: u64 = 10_000_000;
/// A host whose copy has not begun yet does not take the lead.
const HAND_EVERY_US: u64 = 100_000;
/// Nobody leads for this long: an election takes a tenth of it.
const LEADERLESS_US: u64 = 1_000_000;

/// Why no host begins the program yet.
#[derive(Debug, thiserror::Error)]
enum JudgeError {
    /// Of the image here.
    #[error(transparent)]
    Own(#[from] DataError),
    /// Invariant 1.
    #[error("the program has data, and those on host '{host}' may be newer: it is waited for ({error})")]
    MayBeNewer {
        /// The host that does not say.
        host: String,
        /// Why not.
        #[source]
        error: AskError,
    },
    /// Invariant 3.
    #[error("host '{host}' may have a living copy of the program: it is waited for ({error})")]
    MayLive {
        /// The host that does not say.
        host: String,
        /// Why not.
        #[source]
        error: AskError,
    },
    /// Invariant 2.
    #[error(
        "neither host's image of the program's data is a whole one: a copy was on its way when both hosts were lost. Bring one back from a \
         backup of yours; or take away both images and their marks, and say 'dunlin down' and 'dunlin up': then the program begins with nothing"
    )]
    NoImage,
    /// It says a new time and a new seed.
    #[error(transparent)]
    TooOld(#[from] TooOld),
    /// This host's daemon may have been started since, and does not know how it ended.
    #[error(
        "no copy of the program is alive here, and the one on host '{host}' has ended and is not begun again by itself: 'dunlin down \
         {name}', then 'dunlin up'"
    )]
    EndedThere {
        /// Where.
        host: String,
        /// Of the program.
        name: String,
    },
    /// That host begins it.
    #[error("no copy of the program is alive here, and another host's data are newer")]
    NewerThere,
}

/// Which host begins.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    Here,
    There,
    Nobody,
}

/// By the images of both hosts; `first`: this one, where both are as new.
fn choose(here: Option<Mark>, there: Option<Mark>, first: bool) -> Choice {
    let whole = |mark: Option<Mark>| mark.filter(|mark| !mark.torn);
    match (whole(here), whole(there)) {
        (None, None) if here.is_none() && there.is_none() => match first {
            true => Choice::Here,
            false => Choice::There,
        },
        // Invariant 2.
        (None, None) => Choice::Nobody,
        (Some(_), None) => Choice::Here,
        (None, Some(_)) => Choice::There,
        (Some(here), Some(there)) if here > there || (here == there && first) => Choice::Here,
        _ => Choice::There,
    }
}

/// Who was complete, by the newest log of this host and of those that have said what theirs is.
fn complete_by_the_newest(own: &Standing, said: &[(ReplicaId, &Standing)]) -> ReplicaSet {
    let all = said.iter().map(|(_, standing)| *standing).chain([own]);
    let newest = all.map(|standing| (standing.last, standing.complete)).max();
    ReplicaSet(newest.map_or(0, |(_, complete)| complete))
}

/// Whose copy has ended, and is not to be begun again. One that was not complete any more has no say: it may have failed long ago.
fn ended_for_good(complete: ReplicaSet, said: &[(ReplicaId, &Standing)]) -> Option<ReplicaId> {
    let mut said = said.iter();
    said.find(|(id, standing)| complete.contains(*id) && standing.ended && !standing.begins_again)
        .map(|(id, _)| *id)
}

/// As hosts tell each other of it.
pub(super) fn told(mark: Option<Mark>) -> Vec<DiskStanding> {
    let standing = |mark: Mark| DiskStanding {
        consistent: !mark.torn,
        term: mark.run,
        primary: false,
        epoch: mark.index,
    };
    mark.map(standing).into_iter().collect()
}

fn heard(standing: &Standing) -> Option<Mark> {
    standing.disks.first().map(|disk| Mark {
        run: disk.term,
        index: disk.epoch,
        torn: !disk.consistent,
    })
}

impl ProgramLoop {
    /// The group has agreed who is complete, and this host is: so is its image.
    pub(super) fn note_that_it_is_complete(&self, index: Index, set: ReplicaSet) {
        let is_its = set.contains(self.me) && self.role != Role::None && !self.is_in_copy(index);
        if let (Some(notes), true) = (&self.own.notes, is_its) {
            notes.note(index);
        }
    }

    /// Asks the hosts of a program of which no copy runs how new their images are.
    pub(super) fn ask_of_images(&mut self) {
        let now_us = self.now_us();
        if self.own.images.asking || now_us < self.own.images.next_us {
            return;
        }
        let marks = self.marks();
        let (host, config, to_loop, me) = (
            self.host.clone(),
            self.config.clone(),
            self.inbox.to_loop.clone(),
            self.me,
        );
        let work = move || {
            let peers = config.group.iter().filter(|peer| peer.member.id != me);
            // At once: a dead host is waited for, and may not be the only one.
            let others = std::thread::scope(|scope| {
                let asked: Vec<_> = peers
                    .map(|peer| {
                        let ask = || ask_standing(&host, &peer.name, &config.name);
                        (peer.member.id, scope.spawn(ask))
                    })
                    .collect();
                let said = asked.into_iter();
                said.map(|(id, answer)| (id, answer.join().unwrap_or(Err(AskError::NoAnswer))))
                    .collect()
            });
            let own = marks.map_or(Ok(None), |marks| marks.read());
            to_loop.send(LoopEvent::ProgramImages(Found { own, others }));
        };
        let spawned = std::thread::Builder::new()
            .name("program-images".into())
            .spawn(work);
        match spawned {
            Ok(_) => self.own.images.asking = true,
            Err(error) => tracing::error!("a thread to ask the other hosts: {error}"),
        }
    }

    /// The answers are here.
    pub(super) fn images_found(&mut self, found: Found) {
        self.own.images.asking = false;
        self.own.images.next_us = self.now_us() + AGAIN_US;
        let judged = if self.agreement.state().life == Life::Fresh && self.agreement.leads() {
            self.judge_first(found)
        } else if self.is_lost() {
            self.judge_loss(found)
        } else {
            return;
        };
        let why = judged.map_err(|error| error.to_string());
        if let Err(why) = why
            && self.own.images.complaint != why
        {
            self.event(EventKind::Waiting, &*why);
            self.own.images.complaint = why;
        }
    }

    fn judge_first(&mut self, found: Found) -> Result<(), JudgeError> {
        let term = self.group.term();
        let Some(other) = self.other() else { return Ok(()) };
        if self.own.begun_in == Some(term) {
            return Ok(());
        }
        let set = match self.choose(found.own?, found.others)? {
            Choice::Here => ReplicaSet::one(self.me),
            Choice::There => ReplicaSet::one(other),
            Choice::Nobody => return Err(JudgeError::NoImage),
        };
        let entry = Agreed::Complete { set, epoch: Epoch(1) };
        if self.say_first_time_and_seed() && self.propose(&entry) {
            self.own.begun_in = Some(term);
        }
        Ok(())
    }

    /// The input by which the copies of both hosts have ended.
    fn ended_both(&self, found: &Found) -> Option<String> {
        self.shown.failure.as_ref()?;
        let own = self.own.last_inputs.lines();
        let said = found.others.iter().filter_map(|(_, said)| said.as_ref().ok());
        let theirs: Vec<&String> = said.flat_map(|standing| &standing.ended_after).collect();
        own.into_iter().find(|input| theirs.contains(&input))
    }

    fn choose(
        &self,
        own: Option<Mark>,
        others: Vec<(ReplicaId, Result<Standing, AskError>)>,
    ) -> Result<Choice, JudgeError> {
        let Some(other) = self.other() else {
            return Ok(Choice::Here);
        };
        let said = others.into_iter().find(|(id, _)| *id == other);
        match said {
            Some((_, Ok(standing))) => {
                // One that does not know any more that it is to be begun again does not begin it.
                let first = self.me < other || (self.own.restart.waits() && !standing.begins_again);
                Ok(choose(own, heard(&standing), first))
            }
            Some((_, Err(error))) => {
                let host = self.config.host_name(other).to_owned();
                Err(match self.own.notes {
                    Some(_) => JudgeError::MayBeNewer { host, error },
                    None => JudgeError::MayLive { host, error },
                })
            }
            None => Ok(Choice::Here),
        }
    }

    /// The other host begins, and leads from there on.
    pub(super) fn begins_elsewhere(&mut self) {
        if let Some(other) = self.other() {
            let host = self.config.host_name(other).to_owned();
            self.event(
                EventKind::BeginsElsewhere,
                format!("host '{host}' has the newer image of the program's data: it begins there"),
            );
            let now_us = self.now_us();
            self.own.images.elsewhere = Some((self.group.term(), now_us + HANDED_WITHIN_US));
            self.own.images.next_us = now_us;
        }
    }

    /// It leads until the other host has the entry by which it begins, and its copy: nobody else could pass that entry on.
    pub(super) fn leads_for_the_other(&self) -> bool {
        let term = self.group.term();
        let until_us = self.own.images.elsewhere.filter(|(its, _)| *its == term);
        self.agreement.leads() && until_us.is_some_and(|(_, until_us)| self.now_us() < until_us)
    }

    fn hand_to_the_other(&mut self) {
        let now_us = self.now_us();
        if let Some(other) = self.other()
            && self.leads_for_the_other()
            && now_us >= self.own.images.next_us
        {
            self.own.images.next_us = now_us + HAND_EVERY_US;
            self.group.transfer_to(other);
        }
    }

    // After the loss of all copies.

    fn is_lost(&self) -> bool {
        let by_data = self.own.notes.is_some() && self.shown.failure.is_none();
        let by_order = self.shown.failure.is_some() && self.own.restart.is_due(self.now_us());
        (by_data || by_order)
            && self.role == Role::None
            && self.own.starting.is_none()
            && self.backup.expected.is_none()
            && self.ending.ended.is_none()
            // Before anybody leads again nothing counts as agreed: what was appended tells that it has lived.
            && !self.agreement.is_fresh()
            && self.agreement.state().life != Life::Down
            && self.group.leader().is_none_or(|leader| leader == self.me)
    }

    /// Its log was in memory alone, and nobody is there who could tell what it said.
    fn has_forgotten(&self) -> bool {
        self.own.notes.is_some()
            && self.own.past == Past::RanHere
            && self.role == Role::None
            && self.group.role() == ConsensusRole::Recovering
            && self.group.leader().is_none()
    }

    fn tell_that_it_has_forgotten(&mut self) {
        let name = &self.config.name;
        let why = format!(
            "nobody leads the program's group, and this host does not know any more what was agreed (durability = \"memory\"): it waits for \
             a host that does. If no copy is alive anywhere, 'dunlin down --force {name}' on each host and then 'dunlin up' begins it from \
             the newest image of its data"
        );
        if self.own.images.complaint != why {
            self.event(EventKind::Waiting, &*why);
            self.own.images.complaint = why;
        }
    }

    /// No copy here and nobody leads: is that so everywhere?
    pub(super) fn look_after_loss(&mut self) {
        self.hand_to_the_other();
        let forgotten = self.has_forgotten();
        if !self.is_lost() && !forgotten {
            self.own.images.leaderless_since_us = None;
            self.own.images.mandate = None;
            return;
        }
        let now_us = self.now_us();
        let since_us = *self.own.images.leaderless_since_us.get_or_insert(now_us);
        if now_us - since_us <= LEADERLESS_US || self.group.is_leader() {
            return;
        }
        match forgotten {
            true => self.tell_that_it_has_forgotten(),
            false if self.group.role() != ConsensusRole::Recovering => self.ask_of_images(),
            false => {}
        }
    }

    fn judge_loss(&mut self, found: Found) -> Result<(), JudgeError> {
        self.own.images.mandate = None;
        let own = self.standing();
        if let Some(input) = self.ended_both(&found) {
            // `poison` tells it.
            tracing::info!(program = self.config.name, "not begun again: {input}");
            self.own.restart.never();
            return Ok(());
        }
        if let Some(why) = self.waits_for_an_upgrade() {
            return Err(why.into());
        }
        let said = found.others.iter();
        let said: Vec<_> = said
            .filter_map(|(id, said)| Some((*id, said.as_ref().ok()?)))
            .collect();
        // Invariant 3.
        if said.iter().any(|(_, standing)| standing.alive || standing.led) {
            return Ok(());
        }
        let complete = complete_by_the_newest(&own, &said);
        if let Some(id) = ended_for_good(complete, &said) {
            return Err(JudgeError::EndedThere {
                host: self.config.host_name(id).to_owned(),
                name: self.config.name.clone(),
            });
        }
        if !complete.contains(self.me) {
            if self.own.notes.is_none() {
                return Ok(());
            }
            return Err(JudgeError::NewerThere);
        }
        let image = found.own?;
        // Invariant 5.
        if let (None, Some(marks)) = (image, self.marks()) {
            return Err(marks.gone().into());
        }
        let needs_other = self.other().is_some_and(|other| complete.contains(other));
        let choice = match needs_other {
            true => self.choose(image, found.others)?,
            false => choose(image, None, true),
        };
        match choice {
            Choice::Here => {
                self.own.images.mandate = Some(complete);
                Ok(())
            }
            Choice::There if self.own.notes.is_none() => Ok(()),
            Choice::There => Err(JudgeError::NewerThere),
            Choice::Nobody => Err(JudgeError::NoImage),
        }
    }

    /// Whether this host may be elected to begin the program again.
    pub(super) fn has_mandate(&self) -> bool {
        let begins = self.own.images.mandate.is_some() || self.own.images.begins == Some(self.group.term());
        begins && self.is_lost()
    }

    /// Elected for that. What is agreed has to be what it was judged by.
    pub(super) fn begin_again(&mut self) {
        if self.own.images.mandate.take() != Some(self.agreement.state().complete) {
            return self.group.step_down();
        }
        // What it draws now was never drawn in its life before.
        let set = ReplicaSet::one(self.me);
        let epoch = self.agreement.state().epoch;
        if !self.say_first_time_and_seed() || !self.propose(&Agreed::Complete { set, epoch }) {
            return;
        }
        self.own.images.begins = Some(self.group.term());
        self.own.restart.again = true;
        if self.own.restart.waits() {
            self.own.restart.count += 1;
            let text = format!(
                "the program has ended on all of its hosts, and is begun again here (restart = \"{}\"): what was only in its memory is gone",
                self.program.restart.name()
            );
            return self.event(EventKind::BegunAgain, text);
        }
        self.event(
            EventKind::ColdStart,
            "no host holds a living copy of the program: it begins again here, from its data; what was only in its memory is gone",
        );
    }

    /// Whether the program begins here again by this agreed entry.
    pub(super) fn begins_again(&self, set: ReplicaSet) -> bool {
        self.agreement.leads()
            && self.is_lost()
            && set == ReplicaSet::one(self.me)
            && self.own.images.begins == Some(self.group.term())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(run: u64, index: u64) -> Mark {
        Mark {
            run,
            index,
            torn: false,
        }
    }

    fn torn(mark: Mark) -> Mark {
        Mark { torn: true, ..mark }
    }

    #[test]
    fn the_newest_whole_image_counts_and_both_hosts_say_so() {
        let cases = [
            (None, None, Choice::Here),
            (Some(mark(1, 5)), None, Choice::Here),
            (None, Some(mark(0, 0)), Choice::There),
            (Some(mark(1, 90)), Some(mark(2, 3)), Choice::There),
            (Some(mark(2, 90)), Some(mark(2, 70)), Choice::Here),
            (Some(mark(2, 90)), Some(mark(2, 90)), Choice::Here),
            (Some(torn(mark(9, 9))), Some(mark(1, 1)), Choice::There),
            (Some(mark(1, 1)), Some(torn(mark(9, 9))), Choice::Here),
            (Some(torn(mark(9, 9))), None, Choice::Nobody),
            (Some(torn(mark(9, 9))), Some(torn(mark(9, 9))), Choice::Nobody),
        ];
        for (here, there, expected) in cases {
            let mirrored = match expected {
                Choice::Here => Choice::There,
                Choice::There => Choice::Here,
                Choice::Nobody => Choice::Nobody,
            };
            assert_eq!(choose(there, here, false), mirrored, "{here:?} {there:?}");
            assert_eq!(choose(here, there, true), expected, "{here:?} {there:?}");
        }
    }

    #[test]
    fn a_copy_that_has_ended_for_good_has_a_say_only_where_it_was_complete() {
        let (a, b) = (ReplicaId(0), ReplicaId(1));
        let standing = |index, complete: ReplicaSet| Standing {
            last: (3, index),
            complete: complete.0,
            ended: true,
            ..Standing::default()
        };
        let (both, alone) = (ReplicaSet::one(a).with(b), ReplicaSet::one(a));
        // The one there has failed, and was dropped since.
        let (own, there) = (standing(90, alone), standing(70, both));
        let said = [(b, &there)];
        assert_eq!(complete_by_the_newest(&own, &said), alone);
        assert_eq!(ended_for_good(alone, &said), None);
        // It has the newer log.
        let own = standing(50, alone);
        assert_eq!(complete_by_the_newest(&own, &said), both);
        assert_eq!(ended_for_good(both, &said), Some(b));
        let again = Standing {
            begins_again: true,
            ..there.clone()
        };
        assert_eq!(ended_for_good(both, &[(b, &again)]), None);
    }

    #[test]
    fn a_mark_is_heard_as_it_was_told() {
        for mark in [None, Some(mark(3, 70)), Some(torn(mark(3, 70)))] {
            let standing = Standing {
                disks: told(mark),
                ..Standing::default()
            };
            assert_eq!(heard(&standing), mark);
        }
    }
}
