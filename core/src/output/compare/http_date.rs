//! The `Date` of HTTP answers. Two copies of a web server that is asked all the time turn the second between other requests, and differ once a
//! second for that alone.
//!
//! Invariant: two answers are alike only if they differ in nothing but the values of such headers, each one whole in the primary's segment, a right
//! date in both copies, and no more than [`MOST_APART_S`] apart.
//!
//! Source: RFC 9110, 5.6.7 and 6.6.1. Not here: whether that is wished (`Limits::http_dates`). HTTP/2 and TLS hide the header.

use std::cmp::Ordering;

/// What comes before the value, and behind it.
const BEFORE: &[u8] = b"\r\nDate: ";
const BEHIND: &[u8] = b"\r\n";
/// `Sun, 06 Nov 1994 08:49:37 GMT`
const VALUE_BYTES: usize = 29;
/// The guests' clocks are milliseconds apart, and the one that a server shows is its own of a moment ago.
const MOST_APART_S: u64 = 2;

/// How the primary's bytes stand to the backup's of the same place, where dates that are near each other are alike: `Equal`; `Less` where the backup's
/// end before it can be told; or `Greater`.
pub(super) fn compare(primary: &[u8], backup: &[u8]) -> Ordering {
    let mut at = 0;
    loop {
        let both = primary.len().min(backup.len());
        let rest = primary[at..both].iter().zip(&backup[at..both]);
        let Some(differs) = rest.clone().position(|(ours, theirs)| ours != theirs) else {
            return primary.len().cmp(&backup.len().min(primary.len())).reverse();
        };
        let Some(value) = value_around(primary, at + differs) else {
            return Ordering::Greater;
        };
        let end = value + VALUE_BYTES;
        if !primary[end..].starts_with(BEHIND) {
            return Ordering::Greater;
        }
        if backup.len() < end + BEHIND.len() {
            return Ordering::Less;
        }
        let near = seconds(&primary[value..end])
            .zip(seconds(&backup[value..end]))
            .is_some_and(|(ours, theirs)| ours.abs_diff(theirs) <= MOST_APART_S);
        if !near || !backup[end..].starts_with(BEHIND) {
            return Ordering::Greater;
        }
        at = end;
    }
}

/// Where the value of a date begins in which this byte lies, if all of it is there.
fn value_around(bytes: &[u8], at: usize) -> Option<usize> {
    let first = (at + 1).saturating_sub(VALUE_BYTES).max(BEFORE.len());
    (first..=at)
        .filter(|value| value + VALUE_BYTES <= bytes.len())
        .find(|value| bytes[value - BEFORE.len()..*value].eq_ignore_ascii_case(BEFORE))
}

fn seconds(value: &[u8]) -> Option<u64> {
    let date = httpdate::parse_http_date(std::str::from_utf8(value).ok()?).ok()?;
    let since = date.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answer(date: &str, body: &str) -> Vec<u8> {
        format!("HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: {date}\r\nContent-Length: 3\r\n\r\n{body}")
            .into_bytes()
    }

    const THEN: &str = "Mon, 30 Nov 2026 23:59:59 GMT";
    const NEXT: &str = "Tue, 01 Dec 2026 00:00:00 GMT";

    #[test]
    fn only_dates_that_are_near_each_other_are_alike() {
        let then = answer(THEN, "abc");
        let beside = |other: Vec<u8>| compare(&then, &other);
        assert_eq!(beside(then.clone()), Ordering::Equal);
        assert_eq!(beside(answer(NEXT, "abc")), Ordering::Equal);
        assert_eq!(
            beside(answer("Tue, 01 Dec 2026 00:00:01 GMT", "abc")),
            Ordering::Equal
        );
        assert_eq!(
            beside(answer("Tue, 01 Dec 2026 00:00:02 GMT", "abc")),
            Ordering::Greater
        );
        assert_eq!(
            beside(answer("Mon, 30 Nov 2026 23:59:77 GMT", "abc")),
            Ordering::Greater
        );
        assert_eq!(beside(answer(NEXT, "abd")), Ordering::Greater);
        // Not a header of that name; and lower-case names are the same one.
        let named = |name: &str, date| [format!("HTTP/1.1 200 OK\r\n{name}: {date}\r\n").into_bytes()];
        let alike = |name| compare(&named(name, THEN)[0], &named(name, NEXT)[0]);
        assert_eq!((alike("Date"), alike("date")), (Ordering::Equal, Ordering::Equal));
        assert_eq!(alike("Last-Date"), Ordering::Greater);
        assert_eq!(alike("Expires"), Ordering::Greater);
    }

    /// Several answers in one segment, as to a client that does not wait.
    #[test]
    fn each_date_counts_for_itself() {
        let two = |first, second| [answer(first, "abc"), answer(second, "abc")].concat();
        assert_eq!(compare(&two(THEN, NEXT), &two(NEXT, THEN)), Ordering::Equal);
        let far = two(NEXT, "Tue, 01 Dec 2026 00:00:09 GMT");
        assert_eq!(compare(&two(THEN, NEXT), &far), Ordering::Greater);
    }

    #[test]
    fn what_is_cut_is_waited_for_or_differs() {
        let (ours, theirs) = (answer(THEN, "abc"), answer(NEXT, "abc"));
        let end = ours.windows(3).position(|part| part == b"GMT").unwrap() + 5;
        for cut in 0..ours.len() {
            assert_eq!(compare(&ours, &theirs[..cut]), Ordering::Less, "{cut}");
            let differs = compare(&ours[..cut], &theirs) == Ordering::Greater;
            // From the first letter of the date that differs to the line's end.
            assert_eq!(differs, (39..end).contains(&cut), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            ours in prop::collection::vec(any::<u8>(), 0..200),
            theirs in prop::collection::vec(any::<u8>(), 0..200),
            at in 0_usize..200,
        ) {
            let header = [BEFORE, THEN.as_bytes(), BEHIND].concat();
            let mut with = ours.clone();
            with.splice(at.min(ours.len())..at.min(ours.len()), header);
            for (primary, backup) in [(&ours, &theirs), (&with, &theirs), (&theirs, &with), (&with, &ours)] {
                let found = compare(primary, backup);
                if backup.starts_with(primary) {
                    prop_assert_eq!(found, Ordering::Equal);
                }
                if found == Ordering::Equal {
                    prop_assert!(backup.len() >= primary.len());
                }
            }
        }
    }
}
