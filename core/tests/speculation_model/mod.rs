//! A VM whose connections are acknowledged speculatively, its clients, the shadow sockets, a network that loses, repeats and reorders,
//! epochs of which several are outstanding, and hosts that die. It is judged from outside:
//!
//! A. what a client gets are the bytes of the last state that is safe; B. what it is told was received, that state has received;
//! C. no end hears a reset, an acknowledgement of what it never said, or a window that is taken back; D. when the faults end, both streams are
//! whole on both sides. Each copy of the VM answers other bytes after a take-over, so that whatever leaves too early is found.

mod ahead;
mod ends;
mod modes;
mod plan;
#[path = "../../../sim/src/tcp/random.rs"]
pub mod random;
#[allow(dead_code, reason = "the transcripts use all of it")]
pub mod seg;
pub mod socket;
pub mod tcp;

use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::speculation::{Action, Flow, Replica, Speculation};
use dunlin_core::units::Epoch;
use ends::{question, take_sent};
use modes::Modes;
use plan::limits;
pub use plan::{Broken, Plan, Seen};
use random::Random;
use seg::{Seg, read, read_ip, write_tun};
use socket::Shadow;
use std::collections::{BTreeMap, VecDeque};
use tcp::Tcp;

/// No stream is silent for longer when nothing is broken.
const FAULTS_US: u64 = 3_000_000;
const END_US: u64 = 90_000_000;
/// What the death of a host costs before another goes on.
const TAKE_OVER_US: u64 = 20_000;

#[derive(Clone, Debug)]
enum Event {
    ToVm(Frame),
    FromVm(Frame),
    ToClient(Frame),
    ToHost(Frame),
    Vm,
    Clients,
    Sockets,
    Core,
    Cut,
    Safe(u64, u64),
    Kill,
    TakeOver,
    Read,
    Drain,
    Mode,
}

/// All that a VM is.
#[derive(Clone, Default)]
struct Vm {
    connections: BTreeMap<usize, Tcp>,
    /// Its application's answers depend on it.
    branch: u64,
    lag_us: u64,
}

struct Snapshot {
    epoch: Epoch,
    at: u64,
    vm: Vm,
}

pub struct World {
    plan: Plan,
    random: Random,
    now: u64,
    events: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    /// When each kind of timer fires next.
    wakes: [u64; 4],
    vm: Vm,
    clients: Vec<Tcp>,
    core: Speculation,
    sockets: BTreeMap<Flow, Shadow>,
    held: VecDeque<(Epoch, Frame)>,
    epoch: Epoch,
    /// States at the ends of epochs, from the last safe one on.
    snapshots: VecDeque<Snapshot>,
    replica: Replica,
    whole: bool,
    host: u64,
    dead: bool,
    /// The backup has a whole checkpoint of this primary's.
    protected: bool,
    modes: Modes,
    seen: Seen,
    wrong: Option<String>,
}

impl World {
    fn new(plan: &Plan) -> Self {
        let mut world = Self {
            plan: plan.clone(),
            random: Random::new(plan.seed),
            now: 1_000_000,
            events: BTreeMap::new(),
            next_event: 0,
            wakes: [u64::MAX; 4],
            vm: Vm::default(),
            clients: vec![],
            core: Speculation::new(limits(plan)),
            sockets: BTreeMap::new(),
            held: VecDeque::new(),
            epoch: Epoch(1),
            snapshots: VecDeque::new(),
            replica: Replica::new(limits(plan)),
            whole: true,
            host: 0,
            dead: false,
            protected: false,
            modes: Modes::default(),
            seen: Seen::default(),
            wrong: None,
        };
        world.snapshots.push_back(Snapshot {
            epoch: Epoch(0),
            at: world.now,
            vm: Vm::default(),
        });
        world.after(plan.epoch_us, Event::Cut);
        world.after(plan.read_us, Event::Read);
        for kill in &plan.kills {
            world.after(*kill, Event::Kill);
        }
        if let Some(us) = plan.drain_us {
            world.after(us, Event::Drain);
        }
        for at in &plan.modes {
            world.after(*at, Event::Mode);
        }
        for client in 0..plan.clients {
            let nature = world.nature(30_000);
            if plan.vm_opens && client % 2 == 1 {
                let (tcp, syn) = Tcp::connect(true, client, nature, world.now);
                world.vm.connections.insert(client, tcp);
                // The client's place until the SYN comes.
                let (waiting, _) = Tcp::connect(false, client, world.nature(20_000), u64::MAX / 2);
                world.clients.push(waiting);
                world.vm_said(vec![syn]);
            } else {
                let nature = world.nature(20_000);
                let (tcp, syn) = Tcp::connect(false, client, nature, world.now);
                world.clients.push(tcp);
                world.client_said(vec![syn]);
            }
            let length = world.random.within(0, plan.upload);
            let tcp = &mut world.clients[client];
            tcp.out = question(client, length);
        }
        world.wake(0, world.now, Event::Vm);
        world.wake(1, world.now, Event::Clients);
        world
    }

