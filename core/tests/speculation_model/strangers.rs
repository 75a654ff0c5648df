//! Transcripts of segments in a client's name, by somebody who does not see the connection and guesses its numbers.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM};
use dunlin_core::speculation::Action;

const NOTHING: [&str; 0] = [];

/// Inside the VM's window, with a late clock, and bytes.
fn stranger(talk: &Talk, flags: u8, ack: u32) -> Seg {
    let seg = talk.seg(false, flags, CLIENT, ack);
    Seg {
        ticks: Some((1_000_000, 50)),
        payload: b"evil".to_vec(),
        ..seg
    }
}

/// The socket once took what was never sent for acknowledged, and nobody sent it any more.
#[test]
fn what_acknowledges_the_impossible_goes_nowhere() {
    let mut talk = Talk::open();
    talk.delivered(0, b"0123456789");
    // More than was sent; longer ago than any window; nothing at all.
    for (flags, ack) in [(ACK, VM + 500), (ACK, VM.wrapping_sub(9_000_000)), (0, 0)] {
        let seg = stranger(&talk, flags, ack);
        assert_eq!(talk.says(&seg), NOTHING, "{ack}");
        let bare = Seg {
            payload: vec![],
            ..seg
        };
        assert_eq!(talk.says(&bare), NOTHING, "{ack}");
        assert_eq!(talk.flush(), NOTHING, "{ack}");
    }
    assert_eq!(talk.core.size().1, 10, "all of it is kept");
    // The client's clock is its own, and its bytes are still to come.
    talk.data(10, b"more");
    let mut out = vec![];
    talk.core.flush(talk.now, &mut out);
    let Some(Action::ToVm(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    let seg = read(&frame).expect("a right checksum");
    assert_eq!((seg.seq, seg.ticks), (CLIENT, Some((60, 50))));
    let mut question = talk.of_client(0, 10);
    question.payload = b"good".to_vec();
    assert_eq!(
        talk.says(&question),
        ["socket: ACK 0 ack 10", "vm: ACK 0 ack 14 \"good\""]
    );
    assert_eq!(talk.core.size().1, 4);
}

/// A client whose acknowledgement was long on its way is believed as far as it goes: a window may lie between.
#[test]
fn an_older_acknowledgement_passes_with_the_bytes_beside_it() {
    let mut talk = Talk::open();
    talk.delivered(0, b"0123456789");
    let ack = talk.of_client(0, 10);
    talk.says(&ack);
    let mut late = talk.of_client(0, 0);
    late.payload = b"late".to_vec();
    assert_eq!(talk.says(&late), ["vm: ACK 0 ack 10 \"late\""]);
}

/// A SYN or a reset with a number that anybody may hit upon (RFC 5961): the VM challenges it, and that is all that comes of it.
#[test]
fn what_the_vm_challenges_disturbs_nothing() {
    for flags in [RST, RST | ACK, SYN, SYN | ACK] {
        let mut talk = Talk::open();
        talk.delivered(0, b"abc");
        let mut stray = talk.seg(false, flags, CLIENT + 77, VM);
        if stray.has(SYN) {
            stray.offer = Some(talk.offer());
        }
        let lines = talk.says(&stray);
        assert!(lines.len() == 1 && lines[0].starts_with("vm: "), "{lines:?}");
        let challenge = talk.of_vm(3, 0);
        assert_eq!(talk.says(&challenge), NOTHING, "it waits like any word");
        assert_eq!(talk.sync(), ["client: ACK 3 ack 0"]);
        // Both streams go on.
        let mut question = talk.of_client(0, 3);
        question.payload = b"?".to_vec();
        assert_eq!(
            talk.says(&question),
            ["socket: ACK 0 ack 3", "vm: ACK 0 ack 3 \"?\""]
        );
        talk.flush();
        talk.data(3, b"more");
        assert_eq!(talk.flush(), ["vm: ACK 1 ack 7"]);
        assert_eq!(talk.core.size(), (1, 4));
    }
}
