//! The clients of a world, and the network between them and whoever speaks for the VM.

use crate::tcp::client::{Client, Habits};
use crate::tcp::frame::{Seg, read, write};
use crate::tcp::guest::Guest;
use crate::tcp::network;
use crate::tcp::random::Random;
use dunlin_core::agreed::Frame;
use dunlin_core::output::HELD_BYTES;
use std::collections::BTreeMap;

/// So small a budget is full now and then.
const SMALL_BUDGET_BYTES: usize = 6 << 10;

/// What is under way on the network.
enum Event {
    ToVm(Frame),
    ToClient(Frame),
}

/// The clients and their network.
pub struct Net {
    random: Random,
    clients: Vec<Client>,
    loss_percent: u8,
    /// Of the inputs, inside each VM.
    drop_percent: u8,
    /// Of a hundred turns in which a VM has something to do, so many pass without.
    idle_percent: u8,
    /// Of a thousand times that a backup tells what its VM has said, so often that is lost: its primary does not read.
    lost_words: u64,
    /// Syncs are due as core's trigger says, and not by a whim.
    pub by_trigger: bool,
    /// The network brings the VM's frames to both of its hosts.
    pub floods: bool,
    /// What outbound frames may take on each host.
    pub budget_bytes: usize,
    events: BTreeMap<(u64, u64), Event>,
    serial: u64,
    calm: bool,
    /// The most that any client has heard of the counter.
    counted: u64,
    /// When the world looks here next.
    pub wakes_us: u64,
}

impl Net {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let percent = |random: &mut Random, most| match random.percent(40) {
            true => 0,
            false => random.within(0, most) as u8,
        };
        let habits = Habits {
            differs_percent: percent(&mut random, 15),
            counts_percent: percent(&mut random, 60),
            resets: random.percent(50),
        };
        let mut net = Self {
            loss_percent: percent(&mut random, 20),
            drop_percent: percent(&mut random, 8),
            idle_percent: percent(&mut random, 80),
            lost_words: u64::from(percent(&mut random, 100)),
            by_trigger: random.percent(50),
            floods: random.percent(40),
            budget_bytes: if random.percent(30) {
                SMALL_BUDGET_BYTES
            } else {
                HELD_BYTES
            },
            clients: Vec::new(),
            events: BTreeMap::new(),
            serial: 0,
            calm: false,
            counted: 0,
            wakes_us: u64::MAX,
            random,
        };
        let options = (net.random.percent(70), net.random.percent(70));
        for number in 0..net.random.within(1, 3) as usize {
            let own = Random::new(net.random.draw());
            let (mut client, syn) = Client::new(number, options, habits, own);
            client.has_to_come(u64::MAX);
            net.clients.push(client);
            net.send_to_vm(&syn, 0);
        }
        net
    }

    pub fn seed(&mut self) -> u64 {
        self.random.draw()
    }

    /// How many of a hundred inputs a VM loses inside.
    pub fn drop_percent(&self) -> u8 {
        if self.calm { 0 } else { self.drop_percent }
    }

    /// Whether a VM does nothing in this turn.
    pub fn idles(&mut self) -> bool {
        let percent = if self.calm { 0 } else { self.idle_percent };
        percent > 0 && self.random.percent(percent)
    }

    /// Whether the backup's words are lost on their way.
    pub fn loses_words(&mut self) -> bool {
        let of_thousand = if self.calm { 0 } else { self.lost_words };
        of_thousand > 0 && self.happens(of_thousand)
    }

    /// Whether something happens now and then, `of_thousand` times.
    pub fn happens(&mut self, of_thousand: u64) -> bool {
        self.random.within(0, 999) < of_thousand
    }

    /// When something is to be done here next.
    pub fn next_us(&self) -> Option<u64> {
        let event = self.events.keys().next().map(|(at_us, _)| *at_us);
        let clients = self.clients.iter().filter_map(Client::timer);
        clients.chain(event).min()
    }

    /// What is due happens. The frames that have come to the VM's hosts; an error is what a client must never see.
    pub fn works(&mut self, now_us: u64) -> Result<Vec<Frame>, String> {
        let mut to_vm = Vec::new();
        while let Some(due) = self.events.first_entry().filter(|due| due.key().0 <= now_us) {
            match due.remove() {
                Event::ToVm(frame) => to_vm.push(frame),
                Event::ToClient(frame) => self.client_hears(&frame, now_us)?,
            }
        }
        for at in 0..self.clients.len() {
            let client = &mut self.clients[at];
            client.counted = self.counted;
            if client.timer().is_some_and(|at_us| at_us <= now_us) {
                let said = client.work(now_us);
                said.iter().for_each(|seg| self.send_to_vm(seg, now_us));
            }
        }
        Ok(to_vm)
    }

    fn client_hears(&mut self, frame: &Frame, now_us: u64) -> Result<(), String> {
        let seg = read(frame).ok_or("a checksum of the model is wrong")?;
        let client = &mut self.clients[seg.client];
        let said = client.receive(&seg, now_us);
        let said = said.map_err(|why| format!("client {}: {why}: {}", seg.client, client.state()))?;
        self.counted = self.counted.max(client.counted);
        said.iter().for_each(|seg| self.send_to_vm(seg, now_us));
        Ok(())
    }

    fn send_to_vm(&mut self, seg: &Seg, now_us: u64) {
        let (calm, frame) = (self.calm, write(seg));
        for _ in 0..network::copies(&mut self.random, calm, self.loss_percent) {
            let frame = network::arriving(&mut self.random, calm, &frame);
            self.is_under_way(Event::ToVm(frame), now_us);
        }
    }

    /// A frame leaves for its client. `heir`: the VM that will explain it, where there is another one.
    pub fn leaves(&mut self, frame: &Frame, heir: Option<&Guest>, now_us: u64) -> Result<(), String> {
        let seg = read(frame).ok_or_else(|| format!("a wrong checksum leaves: {frame:?}"))?;
        let client = &mut self.clients[seg.client];
        let left = client.left(&seg, heir);
        left.map_err(|why| format!("client {}: {why}: {}", seg.client, client.state()))?;
        for _ in 0..network::copies(&mut self.random, self.calm, self.loss_percent) {
            self.is_under_way(Event::ToClient(frame.clone()), now_us);
        }
        Ok(())
    }

    fn is_under_way(&mut self, event: Event, now_us: u64) {
        let delay_us = network::delay_us(&mut self.random, self.calm);
        let at_us = now_us + delay_us + self.random.within(0, 100);
        self.serial += 1;
        self.events.insert((at_us, self.serial), event);
    }

    /// Whether a VM that begins to speak explains what all clients were told.
    pub fn is_explained_by(&self, guest: &Guest) -> Result<(), String> {
        self.clients
            .iter()
            .try_for_each(|client| client.is_explained_by(guest))
    }

    /// The VM has booted from its disk, and its connections are gone: clients begin anew.
    pub fn forgets_connections(&mut self, now_us: u64) {
        self.counted = 0;
        self.clients.iter_mut().for_each(|client| client.gives_up(now_us));
    }

    /// The faults are over: each client has one more conversation.
    pub fn be_calm(&mut self) {
        self.calm = true;
        self.clients.iter_mut().for_each(|client| client.has_to_come(1));
    }

    /// Whether all clients have finished.
    pub fn is_done(&self) -> bool {
        self.clients.iter().all(|client| client.finished)
    }

    pub fn conversations(&self) -> u64 {
        self.clients.iter().map(|client| client.had).sum()
    }

    pub fn state(&self) -> String {
        let states: Vec<String> = self.clients.iter().map(Client::state).collect();
        format!("{states:?}")
    }
}
