//! What it decides: nothing in production. Faults that the simulator puts back on purpose, to see that it finds them.
//!
//! Flow: `Consensus::bugged` is asked beside the line that is right; without the cargo feature `bugs` it is the
//! constant `false` and the wrong branch is compiled away.
//!
//! Invariants: none; each of these breaks one (see docs/consensus.md for the seeds that find them).
//!
//! Source: mistakes that published systems made (fabric.md: "What APUS's published code does"), and Raft's own list.
//!
//! Not here: which bug is on (the simulator says so, per replica).

/// A fault put back on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bug {
    /// The leader commits entries of earlier terms by counting copies (Raft, figure 8).
    CommitsOldTerm,
    /// A vote leaves before the hard state is on disk.
    VotesBeforePersist,
    /// An acknowledgement leaves before the entry is on disk.
    AcksBeforePersist,
    /// A follower acknowledges what it holds instead of what is known to equal the leader's log.
    AcksUnmatched,
    /// The leader counts acknowledgements of other terms (DARE's descendant in APUS's later code).
    CountsAnyTerm,
    /// A voter does not compare logs.
    VotesForShorterLog,
    /// A replica that lost its memory joins as if it were new.
    SkipsRecovery,
    /// After cutting the log's end the durable mark stays (APUS's persist cursor).
    KeepsDurableMark,
    /// A follower takes the leader's commit without looking whether its log matches that far.
    CommitsUnmatched,
    /// Members are changed without waiting for the change before.
    ChangesTwoAtOnce,
    /// A leader answers reads without asking a majority.
    ReadsAlone,
    /// A follower takes itself and its leader for a majority in groups of any size.
    TwoAreAlwaysEnough,
    /// A leader speaks until it knows that it was deposed (what the program did before it had leases).
    SpeaksUntilDeposed,
    /// A voter gives its vote though it has just heard a leader.
    VotesWhenBound,
    /// A voter that was started again does not remember that it may have heard a leader.
    ForgetsItsSilence,
    /// A leader counts what it heard over a link that it has closed.
    CountsClosedLinks,
    /// A leader that hands over speaks on.
    SpeaksWhileTransferring,
    /// A replica is driven by what its owner's clock said when the owner's turn began.
    DrivenByOldTime,
    /// The owner looks at its lease by that time, too (the simulator's owner; the real one reads its clock for each frame).
    ReleasesByOldTime,
    /// The failure detector does not adapt.
    NeverLearns,
    /// A host that was late itself takes its own sleep for the others' silence.
    BelievesWhenLate,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::CommitsOldTerm,
        Self::VotesBeforePersist,
        Self::AcksBeforePersist,
        Self::AcksUnmatched,
        Self::CountsAnyTerm,
        Self::VotesForShorterLog,
        Self::SkipsRecovery,
        Self::KeepsDurableMark,
        Self::CommitsUnmatched,
        Self::ChangesTwoAtOnce,
        Self::ReadsAlone,
        Self::TwoAreAlwaysEnough,
        Self::SpeaksUntilDeposed,
        Self::VotesWhenBound,
        Self::ForgetsItsSilence,
        Self::CountsClosedLinks,
        Self::SpeaksWhileTransferring,
        Self::DrivenByOldTime,
        Self::ReleasesByOldTime,
        Self::NeverLearns,
        Self::BelievesWhenLate,
    ];
}
