//! What the VM and QEMU say: the end of the serial console and of QEMU's stderr, in memory, and optionally a log.
//!
//! Decides:    how much is kept (the last 256 KiB of each).
//! Flow:       QEMU's serial socket and stderr pipe -> one reader thread each -> [`Console`].
//! Invariants: 1. the guest never waits for us: the reader only copies; 2. the reader ends when QEMU does.
//! Source:     vm-loop.md: "tests must read the backup's serial console for oopses".
//! Not here:   what to do about an oops.

use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const KEPT_BYTES: usize = 256 * 1024;

/// Marks in a Linux console that mean the guest's kernel has lost its footing.
pub const OOPS_MARKS: [&str; 8] = [
    "Oops",
    "BUG:",
    "Kernel panic",
    "general protection",
    "unable to handle",
    "rcu: INFO: rcu_sched self-detected",
    "soft lockup",
    "invalid opcode",
];

#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    total: u64,
    ended: bool,
    /// What came before is about something that is over: where, and when the last of the rest came.
    over: u64,
    newest: Option<Instant>,
}

/// The end of a stream of text that a thread reads.
#[derive(Clone, Default)]
pub struct Console(Arc<(Mutex<Kept>, Condvar)>);

impl Console {
    /// Reads `source` on a thread until its end.
    pub fn follow(
        name: &str,
        mut source: impl Read + Send + 'static,
        mut log: Option<impl Write + Send + 'static>,
    ) -> io::Result<Console> {
        let console = Console::default();
        let shared = console.clone();
        let read = move || {
            let mut buffer = [0u8; 4096];
            loop {
                let count = match source.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => break,
                };
                shared.append(&buffer[..count]);
                // A full disk must not stop the guest's console: the log simply ends.
                if log
                    .as_mut()
                    .is_some_and(|l| l.write_all(&buffer[..count]).is_err())
                {
                    log = None;
                }
            }
            shared.0.0.lock().expect("the reader never panics").ended = true;
            shared.0.1.notify_all();
        };
        std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(read)?;
        Ok(console)
    }

    fn append(&self, bytes: &[u8]) {
        let mut kept = self.0.0.lock().expect("the reader never panics");
        kept.bytes.extend_from_slice(bytes);
        kept.total += bytes.len() as u64;
        kept.newest = Some(Instant::now());
        if kept.bytes.len() > 2 * KEPT_BYTES {
            let surplus = kept.bytes.len() - KEPT_BYTES;
            kept.bytes.drain(..surplus);
        }
        drop(kept);
        self.0.1.notify_all();
    }

    /// What is kept, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.0.lock().expect("the reader never panics").bytes).into_owned()
    }

    /// What came so far explains nothing that happens from now on.
    pub fn turn_page(&self) {
        let mut kept = self.0.0.lock().expect("the reader never panics");
        kept.over = kept.total;
    }

    /// The last line, if it came within `age` and after the last [`Console::turn_page`]: what was said just before an end.
    pub fn last_words(&self, age: Duration) -> Option<String> {
        let kept = self.0.0.lock().expect("the reader never panics");
        kept.newest.filter(|newest| newest.elapsed() <= age)?;
        let new = usize::try_from(kept.total - kept.over).unwrap_or(usize::MAX);
        let from = kept.bytes.len() - new.min(kept.bytes.len());
        let text = String::from_utf8_lossy(&kept.bytes[from..]);
        let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
        Some(line.trim().to_owned())
    }

    /// Bytes seen since the start.
    pub fn total_bytes(&self) -> u64 {
        self.0.0.lock().expect("the reader never panics").total
    }

    /// Waits until the kept text contains `mark`; false when the time is over or the stream has ended without it.
    pub fn wait_for(&self, mark: &str, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut kept = self.0.0.lock().expect("the reader never panics");
        loop {
            if String::from_utf8_lossy(&kept.bytes).contains(mark) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if kept.ended || left.is_zero() {
                return false;
            }
            kept = self
                .0
                .1
                .wait_timeout(kept, left)
                .expect("the reader never panics")
                .0;
        }
    }

    /// Waits until more than `seen` bytes have come.
    pub fn wait_more(&self, seen: u64, timeout: Duration) -> bool {
        let kept = self.0.0.lock().expect("the reader never panics");
        let waiting = |kept: &mut Kept| kept.total <= seen && !kept.ended;
        self.0
            .1
            .wait_timeout_while(kept, timeout, waiting)
            .expect("the reader never panics")
            .0
            .total
            > seen
    }

    /// Waits until the stream has ended.
    pub fn wait_end(&self, timeout: Duration) -> bool {
        let kept = self.0.0.lock().expect("the reader never panics");
        let (kept, _) = self
            .0
            .1
            .wait_timeout_while(kept, timeout, |k| !k.ended)
            .expect("the reader never panics");
        kept.ended
    }

    /// The first line of the kept text that shows an oops of a Linux guest.
    pub fn oops(&self) -> Option<String> {
        let text = self.text();
        text.lines()
            .find(|line| OOPS_MARKS.iter().any(|mark| line.contains(mark)))
            .map(str::to_owned)
    }
}

/// The daemon's log as a log of whole lines: what QEMU says of a VM's devices is said once and to nobody else.
pub(crate) struct DaemonLog {
    vm: String,
    half: Vec<u8>,
}

impl DaemonLog {
    pub(crate) fn of(vm: &str) -> DaemonLog {
        DaemonLog {
            vm: vm.to_owned(),
            half: vec![],
        }
    }
}

impl Write for DaemonLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.half.extend_from_slice(bytes);
        while let Some(end) = self.half.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.half.drain(..=end).collect();
            tracing::warn!(
                vm = self.vm,
                "QEMU says: {}",
                String::from_utf8_lossy(&line).trim_end()
            );
        }
        // Words without end are not collected for ever.
        if self.half.len() > KEPT_BYTES {
            self.half.clear();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_new_words() {
        let console = Console::default();
        let (now, long) = (Duration::ZERO, Duration::from_secs(3600));
        assert_eq!(console.last_words(long), None);
        console.append(b"Can't receive COLO message\n");
        assert_eq!(
            console.last_words(long).as_deref(),
            Some("Can't receive COLO message")
        );
        assert_eq!(console.last_words(now), None, "said earlier");
        console.turn_page();
        assert_eq!(console.last_words(long), None, "that is over");
        console.append(b"out of memory\n\n");
        assert_eq!(console.last_words(long).as_deref(), Some("out of memory"));
    }

    #[test]
    fn the_end_is_kept_and_an_oops_is_found() {
        let mut text = vec![b'x'; 3 * KEPT_BYTES];
        text.extend_from_slice(b"\nBUG: unable to handle page fault\nlogin:");
        let console = Console::follow("test", io::Cursor::new(text.clone()), None::<io::Sink>).unwrap();
        assert!(console.wait_for("login:", Duration::from_secs(60)));
        assert!(console.wait_end(Duration::from_secs(60)));
        assert_eq!(console.total_bytes(), text.len() as u64);
        assert!(console.text().len() <= 2 * KEPT_BYTES);
        assert_eq!(console.oops().unwrap(), "BUG: unable to handle page fault");
        assert!(
            !console.wait_for("never", Duration::from_secs(60)),
            "an ended stream is not waited for"
        );
    }
}