    fn after(&mut self, us: u64, event: Event) {
        self.next_event += 1;
        self.events.insert((self.now + us, self.next_event), event);
    }

    /// Fires `event` then, unless it fires before that.
    fn wake(&mut self, kind: usize, at: u64, event: Event) {
        let at = at.max(self.now) + 1;
        if self.wakes[kind] > at {
            self.wakes[kind] = at;
            self.after(at - self.now, event);
        }
    }

    fn fails(&mut self, what: impl FnOnce() -> String) {
        if self.wrong.is_none() {
            self.wrong = Some(format!("{} at {} us", what(), self.now));
        }
    }

    fn faulty(&self) -> bool {
        self.now < FAULTS_US
    }

    fn vm_now(&self) -> u64 {
        self.now - self.vm.lag_us
    }

    fn on_network(&mut self, event: Event) {
        if self.faulty() {
            if self.random.percent(self.plan.loss_percent) {
                return;
            }
            if self.random.percent(self.plan.loss_percent / 4) {
                let late = self.random.within(100, 30_000);
                self.after(late, event.clone());
            }
        }
        let late = if self.random.percent(5) { 5000 } else { 0 };
        let delay = self.random.within(200, 300) + late;
        self.after(delay, event);
    }

    fn act(&mut self, actions: Vec<Action>) {
        let mut queue: VecDeque<Action> = actions.into();
        while let Some(action) = queue.pop_front() {
            let mut more = Vec::new();
            match action {
                Action::ToVm(frame) => {
                    if !(self.faulty() && self.random.percent(self.plan.vm_loss_percent)) {
                        self.after(30, Event::ToVm(frame));
                    }
                }
                Action::ToClient(frame, _) => self.leaves(frame),
                Action::Hold(frame) => self.is_held(frame),
                Action::Lift(key, ticks, ends) => self.lift(key, ticks, ends),
                Action::ToShadow(packet) => self.shadow_hears(&packet, &mut more),
                Action::Build(spec) => {
                    let old = self.sockets.insert(spec.flow, Shadow::build(*spec, self.now));
                    if old.is_some() {
                        self.fails(|| "C: two sockets of one connection".into());
                    }
                    self.poll_socket(spec.flow, &mut more);
                }
                Action::Write(flow) => self.write(flow, &mut more),
                Action::Shutdown(flow) => {
                    if let Some(socket) = self.sockets.get_mut(&flow) {
                        socket.shutdown();
                    }
                    self.poll_socket(flow, &mut more);
                }
                Action::Destroy(flow) => {
                    if self.sockets.remove(&flow).is_none() {
                        self.fails(|| "C: no socket to destroy".into());
                    }
                }
            }
            // What an action brings about comes before the next.
            more.into_iter().rev().for_each(|action| queue.push_front(action));
        }
        if let Some(at) = self.core.deadline() {
            self.wake(3, at, Event::Core);
        }
    }

    fn shadow_hears(&mut self, packet: &Bytes, more: &mut Vec<Action>) {
        let Some(seg) = read_ip(packet) else {
            return self.fails(|| "C: a packet for a shadow socket with a wrong sum".into());
        };
        let port = seg::FIRST_PORT + seg.client as u16;
        let Some(flow) = self.sockets.keys().find(|flow| flow.peer.port() == port).copied() else {
            return;
        };
        let (mut said, now) = (vec![], self.now);
        let socket = self.sockets.get_mut(&flow).expect("found");
        socket.receive(&seg, now, &mut said);
        if let Some(trouble) = socket.trouble.take() {
            self.fails(|| format!("C: {trouble}"));
        }
        self.socket_said(flow, said, more);
        self.write(flow, more);
    }

    fn socket_said(&mut self, flow: Flow, said: Vec<Seg>, more: &mut Vec<Action>) {
        for seg in &said {
            self.core
                .socket_sent(self.now, &write_tun(seg), Default::default(), more);
        }
        if let Some(at) = self.sockets.get(&flow).and_then(Shadow::timer) {
            self.wake(2, at, Event::Sockets);
        }
    }

    fn poll_socket(&mut self, flow: Flow, more: &mut Vec<Action>) {
        let mut said = vec![];
        if let Some(socket) = self.sockets.get_mut(&flow) {
            socket.poll(self.now, &mut said);
        }
        self.socket_said(flow, said, more);
    }

    fn write(&mut self, flow: Flow, more: &mut Vec<Action>) {
        while let Some(socket) = self.sockets.get_mut(&flow) {
            let room = socket.room();
            let n = match self.core.unsent(&flow) {
                Some(bytes) if room > 0 => {
                    let bytes = &bytes[..bytes.len().min(room)];
                    socket.write(bytes);
                    bytes.len()
                }
                _ => break,
            };
            self.core.wrote(self.now, flow, n, more);
        }
        self.poll_socket(flow, more);
    }

