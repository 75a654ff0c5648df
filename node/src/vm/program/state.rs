//! What the loop of a bare program holds, by what it is about.
//!
//! Not here: what the loop does with it (`program`, and the files beside it).

use super::ahead::Stood;
use super::backlog::{Backlog, Input};
use super::data::Notes;
use super::difference::Compared;
use super::poison::LastInputs;
use super::restart::Restart;
use super::unmatched::Drops;
use crate::config::{ProgramSpec, VmConfig};
use crate::vm::event::{LoopEvent, LoopSender};
use crate::vm::session::link::{Closer, SyncLink};
use crate::vm::session::reader::Lent;
use crate::vm::session::talker::Talker;
use crate::vm::shared::{Host, Shared};
use crate::vm::state::agreement::Agreement;
use crate::vm::state::ending::Ending;
use crate::vm::state::hosts::Peers;
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender};
use dunlin_api::{Answer, FailoverStatus};
use dunlin_core::agreed::{AgreedTime, ReplicaSet};
use dunlin_core::output::Output;
use dunlin_core::output::announcements::Announcements;
use dunlin_core::program::order::{Gate, Order};
use dunlin_core::program::pace::Pace;
use dunlin_core::program::time::Clock;
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_fabric::clock::HostClock;
use dunlin_fabric::group::KeptGroup;
use dunlin_guest::frames::{Announcer, GsoTap};
use dunlin_program::answers::Answers;
use dunlin_program::chance::{Drawn, Seed};
use dunlin_program::copy::Copy;
use dunlin_program::source::Source;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

/// This host's part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    None,
    Primary,
    Backup,
}

/// What was of the program when this host's loop began (invariant 5 of the loop).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Past {
    /// Nothing: it may begin here, by the group's first word.
    None,
    /// It ran here in an earlier life of this daemon, or since.
    RanHere,
    /// It ran elsewhere before this host was given a part: here it begins with a copy of what runs.
    RanElsewhere,
}

impl Past {
    /// By what its folder has.
    pub(super) fn found(newcomer: bool, ran: bool) -> Self {
        match (newcomer, ran) {
            (true, _) => Self::RanElsewhere,
            (false, true) => Self::RanHere,
            (false, false) => Self::None,
        }
    }
}

/// A copy that runs here.
pub(super) struct Running {
    // First: the thread that made it must outlive it.
    pub(super) copy: Copy,
    pub(super) _keeper: Sender<()>,
    pub(super) gate: Gate,
    /// What time it is for it, where that is agreed.
    pub(super) time: AgreedTime,
    /// Answers what it asks for of chance, where that is agreed.
    pub(super) answers: Option<Answers>,
    pub(super) source: Option<Arc<Source>>,
    /// The newest entry of the log that it had applied when it was brought here; this host itself may be behind that.
    pub(super) brought_at: Index,
    /// How long an unread socket is left alone before the next look, and when that is over.
    pub(super) look_again_us: u64,
    pub(super) look_at_us: u64,
    /// Until then what it says does not wake the loop: more is about to come.
    pub(super) card_at_us: u64,
    /// It was told why its inputs are not given to it in batches.
    pub(super) told_unbatched: bool,
    /// It was told that it could not be looked at.
    pub(super) told_unseen: bool,
    /// It listens.
    pub(super) ready: bool,
    pub(super) until_us: u64,
}

/// The stream on which the backup tells the primary what its copy says.
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) link: SyncLink,
    pub(super) closer: Closer,
    /// A backup's.
    pub(super) talker: Option<Talker>,
    /// A primary's: what comes on it is the loop's to read.
    pub(super) lent: Option<Lent>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // The thread that reads the stream ends with it, here and on the other host.
        self.closer.close();
    }
}

pub(super) struct TakeOver {
    pub(super) elected_us: u64,
    pub(super) status: FailoverStatus,
}

/// The loop of a bare program.
pub struct ProgramLoop {
    pub(super) host: Arc<Host>,
    pub(super) config: Arc<VmConfig>,
    pub(super) program: ProgramSpec,
    pub(super) me: ReplicaId,
    pub(super) group: KeptGroup,
    pub(super) peers: Peers,
    pub(super) agreement: Agreement,
    pub(super) role: Role,
    /// The copy here.
    pub(super) own: Own,
    pub(super) backup: Backup,
    pub(super) net: Network,
    pub(super) ending: Ending,
    pub(super) inbox: Inbox,
    pub(super) shown: Shown,
    pub(super) shared: Arc<Shared>,
}

