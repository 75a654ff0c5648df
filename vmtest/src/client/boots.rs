//! Boots of the guest that a test has ordered, and what its clients may put down to them.
//!
//! * **Decides:** whether a connection that broke, or could not be opened, may be the guest's own doing.
//! * **Flow:** the test: [`Boots::begin`] -> the guest boots -> every kind of client gets on -> the guard ends. A client whose
//!   connection breaks: [`Boots::excuse`]; one that needs a new one: [`Boots::connect`].
//! * **Invariants:** a boot excuses the loss of connections from before its end, and nothing else: what was acknowledged on them
//!   must be there afterwards.

use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

/// The first try to connect while the guest boots, and the longest one: the longer one would wait, the rarer a lost SYN is sent again; and a guest that has
/// just booted, and whose answers wait for syncs, may be slow.
const TRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(8));
/// Between two tries: nothing tells a client when to try.
pub const TRY_AGAIN: Duration = Duration::from_millis(20);

/// Shared by a test and its clients.
#[derive(Clone, Debug)]
pub struct Boots {
    /// Nothing for a guest that never boots.
    seen: Option<Arc<Mutex<Seen>>>,
}

#[derive(Debug, Default)]
struct Seen {
    under_way: usize,
    last_end: Option<Instant>,
}

fn look(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock()
}

/// A boot under way. It ends when this is dropped.
pub struct Booting {
    seen: Option<Arc<Mutex<Seen>>>,
}

impl Drop for Booting {
    fn drop(&mut self) {
        if let Some(seen) = &self.seen {
            let mut seen = look(seen);
            seen.under_way -= 1;
            seen.last_end = Some(Instant::now());
        }
    }
}

impl Boots {
    /// The guest stays up: nothing is excused.
    pub fn never() -> Self {
        Self { seen: None }
    }

    /// The guest may boot whenever it likes.
    pub fn at_any_time() -> Self {
        let seen = Seen {
            under_way: 1,
            last_end: None,
        };
        Self {
            seen: Some(Arc::new(Mutex::new(seen))),
        }
    }

    /// The guest boots when [`Self::begin`] says so.
    pub fn when_told() -> Self {
        Self {
            seen: Some(Arc::default()),
        }
    }

    /// It boots from now on until the guard is dropped.
    pub fn begin(&self) -> Booting {
        if let Some(seen) = &self.seen {
            look(seen).under_way += 1;
        }
        Booting {
            seen: self.seen.clone(),
        }
    }

    /// May what was begun at `since` have met a boot?
    pub fn excuse(&self, since: Instant) -> bool {
        self.seen.as_ref().is_some_and(|seen| {
            let seen = look(seen);
            seen.under_way > 0 || seen.last_end.is_some_and(|end| end >= since)
        })
    }

    /// Opens a connection with `open`, which waits so long at most. While the guest boots it is tried again, until `give_up`.
    ///
    /// # Errors
    /// `open`'s, when no boot excuses it or the time is up.
    pub fn connect<T>(&self, give_up: Duration, open: impl Fn(Duration) -> io::Result<T>) -> io::Result<T> {
        let begun = Instant::now();
        let mut longest = TRY.0;
        loop {
            let left = give_up.saturating_sub(begun.elapsed());
            let boots = self.excuse(Instant::now());
            let error = match open(if boots {
                left.clamp(TRY_AGAIN, longest)
            } else {
                left.max(TRY_AGAIN)
            }) {
                Ok(open) => return Ok(open),
                Err(error) => error,
            };
            if !self.excuse(begun) || begun.elapsed() >= give_up {
                return Err(error);
            }
            longest = (longest * 2).min(TRY.1);
            std::thread::sleep(TRY_AGAIN);
        }
    }

    /// Asks the peer every second whether it still knows of this connection, if the guest may boot. Without that, a client whose
    /// request was acknowledged by a machine that then boots anew waits for the answer for ever: it has nothing to send again.
    ///
    /// # Errors
    /// A connection that has just been reset.
    pub fn watch(&self, stream: &TcpStream) -> io::Result<()> {
        // More than anything takes to boot; whoever waits has a limit of its own.
        const TIMES: u32 = 127;
        if self.seen.is_none() {
            return Ok(());
        }
        setsockopt(stream, sockopt::TcpKeepIdle, &1)?;
        setsockopt(stream, sockopt::TcpKeepInterval, &1)?;
        setsockopt(stream, sockopt::TcpKeepCount, &TIMES)?;
        Ok(setsockopt(stream, sockopt::KeepAlive, &true)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_boot_excuses_what_began_before_its_end_and_nothing_that_began_after_it() {
        let (never, told) = (Boots::never(), Boots::when_told());
        let before = Instant::now();
        assert!(!never.excuse(before) && !told.excuse(before));
        let booting = told.begin();
        drop(never.begin());
        assert!(!never.excuse(before) && told.excuse(before) && told.excuse(Instant::now()));
        drop(booting);
        assert!(told.excuse(before));
        assert!(!told.excuse(Instant::now() + Duration::from_nanos(1)));
        assert!(Boots::at_any_time().excuse(before));
    }

    #[test]
    fn a_client_tries_again_only_while_the_guest_boots() {
        let tries = AtomicU32::new(0);
        let open = |succeeds_at: u32| {
            let tries = &tries;
            move |_: Duration| match 1 + tries.fetch_add(1, Ordering::SeqCst) {
                at if at >= succeeds_at => Ok(at),
                _ => Err(io::Error::from(ErrorKind::ConnectionRefused)),
            }
        };
        let patience = Duration::from_secs(60);
        let refused = Boots::when_told().connect(patience, open(3)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(Boots::at_any_time().connect(patience, open(4)).unwrap(), 4);
        assert!(
            Boots::at_any_time()
                .connect(Duration::ZERO, open(u32::MAX))
                .is_err()
        );
    }
}
