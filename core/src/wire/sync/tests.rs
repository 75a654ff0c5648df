//! What is encoded is decoded, and nothing else panics.

use super::*;
use proptest::prelude::*;

fn any_message() -> impl Strategy<Value = SyncMessage> {
    let epoch = any::<u64>().prop_map(Epoch);
    let pages = prop::collection::vec((0_u32..1000, 1_u32..10), 0..10).prop_map(PageSet::from_runs);
    let delta = (any::<u32>(), any::<u16>()).prop_map(|(page, blocks)| PageDelta {
        at: DivergentPage { page, blocks },
        bytes: vec![7; blocks.count_ones() as usize * BLOCK_BYTES].into(),
    });
    let deltas = prop::collection::vec(delta, 0..4);
    prop_oneof![
        (any::<u64>(), any::<u32>(), any::<bool>(), any::<bool>()).prop_map(|(term, pages, active, tree)| {
            SyncMessage::Join {
                term: Term(term),
                pages,
                active,
                compare: if tree { Compare::Tree } else { Compare::List },
            }
        }),
        any::<u64>().prop_map(|term| SyncMessage::NewTerm { term: Term(term) }),
        "[a-z ]{0,20}".prop_map(|why| SyncMessage::Refused { why }),
        deltas.clone().prop_map(SyncMessage::Pages),
        (epoch.clone(), pages.clone(), any::<bool>()).prop_map(|(epoch, pages, more)| SyncMessage::Dirty {
            epoch,
            pages,
            more
        }),
        (epoch.clone(), pages.clone(), any::<bool>()).prop_map(|(epoch, pages, more)| SyncMessage::Union {
            epoch,
            pages,
            more
        }),
        (epoch.clone(), pages, any::<bool>()).prop_map(|(epoch, pages, more)| SyncMessage::PreCopy {
            epoch,
            pages,
            more
        }),
        (epoch.clone(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(epoch, part)| {
            SyncMessage::DeviceState {
                epoch,
                part: part.into(),
            }
        }),
        (epoch.clone(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(epoch, part)| {
            SyncMessage::Connections {
                epoch,
                part: part.into(),
            }
        }),
        (epoch.clone(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(epoch, part)| {
            SyncMessage::ConnectionsAhead {
                epoch,
                part: part.into(),
            }
        }),
        (epoch.clone(), any::<bool>()).prop_map(|(epoch, agreed)| SyncMessage::Ends { epoch, agreed }),
        (epoch.clone(), prop::collection::vec(any::<u128>(), 0..40))
            .prop_map(|(epoch, hashes)| SyncMessage::Hashes { epoch, hashes }),
        (epoch.clone(), prop::collection::vec(any::<u128>(), 0..40))
            .prop_map(|(epoch, hashes)| SyncMessage::Nodes { epoch, hashes }),
        (epoch.clone(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(epoch, part)| {
            SyncMessage::Differ {
                epoch,
                part: part.into(),
            }
        }),
        (epoch.clone(), deltas).prop_map(|(epoch, deltas)| SyncMessage::Delta { epoch, deltas }),
        (
            epoch.clone(),
            prop::collection::vec(any::<u8>(), 0..40),
            prop::collection::vec(any::<u8>(), 0..9),
            0..Mode::ALL.len()
        )
            .prop_map(|(epoch, state, connections, next)| SyncMessage::State {
                epoch,
                next: Mode::ALL[next],
                connections: connections.into(),
                device_state: state.into(),
            }),
        (
            epoch.clone(),
            prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)), 0..4)
        )
            .prop_map(|(epoch, frames)| SyncMessage::Said {
                epoch,
                frames: frames
                    .into_iter()
                    .map(|(nic, bytes)| Frame {
                        nic,
                        bytes: bytes.into(),
                    })
                    .collect(),
            }),
        (epoch, any::<u64>()).prop_map(|(epoch, took_us)| SyncMessage::Loaded { epoch, took_us }),
    ]
}

#[test]
fn what_was_not_cut_is_an_error_and_leaves_nothing_behind() {
    let message = SyncMessage::Refused {
        why: "x".repeat(MOST_BYTES),
    };
    let mut out = BytesMut::from(&b"before"[..]);
    let error = encode(&message, &mut out).unwrap_err();
    assert_eq!((error.name, error.bytes), ("Refused", MOST_BYTES + 1));
    assert_eq!(out, b"before"[..]);
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(message in any_message()) {
        let mut out = BytesMut::new();
        encode(&message, &mut out).unwrap();
        let len = u32::from_be_bytes(out[..4].try_into().unwrap()) as usize;
        prop_assert_eq!(len, out.len() - 4);
        prop_assert_eq!(decode(out.freeze().slice(4..)), Ok(message));
    }

    #[test]
    fn any_bytes_give_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = decode(Bytes::from(bytes));
    }
}

/// Versions before `TREE_SINCE` take a flag here, and nothing else.
#[test]
fn a_join_that_compares_by_lists_is_as_earlier_versions_know_it() {
    for (active, flag) in [(false, 0), (true, 1)] {
        let join = SyncMessage::Join {
            term: Term(7),
            pages: 64,
            active,
            compare: Compare::List,
        };
        let mut out = BytesMut::new();
        encode(&join, &mut out).expect("short");
        assert_eq!(
            out[..],
            [0, 0, 0, 14, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 64, flag]
        );
    }
}

/// It may be kept for long, and keeps no more than itself.
#[test]
fn a_frame_that_was_said_is_no_part_of_its_message() {
    let frame = Frame {
        nic: 0,
        bytes: vec![7; 100].into(),
    };
    let frames = vec![frame; 2];
    let said = SyncMessage::Said {
        epoch: Epoch(1),
        frames: frames.clone(),
    };
    let mut out = BytesMut::new();
    encode(&said, &mut out).expect("short");
    let message = out.freeze().slice(4..);
    let Ok(SyncMessage::Said { frames: heard, .. }) = decode(message.clone()) else {
        panic!("it is whole");
    };
    assert_eq!(heard, frames);
    let within = message.as_ptr_range();
    assert!(heard.iter().all(|frame| !within.contains(&frame.bytes.as_ptr())));
}
