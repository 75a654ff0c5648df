//! The tester: copies of a program, one order of their clients' frames, one report.
//!
//! Decides:    when a run is over; when the time is set without an input (`ticks`); all else is decided in `dunlin_core::program`.
//! Flow:       client's card -> `order` -> every copy's card; a copy's card -> `outputs`, and the first copy's -> client's card.
//!             The other copies' TCP has other numbers than the client knows: what goes to them is translated
//!             (`output::rewriter`), as it is for the backup of a VM.
//! Invariants:
//! 1. every wait has a bound: for the listening port, for an unread input, for the last answers;
//! 2. however it ends, nothing of the copies is left (`Copy`'s invariant 1);
//! 3. only the first copy speaks to the clients; what all of them say of their link (ARP) is theirs alike, and passes.
//!
//! Source: APUS's report mode of an output checker. Not here: what the user typed.

mod ticks;

use crate::answers::{Answers, Clock};
use crate::copy::{Copy, CopyError, Prints};
use crate::message::{Card, Heard, Spec, Walls};
use crate::options::{CheckError, Clients, Options, mac_of, neighbour};
use crate::printed::Printed;
use crate::quiet::Quiet;
use crate::report::Report;
use crate::sockets;
use crate::tsc::{self, Reads};
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::packet::{Direction, Parsed, parse};
use dunlin_core::output::rewriter::SequenceRewriter;
use dunlin_core::program::order::{Gate, Next};
use dunlin_core::program::outputs::Outputs;
use dunlin_guest::frames::Tap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use ticks::{TICK, Ticks};

/// A copy's card takes what Ethernet does.
const MTU: u16 = 1500;
/// A frame, with room for the largest that a card of this kind takes.
const FRAME_BYTES: usize = 64 << 10;
/// Frames that are read of one card before the others have their turn.
const FRAMES_A_TURN: usize = 64;
/// So long is waited before an unread socket is looked at again, at first and at most.
const LOOK_AGAIN_US: (u64, u64) = (20, 500);
/// The longest sleep: so soon an order to end is seen.
const LOOK: Duration = Duration::from_millis(50);
/// When the clients have gone, the copies may say so long what they have to, and must be silent so long to be believed.
const LAST_WORDS: Duration = Duration::from_secs(3);
const SILENCE: Duration = Duration::from_millis(100);
/// A turn takes [`LOOK`] at most; one that took longer than this was kept from it.
const STOOD_STILL: Duration = Duration::from_millis(250);

/// Runs the copies until the client has ended, `stop` is set, or the time is over.
///
/// `say` gets a line when something begins. The thread that calls this must live as long as the copies do: they die with it.
///
/// # Errors
/// Where no run comes about; a run that shows a difference is none.
pub fn run(options: &Options, stop: &AtomicBool, say: &mut dyn FnMut(&str)) -> Result<Report, CheckError> {
    let mut tester = Tester::prepare(options)?;
    tester.start(stop)?;
    let names = &options.command[0];
    say(&format!(
        "{} copies of {names} serve at {}",
        options.copies, options.address
    ));
    tester.serve(options, stop)?;
    Ok(tester.report())
}

struct Tester {
    copies: Vec<Copy>,
    client: Wire,
    /// For each copy but the first, by its number.
    rewriters: Vec<SequenceRewriter>,
    gate: Gate,
    outputs: Outputs,
    answers: Vec<Answers>,
    clock: Arc<Clock>,
    seed: u64,
    port: Option<u16>,
    start_within: Duration,
    began: Instant,
    first_input: Option<Instant>,
    last_word: Instant,
    ticks: Ticks,
    look_again_us: u64,
    ends: Vec<String>,
    faults: Vec<String>,
    tsc: Option<Reads>,
    /// The processor's own clock is read as the agreed time.
    tsc_is_agreed: bool,
    buffer: Vec<u8>,
}

enum Wire {
    Namespace(Box<Copy>),
    Host(Tap),
}

impl Wire {
    fn read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Namespace(copy) => read(copy.card(), buffer),
            Self::Host(tap) => tap.read(buffer),
        }
    }

    fn write(&self, frame: &[u8]) -> io::Result<()> {
        match self {
            Self::Namespace(copy) => write(copy.card(), frame),
            Self::Host(tap) => tap.write(frame).map(drop),
        }
    }
}

