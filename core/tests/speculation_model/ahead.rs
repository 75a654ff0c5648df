//! What a backup hears of connections: checkpoints, and parts of them that come while their epoch runs.

use super::World;
use super::plan::Broken;
use bytes::Bytes;

impl World {
    /// Some of what waits for the next cut goes ahead of it, now and then. A primary without a backup has nobody to tell,
    /// and a backup whose VM runs needs nothing.
    pub(super) fn tells_ahead(&mut self) {
        while !self.whole && !self.modes.runs && self.random.percent(30) {
            let Some(part) = self.core.ahead() else { return };
            self.seen.ahead += 1;
            self.stage(part);
        }
    }

    /// The backup hears a part of this epoch's checkpoint.
    pub(super) fn stage(&mut self, part: Bytes) {
        if self.plan.broken != Some(Broken::ForgetsAll)
            && let Err(error) = self.replica.stage(self.epoch, part)
        {
            self.fails(|| format!("C: a checkpoint is refused: {error}"));
        }
    }
}
