//! What a backup's loop has to say between syncs: its VM's frames, and that it has nothing to do.
//!
//! The loop must never wait for a primary that does not read (it may have to take over from it). So it writes itself only
//! what the socket takes at once, which is nearly always all and saves a wake-up for each answer of the VM; the rest is
//! left to a thread, in order. What finds no room there is dropped: a primary that misses words of the backup releases
//! less, never wrongly, and the next sync makes good for it.

use super::link::SyncWriter;
use crossbeam_channel::{Sender, bounded};
use dunlin_core::wire::sync::SyncMessage;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Messages under way beyond which the primary is taken for stuck.
const MOST: usize = 4096;

/// Sends without ever waiting.
pub struct Talker {
    writer: SyncWriter,
    queue: Sender<SyncMessage>,
    /// Messages that the thread has not written yet: nothing may overtake them.
    queued: Arc<AtomicUsize>,
}

impl Talker {
    /// With a thread that writes until this is dropped or the stream breaks.
    pub fn start(writer: SyncWriter) -> std::io::Result<Self> {
        let (queue, receiver) = bounded(MOST);
        let queued = Arc::new(AtomicUsize::new(0));
        let talker = Self {
            writer: writer.clone(),
            queue,
            queued: queued.clone(),
        };
        std::thread::Builder::new()
            .name("sync-talk".into())
            .spawn(move || {
                for message in receiver {
                    // The session notices a broken stream by itself.
                    if writer.send(&message).is_err() {
                        break;
                    }
                    queued.fetch_sub(1, Ordering::Release);
                }
            })?;
        Ok(talker)
    }

    /// Sends or queues a message; whether there was room.
    pub fn say(&self, message: SyncMessage) -> bool {
        if self.queued.load(Ordering::Acquire) == 0 {
            match self.writer.send_at_once(&message) {
                Ok(true) => return true,
                Ok(false) => {}
                // The session notices a broken stream by itself.
                Err(_) => return false,
            }
        }
        self.queued.fetch_add(1, Ordering::Relaxed);
        let room = self.queue.try_send(message).is_ok();
        if !room {
            self.queued.fetch_sub(1, Ordering::Relaxed);
        }
        room
    }
}