/// The copy on this host, or what is known of one.
pub struct Own {
    /// What the next input waits for: what the file says, or `read` where inputs are kept apart.
    pub(super) order: Order,
    /// What was in the log when this loop began (invariant 5).
    pub(super) found: Index,
    /// Whether it was begun before this loop was.
    pub(super) past: Past,
    /// This host leads a program that never ran, and waits until then for the other host.
    pub(super) begins_by_us: Option<u64>,
    pub(super) begun_in: Option<Term>,
    pub(super) starting: Option<Sender<()>>,
    pub(super) running: Option<Running>,
    /// What is known of its data's image here, if it has one.
    pub(super) notes: Option<Notes>,
    pub(super) images: Images,
    /// Agreed inputs that the copy here gets before any other.
    pub(super) backlog: Backlog,
    /// The copy here has no primary, and the group has not taken it in: until when it is kept.
    pub(super) untaken_at_us: Option<u64>,
    pub(super) agreed: TimeAndChance,
    pub(super) last_inputs: LastInputs,
    pub(super) restart: Restart,
}

/// What both copies have alike besides their inputs.
#[derive(Default)]
pub struct TimeAndChance {
    pub(super) clock: Clock,
    pub(super) pace: Pace,
    /// The newest one that was agreed.
    pub(super) seed: Option<Seed>,
}

/// The other copy, and how it comes about.
#[derive(Default)]
pub struct Backup {
    /// Primary: since when there is one.
    pub(super) followed_us: u64,
    /// Primary: its copy listens.
    pub(super) ready: bool,
    pub(super) session: Option<Session>,
    /// Primary: its copy has ended, and why; until when the one here may end as well.
    pub(super) ended: Option<(u64, String)>,
    /// The group was asked to drop it, in that term.
    pub(super) dropping: Option<Term>,
    /// Primary: a second copy is brought in.
    pub(super) join: Option<Join>,
    pub(super) tries: Tries,
    /// Second copies that did not say the same.
    pub(super) drops: Drops,
    /// Held by each thread that carries a copy.
    pub(super) busy: Arc<()>,
    /// A copy is on its way here.
    pub(super) expected: Option<Expected>,
    pub(super) take_over: Option<TakeOver>,
    pub(super) switchover: Option<Sender<Answer>>,
}

/// The program's network: what comes from it and goes to it.
pub struct Network {
    pub(super) door: Option<GsoTap>,
    pub(super) announcer: Announcer,
    pub(super) announcements: Announcements,
    pub(super) output: Output,
    /// What was compared with all second copies so far.
    pub(super) compared: Compared,
    pub(super) frames_in: u64,
    pub(super) frames_out: u64,
    /// Inputs that were not read in time, as far as that was told.
    pub(super) impatient_told: (u64, Option<u64>),
    /// Frames that were taken from it and are not agreed.
    pub(super) not_agreed: usize,
    /// When frames were last taken from it.
    pub(super) taken_us: u64,
    pub(super) buffer: Vec<u8>,
}

/// What the loop waits for.
pub struct Inbox {
    pub(super) events: Receiver<LoopEvent>,
    /// Where others send them.
    pub(super) to_loop: LoopSender,
    pub(super) next_session: u64,
    pub(super) born: HostClock,
    /// What the system said when the loop last waited.
    pub(super) ready: Ready,
}

/// Which of what the loop waits for was readable: only that is worth a system call of its own.
#[derive(Clone, Copy, Default)]
pub(super) struct Ready {
    pub(super) waker: bool,
    pub(super) group: bool,
    pub(super) card: bool,
    pub(super) keeper: bool,
    pub(super) words: bool,
}

impl Ready {
    /// The system could not be asked.
    pub(super) const ALL: Self = Self {
        waker: true,
        group: true,
        card: true,
        keeper: true,
        words: true,
    };
}

