//! The program's agreed time and chance: said by who leads; a time is set in each copy where it was agreed, a seed before it begins.
//!
//! Flow: the leader's clocks -> core's `program::time` -> an entry, with inputs or alone (`program::pace`) -> on both hosts through the order of
//! reading -> the copy's page. A seed -> an entry before the one by which both copies begin.
//!
//! Invariants: 1. only who may take inputs says what time it is; 2. a copy has a time and a seed before its program begins.
//!
//! Not here: what a time waits for (core's `program::order`), how a program reads it (`dunlin_program::page`).

use super::state::{ProgramLoop, Running};
use dunlin_core::agreed::{Agreed, AgreedTime, ReplicaSet, SEED_BYTES};
use dunlin_program::chance::{Drawn, Seed};
use dunlin_program::copy::Copy;
use dunlin_program::source::Source;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

impl Running {
    /// It is that time for the copy here.
    pub(super) fn set_clock(&mut self, time: AgreedTime) -> io::Result<()> {
        self.time = time;
        self.copy.clock().map_or(Ok(()), |page| page.set(time))
    }
}

/// Since this version of the protocol hosts know entries with a time and a seed.
const TIMED_SINCE: u16 = 3;

/// Since this version a program's hosts follow a list of hosts.
const MOVES_SINCE: u16 = 5;

/// Another host would not understand what is to be said.
#[derive(Debug, thiserror::Error)]
#[error(
    "host '{host}' speaks protocol {version}, and a bare program needs {needs} on all of its hosts{to_do}: upgrade that one"
)]
pub(super) struct TooOld {
    host: String,
    version: u16,
    needs: u16,
    to_do: &'static str,
}

impl ProgramLoop {
    /// Why no copy may begin, here or there: a host of an older version is linked, and would not understand what is said of time and chance.
    pub(super) fn waits_for_an_upgrade(&self) -> Option<TooOld> {
        self.too_old(TIMED_SINCE, "")
    }

    /// Why none of its parts may go to another host: a host that is linked would not follow that.
    pub(super) fn stays_for_an_upgrade(&self) -> Option<TooOld> {
        self.too_old(MOVES_SINCE, " to move")
    }

    fn too_old(&self, needs: u16, to_do: &'static str) -> Option<TooOld> {
        let links = self.group.links();
        let (peer, version) = links
            .iter()
            .filter_map(|link| Some((link.peer, link.spoken.as_ref()?.version)))
            .find(|(_, version)| *version < needs)?;
        Some(TooOld {
            host: self.config.host_name(peer).to_owned(),
            version,
            needs,
            to_do,
        })
    }

    /// The time, if it goes with inputs that are said now.
    pub(super) fn time_with_inputs(&mut self) -> Option<AgreedTime> {
        let is_due = self.program.agreed.clock && self.own.agreed.pace.is_due_with_inputs(self.now_us());
        is_due.then(|| self.say_time())
    }

    /// Both copies are to begin (invariant 2).
    pub(super) fn say_first_time_and_seed(&mut self) -> bool {
        (!self.program.agreed.clock || self.propose_time())
            && (!self.program.agreed.chance || self.propose_seed())
    }

    fn propose_seed(&mut self) -> bool {
        match drawn_here() {
            Ok(seed) => self.propose(&Agreed::Seed(seed)),
            Err(error) => {
                self.fails(&format!("/dev/urandom: {error}"));
                false
            }
        }
    }

    /// What a copy that begins here draws from; where its chance is its host's own nobody looks at it. None: nothing was agreed (invariant 2).
    pub(super) fn first_seed(&self) -> Option<Seed> {
        match self.program.agreed.chance {
            true => self.own.agreed.seed,
            false => Some(Seed::default()),
        }
    }

    /// Who begins alone needs nobody's word: a copy that joins is given the seed. A leader of an earlier version has said none.
    pub(super) fn draw_seed_alone(&mut self) {
        let is_alone = self.agreement.state().complete == ReplicaSet::one(self.me);
        if is_alone && self.program.agreed.chance && self.own.agreed.seed.is_none() {
            self.own.agreed.seed = drawn_here().ok();
        }
    }

    /// The copy that begins here draws its chance from that.
    pub(super) fn draw(&self, copy: &mut Copy) -> Option<Arc<Source>> {
        copy.draws(self.first_seed()?, &Drawn::default()).map(Arc::new)
    }

    /// While nothing comes.
    pub(super) fn tick(&mut self) {
        if self.tick_due_us().is_some_and(|due_us| due_us <= self.now_us()) {
            // One that is refused is said again in a while.
            self.propose_time();
        }
    }

    /// When the time is to be said although nothing comes; none where this host does not say it.
    pub(super) fn tick_due_us(&self) -> Option<u64> {
        let says = self.program.agreed.clock && self.takes_inputs();
        says.then(|| self.own.agreed.pace.due_alone_us(self.net.door.is_none()))
    }

    /// A time was agreed.
    pub(super) fn time_is_agreed(&mut self, time: AgreedTime) {
        self.own.agreed.clock.agreed(time, ns(ClockId::Monotonic));
    }

    fn propose_time(&mut self) -> bool {
        let (time, frames) = (self.say_time(), Vec::new());
        self.propose(&Agreed::Timed { time, frames })
    }

    fn say_time(&mut self) -> AgreedTime {
        self.own.agreed.pace.said(self.now_us());
        self.own
            .agreed
            .clock
            .reading(ns(ClockId::Monotonic), ns(ClockId::Realtime))
    }
}

fn ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    // A clock before 1970 is none.
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// A seed by this host's own chance.
fn drawn_here() -> io::Result<Seed> {
    let mut seed = [0; SEED_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut seed)?;
    Ok(seed)
}
