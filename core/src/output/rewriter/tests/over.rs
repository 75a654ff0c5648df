//! Take-overs, ends of connections, tables.

use super::*;
use proptest::prelude::*;

/// The VM's first number after its SYN.
const B1: u32 = B.wrapping_add(1);

#[test]
fn a_new_primary_goes_on_in_the_numbers_that_the_client_knows() {
    let mut rewriter = accepted();
    rewriter.take_over();
    let seg = Seg {
        sack: vec![(C + 9, C + 11)],
        ..Seg::from_vm(ACK, B.wrapping_add(17), C + 1).ticks(150, 10)
    };
    let said = out(&mut rewriter, &seg);
    assert_eq!((said.seq, said.ack), (P + 17, C + 1));
    assert_eq!(
        said.sack, seg.sack,
        "the client's own numbers are the same for everyone"
    );
    assert_eq!(said.ticks, Some((10_750, 10)));
    // What it echoes from before, and from now on.
    let echoed = |rewriter: &mut SequenceRewriter, ticks| {
        into(rewriter, &Seg::to_vm(ACK, C + 1, P + 17).ticks(11, ticks))
    };
    assert_eq!(echoed(&mut rewriter, 720).ticks, Some((11, 120)));
    assert_eq!(echoed(&mut rewriter, 10_750).ticks, Some((11, 150)));
    assert_eq!(echoed(&mut rewriter, 10_750).ack, B.wrapping_add(17));
}

#[test]
fn a_primary_whose_clock_ran_far_ahead_is_still_topped() {
    let mut rewriter = accepted();
    let say = |ticks| Seg::from_vm(ACK, B1, C + 1).ticks(ticks, 10);
    rewriter.overheard(&say(110).frame());
    into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1).ticks(10, 90_000));
    rewriter.take_over();
    assert_eq!(out(&mut rewriter, &say(120)).ticks, Some((100_000, 10)));
    assert_eq!(out(&mut rewriter, &say(125)).ticks, Some((100_005, 10)));
    let echo = into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1).ticks(11, 100_005));
    assert_eq!(echo.ticks, Some((11, 125)));
}

/// Anybody can send a segment with any echo: the floor of the take-over lay half a circle ahead, and the client threw all away.
#[test]
fn an_echo_that_cannot_be_of_this_connection_is_not_believed() {
    let cases = [
        ("another place", C + 1 + (1 << 30), P + 1, 5_000_000),
        ("of nothing that was said", C + 1, P + 1 + (1 << 30), 5_000_000),
        ("far ahead", C + 1, P + 1, 700 + 0x7000_0000),
    ];
    for (what, seq, ack, echo) in cases {
        let mut rewriter = accepted();
        into(&mut rewriter, &Seg::to_vm(ACK, seq, ack).ticks(10, echo));
        rewriter.take_over();
        let said = out(&mut rewriter, &Seg::from_vm(ACK, B1, C + 1).ticks(150, 10));
        assert_eq!(said.ticks, Some((10_750, 10)), "{what}");
    }
}

#[test]
fn a_connection_from_before_the_last_sync_has_its_timestamps_raised_and_nothing_else() {
    let mut rewriter = SequenceRewriter::new();
    rewriter.take_over();
    let said = out(&mut rewriter, &Seg::from_vm(ACK, 40, C).ticks(u32::MAX, 7));
    assert_eq!((said.seq, said.ticks), (40, Some((9_999, 7))));
    let heard = into(&mut rewriter, &Seg::to_vm(ACK, C, 41).ticks(8, 9_999));
    assert_eq!((heard.ack, heard.ticks), (41, Some((8, u32::MAX))));
    let plain = Seg::from_vm(ACK, 40, C).frame();
    let same = rewriter.outbound(&plain).bytes.as_ptr();
    assert_eq!(
        same,
        plain.bytes.as_ptr(),
        "without timestamps there is no change"
    );
    let syn = Seg::to_vm(SYN, C, 0).ticks(8, 9_999);
    assert_eq!(into(&mut rewriter, &syn), syn, "the echo of a SYN means nothing");
    let syn_ack = into(&mut rewriter, &Seg::to_vm(SYN | ACK, C, 41).ticks(8, 777));
    assert_eq!(
        syn_ack.ticks,
        Some((8, 0)),
        "from before the take-over or after it: nobody knows"
    );
}

