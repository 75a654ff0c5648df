//! Where the fuzzer begins: one small valid input of every kind. `cargo run -p dunlin-fuzz --example seeds` writes them.

mod consensus;

use bytes::{Bytes, BytesMut};
use dunlin_core::agreed::{Agreed, AgreedState, AgreedTime, Frame as NicFrame, HostPart, Part, ReplicaSet};
use dunlin_core::consensus::{Member, Snapshot};
use dunlin_core::disk::Generation;
use dunlin_core::disk::mirror::{Frame, Hello as MirrorHello};
use dunlin_core::output::rewriter::SequenceRewriter;
use dunlin_core::policy::Mode;
use dunlin_core::sync::compare::{BLOCK_BYTES, Compare, DivergentPage};
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_core::wire::agreed::{encode as encode_agreed, encode_state};
use dunlin_core::wire::consensus::encode_snapshot;
use dunlin_core::wire::sync::{SyncMessage, encode as encode_sync};
use dunlin_fabric::link::{Hello, Purpose};
use dunlin_guest::frames::announce::{gratuitous_arp, unsolicited_advertisement};

/// Every seed: target, name, content.
#[must_use]
pub fn all() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut out = Vec::new();
    let mut add = |target, seeds: Vec<Vec<u8>>| {
        for (nth, seed) in seeds.into_iter().enumerate() {
            out.push((target, format!("{nth:02}"), seed));
        }
    };
    add("agreed", agreed());
    add("announce", announce());
    add("bystander", crate::speculation::bystander_seeds());
    add("chance", crate::chance::seeds());
    add("consensus", consensus::words());
    add("frames", frames());
    add("gate", crate::gate::seeds());
    add("images", crate::images::seeds());
    add("link", link());
    add("log", log());
    add("mirror", mirror());
    add("nbd", nbd());
    add("output", output());
    add("packet", packet());
    add("ring", ring());
    add("shm", shm());
    add("speculation", crate::speculation::seeds());
    add("step", consensus::steps());
    add("sync", sync());
    add("tcp", tcp());
    add("virtqueue", crate::virtqueue::seeds());
    out
}

fn agreed() -> Vec<Vec<u8>> {
    let epoch = Epoch(3);
    let frame = |nic| NicFrame {
        nic,
        bytes: Bytes::from_static(b"a frame"),
    };
    let set = ReplicaSet::one(ReplicaId(0)).with(ReplicaId(1));
    let host = HostPart {
        id: ReplicaId(3),
        name: "d".into(),
        part: Part::Copy,
    };
    let entries = [
        Agreed::Frames(vec![frame(0), frame(1)]),
        Agreed::Timed {
            time: AgreedTime {
                monotonic_ns: 7_000_000_000,
                wall_ns: 1_700_000_000_000_000_000,
            },
            frames: vec![frame(0)],
        },
        Agreed::Seed([7; 32]),
        Agreed::Sync { epoch },
        Agreed::SyncDone { epoch },
        Agreed::Complete { set, epoch },
        Agreed::Policy(dunlin_core::policy::Policy::Remus),
        Agreed::Hosts([host].into()),
        Agreed::Down,
    ];
    let mut state = AgreedState::default();
    let mut out: Vec<Vec<u8>> = entries
        .iter()
        .map(|entry| encode_agreed(entry).to_vec())
        .collect();
    for entry in &entries {
        assert!(state.apply(entry), "the end is the last of them");
        out.push(encode_state(&state).to_vec());
    }
    out
}

fn announce() -> Vec<Vec<u8>> {
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let frames = [
        gratuitous_arp(mac, [10, 0, 0, 9].into()),
        unsolicited_advertisement(mac, "fe80::5054:ff:fe12:3456".parse().expect("an address")),
        [
            &[0xff; 6][..],
            &mac,
            &[
                8, 0, 0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1,
            ],
        ]
        .concat(),
    ];
    frames
        .iter()
        .map(|frame| [&[frame.len() as u8], frame.as_slice()].concat())
        .collect()
}

/// A TCP segment of one connection; the target sums it.
fn segment(from_vm: bool, flags: u8, seq: u32, ack: u32, ticks: [u32; 2], payload: &[u8]) -> Vec<u8> {
    let (vm, peer) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let (src, dst) = if from_vm { (vm, peer) } else { (peer, vm) };
    let ports: [u8; 4] = if from_vm { [0, 80, 9, 9] } else { [9, 9, 0, 80] };
    let length = [0, 52 + payload.len() as u8];
    let ip = [
        &[2; 12][..],
        &[8, 0, 0x45, 0],
        &length,
        &[0, 1, 0x40, 0, 64, 6, 0, 0],
        &src,
        &dst,
    ]
    .concat();
    let [value, echo] = ticks.map(u32::to_be_bytes);
    let options = [&[1, 1, 8, 10][..], &value, &echo].concat();
    let head = [
        &ports[..],
        &seq.to_be_bytes(),
        &ack.to_be_bytes(),
        &[0x80, flags, 1, 0, 0, 0, 0, 0],
    ]
    .concat();
    [ip, head, options, payload.to_vec()].concat()
}

