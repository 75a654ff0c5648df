//! What a host of a world consists of.

use super::tcp::machine::{Line, Machine};
use super::world::WITNESS;
use crate::disk::Disk;
use dunlin_core::agreed::{Frame, Unsaid};
use dunlin_core::consensus::{Consensus, Role, Snapshot};
use dunlin_core::policy::Mode;
use dunlin_core::replica::cold_start::{ColdStart, DiskMark, Holding};
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::backup::BackupEpochs;
use dunlin_core::replica::epoch::primary::PrimaryEpochs;
use dunlin_core::replica::leadership::{Candidacy, Leadership};
use dunlin_core::replica::log_cut::LogCut;
use dunlin_core::replica::shutdown::Shutdown;
use dunlin_core::sync::tenure::Tenure;
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A VM: what it says follows from all that it was given, and from its whims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vm {
    state: u64,
    /// All that it has ever said.
    pub said: BTreeSet<u64>,
}

/// A host's image of the VM's disk: what its VM has written, a word for each that it has said.
#[derive(Clone, Debug)]
pub struct Image {
    pub said: BTreeSet<u64>,
    pub mark: DiskMark,
}

impl Default for Image {
    /// A disk that was never seen is whole.
    fn default() -> Self {
        let mark = DiskMark {
            consistent: true,
            ..DiskMark::default()
        };
        Self {
            said: BTreeSet::new(),
            mark,
        }
    }
}

impl Vm {
    /// It boots from that disk.
    pub fn boots(image: &Image) -> Self {
        let mut vm = Self::default();
        for word in &image.said {
            vm.input(*word, 0);
        }
        vm.said.clone_from(&image.said);
        vm
    }

    /// It takes an input, and says a word.
    pub fn input(&mut self, input: u64, whim: u64) -> u64 {
        let mut mixed = self.state ^ input.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ whim;
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.state = mixed ^ (mixed >> 32);
        self.said.insert(self.state);
        self.state
    }
}

/// What the consensus told the loop, which hears it in its next turn.
#[derive(Clone, Debug)]
pub enum Heard {
    Leads,
    Follows(Option<ReplicaId>),
    Snapshot(Snapshot),
}

/// A copy of the VM.
#[derive(Debug)]
pub enum Copy {
    Primary(Box<PrimaryCopy>),
    Backup(Box<BackupCopy>),
}

/// The primary's.
#[derive(Debug)]
pub struct PrimaryCopy {
    pub vm: Vm,
    /// In a world with clients.
    pub machine: Option<Box<Machine>>,
    pub epochs: PrimaryEpochs,
    /// The running epoch.
    pub epoch: Epoch,
    /// Said, and not left yet.
    pub held: VecDeque<(Epoch, u64)>,
    /// Said by the backup's VM in the running epoch.
    pub matched: VecDeque<u64>,
    /// The newest acknowledged epoch.
    pub acknowledged: Epoch,
    pub session: Option<u64>,
    /// It is being started until then.
    pub boots_at_us: Option<u64>,
    /// A join's copy is done then.
    pub copied_at_us: u64,
    pub rejoin_at_us: u64,
}

impl PrimaryCopy {
    pub fn new(vm: Vm, first: Rules, epoch: Epoch) -> Self {
        Self {
            vm,
            machine: None,
            epochs: PrimaryEpochs::new(first),
            epoch,
            held: VecDeque::new(),
            matched: VecDeque::new(),
            acknowledged: Epoch(0),
            session: None,
            boots_at_us: None,
            copied_at_us: 0,
            rejoin_at_us: 0,
        }
    }
}

/// A sync that lies with the backup.
#[derive(Clone, Debug)]
pub struct Staged {
    pub epoch: Epoch,
    pub vm: Vm,
    /// In a world with clients.
    pub line: Option<Box<Line>>,
    pub next: Mode,
    /// The log says where its epoch ends.
    pub agreed: bool,
}

/// The backup's.
#[derive(Debug)]
pub struct BackupCopy {
    pub vm: Vm,
    pub machine: Option<Box<Machine>>,
    pub epochs: BackupEpochs,
    pub epoch: Epoch,
    pub session: u64,
    pub tenure: Tenure,
    /// Whole here, and not acknowledged.
    pub staged: Option<Staged>,
    /// Acknowledged, and applied at that time.
    pub loading: Option<(u64, Staged)>,
    /// The take-over's work is done then.
    pub ordinary_at_us: Option<u64>,
}

