//! Frames that pass through the loop, in whichever role: from the network into the log or the VM, and from the VM to the network.
//!
//! Invariant: only a leader of the group, as of an entry of its own term, takes inputs and releases outputs (`primary`'s first).
//!
//! Not here: what may leave and when (core's `output`), the devices (`nics`).

use super::nics::MOST_BATCH_BYTES;
use super::state::{Role, VmLoop};
use dunlin_api::EventKind;
use dunlin_core::agreed::{Agreed, Frame};
use dunlin_core::offload::MOST_SEGMENTS;
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::Inputs;
use dunlin_core::units::Epoch;
use dunlin_core::wire::agreed::MOST_FRAMES;
use dunlin_core::wire::sync::{SyncMessage, parts};

/// Entries under way to the group beyond which the network has to wait.
const INPUTS_UNDER_WAY: u64 = 1024;

impl VmLoop {
    /// Whether frames from the network are taken (invariant 1).
    pub(super) fn takes_inputs(&self) -> bool {
        matches!(&self.role, Role::Primary(primary) if primary.has_machine())
            && self.agreement.leads()
            && self.group.is_leader()
            && self.net.output.voice() != Voice::Shut
            && self.group.appended().index.0 - self.group.committed().0 < INPUTS_UNDER_WAY
            && (!self.inputs_are_agreed() || self.group.has_input_room(MOST_BATCH_BYTES))
    }

    /// Whether the VM has to wait before it says more: its output waits for a sync, and takes all that it may. QEMU's socket
    /// fills up then, and its card's queue, as on a slow wire.
    pub(super) fn output_has_to_wait(&self) -> bool {
        let stopping = matches!(&self.role, Role::Primary(primary) if primary.is_stopping());
        self.net.output.is_full() && !stopping
    }

    /// What the VM says here from now on.
    pub(super) fn new_output(&self, voice: Voice, epoch: Epoch) -> Output {
        Output::new(voice, epoch)
            .with_budget(self.config.memory.outbound_bytes())
            .with_http_dates(self.config.sync.ignore_http_date)
    }

    /// Whether frames of the log go to the VM here.
    pub(super) fn executes_inputs(&self) -> bool {
        match &self.role {
            Role::Primary(primary) => primary.has_machine(),
            Role::Backup(backup) => backup.executes_inputs(),
            Role::None => false,
        }
    }

    /// Whether inputs pass the log before the VM sees them.
    pub(super) fn inputs_are_agreed(&self) -> bool {
        let inputs = match &self.role {
            Role::Primary(primary) => primary.epochs().inputs(),
            Role::Backup(_) | Role::None => self.first_rules().inputs(),
        };
        inputs == Inputs::Agreed
    }

    pub(super) fn queue_input(&mut self, frame: &Frame) {
        if self.has_driver() {
            return self.speculate_on_heard(vec![frame.clone()]);
        }
        if let Some(nics) = &mut self.net.nics {
            nics.queue(&self.net.output.heard(frame));
            self.net.frames_in += 1;
        }
    }

    pub(super) fn read_taps(&mut self) {
        if !self.takes_inputs() {
            return;
        }
        let Some(nics) = &mut self.net.nics else { return };
        let frames = nics.read_taps();
        if nics.old_source_was_seen() {
            self.net.announcements.old_source_seen();
        }
        self.take_in(frames);
    }

    /// What the last looks at the network have shown.
    pub(super) fn tell_of_gone_taps(&mut self) {
        let gone = self.net.nics.as_mut().map(|nics| nics.newly_gone());
        for (card, tap) in gone.unwrap_or_default() {
            let text = format!(
                "somebody has removed the network device '{tap}': nothing comes or goes by the VM's card {card} here until its copy begins anew, as by 'dunlin switchover'"
            );
            self.event(EventKind::TapGone, text);
        }
    }

    /// A host that does not speak for the VM keeps what the network brings to it as well.
    pub(super) fn overhear(&mut self) {
        let now_us = self.now_us();
        if let (Role::Backup(_), Some(nics)) = (&self.role, &mut self.net.nics) {
            nics.overhear(now_us);
        }
    }

    /// Frames of the log were heard here, too, or will be.
    pub(super) fn match_overheard(&mut self, frames: &[Frame]) {
        let now_us = self.now_us();
        if let (Role::Backup(_), Some(nics)) = (&self.role, &mut self.net.nics) {
            frames.iter().for_each(|frame| nics.agreed(frame, now_us));
        }
    }

    /// This host has taken the VM over: it gets what was said to the old one and reached this one too. How many frames those were. `ran`: its copy
    /// ran on agreed inputs, whatever becomes of the next ones.
    pub(super) fn take_in_overheard(&mut self, ran: bool) -> usize {
        let (now_us, agreed) = (self.now_us(), ran || self.inputs_are_agreed());
        let Some(nics) = &mut self.net.nics else { return 0 };
        let frames = nics.take_overheard(agreed, now_us);
        let (count, mut frames) = (frames.len(), frames.into_iter().peekable());
        while frames.peek().is_some() {
            let mut bytes = 0;
            let mut batch = Vec::new();
            while batch.len() < MOST_FRAMES
                && let Some(frame) = frames.next_if(|frame| bytes + frame.bytes.len() < MOST_BATCH_BYTES)
            {
                bytes += frame.bytes.len();
                batch.push(frame);
            }
            self.take_in(batch);
        }
        count
    }

