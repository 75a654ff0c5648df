//! What the VM and the clients do: their applications, and their TCPs' timers.

use super::random::mix;
use super::seg::{self, Seg, read, write};
use super::tcp::{Nature, Phase, Tcp};
use super::{Event, World};
use dunlin_core::agreed::Frame;
use std::collections::BTreeMap;

/// What the VM's application says on `client`'s connection.
fn answer(branch: u64, client: usize, from: usize, to: usize) -> impl Iterator<Item = u8> {
    (from..to).map(move |n| mix((branch << 40) ^ ((client as u64) << 32) ^ (n as u64 / 4)) as u8)
}

pub fn question(client: usize, length: u64) -> Vec<u8> {
    (0..length)
        .map(|n| mix(((client as u64) << 33) ^ (n / 4)) as u8)
        .collect()
}

/// What the VM has sent and nobody has taken.
pub(super) fn take_sent(events: &mut BTreeMap<(u64, u64), Event>) -> Vec<Frame> {
    let mut frames = vec![];
    events.retain(|_, event| match event {
        Event::FromVm(frame) => {
            frames.push(frame.clone());
            false
        }
        _ => true,
    });
    frames
}

impl World {
    pub fn vm_said(&mut self, said: Vec<Seg>) {
        for seg in said {
            if !(self.faulty() && self.random.percent(self.plan.vm_loss_percent)) {
                self.after(20, Event::FromVm(write(&seg)));
            }
        }
    }

    pub fn client_said(&mut self, said: Vec<Seg>) {
        for seg in said {
            self.on_network(Event::ToHost(write(&seg)));
        }
    }

    pub fn nature(&mut self, room: u64) -> Nature {
        Nature {
            // Often near the end of the circle.
            iss: if self.random.percent(50) {
                u32::MAX - 5000
            } else {
                self.random.number()
            },
            tick_base: self.random.number(),
            stamps: self.plan.stamps,
            sack: self.plan.sack,
            scale: self.plan.scale,
            mss: self.plan.mss,
            room: self.random.within(room / 4, room),
            given_back: self.plan.drain_us.is_some() || self.plan.budget.is_some() || self.plan.translated(),
        }
    }

    /// The VM takes what is there and does what its application wants.
    pub fn run_vm(&mut self, frame: Option<Frame>) {
        let (now, mut said) = (self.vm_now(), vec![]);
        let seg = match frame.map(|frame| read(&frame)) {
            None => None,
            Some(Some(seg)) => Some(seg),
            Some(None) => return self.fails(|| "C: a frame for the VM with a wrong sum".into()),
        };
        if let Some(seg) = &seg {
            if seg.has(seg::SYN) && !seg.has(seg::ACK) && !self.vm.connections.contains_key(&seg.client) {
                let nature = self.nature(30_000);
                let (tcp, answer) = Tcp::accept(seg, nature, now);
                self.vm.connections.insert(seg.client, tcp);
                said.push(answer);
            } else if let Some(tcp) = self.vm.connections.get_mut(&seg.client) {
                tcp.receive(seg, now, &mut self.random, &mut said);
            }
        }
        let branch = self.vm.branch;
        let download = self.plan.download as usize;
        for (client, tcp) in &mut self.vm.connections {
            if tcp.phase == Phase::Open {
                if tcp.out.len() < download {
                    let to = (tcp.out.len() + self.random.within(1, 6000) as usize).min(download);
                    tcp.out.extend(answer(branch, *client, tcp.out.len(), to));
                } else if !tcp.closing
                    && (client % 3 == 0 || tcp.peer_fin.is_some_and(|fin| tcp.received > fin))
                {
                    tcp.closing = true;
                }
                if self.random.percent(60) {
                    tcp.read_all(now, &mut said);
                }
            }
            tcp.poll(now, &mut self.random, &mut said);
        }
        let trouble = self.vm.connections.values_mut().find_map(|tcp| {
            let reset = tcp.heard_reset.then(|| "the VM hears a reset".into());
            tcp.trouble.take().or(reset)
        });
        if let Some(trouble) = trouble {
            self.fails(|| format!("C: {trouble}"));
        }
        let timer = self.vm.connections.values().filter_map(Tcp::timer).min();
        let busy = self
            .vm
            .connections
            .values()
            .any(|tcp| tcp.phase == Phase::Open && tcp.out.len() < download);
        let timer = timer.map(|at| at + self.vm.lag_us);
        if let Some(at) = timer.into_iter().chain(busy.then_some(self.now + 3000)).min() {
            self.wake(0, at, Event::Vm);
        }
        self.vm_said(said);
    }

    pub fn run_clients(&mut self, frame: Option<Frame>) {
        let (now, mut said) = (self.now, vec![]);
        let seg = frame.and_then(|frame| read(&frame));
        if let Some(seg) = seg {
            let waits =
                self.plan.vm_opens && seg.client % 2 == 1 && self.clients[seg.client].phase == Phase::SynSent;
            let client = &mut self.clients[seg.client];
            if waits && seg.has(seg::SYN) && !seg.has(seg::ACK) {
                let out = std::mem::take(&mut client.out);
                let (tcp, answer) = Tcp::accept(&seg, client.nature, now);
                *client = tcp;
                client.out = out;
                said.push(answer);
            } else if !waits {
                client.receive(&seg, now, &mut self.random, &mut said);
            }
        }
        for (n, tcp) in self.clients.iter_mut().enumerate() {
            let enough = tcp.received > self.plan.download || n % 3 != 0;
            if tcp.phase == Phase::Open && enough {
                tcp.closing = true;
            }
            tcp.poll(now, &mut self.random, &mut said);
        }
        if self.clients.iter().any(|tcp| tcp.heard_reset) {
            self.fails(|| "C: a client hears a reset".into());
        }
        if let Some(at) = self.clients.iter().filter_map(Tcp::timer).min() {
            self.wake(1, at, Event::Clients);
        }
        self.client_said(said);
    }
}