#[test]
fn a_connection_that_begins_after_the_take_over_is_the_new_primarys_own() {
    let mut rewriter = accepted();
    rewriter.take_over();
    let syn_ack = out(&mut rewriter, &Seg::from_vm(SYN | ACK, 300, C + 50).ticks(200, 9));
    assert_eq!((syn_ack.seq, syn_ack.ticks), (300, Some((10_200, 9))));
    let ack = into(&mut rewriter, &Seg::to_vm(ACK, C + 50, 301).ticks(10, 10_200));
    assert_eq!((ack.ack, ack.ticks), (301, Some((10, 200))));
    assert_eq!(out(&mut rewriter, &Seg::from_vm(ACK, 301, C + 50)).seq, 301);
}

#[test]
fn a_handshake_that_a_take_over_interrupts_is_finished_in_the_numbers_that_the_client_heard() {
    // What the client heard: its ISN and its clock, then what it must hear next.
    let dead_primarys = (P, 5000, 15_000);
    let this_hosts = (B, 10_130, 10_140);
    for (heard, echo, next) in [dead_primarys, this_hosts] {
        let mut rewriter = SequenceRewriter::new();
        rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).ticks(100, 9).frame());
        rewriter.take_over();
        let again = out(&mut rewriter, &Seg::from_vm(SYN | ACK, B, C + 1).ticks(130, 9));
        assert_eq!((again.seq, again.ticks), (B, Some((10_130, 9))));
        let ack = into(
            &mut rewriter,
            &Seg::to_vm(ACK, C + 1, heard.wrapping_add(1)).ticks(10, echo),
        );
        assert_eq!((ack.ack, ack.ticks), (B1, Some((10, 130))));
        let said = out(&mut rewriter, &Seg::from_vm(ACK, B1, C + 1).ticks(140, 10));
        assert_eq!((said.seq, said.ticks), (heard.wrapping_add(1), Some((next, 10))));
    }
}

#[test]
fn an_echo_from_before_an_earlier_take_over_does_not_turn_the_clock_back() {
    let (mut primary, mut backup) = (SequenceRewriter::new(), SequenceRewriter::new());
    primary.take_over();
    backup.load(&primary.table()).unwrap();
    // The VM's SYN is older than the sync and than the take-over; the client answers what the first host said.
    let syn = Seg::from_vm(SYN, 40, 0).ticks(100, 0);
    backup.overheard(&syn.frame());
    let answer = into(&mut backup, &Seg::to_vm(SYN | ACK, C, 41).ticks(9, 90));
    assert_eq!((answer.ack, answer.ticks), (41, Some((9, 100))));
    let seen = out(&mut primary, &syn).ticks.unwrap().0;
    backup.take_over();
    let next = out(&mut backup, &Seg::from_vm(ACK, 41, C + 1).ticks(101, 9))
        .ticks
        .unwrap()
        .0;
    assert_eq!((seen, next), (10_100, 20_101));
}

#[test]
fn a_connection_that_is_over_can_repeat_its_last_word_on_every_host() {
    let mut rewriter = accepted();
    into(&mut rewriter, &Seg::to_vm(FIN | ACK, C + 1, P + 1));
    rewriter.overheard(&Seg::from_vm(FIN | ACK, B1, C + 2).frame());
    into(&mut rewriter, &Seg::to_vm(ACK, C + 2, P + 2));
    assert!(rewriter.connections.iter().all(|(_, one)| one.is_closed()));
    let mut other = SequenceRewriter::new();
    other.load(&rewriter.table()).unwrap();
    assert!(other.connections.iter().all(|(_, one)| one.is_closed()));
    for rewriter in [&mut rewriter, &mut other] {
        rewriter.take_over();
        assert_eq!(
            out(rewriter, &Seg::from_vm(ACK, B1.wrapping_add(1), C + 2)).seq,
            P + 2
        );
    }
}

