//! What syncs took, how long clients waited, what a program's copies said, what queues hold, what speculation does.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What one sync took. Times in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SyncFigures {
    /// How long the primary's VM was paused.
    pub pause_us: u64,
    /// Part of `pause_us`: QMP `stop`.
    pub stop_us: u64,
    /// Part of `pause_us`: saving the device state.
    pub save_us: u64,
    /// Part of `pause_us`: reading the dirty bits.
    pub scan_us: u64,
    /// Part of `pause_us`: waiting for the backup's bitmap of dirty pages.
    pub wait_us: u64,
    /// Part of `pause_us`: copying the united pages aside.
    pub copy_us: u64,
    /// Part of `pause_us`: QMP `cont`.
    pub cont_us: u64,
    /// After the pause: hashing and comparing.
    pub hash_us: u64,
    /// From the stop to the backup's acknowledgement.
    pub total_us: u64,
    /// From the stop of the sync before to the stop of this one.
    pub interval_us: u64,
    /// How long the backup took to load the sync, as it reports it.
    pub load_us: u64,
    /// Dirty pages of the primary.
    pub dirty_primary: u64,
    /// Dirty pages of the backup.
    pub dirty_backup: u64,
    /// Pages that are dirty on at least one of the two.
    pub united: u64,
    /// Pages that differed.
    pub divergent: u64,
    /// Of `united`, pages that were compared and sent before the stop. Those that were written again were sent again after it.
    #[serde(default, rename = "ahead")]
    pub pre_copied: u64,
    /// Bytes of memory sent.
    pub bytes: u64,
    /// Bytes of device state.
    pub device_bytes: u64,
    /// Hashes that were sent after the stop: one for each block of the remaining pages.
    #[serde(default)]
    pub list_hashes: u64,
    /// Hashes of a hash tree's nodes that were sent after the stop, if `sync.compare` is `tree`. If it is `list`: those that would have been sent,
    /// counted only with `sync.audit`.
    #[serde(default)]
    pub tree_hashes: u64,
    /// In how many round trips `tree_hashes` were sent.
    #[serde(default)]
    pub tree_rounds: u64,
}

impl SyncFigures {
    /// Adds another sync's figures to a sum.
    pub fn add(&mut self, other: &Self) {
        for (sum, figure) in [
            (&mut self.pre_copied, other.pre_copied),
            (&mut self.list_hashes, other.list_hashes),
            (&mut self.tree_hashes, other.tree_hashes),
            (&mut self.tree_rounds, other.tree_rounds),
            (&mut self.pause_us, other.pause_us),
            (&mut self.stop_us, other.stop_us),
            (&mut self.save_us, other.save_us),
            (&mut self.scan_us, other.scan_us),
            (&mut self.wait_us, other.wait_us),
            (&mut self.copy_us, other.copy_us),
            (&mut self.cont_us, other.cont_us),
            (&mut self.hash_us, other.hash_us),
            (&mut self.total_us, other.total_us),
            (&mut self.interval_us, other.interval_us),
            (&mut self.load_us, other.load_us),
            (&mut self.dirty_primary, other.dirty_primary),
            (&mut self.dirty_backup, other.dirty_backup),
            (&mut self.united, other.united),
            (&mut self.divergent, other.divergent),
            (&mut self.bytes, other.bytes),
            (&mut self.device_bytes, other.device_bytes),
        ] {
            *sum += figure;
        }
    }
}

/// What a program's copy on this host has read, and, on the primary, how its output compared with the backup's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProgramStatus {
    /// Outputs (frames) that were the same in both copies, while this host was the primary.
    pub matched: u64,
    /// Outputs that differed. Each costs the second copy.
    pub differing: u64,
    /// Inputs that were delivered: payloads, ends of connections, new connections.
    pub inputs: u64,
    /// Of these, the ones that were delivered while others were unread (`order = "batch"`).
    #[serde(default)]
    pub together: u64,
    /// Of all inputs, the ones that were not read within the program's patience.
    pub not_read: u64,
    /// Frames lost because too many waited to be read.
    pub lost: u64,
    /// How often the program was restarted on this host, after it had ended everywhere.
    #[serde(default)]
    pub begun_again: u64,
}

/// How long clients waited for the VM in the last second, from their payload's arrival at this host to the VM's next frame out on the same connection:
/// by a sample of connections. Times in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnswerFigures {
    /// How many waits were measured.
    pub samples: u64,
    /// The median.
    pub p50_us: u64,
    /// The 99th percentile; with few waits, the longest.
    pub p99_us: u64,
}

/// One queue of a VM on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueFigures {
    /// The queue's name.
    pub name: String,
    /// How many bytes it holds.
    pub bytes: u64,
    /// How many bytes it may hold.
    pub limit_bytes: u64,
    /// How many frames or messages found no room.
    pub dropped: u64,
}

impl QueueFigures {
    /// Of what it holds, may hold, and had no room for.
    #[must_use]
    pub fn new(name: &str, (bytes, limit_bytes, dropped): (usize, usize, u64)) -> Self {
        Self {
            name: name.to_owned(),
            bytes: bytes as u64,
            limit_bytes: limit_bytes as u64,
            dropped,
        }
    }
}

/// What speculation does for a VM's connections (docs/speculation.md).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpeculationFigures {
    /// Connections that are known now.
    pub connections: u64,
    /// Connections that began with a shadow socket.
    pub begun: u64,
    /// Connections without one, whose output is held as without speculation: unusual ones, or those beyond a limit.
    pub held: u64,
    /// Connections that a shadow socket gave up.
    pub failed: u64,
}