/// A backup that learns a connection's numbers, takes over, and tells another.
fn packet() -> Vec<Vec<u8>> {
    const SYN_ACK: u8 = 0x12;
    const ACK: u8 = 0x10;
    let steps = [
        (1, segment(true, SYN_ACK, 100, 501, [7, 3], b"")),
        (0, segment(false, ACK, 501, 901, [4, 70], b"")),
        (1, segment(true, ACK, 101, 501, [8, 4], b"some bytes")),
        (0, segment(false, ACK, 501, 905, [5, 71], b"")),
        (3, vec![]),
        (2, segment(true, 0x11, 111, 501, [9, 5], b"")),
        (0, segment(false, 0x11, 501, 912, [6, 10_071], b"")),
    ];
    let (mut out, mut script) = (Vec::new(), Vec::new());
    for (way, bytes) in steps {
        script.extend([way, bytes.len() as u8]);
        script.extend(&bytes);
        out.push([&[0][..], &script].concat());
    }
    let mut shadow = SequenceRewriter::new();
    shadow.take_over();
    let table = shadow.table();
    out.push([&[table.len() as u8][..], &table, &script].concat());
    out
}

fn sync() -> Vec<Vec<u8>> {
    let epoch = Epoch(4);
    let pages = PageSet::from_runs([(1, 3), (9, 1)]);
    let delta = || PageDelta {
        at: DivergentPage {
            page: 9,
            blocks: 0b11,
        },
        bytes: vec![7; 2 * BLOCK_BYTES].into(),
    };
    let messages = [
        SyncMessage::Join {
            term: Term(2),
            pages: 1024,
            active: true,
            compare: Compare::Tree,
        },
        SyncMessage::Holds {
            pages: pages.clone(),
            hashes: vec![7; pages.len()],
        },
        SyncMessage::JoinReady,
        SyncMessage::Refused {
            why: "no memory".into(),
        },
        SyncMessage::Pages(vec![delta()]),
        SyncMessage::JoinLast { epoch },
        SyncMessage::Dirty {
            epoch,
            pages: pages.clone(),
            more: true,
        },
        SyncMessage::Union {
            epoch,
            pages,
            more: false,
        },
        SyncMessage::Hashes {
            epoch,
            hashes: vec![1, 2],
        },
        SyncMessage::Delta {
            epoch,
            deltas: vec![delta()],
        },
        SyncMessage::Said {
            epoch: Epoch(3),
            frames: vec![NicFrame {
                nic: 0,
                bytes: Bytes::from_static(&[2; 60]),
            }],
        },
        SyncMessage::State {
            epoch,
            next: Mode::Match,
            connections: Bytes::new(),
            device_state: Bytes::from_static(b"QEVM"),
        },
        SyncMessage::Staged { epoch },
        SyncMessage::Loaded { epoch, took_us: 800 },
        SyncMessage::Idle { applied: Index(5) },
        SyncMessage::Audit { epoch, hash: 3 },
        SyncMessage::Ends { epoch, agreed: true },
        SyncMessage::PreCopy {
            epoch,
            pages: PageSet::from_runs([(2, 3)]),
            more: false,
        },
        SyncMessage::DeviceState {
            epoch,
            part: Bytes::from_static(b"QEVM"),
        },
        SyncMessage::Connections {
            epoch,
            part: Bytes::from_static(b"flows"),
        },
        SyncMessage::ConnectionsAhead {
            epoch,
            part: Bytes::from_static(b"flows"),
        },
        SyncMessage::Nodes {
            epoch,
            hashes: vec![3, 4],
        },
        SyncMessage::Differ {
            epoch,
            part: Bytes::from_static(&[2]),
        },
    ];
    let encode = |message| {
        let mut out = BytesMut::new();
        encode_sync(message, &mut out).expect("short");
        out[4..].to_vec()
    };
    messages.iter().map(encode).collect()
}

fn frames() -> Vec<Vec<u8>> {
    let wire = [
        &5u32.to_be_bytes()[..],
        b"hello",
        &0u32.to_be_bytes(),
        &2u32.to_be_bytes(),
        b"ab",
    ]
    .concat();
    let cut = |at: usize| {
        let mut script = (at as u16).to_le_bytes().to_vec();
        script.extend_from_slice(&wire[..at]);
        script.extend_from_slice(&u16::MAX.to_le_bytes());
        script.extend_from_slice(&wire[at..]);
        script
    };
    vec![cut(3), cut(7), cut(wire.len())]
}

