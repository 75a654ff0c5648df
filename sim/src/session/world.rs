//! One world: what can happen next, and what is checked.

use super::hosts::{BackupLoop, Disk, Entry, Host, Mirrored, Office, PrimaryLoop, Voice};
use super::vm::{PAGES, Vm};
use super::{Bug, Tally};
use crate::random::Random;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::primary::Phase;
use dunlin_core::replica::sync::backup::{self, Backup};
use dunlin_core::replica::sync::bugs::Bugs;
use dunlin_core::replica::sync::primary::{self, Primary};
use dunlin_core::replica::sync::{Event, Machine, Source};
use dunlin_core::sync::compare::Compare;
use dunlin_core::units::{Epoch, Term};
use dunlin_core::wire::sync::SyncMessage;
use std::collections::{BTreeSet, VecDeque};

/// Turns with faults and load, and at most so many until all is at rest.
const BUSY_TURNS: u64 = 1_500;
const CALM_TURNS: u64 = 4_000;

/// What may happen next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    PrimarySession,
    BackupSession,
    ToPrimary,
    ToBackup,
    WordToPrimary,
    Mirror,
    Agree,
    PrimaryApplies,
    BackupApplies,
    Read,
    DrawLine,
    GiveLeave,
    RefuseLeave,
    HearLoaded,
    StreamNoticed,
    LastSync,
    TakeOver,
    Elect,
    LoseOffice,
    ElectAgain,
    LeadsAgain,
    Refused,
    Input,
    Tick,
    Sync,
    PreCopy,
    Switchover,
    Cut,
    KillPrimary,
    KillBackup,
    TimeOut,
}

/// Two hosts, what is between them, and what clients have seen.
pub struct World {
    pub(super) random: Random,
    pub(super) now_us: u64,
    pub(super) a: Host<Primary>,
    pub(super) b: Host<Backup>,
    pub(super) pl: PrimaryLoop,
    pub(super) bl: BackupLoop,
    pub(super) log: Vec<Entry>,
    pub(super) disk: Disk,
    pub(super) mirrored: VecDeque<Mirrored>,
    pub(super) mirrors: bool,
    pub(super) line_due: bool,
    /// The backup's copy was ended.
    pub(super) b_is_gone: bool,
    /// A fault in so many of a million effects.
    pub(super) fault_rate: u64,
    pub(super) tally: Tally,
    stream: Stream,
    proposed: VecDeque<Entry>,
    released: BTreeSet<u64>,
    failed: Option<String>,
    /// The two copies differ in what they say, in so many of a million inputs.
    whims: u64,
    calm: bool,
    /// How soon the disk's writes reach the backup.
    mirror_speed: usize,
    inputs: u64,
    trace: bool,
}

/// What is on its way.
#[derive(Default)]
struct Stream {
    to_a: VecDeque<SyncMessage>,
    to_b: VecDeque<SyncMessage>,
    words: VecDeque<(Epoch, u64)>,
    closed: bool,
}

impl World {
    /// As the seed says.
    pub fn new(mut random: Random, compare: Compare, bug: Option<Bug>, trace: bool) -> Self {
        let mode = Mode::ALL[random.below(3) as usize];
        let (term, pages, staging_bytes) = (Term(1), PAGES, 1 << 20);
        let active = mode.backup_runs();
        let mut vm = Vm::that_runs();
        vm.tick(random.draw());
        let older = Vm::older(&vm, &mut random.clone());
        let of_primary = primary::Setup {
            term,
            pages,
            active,
            compare,
            audit: false,
            staging_bytes,
        };
        let of_backup = backup::Setup {
            term,
            pages,
            active,
            audit: false,
            staging_bytes,
            says_held: older.is_some(),
        };
        let primary = Primary::new(of_primary).with_bugs(Bugs::with(bug));
        let backup = Backup::new(of_backup).with_bugs(Bugs::with(bug));
        Self {
            a: Host::new(vm, primary),
            b: Host::new(older.unwrap_or_default(), backup),
            pl: PrimaryLoop::new(mode, bug),
            bl: BackupLoop::new(mode, bug),
            log: Vec::new(),
            disk: Disk::default(),
            mirrored: VecDeque::new(),
            mirrors: false,
            line_due: false,
            b_is_gone: false,
            fault_rate: [0, 0, 500, 3_000][random.below(4) as usize],
            tally: Tally::default(),
            stream: Stream::default(),
            proposed: VecDeque::new(),
            released: BTreeSet::new(),
            failed: None,
            whims: [0, 20_000, 200_000][random.below(3) as usize],
            calm: false,
            mirror_speed: [1, 6][random.below(2) as usize],
            inputs: 0,
            trace,
            now_us: 0,
            random,
        }
    }

