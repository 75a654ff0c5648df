//! Speculative communication under hostile words: clients, a VM and shadow sockets that say anything in any order, with any numbers, and
//! checkpoints of connections of any bytes.
//!
//! Whatever comes: memory is bounded by the limits, nothing leaves before its epoch, what one host writes the other reads.

mod bystander;

use crate::script::Script;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::output::packet::{Direction, Parsed, parse};
use dunlin_core::speculation::{Action, Limits, Replica, Speculation};
use dunlin_core::units::Epoch;

pub use bystander::{bystander, seeds as bystander_seeds};

const LIMITS: Limits = Limits {
    window_bytes: 64 << 10,
    total_bytes: 4096,
    connections: 4,
    handshakes: 4,
    again_us: 1_000_000,
    ahead_bytes: 200,
    translated: false,
};
/// The streams' first numbers; near the end of the circle.
const VM: u32 = u32::MAX - 20;
const CLIENT: u32 = u32::MAX - 10;
const SYN: u8 = 2;
const ACK: u8 = 16;

/// What a segment says, before its way is known.
struct Words<'a> {
    port: u16,
    flags: u8,
    seq: u32,
    ack: u32,
    window: u16,
    options: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Words<'a> {
    /// Whatever the script says, near the two streams' first numbers, on one of eight connections.
    fn of(script: &mut Script<'a>, mine: u32, other: u32) -> Self {
        Self {
            port: 4000 + u16::from(script.byte() % 8),
            flags: script.byte(),
            seq: mine.wrapping_add(script.number() as u32),
            ack: other.wrapping_add(script.number() as u32),
            window: script.u16(),
            options: {
                let n = usize::from(script.byte() % 41);
                script.bytes(n)
            },
            payload: {
                let n = usize::from(script.byte());
                script.bytes(n)
            },
        }
    }
}

fn sum(bytes: &[u8]) -> u32 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    bytes.chunks(2).map(word).sum()
}

