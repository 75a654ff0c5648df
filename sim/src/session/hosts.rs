//! What a host of a world consists of, and what both have in common.

use super::vm::Vm;
use bytes::Bytes;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::backup::BackupEpochs;
use dunlin_core::replica::epoch::primary::PrimaryEpochs;
use dunlin_core::replica::sync::{Event, Machine, Source};
use dunlin_core::units::Epoch;
use dunlin_core::wire::sync::SyncMessage;
use std::collections::{BTreeMap, VecDeque};

/// What the group has agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// An input.
    Input(u64),
    /// The epoch ends.
    Sync(Epoch),
    /// Both copies are complete, or the primary's alone.
    Complete {
        /// The backup's as well.
        both: bool,
        /// The sync that makes it so.
        epoch: Epoch,
    },
}

/// One machine at work: its effects under way, and what it will hear.
pub struct Worker<M: Machine> {
    pub machine: M,
    pub effects: VecDeque<M::Effect>,
    /// What the other host has sent; an error ends the stream.
    pub messages: VecDeque<Result<SyncMessage, String>>,
    pub words: VecDeque<M::Word>,
    pub began: bool,
}

impl<M: Machine> Worker<M> {
    pub fn new(machine: M) -> Self {
        Self {
            machine,
            effects: VecDeque::new(),
            messages: VecDeque::new(),
            words: VecDeque::new(),
            began: false,
        }
    }

    pub fn step(&mut self, now_us: u64, event: Event<M::Word>) {
        assert!(self.effects.is_empty(), "an event while effects are under way");
        let mut effects = Vec::new();
        self.machine.step(now_us, event, &mut effects);
        self.effects.extend(effects);
    }

    /// An effect has failed: those after it are not begun.
    pub fn fail(&mut self, now_us: u64, why: &str) {
        self.effects.clear();
        self.step(now_us, Event::Failed { why: why.to_owned() });
    }

    /// Whether there is something to do for it.
    pub fn is_ready(&self) -> bool {
        !self.began || !self.effects.is_empty() || self.hears()
    }

    fn hears(&self) -> bool {
        match self.machine.awaits().map(|awaits| awaits.from) {
            Some(Source::Messages) => !self.messages.is_empty(),
            Some(Source::Words) => !self.words.is_empty(),
            Some(Source::Either) => !self.words.is_empty() || !self.messages.is_empty(),
            None => false,
        }
    }

    /// Whether it waits for something that may be in vain.
    pub fn may_time_out(&self) -> bool {
        self.effects.is_empty()
            && self.began
            && self.machine.awaits().is_some_and(|awaits| awaits.wait.is_some())
    }

    /// What it hears next; `words_first` where it could be either.
    pub fn next_event(&mut self, words_first: bool) -> Option<Event<M::Word>> {
        if !self.began {
            self.began = true;
            return Some(Event::Begins);
        }
        let from = self.machine.awaits()?.from;
        let words = from != Source::Messages && !self.words.is_empty();
        let messages = from != Source::Words && !self.messages.is_empty();
        if words && (words_first || !messages) {
            return self.words.pop_front().map(Event::Word);
        }
        if !messages {
            return None;
        }
        let heard = self.messages.pop_front()?;
        Some(heard.map_or_else(|why| Event::StreamEnded { why }, Event::Message))
    }
}

/// What may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Voice {
    Alone,
    Protected,
    Shut,
}

/// Whether a primary leads its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Office {
    Leads,
    /// It follows nobody.
    Lost,
    /// It was elected again, and has not come to the entry that makes it lead.
    Elected,
}

/// The primary's VM loop, around core's machine.
pub struct PrimaryLoop {
    pub epochs: PrimaryEpochs,
    /// How the session is to begin: the join's mode.
    pub mode: Mode,
    pub voice: Voice,
    /// The running epoch.
    pub epoch: Epoch,
    /// Said by the VM, not read yet.
    pub unread: VecDeque<u64>,
    /// Read, in its epoch; may not leave yet.
    pub held: VecDeque<(Epoch, u64)>,
    /// What the backup's VM has said in the running epoch, where both are compared.
    pub matched: VecDeque<u64>,
    /// Up to here the log is applied.
    pub applied: usize,
    /// What it says to the group counts.
    pub office: Office,
    /// It has asked the group, in the term that it leads or was elected in, to follow the backup. The group says if that fails.
    pub transfers: bool,
}

/// The backup's VM loop, around core's machine.
pub struct BackupLoop {
    pub epochs: BackupEpochs,
    pub applied: usize,
    pub staged: Option<(Epoch, Mode)>,
    /// The newest epoch that a sync has ended here.
    pub ended: Option<Epoch>,
    /// The session has reported that the sync is applied, and the loop has not heard it.
    pub loaded: bool,
    pub elected: bool,
    pub told_to_take_over: bool,
    pub took_over: bool,
}

/// The backup's disk.
#[derive(Default)]
pub struct Disk {
    /// As of the last sync.
    pub image: u64,
    /// What the primary has written since.
    pub pvm: u64,
    /// What its own VM has written since.
    pub svm: Option<u64>,
    /// Of these epochs all writes are here, and this is what they come to.
    pub marks: BTreeMap<Epoch, u64>,
    /// It is a primary's: what its VM writes is written through.
    pub taken_over: bool,
}

/// What the primary's disk says to the backup's.
#[derive(Clone, Copy)]
pub enum Mirrored {
    Write(u64),
    Mark(Epoch),
}

/// A host.
pub struct Host<M: Machine> {
    pub alive: bool,
    pub vm: Vm,
    pub worker: Worker<M>,
    /// Pages copied aside, and the devices' state.
    pub copy: Vec<u64>,
    pub saved: Bytes,
}

impl<M: Machine> Host<M> {
    pub fn new(vm: Vm, machine: M) -> Self {
        Self {
            alive: true,
            vm,
            worker: Worker::new(machine),
            copy: Vec::new(),
            saved: Bytes::new(),
        }
    }
}
