//! What it decides: whether this host may stand for election, what follows when it leads its group or leads it no more, who is
//! dropped before it speaks, and who may speak for the VM.
//!
//! Flow: entries of the log (appended, then agreed), elections, the end of a session and of a take-over go in; what is to be done comes out.
//! The loop that owns it starts and ends VMs, proposes, and tells the gate whose voice this is.
//!
//! | this host has | it leads | the group agrees that it alone is complete | that another is, too | that others are |
//! |---|---|---|---|---|
//! | nothing | it boots, or gives the office back | it boots | - | - |
//! | a backup's copy | it takes over | it speaks | it is protected by | it is dropped |
//! | a primary's VM | it goes on | it speaks, alone | it speaks, protected | its VM ends |
//!
//! Invariants, asserted in release builds too:
//! 1. (One speaker) Only a primary that leads, and has applied everything of earlier terms, has a voice.
//! 2. (Output commit) A primary speaks as one that is alone only when the group has agreed that nobody else is complete.
//! 3. A backup claims the VM in each term in which it leads, when its copy is an ordinary VM and has all agreed inputs; it speaks when
//!    that is agreed, and never before.
//! 4. An entry that drops this host counts as soon as it is *appended* here, since it may be agreed without this host knowing; so does one
//!    that says that the VM has lived. It counts until another leader's entry has its place.
//!
//! Source: ARCHITECTURE.md, "Who may speak"; the rules are ours. Not here: elections (`consensus`), what the log says of the VM (`agreed`), the
//! lease (`consensus::lease`), sessions and syncs (`epoch`, `sync`).

#[cfg(test)]
mod tests;

use crate::agreed::{Agreed, AgreedState, Life, ReplicaSet};
use crate::consensus::Entry;
use crate::output::gate::Voice;
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::{Index, ReplicaId, Term, Viewstamp};
use crate::wire::agreed;

/// What this host has of the VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Nothing: a witness, or a host that waits to be brought in.
    None,
    /// The VM that clients speak with, or one that is being started.
    Primary,
    /// The second copy, or one that is being brought in.
    Backup,
}

/// Why this host may be elected without a living copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mandate {
    /// It may not.
    #[default]
    None,
    /// No copy is alive anywhere, and its disk is the newest.
    Newest,
    /// ... and a person wants it to boot from its disk, though another one is newer.
    Stale,
    /// Another host has a complete copy, and lacks the entry that says so: it is elected to bring it, and gives the office back.
    Informs,
}

/// What this host would bring to an election.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidacy {
    /// Its copy is alive and whole, and can be served from.
    pub whole: bool,
    /// The VM has failed here for good.
    pub failed: bool,
    /// It may boot the VM from its disk.
    pub mandate: Mandate,
    /// A person wants the VM to end, and all that it would do as leader is to have that agreed.
    pub ends: bool,
}

/// What follows when this host leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lead {
    /// The VM's end is ordered: nothing else.
    Ends,
    /// It proposes that it alone is complete, and boots the VM when that is agreed.
    Boots,
    /// It takes the VM over.
    TakesOver,
    /// It is the primary, as before.
    GoesOn,
    /// It was elected without a complete copy: it ends what it has, and gives the office back.
    StepsDown,
}

/// How a primary goes on that leads again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resumes {
    /// Nobody else is complete: as one that is alone.
    Alone,
    /// Its backup follows still.
    Protected,
    /// The other copy is no longer followed: it has to be dropped first (invariant 2).
    DropsBackup,
}

/// What follows when the group has agreed on who is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    /// Nothing.
    Nothing,
    /// This host boots the VM.
    Boots,
    /// The take-over is agreed: the copy here is the primary, and speaks.
    Speaks,
    /// The primary speaks, and nobody follows.
    Alone,
    /// The primary speaks, and a complete backup follows.
    Protected,
    /// The copy here is complete.
    Follows,
    /// The backup's copy here counts no more: it ends.
    Dropped,
    /// Another host serves the VM now: the primary's VM here ends.
    EndedHere,
}