    /// To its end.
    pub fn play(mut self) -> Result<Tally, String> {
        for turn in 0..BUSY_TURNS + CALM_TURNS {
            self.calm = turn >= BUSY_TURNS;
            let possible = self.possible();
            let Some(turn) = self.random.pick(&possible) else {
                if self.calm {
                    return self.at_rest();
                }
                continue;
            };
            self.now_us += 10;
            self.tally.turns += 1;
            self.take(turn);
            self.release();
            if let Some(what) = self.failed.take() {
                return Err(what);
            }
        }
        let (a, b) = (self.a.worker.machine.state(), self.b.worker.machine.state());
        Err(format!(
            "it does not come to rest: the primary's session is {a}, the backup's {b}"
        ))
    }

    /// Everything that can happen; what is likely comes several times.
    fn possible(&mut self) -> Vec<Turn> {
        let mut turns = Vec::new();
        let mut may = |turn, times: usize, can: bool| {
            turns.extend(std::iter::repeat_n(turn, if can { times } else { 0 }))
        };
        let (a, b) = (self.a.alive, self.b.alive);
        let waits_for_disk = self.b.worker.effects.front().is_some_and(|effect| match effect {
            backup::Effect::AwaitMirrors(epoch) => {
                !self.disk.marks.contains_key(epoch) && (self.mirrors || !self.mirrored.is_empty())
            }
            _ => false,
        });
        let gone = self.b_is_gone;
        let office = self.pl.office;
        let serves = a && !self.bl.elected;
        let leads = serves && office == Office::Leads;
        may(Turn::PrimarySession, 12, a && self.a.worker.is_ready());
        may(
            Turn::BackupSession,
            12,
            b && self.b.worker.is_ready() && !waits_for_disk,
        );
        may(Turn::ToPrimary, 12, a && !self.stream.to_a.is_empty());
        may(Turn::ToBackup, 12, b && !self.stream.to_b.is_empty());
        may(Turn::WordToPrimary, 6, a && !self.stream.words.is_empty());
        may(Turn::Mirror, self.mirror_speed, b && !self.mirrored.is_empty());
        may(
            Turn::Agree,
            6,
            !self.proposed.is_empty() && office != Office::Lost,
        );
        let unapplied = |applied: usize| applied < self.log.len();
        may(
            Turn::PrimaryApplies,
            6,
            a && unapplied(self.pl.applied)
                && !self.pl.epochs.holds_log()
                && (self.a.vm.runs || self.pl.epochs.is_handed()),
        );
        may(
            Turn::BackupApplies,
            6,
            b && !gone && unapplied(self.bl.applied) && !self.bl.epochs.holds_log(),
        );
        may(Turn::Read, 4, a && !self.pl.unread.is_empty() && !self.line_due);
        may(Turn::DrawLine, 6, a && self.line_due);
        let asks = b && self.is_asked_for_leave();
        // Whether the primary has kept the session in a new term it says when it leads in it.
        may(Turn::GiveLeave, 2, asks && (leads || !serves));
        may(Turn::RefuseLeave, 1, asks && serves && !leads);
        may(Turn::HearLoaded, 4, b && self.bl.loaded);
        let session_hears = self.a.worker.machine.awaits().is_some_and(|awaits| {
            awaits.from == Source::Words && awaits.wait.is_none() && self.a.worker.effects.is_empty()
        });
        let noticed = session_hears && self.stream.closed && self.a.worker.began;
        may(
            Turn::StreamNoticed,
            4,
            a && noticed && self.a.worker.words.is_empty(),
        );
        let handed = self.pl.epochs.is_handed();
        let session = self.pl.epochs.session();
        let free = leads && !self.stream.closed && self.pl.epochs.may_begin();
        may(Turn::LastSync, 6, free && session == Some(Phase::Copied));
        may(
            Turn::Refused,
            6,
            leads && self.pl.epochs.clone().take_refused(true).is_some(),
        );
        let takes_over = self.bl.elected && !self.bl.told_to_take_over && !self.bl.epochs.holds_log();
        let settled = self.bl.epochs.is_settled() && !unapplied(self.bl.applied);
        may(Turn::TakeOver, 6, b && !gone && takes_over && settled);
        let whole = self.bl.epochs.may_lead();
        let electable = b && !gone && whole && self.is_complete() && !self.bl.elected;
        may(Turn::Elect, 4, electable && (!a || handed && leads));
        may(Turn::ElectAgain, 3, serves && office == Office::Lost);
        // A transfer that fails. One of an earlier term is forgotten.
        may(
            Turn::LoseOffice,
            4,
            serves && handed && self.pl.transfers && (!b || gone),
        );
        let barrier = !unapplied(self.pl.applied) && !self.pl.epochs.holds_log() && self.proposed.is_empty();
        may(
            Turn::LeadsAgain,
            6,
            serves && office == Office::Elected && barrier,
        );
        if self.calm {
            if turns.is_empty() {
                let waits = a && self.a.worker.may_time_out() || b && self.b.worker.may_time_out();
                turns.extend(waits.then_some(Turn::TimeOut));
            }
            return turns;
        }
        let mut may = |turn, times: usize, can: bool| {
            turns.extend(std::iter::repeat_n(turn, if can { times } else { 0 }))
        };
        let synced = free && session == Some(Phase::Synced);
        may(Turn::Input, 3, leads && self.a.vm.runs && !handed);
        may(Turn::Tick, 3, true);
        may(Turn::Sync, 1, synced);
        may(Turn::PreCopy, 1, synced);
        let mut rarely = |turn, per_million, can: bool| {
            if can && self.random.chance(per_million) {
                turns.extend([turn; 8]);
            }
        };
        rarely(Turn::Switchover, 1_000, synced);
        rarely(Turn::Cut, 400, !self.stream.closed);
        rarely(Turn::KillPrimary, 700, a);
        rarely(Turn::KillBackup, if handed { 50_000 } else { 200 }, b);
        rarely(Turn::LoseOffice, if handed { 50_000 } else { 400 }, leads);
        rarely(Turn::Elect, 600, electable);
        rarely(Turn::TimeOut, self.fault_rate, true);
        turns
    }

