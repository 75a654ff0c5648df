//! What a backup's loop has to say between syncs: its VM's frames, and that it has nothing to do.
//!
//! The loop must never wait for a primary that does not read (it may have to take over from it). So it writes itself only
//! what the socket takes at once, which is nearly always all and saves a wake-up for each answer of the VM; the rest is
//! left to a thread, in order. What finds no room there is dropped: a primary that misses words of the backup releases
//! less, never wrongly, and the next sync makes good for it.

use super::link::SyncWriter;
use crate::vm::event;
use crossbeam_channel::{Sender, bounded};
use dunlin_core::wire::sync::SyncMessage;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Messages under way beyond which the primary is taken for stuck.
const MOST: usize = 4096;
/// The same in bytes.
const MOST_BYTES: usize = 16 << 20;

/// Sends without ever waiting.
pub struct Talker {
    writer: SyncWriter,
    queue: Sender<SyncMessage>,
    waiting: Arc<Waiting>,
}

/// What the thread has not written yet: nothing may overtake it.
#[derive(Default)]
struct Waiting {
    messages: AtomicUsize,
    bytes: AtomicUsize,
    /// Messages that found no room.
    dropped: AtomicU64,
}

impl Waiting {
    /// Room for a message of so many bytes, if there is.
    fn enter(&self, bytes: usize) -> bool {
        self.messages.fetch_add(1, Ordering::Relaxed);
        let fits = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= MOST_BYTES;
        if !fits {
            self.leave(bytes);
        }
        fits
    }

    fn leave(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.messages.fetch_sub(1, Ordering::Release);
    }
}

fn cost(message: &SyncMessage) -> usize {
    size_of::<SyncMessage>()
        + match message {
            SyncMessage::Said { frames, .. } => event::cost(frames),
            _ => 0,
        }
}

impl Talker {
    /// With a thread that writes until this is dropped or the stream breaks.
    pub fn start(writer: SyncWriter) -> std::io::Result<Self> {
        let (queue, receiver) = bounded(MOST);
        let waiting = Arc::new(Waiting::default());
        let talker = Self {
            writer: writer.clone(),
            queue,
            waiting: waiting.clone(),
        };
        std::thread::Builder::new()
            .name("sync-talk".into())
            .spawn(move || {
                for message in receiver {
                    // The session notices a broken stream by itself.
                    if writer.send(&message).is_err() {
                        break;
                    }
                    waiting.leave(cost(&message));
                }
            })?;
        Ok(talker)
    }

    /// Sends or queues a message; whether there was room.
    pub fn say(&self, message: SyncMessage) -> bool {
        if self.waiting.messages.load(Ordering::Acquire) == 0 {
            match self.writer.send_at_once(&message) {
                Ok(true) => return true,
                Ok(false) => {}
                // The session notices a broken stream by itself.
                Err(_) => return false,
            }
        }
        let bytes = cost(&message);
        let mut room = self.waiting.enter(bytes);
        if room && self.queue.try_send(message).is_err() {
            self.waiting.leave(bytes);
            room = false;
        }
        self.waiting
            .dropped
            .fetch_add(u64::from(!room), Ordering::Relaxed);
        room
    }

    /// What waits, what may, and how many messages found no room.
    pub fn queue(&self) -> (usize, usize, u64) {
        let waiting = &self.waiting;
        let bytes = waiting.bytes.load(Ordering::Relaxed);
        (bytes, MOST_BYTES, waiting.dropped.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::event::LoopSender;
    use crate::vm::session::link::SyncLink;
    use dunlin_core::agreed::Frame;
    use dunlin_core::units::Epoch;
    use dunlin_fabric::link::Stream;

    #[test]
    fn a_primary_that_does_not_read_costs_a_bounded_queue_and_never_a_wait() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let (to_loop, _events) = LoopSender::channel().expect("a channel");
        let (link, _closer) = SyncLink::open(Stream::local(ours, "a"), 1, to_loop, false).expect("a link");
        let talker = Talker::start(link.writer.clone()).expect("a thread");
        let frame = Frame {
            nic: 0,
            bytes: vec![1; 60_000].into(),
        };
        let said = || SyncMessage::Said {
            epoch: Epoch(1),
            frames: vec![frame.clone(); 16],
        };
        let mut refused = 0;
        for _ in 0..200 {
            refused += u64::from(!talker.say(said()));
            let (bytes, most, _) = talker.queue();
            assert!(bytes <= most, "{bytes} bytes wait, {most} may");
        }
        // 192 MB were said, 16 may wait, and a socket takes some.
        assert!(refused > 150, "{refused} of 200 found no room");
        assert_eq!(talker.queue().2, refused);
    }
}