/// What a host answers to a leader that wants it as its backup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invited {
    /// It joins.
    Joins,
    /// It has a copy that nobody will ever take over: that ends first, and the leader asks again.
    EndsStaleCopy,
    /// Not now.
    Refuses,
}

/// The next step of a take-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// None now.
    Nothing,
    /// The copy is to be made an ordinary VM.
    Begins,
    /// The group is to be asked to agree that this host alone is complete.
    Claims,
}

/// A take-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct TakeOver {
    begun: bool,
    /// The copy is an ordinary VM.
    over: bool,
    /// The term in which it was claimed: a later one must be asked again.
    claimed_in: Option<Term>,
}

/// What the entries say that are appended here, agreed or not (invariant 4).
#[derive(Clone, Debug, Default)]
struct Appended {
    /// Who is complete by the newest such entry; nobody in a VM's youth.
    complete: ReplicaSet,
    /// That entry drops this host.
    drops_me: bool,
    /// Where it is; 0 where it is below the log.
    said_at: Index,
    /// The newest entry that ends the VM.
    end: Option<Index>,
    /// What was looked at so far.
    through: Viewstamp,
}

/// This host's place in its VM's group.
#[derive(Clone, Debug)]
pub struct Leadership {
    me: ReplicaId,
    witness: bool,
    /// Who boots a VM that never ran.
    first: ReplicaId,
    /// The log's entries so far, folded.
    state: AgreedState,
    appended: Appended,
    part: Part,
    /// This host leads, and has applied everything of earlier terms.
    leads: bool,
    voice: Voice,
    take_over: Option<TakeOver>,
    bugs: Bugs,
}

impl Leadership {
    /// Of a host that has nothing of the VM yet, and knows this of it from its log. `first` boots a VM that never ran.
    #[must_use]
    pub fn new(me: ReplicaId, witness: bool, first: ReplicaId, state: AgreedState) -> Self {
        let appended = Appended {
            complete: state.complete,
            ..Appended::default()
        };
        Self {
            me,
            witness,
            first,
            state,
            appended,
            part: Part::None,
            leads: false,
            voice: Voice::Shut,
            take_over: None,
            bugs: Bugs::default(),
        }
    }

    /// With a fault put back on purpose.
    #[must_use]
    pub fn with_bugs(mut self, bugs: Bugs) -> Self {
        self.bugs = bugs;
        self
    }

    /// What the group knows of the VM.
    #[must_use]
    pub fn state(&self) -> &AgreedState {
        &self.state
    }

    /// Whether this host leads, and what it knows is up to date.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// Who may speak here.
    #[must_use]
    pub fn voice(&self) -> Voice {
        self.voice
    }

    /// What this host has of the VM.
    #[must_use]
    pub fn part(&self) -> Part {
        self.part
    }

    /// Who is complete by the newest entry that is appended here, agreed or not.
    #[must_use]
    pub fn appended_complete(&self) -> ReplicaSet {
        self.appended.complete
    }

    /// The newest entry appended here that ends the VM, agreed or not.
    #[must_use]
    pub fn appended_end(&self) -> Option<Index> {
        self.appended.end
    }