#[test]
fn a_clients_end_is_believed_at_its_place_only() {
    let ends = |rewriter: &SequenceRewriter| {
        let mut other = SequenceRewriter::new();
        other.load(&rewriter.table()).unwrap();
        let (_, one) = other.connections.iter().next().expect("it is told of");
        (
            one.peer_fin.map(|fin| (fin.end, fin.acknowledged)),
            one.is_closed(),
        )
    };
    let mut rewriter = accepted();
    // The VM has said all, and the client has got it.
    rewriter.overheard(&Seg::from_vm(FIN | ACK, B1, C + 1).frame());
    into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 2));
    // Before what the VM has got.
    for seq in [C.wrapping_sub(1 << 30), C - 1] {
        into(&mut rewriter, &Seg::to_vm(FIN | ACK, seq, P + 2));
        assert_eq!(ends(&rewriter), (None, false), "{seq}");
    }
    // Behind it; but then the VM gets more than that.
    into(&mut rewriter, &Seg::to_vm(FIN | ACK, C + 11, P + 2));
    assert_eq!(ends(&rewriter), (Some((C + 12, false)), false));
    rewriter.overheard(&Seg::from_vm(ACK, B1 + 1, C + 21).frame());
    assert_eq!(ends(&rewriter), (None, false));
    into(&mut rewriter, &Seg::to_vm(FIN | ACK, C + 21, P + 2));
    rewriter.overheard(&Seg::from_vm(ACK, B1 + 1, C + 22).frame());
    assert_eq!(ends(&rewriter), (Some((C + 22, true)), true));
    // The client repeats it.
    into(&mut rewriter, &Seg::to_vm(FIN | ACK, C + 21, P + 2));
    assert_eq!(ends(&rewriter), (Some((C + 22, true)), true));
}

#[test]
fn of_connections_that_are_over_only_the_last_are_told() {
    let mut rewriter = SequenceRewriter::new();
    for port in 1000..1000 + 2 * MOST_OVER_TOLD as u16 {
        let side = |seg: Seg| Seg { port, ..seg };
        rewriter.overheard(&side(Seg::from_vm(SYN | ACK, B, C + 1)).frame());
        into(&mut rewriter, &side(Seg::to_vm(FIN | ACK, C + 1, P + 1)));
        rewriter.overheard(&side(Seg::from_vm(FIN | ACK, B1, C + 2)).frame());
        if port != 1001 {
            into(&mut rewriter, &side(Seg::to_vm(ACK, C + 2, P + 2)));
        }
    }
    let mut other = SequenceRewriter::new();
    other.load(&rewriter.table()).unwrap();
    let told: Vec<u16> = other.connections.iter().map(|(key, _)| key.peer_port).collect();
    let last = 1000 + MOST_OVER_TOLD as u16..1000 + 2 * MOST_OVER_TOLD as u16;
    assert_eq!(told, std::iter::once(1001).chain(last).collect::<Vec<_>>());
}

/// Speculation tells of all that ended lately before another copy runs.
#[test]
fn of_lifted_ones_that_are_over_only_the_last_are_told_and_many_are_forgotten() {
    let mut rewriter = SequenceRewriter::new();
    let ends = Ends {
        vm: Some(B1),
        peer: Some(C + 2),
    };
    let of = |n: u32| FlowKey {
        nic: 0,
        vlan: 0,
        vm: [10, 0, 0, 1].into(),
        peer: [10, 0, 0, 2].into(),
        vm_port: 80,
        peer_port: n as u16,
        protocol: 6,
    };
    let many = MOST_PASSING as u32 + 10;
    (0..many).for_each(|n| rewriter.lift(of(n), 1000, ends));
    assert_eq!(rewriter.connections.len(), MOST_PASSING);
    let mut other = SequenceRewriter::new();
    other.load(&rewriter.table()).unwrap();
    let told: Vec<u16> = other.connections.iter().map(|(key, _)| key.peer_port).collect();
    assert_eq!(
        told,
        (many - MOST_OVER_TOLD as u32..many)
            .map(|n| n as u16)
            .collect::<Vec<_>>()
    );
}

/// Speculation has heard the VM's end, and held the connection behind it.
#[test]
fn one_whose_first_end_was_heard_elsewhere_is_over_with_the_second() {
    let mut rewriter = SequenceRewriter::new();
    let Parsed::Tcp(last) = parse(&Seg::from_vm(ACK, B1, C + 2).frame(), Direction::FromVm) else {
        panic!("a segment")
    };
    let ends = Ends {
        vm: Some(B1),
        peer: None,
    };
    rewriter.lift(last.key, 1000, ends);
    let is_over = |rewriter: &SequenceRewriter| {
        rewriter
            .connections
            .get(&last.key)
            .is_some_and(Connection::is_over)
    };
    into(&mut rewriter, &Seg::to_vm(FIN | ACK, C + 1, B1));
    assert!(!is_over(&rewriter));
    out(&mut rewriter, &Seg::from_vm(ACK, B1, C + 2));
    assert!(is_over(&rewriter));
}

