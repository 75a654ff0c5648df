//! No copy is alive anywhere: who boots the VM from its disk.

use super::host::{Copy, PrimaryCopy, Vm};
use super::next::Next;
use super::world::{WITNESS, World};
use dunlin_core::consensus::{Consensus, Member, Role};
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::cold_start::{DiskMark, Holding, LivingCopy, Look, Sight};
use dunlin_core::replica::leadership::Part;
use dunlin_core::units::{Epoch, ReplicaId};

/// A VM boots for so long.
const BOOT_US: u64 = 20_000;

impl World {
    /// A turn's look at it.
    pub(super) fn look_after_loss(&mut self, id: u8) {
        let now_us = self.now_us;
        let me = ReplicaId(id);
        let host = self.host(id);
        let Some(node) = &host.node else { return };
        let sight = Sight {
            now_us,
            lost: id != WITNESS
                && host.leadership.part() == Part::None
                && node.leader().is_none_or(|leader| leader == me),
            leads: node.role() == Role::Leader,
            has_lived: !host.leadership.is_fresh(),
            recovering: node.role() == Role::Recovering,
        };
        if host.cold.look(&sight) != Look::Inquires {
            return;
        }
        let incarnation = host.incarnation;
        host.answers.clear();
        host.silent = 0;
        for of in (0..=WITNESS).filter(|of| *of != id) {
            self.host(id).silent += 1;
            let after_us = self.random.between(100, 20_000);
            self.plan(after_us, Next::Asked(id, incarnation, of));
        }
    }

    /// What a host would say.
    fn holding(&self, id: u8) -> Option<Holding> {
        let host = &self.hosts[usize::from(id)];
        let node = host.node.as_ref()?;
        Some(Holding {
            copy: match (&host.copy, host.may_lead()) {
                (None, _) => LivingCopy::None,
                (Some(_), true) => LivingCopy::Stands,
                (Some(_), false) => LivingCopy::Waits,
            },
            led: node.leader().is_some(),
            last: node.appended(),
            complete: host.leadership.appended_complete(),
            disks: (id != WITNESS).then_some(host.image.mark).into_iter().collect(),
            noted: None,
            recovering: node.role() == Role::Recovering,
        })
    }

    /// Another host hears the question, or does not.
    pub(super) fn is_asked(&mut self, id: u8, of: u8) {
        let is_cut = self.cut.contains(&(id, of)) || self.cut.contains(&(of, id));
        let said = self.holding(of).filter(|_| !is_cut);
        let after_us = self.random.between(100, 20_000);
        let host = self.host(id);
        host.answers.extend(said.map(|said| (ReplicaId(of), said)));
        host.silent -= 1;
        if host.silent == 0 {
            let incarnation = host.incarnation;
            self.plan(after_us, Next::Judges(id, incarnation));
        }
    }

    /// All have answered that will.
    pub(super) fn judges(&mut self, id: u8) {
        let Some(mine) = self.holding(id) else { return };
        let group = [Member::full(0), Member::full(1), Member::witness(WITNESS)];
        let now_us = self.now_us;
        let host = self.host(id);
        let verdict = host.cold.judge(&group, ReplicaId(id), &mine, &host.answers);
        let answered = host.cold.answered(now_us, Some(&verdict));
        self.note(|| format!("{id} finds {verdict:?}: {answered:?}"));
    }

    /// The group has agreed that it may: all that clients were told has to be on its disk.
    pub(super) fn boots(&mut self, id: u8) {
        let (first, boots_at_us) = (self.first, self.now_us + BOOT_US);
        let host = self.host(id);
        let has_lived = host.image.mark.term.0 > 0;
        host.image.mark = DiskMark {
            consistent: true,
            term: host.term(),
            primary: true,
            epoch: Epoch(0),
        };
        let epoch = host.leadership.state().epoch.next();
        let mut primary = PrimaryCopy::new(Vm::boots(&host.image), first, epoch);
        primary.boots_at_us = Some(boots_at_us);
        primary.machine = self.new_machine(Voice::Shut, epoch);
        let host = self.host(id);
        host.copy = Some(Copy::Primary(Box::new(primary)));
        self.tally.cold_starts += u64::from(has_lived);
        if let Some(net) = self.net.as_mut().filter(|_| has_lived) {
            net.forgets_connections(self.now_us);
        }
        self.check_explains(id, "that boots");
    }

    /// The disk of a host that is brought in as a backup is no disk until the copy is done.
    pub(super) fn image_is_copied_anew(&mut self, id: u8) {
        let host = self.host(id);
        host.image.mark = DiskMark {
            term: host.term(),
            ..DiskMark::default()
        };
    }

    /// A backup has applied a sync.
    pub(super) fn image_moves_on(&mut self, id: u8) {
        let host = self.host(id);
        if let Some(Copy::Backup(backup)) = &host.copy {
            host.image.said.clone_from(&backup.vm.said);
            host.image.mark.consistent = true;
            host.image.mark.epoch = backup.epoch;
        }
    }

    /// A backup's copy is an ordinary VM, and its disk an ordinary disk.
    pub(super) fn image_is_taken_over(&mut self, id: u8) {
        self.image_moves_on(id);
        self.marks_image(id);
    }

    /// The image is a primary's, in this term.
    pub(super) fn marks_image(&mut self, id: u8) {
        let host = self.host(id);
        host.image.mark.term = host.node.as_ref().map_or(host.image.mark.term, Consensus::term);
        host.image.mark.primary = true;
    }
}
