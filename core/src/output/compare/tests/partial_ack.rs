//! What a client hears where the backup has got less of its bytes than the primary.

use super::*;
use crate::output::packet::testing::{Seg, checksum_is_right};

/// An acknowledgement at this time of the VM's clock.
fn ack(ack: u32, ticks: u32, window: u16) -> Seg {
    let plain = Seg::from_vm(ACK, 500, ack).ticks(ticks, 77);
    Seg { window, ..plain }
}

impl Both {
    /// The client was told that everything before 1,000 has arrived.
    fn told_1000() -> Self {
        let mut both = Self::new();
        both.primary(ack(1000, 10, 90).frame()).sync();
        assert_eq!(both.out(), []);
        both
    }

    /// What is told next as partial acknowledgements, and that nothing else is.
    fn only_partial(&mut self) -> Vec<Seg> {
        assert_eq!(self.out(), []);
        let said = std::mem::take(&mut self.partial);
        for frame in &said {
            assert!(checksum_is_right(frame, Direction::FromVm));
        }
        said.iter()
            .map(|frame| Seg::read(frame, Direction::FromVm))
            .collect()
    }
}

#[test]
fn a_client_is_told_what_the_backup_has_got_in_the_primarys_numbers() {
    let mut both = Both::told_1000();
    both.primary(ack(5000, 20, 80).frame());
    assert_eq!(both.only_partial(), []);
    // One that lags by its clock, and has less room.
    both.backup(
        Seg {
            seq: 499,
            ..ack(2000, 13, 60)
        }
        .frame(),
    );
    assert_eq!(both.only_partial(), [ack(2000, 20, 60)]);
    // It has room again, more than the primary.
    both.backup(ack(2000, 14, 95).frame());
    assert_eq!(both.only_partial(), [ack(2000, 20, 80)]);
    both.backup(ack(5000, 15, 95).frame());
    assert_eq!(both.out(), [1], "then the primary's own leaves");
    assert_eq!(both.partial, []);
}

#[test]
fn a_loss_inside_the_backup_is_told_as_any_loss_with_the_blocks_that_it_has() {
    let mut both = Both::told_1000();
    both.primary(ack(3000, 20, 80).frame())
        .primary(ack(9000, 21, 80).frame());
    let lost = |from, to| Seg {
        sack: vec![(from, to)],
        ..ack(1000, 15, 80)
    };
    both.backup(lost(2000, 4000).frame());
    let told = |seg: Seg| Seg {
        ticks: ack(0, 20, 0).ticks,
        ..seg
    };
    assert_eq!(both.only_partial(), [told(lost(2000, 4000))]);
    both.backup(lost(2000, 9000).frame());
    assert_eq!(both.only_partial(), [told(lost(2000, 9000))]);
    // The primary has not got that far: what is lost in it, too, would never be sent again.
    both.backup(lost(2000, 9001).frame());
    assert_eq!(both.only_partial(), [told(lost(2000, 9000))]);
    // The client has sent what was lost.
    both.backup(ack(9000, 16, 80).frame());
    assert_eq!(both.out(), [1, 2]);
    assert_eq!(both.partial, []);
}

/// The network has lost what begins at 5,000, to both, and the backup's card what begins at 1,000.
#[test]
fn blocks_behind_a_loss_that_the_primary_has_too_are_not_told_and_the_others_are() {
    let mut both = Both::told_1000();
    both.primary(ack(5000, 20, 80).frame());
    let has = |sack: &[(u32, u32)]| Seg {
        sack: sack.to_vec(),
        ..ack(1000, 15, 80)
    };
    let told = |seg: Seg| Seg {
        ticks: ack(0, 20, 0).ticks,
        ..seg
    };
    both.backup(has(&[(6000, 9000), (2000, 5000)]).frame());
    assert_eq!(both.only_partial(), [told(has(&[(2000, 5000)]))]);
    both.backup(has(&[(6000, 9000), (2000, 3000), (4000, 4500)]).frame());
    assert_eq!(both.only_partial(), [told(has(&[(2000, 3000), (4000, 4500)]))]);
    both.backup(has(&[(5000, 9000)]).frame());
    assert_eq!(both.only_partial(), [told(has(&[]))], "that it lacks something");
}

