//! The stream of what there is to see, for one who watches: server-sent events.
//!
//! **Decides**: what is sent next. **Flow**: the last events, the overview -> each event, and the overview when it has changed -> a word every
//! [`ALIVE`]. **Invariants**: 1. nothing is kept for one who reads slowly: what they get next is what is newest then. 2. a stream ends after
//! [`LONGEST`]: whoever watches comes again, and is asked again who they are. **Source**: the HTML standard, "Server-sent events".

use super::board::{Board, Watcher};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Something is said this often, so that one who has gone is noticed.
const ALIVE: Duration = Duration::from_secs(15);
/// A stream lasts no longer.
const LONGEST: Duration = Duration::from_secs(3600);

struct State {
    watcher: Watcher,
    /// The next event to send, and the overview that was sent last.
    next_event: u64,
    shown: u64,
    ends: Instant,
}

/// A stream for one more watcher.
pub fn new(board: &Arc<Board>) -> impl Stream<Item = Result<Bytes, Infallible>> + use<> {
    let state = State {
        watcher: board.join(),
        next_event: 0,
        shown: 0,
        ends: Instant::now() + LONGEST,
    };
    unfold(state, |mut state| async move {
        let frame = state.next().await?;
        Some((Ok(frame), state))
    })
}

impl State {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let sight = self.watcher.sight.borrow_and_update().clone();
            let newer = sight.events.iter().find(|(number, _)| *number >= self.next_event);
            if let Some((number, frame)) = newer {
                self.next_event = number + 1;
                return Some(frame.clone());
            }
            if sight.number != self.shown {
                self.shown = sight.number;
                return Some(sight.frame.clone());
            }
            if Instant::now() >= self.ends {
                return None;
            }
            match timeout(ALIVE, self.watcher.sight.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => return Some(Bytes::from_static(b": alive\n\n")),
            }
        }
    }
}
