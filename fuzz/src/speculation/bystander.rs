//! One connection that keeps to the rules, beside others whose clients say anything: each of its bytes arrives, once and in order, and it ends for
//! nobody.

use super::{ACK, SYN, Words, frame};
use crate::script::Script;
use dunlin_core::offload::Offload;
use dunlin_core::output::packet::{Direction, Parsed, Segment, parse};
use dunlin_core::speculation::{Action, Flow, Limits, Replica, Speculation};
use dunlin_core::units::Epoch;

/// Room for all: what scarce memory does to others is the random conversations' to find.
const LIMITS: Limits = Limits {
    window_bytes: 64 << 10,
    total_bytes: 1 << 20,
    connections: 64,
    handshakes: 64,
    again_us: 1_000_000,
    ahead_bytes: 200,
    translated: false,
};
const PORT: u16 = 5000;
const VM: u32 = u32::MAX - 300;
const CLIENT: u32 = 77;
const MSS: usize = 1000;
/// More rounds than any script's bytes need.
const MOST_ROUNDS: usize = 5000;

/// The n-th byte that the VM says.
fn byte(n: u32) -> u8 {
    (n % 251) as u8
}

fn offer() -> [u8; 12] {
    [2, 4, (MSS >> 8) as u8, MSS as u8, 1, 3, 3, 7, 4, 2, 1, 1]
}

struct Bystander {
    core: Speculation,
    backup: Replica,
    now: u64,
    epoch: u64,
    whole: bool,
    flow: Option<Flow>,
    /// Of the VM's stream: how far its application has written, how far its TCP has said it and believes it to have arrived.
    written: u32,
    said: u32,
    acked: u32,
    /// The last, as the backup's copy of the VM has it.
    acked_at_cut: u32,
    /// What its client has got.
    arrived: u32,
}

/// Steps of both, as the script says; then all that is left is brought over.
pub fn bystander(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut world = Bystander::open();
    while !script.is_over() {
        match script.byte() % 12 {
            way @ 0..=6 => world.hostile(way, &mut script),
            7 => world.written += u32::from(script.u16() % 4000),
            8 | 9 => world.round(),
            10 => {
                world.now += script.number() % 1_000_000;
                world.does(|core, now, out| core.poll(now, out));
            }
            _ => world.dies(),
        }
    }
    for _ in 0..MOST_ROUNDS {
        if world.arrived == world.written {
            return;
        }
        world.round();
    }
    panic!("{} of {} bytes have arrived", world.arrived, world.written);
}

impl Bystander {
    fn open() -> Self {
        let mut world = Self {
            core: Speculation::new(LIMITS),
            backup: Replica::new(LIMITS),
            now: 1_000_000,
            epoch: 2,
            whole: true,
            flow: None,
            written: 0,
            said: 0,
            acked: 0,
            acked_at_cut: 0,
            arrived: 0,
        };
        let offer = offer();
        let words = |flags, seq, ack| Words {
            port: PORT,
            flags,
            seq,
            ack,
            window: 0xffff,
            options: if flags & SYN == 0 { &[] } else { &offer[..] },
            payload: &[],
        };
        let syn = frame(&words(SYN, CLIENT.wrapping_sub(1), 0), false);
        world.does(|core, now, out| core.client_sent(now, syn, out));
        let answer = frame(&words(SYN | ACK, VM.wrapping_sub(1), CLIENT), true);
        let leaves = answer.clone();
        world.does(|core, now, out| core.vm_sent(now, answer, out));
        world.does(|core, now, _| core.leaves(now, &leaves));
        let third = frame(&words(ACK, CLIENT, VM), false);
        world.does(|core, now, out| core.client_sent(now, third, out));
        assert!(world.flow.is_some(), "it has a shadow socket");
        world
    }

    /// Of another connection.
    fn hostile(&mut self, way: u8, script: &mut Script<'_>) {
        let from_vm = way > 3;
        let (mine, other) = if from_vm { (VM, CLIENT) } else { (CLIENT, VM) };
        let frame = frame(&Words::of(script, mine, other), from_vm);
        match way {
            0..=3 => self.does(|core, now, out| core.client_sent(now, frame, out)),
            4 | 5 => self.does(|core, now, out| core.vm_sent(now, frame, out)),
            _ => self.does(|core, now, out| core.socket_sent(now, &frame, Offload::default(), out)),
        }
    }

