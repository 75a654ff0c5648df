//! Answers of a web server whose two copies turn the second between other requests.

use super::*;

fn copies(http_dates: bool) -> Both {
    Both::with(Limits {
        buffer_bytes: 1 << 20,
        flows: 100,
        http_dates,
    })
}

fn answer(second: u8) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 2026 08:59:0{second} GMT\r\n\r\nabc").into_bytes()
}

#[test]
fn they_are_alike_where_that_is_wished_and_differ_otherwise() {
    for wished in [false, true] {
        let mut both = copies(wished);
        both.primary(tcp(1, 100, 7, ACK, &answer(1)));
        // In parts, as the other copy cuts it.
        both.backup(tcp(1, 100, 7, ACK, &answer(2)[..30]));
        assert_eq!(both.why(), None);
        both.backup(tcp(1, 130, 7, ACK, &answer(2)[30..]));
        let found = (both.out(), both.why());
        assert_eq!(
            found,
            match wished {
                true => (vec![0], None),
                false => (vec![], Some(Difference::Bytes)),
            }
        );
    }
}

/// What is told is told: when it is said again, by whichever copy, there is nothing left to compare.
#[test]
fn the_stream_goes_on_behind_it() {
    let mut both = copies(true);
    let (ours, theirs) = (answer(1), answer(2));
    let end = 100 + ours.len() as u32;
    both.backup(tcp(1, 100, 7, ACK, &theirs))
        .backup(tcp(1, end, 7, ACK, b"next"));
    both.primary(tcp(1, 100, 7, ACK, &ours))
        .primary(tcp(1, 100, 7, ACK, &ours))
        .primary(tcp(1, end, 7, ACK, b"next"));
    assert_eq!((both.out(), both.why()), (vec![0, 1, 2], None));
    both.primary(tcp(1, end + 4, 7, ACK, b"mine"))
        .backup(tcp(1, end + 4, 7, ACK, b"yours"));
    assert_eq!(both.why(), Some(Difference::Bytes));
}

/// A part of it was told already: what else would be told of it may not go with that.
#[test]
fn a_date_that_is_cut_differs() {
    let mut both = copies(true);
    let (ours, theirs) = (answer(1), answer(2));
    both.backup(tcp(1, 100, 7, ACK, &theirs));
    both.primary(tcp(1, 100, 7, ACK, &ours[..40]));
    assert_eq!(both.out(), [0]);
    both.primary(tcp(1, 140, 7, ACK, &ours[40..]));
    assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Bytes)));
}