/// What goes over the stream between the two.
#[derive(Clone, Debug)]
pub enum Word {
    /// Follow in this term.
    Join(Term),
    /// It is ready.
    Ready,
    /// A sync, whole.
    Sync(Staged),
    /// The session goes on in that term.
    NewTerm(Term),
    /// The backup's VM has said this.
    Said(Epoch, u64),
    /// ... or, in a world with clients, these.
    Frames(Epoch, Vec<Frame>),
    /// ... and has nothing left to do of what was agreed up to there.
    Idle(Index),
    /// The backup holds the sync.
    Acknowledged(Epoch),
    /// It goes on from there.
    Loaded,
}

/// A stream, in order.
#[derive(Debug)]
pub struct Stream {
    pub id: u64,
    pub primary: u8,
    pub backup: u8,
    /// With the times at which they arrive.
    pub to_primary: VecDeque<(u64, Word)>,
    pub to_backup: VecDeque<(u64, Word)>,
    pub closed: bool,
}

/// A host.
#[derive(Debug)]
pub struct Host {
    pub id: ReplicaId,
    /// `None`: it is down.
    pub node: Option<Consensus>,
    pub disk: Disk,
    pub first: Snapshot,
    pub incarnation: u32,
    pub asleep_until_us: u64,
    pub tick_us: u64,
    pub clock_offset_us: u64,
    pub clock_ppm: i64,
    /// The loop's.
    pub leadership: Leadership,
    pub heard: VecDeque<Heard>,
    pub applied: Index,
    pub copy: Option<Copy>,
    /// What the log has refused, as the daemon keeps it.
    pub unsaid: Unsaid,
    pub log_cut: LogCut,
    /// From here on nobody else needs the log, and no sync is under way.
    pub alone_since: Option<Index>,
    pub cold: ColdStart,
    pub image: Image,
    /// Of an inquest under way, and how many have not answered yet.
    pub answers: BTreeMap<ReplicaId, Holding>,
    pub silent: usize,
    /// The VM fails here, wherever it is begun.
    pub failed: bool,
    pub shutdown: Shutdown<()>,
    /// It has ended, and this host has nothing of it any more.
    pub forgotten: bool,
}

impl Host {
    pub fn candidacy(&self) -> Candidacy {
        let whole = match &self.copy {
            Some(Copy::Primary(_)) => true,
            Some(Copy::Backup(backup)) => backup.epochs.may_lead(),
            None => false,
        };
        Candidacy {
            whole,
            failed: self.failed,
            mandate: self.cold.mandate(),
            ends: self
                .shutdown
                .leads_to_end(self.id.0 == WITNESS, self.leadership.state().life),
        }
    }

    pub fn may_lead(&self) -> bool {
        self.leadership.may_lead(self.candidacy())
    }

    /// Whether it could serve the VM: it may lead, and knows what was agreed.
    pub fn is_heir(&self) -> bool {
        let knows = |node: &Consensus| node.role() != Role::Recovering;
        self.may_lead() && self.node.as_ref().is_some_and(knows)
    }

    pub fn holds_log(&self) -> bool {
        match &self.copy {
            Some(Copy::Primary(primary)) => primary.epochs.holds_log(),
            Some(Copy::Backup(backup)) => backup.epochs.holds_log(),
            None => false,
        }
    }

    pub fn primary(&mut self) -> Option<&mut PrimaryCopy> {
        match &mut self.copy {
            Some(Copy::Primary(primary)) => Some(primary),
            _ => None,
        }
    }

    pub fn backup(&mut self) -> Option<&mut BackupCopy> {
        match &mut self.copy {
            Some(Copy::Backup(backup)) => Some(backup),
            _ => None,
        }
    }

    pub fn term(&self) -> Term {
        self.node.as_ref().map_or(Term(0), Consensus::term)
    }

    /// For a verdict.
    pub fn described(&self) -> String {
        let node = self.node.as_ref();
        format!(
            "{:?} {:?}, applied {:?} of {:?}, {:?}",
            node.map(Consensus::role),
            node.map(Consensus::term),
            self.applied,
            node.map(Consensus::committed),
            self.leadership
        )
    }
}