    /// Whether the VM never started, as far as this host can know (invariant 4).
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.state.life == Life::Fresh && self.appended.complete.is_empty()
    }

    /// Whether an entry that drops this host is appended here (invariant 4), and it does not lead, which would tell it more.
    #[must_use]
    pub fn may_be_dropped(&self) -> bool {
        self.appended.drops_me && !self.leads
    }

    /// Whether this host may win an election, or keep its office.
    #[must_use]
    pub fn may_lead(&self, candidacy: Candidacy) -> bool {
        let undropped = !self.may_be_dropped();
        let young = self.state.life != Life::Fresh || self.is_fresh() || self.leads;
        let by_life = self.state.may_lead(self.me, candidacy.whole, self.first) && undropped && young;
        let serves = !candidacy.failed && (by_life || candidacy.mandate != Mandate::None);
        !self.witness && (serves || candidacy.ends)
    }

    // The log.

    /// Looks at what was appended here since the last time; nobody has said yet that it is agreed. `applied` is the newest applied entry,
    /// `newest` the newest one, and `entry` one of those behind it.
    pub fn look_at_appended(
        &mut self,
        applied: Index,
        newest: Viewstamp,
        entry: impl Fn(Index) -> Option<Entry>,
    ) {
        // At most calls nothing is new.
        if newest == self.appended.through {
            return;
        }
        // What is not agreed may be replaced by a newer leader's entries: then what it said counts no more.
        let Viewstamp { index: last, .. } = self.appended.through;
        let is_there = || entry(last).is_some_and(|entry| entry.stamp == self.appended.through);
        if last > applied && !is_there() {
            self.forget_appended();
        }
        let from = self.appended.through.index.max(applied);
        for index in from.0 + 1..=newest.index.0 {
            // The tag alone tells frames, by far the most, from the rest.
            let payload = entry(Index(index)).map(|entry| entry.payload);
            if let Some(Ok(entry)) = payload.map(agreed::decode) {
                self.entry_appended(Index(index), &entry);
            }
        }
        self.appended.through = newest;
    }

    fn forget_appended(&mut self) {
        self.appended = Appended {
            complete: self.state.complete,
            ..Appended::default()
        };
    }

    fn entry_appended(&mut self, index: Index, entry: &Agreed) {
        match entry {
            // An older one that is applied only now says nothing against a newer one.
            Agreed::Complete { set, .. } if index >= self.appended.said_at => {
                self.appended.complete = *set;
                self.appended.drops_me = !set.contains(self.me);
                self.appended.said_at = index;
            }
            Agreed::Down => self.appended.end = Some(index),
            _ => {}
        }
    }

    /// An entry is agreed. False: it says nothing, as nothing follows the VM's end.
    #[must_use]
    pub fn apply(&mut self, index: Index, entry: &Agreed) -> bool {
        let says = self.state.apply(entry);
        if says {
            self.entry_appended(index, entry);
        }
        says
    }

    /// What the last entry says of who is complete, as `apply` has taken it. `joins`: a primary's backup is in a join's last sync, or waits for
    /// the group's word after it.
    ///
    /// A word that this host alone is complete may be an old one, said twice because the log refused it or nobody agreed for long. It gives no voice
    /// where a later one is on its way that says otherwise, nor during a join's last sync: what left then would be
    /// lost with this host as soon as the later word is agreed.
    #[must_use]
    pub fn complete_agreed(&mut self, joins: bool) -> Settled {
        let set = self.state.complete;
        let (mine, alone) = (set.contains(self.me), set == ReplicaSet::one(self.me));
        let is_old = joins || self.appended.complete != set;
        let settled = match (self.part, self.leads) {
            (Part::Primary, true) if alone && is_old => Settled::Nothing,
            (Part::None, true) if alone => Settled::Boots,
            (Part::Backup, true) if alone && self.is_taken_over() => Settled::Speaks,
            (Part::Primary, true) if alone => Settled::Alone,
            (Part::Primary, true) => Settled::Protected,
            (Part::Backup, false) if mine => Settled::Follows,
            (Part::Backup, false) => Settled::Dropped,
            (Part::Primary, false) if !mine => Settled::EndedHere,
            (Part::None | Part::Backup, _) | (Part::Primary, false) => Settled::Nothing,
        };
        match settled {
            Settled::Boots => self.part = Part::Primary,
            Settled::Speaks => {
                self.part = Part::Primary;
                self.take_over = None;
                self.voice = Voice::Alone;
            }
            Settled::Alone => self.voice = Voice::Alone,
            Settled::Protected => self.voice = Voice::Protected,
            // The loop ends the copy, and says so (`ends`).
            Settled::Dropped | Settled::EndedHere | Settled::Follows | Settled::Nothing => {}
        }
        self.check();
        settled
    }

    /// A snapshot stands in for entries that this host never saw. Backwards, too: what it held counts no more when it was declared dead.
    pub fn installed(&mut self, state: AgreedState) {
        self.state = state;
        self.forget_appended();
        self.take_over = None;
        self.deposed();
    }

    /// Whoever says that the VM has ended knows that it is agreed; this host's own log may not have come to that entry.
    pub fn is_told_of_the_end(&mut self) {
        self.state.life = Life::Down;
    }

    // Elections.

    /// This host was elected: it leads when it has come to the entry of its own term.
    pub fn elected(&mut self) {
        self.leads = false;
        match self.part {
            // From here on no word of the old primary counts.
            Part::Backup => {
                self.take_over.get_or_insert_default();
            }
            Part::Primary => self.voice = Voice::Shut,
            Part::None => {}
        }
        self.check();
    }

    /// It has applied everything of earlier terms, and leads.
    pub fn leads_from_here(&mut self) {
        self.leads = true;
    }

    /// What follows from that.
    pub fn leads_now(&mut self, candidacy: Candidacy) -> Lead {
        self.leads_from_here();
        let complete = self.state.complete.contains(self.me);
        let boots_cold = match (candidacy.mandate, self.state.life) {
            (Mandate::None | Mandate::Informs, _) | (_, Life::Down) => false,
            (_, Life::Fresh) | (Mandate::Stale, _) => true,
            (Mandate::Newest, Life::Running) => complete,
        };
        match self.part {
            Part::None if candidacy.ends => Lead::Ends,
            Part::None if boots_cold || self.state.life == Life::Fresh => Lead::Boots,
            Part::Backup if complete => Lead::TakesOver,
            Part::Primary if complete => Lead::GoesOn,
            Part::None | Part::Backup | Part::Primary => Lead::StepsDown,
        }
    }

    /// How it goes on as the primary; whether the session with its backup `survives` the new term.
    pub fn resumes(&mut self, survives: bool) -> Resumes {
        assert!(
            self.leads && self.part == Part::Primary,
            "only a primary that leads goes on: {self:?}"
        );
        let resumes = match self.state.complete == ReplicaSet::one(self.me) {
            // The entry may have been agreed between two terms, when nobody led who could have acted on it.
            true => Resumes::Alone,
            false if survives => Resumes::Protected,
            false => Resumes::DropsBackup,
        };
        match resumes {
            Resumes::Alone => self.voice = Voice::Alone,
            Resumes::Protected => self.voice = Voice::Protected,
            Resumes::DropsBackup if self.bugs.has(Bug::SpeaksBeforeTheDrop) => self.voice = Voice::Alone,
            Resumes::DropsBackup => {}
        }
        self.check();
        resumes
    }

    /// Another host leads, or nobody. The copy here is kept until the group has agreed that it is not needed: a new leader may fail yet.
    pub fn deposed(&mut self) {
        if self.bugs.has(Bug::SpeaksWhenDeposed) {
            return;
        }
        self.leads = false;
        if self.part == Part::Primary {
            self.voice = Voice::Shut;
        }
        self.check();
    }

    // The copy here.

    /// A leader wants this host as its backup. `follows`: it leads in this host's current term. `orphaned`: there is a copy, whose
    /// session has ended.
    ///
    /// A join that broke after its last sync leaves such a copy, and whether it is complete is the leader's to say: one that asks has
    /// said it. An entry that drops the copy may never come: the word was lost with its term, and the next leader knows of no backup.
    #[must_use]
    pub fn invited(&self, follows: bool, orphaned: bool) -> Invited {
        if !follows || self.witness || self.state.complete.contains(self.me) {
            return Invited::Refuses;
        }
        match self.part {
            Part::None => Invited::Joins,
            Part::Backup if self.bugs.has(Bug::KeepsStaleCopy) => Invited::Refuses,
            Part::Backup if orphaned && self.take_over.is_none() => Invited::EndsStaleCopy,
            Part::Backup | Part::Primary => Invited::Refuses,
        }
    }

    /// It is to be the backup.
    pub fn joins(&mut self) {
        assert_eq!(self.part, Part::None, "a host is brought in that has a copy");
        self.part = Part::Backup;
    }

    /// As a backup its output is kept.
    pub fn keeps_output(&mut self) {
        assert_eq!(self.part, Part::Backup, "a backup keeps what its VM says");
        self.voice = Voice::Backup;
    }

    /// The VM that was booted runs.
    pub fn booted(&mut self) {
        assert_eq!(self.part, Part::Primary, "only a primary boots");
        let alone = self.leads && self.state.complete == ReplicaSet::one(self.me);
        self.voice = if alone { Voice::Alone } else { Voice::Shut };
        self.check();
    }

    /// A join's last line is drawn: from here on output waits for the group's word, and then for syncs.
    pub fn join_line_drawn(&mut self) {
        if self.voice == Voice::Alone {
            self.voice = Voice::Protected;
        }
        self.check();
    }

    /// The copy here has ended, or is ended.
    pub fn ends(&mut self) {
        self.part = Part::None;
        self.voice = Voice::Shut;
        self.take_over = None;
    }

    /// Whether a lost backup can be dropped now. `answered`: somebody has promised lately who could agree. A host that stood still
    /// meanwhile finds on its socket what this one has proposed. Proposed to nobody, the drop would keep a backup from standing in for a
    /// primary that died before anybody agreed: so it waits for somebody who could.
    ///
    /// Nor is it dropped by who was elected and has not applied everything of earlier terms: the other host may have taken the VM over meanwhile, and
    /// it would be its complete copy that counts no more. (Whoever leads for the VM's end alone may be such a one.)
    #[must_use]
    pub fn may_drop_backup(&self, answered: bool) -> bool {
        self.leads && (self.voice != Voice::Protected || answered)
    }

    // The take-over.

    /// Whether this host is taking the VM over.
    #[must_use]
    pub fn takes_over(&self) -> bool {
        self.take_over.is_some()
    }

    /// How far the take-over is: whether its work has begun, and is done.
    #[must_use]
    pub fn take_over_is(&self) -> (bool, bool) {
        self.take_over
            .map_or((false, false), |take_over| (take_over.begun, take_over.over))
    }

    /// What is next. `settled`: every agreed input is with the copy here, and no sync is being applied to it.
    pub fn take_over_step(&mut self, settled: bool, term: Term) -> Step {
        let Some(take_over) = &mut self.take_over else {
            return Step::Nothing;
        };
        if !settled && !take_over.begun {
            return Step::Nothing;
        }
        if !std::mem::replace(&mut take_over.begun, true) {
            return Step::Begins;
        }
        match take_over.over && self.leads && take_over.claimed_in != Some(term) {
            true => Step::Claims,
            false => Step::Nothing,
        }
    }

    /// The copy is an ordinary VM now.
    pub fn took_over(&mut self) {
        if let Some(take_over) = &mut self.take_over {
            take_over.over = true;
        }
    }

    /// The group was asked to agree.
    pub fn claimed(&mut self, term: Term) {
        if let Some(take_over) = &mut self.take_over {
            take_over.claimed_in = Some(term);
        }
    }

    fn is_taken_over(&self) -> bool {
        self.take_over.is_some_and(|take_over| take_over.over)
    }

    fn check(&self) {
        let speaks = matches!(self.voice, Voice::Alone | Voice::Protected);
        assert!(
            !speaks || self.leads && self.part == Part::Primary,
            "invariant 1: a voice without an office: {self:?}"
        );
        let alone = self.state.complete == ReplicaSet::one(self.me);
        assert!(
            self.voice != Voice::Alone || alone || self.bugs.are_any(&Bug::OF_LEADERSHIP),
            "invariant 2: it speaks as if nobody else were complete: {self:?}"
        );
        assert!(
            self.take_over.is_none() || self.part == Part::Backup,
            "invariant 3: a take-over of what is no backup's: {self:?}"
        );
    }
}
