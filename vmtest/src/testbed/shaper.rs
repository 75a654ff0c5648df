//! A client's cable with delay, loss or a rate: two TAPs in the place of its two ends, and a thread for each way between them.
//!
//! * **Decides:** nothing; [`lane`] does.
//! * **Flow:** `up0` of the client, a TAP -> [`pump`] -> the switch's port, a TAP; and back.
//! * **Invariants:** (1) large frames pass whole, as they do between a veth's ends, so that a cable without delay and loss is not what bounds a transfer
//!   (`cargo xtask bench links` says what it carries); (2) names and addresses are those of the cable before, which is there again when the value is dropped.
//! * **Source:** `tc-netem(8)`, which this kernel may not have. **Not here:** links between hosts that are slow ([`Testbed::slow_link`]).

mod lane;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use dunlin_core::offload::Offload;
use dunlin_guest::frames::{FRAME_BYTES_MAX, Tap};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use parking_lot::Mutex;

use super::node::spawn_in;
use super::{BRIDGE, Testbed};
use lane::Lane;

pub use lane::{Counts, Shape};

/// So many frames are taken before those that are due are looked at.
const BATCH: usize = 32;

/// A client's cable while it is shaped.
pub struct Shaper<'testbed> {
    testbed: &'testbed Testbed,
    client: String,
    lanes: [Arc<Mutex<Lane>>; 2],
    taps: [Arc<Tap>; 2],
    /// Closed to end the pumps.
    stop: Option<OwnedFd>,
    pumps: Vec<JoinHandle<Result<Result<()>>>>,
}

impl Testbed {
    /// Puts a shaped cable in the place of a client's.
    ///
    /// # Errors
    /// When the kernel has no TAPs. The client is without a cable then.
    ///
    /// # Panics
    /// When the testbed has no such client: the caller's error.
    pub fn shape(&self, client: &str, shape: Shape) -> Result<Shaper<'_>> {
        self.unplug(client)?;
        let open = |namespace: &str, name: String, bridge: Option<&'static str>| -> Result<Arc<Tap>> {
            let path = Path::new("/run/netns").join(namespace);
            let network = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            let opened = spawn_in(network, "open-tap", move || {
                Tap::open_with_offloads(&name, bridge)
            })?;
            let tap = opened.join().map_err(|_| anyhow!("opening a TAP panicked"))???;
            Ok(Arc::new(tap))
        };
        let near = open(&self.run.namespace(client), "up0".to_owned(), None)?;
        let far = open(&self.switch(), client.to_owned(), Some(BRIDGE))?;
        self.address_client(client)?;

        let (stopped, stop) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let stopped = Arc::new(stopped);
        let lanes = [0, 1].map(|number| Arc::new(Mutex::new(Lane::new(shape, number))));
        let ways = [
            (Arc::clone(&near), Arc::clone(&far)),
            (Arc::clone(&far), Arc::clone(&near)),
        ];
        let mut pumps = Vec::new();
        for ((from, to), lane) in ways.into_iter().zip(&lanes) {
            let (lane, stopped) = (Arc::clone(lane), Arc::clone(&stopped));
            let thread = std::thread::Builder::new().name("shaper".to_owned());
            pumps.push(thread.spawn(move || Ok(pump(&from, &to, &lane, &stopped)))?);
        }
        Ok(Shaper {
            testbed: self,
            client: client.to_owned(),
            lanes,
            taps: [near, far],
            stop: Some(stop),
            pumps,
        })
    }
}

impl Shaper<'_> {
    /// What became of the frames so far, both ways together.
    pub fn counts(&self) -> Counts {
        let [one, other] = &self.lanes;
        let (one, other) = (one.lock().counts(), other.lock().counts());
        one.and(other)
    }

    /// Puts the plain cable back.
    ///
    /// # Errors
    /// When the shaped one did not work all the time, or there is no plain one.
    pub fn finish(mut self) -> Result<Counts> {
        let counts = self.counts();
        self.end()?;
        Ok(counts)
    }

    fn end(&mut self) -> Result<()> {
        drop(self.stop.take());
        let mut result = Ok(());
        for pump in self.pumps.drain(..) {
            let ended = pump.join().map_err(|_| anyhow!("a shaper panicked"));
            result = result.and(ended.and_then(|ended| ended?));
        }
        // A process that is just being started may hold them for a moment longer than we do: they would keep their names.
        for (namespace, tap) in [self.testbed.run.namespace(&self.client), self.testbed.switch()]
            .iter()
            .zip(&self.taps)
        {
            result = result.and(super::batch(namespace, &format!("link del dev {}\n", tap.name())));
        }
        result.and(self.testbed.plug_in(&self.client))
    }
}

impl Drop for Shaper<'_> {
    fn drop(&mut self) {
        if self.stop.is_some() {
            let _ = self.end();
        }
    }
}

/// Carries frames from one TAP to the other until `stopped` has no other end any more.
fn pump(from: &Tap, to: &Tap, lane: &Mutex<Lane>, stopped: &OwnedFd) -> Result<()> {
    // A wire waits for no core.
    // SAFETY: plain numbers; without the right to it the pump stays as it is.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
    let mut buffer = vec![0; Offload::BYTES + FRAME_BYTES_MAX];
    loop {
        let mut next = {
            let mut lane = lane.lock();
            for _ in 0..BATCH {
                let Some(length) = from.read(&mut buffer)? else {
                    break;
                };
                lane.take(Instant::now(), &mut buffer[..length]);
            }
            while let Some(framed) = lane.due(Instant::now()) {
                if !to.write(&framed)? {
                    lane.crowded_out();
                }
                lane.used(framed);
            }
            lane.next_at()
        };
        let timeout = next
            .take()
            .map(|at| TimeSpec::from_duration(at.saturating_duration_since(Instant::now())));
        let mut ready = [
            PollFd::new(from.as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        match ppoll(&mut ready, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        if ready[1].any() == Some(true) {
            return Ok(());
        }
    }
}