#[test]
fn connections_that_are_over_are_forgotten_when_there_are_many() {
    let mut rewriter = SequenceRewriter::new();
    for n in 0..MOST_PASSING as u32 + 10 {
        let side = |seg: Seg| Seg {
            port: 1000 + n as u16,
            ..seg
        };
        rewriter.overheard(&side(Seg::from_vm(FIN | ACK, n, 5)).frame());
        into(&mut rewriter, &side(Seg::to_vm(FIN | ACK, 5, n + 1)));
        rewriter.overheard(&side(Seg::from_vm(ACK, n + 1, 6)).frame());
    }
    assert_eq!(rewriter.connections.len(), MOST_PASSING);
}

/// Ends of connections that nobody has begun push out none that lives, and a VM that knows nothing of one says so.
#[test]
fn ends_of_connections_that_do_not_exist_are_forgotten() {
    let mut rewriter = accepted();
    let end = |n: u32| Seg {
        port: 10_000 + n as u16,
        ..Seg::to_vm(FIN | ACK, 5, 70)
    };
    for n in 0..MOST_PASSING as u32 + 10 {
        rewriter.inbound_to_backup(&end(n).frame());
    }
    assert!(rewriter.connections.len() <= MOST_PASSING + 1);
    assert_eq!(into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1)).ack, B1);
    let before = rewriter.connections.len();
    let reset = Seg {
        from_vm: true,
        ..end(MOST_PASSING as u32 + 9)
    };
    rewriter.overheard(
        &Seg {
            flags: RST,
            seq: 70,
            ack: 0,
            ..reset
        }
        .frame(),
    );
    assert_eq!(rewriter.connections.len(), before - 1);
    // A host that speaks, whose own word counts, follows none of them.
    let mut primary = SequenceRewriter::new();
    primary.inbound(&end(1).frame());
    assert!(primary.is_empty());
}

#[test]
fn the_vms_own_reset_ends_a_connection_and_a_stray_answer_does_not() {
    let mut rewriter = accepted();
    rewriter.overheard(&Seg::from_vm(RST, 123, 0).frame());
    assert!(!rewriter.is_empty());
    rewriter.overheard(&Seg::from_vm(RST, B1, 0).frame());
    assert!(rewriter.is_empty());
    rewriter.overheard(&Seg::from_vm(RST, B1, 0).frame());
    assert!(rewriter.is_empty(), "a reset begins nothing");
}

#[test]
fn a_reset_of_a_new_primary_is_said_in_the_clients_numbers() {
    let mut rewriter = accepted();
    rewriter.take_over();
    assert_eq!(out(&mut rewriter, &Seg::from_vm(RST, B1, 0)).seq, P + 1);
    assert_eq!(
        out(&mut rewriter, &Seg::from_vm(ACK, B1, 0)).seq,
        B1,
        "the connection is no more"
    );
}

/// A VM may lose the reset inside, and hears the client's stray segments then.
#[test]
fn after_a_reset_that_the_vm_must_believe_the_connection_is_over_and_translated() {
    let mut rewriter = accepted();
    rewriter.overheard(&Seg::from_vm(ACK, B1, C + 1).frame());
    let is_over = |rewriter: &SequenceRewriter| rewriter.connections.iter().all(|(_, one)| one.is_over());
    into(&mut rewriter, &Seg::to_vm(RST, C + 500, 0));
    assert!(!is_over(&rewriter));
    into(&mut rewriter, &Seg::to_vm(RST, C + 1, 0));
    assert!(is_over(&rewriter));
    let mut other = SequenceRewriter::new();
    other.load(&rewriter.table()).unwrap();
    assert!(is_over(&other));
    for rewriter in [&mut rewriter, &mut other] {
        let stray = into(rewriter, &Seg::to_vm(ACK, C + 1, P + 1));
        assert_eq!(stray.ack, B1);
        rewriter.overheard(&Seg::from_vm(SYN | ACK, 300, C + 900).frame());
        assert!(!is_over(rewriter), "the next one of this name");
    }
}

