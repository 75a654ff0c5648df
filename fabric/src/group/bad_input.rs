//! A member that is authenticated and broken: whatever it writes is counted, told once per peer and minute, and dropped.

use super::*;
use crate::link::{PROTOCOL_VERSION, Spoken};
use crate::log::Mode;
use crate::log::tests::Scratch;
use crate::transport::ring::{Place, RingWriter, Sent};
use crate::transport::{RegionId, Shm, Tcp, Transport};
use dunlin_core::consensus::Durability;
use dunlin_core::wire::consensus::encode;
use std::io::Write;
use std::os::unix::net::UnixStream;

/// The mailbox, as `peer` lays it out.
const MAIL: Place = Place {
    region: RegionId(0),
    offset: 4096,
    bytes: 1 << 20,
};
const PEER: ReplicaId = ReplicaId(1);

fn group(dir: &Scratch) -> Group {
    let members = (0..3).map(Member::full).collect();
    let mut cfg = GroupConfig::new(dir.path(), ReplicaId(0), members, Durability::Memory);
    cfg.disk_mode = Mode::Inline;
    Group::open(cfg).unwrap()
}

/// A link to a peer that is driven by hand, and the writer into our mailbox.
fn broken_peer(group: &mut Group) -> (Shm, RingWriter) {
    let (ours, theirs) = Stream::pair().unwrap();
    group.add_link(PEER, ours).unwrap();
    let mut peer = Shm::new(theirs).unwrap();
    peer.register(RegionId(0), 1, MAIL.offset + MAIL.bytes).unwrap();
    while peer.granted(RegionId(0)).is_none() {
        peer.progress(1 << 20).unwrap();
    }
    let grant = peer.granted(RegionId(0)).unwrap();
    (peer, RingWriter::new(MAIL, grant.epoch, grant.key))
}

/// Polls until nothing comes; the violations that were told.
fn violations(group: &mut Group, now_us: u64) -> Vec<(ReplicaId, u64)> {
    let mut told = Vec::new();
    while let Some(event) = group.poll(now_us) {
        if let GroupEvent::ProtocolViolation { peer, count, what } = event {
            assert!(!what.contains('\n'), "{what}");
            told.push((peer, count));
        }
    }
    told
}

#[test]
fn what_does_not_decode_is_counted_and_told_once_a_minute() {
    let dir = Scratch::new("bad-input");
    let mut group = group(&dir);
    let (mut peer, mut mail) = broken_peer(&mut group);
    let mut long = Vec::new();
    encode(
        &Message::Campaign {
            term: Term(1),
            beat: 0,
        },
        &mut long,
    );
    let short = long[..long.len() - 1].to_vec();
    long.push(0);
    let unknown = vec![200; 9];
    let impossible = {
        let mut bytes = Vec::new();
        encode(
            &Message::Campaign {
                term: Term(u64::MAX),
                beat: 0,
            },
            &mut bytes,
        );
        bytes
    };
    let mut told = Vec::new();
    for bad in [&short, &long, &unknown, &Vec::new(), &impossible] {
        assert_eq!(mail.send(&mut peer, bad).unwrap(), Sent::Whole);
        peer.flush().unwrap();
        told.extend(violations(&mut group, 1000));
    }
    assert_eq!(
        group.counters().bad,
        5,
        "too short, too long, unknown, empty, impossible"
    );
    let counters = group.counters();
    assert_eq!((counters.short, counters.long), (2, 1));
    assert_eq!(counters.unknown + counters.forbidden, 2);
    assert_eq!(told, [(PEER, 1)], "the first one only");
    // A minute later it is told again, with the number.
    assert_eq!(mail.send(&mut peer, &unknown).unwrap(), Sent::Whole);
    peer.flush().unwrap();
    assert_eq!(violations(&mut group, 61_000_000), [(PEER, 6)]);
    assert_eq!(group.counters().bad, 6);
}

#[test]
fn a_wrong_checksum_is_counted_and_never_believed() {
    let dir = Scratch::new("bad-checksum");
    let mut group = group(&dir);
    let (mut peer, _) = broken_peer(&mut group);
    let grant = peer.granted(RegionId(0)).unwrap();
    // Another key makes other checksums: sequence, epoch and length fit, the content is not believed.
    let mut liar = RingWriter::new(MAIL, grant.epoch, grant.key ^ 1);
    let mut message = Vec::new();
    encode(
        &Message::Campaign {
            term: Term(1),
            beat: 0,
        },
        &mut message,
    );
    liar.send(&mut peer, &message).unwrap();
    peer.flush().unwrap();
    let heard = group.counters().heard;
    assert_eq!(violations(&mut group, 1000), []);
    assert_eq!(group.counters().heard, heard);
    let torn = group.counters().torn;
    assert!(torn > 0);
    // One that stays wrong ends the link, and is remembered.
    assert_eq!(violations(&mut group, 10_000_000), [(PEER, 1)]);
    assert_eq!(group.counters().broken, 1);
    assert!(group.counters().torn >= torn);
}

#[test]
fn a_frame_that_is_too_long_ends_the_link_and_nothing_else() {
    let dir = Scratch::new("bad-frame");
    let mut group = group(&dir);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let tcp = Tcp::new(Stream::local(ours, "peer")).unwrap();
    let spoken = Spoken {
        version: PROTOCOL_VERSION,
        build: None,
    };
    group.peers.push(Peer::over(PEER, Box::new(tcp), spoken).unwrap());
    let mut frame = u32::MAX.to_le_bytes().to_vec();
    frame.extend_from_slice(&[1, 0, 0, 0]);
    frame.extend_from_slice(&[0; 16]);
    theirs.write_all(&frame).unwrap();
    let (mut lost, mut told) = (None, Vec::new());
    while let Some(event) = group.poll(1000) {
        match event {
            GroupEvent::LinkLost { peer, why, broken } => {
                assert!(broken, "whoever hears it knows that a violation is told");
                lost = Some((peer, why));
            }
            GroupEvent::ProtocolViolation { peer, .. } => told.push(peer),
            _ => {}
        }
    }
    let (peer, why) = lost.expect("the link ends");
    assert_eq!(peer, PEER);
    assert!(why.contains("impossible region or length"), "{why}");
    assert!(group.links().iter().all(|link| !link.connected));
    assert_eq!((told, group.counters().broken), (vec![PEER], 1));
}

#[test]
fn a_word_of_a_replica_that_is_no_member_changes_nothing() {
    let dir = Scratch::new("bad-member");
    let mut group = group(&dir);
    let before = (group.term(), group.role());
    let message = Message::Ack {
        term: Term(0),
        durable: Index(9),
        beat: 9,
    };
    group.step(Event::Received {
        from: ReplicaId(6),
        message,
    });
    assert_eq!((group.term(), group.role()), before);
    assert_eq!(group.committed(), Index(0));
}
