//! What it decides: how badly a fabric may behave while rings and words must still believe nothing wrong.
//!
//! **Flow**: a pair of ends in one process; `write` queues words, the other end's `progress` lands some of them, by a
//! seeded random choice: torn (words of one write in any order), late (writes held back behind younger ones of other
//! places), repeated (an old write lands again), stalled. **Invariants**: the same seed and calls give the same lies; what
//! never lands wrong is the epoch, as on every backend. **Not here**: time.

use crate::link::Stream;
use crate::transport::{
    Grant, Memory, Progress, REGIONS, RegionId, Transport, TransportError, check_region, check_write, io,
};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

/// Which lies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lies {
    /// Words of one write land in any order, over several calls of `progress`.
    pub tear: bool,
    /// A write may land again later, after younger ones (within the writes that the reader cannot have given back:
    /// real fabrics repeat a retransmission, not the past).
    pub repeat: bool,
    /// Nothing lands for a while.
    pub stall: bool,
}

struct Write {
    region: usize,
    epoch: u64,
    words: Vec<(usize, u64)>,
}

#[derive(Default)]
struct Half {
    writes: VecDeque<Write>,
    last: Option<Write>,
    grants: [Option<Grant>; REGIONS],
    changed: bool,
    gone: bool,
}

/// One end.
pub struct Lying {
    lies: Lies,
    state: u64,
    local: [Option<(Memory, Grant)>; REGIONS],
    granted: [Option<Grant>; REGIONS],
    /// What comes here.
    inbound: Arc<Mutex<Half>>,
    /// What goes to the peer.
    outbound: Arc<Mutex<Half>>,
    stalled: u32,
}

impl Lying {
    /// Two ends whose lies follow from `seed`.
    #[must_use]
    pub fn pair(lies: Lies, seed: u64) -> (Self, Self) {
        let (x, y) = (Arc::<Mutex<Half>>::default(), Arc::<Mutex<Half>>::default());
        let end = |inbound, outbound, seed| Self {
            lies,
            state: seed,
            local: [const { None }; REGIONS],
            granted: [None; REGIONS],
            inbound,
            outbound,
            stalled: 0,
        };
        (end(x.clone(), y.clone(), seed * 2 + 1), end(y, x, seed * 2 + 2))
    }

    fn dice(&mut self, sides: u64) -> u64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % sides
    }

    fn land(&self, region: usize, epoch: u64, offset: usize, word: u64) {
        if let Some((memory, grant)) = &self.local[region]
            && grant.epoch == epoch
        {
            memory.store(offset, word);
        }
    }
}

impl Transport for Lying {
    fn fabric(&self) -> &'static str {
        "lying"
    }

    fn register(&mut self, region: RegionId, epoch: u64, bytes: usize) -> Result<(), TransportError> {
        check_region(region, bytes);
        let grant = Grant {
            epoch,
            bytes,
            key: self.dice(u64::MAX),
        };
        let memory = Memory::anonymous(bytes).map_err(io("memory"))?;
        self.local[usize::from(region.0)] = Some((memory, grant));
        let mut out = self.outbound.lock().expect("no panic");
        out.grants[usize::from(region.0)] = Some(grant);
        out.changed = true;
        Ok(())
    }

    fn region(&self, region: RegionId) -> Option<&Memory> {
        self.local[usize::from(region.0)].as_ref().map(|l| &l.0)
    }

    fn opened(&self, region: RegionId) -> Option<Grant> {
        self.local[usize::from(region.0)].as_ref().map(|l| l.1)
    }

    fn granted(&self, region: RegionId) -> Option<Grant> {
        self.granted[usize::from(region.0)]
    }

    fn write(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError> {
        check_write(self.granted(region), region, epoch, offset, bytes.len())?;
        let words = (bytes.chunks_exact(8).enumerate())
            .map(|(i, b)| (offset + i * 8, u64::from_le_bytes(b.try_into().expect("8 bytes"))))
            .collect();
        let mut out = self.outbound.lock().expect("no panic");
        if out.writes.len() > 1000 {
            return Err(TransportError::Full);
        }
        out.writes.push_back(Write {
            region: usize::from(region.0),
            epoch,
            words,
        });
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn progress(&mut self, _budget: usize) -> Result<Progress, TransportError> {
        let inbound = self.inbound.clone();
        let mut inbound = inbound.lock().expect("no panic");
        if inbound.gone {
            return Err(TransportError::Closed("it was dropped".into()));
        }
        let grants = std::mem::take(&mut inbound.changed);
        if grants {
            self.granted = inbound.grants;
        }
        if self.lies.stall && self.stalled == 0 && self.dice(50) == 0 {
            self.stalled = 20;
        }
        if self.stalled > 0 {
            self.stalled -= 1;
            return Ok(Progress {
                grants,
                ..Progress::default()
            });
        }
        let inbound = &mut *inbound;
        for _ in 0..self.dice(8) + 1 {
            if self.lies.repeat
                && self.dice(10) == 0
                && let Some(w) = &inbound.last
            {
                (w.words.iter()).for_each(|(at, word)| self.land(w.region, w.epoch, *at, *word));
            }
            let Some(write) = inbound.writes.front_mut() else {
                break;
            };
            let count = write.words.len() as u64;
            let some = if self.lies.tear {
                self.dice(count) + 1
            } else {
                count
            };
            let mut landed = Vec::new();
            for left in (count - some + 1..=count).rev() {
                let i = if self.lies.tear {
                    self.dice(left) as usize
                } else {
                    0
                };
                let (at, word) = write.words.remove(i);
                self.land(write.region, write.epoch, at, word);
                landed.push((at, word));
            }
            let last = Write {
                region: write.region,
                epoch: write.epoch,
                words: landed,
            };
            if write.words.is_empty() {
                inbound.writes.pop_front();
            }
            inbound.last = Some(last);
        }
        Ok(Progress {
            landed: true,
            grants,
            ..Progress::default()
        })
    }

    fn arm(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn disarm(&mut self) {}

    fn revoke(&mut self, region: RegionId) {
        self.local[usize::from(region.0)] = None;
        let mut out = self.outbound.lock().expect("no panic");
        out.grants[usize::from(region.0)] = None;
        out.changed = true;
    }

    fn reconnect(&mut self, _stream: Stream) -> Result<(), TransportError> {
        Err(TransportError::Unavailable(
            "the lying fabric has no connection".into(),
        ))
    }

    fn fds(&self) -> [Option<RawFd>; 2] {
        [None, None]
    }

    fn wants_write(&self) -> bool {
        false
    }
}

impl Drop for Lying {
    fn drop(&mut self) {
        self.outbound.lock().expect("no panic").gone = true;
    }
}
