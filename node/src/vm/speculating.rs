//! Speculative communication in the loop: what the VM and its clients say passes through core's `speculation`, whose sockets speak
//! instead of the gate. Only for a VM whose file says `speculative = true`; for others nothing here is there.
//!
//! Decides:    nothing: what is safe the output says (`newest_acknowledged`, `voice`), who may speak the group, the rest core.
//! Flow:       (with policy `dunlin` all of this is on the VM's side of the translation, `output::rewriter`: what comes from a client has passed it, what
//!             goes to one passes it last.)
//!             primary: a frame of the VM or of a client -> `Driver` -> VM, client, gate or a shadow socket; the line of a sync -> what has
//!             changed, as the sync's `connections`, of which much goes ahead of it; its acknowledgement -> the sockets may say what came before the line.
//!             backup: the sync's `connections` -> `Replica`; at a take-over -> `Driver`, which asks each client how far it is.
//! Invariants: 1. all that the VM said before its stop is taken before the line is drawn.
//!             2. whether this host may speak is looked at for each frame; what may not leave is lost, as on a wire.
//!             3. between its take-over and this host's first word the VM's frames wait here, in no more than their budget.
//! Source:     VEE'12; docs/speculation.md.
//! Not here:   connections (core), sockets (`dunlin_speculation`), syncs (`session`).

mod modes;

use super::state::speculating::{Side, Speculating};
use super::state::{Role, VmLoop};
use bytes::Bytes;
use dunlin_api::EventKind;
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::output::gate::{Voice, cost};
use dunlin_core::output::{Ends, packet::FlowKey};
use dunlin_core::replica::epoch::Release;
use dunlin_core::replica::sync::primary::Word;
use dunlin_core::units::Epoch;
use dunlin_core::wire::WireError;
use dunlin_speculation::{Driver, Ports};
use std::io;

/// Parts that wait for the session's thread, which sends them ahead of the sync.
const MOST_AHEAD: usize = 4;

impl Ports for VmLoop {
    fn to_vm(&mut self, frame: Frame) {
        if let Some(nics) = &mut self.net.nics {
            nics.queue(&frame);
        }
    }

    fn to_client(&mut self, frame: Frame, offload: Offload) {
        // Invariant 2.
        if !self.may_speak(self.now_us()) {
            return;
        }
        let frame = match self.translates_speculation() {
            true => self.leaves_speculatively(frame, offload),
            false => frame,
        };
        self.net.frames_out += offload.frames_of(frame.bytes.len());
        if let Some(nics) = &self.net.nics {
            nics.send(&frame, offload);
        }
    }

    fn hold(&mut self, frame: Frame) {
        let now_us = self.now_us();
        self.net.output.said(frame, now_us);
    }

    fn lift(&mut self, key: FlowKey, ticks: u32, ends: Ends) {
        self.net.output.lift(key, ticks, ends);
    }
}

impl VmLoop {
    /// Does something with the driver, where there is one; none if there is not.
    pub(super) fn with_driver<T>(
        &mut self,
        act: impl FnOnce(&mut Driver, u64, &mut Self) -> io::Result<T>,
    ) -> Option<T> {
        let mut speculating = self.net.speculating.take()?;
        let now_us = self.now_us();
        let done = speculating.driver().map(|driver| act(driver, now_us, self));
        self.net.speculating = Some(speculating);
        match done? {
            Ok(done) => Some(done),
            Err(error) => {
                // What the VM was told is acknowledged could not leave any more.
                self.event(
                    EventKind::QemuDied,
                    format!("the TUN of the shadow sockets: {error}"),
                );
                self.end_copy("its shadow sockets are gone");
                None
            }
        }
    }

    /// The VM here has sent these.
    pub(super) fn speculate_on_said(&mut self, frames: Vec<Frame>) {
        let budget = self.config.memory.outbound_bytes();
        if let Some(Side::Follows { said, said_bytes, .. }) = self
            .net
            .speculating
            .as_mut()
            .map(|speculating| &mut speculating.side)
        {
            for frame in frames {
                // Invariant 3. What is lost the VM says again.
                if *said_bytes + cost(&frame) <= budget {
                    *said_bytes += cost(&frame);
                    said.push(frame);
                }
            }
            return;
        }
        let now_us = self.now_us();
        self.net.modes.said(now_us);
        self.with_driver(|driver, now_us, ports| {
            for frame in frames {
                driver.vm_sent(now_us, frame, ports)?;
            }
            driver.flush(now_us, ports)
        });
        self.speculation_goes_ahead();
    }

    /// The network has sent these.
    pub(super) fn speculate_on_heard(&mut self, frames: Vec<Frame>) {
        self.net.frames_in += frames.len() as u64;
        let translates = self.translates_speculation();
        self.with_driver(|driver, now_us, ports| {
            for frame in frames {
                // One by one: what one brings about may change the translation of the next.
                let frame = match translates {
                    true => ports.net.output.heard(&frame),
                    false => frame,
                };
                driver.client_sent(now_us, frame, ports)?;
            }
            driver.flush(now_us, ports)
        });
    }