#[test]
fn a_new_backup_knows_what_the_primary_knew() {
    let other = |seg: Seg| Seg { port: 4001, ..seg };
    let mut primary = accepted();
    primary.overheard(&other(Seg::from_vm(SYN | ACK, 88, C + 1)).ticks(100, 9).frame());
    primary.take_over();
    let mut backup = accepted();
    backup.overheard(
        &Seg {
            port: 4002,
            ..Seg::from_vm(SYN | ACK, 1, C)
        }
        .frame(),
    );
    backup.load(&primary.table()).unwrap();
    assert_eq!(backup.table(), primary.table());
    let ack = Seg::to_vm(ACK, C + 1, P + 1);
    // The second one is the end of a handshake: the client answers what the first primary said.
    for seg in [ack.clone().ticks(11, 700), other(ack).ticks(11, 800)] {
        assert_eq!(into(&mut backup, &seg), into(&mut primary, &seg));
    }
    let said = out(&mut primary, &other(Seg::from_vm(ACK, 89, C + 1)).ticks(160, 11));
    assert_eq!((said.seq, said.ticks), (P + 1, Some((10_800, 11))));
    backup.take_over();
    let said = out(&mut backup, &Seg::from_vm(ACK, B1, C + 1).ticks(150, 10));
    assert_eq!((said.seq, said.ticks), (P + 1, Some((20_750, 10))));
    backup.load(&Bytes::new()).unwrap();
    assert!(backup.is_empty());
}

#[test]
fn a_bad_table_is_an_error_and_changes_nothing() {
    let mut good = accepted();
    let table = good.table();
    let cut = (1..table.len()).map(|len| table.slice(..len));
    let version = Bytes::from([&[9], &table[1..]].concat());
    let more = Bytes::from([&table[..], &[0]].concat());
    let many = Bytes::from([&table[..5], &[0xff; 4], &table[9..]].concat());
    let family = Bytes::from([&table[..14], &[5], &table[15..]].concat());
    let flags = Bytes::from([&table[..27], &[0xff; 2], &table[29..]].concat());
    for bad in cut.chain([version.clone(), more, many, family, flags]) {
        let error = good.load(&bad).unwrap_err();
        assert_eq!(error == TableError::Version, bad == version, "{error}");
        assert_eq!(good.table(), table);
    }
}

#[test]
fn the_longest_unused_goes_first() {
    let mut recent = Recent::new(3);
    let key = |port| {
        segment(
            &Seg {
                port,
                ..Seg::to_vm(ACK, 0, 0)
            }
            .frame(),
            Direction::ToVm,
        )
        .key
    };
    (1..=3).for_each(|port| recent.insert(key(port), Connection::alike()));
    recent.used(&key(1));
    recent.insert(key(4), Connection::alike());
    let left: Vec<_> = recent.iter().map(|(key, _)| key.peer_port).collect();
    assert_eq!(left, [3, 1, 4]);
    assert!(recent.get(&key(2)).is_none());
}

#[test]
fn a_flood_of_syns_pushes_out_no_connection_that_lives() {
    let mut rewriter = accepted();
    for flood in 0..5 * MOST_PASSING as u32 {
        let port = 10_000 + (flood % 50_000) as u16;
        rewriter.overheard(
            &Seg {
                port,
                ..Seg::from_vm(SYN | ACK, flood, C)
            }
            .frame(),
        );
        assert!(rewriter.connections.len() <= MOST_PASSING + 1);
    }
    assert_eq!(into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1)).ack, B1);
}

proptest! {
    /// Invariant 3: any clocks, any number of take-overs and syncs, the VM's clock falling behind at each.
    #[test]
    fn timestamps_never_go_back(
        start in any::<u32>(),
        lives in prop::collection::vec((prop::collection::vec(0_u32..500, 1..6), 0_u32..9000, 0_u8..3), 1..6),
    ) {
        let (mut rewriter, mut clock, mut seen) = (SequenceRewriter::new(), start, start);
        for (steps, behind, part) in lives {
            for step in steps {
                clock = clock.wrapping_add(step);
                let said = out(&mut rewriter, &Seg::from_vm(ACK, 1, C).ticks(clock, 5));
                let ticks = said.ticks.unwrap().0;
                prop_assert!(!before(ticks, seen), "{ticks} after {seen}");
                seen = ticks;
            }
            // Another host, whose VM's clock is behind. It may have said something since the sync, and heard the client.
            let mut backup = SequenceRewriter::new();
            backup.load(&rewriter.table()).unwrap();
            clock = clock.wrapping_sub(behind);
            if part > 0 {
                backup.overheard(&Seg::from_vm(ACK, 1, C).ticks(clock, 5).frame());
            }
            if part > 1 {
                into(&mut backup, &Seg::to_vm(ACK, C, 1).ticks(5, seen));
            }
            backup.take_over();
            rewriter = backup;
        }
    }
}
