//! What a backup's loop has to say between syncs: its VM's frames, and that it has nothing to do.
//!
//! The loop must never wait for a primary that does not read (it may have to take over from it), so a thread of its
//! own writes. What finds no room is dropped: a primary that misses words of the backup releases less, never wrongly,
//! and the next sync makes good for it.

use super::link::SyncWriter;
use crossbeam_channel::{Sender, bounded};
use dunlin_core::wire::sync::SyncMessage;

/// Messages under way beyond which the primary is taken for stuck.
const MOST: usize = 4096;

/// Sends without ever waiting.
pub struct Talker(Sender<SyncMessage>);

impl Talker {
    /// A thread that writes until this is dropped or the stream breaks.
    pub fn start(writer: SyncWriter) -> std::io::Result<Self> {
        let (sender, receiver) = bounded(MOST);
        std::thread::Builder::new()
            .name("sync-talk".into())
            .spawn(move || {
                for message in receiver {
                    // The session notices a broken stream by itself.
                    if writer.send(&message).is_err() {
                        break;
                    }
                }
            })?;
        Ok(Self(sender))
    }

    /// Queues a message; whether there was room.
    pub fn say(&self, message: SyncMessage) -> bool {
        self.0.try_send(message).is_ok()
    }
}