/// What people are told.
#[derive(Default)]
pub struct Shown {
    pub(super) at_us: u64,
    /// An event was told in this step.
    pub(super) told: Cell<bool>,
    pub(super) failure: Option<String>,
    pub(super) failover: Option<FailoverStatus>,
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Phase {
    /// The other host makes room.
    Asked,
    /// The last inputs are read.
    Quieting,
    /// It is dumped.
    Dumping,
    /// It runs on, and the copy is on its way.
    Sending,
    /// It runs: the group is asked.
    Agreeing,
}

/// A join under way.
pub(super) struct Join {
    pub(super) session: u64,
    pub(super) phase: Phase,
    pub(super) until_us: u64,
    pub(super) words: Sender<Word>,
    pub(super) epoch: Epoch,
    pub(super) quiet_at_us: u64,
    pub(super) quiet_us: u64,
    pub(super) stood: Option<Stood>,
    pub(super) carried_bytes: u64,
}

/// When the next one is tried.
#[derive(Default)]
pub(super) struct Tries {
    pub(super) at_us: u64,
    pub(super) failures: u32,
    /// Why the last one failed, or is not tried.
    pub(super) why: Option<String>,
    /// How often in a row one was tried and failed.
    pub(super) in_a_row: u32,
    /// Why the next one is to have all of its memory taken while it stands still.
    pub(super) whole: Option<String>,
    /// The last one was to.
    pub(super) was_whole: bool,
    /// When the last one succeeded.
    pub(super) stands_since_us: Option<u64>,
}

impl Tries {
    /// Whether this was not what went wrong the last time.
    pub(super) fn is_news(&mut self, why: &str) -> bool {
        self.why.replace(why.to_owned()).as_deref() != Some(why)
    }

    /// Why the one that begins is to have all of its memory taken while the program stands still; none where it may go ahead.
    pub(super) fn next_is_whole(&mut self) -> Option<String> {
        self.was_whole = self.whole.is_some();
        self.whole.take()
    }

    /// It may have been what went ahead. Where nothing did the next one's memory goes ahead again.
    pub(super) fn not_brought(&mut self, why: &str) {
        if !self.was_whole {
            self.whole = Some(format!("the last copy was not brought ({why})"));
        }
    }
}

/// A copy on its way.
pub(super) struct Expected {
    pub(super) session: u64,
    /// Inputs behind this entry are kept.
    pub(super) from: Index,
    pub(super) inputs: VecDeque<(Index, Vec<Input>)>,
    pub(super) bytes: usize,
    pub(super) keeper: Sender<()>,
}

/// How far this host is with it.
#[derive(Default)]
pub(super) struct Images {
    pub(super) asking: bool,
    pub(super) next_us: u64,
    pub(super) leaderless_since_us: Option<u64>,
    /// This host begins again; who was complete, as it was judged by.
    pub(super) mandate: Option<ReplicaSet>,
    /// It was elected, and has said so, in that term.
    pub(super) begins: Option<Term>,
    /// It leads for the other host to begin: in that term, and until when.
    pub(super) elsewhere: Option<(Term, u64)>,
    pub(super) complaint: String,
}

/// The loop's words.
pub(super) enum Word {
    /// The last input was read, and no more will come.
    Dump,
    /// All that the program has said is known.
    LineDrawn {
        /// The epoch that ends.
        epoch: Epoch,
        /// The newest entry whose inputs it has read.
        applied: Index,
        /// The connections that do not speak its own numbers.
        connections: Bytes,
        /// The order's own table.
        order: Bytes,
        /// Inputs that were unread together were read in another order once.
        one_at_a_time: bool,
        /// What time it is for the program.
        time: AgreedTime,
        /// What it draws its chance from, and how far it has, where that is agreed.
        chance: Option<(Seed, Drawn)>,
    },
}

#[cfg(test)]
mod tests {
    use super::Tries;

    #[test]
    fn after_a_copy_that_was_not_brought_one_is_whole_and_the_next_one_is_not() {
        let mut tries = Tries::default();
        assert_eq!(tries.next_is_whole(), None);
        tries.not_brought("no room");
        let why = tries.next_is_whole();
        assert_eq!(why.as_deref(), Some("the last copy was not brought (no room)"));
        tries.not_brought("no room");
        assert_eq!(tries.next_is_whole(), None);
        assert_eq!(tries.next_is_whole(), None, "nothing has failed since");
    }
}
