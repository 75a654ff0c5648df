//! Are the two hosts' images the same disk? (`dunlin verify-disk`, and the schedule of the VM's file.)
//!
//! Each disk's port compares itself with its peer while the VM runs (the guest's `disk::verify`); here the disks are gone
//! through, and what they say becomes one answer. Not here: who asks and when (`care`), and where the progress is shown.

use super::disks::Disks;
use crate::events::now_ms;
use dunlin_api::{Answer, EventKind, Progress, Verified};
use dunlin_guest::disk::{COMPARED_AT_ONCE, VerifyOptions};
use std::ops::ControlFlow;

/// The exit code for images that differ.
const DIFFERENT: i32 = 4;
/// Places that are named in the answer.
const MOST_PLACES: usize = 4;

/// How a comparison ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compared {
    /// All of it was compared.
    Whole(Verified),
    /// Why it was not.
    Not(String),
}

impl Compared {
    /// The event's kind and its text.
    pub fn event(&self) -> (EventKind, &str) {
        match self {
            Self::Whole(verified) if verified.differing == 0 => (EventKind::DisksEqual, &verified.text),
            Self::Whole(verified) => (EventKind::DisksDiffer, &verified.text),
            Self::Not(why) => (EventKind::DisksNotCompared, why),
        }
    }

    /// What a person hears who asked for it.
    pub fn answer(&self) -> Answer {
        match self {
            Self::Whole(verified) if verified.differing == 0 => Answer::done(verified.text.clone()),
            Self::Whole(verified) => Answer::Failed {
                why: verified.text.clone(),
                code: DIFFERENT,
            },
            Self::Not(why) => Answer::failed(why.clone()),
        }
    }
}

/// Compares all disks; `may_ask` is told how far it is before each piece, and may wait or end it.
pub fn run(
    disks: &Disks,
    options: VerifyOptions,
    scheduled: bool,
    mut may_ask: impl FnMut(Progress) -> ControlFlow<()>,
) -> Compared {
    let total: u64 = disks.all().iter().map(|disk| disk.size_bytes()).sum();
    let began_ms = now_ms();
    let (mut before, mut places, mut different, mut extents) = (0, Vec::new(), 0, 0);
    for (number, disk) in disks.all().iter().enumerate() {
        let compared = disk.verify(options, |done, _| {
            may_ask(Progress {
                what: "comparing disks".into(),
                done: before + done,
                total,
            })
        });
        let report = match compared {
            Ok(report) => report,
            Err(error) => return Compared::Not(format!("disk {number} could not be compared: {error}")),
        };
        before += report.bytes;
        extents += report.bytes.div_ceil(COMPARED_AT_ONCE);
        different += report.different.len();
        places.extend(
            report
                .different
                .iter()
                .map(|range| format!("disk {number} at {} MiB", range.start >> 20))
                .take(MOST_PLACES + 1),
        );
    }
    let text = if different == 0 {
        format!(
            "the disks are equal: {} of {} MiB compared, {} disks",
            before >> 20,
            total >> 20,
            disks.all().len()
        )
    } else {
        let more = if places.len() > MOST_PLACES { ", ..." } else { "" };
        places.truncate(MOST_PLACES);
        let mend = if options.repair {
            "what differs was sent again: run it once more after the next sync"
        } else {
            "'dunlin verify-disk --repair' sends it again"
        };
        format!(
            "the disks differ in {different} places of 1 MiB ({}{more}); {mend}",
            places.join(", ")
        )
    };
    Compared::Whole(Verified {
        began_ms,
        ended_ms: now_ms(),
        scheduled,
        extents,
        differing: different as u64,
        repaired: options.repair && different > 0,
        text,
    })
}