    /// The VM says what it has, an epoch becomes safe, and the client acknowledges what has come.
    fn round(&mut self) {
        self.now += 10_000;
        // What is not acknowledged it says again.
        self.said = self.acked;
        for _ in 0..8 {
            let n = (self.written - self.said).min(MSS as u32);
            if n == 0 {
                break;
            }
            let payload: Vec<u8> = (self.said..self.said + n).map(byte).collect();
            let words = self.words(VM.wrapping_add(self.said), CLIENT, &payload);
            let frame = frame(&words, true);
            self.said += n;
            self.does(|core, now, out| core.vm_sent(now, frame, out));
        }
        self.does(|core, now, out| core.flush(now, out));
        let (epoch, whole) = (Epoch(self.epoch), self.whole);
        let part = self.core.cut(self.now, epoch, whole);
        self.acked_at_cut = self.acked;
        assert_eq!(self.backup.stage(epoch, part), Ok(()));
        self.backup.complete(epoch);
        (self.whole, self.epoch) = (false, self.epoch + 1);
        self.does(|core, now, out| core.released(now, epoch, out));
        let words = self.words(CLIENT, VM.wrapping_add(self.arrived), &[]);
        let ack = frame(&words, false);
        self.does(|core, now, out| core.client_sent(now, ack, out));
    }

    /// Its host, right behind a sync.
    fn dies(&mut self) {
        self.round();
        self.acked = self.acked_at_cut;
        let known = std::mem::replace(&mut self.backup, Replica::new(LIMITS));
        let mut out = Vec::new();
        self.core = Speculation::take_over(LIMITS, known, self.now, &mut out);
        self.whole = true;
        self.carry_out(out);
    }

    fn words<'a>(&self, seq: u32, ack: u32, payload: &'a [u8]) -> Words<'a> {
        Words {
            port: PORT,
            flags: ACK,
            seq,
            ack,
            window: 1000,
            options: &[],
            payload,
        }
    }

    fn does(&mut self, act: impl FnOnce(&mut Speculation, u64, &mut Vec<Action>)) {
        let mut out = Vec::new();
        act(&mut self.core, self.now, &mut out);
        self.carry_out(out);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Build(spec) if spec.flow.peer.port() == PORT => self.flow = Some(spec.flow),
                Action::Destroy(flow) | Action::Shutdown(flow) if flow.peer.port() == PORT => {
                    panic!("its shadow socket ends")
                }
                Action::Write(flow) => self.write(flow),
                Action::ToVm(frame) => self.hears(parse(&frame, Direction::ToVm)),
                Action::ToClient(frame, _) | Action::Hold(frame) => {
                    if let Parsed::Tcp(said) = parse(&frame, Direction::FromVm)
                        && said.key.peer_port == PORT
                    {
                        assert!(!said.rst() && !said.fin(), "its client hears of an end");
                        self.asks_again(&said);
                    }
                }
                _ => {}
            }
        }
    }

    /// The VM's TCP.
    fn hears(&mut self, heard: Parsed) {
        let Parsed::Tcp(heard) = heard else { return };
        if heard.key.peer_port != PORT || heard.syn() {
            return;
        }
        assert!(!heard.rst() && !heard.fin(), "its VM hears of an end");
        let acked = heard.ack.wrapping_sub(VM);
        assert!(acked <= self.written, "what the VM has not said");
        self.acked = self.acked.max(acked);
        self.said = self.said.max(self.acked);
    }

    /// A new primary asks the client how far it is.
    fn asks_again(&mut self, said: &Segment) {
        let asks = said.seq == VM.wrapping_add(self.arrived).wrapping_sub(1);
        if asks && self.flow.is_some() {
            let words = self.words(CLIENT, VM.wrapping_add(self.arrived), &[]);
            let ack = frame(&words, false);
            self.does(|core, now, out| core.client_sent(now, ack, out));
        }
    }

    fn write(&mut self, flow: Flow) {
        let own = flow.peer.port() == PORT;
        while let Some(bytes) = self.core.unsent(&flow) {
            let n = bytes.len();
            if own {
                let right = (self.arrived..).zip(bytes).all(|(at, said)| byte(at) == *said);
                assert!(right, "other bytes than its VM's, from {} on", self.arrived);
                self.arrived += n as u32;
                assert!(self.arrived <= self.written, "more than its VM's");
            }
            self.does(|core, now, out| core.wrote(now, flow, n, out));
        }
    }
}

/// Nobody else; one that floods; one that has died in the midst of it.
pub fn seeds() -> Vec<Vec<u8>> {
    let hostile = |way: u8, flags: u8, seq: u8, ack: u8| vec![way, 1, flags, seq, ack, 100, 0, 0, 0];
    let writes = |n: u16| [vec![7], n.to_le_bytes().to_vec()].concat();
    vec![
        [writes(3000), vec![8, 9], writes(100)].concat(),
        [
            writes(3000),
            hostile(0, SYN, 0, 0),
            hostile(4, SYN | ACK, 0, 1),
            hostile(0, ACK, 1, 1),
            vec![8],
            hostile(0, 4, 1, 0),
            hostile(6, ACK, 1, 1),
            writes(50),
        ]
        .concat(),
        [
            writes(3999),
            vec![8, 11],
            hostile(0, ACK | 1, 1, 1),
            writes(3999),
            vec![10, 9, 11],
        ]
        .concat(),
    ]
}
