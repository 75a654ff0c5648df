//! Frames for tests, written and summed without the code under test.

use super::{ACK, FIN, Parsed, RST, SYN, Segment, TCP};
use super::{Direction, parse};
use crate::agreed::Frame;

/// A TCP segment between the VM and one client, as a test says it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seg {
    pub from_vm: bool,
    /// The client's port; the VM's is 80.
    pub port: u16,
    pub v6: bool,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    /// TSval and TSecr.
    pub ticks: Option<(u32, u32)>,
    pub sack: Vec<(u32, u32)>,
    /// Whether the options begin at odd bytes.
    pub odd: bool,
    pub payload: Vec<u8>,
}

impl Seg {
    pub fn from_vm(flags: u8, seq: u32, ack: u32) -> Self {
        Self {
            from_vm: true,
            port: 4000,
            v6: false,
            seq,
            ack,
            flags,
            window: 256,
            ticks: None,
            sack: vec![],
            odd: false,
            payload: vec![],
        }
    }

    pub fn to_vm(flags: u8, seq: u32, ack: u32) -> Self {
        let from_vm = false;
        Self {
            from_vm,
            ..Self::from_vm(flags, seq, ack)
        }
    }

    pub fn ticks(self, value: u32, echo: u32) -> Self {
        let ticks = Some((value, echo));
        Self { ticks, ..self }
    }

    pub fn with(self, payload: &[u8]) -> Self {
        let payload = payload.to_vec();
        Self { payload, ..self }
    }

    /// The number after its last.
    pub fn seq_after(&self) -> u32 {
        let flags = u32::from(self.flags & SYN != 0) + u32::from(self.flags & FIN != 0);
        self.seq.wrapping_add(self.payload.len() as u32 + flags)
    }

    pub fn direction(&self) -> Direction {
        match self.from_vm {
            true => Direction::FromVm,
            false => Direction::ToVm,
        }
    }

    pub fn frame(&self) -> Frame {
        let vm: &[u8] = if self.v6 { &[0xfd; 16] } else { &[10, 0, 0, 1] };
        let client: &[u8] = if self.v6 { &[0xfc; 16] } else { &[10, 0, 0, 2] };
        let (src, dst) = if self.from_vm { (vm, client) } else { (client, vm) };
        let tcp = self.tcp(src, dst);
        let mut bytes = vec![2; 12];
        let length = tcp.len() as u16;
        if self.v6 {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([TCP, 64]);
        } else {
            bytes.extend([0x08, 0x00, 0x45, 0]);
            bytes.extend((length + 20).to_be_bytes());
            bytes.extend([0, 1, 0x40, 0, 64, TCP, 0, 0]);
        }
        bytes.extend(src);
        bytes.extend(dst);
        bytes.extend(tcp);
        Frame {
            nic: 0,
            bytes: bytes.into(),
        }
    }

    fn tcp(&self, src: &[u8], dst: &[u8]) -> Vec<u8> {
        let mut options = vec![1; if self.odd { 1 } else { 2 }];
        if let Some((value, echo)) = self.ticks {
            options.extend([8, 10]);
            options.extend(value.to_be_bytes());
            options.extend(echo.to_be_bytes());
        }
        if !self.sack.is_empty() {
            options.extend([5, 2 + 8 * self.sack.len() as u8]);
            for edge in self.sack.iter().flat_map(|(left, right)| [left, right]) {
                options.extend(edge.to_be_bytes());
            }
        }
        options.resize(options.len().next_multiple_of(4), 1);
        let (src_port, dst_port) = if self.from_vm {
            (80, self.port)
        } else {
            (self.port, 80)
        };
        let mut tcp = [src_port.to_be_bytes(), dst_port.to_be_bytes()].concat();
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend([(20 + options.len() as u8) << 2, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(options);
        tcp.extend(&self.payload);
        let sum = sum_of(&[src, dst, &[0, TCP], &(tcp.len() as u16).to_be_bytes(), &tcp].concat());
        tcp[16..18].copy_from_slice(&(!sum).to_be_bytes());
        tcp
    }

    /// What `frame` says; only for frames that tests or the code under test made.
    pub fn read(frame: &Frame, direction: Direction) -> Self {
        let segment = segment(frame, direction);
        let number = |at: usize| u32::from_be_bytes(frame.bytes[at..at + 4].try_into().unwrap());
        Self {
            from_vm: direction == Direction::FromVm,
            port: segment.key.peer_port,
            v6: segment.key.vm.is_ipv6(),
            seq: segment.seq,
            ack: segment.ack,
            flags: segment.flags,
            window: segment.window,
            ticks: segment.timestamps.map(|found| (found.value, found.echo)),
            sack: (segment.sack.clone().step_by(8))
                .map(|at| (number(at), number(at + 4)))
                .collect(),
            odd: frame.bytes.get(segment.options.start + 1) != Some(&1) && !segment.options.is_empty(),
            payload: frame.bytes[segment.payload].to_vec(),
        }
    }
}

pub fn segment(frame: &Frame, direction: Direction) -> Segment {
    match parse(frame, direction) {
        Parsed::Tcp(segment) => segment,
        other => panic!("not TCP: {other:?}"),
    }
}

/// The sum of all 16-bit words, one by one (RFC 1071).
pub fn sum_of(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Whether the TCP checksum of `frame` is right.
pub fn checksum_is_right(frame: &Frame, direction: Direction) -> bool {
    let tcp = &frame.bytes[segment(frame, direction).tcp..];
    let addresses = match frame.bytes[12..14] {
        [8, 0] => &frame.bytes[26..34],
        _ => &frame.bytes[22..54],
    };
    sum_of(&[addresses, &[0, TCP], &(tcp.len() as u16).to_be_bytes(), tcp].concat()) == 0xffff
}

#[test]
fn what_is_written_is_read() {
    for (v6, odd) in [(false, false), (true, false), (false, true), (true, true)] {
        let seg = Seg {
            v6,
            odd,
            sack: vec![(5, 6), (7, 8)],
            ..Seg::from_vm(SYN | ACK | FIN | RST, 3, 4).ticks(1, 2).with(b"xyz")
        };
        assert_eq!(Seg::read(&seg.frame(), seg.direction()), seg);
        assert!(checksum_is_right(&seg.frame(), seg.direction()));
    }
}
