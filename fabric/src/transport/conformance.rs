//! What it decides: whether a backend keeps the transport's invariants. One suite for all of them, also for backends
//! outside this crate: implement [`Bed`] and call [`run`].
//!
//! **Flow**: `fabric/tests/conformance.rs` runs it over `shm`, `tcp`, `tcp+tls`, and over [`Lying`], which tears, reorders,
//! repeats and delays writes on purpose: rings and words must believe nothing wrong even there.
//! **Invariants**: each check names the transport's invariant that it tries to break, and panics if it succeeds.
//! **Not here**: performance.

mod checks;
mod lying;

pub use checks::{
    a_dead_peer_is_noticed, a_full_ring_pushes_back, a_reconnected_link_starts_afresh, a_sleeper_is_woken,
    entries_are_believed_only_whole, no_payload_poses_as_an_entry, nothing_lands_after_revoke,
    stale_writes_are_never_read, words_only_grow,
};
pub use lying::{Lies, Lying};

use super::{RegionId, Transport, TransportError};
use crate::link::Stream;
use std::time::{Duration, Instant};

/// Makes connected pairs of the transport under test.
pub trait Bed {
    /// For messages.
    fn name(&self) -> String;
    /// Two connected ends.
    fn pair(&mut self) -> (Box<dyn Transport>, Box<dyn Transport>);
    /// Two connected streams for `reconnect`; `None` if the backend has no use for streams.
    fn streams(&mut self) -> Option<(Stream, Stream)>;
}

/// The whole suite. Panics with the name of the backend and of the broken invariant.
pub fn run(bed: &mut dyn Bed) {
    entries_are_believed_only_whole(bed, 20_000);
    no_payload_poses_as_an_entry(bed);
    a_full_ring_pushes_back(bed);
    words_only_grow(bed);
    stale_writes_are_never_read(bed);
    nothing_lands_after_revoke(bed);
    a_dead_peer_is_noticed(bed);
    a_sleeper_is_woken(bed);
    a_reconnected_link_starts_afresh(bed);
}

/// The region that the checks use.
const R: RegionId = RegionId(1);

/// Progress on both until `done`, at most ten seconds.
fn until(
    a: &mut dyn Transport,
    b: &mut dyn Transport,
    what: &str,
    mut done: impl FnMut(&mut dyn Transport, &mut dyn Transport) -> bool,
) {
    let started = Instant::now();
    while !done(a, b) {
        a.progress(1 << 20).unwrap_or_else(|e| panic!("{what}: {e}"));
        b.progress(1 << 20).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "{}: {what}: did not happen in time",
            a.fabric()
        );
    }
}

/// `b` opens `bytes` of memory and `a` has seen the grant.
fn open(a: &mut dyn Transport, b: &mut dyn Transport, epoch: u64, bytes: usize) {
    b.register(R, epoch, bytes).expect("register");
    until(a, b, "a grant arrives", |a, _| {
        a.granted(R).is_some_and(|g| g.epoch == epoch)
    });
}

/// A payload that differs for every `n`, of a length that varies.
fn payload(n: u64, max: usize) -> Vec<u8> {
    let mut state = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let len = (state >> 40) as usize % max;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect()
}

/// Polls until the transport says that the peer is gone.
fn until_closed(t: &mut dyn Transport) {
    let started = Instant::now();
    loop {
        match t.progress(1 << 20) {
            Err(TransportError::Closed(_)) => return,
            Err(e) => panic!("{}: expected Closed, got: {e}", t.fabric()),
            Ok(_) => assert!(
                started.elapsed() < Duration::from_secs(5),
                "{}: a dead peer was not noticed",
                t.fabric()
            ),
        }
    }
}
