//! A talk on one connection, told line by line: who hears what, in numbers that count from each stream's first byte.

use super::seg::*;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Flow, Limits, Replica, Speculation};
use dunlin_core::units::Epoch;

pub const VM: u32 = 1001;
pub const CLIENT: u32 = 5001;
const RTT_US: u64 = 700;

pub fn limits() -> Limits {
    Limits {
        window_bytes: 64 << 10,
        ..Limits::default()
    }
}

/// A talk on one connection.
pub struct Talk {
    pub core: Speculation,
    pub now: u64,
    pub client: usize,
    pub stamps: bool,
    pub epoch: Epoch,
    pub replica: Replica,
    pub flow: Option<Flow>,
}

fn flags(flags: u8) -> String {
    let names = [
        (SYN, "SYN"),
        (FIN, "FIN"),
        (RST, "RST"),
        (ACK, "ACK"),
        (URG, "URG"),
        (ECE, "ECE"),
        (CWR, "CWR"),
    ];
    let names: Vec<&str> = names
        .iter()
        .filter(|(bit, _)| flags & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    names.join("|")
}

impl Talk {
    pub fn new() -> Self {
        Self {
            core: Speculation::new(limits()),
            now: 1_000_000,
            client: 0,
            stamps: true,
            epoch: Epoch(1),
            replica: Replica::new(limits()),
            flow: None,
        }
    }

    pub fn seg(&self, from_vm: bool, flags: u8, seq: u32, ack: u32) -> Seg {
        Seg {
            from_vm,
            client: self.client,
            seq,
            ack,
            flags,
            window: 100,
            ticks: self.stamps.then_some((50, 60)),
            ..Seg::default()
        }
    }

    pub fn of_vm(&self, at: u32, ack: u32) -> Seg {
        self.seg(true, ACK, VM + at, CLIENT + ack)
    }

    pub fn of_client(&self, at: u32, ack: u32) -> Seg {
        let seg = self.seg(false, ACK, CLIENT + at, VM + ack);
        Seg {
            ticks: self.stamps.then_some((60, 50)),
            ..seg
        }
    }

    pub fn of_shadow(&self, at: u32, payload: &[u8]) -> Seg {
        Seg {
            ticks: self.stamps.then_some((1000, 60)),
            payload: payload.to_vec(),
            ..self.seg(true, ACK, VM.wrapping_add(at), CLIENT)
        }
    }

    pub fn offer(&self) -> Offer {
        Offer {
            mss: 1460,
            scale: Some(7),
            sack: true,
            extra: vec![],
        }
    }

    pub fn says(&mut self, seg: &Seg) -> Vec<String> {
        let mut out = vec![];
        match seg.from_vm {
            true => self.core.vm_sent(self.now, write(seg), &mut out),
            false => self.core.client_sent(self.now, write(seg), &mut out),
        }
        self.told(out)
    }

    pub fn shadow(&mut self, seg: &Seg) -> Vec<String> {
        let mut out = vec![];
        self.core
            .socket_sent(self.now, &write_tun(seg), Offload::default(), &mut out);
        self.told(out)
    }

    pub fn flush(&mut self) -> Vec<String> {
        let mut out = vec![];
        self.core.flush(self.now, &mut out);
        self.told(out)
    }

    pub fn cut(&mut self) -> Epoch {
        let part = self.core.cut(self.now, self.epoch, self.epoch == Epoch(1));
        self.replica.stage(self.epoch, part).expect("what a primary says");
        self.epoch = self.epoch.next();
        Epoch(self.epoch.0 - 1)
    }

    pub fn safe(&mut self, epoch: Epoch) -> Vec<String> {
        self.replica.complete(epoch);
        let mut out = vec![];
        self.core.released(self.now, epoch, &mut out);
        self.told(out)
    }

    /// No other host holds a copy.
    pub fn alone(&mut self) -> Vec<String> {
        let mut out = vec![];
        self.core.all_is_safe(self.now, &mut out);
        self.told(out)
    }

    /// A cut that is safe at once.
    pub fn sync(&mut self) -> Vec<String> {
        let epoch = self.cut();
        self.safe(epoch)
    }

    pub fn wait(&mut self, us: u64) -> Vec<String> {
        self.now += us;
        let mut out = vec![];
        self.core.poll(self.now, &mut out);
        self.told(out)
    }

    /// The core writes all that it may.
    pub fn write(&mut self) -> (Vec<u8>, Vec<String>) {
        let (mut bytes, mut out) = (vec![], vec![]);
        let flow = self.flow.expect("built");
        while let Some(some) = self.core.unsent(&flow).map(<[u8]>::to_vec) {
            bytes.extend(&some);
            self.core.wrote(self.now, flow, some.len(), &mut out);
        }
        (bytes, self.told(out))
    }

    pub fn die(&mut self) -> Vec<String> {
        let mut out = vec![];
        let replica = std::mem::replace(&mut self.replica, Replica::new(limits()));
        self.core = Speculation::take_over(limits(), replica, self.now, &mut out);
        self.told(out)
    }

    pub fn told(&mut self, out: Vec<Action>) -> Vec<String> {
        out.into_iter().map(|action| self.line(action)).collect()
    }

    pub fn line(&mut self, action: Action) -> String {
        let text = |who: &str, seg: Option<Seg>| {
            let seg = seg.expect("a right checksum");
            let (mine, other) = if seg.from_vm { (VM, CLIENT) } else { (CLIENT, VM) };
            let count = |number: u32, from: u32| number.wrapping_sub(from) as i32;
            let mut line = format!("{who} {}", flags(seg.flags & !PSH));
            line += &format!(" {} ack {}", count(seg.seq, mine), count(seg.ack, other));
            if !seg.payload.is_empty() {
                line += &format!(" {:?}", String::from_utf8_lossy(&seg.payload));
            }
            if !seg.sack.is_empty() {
                let blocks = seg.sack.iter().map(|(a, b)| (count(*a, other), count(*b, other)));
                line += &format!(" sack {:?}", blocks.collect::<Vec<_>>());
            }
            line
        };
        match action {
            Action::ToVm(frame) => text("vm:", read(&frame)),
            Action::ToClient(frame, _) => text("client:", read(&frame)),
            Action::Hold(frame) => text("held:", read(&frame)),
            Action::ToShadow(packet) => text("socket:", read_ip(&packet)),
            Action::Build(spec) => {
                self.flow = Some(spec.flow);
                let at = spec.start.wrapping_sub(VM) as i32;
                format!(
                    "build at {at} mss {} scale {:?} sack {}",
                    spec.mss, spec.scale, spec.sack
                )
            }
            Action::Write(_) => "write".into(),
            Action::Shutdown(_) => "shutdown".into(),
            Action::Destroy(_) => "destroy".into(),
            Action::Lift(_, ticks, ends) => {
                let of = |end: Option<u32>, first: u32| end.map(|end| end.wrapping_sub(first));
                format!(
                    "lift {ticks} ends {:?} {:?}",
                    of(ends.vm, VM),
                    of(ends.peer, CLIENT)
                )
            }
        }
    }

    /// Up to the client's SYN and the VM's answer, which has left.
    pub fn greet(&mut self) {
        let mut syn = self.seg(false, SYN, CLIENT - 1, 0);
        syn.offer = Some(self.offer());
        assert_eq!(self.says(&syn).len(), 1);
        let mut answer = self.seg(true, SYN | ACK, VM - 1, CLIENT);
        answer.offer = Some(self.offer());
        // Not scaled, in a SYN.
        answer.window = 100 << 7;
        let frame = write(&answer);
        assert_eq!(self.says(&answer), ["held: SYN|ACK -1 ack 0"]);
        self.core.leaves(self.now, &frame);
    }

    pub fn open() -> Self {
        let mut talk = Self::new();
        talk.opens();
        talk
    }

    pub fn opens(&mut self) {
        self.greet();
        self.now += RTT_US;
        let third = self.of_client(0, 0);
        assert_eq!(
            self.says(&third),
            [
                "build at 0 mss 1460 scale Some((7, 7)) sack true",
                "vm: ACK 0 ack 0"
            ]
        );
        assert_eq!(self.flush(), ["vm: ACK 0 ack 0"]);
        // The dummy byte is swallowed, and acknowledged after the round trip that the handshake took.
        let dummy = self.of_shadow(u32::MAX, b"\0");
        assert_eq!(self.shadow(&dummy), [""; 0]);
        assert_eq!(self.wait(RTT_US), ["socket: ACK 0 ack 0"]);
    }

    pub fn data(&mut self, at: u32, bytes: &[u8]) -> Vec<String> {
        let seg = Seg {
            payload: bytes.to_vec(),
            ..self.of_vm(at, 0)
        };
        self.says(&seg)
    }

    /// 64 KiB that nobody takes, as far as the VM is let.
    pub fn fills(&mut self) {
        for n in 0..64 {
            self.data(n * 1024, &[1; 1024]);
            self.flush();
        }
    }

    /// Said, safe, written, and sent to the client.
    pub fn delivered(&mut self, at: u32, bytes: &[u8]) {
        assert_eq!(self.data(at, bytes), [""; 0]);
        self.flush();
        self.sync();
        assert_eq!(self.write().0, bytes);
        let seg = self.of_shadow(at, bytes);
        assert_eq!(self.shadow(&seg).len(), 1);
    }
}
