//! A checkpoint of a running VM's memory on the standby's host, made every so many seconds out of the backup's copy (`standby_checkpoint`).
//!
//! Flow: each second the daemon looks whether this host has a VM's whole second copy, and a standby to feed ([`VmHandle::feed_standby`](super::VmHandle::feed_standby)) -> [`Feeder`], a thread of its own: pages whose hash
//! is another one than the last time -> the standby's daemon ([`receiver`]) -> [`HeldMemory`](super::held_memory::HeldMemory).
//!
//! Stream: `Join` with the number of pages; `Holds` and `JoinReady`, or `Refused`; then each round `Pages`, `JoinLast` with its number, and
//! `Staged` in answer. It is a join that goes on, and never ends with a VM.
//!
//! Invariants:
//! 1. The primary has no part in it, and no VM stands still for it: pages are read while the backup's VM runs. What is torn by that is found at the
//!    join, where every page is compared.
//! 2. Only the hosts of the cluster are heard, and what they feed is nobody's VM (`held_memory`).
//!
//! Source: GAIA proposal 2.3.1; why the standby does not run from it: docs/replica.md, "A standby".

mod feeder;
pub mod receiver;

pub use feeder::{Feeder, Feeds};

use super::session::Broken;
use crate::config::Standby;
use dunlin_core::wire::sync::{SyncMessage, encode};
use dunlin_fabric::link::WriteHalf;
use std::io::Write;
use std::time::Duration;

/// How long either side waits for the other's next message in a round, or for it to take one.
const PATIENCE: Duration = Duration::from_secs(30);

/// A checkpoint is held for so long after the next round is due and a standby has waited before it takes a part.
const HELD_BEYOND: Duration = Duration::from_secs(3600);

fn send(half: &mut WriteHalf, message: &SyncMessage) -> Result<(), Broken> {
    let mut buffer = bytes::BytesMut::new();
    let encoded = encode(message, &mut buffer).map_err(std::io::Error::other);
    encoded
        .and_then(|()| half.write_all(&buffer))
        .and_then(|()| half.flush())
        .map_err(|error| Broken::new("the checkpoint's stream", error))
}

/// What the receiver has to know beside the VM: how often it is fed, and for how long it holds what it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Terms {
    every: Duration,
    held: Duration,
}

impl Terms {
    /// What is fed as often to this one.
    fn of(standby: &Standby, every: Duration) -> Self {
        Self {
            every,
            held: every + standby.after + HELD_BEYOND,
        }
    }

    fn encode(self) -> Vec<u8> {
        [self.every, self.held]
            .iter()
            .flat_map(|time| time.as_secs().to_be_bytes())
            .collect()
    }

    /// None: another build's.
    fn decode(extra: &[u8]) -> Option<Self> {
        let (every, rest) = extra.split_first_chunk::<8>()?;
        let held: &[u8; 8] = rest.try_into().ok()?;
        /// A week: longer than anything that a VM's file may say.
        const MOST_S: u64 = 7 * 86_400;
        let seconds = |bytes: &[u8; 8]| Duration::from_secs(u64::from_be_bytes(*bytes).min(MOST_S));
        Some(Self {
            every: seconds(every),
            held: seconds(held),
        })
    }
}

#[cfg(test)]
mod tests;