    /// Whether `turn_speculation` has something to do.
    pub(super) fn speculation_is_due(&self) -> bool {
        self.net.speculating.as_ref().is_some_and(|speculating| {
            self.inbox.ready.shadow
                || speculating
                    .deadline_us()
                    .is_some_and(|at_us| at_us <= self.now_us())
        })
    }

    /// What the sockets say, and what is due.
    pub(super) fn turn_speculation(&mut self) {
        let more = self.with_driver(|driver, now_us, ports| {
            let more = driver.turn(now_us, ports.may_speak(now_us), ports)?;
            driver.flush(now_us, ports)?;
            Ok(more)
        });
        if let Some(speculating) = &mut self.net.speculating {
            speculating.more = more.unwrap_or(false);
        }
        self.speculation_goes_ahead();
    }

    /// Much of what the VM has said waits for the running epoch's end: the backup gets it now, so that the sync has little to bring.
    fn speculation_goes_ahead(&mut self) {
        let epoch = self.net.output.epoch();
        let protected = self.net.output.voice() == Voice::Protected;
        let Some(speculating) = self.net.speculating.as_mut() else {
            return;
        };
        let Role::Primary(primary) = &self.role else {
            return;
        };
        let between_syncs = primary.epochs.is_synced() && primary.epochs.run().is_none();
        let Some(jobs) = primary.session.as_ref().and_then(|session| session.jobs_ahead()) else {
            return;
        };
        if !protected || !between_syncs || primary.epochs.rules().release() != Release::Speculative {
            return;
        }
        // What the thread has not sent yet is enough: the rest comes with the next frames, or with the sync.
        while jobs.waiting() < MOST_AHEAD
            && let Some(part) = speculating.driver().and_then(Driver::ahead)
        {
            // A session that has ended reports that itself.
            let _ = jobs.send(Word::ConnectionsAhead { epoch, part });
        }
    }

    /// Lets the sockets say what is safe now.
    pub(super) fn release_speculation(&mut self) {
        let (voice, epoch) = (self.net.output.voice(), self.net.output.newest_acknowledged());
        match voice {
            Voice::Protected => self.net.modes.safe(epoch),
            Voice::Alone | Voice::Backup | Voice::Shut => self.net.modes.keeps_nothing(),
        }
        self.with_driver(|driver, now_us, ports| match voice {
            Voice::Alone => driver.all_is_safe(now_us, ports),
            Voice::Protected => driver.released(now_us, epoch, ports),
            Voice::Backup | Voice::Shut => Ok(()),
        });
    }

    /// A frame that was held has left.
    pub(super) fn speculation_sees_leaving(&mut self, frame: &Frame) {
        self.with_driver(|driver, now_us, _| {
            driver.leaves(now_us, frame);
            Ok(())
        });
    }

    /// The VM stands at the end of `epoch`, and all that it said is taken (invariant 1). What a backup needs of its connections; a
    /// new backup needs all of it.
    pub(super) fn speculation_cut(&mut self, epoch: Epoch, new_backup: bool) -> Option<Bytes> {
        self.net.modes.line_drawn(epoch);
        self.with_driver(|driver, now_us, _| Ok(driver.cut(now_us, epoch, new_backup)))
    }

    /// Bytes of connections are here ahead of the sync that ends `epoch`. None: nothing here speculates.
    pub(super) fn speculation_stages(&mut self, epoch: Epoch, part: Bytes) -> Option<Result<(), WireError>> {
        let speculating = self.net.speculating.as_mut()?;
        Some(
            speculating
                .replica()
                .and_then(|replica| replica.stage(epoch, part)),
        )
    }

    /// A sync is here whole. None: nothing here speculates.
    pub(super) fn speculation_applies(
        &mut self,
        epoch: Epoch,
        part: &Bytes,
    ) -> Option<Result<(), WireError>> {
        let speculating = self.net.speculating.as_mut()?;
        Some(speculating.replica().and_then(|replica| {
            replica.stage(epoch, part.clone())?;
            replica.complete(epoch);
            Ok(())
        }))
    }

    /// This host speaks for the VM from now on. Where its copy `ran` it knows of no connection: all were held, and have gone on since.
    pub(super) fn speculation_takes_over(&mut self, ran: bool) {
        let Some(speculating) = self.net.speculating.take() else {
            return;
        };
        let limits = speculating.limits;
        let Side::Follows {
            replica,
            sockets,
            said,
            ..
        } = speculating.side
        else {
            self.net.speculating = Some(speculating);
            return;
        };
        let now_us = self.now_us();
        let driver = match ran {
            true => Ok(Driver::new(limits, sockets)),
            false => Driver::take_over(limits, replica, sockets, now_us, self),
        };
        match driver {
            Ok(driver) => {
                self.net.speculating = Some(Speculating::speaking(limits, driver));
                self.speculate_on_said(said);
            }
            Err(error) => {
                self.event(
                    EventKind::QemuDied,
                    format!("the TUN of the shadow sockets: {error}"),
                );
                self.end_copy("its shadow sockets are gone");
            }
        }
    }
}