    fn take(&mut self, turn: Turn) {
        match turn {
            Turn::PrimarySession => self.primary_turn(),
            Turn::BackupSession => self.backup_turn(),
            Turn::ToPrimary => {
                let message = self.stream.to_a.pop_front().map(Ok);
                self.a.worker.messages.extend(message);
            }
            Turn::ToBackup => {
                let message = self.stream.to_b.pop_front().map(Ok);
                self.b.worker.messages.extend(message);
            }
            Turn::WordToPrimary => {
                let (epoch, word) = self.stream.words.pop_front().expect("it is possible");
                if epoch == self.pl.epoch && self.pl.epochs.rules().compares() {
                    self.pl.matched.push_back(word);
                }
            }
            Turn::Mirror => match self.mirrored.pop_front().expect("it is possible") {
                Mirrored::Write(content) => self.disk.pvm = content,
                Mirrored::Mark(epoch) => {
                    self.disk.marks.insert(epoch, self.disk.pvm);
                }
            },
            Turn::Agree => self.log.extend(self.proposed.pop_front()),
            Turn::PrimaryApplies => self.primary_applies(),
            Turn::BackupApplies => self.backup_applies(),
            Turn::Read => self.pl.read(),
            Turn::DrawLine => {
                self.draw_line();
                self.pl.matched.clear();
            }
            Turn::GiveLeave => self.give_leave(),
            Turn::HearLoaded => self.hear_loaded(),
            Turn::StreamNoticed => self.a.worker.step(self.now_us, Event::LoopEnded),
            Turn::LastSync | Turn::Sync => self.begin_sync(false),
            Turn::PreCopy => self.precopy(),
            Turn::Switchover => self.begin_sync(true),
            Turn::TakeOver => self.order_take_over(),
            Turn::Elect => self.elect(),
            Turn::LoseOffice => self.lose_office(),
            Turn::ElectAgain => self.elected_again(),
            Turn::RefuseLeave => self.refuse_leave(),
            Turn::LeadsAgain => self.leads_again(),
            Turn::Refused => self.begin_refused(),
            Turn::Input => self.arrives(),
            Turn::Tick => self.tick(),
            Turn::Cut => self.close_stream(),
            Turn::KillPrimary => self.kill_primary(),
            Turn::KillBackup => {
                self.note(|| "b dies".to_owned());
                self.b.alive = false;
                self.close_stream();
            }
            Turn::TimeOut => self.time_out(),
        }
    }