fn read(mut card: &File, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match card.read(buffer) {
        Ok(length) => Ok(Some(length)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// What finds no room is lost, as on any wire, and TCP sends it again.
fn write(mut card: &File, frame: &[u8]) -> io::Result<()> {
    match card.write(frame) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
        Err(error) => Err(error),
    }
}

impl Tester {
    fn prepare(options: &Options) -> Result<Self, CheckError> {
        let log = |name: &str| -> Result<Option<Printed>, CheckError> {
            let Some(folder) = &options.logs else {
                return Ok(None);
            };
            let file = std::fs::create_dir_all(folder).and_then(|()| Printed::create(&folder.join(name)));
            file.map(Some)
                .map_err(|error| CheckError::Host("the folder for logs", error))
        };
        let card = |address| Card {
            address,
            prefix: options.prefix,
            gateway: options.gateway,
            mtu: MTU,
            mac: mac_of(address),
        };
        let spec = Spec {
            command: options.command.clone(),
            directory: options.directory.clone(),
            environment: options.environment.clone(),
            card: card(options.address),
            walls: Some(Walls {
                user: options.user,
                root: "/".into(),
                scratch_mib: options.scratch_mib,
                agreed_chance: options.agreed_chance,
                agreed_clock: options.agreed_clock,
                data: None,
                tells_tsc: options.tells_tsc,
                clock_page: false,
                chance: None,
            }),
        };
        let mut copies = Vec::new();
        for number in 1..=options.copies {
            let prints = Prints::Kept(log(&format!("copy-{number}.log"))?);
            copies.push(Copy::prepare(
                &format!("copy {number}"),
                &options.inside,
                &spec,
                prints,
                None,
                None,
            )?);
        }
        let client = match &options.clients {
            Clients::Command(command) => Wire::Namespace(Box::new(Self::client(options, command, card)?)),
            Clients::Bridge(bridge) => {
                if !std::path::Path::new("/sys/class/net")
                    .join(bridge)
                    .join("bridge")
                    .exists()
                {
                    let why = format!(
                        "--bridge {bridge}: this host has no bridge of that name (ip link add {bridge} type bridge)"
                    );
                    return Err(CheckError::Program(why));
                }
                Wire::Host(Tap::open("dunlin%d", Some(bridge))?)
            }
            Clients::Host(address) => {
                let tap = Tap::open("dunlin%d", None)?;
                crate::inside::address_of_host(tap.name(), *address, options.prefix)
                    .map_err(|error| CheckError::Host("this host's address on the wire", error))?;
                Wire::Host(tap)
            }
        };
        let now = Instant::now();
        Ok(Self {
            rewriters: (1..options.copies).map(|_| SequenceRewriter::new()).collect(),
            gate: Gate::new(options.order, options.copies, options.patience.as_micros() as u64),
            outputs: Outputs::new(options.copies),
            copies,
            client,
            answers: Vec::new(),
            clock: Arc::new(Clock::starting_now()),
            seed: options.agreed_chance.unwrap_or(0),
            port: options.port,
            start_within: options.start_within,
            began: now,
            first_input: None,
            last_word: now,
            ticks: Ticks::starting(now, options.patience),
            look_again_us: LOOK_AGAIN_US.0,
            ends: Vec::new(),
            faults: Vec::new(),
            tsc: options.tells_tsc.then(Reads::default),
            tsc_is_agreed: options.agreed_clock,
            buffer: vec![0; FRAME_BYTES],
        })
    }

    fn client(options: &Options, command: &str, card: impl Fn(Ipv4Addr) -> Card) -> Result<Copy, CopyError> {
        let own = neighbour(options.address);
        let mut environment = options.environment.clone();
        environment.push(("SERVER".to_owned(), options.address.to_string()));
        if let Some(port) = options.port {
            environment.push(("PORT".to_owned(), port.to_string()));
        }
        let spec = Spec {
            command: vec!["/bin/sh".to_owned(), "-c".to_owned(), command.to_owned()],
            directory: options.directory.clone(),
            environment,
            card: card(own),
            walls: None,
        };
        Copy::prepare("client", &options.inside, &spec, Prints::Through, None, None)
    }

    /// Starts the copies, waits until they listen, and starts the client.
    fn start(&mut self, stop: &AtomicBool) -> Result<(), CheckError> {
        for copy in &self.copies {
            copy.go()?;
        }
        let until = Instant::now() + self.start_within;
        loop {
            self.hear()?;
            // Copies start at different moments, and many draw their chance from the time of that: it stands still meanwhile.
            let now = Instant::now();
            if self.ticks.is_late(now) {
                self.tick(now);
            }
            if let Some(copy) = self.copies.iter().find(|copy| copy.ended().is_some()) {
                return Err(CheckError::Program(early_end(copy)));
            }
            let mut ports = Vec::new();
            for copy in &self.copies {
                let found = sockets::listeners(copy.queues());
                ports.push(found.map_err(|error| CheckError::Host("sock_diag", error))?);
            }
            let serves = |ports: &BTreeSet<u16>| match self.port {
                Some(port) => ports.contains(&port),
                None => !ports.is_empty(),
            };
            let alike = |pair: &[BTreeSet<u16>]| self.port.is_some() || pair[0] == pair[1];
            if ports.iter().all(serves) && ports.windows(2).all(alike) {
                return self.start_client();
            }
            if Instant::now() > until || stop.load(Ordering::SeqCst) {
                let port = self
                    .port
                    .map_or("any TCP port".to_owned(), |port| format!("TCP port {port}"));
                let words = self.copies[0].last_words(1).pop();
                let words = words.map_or_else(String::new, |words| format!("; its last words: {words}"));
                return Err(CheckError::Program(format!(
                    "not all copies listen at {port} (beyond loopback) after {} s: name another with --port, or wait longer \
                     with --start-within{words}",
                    self.start_within.as_secs()
                )));
            }
            self.sleep(Duration::from_millis(5));
        }
    }

    fn start_client(&mut self) -> Result<(), CheckError> {
        if let Wire::Namespace(client) = &self.client {
            client.go()?;
        }
        self.began = Instant::now();
        Ok(())
    }

    fn serve(&mut self, options: &Options, stop: &AtomicBool) -> Result<(), CheckError> {
        let mut client_gone: Option<Instant> = None;
        let mut before = Instant::now();
        let mut resumed = before;
        loop {
            let busy = self.turn()?;
            self.hear()?;
            let now = Instant::now();
            // A machine that stood still has given the copies no time to say anything either.
            let late = now.duration_since(before);
            if late > STOOD_STILL {
                client_gone = client_gone.map(|gone| gone + late);
                resumed = now;
            }
            before = now;
            // A copy that is still at its last input must not see a later time than the one that has answered.
            let idle = !busy && self.gate.is_idle() && self.outputs.is_settled();
            if self.ticks.is_due(now, idle, || are_at_rest(&mut self.copies))? {
                self.tick(now);
            }
            let over = stop.load(Ordering::SeqCst)
                || options
                    .most
                    .is_some_and(|most| now.duration_since(self.began) > most)
                || self.copies.iter().all(|copy| copy.ended().is_some())
                || matches!(&self.client, Wire::Namespace(client) if client.ended().is_some());
            if over {
                let since = *client_gone.get_or_insert(now);
                let silent = now.duration_since(self.last_word.max(resumed)) > SILENCE;
                let settled = self.gate.is_idle() && self.outputs.is_settled();
                if silent && (settled || now.duration_since(since) > LAST_WORDS) {
                    return Ok(());
                }
            }
        }
    }

    /// Moves what there is to move, or sleeps until there is. Whether anything moved.
    fn turn(&mut self) -> Result<bool, CheckError> {
        let mut moved = false;
        for copy in 0..self.copies.len() {
            for _ in 0..FRAMES_A_TURN {
                let read = read(self.copies[copy].card(), &mut self.buffer);
                let Some(length) = read.map_err(|error| CheckError::Host("a copy's card", error))? else {
                    break;
                };
                moved = true;
                self.said(copy, Bytes::copy_from_slice(&self.buffer[..length]))?;
            }
        }
        for _ in 0..FRAMES_A_TURN {
            let read = self.client.read(&mut self.buffer);
            let Some(length) = read.map_err(|error| CheckError::Host("the client's card", error))? else {
                break;
            };
            moved = true;
            let bytes = Bytes::copy_from_slice(&self.buffer[..length]);
            if let Some(frame) = self.gate.arrived(Frame { nic: 0, bytes }) {
                self.deliver(&frame)?;
            }
        }
        let wait = self.pass()?;
        if !moved {
            self.sleep(wait);
        }
        Ok(moved)
    }

    /// A copy said this.
    fn said(&mut self, copy: usize, bytes: Bytes) -> Result<(), CheckError> {
        let frame = Frame { nic: 0, bytes };
        let parsed = parse(&frame, Direction::FromVm);
        match &parsed {
            Parsed::Tcp(segment) if !segment.is_pure_ack() && !segment.syn() => {
                self.gate.said(copy, segment);
                self.last_word = Instant::now();
            }
            Parsed::Datagram(datagram) => self.gate.answered(copy, &datagram.key),
            _ => {}
        }
        self.outputs.said(copy, &frame);
        if copy > 0 {
            self.rewriters[copy - 1].overheard(&frame);
        }
        if copy == 0 || parsed == Parsed::Neighbour {
            let sent = self.client.write(&frame.bytes);
            sent.map_err(|error| CheckError::Host("the client's card", error))?;
        }
        Ok(())
    }

    /// The agreed time is the host's from now on.
    fn tick(&mut self, now: Instant) {
        self.clock.set();
        self.ticks.was_set(now);
    }

    /// Every copy gets this.
    fn deliver(&mut self, frame: &Frame) -> Result<(), CheckError> {
        let is_input = match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => !segment.is_pure_ack() && !segment.syn(),
            Parsed::Datagram(_) => true,
            _ => false,
        };
        if is_input {
            let now = Instant::now();
            self.tick(now);
            self.first_input.get_or_insert(now);
        }
        self.outputs.heard(frame);
        for (number, copy) in self.copies.iter().enumerate() {
            let sent = match number {
                0 => write(copy.card(), &frame.bytes),
                _ => write(
                    copy.card(),
                    &self.rewriters[number - 1].inbound_to_backup(frame).bytes,
                ),
            };
            sent.map_err(|error| CheckError::Host("a copy's card", error))?;
        }
        Ok(())
    }

    /// Delivers what may be delivered. How long nothing more can be, at most.
    fn pass(&mut self) -> Result<Duration, CheckError> {
        loop {
            let now_us = self.began.elapsed().as_micros() as u64;
            match self.gate.next(now_us) {
                Next::Idle => return Ok(TICK.min(LOOK)),
                Next::Wait(until_us) => {
                    return Ok(LOOK.min(Duration::from_micros(until_us.saturating_sub(now_us))));
                }
                Next::AskForRest => {
                    self.ticks.were_asked(Instant::now());
                    if !are_at_rest(&mut self.copies)? {
                        return Ok(self.look_a_little_later());
                    }
                    self.gate.are_at_rest(now_us);
                }
                Next::AskForQuiet => {
                    let found: Vec<Quiet> = self.copies.iter_mut().map(Copy::is_quiet).collect();
                    if found.iter().any(|found| matches!(found, Quiet::Unknown(_))) {
                        self.gate.cannot_be_quiet(now_us);
                    } else if found.contains(&Quiet::NotYet) {
                        return Ok(self.look_a_little_later());
                    } else {
                        self.gate.are_quiet();
                    }
                }
                Next::Set(_) => {}
                Next::Deliver(frame) => {
                    self.deliver(&frame)?;
                    self.look_again_us = LOOK_AGAIN_US.0;
                }
                Next::Ask(questions) => {
                    let mut told = false;
                    for question in questions {
                        let queues = self.copies[question.copy].queues();
                        let found = sockets::look(queues, std::slice::from_ref(&question))
                            .map_err(|error| CheckError::Host("sock_diag", error))?;
                        for found in found {
                            told |= self.gate.told(&question, found);
                        }
                    }
                    if !told {
                        return Ok(self.look_a_little_later());
                    }
                }
            }
        }
    }

    fn look_a_little_later(&mut self) -> Duration {
        let wait = Duration::from_micros(self.look_again_us);
        self.look_again_us = (self.look_again_us * 2).min(LOOK_AGAIN_US.1);
        wait
    }

    /// Until something can be read, or so long.
    fn sleep(&self, most: Duration) {
        let timeout = Timespec::try_from(most).unwrap_or_default();
        let mut polled: Vec<PollFd<'_>> = Vec::new();
        for copy in &self.copies {
            polled.push(PollFd::new(copy.card(), PollFlags::IN));
            if copy.ended().is_none() {
                polled.push(PollFd::from_borrowed_fd(copy.socket(), PollFlags::IN));
            }
        }
        match &self.client {
            Wire::Host(tap) => polled.push(PollFd::new(tap, PollFlags::IN)),
            Wire::Namespace(client) => {
                polled.push(PollFd::new(client.card(), PollFlags::IN));
                if client.ended().is_none() {
                    polled.push(PollFd::from_borrowed_fd(client.socket(), PollFlags::IN));
                }
            }
        }
        // An error is a signal: the caller looks at what it was for.
        let _ = poll(&mut polled, Some(&timeout));
    }

    /// What the keepers have to say.
    fn hear(&mut self) -> Result<(), CheckError> {
        for (number, copy) in self.copies.iter_mut().enumerate() {
            while let Some((heard, descriptors)) = copy.heard()? {
                if heard == Heard::Listener
                    && let Some(listener) = descriptors.into_iter().next()
                {
                    let answers = Answers::start(listener, self.seed, Arc::clone(&self.clock));
                    self.answers
                        .push(answers.map_err(|error| CheckError::Host("a thread", error))?);
                }
                if let (Heard::ReadTsc { place, name }, Some(reads)) = (&heard, &mut self.tsc) {
                    reads.told(number, *place, name.clone());
                    let says = match self.tsc_is_agreed {
                        true => self.clock.now_ns(),
                        false => tsc::now(),
                    };
                    // Who was killed meanwhile needs no answer, and its end is told by its keeper.
                    let _ = copy.tsc(says);
                }
                if let Some(line) = heard.end() {
                    self.ends.push(format!("{} {line}", copy.name()));
                }
            }
        }
        if let Wire::Namespace(client) = &mut self.client {
            while let Some((heard, _)) = client.heard()? {
                match &heard {
                    Heard::Ended { code: Some(0), .. } => {}
                    heard => {
                        let line = heard.end();
                        self.faults.extend(line.map(|line| format!("client {line}")));
                    }
                }
            }
        }
        Ok(())
    }

    fn report(mut self) -> Report {
        self.outputs.finish();
        let ends: Vec<Option<&Heard>> = self.copies.iter().map(Copy::ended).collect();
        let ended_apart = ends.windows(2).any(|pair| pair[0] != pair[1]);
        let first = self.first_input.unwrap_or(self.last_word);
        Report {
            copies: self.copies.len(),
            tally: *self.outputs.tally(),
            first: self.outputs.first_difference().cloned(),
            inputs: *self.gate.counters(),
            took_us: self.last_word.saturating_duration_since(first).as_micros() as u64,
            ends: self.ends,
            ended_apart,
            faults: self.faults,
            tsc: self.tsc,
        }
    }
}

/// Whether all copies are done with what they have read.
fn are_at_rest(copies: &mut [Copy]) -> Result<bool, CheckError> {
    let found: Result<Vec<bool>, _> = copies.iter_mut().map(Copy::is_at_rest).collect();
    let found = found.map_err(|error| CheckError::Host("whether a copy is at rest", error))?;
    Ok(!found.contains(&false))
}

/// A program that does not even listen.
fn early_end(copy: &Copy) -> String {
    let end = copy.ended().and_then(Heard::end).unwrap_or_default();
    let words = copy.last_words(1).pop();
    let words = words.map_or_else(String::new, |words| format!("; its last words: {words}"));
    let hint = match copy.ended() {
        Some(Heard::Ended { others: true, .. }) => {
            ": it went into the background; start it in the foreground"
        }
        Some(Heard::Failed(_)) => "",
        _ => " before it served",
    };
    format!("{} {end}{hint}{words}", copy.name())
}