    /// A and B, before the network does what it does.
    fn leaves(&mut self, frame: Frame) {
        let Some(seg) = read(&frame) else {
            return self.fails(|| "C: a frame for a client with a wrong sum".into());
        };
        self.seen.to_clients += 1;
        self.seen.bytes += seg.payload.len() as u64;
        let safe = self.safe_vm();
        let Some(tcp) = safe.connections.get(&seg.client) else {
            return self.fails(|| format!("A: of a connection that the safe state has not: {seg:?}"));
        };
        if seg.has(seg::RST) {
            return self.fails(|| format!("C: a reset for a client: {seg:?}"));
        }
        let wrong = tcp.explains(&seg);
        self.fails_if(wrong, &seg);
        let frame = self.as_clients_see(frame);
        self.on_network(Event::ToClient(frame));
    }

    fn fails_if(&mut self, wrong: Option<&'static str>, seg: &Seg) {
        if let Some(wrong) = wrong {
            self.fails(|| format!("{wrong}: {seg:?}"));
        }
    }

    fn cut(&mut self) {
        // The VM stands; what it has sent is taken before the line is drawn.
        for frame in take_sent(&mut self.events) {
            self.vm_sent(frame);
        }
        let part = self.core.cut(self.now, self.epoch, self.whole);
        self.whole = false;
        self.stage(part);
        self.snapshots.push_back(Snapshot {
            epoch: self.epoch,
            at: self.now,
            vm: self.vm.clone(),
        });
        self.line_drawn();
        self.seen.most_outstanding = self.seen.most_outstanding.max(self.snapshots.len());
        let safe = match self.plan.broken {
            Some(Broken::ReleasesEarly) => 0,
            _ => self.random.within(self.plan.safe_us / 2, self.plan.safe_us),
        };
        if self.plan.broken == Some(Broken::ReleasesEarly) {
            // The safe state does not move: nobody else has it.
            let mut out = vec![];
            self.core.released(self.now, self.epoch, &mut out);
            self.act(out);
        }
        self.after(safe, Event::Safe(self.host, self.epoch.0));
        self.epoch = self.epoch.next();
        let epoch = self.random.within(self.plan.epoch_us / 2, self.plan.epoch_us);
        self.after(epoch, Event::Cut);
    }

    fn safe(&mut self, epoch: Epoch) {
        if self.plan.broken == Some(Broken::ReleasesEarly) && self.random.percent(70) {
            return;
        }
        match self.plan.broken {
            Some(Broken::OlderState) => self.replica.complete(Epoch(epoch.0.saturating_sub(1))),
            _ => self.replica.complete(epoch),
        }
        while self.snapshots.len() > 1 && self.snapshots[1].epoch <= epoch {
            self.snapshots.pop_front();
        }
        let mut out = vec![];
        while self.held.front().is_some_and(|(of, _)| *of <= epoch) {
            let (_, frame) = self.held.pop_front().expect("the first");
            self.core.leaves(self.now, &frame);
            self.leaves(frame);
        }
        self.core.released(self.now, epoch, &mut out);
        self.core.flush(self.now, &mut out);
        self.act(out);
        self.protected = true;
        self.mode_is_safe(epoch);
    }

    fn vm_sent(&mut self, frame: Frame) {
        let mut out = vec![];
        self.core.vm_sent(self.now, frame, &mut out);
        // A batch is one frame, or more.
        if self.random.percent(50) {
            self.core.flush(self.now, &mut out);
        } else {
            self.wake(3, self.now + 10, Event::Core);
        }
        self.act(out);
        self.tells_ahead();
    }

    fn kill(&mut self) {
        if !self.protected {
            // Two failures at once are more than anybody promises to survive.
            return self.after(20_000, Event::Kill);
        }
        self.dead = true;
        self.protected = false;
        self.host += 1;
        self.sockets.clear();
        self.held.clear();
        self.events
            .retain(|_, event| !matches!(event, Event::ToVm(_) | Event::FromVm(_) | Event::Cut));
        self.after(TAKE_OVER_US, Event::TakeOver);
    }