fn frame(words: &Words<'_>, from_vm: bool) -> Frame {
    let (vm, client) = ([10, 0, 0, 9], [10, 0, 0, 1]);
    let (from, to, ports) = match from_vm {
        true => (vm, client, [80, words.port]),
        false => (client, vm, [words.port, 80]),
    };
    let mut options = words.options[..words.options.len().min(40)].to_vec();
    options.resize(options.len().next_multiple_of(4), 0);
    let mut tcp = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
    tcp.extend(words.seq.to_be_bytes());
    tcp.extend(words.ack.to_be_bytes());
    tcp.extend([(20 + options.len() as u8) << 2, words.flags]);
    tcp.extend(words.window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend(options);
    tcp.extend(words.payload);
    let mut total = sum(&from) + sum(&to) + 6 + tcp.len() as u32 + sum(&tcp);
    while total > 0xffff {
        total = (total >> 16) + (total & 0xffff);
    }
    tcp[16..18].copy_from_slice(&(!(total as u16)).to_be_bytes());
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    bytes.extend((20 + tcp.len() as u16).to_be_bytes());
    bytes.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    bytes.extend(from);
    bytes.extend(to);
    bytes.extend(tcp);
    Frame {
        nic: 0,
        bytes: bytes.into(),
    }
}

/// Segments, epochs, failures and deaths, as the script says.
pub fn speculation(bytes: &[u8]) {
    let mut script = Script(bytes);
    let n = usize::from(script.u16() % 1024);
    let mut replica = Replica::new(LIMITS);
    let part = Bytes::copy_from_slice(script.bytes(n));
    let mut now = 1_000_000;
    let mut core = Speculation::new(LIMITS);
    if replica.stage(Epoch(1), part).is_ok() {
        replica.complete(Epoch(1));
        core = Speculation::take_over(LIMITS, replica, now, &mut vec![]);
    }
    let (mut epoch, mut released) = (2, 1);
    let mut backup = Replica::new(LIMITS);
    let mut whole = true;
    while !script.is_over() {
        let what = script.byte();
        let mut out = Vec::new();
        match what % 12 {
            way @ 0..=6 => {
                let from_vm = way > 2;
                let (mine, other) = if from_vm { (VM, CLIENT) } else { (CLIENT, VM) };
                let frame = frame(&Words::of(&mut script, mine, other), from_vm);
                match way {
                    0..=2 => core.client_sent(now, frame, &mut out),
                    3..=5 => core.vm_sent(now, frame, &mut out),
                    _ => core.socket_sent(now, &frame, Offload::default(), &mut out),
                }
            }
            7 => {
                core.flush(now, &mut out);
                // A backup that knows nothing yet is told all of it with its first checkpoint.
                if !whole && let Some(part) = core.ahead() {
                    assert_eq!(
                        backup.stage(Epoch(epoch), part),
                        Ok(()),
                        "what one host writes ahead the other reads"
                    );
                }
            }
            8 => {
                let part = core.cut(now, Epoch(epoch), whole);
                whole = false;
                assert_eq!(
                    backup.stage(Epoch(epoch), part),
                    Ok(()),
                    "what one host writes the other reads"
                );
                epoch += 1;
            }
            9 if released + 1 < epoch => {
                released += 1;
                backup.complete(Epoch(released));
                core.released(now, Epoch(released), &mut out);
            }
            10 => {
                now += (script.number() & 0xffff_ffff) * 1000;
                core.poll(now, &mut out);
            }
            11 if what > 200 => {
                // The backup goes on.
                let known = std::mem::replace(&mut backup, Replica::new(LIMITS));
                core = Speculation::take_over(LIMITS, known, now, &mut out);
                whole = true;
            }
            _ => core.drain(now, &mut out),
        }
        for action in out {
            carry_out(&mut core, now, action);
        }
        let (connections, kept) = core.size();
        // A dead primary may have had greater limits than this host, but not any.
        assert!(connections <= 8 * LIMITS.connections && kept <= 3 * LIMITS.total_bytes);
        assert!(core.handshakes() <= LIMITS.handshakes);
    }
}

fn carry_out(core: &mut Speculation, now: u64, action: Action) {
    match action {
        Action::Write(flow) => {
            while let Some(bytes) = core.unsent(&flow) {
                let n = bytes.len();
                assert!(n > 0, "an empty part would be written for ever");
                core.wrote(now, flow, n, &mut vec![]);
            }
        }
        Action::ToClient(frame, _) => {
            assert!(matches!(parse(&frame, Direction::FromVm), Parsed::Tcp(_)));
        }
        Action::ToVm(frame) => assert!(matches!(parse(&frame, Direction::ToVm), Parsed::Tcp(_))),
        Action::Build(spec) => assert!(spec.stamp.is_none_or(|stamp| stamp & 1 == 0)),
        _ => {}
    }
}

fn step(way: u8, flags: u8, seq: u8, ack: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut out = vec![way, 0, flags, seq, ack, 100, 0, options.len() as u8];
    out.extend(options);
    out.push(payload.len() as u8);
    out.extend(payload);
    out
}

/// A connection's life, whole and cut.
pub fn seeds() -> Vec<Vec<u8>> {
    let offer = [
        2, 4, 5, 180, 1, 3, 3, 7, 4, 2, 1, 1, 8, 10, 0, 0, 0, 50, 0, 0, 0, 60,
    ];
    let steps = [
        step(0, SYN, 0, 0, &offer, b""),
        step(3, SYN | ACK, 0, 1, &offer, b""),
        step(0, ACK, 1, 1, &[], b""),
        step(3, ACK, 1, 1, &[], b"some bytes"),
        vec![7, 8, 9],
        step(6, ACK, 0, 1, &[], b"\0"),
        vec![10, 5],
        step(6, ACK, 1, 1, &[], b"some bytes"),
        step(0, ACK, 1, 6, &[], b"a question"),
        step(3, ACK | 1, 11, 11, &[], b""),
        vec![7, 8, 9, 203],
        step(0, ACK, 11, 11, &[], b""),
        step(6, ACK | 1, 11, 1, &[], b""),
        step(0, ACK | 1, 11, 12, &[], b""),
        step(0, 4, 1, 0, &[], b""),
        vec![7, 8, 9, 10, 245, 0, 0, 0, 0, 1, 0, 0, 0],
    ];
    let mut out = Vec::new();
    let mut script = vec![0, 0];
    for step in steps {
        script.extend(step);
        out.push(script.clone());
    }
    out
}
