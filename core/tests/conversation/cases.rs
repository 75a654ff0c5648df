//! What random conversations found, as short as it can be told.

use super::tcp::frame::{ACK, FIN, RST, SYN, Seg, read, write};
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::units::Epoch;

fn vm(flags: u8, seq: u32, ack: u32) -> Seg {
    Seg {
        from_vm: true,
        flags,
        seq,
        ack,
        ..Seg::default()
    }
}

fn client(flags: u8, seq: u32, ack: u32) -> Seg {
    Seg {
        flags,
        seq,
        ack,
        ..Seg::default()
    }
}

fn backup() -> Output {
    Output::new(Voice::Backup, Epoch(1))
}

fn said(output: &mut Output, seg: &Seg) {
    output.said(write(seg), 0);
}

fn heard(output: &mut Output, seg: &Seg) -> Seg {
    read(&output.heard(&write(seg))).expect("a right checksum")
}

fn takes_over(output: &mut Output) -> Vec<Seg> {
    output.take_over(0);
    output.set_voice(Voice::Alone);
    std::iter::from_fn(|| output.release(0))
        .map(|frame| read(&frame).expect("a right checksum"))
        .collect()
}

fn left(output: &mut Output, seg: &Seg) -> Seg {
    said(output, seg);
    read(&output.release(0).expect("it speaks")).expect("a right checksum")
}

/// A client in its next handshake resets the connection when it hears an acknowledgement of its last one.
#[test]
fn after_a_take_over_nothing_is_said_of_a_former_connection_of_the_same_name() {
    let mut output = backup();
    said(&mut output, &vm(ACK, 700, 50));
    said(&mut output, &vm(FIN | ACK, 700, 50));
    let syn_ack = vm(SYN | ACK, 900, 1001);
    said(&mut output, &syn_ack);
    assert_eq!(takes_over(&mut output), [syn_ack]);
}

/// The client's FIN was acknowledged, but the acknowledgement got lost: it is repeated in the numbers that the client
/// knows, even by a host that got its copy of the VM when the connection was over.
#[test]
fn the_last_acknowledgement_is_in_the_clients_numbers_on_every_host() {
    let mut first = backup();
    said(&mut first, &vm(SYN | ACK, 900, 101));
    // The old primary's SYN had 400.
    assert_eq!(heard(&mut first, &client(ACK, 101, 401)).ack, 901);
    assert_eq!(takes_over(&mut first), []);
    assert_eq!(left(&mut first, &vm(FIN | ACK, 901, 101)).seq, 401);
    heard(&mut first, &client(FIN | ACK, 101, 402));
    assert_eq!(left(&mut first, &vm(ACK, 902, 102)).seq, 402);

    let mut second = backup();
    second
        .applied(Epoch(1), &first.draw_line())
        .expect("a table that can be read");
    takes_over(&mut second);
    assert_eq!(heard(&mut second, &client(FIN | ACK, 101, 402)).ack, 902);
    assert_eq!(left(&mut second, &vm(ACK, 902, 102)).seq, 402);
}

/// A host that got its copy after a take-over, and whose VM has said nothing since, hears what the client echoes of the
/// speaking host: it is not of the time before the take-over.
#[test]
fn an_echo_from_after_a_take_over_is_known_as_such_before_the_first_word() {
    let with = |seg: Seg, value, echo| Seg {
        ticks: Some((value, echo)),
        ..seg
    };
    let mut first = backup();
    said(&mut first, &with(vm(SYN | ACK, 900, 101), 5000, 1));
    // The old primary's clock was at 70,000.
    heard(&mut first, &with(client(ACK, 101, 401), 2, 70_000));
    takes_over(&mut first);

    let mut second = backup();
    second
        .applied(Epoch(1), &first.draw_line())
        .expect("a table that can be read");
    let word = left(&mut first, &with(vm(ACK, 901, 101), 5010, 2));
    let outside = word.ticks.expect("timestamps").0;
    assert_eq!(outside, 80_010);
    let echo = with(client(ACK, 101, 401), 3, outside);
    assert_eq!(heard(&mut first, &echo).ticks, Some((3, 5010)));
    assert_eq!(heard(&mut second, &echo).ticks, Some((3, 5010)));
}