    /// Both hosts are there and well, and the session between them has no reason to end.
    pub(super) fn nothing_is_broken(&self) -> bool {
        let open = self.a.alive && self.b.alive && !self.stream.closed;
        let follows = !self.b_is_gone && !self.bl.elected && self.pl.office == Office::Leads;
        open && follows && !self.pl.epochs.is_handed()
    }

    fn time_out(&mut self) {
        if self.calm && self.nothing_is_broken() {
            let (a, b) = (self.a.worker.machine.state(), self.b.worker.machine.state());
            self.verdict(format!("a wait is in vain, and nothing is broken: {a} and {b}"));
        }
        let (now_us, in_vain) = (self.now_us, || Event::TimedOut { mirrored: 0 });
        if self.a.alive && self.a.worker.may_time_out() && self.random.chance(500_000) {
            self.note(|| "a waits in vain".to_owned());
            self.a.worker.step(now_us, in_vain());
        } else if self.b.alive && self.b.worker.may_time_out() {
            self.note(|| "b waits in vain".to_owned());
            // The thread's word to the primary's: the stream closes with its loop's next turn.
            self.b.worker.step(now_us, Event::TimedOut { mirrored: 0 });
        }
    }

    fn arrives(&mut self) {
        self.inputs += 1;
        let input = self.inputs;
        if self.pl.executes_at_once() {
            self.primary_input(input);
        } else {
            self.propose(Entry::Input(input));
        }
    }

    /// The guests do something of themselves.
    fn tick(&mut self) {
        let whim = self.random.draw();
        if self.a.alive && self.a.vm.runs && whim & 1 == 0 {
            self.a.vm.tick(whim);
            if whim & 2 == 0 {
                let content = self.a.vm.write_disk(whim);
                self.mirror(Mirrored::Write(content));
            }
        }
        let runs = self.b.vm.runs && self.bl.epochs.is_whole();
        if self.b.alive && !self.b_is_gone && runs && whim & 4 == 0 {
            self.b.vm.tick(whim ^ 0xff00);
            if whim & 8 == 0 {
                let content = self.b.vm.write_disk(whim ^ 0xff00);
                match self.disk.taken_over {
                    true => self.disk.image = content,
                    false => self.disk.svm = Some(content),
                }
            }
        }
    }

    /// What makes a copy do otherwise than the other; mostly nothing.
    pub(super) fn whim(&mut self) -> u64 {
        match self.random.chance(self.whims) {
            true => self.random.draw(),
            false => 0,
        }
    }

    /// Whether this effect fails.
    pub(super) fn fails(&mut self, sure: bool) -> bool {
        !sure && !self.calm && self.random.chance(self.fault_rate)
    }

