//! `dunlin verify-disk`: are the two hosts' images the same disk?
//!
//! Each disk's port compares itself with its peer while the VM runs (the guest's `disk::verify`); here the disks are gone
//! through, and what they say becomes one answer. Not here: who asks, and where the progress is shown.

use super::disks::Disks;
use crate::control::{Answer, Progress};
use std::time::{Duration, Instant};

/// The exit code for images that differ.
const DIFFERENT: i32 = 4;
/// Progress is told no more often than this, and no more rarely: a link on which nothing is said is hung up on.
const TELL: Duration = Duration::from_millis(200);
/// Places that are named in the answer.
const MOST_PLACES: usize = 4;

/// Compares all disks; returns the event's kind and the last answer.
pub fn run(disks: &Disks, repair: bool, mut progress: impl FnMut(Progress)) -> (&'static str, Answer) {
    let total: u64 = disks.all().iter().map(|disk| disk.size_bytes()).sum();
    let (mut before, mut places, mut different) = (0, Vec::new(), 0);
    let mut told = Instant::now();
    for (number, disk) in disks.all().iter().enumerate() {
        let compared = disk.verify(repair, |done, _| {
            if told.elapsed() >= TELL || before + done == total {
                told = Instant::now();
                progress(Progress {
                    what: "comparing disks".into(),
                    done: before + done,
                    total,
                });
            }
        });
        let report = match compared {
            Ok(report) => report,
            Err(error) => {
                let why = format!("disk {number} could not be compared: {error}");
                return ("disks-not-compared", Answer::failed(why));
            }
        };
        before += report.bytes;
        different += report.different.len();
        places.extend(
            report
                .different
                .iter()
                .map(|range| format!("disk {number} at {} MiB", range.start >> 20)),
        );
    }
    if different == 0 {
        let text = format!(
            "the disks are equal: {} of {} MiB compared, {} disks",
            before >> 20,
            total >> 20,
            disks.all().len()
        );
        return ("disks-equal", Answer::done(text));
    }
    let more = if places.len() > MOST_PLACES { ", ..." } else { "" };
    places.truncate(MOST_PLACES);
    let mend = if repair {
        "what differs was sent again: run it once more after the next sync"
    } else {
        "'dunlin verify-disk --repair' sends it again"
    };
    let why = format!(
        "the disks differ in {different} places of 1 MiB ({}{more}); {mend}",
        places.join(", ")
    );
    ("disks-differ", Answer::Failed { why, code: DIFFERENT })
}