/// What a host says to an acceptor, and what an acceptor says to a connector, in both modes.
fn link() -> Vec<Vec<u8>> {
    let mut hello = Vec::new();
    Hello {
        from: "b".into(),
        qemu_version: "10.0".into(),
        extra: vec![1, 2],
        ..Hello::new("vm", "a", Purpose::Log)
    }
    .encode(&[9; 16], &mut hello);
    let mut out = Vec::new();
    // Version 2, whose nonce is all chance, and 3, whose greeting says a range, and whose hello and welcome begin with a build.
    let builds: [(u8, &[u8], &[u8]); 2] = [
        (2, &[5; 10], &[]),
        (3, b"versions\0\x03", &[0, 3, b'0', b'.', b'1']),
    ];
    for secret in [0u8, 2] {
        for (version, range, build) in builds {
            let body = [build, &hello].concat();
            let mut connector = vec![secret];
            connector.extend_from_slice(b"DUNLIN\0\x02");
            connector.push(secret / 2);
            connector.extend_from_slice(&[9; 16]);
            connector.extend_from_slice(&[5; 22]);
            connector.extend_from_slice(range);
            connector.extend_from_slice(&(body.len() as u16).to_be_bytes());
            connector.extend_from_slice(&body);
            connector.extend_from_slice(&[0; 32]);
            out.push(connector);
            let welcome = [build, &[0, 1, b'b', 0, 2, b'1', b'0']].concat();
            let mut acceptor = vec![secret | 1];
            acceptor.extend_from_slice(b"DUNLIN\0");
            acceptor.extend_from_slice(&[version, 0, secret / 2]);
            acceptor.extend_from_slice(&[5; 64]);
            acceptor.push(0);
            acceptor.extend_from_slice(&(welcome.len() as u16).to_be_bytes());
            acceptor.extend_from_slice(&welcome);
            out.push(acceptor);
        }
        out.push([&[secret | 1][..], b"DUNLIN\0\x03\x02\x02"].concat());
        out.push([&[secret | 1][..], b"DUNLIN\0\x04\x06"].concat());
        // It has nothing that this build knows.
        out.push([&[secret][..], b"DUNLIN\0\x09"].concat());
    }
    out.push([&[0][..], &hello].concat());
    out
}

fn log() -> Vec<Vec<u8>> {
    // Records: how, term, index, length, payload.
    let record = |how: u8, index: u8| [&[how, 1, index, 3][..], b"abc"].concat();
    let one = [&[2u8][..], &record(1, 1), &record(17, 2), &[8, 0]].concat();
    let two = [
        &[3u8][..],
        &record(1, 3),
        &[5, 0, 3, 0],
        &record(1, 3),
        &[0, 4, 1, 2, 3, 4],
    ]
    .concat();
    let snapshot = {
        let mut bytes = Vec::new();
        encode_snapshot(
            &Snapshot {
                members: vec![Member::full(0)],
                ..Snapshot::default()
            },
            &mut bytes,
        );
        [&[bytes.len() as u8][..], &bytes].concat()
    };
    vec![
        [&[4u8][..], &one].concat(),
        [&[12u8][..], &one, &two].concat(),
        [&[15u8, 1, 2, 0][..], &snapshot, &one, &two].concat(),
        [&[1u8, 1, 2, 0][..]].concat(),
        [&[20u8][..], &70u16.to_le_bytes(), b"dunlog01", &[0; 62]].concat(),
    ]
}

fn mirror() -> Vec<Vec<u8>> {
    let frames = [
        Frame::Write { offset: 512 },
        Frame::Zero {
            offset: 0,
            len: 4096,
            unmap: true,
        },
        Frame::CopyZero { offset: 0, len: 4096 },
        Frame::Mark { epoch: Epoch(2) },
        Frame::Flush,
        Frame::Ack {
            through: 2,
            held_bytes: 3,
        },
        Frame::Hash { offset: 0, len: 8 },
    ];
    let mut out: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| [&frame.header(b"data")[..], b"data"].concat())
        .collect();
    let generation = Generation {
        term: Term(1),
        primary: true,
        epoch: Epoch(2),
    };
    let hello = MirrorHello {
        size_bytes: 1 << 20,
        generation,
        consistent: true,
        pair: [1; 16],
        next_pair: [2; 16],
        storage: 0,
    };
    out.push([&hello.encode()[..], b"rest"].concat());
    out
}