    pub(super) fn note(&self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:6} {}", self.tally.turns, what());
        }
    }

    pub(super) fn verdict(&mut self, what: String) {
        self.failed.get_or_insert(what);
    }

    pub(super) fn send_to_backup(&mut self, message: SyncMessage) {
        if !self.stream.closed {
            self.stream.to_b.push_back(message);
        }
    }

    pub(super) fn send_to_primary(&mut self, message: SyncMessage) {
        if !self.stream.closed {
            self.stream.to_a.push_back(message);
        }
    }

    pub(super) fn said_by_backup(&mut self, word: u64) {
        let epoch = self
            .disk
            .marks
            .keys()
            .next_back()
            .map_or(Epoch(1), |last| last.next());
        if !self.stream.closed {
            self.stream.words.push_back((epoch, word));
        }
    }

    pub(super) fn mirror(&mut self, what: Mirrored) {
        if self.mirrors {
            self.mirrored.push_back(what);
        }
    }

    /// The stream is cut: what was on its way comes, up to some message.
    pub(super) fn close_stream(&mut self) {
        if std::mem::replace(&mut self.stream.closed, true) {
            return;
        }
        self.note(|| "the stream ends".to_owned());
        let stream = &mut self.stream;
        let keeps = self.random.below(stream.to_a.len() as u64 + 1) as usize;
        self.a
            .worker
            .messages
            .extend(stream.to_a.drain(..).take(keeps).map(Ok));
        let keeps = self.random.below(stream.to_b.len() as u64 + 1) as usize;
        self.b
            .worker
            .messages
            .extend(stream.to_b.drain(..).take(keeps).map(Ok));
        stream.words.clear();
        for messages in [&mut self.a.worker.messages, &mut self.b.worker.messages] {
            messages.push_back(Err("the stream ended".to_owned()));
        }
    }

    pub(super) fn kill_primary(&mut self) {
        self.note(|| "a dies".to_owned());
        self.a.alive = false;
        self.proposed.clear();
        self.mirrors = false;
        let keeps = self.random.below(self.mirrored.len() as u64 + 1) as usize;
        self.mirrored.truncate(keeps);
        self.close_stream();
    }

    /// What a leader says to the group; one that was deposed says nothing.
    pub(super) fn propose(&mut self, entry: Entry) {
        if self.a.alive && !self.bl.elected && self.pl.office == Office::Leads {
            self.proposed.push_back(entry);
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        let last = self.log.iter().rev().find_map(|entry| match entry {
            Entry::Complete { both, .. } => Some(*both),
            _ => None,
        });
        last.unwrap_or(false)
    }

    /// The group follows the backup: the primary's word counts no more, nor may it be heard.
    fn elect(&mut self) {
        self.note(|| "b is elected".to_owned());
        self.bl.elected = true;
        self.bl.epochs.elected();
        self.pl.voice = Voice::Shut;
        self.proposed.clear();
        self.close_stream();
    }

    /// What leaves, after each turn.
    fn release(&mut self) {
        if !self.a.alive || self.bl.elected || self.pl.office != Office::Leads {
            return;
        }
        match self.pl.voice {
            Voice::Alone => {
                let all = std::mem::take(&mut self.pl.held);
                all.into_iter().for_each(|(_, word)| self.leaves(word));
            }
            Voice::Protected if self.pl.epochs.rules().compares() => self.release_matched(),
            Voice::Protected | Voice::Shut => {}
        }
    }

    fn release_matched(&mut self) {
        while let (Some((epoch, ours)), Some(theirs)) = (self.pl.held.front(), self.pl.matched.front()) {
            if *epoch != self.pl.epoch || ours != theirs {
                return;
            }
            let word = *ours;
            self.pl.held.pop_front();
            self.pl.matched.pop_front();
            self.leaves(word);
        }
    }

    /// All up to the epoch's end.
    pub(super) fn release_through(&mut self, epoch: Epoch) {
        while let Some((of, word)) = self.pl.held.front().copied() {
            if of > epoch || self.pl.voice == Voice::Shut || self.bl.elected {
                return;
            }
            self.pl.held.pop_front();
            self.leaves(word);
        }
    }

    fn leaves(&mut self, word: u64) {
        self.tally.released += 1;
        self.released.insert(word);
    }

    /// The backup's VM is an ordinary one: it has to explain all that was seen.
    pub(super) fn take_over_done(&mut self) {
        self.bl.took_over = true;
        self.tally.take_overs += 1;
        if let Err(why) = self.b.vm.check(self.disk.image) {
            self.verdict(format!("after the take-over: {why}"));
        }
        let said: BTreeSet<u64> = self.b.vm.devices.said.iter().copied().collect();
        let unexplained = self.released.difference(&said).count();
        if unexplained > 0 {
            self.verdict(format!(
                "the VM that took over does not explain {unexplained} words that have left"
            ));
        }
    }

    /// Nothing can happen any more.
    fn at_rest(&self) -> Result<Tally, String> {
        let (a, b) = (self.a.worker.machine.state(), self.b.worker.machine.state());
        let serves = self.a.alive && !self.bl.elected;
        let handed = self.pl.epochs.is_handed();
        let alone = !self.b.alive || self.b_is_gone || self.pl.office != Office::Leads;
        let nobody_elected = handed && serves && alone;
        let what = if self.a.alive && !self.a.vm.runs && (!handed || nobody_elected) {
            format!("the primary's VM stands for good (its session is {a})")
        } else if serves && self.pl.is_lost() && self.pl.voice != Voice::Alone && !handed {
            "the primary has no backup, and does not speak".to_owned()
        } else if serves && !handed && self.pl.epochs.run().is_some() {
            format!("a sync never ends: {a} and {b}")
        } else if self.bl.elected && self.b.alive && !self.b_is_gone && !self.bl.took_over {
            format!("the backup was elected and never took over ({b})")
        } else {
            return Ok(self.tally);
        };
        Err(what)
    }
}