/// A connection of the same ends is over, and a new one is answered; a sync covers the answer before it leaves. The copy
/// must not take the new one's numbers for the old one's.
#[test]
fn a_held_answer_ends_the_translation_of_a_former_connection_of_the_same_name() {
    let mut first = backup();
    said(&mut first, &vm(SYN | ACK, 900, 101));
    heard(&mut first, &client(ACK, 101, 401));
    takes_over(&mut first);
    assert_eq!(left(&mut first, &vm(FIN | ACK, 901, 101)).seq, 401);

    first.set_voice(Voice::Protected);
    let last = vm(ACK, 902, 101);
    let syn_ack = vm(SYN | ACK, 7000, 60_001);
    said(&mut first, &last);
    said(&mut first, &syn_ack);
    let mut second = backup();
    second
        .applied(Epoch(1), &first.draw_line())
        .expect("a table that can be read");
    first.acknowledged(Epoch(1));
    let leaves = |output: &mut Output| read(&output.release(0).expect("covered")).expect("a right checksum");
    assert_eq!(
        leaves(&mut first).seq,
        402,
        "of the old one, in the old one's numbers"
    );
    assert_eq!(leaves(&mut first), syn_ack);

    let answer = client(ACK, 60_001, 7001);
    assert_eq!(heard(&mut first, &answer), answer);
    assert_eq!(heard(&mut second, &answer), answer);
}

/// A VM loses the client's reset inside, and goes on; a segment that was overtaken by the reset must not reach it in the
/// other VM's numbers.
#[test]
fn a_reset_that_a_vm_may_have_lost_does_not_end_the_translation() {
    let mut first = backup();
    said(&mut first, &vm(SYN | ACK, 900, 101));
    heard(&mut first, &client(ACK, 101, 401));
    said(&mut first, &vm(ACK, 901, 101));
    heard(&mut first, &client(RST, 101, 0));
    let overtaken = Seg {
        sack: vec![(411, 421)],
        ..client(ACK, 101, 401)
    };
    said(&mut first, &vm(ACK, 931, 101));
    let own = heard(&mut first, &overtaken);
    assert_eq!((own.ack, own.sack), (901, vec![(911, 921)]));
}

/// Both VMs ended the stream, but the client's FIN came to the backup's before its own and to the primary's not at all.
/// So the client heard a FIN that acknowledges nothing, and acknowledged it: the backup's VM thinks that all is said.
#[test]
fn a_repeated_end_of_a_forgotten_connection_is_acknowledged_and_not_reset() {
    let mut first = backup();
    heard(&mut first, &client(FIN | ACK, 50, 700));
    said(&mut first, &vm(FIN | ACK, 700, 51));
    heard(&mut first, &client(ACK, 51, 701));
    assert_eq!(takes_over(&mut first), []);
    let repeats = |output: &mut Output| {
        heard(output, &client(FIN | ACK, 50, 701));
        left(output, &vm(RST, 701, 0))
    };
    // What acknowledges it may get lost once more.
    assert_eq!(repeats(&mut first), vm(ACK, 701, 51));
    assert_eq!(repeats(&mut first), vm(ACK, 701, 51));

    let mut second = backup();
    second
        .applied(Epoch(1), &first.draw_line())
        .expect("a table that can be read");
    // Its own VM says the reset while it is the backup.
    heard(&mut second, &client(FIN | ACK, 50, 701));
    said(&mut second, &vm(RST, 701, 0));
    assert_eq!(takes_over(&mut second), [vm(ACK, 701, 51)]);
    assert_eq!(repeats(&mut second), vm(ACK, 701, 51));
    assert_eq!(
        left(&mut second, &vm(RST, 690, 0)),
        vm(RST, 690, 0),
        "the answer to something else"
    );
}

/// The same, but the client's end came before the VM had said a word since the last sync, and it is repeated only when yet
/// another host speaks. That one got its copy before or after the client acknowledged the VM's end.
#[test]
fn an_end_that_came_before_any_word_is_known_to_the_host_after_the_next() {
    for acknowledged_first in [true, false] {
        let mut first = backup();
        heard(&mut first, &client(FIN | ACK, 50, 700));
        let end = vm(FIN | ACK, 700, 51);
        said(&mut first, &end);
        if acknowledged_first {
            heard(&mut first, &client(ACK, 51, 701));
            assert_eq!(takes_over(&mut first), []);
        } else {
            assert_eq!(takes_over(&mut first), [end]);
        }
        let mut second = backup();
        second
            .applied(Epoch(1), &first.draw_line())
            .expect("a table that can be read");
        if !acknowledged_first {
            heard(&mut second, &client(ACK, 51, 701));
        }
        assert_eq!(takes_over(&mut second), []);
        heard(&mut second, &client(FIN | ACK, 50, 701));
        assert_eq!(left(&mut second, &vm(RST, 701, 0)), vm(ACK, 701, 51));
    }
}

