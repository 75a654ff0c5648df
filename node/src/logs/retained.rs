//! The agreed entries of a log that can be read on this host: the last [`KEEP_ENTRIES`], or [`KEEP_BYTES`] of them.
//!
//! * **Decides:** which entries a reader gets, and what is too old.
//! * **Flow:** the log's loop pushes and cuts; readers, each on a thread of its own, take copies that share the entries' memory.
//! * **Invariants:** 1. a reader holds a batch at most, however slowly it goes: what it has missed is not kept for it.
//!   2. nobody waits for a reader. 3. a reader is told where it goes on, past what was applied and no news to it (a leader's first
//!   entry, a repetition), so it never asks for the same nothing twice without waiting.
//! * **Not here:** what is cut (`run`), bytes on a socket (`session`).

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::time::Duration;

/// Entries that are kept.
pub const KEEP_ENTRIES: usize = 10_000;
/// Bytes of them.
pub const KEEP_BYTES: usize = 16 << 20;
/// What one look gives a reader at most.
const BATCH_ENTRIES: usize = 256;
const BATCH_BYTES: usize = 1 << 20;

/// An agreed entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub index: u64,
    pub term: u64,
    pub by: Option<(String, u64)>,
    pub data: Bytes,
}

/// What a reader is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// These are next, none if nothing came meanwhile; and where the reader goes on (invariant 3).
    Entries { batch: Vec<Kept>, next: u64 },
    /// The oldest that is there is this one.
    Compacted(u64),
    /// The log is no more on this host.
    Ended,
}

/// The window.
#[derive(Default)]
pub struct Retained {
    inner: Mutex<Inner>,
    news: Condvar,
}

#[derive(Default)]
struct Inner {
    /// Everything before this is cut away.
    first: u64,
    /// Applied up to here, whether or not it was news.
    last: u64,
    entries: VecDeque<Kept>,
    bytes: usize,
    ended: bool,
}

impl Retained {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Nothing before `first` is here, and nothing yet.
    pub fn begin(&self, first: u64) {
        let mut inner = self.lock();
        (inner.first, inner.last, inner.bytes) = (first, first - 1, 0);
        inner.entries.clear();
        self.news.notify_all();
    }

    /// Everything up to `last` is applied; these of it are news.
    pub fn push(&self, entries: Vec<Kept>, last: u64) {
        let mut inner = self.lock();
        inner.bytes += entries.iter().map(|entry| entry.data.len()).sum::<usize>();
        inner.entries.extend(entries);
        inner.last = last;
        self.news.notify_all();
    }

    /// What is at and before `through` is not kept any more.
    pub fn cut(&self, through: u64) {
        let mut inner = self.lock();
        while inner.entries.front().is_some_and(|entry| entry.index <= through) {
            let entry = inner.entries.pop_front();
            inner.bytes -= entry.map_or(0, |entry| entry.data.len());
        }
        inner.first = through + 1;
    }

    /// No more will come.
    pub fn end(&self) {
        self.lock().ended = true;
        self.news.notify_all();
    }

    /// Whether no more will come.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// First and last index, entries and bytes.
    pub fn figures(&self) -> (u64, u64, u64, u64) {
        let inner = self.lock();
        (
            inner.first,
            inner.last,
            inner.entries.len() as u64,
            inner.bytes as u64,
        )
    }

