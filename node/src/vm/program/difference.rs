//! What is told of outputs that differ: where, to everybody; what both copies said there, to operators; and how many there were.
//!
//! Decides:    what of a difference is in an event. An event has the connection, the place and the kind, and no byte of what was said: it is
//!             an answer to a client, as secret as the question. Viewers read events, `notify_url` gets them, and the daemon writes them to a
//!             file. The bytes are for whoever may read what the program prints (`dunlin logs --differences`), and in memory alone.
//! Flow:       core's `output::compare` finds the first one -> the backup is dropped -> event, and [`Differences`].
//! Invariants: 1. (memory) the last [`KEPT`] are kept, each of 32 bytes of what was said; 2. no counter goes back while the loop runs.
//! Not here:   the comparison (core's `output`); who may ask (`daemon::roles`).

use crate::events::{now_ms, utc};
use dunlin_core::output::compare::{Counters, Difference, Place};
use dunlin_core::output::packet::FlowKey;
use dunlin_program::report::hexdump;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::SocketAddr;

const KEPT: usize = 16;

/// The last differences, as text, the newest last.
#[derive(Default)]
pub(crate) struct Differences(VecDeque<String>);

impl Differences {
    pub(super) fn add(&mut self, text: String) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(text);
    }

    /// All of them.
    pub(crate) fn text(&self) -> String {
        Vec::from_iter(self.0.iter().map(String::as_str)).join("\n")
    }
}

/// What was compared, over all second copies that this one had.
#[derive(Default)]
pub(super) struct Compared {
    past: Counters,
    now: Counters,
}

impl Compared {
    /// What the comparison has counted, if there is one.
    pub(super) fn saw(&mut self, counters: Option<&Counters>) {
        let counters = counters.copied().unwrap_or_default();
        let goes_on = counters.matched >= self.now.matched
            && counters.free >= self.now.free
            && counters.differences() >= self.now.differences();
        if !goes_on {
            // It has ended, and there may be another one.
            self.past += self.now;
        }
        self.now = counters;
    }

    /// In all.
    pub(super) fn total(&self) -> Counters {
        let mut total = self.past;
        total += self.now;
        total
    }
}

/// Who speaks with whom.
pub(super) fn between(flow: &FlowKey) -> String {
    let client = SocketAddr::new(flow.peer, flow.peer_port);
    format!("to {client} from port {}", flow.vm_port)
}

/// Where it is, without a byte of what was said.
pub(super) fn where_it_is(place: &Place) -> String {
    let what = match (place.why, place.from_beginning) {
        (Difference::Datagram, _) => "of a datagram",
        (_, true) => "of the connection",
        (_, false) => "of what was compared of the connection, which is older",
    };
    let ends = match place.why {
        Difference::Flags => "; one copy ends it there",
        Difference::Ends => "; the copies end it there in different ways",
        _ => "",
    };
    format!(
        "{}, after {} bytes that are alike {what}{ends}",
        between(&place.flow),
        place.at_byte
    )
}

/// All of it.
pub(super) fn told(place: &Place, primary: &str, backup: &str) -> String {
    let mut text = format!("{}: {}\n", utc(now_ms()), where_it_is(place));
    for (host, bytes) in [(primary, &place.primary), (backup, &place.backup)] {
        // A String takes everything: here and below.
        let _ = writeln!(text, "  the copy on host '{host}' says there:");
        if bytes.is_empty() {
            let _ = writeln!(text, "    nothing");
        }
        for line in hexdump(bytes, usize::try_from(place.at_byte).unwrap_or_default()) {
            let _ = writeln!(text, "    {line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn place() -> Place {
        Place {
            flow: FlowKey {
                nic: 0,
                vlan: 0,
                vm: [10, 0, 0, 2].into(),
                peer: [10, 0, 0, 9].into(),
                vm_port: 6379,
                peer_port: 40_000,
                protocol: 6,
            },
            why: Difference::Bytes,
            at_byte: 9,
            from_beginning: true,
            primary: Bytes::from_static(b"hunter2\r\n"),
            backup: Bytes::new(),
        }
    }

    #[test]
    fn an_event_tells_where_outputs_differ_and_no_byte_of_them() {
        assert_eq!(
            where_it_is(&place()),
            "to 10.0.0.9:40000 from port 6379, after 9 bytes that are alike of the connection"
        );
        let older = Place {
            from_beginning: false,
            why: Difference::Flags,
            ..place()
        };
        assert_eq!(
            where_it_is(&older),
            "to 10.0.0.9:40000 from port 6379, after 9 bytes that are alike of what was compared of the connection, which is older; one copy \
             ends it there"
        );
    }

    #[test]
    fn what_both_said_there_is_told_to_operators_and_the_last_ones_are_kept() {
        let text = told(&place(), "a", "b");
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  the copy on host 'a' says there:",
                "    000009  68 75 6e 74 65 72 32 0d 0a                       |hunter2..|",
                "  the copy on host 'b' says there:",
                "    nothing",
            ]
        );
        let mut kept = Differences::default();
        (0..3 * KEPT).for_each(|n| kept.add(format!("{n}\n")));
        assert_eq!(kept.0.len(), KEPT);
        assert!(kept.text().ends_with("47\n"));
    }

    #[test]
    fn counters_go_on_over_one_second_copy_after_the_other() {
        let of = |matched, bytes| Counters {
            matched,
            bytes,
            ..Counters::default()
        };
        let mut compared = Compared::default();
        for counters in [
            Some(of(5, 0)),
            Some(of(7, 1)),
            None,
            None,
            Some(of(2, 0)),
            Some(of(3, 0)),
        ] {
            compared.saw(counters.as_ref());
        }
        assert_eq!(compared.total(), of(10, 1));
        compared.saw(Some(&of(1, 0)));
        assert_eq!(compared.total(), of(11, 1), "another one at once");
    }
}