    /// Frames for the VM: by the log where inputs are agreed.
    fn take_in(&mut self, frames: Vec<Frame>) {
        if frames.is_empty() {
            return;
        }
        let agreed = self.inputs_are_agreed();
        // What shadow sockets answer does not pass the output.
        if self.net.speculating.is_none() || agreed {
            let now_us = self.now_us();
            frames
                .iter()
                .for_each(|frame| self.net.output.asked(frame, now_us));
        }
        if agreed {
            // A large frame of small segments may make more than an entry holds.
            let mut frames = frames.into_iter().peekable();
            while frames.peek().is_some() {
                let batch: Vec<Frame> = frames.by_ref().take(MOST_FRAMES).collect();
                let count = batch.len();
                if !self.propose(&Agreed::Frames(batch))
                    && let Some(nics) = &mut self.net.nics
                {
                    nics.lost(count);
                }
            }
        } else if self.net.speculating.is_some() {
            self.speculate_on_heard(frames);
        } else {
            frames.iter().for_each(|frame| self.queue_input(frame));
        }
    }

    /// What the VM here has sent: held on a primary, kept on a backup, which tells the primary too.
    pub(super) fn read_ports(&mut self) {
        if self.speculates_on_ports() {
            return self.read_ports_speculatively();
        }
        let now_us = self.now_us();
        let Some(nics) = &mut self.net.nics else { return };
        let talker = match &self.role {
            Role::Backup(backup) => backup.told_to(),
            Role::Primary(_) | Role::None => None,
        };
        let mut told = Vec::new();
        let output = &mut self.net.output;
        let read = nics.read_ports(|frame| {
            if talker.is_some() {
                told.push(frame.clone());
            }
            output.said(frame, now_us);
        });
        if let Some(talker) = talker
            && !told.is_empty()
        {
            let epoch = output.epoch();
            for frames in parts::frames(told) {
                // Dropped where the primary does not read: it releases less then.
                talker.say(SyncMessage::Said { epoch, frames });
            }
        }
        if let Err(error) = read {
            self.machine_died(&error.to_string());
        }
    }

    /// The same of a VM whose connections are acknowledged before they may leave.
    fn read_ports_speculatively(&mut self) {
        let Some(nics) = &mut self.net.nics else { return };
        let mut said = Vec::new();
        let read = nics.read_ports(|frame| said.push(frame));
        if !said.is_empty() {
            self.speculate_on_said(said);
        }
        if let Err(error) = read {
            self.machine_died(&error.to_string());
        }
    }

    pub(super) fn flush_ports(&mut self) {
        let Some(nics) = &mut self.net.nics else { return };
        if let Err(error) = nics.flush() {
            self.machine_died(&error.to_string());
        }
    }

    /// Whether the network may hear this host now (invariant 1). While another complete copy exists that could be elected, only
    /// for as long as a majority has promised to elect nobody: this is looked at before each single write.
    pub(super) fn may_speak(&self, now_us: u64) -> bool {
        let leads = self.group.is_leader() && self.agreement.leads();
        leads
            && match self.net.output.voice() {
                Voice::Alone => true,
                Voice::Protected => self.group.may_speak(now_us),
                Voice::Backup | Voice::Shut => false,
            }
    }

    /// Lets out what may leave.
    pub(super) fn release(&mut self) {
        if self.net.speculating.is_some() {
            self.release_speculation();
        }
        while self.take_released() {
            self.send_released();
        }
    }

    /// Takes what may leave, up to what leaves as one large frame. False: there was nothing.
    fn take_released(&mut self) -> bool {
        for taken in 0..MOST_SEGMENTS {
            let now_us = self.now_us();
            if !self.may_speak(now_us) {
                return taken > 0;
            }
            if self.net.announcements.take_due(now_us)
                && let Some(nics) = &self.net.nics
            {
                nics.announce();
            }
            let Some(frame) = self.net.output.release(now_us) else {
                return taken > 0;
            };
            self.net.frames_out += 1;
            if self.net.speculating.is_some() {
                self.speculation_sees_leaving(&frame);
            }
            if let Some(nics) = &mut self.net.nics {
                nics.release(frame);
            }
        }
        true
    }

    /// The host may have stood still since, for longer than its promise lasts: then frames are lost, as on any wire.
    pub(super) fn send_released(&mut self) {
        loop {
            let may_speak = self.may_speak(self.now_us());
            if !self
                .net
                .nics
                .as_mut()
                .is_some_and(|nics| nics.send_next(may_speak))
            {
                return;
            }
        }
    }
}
