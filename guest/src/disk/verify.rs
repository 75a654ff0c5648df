//! Decides: where two images of one disk differ (`dunlin verify-disk`).
//!
//! Flow: the primary holds a megabyte's range, hashes its image, and puts the question into the mirror stream before it lets
//! go; so the backup answers for exactly the same moment, though the VM runs on.
//! Invariant: a difference that is told was one, whatever the guest wrote meanwhile; what the backup cannot read counts as one.
//! Not here: which bytes the backup looks at (`Switch::read_mirrored`).

use super::{DiskError, link::Closed, primary::Primary, shared};
use bytes::Bytes;
use dunlin_core::disk::mirror::Frame;
use std::{
    collections::VecDeque,
    ops::{ControlFlow, Range},
    sync::mpsc::RecvTimeoutError,
    time::{Duration, Instant},
};

/// What is compared at once.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Questions under way.
const WINDOW: usize = 8;

/// How a comparison goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VerifyOptions {
    /// What differs is sent again.
    pub repair: bool,
    /// No more of the image is read in a second than this, one piece after the other; 0: as fast as it goes. What was not used
    /// of it is not made up for.
    pub bytes_per_s: u64,
}

impl VerifyOptions {
    fn window(self) -> usize {
        if self.bytes_per_s == 0 { WINDOW } else { 1 }
    }

    /// How long a piece takes at the least.
    fn least(self, len: u64) -> Duration {
        match self.bytes_per_s {
            0 => Duration::ZERO,
            bytes_per_s => Duration::from_secs_f64(len as f64 / bytes_per_s as f64),
        }
    }
}

/// What a comparison found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VerifyReport {
    /// Compared.
    pub bytes: u64,
    /// Megabytes that differ.
    pub different: Vec<Range<u64>>,
    /// What differs was sent again.
    pub repaired: bool,
}

/// A verification has ended, however it did.
struct Over<'a>(&'a shared::Shared);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        *self.0.hashes.lock() = None;
    }
}

impl Primary {
    pub(super) fn verify(
        &self,
        options: VerifyOptions,
        mut may_ask: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<VerifyReport, DiskError> {
        let (answer, answers) = std::sync::mpsc::channel();
        {
            let mut hashes = self.shared.hashes.lock();
            if hashes.is_some() {
                return Err(DiskError::Verifying);
            }
            *hashes = Some(answer);
        }
        let _over = Over(&self.shared);
        let size = self.shared.image.size_bytes();
        let mut report = VerifyReport {
            repaired: options.repair,
            ..VerifyReport::default()
        };
        let mut asked = VecDeque::new();
        let mut at = 0;
        let mut began = Instant::now();
        while at < size || !asked.is_empty() {
            if at < size && asked.len() < options.window() {
                if may_ask(report.bytes, size).is_break() {
                    return Err(DiskError::Stopped);
                }
                began = Instant::now();
                let end = (at + CHUNK_BYTES).min(size);
                asked.push_back((at, end - at, self.ask(at..end)?));
                at = end;
                continue;
            }
            let (offset, len, ours) = asked.pop_front().expect("the window is not empty");
            let theirs = loop {
                match answers.recv_timeout(Duration::from_millis(200)) {
                    Ok((o, l, hash)) if (o, l) == (offset, len) => break hash,
                    Ok(_of_an_earlier_run) => {}
                    Err(RecvTimeoutError::Timeout) if self.peer().0 => {}
                    Err(_) => return Err(DiskError::NoBackup),
                }
            };
            if ours != theirs {
                report.different.push(offset..offset + len);
                if options.repair {
                    self.send_again(offset..offset + len)?;
                }
            }
            report.bytes += len;
            let early = options.least(len).saturating_sub(began.elapsed());
            if !early.is_zero() && self.whole_peer()?.wait_closed(early) {
                return Err(DiskError::NoBackup);
            }
        }
        // All of it is compared: nothing is left to be stopped.
        let _ = may_ask(report.bytes, size);
        Ok(report)
    }

    fn ask(&self, range: Range<u64>) -> Result<[u8; 16], DiskError> {
        let link = self.whole_peer()?;
        let _held = self.shared.ranges.lock(range.clone());
        let len = range.end - range.start;
        let mut data = vec![0; len as usize];
        self.shared.image.read(range.start, &mut data)?;
        link.push(
            Frame::AskHash {
                offset: range.start,
                len,
            },
            Bytes::new(),
        );
        Ok(shared::hash(&data))
    }

    fn send_again(&self, range: Range<u64>) -> Result<(), DiskError> {
        let link = self.whole_peer()?;
        link.wait_room(CHUNK_BYTES)
            .map_err(|Closed(_)| DiskError::NoBackup)?;
        let _held = self.shared.ranges.lock(range.clone());
        let mut data = vec![0; (range.end - range.start) as usize];
        self.shared.image.read(range.start, &mut data)?;
        self.mirror_again(&range, data.into());
        Ok(())
    }
}