#[test]
fn what_a_client_knows_or_the_primary_has_not_said_is_not_told() {
    let mut both = Both::told_1000();
    both.backup(ack(2000, 11, 80).frame());
    assert_eq!(both.only_partial(), [], "nothing of the primary's waits");
    both.primary(ack(2000, 20, 80).frame());
    assert_eq!(both.out(), [1]);
    both.primary(ack(3000, 21, 80).frame());
    both.backup(ack(1500, 12, 80).frame());
    assert_eq!(both.only_partial(), [], "an old one");
    both.backup(Seg::from_vm(ACK, 500, 2500).frame());
    assert_eq!(
        both.only_partial(),
        [],
        "without a timestamp the client would throw it away"
    );
    both.backup(ack(2500, 12, 80).with(b"other bytes").frame());
    assert_eq!(both.only_partial(), [], "it says more than that");
}

#[test]
fn a_connection_that_differs_or_has_ended_in_the_backup_says_nothing() {
    let mut both = Both::told_1000();
    both.primary(ack(2000, 20, 80).with(b"one").frame());
    both.backup(ack(1500, 12, 80).with(b"two").frame());
    assert_eq!(both.why(), Some(Difference::Bytes));
    both.backup(ack(1600, 12, 80).frame());
    assert_eq!(both.only_partial(), []);

    let mut both = Both::told_1000();
    both.primary(ack(2000, 20, 80).frame());
    both.backup(Seg::from_vm(RST | ACK, 500, 1500).ticks(12, 77).frame());
    both.backup(ack(1600, 12, 80).frame());
    assert_eq!(both.only_partial(), []);
}

#[test]
fn on_a_connection_that_begins_in_both_it_is_at_the_primarys_place() {
    let mut both = Both::new();
    let syn = |seq, ticks| Seg::from_vm(SYN | ACK, seq, 51).ticks(ticks, 7);
    both.primary(syn(100, 30).frame()).backup(syn(9000, 5).frame());
    assert_eq!(both.out(), [0]);
    both.primary(Seg::from_vm(ACK, 101, 200).ticks(31, 7).frame());
    both.backup(Seg::from_vm(ACK, 9001, 120).ticks(6, 7).frame());
    assert_eq!(both.only_partial(), [Seg::from_vm(ACK, 101, 120).ticks(31, 7)]);
}

/// A guest says one after the other while nobody may speak.
#[test]
fn partial_acknowledgements_that_wait_to_leave_are_bounded() {
    let mut both = Both::told_1000();
    both.primary(ack(9000, 20, 80).frame());
    for _ in 0..MOST_PARTIAL_ACKS + 500 {
        both.backup(ack(1000, 11, 80).frame());
    }
    assert_eq!(both.only_partial().len(), MOST_PARTIAL_ACKS);
    both.backup(ack(2000, 12, 80).frame());
    assert_eq!(both.only_partial(), [ack(2000, 20, 80)], "there is room again");
}

/// The sync's acknowledgement comes with the backup's last words of the epoch: the primary's own leaves first then, and what else the sync
/// lets out. An older timestamp after that would go back.
#[test]
fn a_partial_acknowledgement_that_a_sync_has_overtaken_is_not_told() {
    let mut both = Both::told_1000();
    both.primary(ack(5000, 20, 80).frame())
        .backup(ack(2000, 13, 60).frame())
        .sync();
    assert_eq!(both.only_partial(), []);
    both.primary(ack(6000, 30, 80).frame())
        .backup(ack(5500, 25, 80).frame());
    assert_eq!(both.only_partial(), [ack(5500, 30, 80)]);
}
