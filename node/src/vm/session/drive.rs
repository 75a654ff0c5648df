//! Drives one side of a session: a state machine of core's `replica::sync`, its effects, and what it waits for.
//!
//! Not here: what is waited for and what follows (the machine), the effects themselves (`primary`, `backup`).

use super::Broken;
use super::link::SyncLink;
use crossbeam_channel::{Receiver, never, select};
use dunlin_core::replica::sync::{Answer, Awaits, Event, Machine, Source};
use dunlin_core::waits::Wait;
use std::time::{Duration, Instant};

/// Carries out what a machine decides.
pub trait Driver<M: Machine> {
    /// An event, before the machine gets it.
    fn notice(&mut self, _event: &Event<M::Word>) {}

    /// Carries an effect out; its answer, if it has one.
    fn carry_out(&mut self, effect: M::Effect) -> Result<Option<Answer>, Broken>;

    /// The stream.
    fn link(&self) -> &SyncLink;

    /// Where the VM loop's words come in.
    fn words(&self) -> &Receiver<M::Word>;

    /// How many bytes of disk writes the other host has taken so far.
    fn mirrored(&self) -> u64;
}

/// So long nothing is owed, and it is looked again: there is nothing to be seen.
const NOTHING_IS_OWED: Duration = Duration::from_secs(3600);

/// Until the machine has ended.
pub fn drive<M: Machine>(machine: &mut M, driver: &mut impl Driver<M>) {
    let born = Instant::now();
    let mut effects = Vec::new();
    let mut event = Event::Begins;
    loop {
        driver.notice(&event);
        let now_us = born.elapsed().as_micros() as u64;
        machine.step(now_us, event, &mut effects);
        tracing::trace!(state = machine.state(), effects = effects.len(), "session");
        let answer = carry_out_all(driver, &mut effects);
        event = match (answer, machine.awaits()) {
            (Some(event), _) => event,
            (None, Some(awaits)) => listen(driver, awaits, born),
            (None, None) => return,
        };
    }
}

/// In their order; what the last one answers, or that one has failed.
fn carry_out_all<M: Machine>(
    driver: &mut impl Driver<M>,
    effects: &mut Vec<M::Effect>,
) -> Option<Event<M::Word>> {
    let mut answer = None;
    for effect in effects.drain(..) {
        assert!(answer.is_none(), "only the last effect answers");
        match driver.carry_out(effect) {
            Ok(answers) => answer = answers,
            // The others are dropped with the iterator.
            Err(Broken(why)) => return Some(Event::Failed { why }),
        }
    }
    answer.map(Event::Answer)
}

fn listen<M: Machine>(driver: &impl Driver<M>, awaits: Awaits, born: Instant) -> Event<M::Word> {
    let (no_messages, no_words) = (never(), never());
    let messages = match awaits.from {
        Source::Words => &no_messages,
        Source::Messages | Source::Either => driver.link().incoming(),
    };
    let words = match awaits.from {
        Source::Messages => &no_words,
        Source::Words | Source::Either => driver.words(),
    };
    let heard = |for_us: Option<u64>| {
        let at_most = for_us.map_or(NOTHING_IS_OWED, Duration::from_micros);
        select! {
            recv(messages) -> message => Some(match message {
                Ok(Ok(message)) => Event::Message(message),
                Ok(Err(Broken(why))) => Event::StreamEnded { why },
                Err(_) => Event::StreamEnded { why: "the other host closed the sync's stream".into() },
            }),
            recv(words) -> word => Some(word.map_or(Event::LoopEnded, Event::Word)),
            default(at_most) => None,
        }
    };
    match awaits.wait {
        Some(wait) => in_time(driver, awaits, wait, born, heard),
        None => loop {
            if let Some(event) = heard(None) {
                return event;
            }
        },
    }
}

fn in_time<M: Machine>(
    driver: &impl Driver<M>,
    awaits: Awaits,
    wait: Wait,
    born: Instant,
    heard: impl Fn(Option<u64>) -> Option<Event<M::Word>>,
) -> Event<M::Word> {
    let now_us = born.elapsed().as_micros() as u64;
    // What is here already is taken, however late it is looked at.
    let left_us = awaits.until_us.saturating_sub(now_us);
    let event = driver.link().waiting.during(wait, || heard(Some(left_us)));
    event.unwrap_or_else(|| Event::TimedOut {
        mirrored: driver.mirrored(),
    })
}