/// The VM's SYN-ACK is older than the sync, and repeated when the client's answer is in the VM's ring already: the numbers
/// stay open, but the clock must not.
#[test]
fn after_a_late_answer_to_a_repeated_syn_ack_echoes_are_in_the_vms_own_time() {
    let with = |seg: Seg, value, echo| Seg {
        ticks: Some((value, echo)),
        ..seg
    };
    let mut first = backup();
    let answer = with(client(ACK, 101, 901), 2, 5000);
    assert_eq!(heard(&mut first, &answer), answer);
    said(&mut first, &with(vm(SYN | ACK, 900, 101), 5300, 1));
    said(&mut first, &with(vm(FIN | ACK, 901, 101), 5310, 2));
    takes_over(&mut first);
    // Of the old primary, then of this one.
    let echoes = |output: &mut Output, echo| heard(output, &with(client(ACK, 101, 901), 3, echo)).ticks;
    assert_eq!(echoes(&mut first, 5290), Some((3, 5290)));
    let word = left(&mut first, &with(vm(FIN | ACK, 901, 101), 5400, 2));
    assert_eq!(word.ticks, Some((15_400, 2)));
    assert_eq!(echoes(&mut first, 15_400), Some((3, 5400)));
}

/// Two take-overs, and not a word of the VM between them: what the client echoes is of the first host still.
#[test]
fn an_echo_from_before_two_take_overs_is_known_as_such() {
    let with = |seg: Seg, value, echo| Seg {
        ticks: Some((value, echo)),
        ..seg
    };
    let mut first = backup();
    said(&mut first, &with(vm(SYN | ACK, 900, 101), 5000, 1));
    takes_over(&mut first);
    // The client heard the old primary, whose clock was at 70,000 then.
    let echo = with(client(ACK, 101, 401), 2, 70_000);
    assert_eq!(heard(&mut first, &echo).ticks, Some((2, 5000)));

    let mut second = backup();
    second
        .applied(Epoch(1), &first.draw_line())
        .expect("a table that can be read");
    takes_over(&mut second);
    assert_eq!(heard(&mut second, &echo).ticks, Some((2, 5000)));
    let word = left(&mut second, &with(vm(ACK, 901, 101), 5600, 2));
    assert_eq!(word.ticks, Some((90_000, 2)), "ten seconds for each");
    let echo = with(client(ACK, 101, 401), 3, 90_000);
    assert_eq!(heard(&mut second, &echo).ticks, Some((3, 5600)));
}

/// The network has kept a copy of the client's SYN until the backup's VM has no such connection any more: it has reset it, or
/// both ends are closed. It answers with new numbers, but what the client says next is of the old connection, which the
/// primary's VM may have still. After a take-over the client is to hear that there is none.
#[test]
fn a_stray_copy_of_a_syn_teaches_no_numbers() {
    let old = Seg {
        sack: vec![(950, 980)],
        ..client(ACK, 128, 930)
    };
    let known = [vm(ACK, 900, 128), vm(RST | ACK, 990, 160)];
    let closed = [vm(FIN | ACK, 929, 128), vm(ACK, 930, 128)];
    for words in [&known[..], &known[1..], &closed] {
        let mut output = backup();
        let end = client(FIN | ACK, 127, 930);
        if words == closed {
            assert_eq!(heard(&mut output, &end), end);
        }
        words.iter().for_each(|word| said(&mut output, word));
        said(&mut output, &vm(SYN | ACK, 7000, 101));
        assert_eq!(heard(&mut output, &old), old);
        takes_over(&mut output);
        let refused = vm(RST, 930, 0);
        assert_eq!(left(&mut output, &refused).seq, refused.seq);

        // So it is if it comes after the next sync.
        let mut primary = Output::new(Voice::Alone, Epoch(1));
        let mut output = backup();
        words.iter().for_each(|word| said(&mut primary, word));
        if words != closed {
            let table = primary.draw_line();
            output
                .applied(Epoch(1), &table)
                .expect("a table that can be read");
            said(&mut output, &vm(SYN | ACK, 7000, 101));
            assert_eq!(heard(&mut output, &old), old);
        }

        // The client's next connection of the same name is followed as ever.
        let mut output = backup();
        words.iter().for_each(|word| said(&mut output, word));
        said(&mut output, &vm(SYN | ACK, 7000, 60_001));
        assert_eq!(heard(&mut output, &client(ACK, 60_001, 8001)).ack, 7001);
    }
}