    fn take_over(&mut self) {
        self.dead = false;
        self.seen.take_overs += 1;
        self.translation_takes_over();
        if self.modes.runs {
            return self.take_over_running();
        }
        self.snapshots.truncate(1);
        let safe = self.snapshots.front().expect("a safe state");
        self.vm = safe.vm.clone();
        self.vm.branch = self.seen.take_overs;
        // Its clock stood since then.
        self.vm.lag_us += self.now - safe.at;
        self.epoch = Epoch(safe.epoch.0 + 10);
        let mut said = vec![];
        for client in 0..self.plan.clients {
            if self.plan.vm_opens && client % 2 == 1 && !self.vm.connections.contains_key(&client) {
                let nature = self.nature(30_000);
                let (tcp, syn) = Tcp::connect(true, client, nature, self.vm_now());
                self.vm.connections.insert(client, tcp);
                said.push(syn);
            }
        }
        self.vm_said(said);
        let limits = limits(&self.plan);
        let replica = std::mem::replace(&mut self.replica, Replica::new(limits));
        let mut out = vec![];
        self.seen.begun += self.core.counts().begun;
        self.core = Speculation::take_over(limits, replica, self.now, &mut out);
        self.whole = true;
        self.act(out);
        self.after(self.plan.epoch_us, Event::Cut);
        self.wake(0, self.now, Event::Vm);
    }

    fn step(&mut self, event: Event) {
        let kind = match event {
            Event::Vm => Some(0),
            Event::Clients => Some(1),
            Event::Sockets => Some(2),
            Event::Core => Some(3),
            _ => None,
        };
        if let Some(kind) = kind
            && self.wakes[kind] <= self.now
        {
            self.wakes[kind] = u64::MAX;
        }
        match event {
            Event::ToClient(frame) => return self.run_clients(Some(frame)),
            Event::Clients => return self.run_clients(None),
            Event::TakeOver => return self.take_over(),
            Event::Read => {
                let mut said = vec![];
                for tcp in &mut self.clients {
                    tcp.read_all(self.now, &mut said);
                }
                self.client_said(said);
                return self.after(self.plan.read_us, Event::Read);
            }
            _ if self.dead => return,
            Event::Kill => return self.kill(),
            Event::Cut => return self.cut(),
            Event::Safe(host, epoch) if host == self.host => return self.safe(Epoch(epoch)),
            Event::Safe(..) => return,
            Event::Vm => return self.run_vm(None),
            Event::ToVm(frame) => return self.run_vm(Some(frame)),
            Event::FromVm(frame) => {
                self.overheard(&frame);
                return self.vm_sent(frame);
            }
            _ => {}
        }
        let mut out = vec![];
        match event {
            Event::ToHost(frame) => {
                let frame = self.heard(frame);
                self.core.client_sent(self.now, frame, &mut out);
                self.core.flush(self.now, &mut out);
            }
            Event::Sockets => {
                let flows: Vec<Flow> = self.sockets.keys().copied().collect();
                flows
                    .into_iter()
                    .for_each(|flow| self.poll_socket(flow, &mut out));
            }
            Event::Drain => self.core.drain(self.now, &mut out),
            Event::Mode => self.modes.wished = !self.modes.wished,
            _ => {
                self.core.poll(self.now, &mut out);
                self.core.flush(self.now, &mut out);
            }
        }
        self.act(out);
        self.look_at_modes();
    }

    fn is_over(&self) -> bool {
        let done = |client: &Tcp| {
            let vm = self.vm.connections.get(&client.client);
            client.is_done() && vm.is_some_and(Tcp::is_done)
        };
        !self.dead && self.now > FAULTS_US && self.clients.iter().all(done)
    }

    /// D: what both ends have.
    fn judge(&self) -> Result<(), String> {
        for client in &self.clients {
            let n = client.client;
            let vm = self
                .vm
                .connections
                .get(&n)
                .ok_or(format!("D: the VM knows no client {n}"))?;
            if client.incoming != vm.out {
                return Err(format!("D: client {n} has other bytes than the VM said"));
            }
            if vm.incoming != client.out {
                return Err(format!("D: the VM has other bytes than client {n} said"));
            }
        }
        Ok(())
    }
}

/// Plays `plan` to its end.
pub fn speculate(plan: &Plan) -> Result<Seen, String> {
    let mut world = World::new(plan);
    while let Some((&(at, n), _)) = world.events.first_key_value() {
        let event = world.events.remove(&(at, n)).expect("the first");
        world.now = at;
        world.step(event);
        if let Some(wrong) = world.wrong {
            return Err(wrong);
        }
        if world.is_over() {
            world.judge()?;
            world.seen.begun += world.core.counts().begun;
            world.seen.ended_us = world.now;
            return Ok(world.seen);
        }
        if world.now > END_US {
            let ends = world.clients.iter().map(|client| {
                let vm = world.vm.connections.get(&client.client);
                let of = |tcp: &Tcp| (tcp.phase, tcp.una, tcp.max, tcp.end(), tcp.received, tcp.peer_fin);
                format!("client {}: {:?}, VM: {:?}", client.client, of(client), vm.map(of))
            });
            return Err(format!("D: a stall: {}", ends.collect::<Vec<_>>().join("; ")));
        }
    }
    Err("D: nothing happens any more".into())
}