/// A client's handshake as QEMU does it: flags, structured replies, meta context, go, a read, a disconnect.
fn nbd() -> Vec<Vec<u8>> {
    let option = |code: u32, data: &[u8]| {
        [
            &b"IHAVEOPT"[..],
            &code.to_be_bytes(),
            &(data.len() as u32).to_be_bytes(),
            data,
        ]
        .concat()
    };
    let name = [&5u32.to_be_bytes()[..], b"disk0"].concat();
    let context = [
        &name[..],
        &1u32.to_be_bytes(),
        &15u32.to_be_bytes(),
        b"base:allocation",
    ]
    .concat();
    let go = [&name[..], &1u16.to_be_bytes(), &3u16.to_be_bytes()].concat();
    let request = |kind: u16| {
        [
            &0x2560_9513u32.to_be_bytes()[..],
            &0u16.to_be_bytes(),
            &kind.to_be_bytes(),
            &7u64.to_be_bytes(),
            &0u64.to_be_bytes(),
            &4096u32.to_be_bytes(),
        ]
        .concat()
    };
    let flags = 3u32.to_be_bytes();
    vec![
        [
            &flags[..],
            &option(8, b""),
            &option(10, &context),
            &option(7, &go),
            &request(0),
            &request(2),
        ]
        .concat(),
        [&flags[..], &option(3, b""), &option(2, b"")].concat(),
        [&flags[..], &option(1, b"disk0"), &request(0), &request(3)].concat(),
        context,
        go,
    ]
}

fn ring() -> Vec<Vec<u8>> {
    let record = |tweak: u8, extra: &[u8]| [&[0, tweak, 4][..], b"data", extra].concat();
    vec![
        [record(0, &[]), record(0, &[])].concat(),
        [record(4, &[2]), record(4, &[2]), record(0, &[])].concat(),
        [record(0, &[]), [0, 4, 0, 1].to_vec(), record(0, &[])].concat(),
        [&[2u8, 0, 1, 2, 3, 2, 0, 1, 2, 3, 2, 1, 255, 1, 2, 3, 3, 9, 3, 255][..]].concat(),
    ]
}

/// A bell, a grant, a revocation, as a peer sends them.
fn shm() -> Vec<Vec<u8>> {
    let message = |kind: u8, bytes: u64| {
        let mut message = [0u8; 32];
        (message[0], message[1], message[8]) = (kind, 1, 5);
        message[16..24].copy_from_slice(&bytes.to_le_bytes());
        message
    };
    let bell = [&[2u8, 0x21, 3, 255][..], &message(1, 0)].concat();
    let grant = [&[1u8, 0x21, 255][..], &message(2, 4096)].concat();
    let revoke = [&[0u8, 255][..], &message(3, 0)].concat();
    vec![
        [&bell[..], &grant, &revoke].concat(),
        [&bell[..], &grant, &grant].concat(),
        grant,
    ]
}

fn tcp() -> Vec<Vec<u8>> {
    let frame = |kind: u8, epoch: u64, offset: u64, body: &[u8]| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[kind, 1, 0, 0]);
        bytes.extend_from_slice(&epoch.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(body);
        bytes
    };
    let says = |bytes: &[u8]| [&[bytes.len() as u8], bytes].concat();
    let write = frame(1, 5, 64, &[3; 64]);
    let grant = frame(2, 1, 4096, &[8; 8]);
    vec![
        [says(&grant), says(&write), says(&frame(3, 1, 0, &[0; 8]))].concat(),
        [
            says(&write[..50]),
            vec![0],
            says(&write[50..]),
            vec![1],
            says(&write),
        ]
        .concat(),
        says(&frame(1, 4, 0, &[3; 64])),
    ]
}

/// A handshake and a few words, said by both VMs and heard from the client; then a sync, a take-over and its table.
fn output() -> Vec<Vec<u8>> {
    // What follows the kind: how, peer, port, length, payload, sequence, acknowledgement, options, flags.
    let say = |who: u8, flags: u8, seq: u8| vec![who, 0, 1, 1, 4, b'd', b'a', b't', b'a', seq, 7, 0, flags];
    let both = [say(0, 18, 1), say(2, 18, 1), say(0, 24, 2), say(2, 24, 2)].concat();
    let client = [say(4, 2, 9), say(5, 18, 1), say(6, 18, 3)].concat();
    let udp = vec![0, 2, 1, 1, 2, b'h', b'i', 2, 2, 1, 1, 2, b'h', b'i'];
    vec![
        [&both[..], &[7], &both, &[8]].concat(),
        [&client[..], &[8], &client, &[9, 4, 1, 2, 3, 4]].concat(),
        udp,
        vec![
            0, 3, 20, 2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1,
        ],
    ]
}
