//! Whole conversations: two VMs whose clocks and ISNs differ, clients, loss, syncs and fail-overs at any moment. Every
//! end is as strict as Linux about numbers that cannot be, and in the end every stream has arrived.
//!
//! The comparison of outputs stands here as its rule only: a segment of the primary leaves when the backup's VM has said
//! as much and has heard as much.

use super::*;
use crate::output::retransmit::RetransmitBuffer;
use end::{End, Role, answer};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

mod end;

/// A VM: its clock, and its ends by the client's port.
#[derive(Clone, Default)]
struct Guest {
    clock: u32,
    ends: BTreeMap<u16, End>,
    /// What its ISNs and its clocks begin with: what two copies differ in.
    salt: u32,
}

/// What both VMs get, in the same order.
#[derive(Clone)]
enum Input {
    Frame(Frame),
    /// The service here calls a client.
    Call(u16, Option<u32>),
}

impl Guest {
    fn hear(&mut self, input: &Input) -> Vec<Seg> {
        let (clock, salt) = (self.clock, self.salt);
        match input {
            Input::Call(port, ticks) => {
                let ticks = ticks.map(|from| from.wrapping_add(salt >> 8));
                let isn = salt.wrapping_add(clock);
                let mut end = End::new(true, *port, Role::Serves, isn, ticks);
                end.opens = true;
                let said = end.say(9, clock);
                self.ends.insert(*port, end);
                said
            }
            Input::Frame(frame) => {
                let seg = Seg::read(frame, Direction::ToVm);
                let end = self.ends.entry(seg.port).or_insert_with(|| {
                    let ticks = seg.ticks.map(|_| salt >> 8);
                    End::new(true, seg.port, Role::Serves, salt.wrapping_add(clock), ticks)
                });
                let wants = end.hear(&seg, clock);
                let wants = wants.unwrap_or_else(|wrong| panic!("the VM got {seg:?}: {wrong}; {end:?}"));
                let mut said = end.say(9, clock);
                if said.is_empty() && wants {
                    said.push(end.acknowledge(clock));
                }
                said
            }
        }
    }
}

/// One host.
struct Host {
    guest: Guest,
    rewriter: SequenceRewriter,
    retransmit: RetransmitBuffer,
    /// How many inputs its VM has had.
    at: usize,
}

struct World {
    primary: Host,
    backup: Option<Host>,
    inputs: Vec<Input>,
    /// What the primary's VM said, and the network has not heard.
    held: VecDeque<Seg>,
    clients: BTreeMap<u16, End>,
    clock: u32,
    losing: bool,
    failed_over: u32,
}

impl World {
    fn new(salt: u32) -> Self {
        let guest = Guest {
            salt,
            ..Guest::default()
        };
        let primary = Host {
            guest,
            rewriter: SequenceRewriter::new(),
            retransmit: RetransmitBuffer::new(),
            at: 0,
        };
        Self {
            primary,
            backup: None,
            inputs: vec![],
            held: VecDeque::new(),
            clients: BTreeMap::new(),
            clock: 0,
            losing: true,
            failed_over: 0,
        }
    }

    fn client_says(&mut self, said: Vec<Seg>) {
        for seg in said {
            if !self.loses(&seg) {
                self.inputs.push(Input::Frame(seg.frame()));
            }
        }
    }

    /// A loss that nobody needs to choose: repeatable, and another one for every segment.
    fn loses(&mut self, seg: &Seg) -> bool {
        self.clock += 1;
        let number = seg.seq ^ seg.ack.rotate_left(7) ^ self.clock.wrapping_mul(0x9e37_79b9);
        self.losing && number % 7 == 0
    }

    /// The primary's VM gets its next input.
    fn run_primary(&mut self) {
        if let Some(input) = self.inputs.get(self.primary.at) {
            self.primary.at += 1;
            let rewriter = &mut self.primary.rewriter;
            let input = match input {
                Input::Frame(frame) if !rewriter.is_empty() => Input::Frame(rewriter.inbound(frame)),
                other => other.clone(),
            };
            self.held.extend(self.primary.guest.hear(&input));
        }
    }

