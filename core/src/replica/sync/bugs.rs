//! What it decides: nothing in production. Faults that the simulator puts back on purpose, to see that it finds them.
//!
//! Flow: [`Bugs::has`] is asked beside the line that is right; without the cargo feature `bugs` it is the constant `false`, and the wrong
//! branch is compiled away.

/// A fault put back on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// The backup acknowledges as soon as a sync is whole, and asks its loop afterwards.
    AcknowledgesUnasked,
    /// The backup does not wait for the epoch's disk writes before it acknowledges.
    AcknowledgesBeforeDisk,
    /// What was sent ahead of a page counts, though a later round found the page to be equal.
    KeepsStaleDeltas,
    /// Of the nodes of a hash tree in which the two sides differ, the backup names the first alone.
    AnswersWithOneNode,
    /// The primary of a join sends nothing of what the backup's memory holds already, whatever that is.
    TrustsWhatIsHeld,
    /// The primary looks only at the pages that its own VM has written.
    ForgetsTheirPages,
    /// A backup that did not run takes over without loading the state that it kept.
    ForgetsKeptState,
    /// A sync that was applied by half leaves a copy that may be taken over.
    TornIsWhole,
    /// The VM resumes before the line between the epochs' frames is drawn.
    ResumesBeforeLine,
    /// A sync that is broken off leaves the VM standing.
    LeavesVmStanding,
    /// A join's last sync that the log has refused begins as any other: nothing is held from its line on.
    RetriesLastSyncAsAnother,
    /// A switchover that ends with the old primary's own election keeps the log from it, and so its office.
    HoldsLogWhenElected,
    /// A sync that is agreed while the backup still applies the last one is not begun there.
    LosesEarlySync,
    /// A join's last sync is acknowledged before the log has passed it on the backup.
    JoinsBeforeItsEntry,
    /// A primary that leads again speaks before the group has dropped the backup that it no longer follows.
    SpeaksBeforeTheDrop,
    /// A primary that leads no more goes on speaking.
    SpeaksWhenDeposed,
    /// A host keeps the copy of a join that broke after its last sync, whoever asks it to join anew.
    KeepsStaleCopy,
    /// A host boots the VM from its disk though another one that may hold a copy, or a newer disk, has said nothing.
    BootsUnheard,
    /// A mandate to boot the VM outlives the leader that came.
    KeepsMandate,
    /// A copy whose host may not be elected keeps all others from booting the VM.
    CountsDroppedCopies,
    /// A sync that will never be done keeps its place in the log from being cut.
    KeepsBrokenCut,
    /// A host forgets the VM when its end is proposed, and not when it is agreed.
    EndsUnagreed,
    /// A host with an order to end the VM is not elected without a living copy.
    EndNeedsCopy,
    /// A host takes over without telling its output, which goes on in its own numbers and says nothing of what clients may not have heard.
    TakesOverSilently,
    /// A sync leaves the numbers of connections behind.
    ForgetsNumbers,
    /// A backup's VM hears what clients say in the primary's numbers.
    HearsOthersNumbers,
    /// What a VM said before it was replaced counts as said by the one that replaces it.
    SaysOldWordsAnew,
    /// Output leaves when its sync's line is drawn, and not when the backup holds it.
    ReleasesAtTheLine,
    /// After a join's line output leaves as before it, though the backup may be complete at any moment.
    SpeaksOnAfterTheLine,
}

impl Bug {
    /// Those of who leads and who speaks.
    pub const OF_LEADERSHIP: [Self; 3] = [
        Self::SpeaksBeforeTheDrop,
        Self::SpeaksWhenDeposed,
        Self::KeepsStaleCopy,
    ];

    /// Those of what a host's loop does with its VM's output.
    pub const OF_OUTPUT: [Self; 6] = [
        Self::TakesOverSilently,
        Self::ForgetsNumbers,
        Self::HearsOthersNumbers,
        Self::SaysOldWordsAnew,
        Self::ReleasesAtTheLine,
        Self::SpeaksOnAfterTheLine,
    ];

    /// Those of whole hosts: those of leadership and of output, of a cold start and of the log's cut.
    pub const OF_HOSTS: [Self; 15] = [
        Self::SpeaksBeforeTheDrop,
        Self::SpeaksWhenDeposed,
        Self::KeepsStaleCopy,
        Self::BootsUnheard,
        Self::KeepsMandate,
        Self::CountsDroppedCopies,
        Self::KeepsBrokenCut,
        Self::EndsUnagreed,
        Self::EndNeedsCopy,
        Self::TakesOverSilently,
        Self::ForgetsNumbers,
        Self::HearsOthersNumbers,
        Self::SaysOldWordsAnew,
        Self::ReleasesAtTheLine,
        Self::SpeaksOnAfterTheLine,
    ];

    /// Those of the session and its epochs.
    pub const ALL: [Self; 14] = [
        Self::AcknowledgesUnasked,
        Self::AcknowledgesBeforeDisk,
        Self::KeepsStaleDeltas,
        Self::AnswersWithOneNode,
        Self::TrustsWhatIsHeld,
        Self::ForgetsTheirPages,
        Self::ForgetsKeptState,
        Self::TornIsWhole,
        Self::ResumesBeforeLine,
        Self::LeavesVmStanding,
        Self::RetriesLastSyncAsAnother,
        Self::HoldsLogWhenElected,
        Self::LosesEarlySync,
        Self::JoinsBeforeItsEntry,
    ];
}

/// The faults of one machine: none, but in the simulator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bugs {
    #[cfg(feature = "bugs")]
    bug: Option<Bug>,
}

impl Bugs {
    /// With this one.
    #[cfg(feature = "bugs")]
    #[must_use]
    pub fn with(bug: Option<Bug>) -> Self {
        Self { bug }
    }

    /// Whether this is one of them.
    #[cfg(feature = "bugs")]
    pub(in crate::replica) fn has(self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Whether this is one of them.
    #[cfg(not(feature = "bugs"))]
    pub(in crate::replica) fn has(self, _bug: Bug) -> bool {
        false
    }

    /// Whether this is one of several: then what is asserted elsewhere must not hide the damage.
    pub(in crate::replica) fn are_any(self, bugs: &[Bug]) -> bool {
        bugs.iter().any(|bug| self.has(*bug))
    }
}
