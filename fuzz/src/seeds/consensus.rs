//! Valid words of the consensus, and scripts that a replica is driven by.

use bytes::Bytes;
use dunlin_core::consensus::{Entry, EntryKind, Member, Message, Snapshot, Stand};
use dunlin_core::units::{Index, Term, Viewstamp};
use dunlin_core::wire::consensus::{encode as encode_message, encode_entry, encode_members, encode_snapshot};

fn entry(kind: EntryKind, index: u64, payload: &'static [u8]) -> Entry {
    let stamp = Viewstamp {
        term: Term(2),
        index: Index(index),
    };
    Entry {
        stamp,
        kind,
        payload: Bytes::from_static(payload),
    }
}

fn messages() -> Vec<Message> {
    let (term, prev) = (
        Term(2),
        Viewstamp {
            term: Term(2),
            index: Index(4),
        },
    );
    let members = vec![Member::full(0), Member::full(1), Member::witness(2)];
    let entries = vec![
        entry(EntryKind::Barrier, 5, b""),
        entry(EntryKind::Data, 6, b"payload"),
        Entry {
            payload: encode_members(&members),
            ..entry(EntryKind::Members, 7, b"")
        },
    ];
    let last = Viewstamp {
        term,
        index: Index(7),
    };
    let snapshot = Snapshot {
        last: prev,
        members,
        state: Bytes::from_static(b"state"),
    };
    vec![
        Message::Append {
            term,
            prev,
            entries: entries.clone(),
        },
        Message::Append {
            term,
            prev,
            entries: vec![],
        },
        Message::Lead {
            term,
            commit: Index(6),
            beat: 9,
        },
        Message::Ack {
            term,
            durable: Index(6),
            beat: 9,
        },
        Message::Reject { term, hint: Index(3) },
        Message::RequestVote {
            term,
            last,
            why: Stand::Asks,
        },
        Message::Vote {
            term,
            granted: true,
            pre: false,
            last,
        },
        Message::Snapshot {
            term,
            snapshot,
            leads: true,
        },
        Message::Pull {
            term,
            at: prev,
            committed: Index(4),
        },
        Message::Pulled {
            term,
            prev,
            entries,
            last,
        },
        Message::Recover {
            term,
            nonce: 77,
            held: Index(2),
        },
        Message::Recovery {
            term,
            nonce: 77,
            last: Index(7),
        },
        Message::Campaign { term, beat: 9 },
    ]
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_message(message, &mut bytes);
    bytes
}

pub(super) fn words() -> Vec<Vec<u8>> {
    let mut out: Vec<Vec<u8>> = messages().iter().map(encoded).collect();
    out.push(encode_members(&[Member::full(0), Member::witness(6)]).to_vec());
    let mut bytes = Vec::new();
    encode_entry(&entry(EntryKind::Data, 5, b"kept"), &mut bytes);
    out.push(std::mem::take(&mut bytes));
    encode_snapshot(
        &Snapshot {
            state: Bytes::from_static(b"s"),
            ..Snapshot::default()
        },
        &mut bytes,
    );
    out.push(bytes);
    out
}

/// Each message alone, raw, to a replica in memory and to one with a disk; then a short life: elected, proposes, hears an Ack.
pub(super) fn steps() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    for message in messages() {
        let bytes = encoded(&message);
        for how in 0..4 {
            let mut script = vec![how, 0, 13, 0];
            script.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            script.extend_from_slice(&bytes);
            script.extend_from_slice(&[8, 255, 255, 9, 10, 11, 13]);
            out.push(script);
        }
    }
    // Tick until it campaigns; pre-vote and vote of member 1; promise kept; propose; acknowledged; applied, truncated.
    let vote = |pre: u8, term: u8| vec![0, 5, term, 1, pre, 0, 0];
    for how in 0..2 {
        let mut script = vec![how, 8, 255, 255, 8, 255, 255];
        script.extend(vote(1, 1));
        script.push(9);
        script.extend(vote(0, 1));
        script.extend([12, 10, 0, 2, 1, 2, 1, 13 + 16, 8, 255, 10, 15]);
        out.push(script);
    }
    out
}