    /// The backup's VM does.
    fn run_backup(&mut self) -> bool {
        let Some(backup) = &mut self.backup else {
            return false;
        };
        let Some(input) = self.inputs.get(backup.at) else {
            return false;
        };
        backup.at += 1;
        let input = match input {
            Input::Frame(frame) => {
                let frame = backup.rewriter.inbound_to_backup(frame);
                backup.retransmit.heard(&frame);
                Input::Frame(frame)
            }
            call @ Input::Call(..) => call.clone(),
        };
        let said = backup.guest.hear(&input);
        backup.says(said);
        true
    }

    /// The network hears what the rule lets pass.
    fn release(&mut self, all: bool) {
        while let Some(seg) = self.held.front() {
            if let (false, Some(backup)) = (all, &self.backup) {
                let end = &self.primary.guest.ends[&seg.port];
                let matched = backup.guest.ends.get(&seg.port).is_some_and(|copy| {
                    let says = seg.seq_after().wrapping_sub(end.isn) <= copy.next;
                    let hears = end
                        .peer_isn
                        .is_none_or(|isn| seg.ack.wrapping_sub(isn) <= copy.heard_to());
                    says && (seg.flags & ACK == 0 || hears)
                });
                if !matched {
                    return;
                }
            }
            let frame = seg.frame();
            let rewriter = &mut self.primary.rewriter;
            let frame = if rewriter.is_empty() {
                frame
            } else {
                rewriter.outbound(&frame)
            };
            self.held.pop_front();
            self.client_hears(&frame);
        }
    }

    fn client_hears(&mut self, frame: &Frame) {
        let seg = Seg::read(frame, Direction::FromVm);
        if self.loses(&seg) {
            return;
        }
        let clock = self.clock;
        let end = self
            .clients
            .get_mut(&seg.port)
            .expect("nobody else was spoken to");
        let wants = end.hear(&seg, clock);
        let wants = wants.unwrap_or_else(|wrong| panic!("a client got {seg:?}: {wrong}; {end:?}"));
        let mut said = end.say(20, clock);
        if said.is_empty() && wants {
            said.push(end.acknowledge(clock));
        }
        self.client_says(said);
    }

    /// The VM of the backup becomes a copy of the primary's; all that was said is covered.
    fn sync(&mut self, salt: u32) {
        let guest = Guest {
            salt,
            ..self.primary.guest.clone()
        };
        let mut backup = self.backup.take().unwrap_or_else(|| Host {
            guest: Guest::default(),
            rewriter: SequenceRewriter::new(),
            retransmit: RetransmitBuffer::new(),
            at: 0,
        });
        (backup.guest, backup.at) = (guest, self.primary.at);
        backup.rewriter.load(&self.primary.rewriter.table()).unwrap();
        backup.retransmit.applied();
        self.backup = Some(backup);
        self.release(true);
    }

    /// The primary dies. What was agreed, the backup's VM gets; what the primary may not have said, is said again.
    fn fail_over(&mut self) {
        while self.run_backup() {}
        let Some(mut backup) = self.backup.take() else {
            return;
        };
        self.failed_over += 1;
        self.held.clear();
        backup.rewriter.take_over();
        let kept = backup.retransmit.take();
        self.primary = backup;
        for frame in kept {
            let frame = self.primary.rewriter.outbound(&frame);
            self.client_hears(&frame);
        }
    }

    fn tick(&mut self, ours: u32, theirs: u32) {
        self.primary.guest.clock += ours;
        self.clock += ours.max(theirs);
        if let Some(backup) = &mut self.backup {
            backup.guest.clock += theirs;
        }
    }

    fn say_again(&mut self, vm: bool, copy: bool) {
        if !vm {
            let clock = self.clock;
            let said: Vec<_> = self
                .clients
                .values()
                .flat_map(|end| end.say_again(15, clock))
                .collect();
            self.client_says(said);
        } else if copy && let Some(backup) = &mut self.backup {
            let said = backup.guest.again();
            backup.says(said);
        } else {
            self.held.extend(self.primary.guest.again());
        }
    }
}

impl Guest {
    fn again(&self) -> Vec<Seg> {
        self.ends
            .values()
            .flat_map(|end| end.say_again(7, self.clock))
            .collect()
    }
}

