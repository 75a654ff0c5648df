//! What reaches the image: committed syncs, and between them what both VMs wrote alike.
//!
//! Decides: what is written next. Flow: the flusher thread: [`Backup::flush_loop`], until the backup stops.
//! Invariants: B1 of [`super`].
//! Not here: which bytes are where (`dunlin_core::disk::Switch`), the journal (`shared`).

use super::receiver::cannot_be;
use super::*;

impl Backup {
    pub(super) fn flush_loop(&self, link: &Link) {
        enum Work {
            Settle(Epoch, Arc<Buffer>, Option<[u8; 16]>, Term),
            Light(u64),
        }
        loop {
            let work = {
                let mut state = self.lock();
                loop {
                    if state.stop || state.failed.is_some() {
                        return;
                    }
                    // Disks that move together move sync by sync.
                    if self.shared.group.is_none() {
                        state.switch.join_settled();
                    }
                    if let Some((epoch, buffer)) = state.switch.next_settled() {
                        break Work::Settle(epoch, buffer, state.next_pair, state.term);
                    }
                    if let Some(from) = state.light.take() {
                        break Work::Light(from);
                    }
                    state = self.wait(state);
                }
            };
            let done = match work {
                Work::Settle(epoch, buffer, pair, term) => {
                    let stopped = || self.lock().stop;
                    self.shared
                        .settle(term, epoch, &buffer, pair, &stopped)
                        .map(|()| {
                            let mut state = self.lock();
                            state.switch.settled(epoch);
                            while state.committed_at.front().is_some_and(|(at, _)| *at <= epoch) {
                                let (_, at) = state.committed_at.pop_front().expect("front exists");
                                state.settles += 1;
                                state.settle_ns += at.elapsed().as_nanos() as u64;
                            }
                            self.shared.owes(state.committed_at.len());
                            self.shared.gets_on();
                            state.next_pair = None;
                            drop(state);
                            link.push(Frame::Committed { epoch }, Bytes::new());
                            self.shared.event(DiskEvent::Committed { epoch });
                        })
                }
                Work::Light(from) => {
                    let begun = Instant::now();
                    let done = self.light_pass(from);
                    self.lock().light_ns += begun.elapsed().as_nanos() as u64;
                    done
                }
            };
            if let Err(error) = done {
                if error.kind() == io::ErrorKind::Interrupted && self.lock().stop {
                    return;
                }
                if let Some(member) = &self.shared.group {
                    member.group.fail(&error.to_string());
                }
                let reason = cannot_be("written")(error).to_string();
                self.lock().failed = Some(reason.clone());
                link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
                self.shared.event(DiskEvent::BackupFailed { reason });
            }
            self.changed.notify_all();
        }
    }

    /// One step of algorithm 1, on at most [`HASH_BYTES`]; asks for the next one itself.
    /// "If the sector in the PVM buffer has the same hash value as the same-indexed sector in the SVM buffer, then we can
    /// safely flush this sector into the secondary storage and free the corresponding memory space" (V).
    fn light_pass(&self, from: u64) -> io::Result<()> {
        let (pieces, term, seen_at) = {
            let state = self.lock();
            let pieces = state.switch.in_both(from, HASH_BYTES);
            (pieces, state.term, state.switch.committed())
        };
        let Some(last) = pieces.last() else { return Ok(()) };
        let next = last.offset + last.ours.len();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let verdicts = on_threads(&pieces, cores, Piece::is_equal);
        self.lock()
            .switch
            .compared(pieces.iter().map(|piece| piece.ours.len()).sum());
        // A long trim in both buffers holds no memory, and what it hides on the image would have to go through the journal.
        let equal: Vec<_> = pieces
            .into_iter()
            .zip(verdicts)
            .filter_map(|(piece, equal)| (equal && piece.ours.len() <= LIGHT_BYTES).then_some(piece))
            .collect();
        let batch = first_batch(&equal);
        // Where a batch is cut off, the rest is compared anew, which is nothing beside its way to the disk: what is cut out of a
        // run moves the rest of it, and a sync that comes in between must not make all of it be in vain.
        let next = match batch.last() {
            Some(last) if batch.len() < equal.len() => last.offset + last.ours.len(),
            _ => next,
        };
        let overtaken = |state: &State| state.stop || state.switch.committed() != seen_at;
        if overtaken(&self.lock()) {
            return Ok(());
        }
        if !batch.is_empty() {
            self.shared.settle_equal(term, batch)?;
        }
        let mut state = self.lock();
        state.switch.forget_equal(seen_at, batch);
        if !overtaken(&state) {
            state.light.get_or_insert(next);
        }
        Ok(())
    }
}

/// Bytes that one step of the lightweight checkpoint compares: so many that each core gets a share worth waking it for.
const HASH_BYTES: u64 = 8 << 20;
/// Bytes that it brings to the image at once: a committed sync, and a take-over, wait for no more than this.
const LIGHT_BYTES: u64 = 64 << 10;

/// The first of these pieces, about [`LIGHT_BYTES`].
fn first_batch(pieces: &[Piece]) -> &[Piece] {
    let mut bytes = 0;
    let full = pieces.iter().position(|piece| {
        bytes += piece.ours.len();
        bytes >= LIGHT_BYTES
    });
    &pieces[..full.map_or(pieces.len(), |last| last + 1)]
}
