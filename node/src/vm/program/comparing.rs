//! What the loop tells of outputs that differ.
//!
//! Not here: what of a difference is told to whom (`difference`), the comparison (core's `output`).

use super::difference::{between, told, where_it_is};
use super::state::ProgramLoop;

impl ProgramLoop {
    /// The backup's copy has said something else: why it is dropped. The bytes go where operators see them.
    pub(super) fn tell_difference(&self) -> String {
        let counters = self.counters();
        let place = self.net.output.differs_at().cloned();
        let place_told = place.as_ref().map_or_else(String::new, |place| {
            format!(
                " {} ('dunlin logs --differences {}' on this host shows what both said there)",
                where_it_is(place),
                self.config.name
            )
        });
        if let Some(place) = place {
            let backup = self.other().map_or("?", |other| self.config.host_name(other));
            let text = told(&place, &self.host.name, backup);
            let mut kept = self.shared.differences.lock();
            kept.add(text);
        }
        format!(
            "its copy has said something else{place_told} (after {} outputs that were alike; differences in bytes {}, ends {}, datagrams {}, \
             not understood {}): 'dunlin program check' shows what differs",
            counters.matched, counters.bytes, counters.flags, counters.datagrams, counters.not_understood
        )
    }

    /// Which connection waits for the backup's word.
    pub(super) fn told_who_waits(&self) -> String {
        let flow = self.net.output.waits_on();
        flow.map_or_else(String::new, |flow| format!(" {}", between(&flow)))
    }
}