    /// What a reader that wants `from` on gets; if that is nothing, after waiting for at most so long. 0: from the oldest on.
    pub fn look(&self, from: u64, wait: Duration) -> Look {
        let mut inner = self.lock();
        let nothing = |inner: &mut Inner| !inner.ended && inner.last < from && inner.first <= from;
        self.news.wait_while_for(&mut inner, nothing, wait);
        if from != 0 && from < inner.first {
            return Look::Compacted(inner.first);
        }
        let begin = inner.entries.partition_point(|entry| entry.index < from);
        let mut bytes = 0;
        let batch: Vec<Kept> = inner
            .entries
            .range(begin..)
            .take(BATCH_ENTRIES)
            .take_while(|entry| {
                let fits = bytes == 0 || bytes + entry.data.len() <= BATCH_BYTES;
                bytes += entry.data.len();
                fits
            })
            .cloned()
            .collect();
        if batch.is_empty() && inner.ended {
            return Look::Ended;
        }
        let cut = begin + batch.len() < inner.entries.len();
        let next = match batch.last() {
            Some(last) if cut => last.index + 1,
            _ => from.max(inner.last + 1),
        };
        Look::Entries { batch, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u64, bytes: usize) -> Kept {
        Kept {
            index,
            term: 1,
            by: None,
            data: Bytes::from(vec![0; bytes]),
        }
    }
    fn indices(look: Look) -> Vec<u64> {
        match look {
            Look::Entries { batch, .. } => batch.iter().map(|entry| entry.index).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn readers_get_what_is_kept_and_hear_of_what_is_not() {
        let kept = Retained::default();
        kept.begin(1);
        kept.push(vec![entry(2, 1), entry(3, 1), entry(5, 1)], 6);
        assert_eq!(indices(kept.look(0, Duration::ZERO)), [2, 3, 5]);
        assert_eq!(indices(kept.look(4, Duration::ZERO)), [5]);
        assert_eq!(indices(kept.look(7, Duration::ZERO)), [0; 0]);
        kept.cut(3);
        assert_eq!(kept.look(3, Duration::ZERO), Look::Compacted(4));
        assert_eq!(indices(kept.look(0, Duration::ZERO)), [5]);
        assert_eq!(kept.figures(), (4, 6, 1, 1));
        kept.end();
        assert_eq!(kept.look(7, Duration::from_secs(60)), Look::Ended);
    }

    #[test]
    fn a_reader_holds_one_batch_however_much_there_is() {
        let kept = Retained::default();
        kept.begin(1);
        kept.push((1..=1000).map(|index| entry(index, 10)).collect(), 1000);
        assert_eq!(indices(kept.look(1, Duration::ZERO)).len(), BATCH_ENTRIES);
        kept.push(
            (1001..=1010).map(|index| entry(index, BATCH_BYTES / 2)).collect(),
            1010,
        );
        assert_eq!(indices(kept.look(1001, Duration::ZERO)), [1001, 1002]);
    }

    #[test]
    fn a_reader_goes_on_after_what_was_no_news_and_waits_there() {
        let kept = Retained::default();
        kept.begin(1);
        let nothing = |next| Look::Entries { batch: vec![], next };
        assert_eq!(kept.look(0, Duration::ZERO), nothing(1));
        // A leader's first entry: the reader passes it, once.
        kept.push(vec![], 1);
        assert_eq!(kept.look(0, Duration::ZERO), nothing(2));
        assert_eq!(kept.look(1, Duration::ZERO), nothing(2));
        let (wait, began) = (Duration::from_millis(100), std::time::Instant::now());
        assert_eq!(kept.look(2, wait), nothing(2));
        assert!(began.elapsed() >= wait, "it did not wait");
        // Who wants only what comes later is not taken back.
        kept.push(vec![entry(2, 1)], 3);
        assert_eq!(kept.look(9, Duration::ZERO), nothing(9));
        let batch = vec![entry(2, 1)];
        assert_eq!(kept.look(2, Duration::ZERO), Look::Entries { batch, next: 4 });
        // A batch that is cut goes on with what was left out.
        let more = u64::try_from(BATCH_ENTRIES).expect("a small number") + 1;
        kept.push((4..4 + more).map(|index| entry(index, 1)).collect(), 3 + more);
        let Look::Entries { batch, next } = kept.look(4, Duration::ZERO) else {
            panic!("there are entries");
        };
        assert_eq!((batch.len(), next), (BATCH_ENTRIES, 3 + more));
    }

    #[test]
    fn a_reader_that_waits_is_woken() {
        let kept = std::sync::Arc::new(Retained::default());
        kept.begin(1);
        let reader = std::thread::spawn({
            let kept = kept.clone();
            move || indices(kept.look(1, Duration::from_secs(60)))
        });
        kept.push(vec![entry(1, 1)], 1);
        assert_eq!(reader.join().expect("a reader"), [1]);
    }
}