impl Host {
    /// The backup's VM speaks, and only its own host hears it.
    fn says(&mut self, said: Vec<Seg>) {
        for seg in said {
            let frame = seg.frame();
            self.rewriter.overheard(&frame);
            self.retransmit.said(&frame);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Open { ticks: bool, calls: bool },
    Ask(u8, Vec<u8>),
    End(u8),
    Primary(u8),
    Backup(u8),
    Tick(u32, u32),
    SayAgain(bool, bool),
    Sync(u32),
    FailOver,
}

fn any_step() -> impl Strategy<Value = Step> {
    let again = any::<(bool, bool)>().prop_map(|(vm, copy)| Step::SayAgain(vm, copy));
    prop_oneof![
        3 => any::<(bool, bool)>().prop_map(|(ticks, calls)| Step::Open { ticks, calls }),
        6 => (any::<u8>(), prop::collection::vec(any::<u8>(), 1..40)).prop_map(|(who, what)| Step::Ask(who, what)),
        1 => any::<u8>().prop_map(Step::End),
        12 => (1_u8..6).prop_map(Step::Primary),
        12 => (1_u8..6).prop_map(Step::Backup),
        3 => (0_u32..20, 0_u32..20).prop_map(|(ours, theirs)| Step::Tick(ours, theirs)),
        3 => again,
        2 => any::<u32>().prop_map(Step::Sync),
        1 => Just(Step::FailOver),
    ]
}

impl World {
    fn open(&mut self, ticks: bool, calls: bool) {
        let port = 5000 + self.clients.len() as u16;
        let isn = u32::from(port).wrapping_mul(0x0100_0193);
        let mut end = End::new(false, port, Role::Asks, isn, ticks.then_some(u32::MAX - 90));
        end.opens = !calls;
        let clock = self.clock;
        let said = end.say(20, clock);
        self.clients.insert(port, end);
        if calls {
            self.inputs.push(Input::Call(port, ticks.then_some(7)));
        } else {
            self.client_says(said);
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Open { ticks, calls } => self.open(ticks, calls),
            Step::Ask(who, what) => self.ask(who, &what, false),
            Step::End(who) => self.ask(who, &[], true),
            Step::Primary(count) => (0..count).for_each(|_| self.run_primary()),
            Step::Backup(count) => (0..count).for_each(|_| {
                self.run_backup();
            }),
            Step::Tick(ours, theirs) => self.tick(ours, theirs),
            Step::SayAgain(vm, copy) => self.say_again(vm, copy),
            Step::Sync(salt) => self.sync(salt),
            Step::FailOver => self.fail_over(),
        }
        self.release(false);
    }

    fn ask(&mut self, who: u8, what: &[u8], ends: bool) {
        let clock = self.clock;
        let count = self.clients.len().max(1);
        if let Some(end) = self.clients.values_mut().nth(usize::from(who) % count)
            && !end.ends
        {
            end.stream.extend(what);
            end.ends = ends;
            let said = end.say(20, clock);
            self.client_says(said);
        }
    }

    /// No more faults: everything that was said arrives, and every connection ends.
    fn settle(&mut self) {
        self.losing = false;
        (0..self.clients.len()).for_each(|who| self.ask(who as u8, &[], true));
        for _round in 0..60 {
            for vm in [false, true] {
                self.say_again(vm, false);
                self.say_again(vm, true);
            }
            while self.primary.at < self.inputs.len() {
                self.run_primary();
                self.run_backup();
                self.release(false);
            }
            while self.run_backup() {}
            self.release(false);
            self.tick(3, 3);
        }
    }
}

/// What came of `steps`: how often another host took over.
fn run(salt: u32, steps: Vec<Step>) -> u32 {
    let mut world = World::new(salt);
    world.sync(salt ^ 0x5555_5555);
    steps.into_iter().for_each(|step| world.step(step));
    world.settle();
    for (port, client) in &world.clients {
        let server = &world.primary.guest.ends[port];
        assert_eq!(server.heard, client.stream, "{port}: what the client asked");
        assert_eq!(
            client.heard,
            answer(&client.stream),
            "{port}: what it was answered"
        );
        assert!(client.is_over() && server.is_over(), "{port}: {client:?}");
    }
    world.failed_over
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Every stream arrives whole and in the numbers that the client knows, whoever speaks for the VM.
    #[test]
    fn a_client_sees_one_unbroken_stream(salt in any::<u32>(), steps in prop::collection::vec(any_step(), 0..150)) {
        run(salt, steps);
    }
}
