//! What a VM's queues hold on this host, for people: the figures of docs/budgets.md.
//!
//! Not here: the limits themselves (each queue's own), what happens at them (the same), a disk's buffers (`disks`).

use super::nics::Nics;
use super::session::talker::Talker;
use super::state::{Role, VmLoop};
use dunlin_api::QueueFigures;

/// Held, limit, dropped: as the queues themselves say it.
type Held = (usize, usize, u64);

impl VmLoop {
    /// All of them, whatever role this host has: what there is not holds nothing.
    pub(super) fn queues(&self) -> Vec<QueueFigures> {
        let ((_, log), (_, log_limit)) = (self.group.log_size(), self.group.log_limits());
        let talker = match &self.role {
            Role::Backup(backup) => backup.talker().map(Talker::queue),
            Role::Primary(_) | Role::None => None,
        };
        let (disk, disk_limit) = self.group.disk_queue();
        let mut queues: Vec<(&str, Held)> = vec![
            ("log", (log, log_limit, 0)),
            ("log-disk", (disk, disk_limit, 0)),
            ("links", self.group.link_queue()),
            (
                "inbound",
                self.net.nics.as_ref().map(Nics::inbound).unwrap_or_default(),
            ),
            (
                "overheard",
                self.net.nics.as_ref().map(Nics::overheard).unwrap_or_default(),
            ),
            ("outbound", self.net.output.held()),
            ("retransmit", self.net.output.retransmit()),
            ("compared", self.net.output.compared()),
            ("words-in", self.inbox.to_loop.words()),
            ("words-out", talker.unwrap_or_default()),
        ];
        if let Some(speculating) = &self.net.speculating {
            queues.push(("speculation", speculating.kept()));
        }
        let shown = queues.into_iter();
        shown.map(|(name, held)| QueueFigures::new(name, held)).collect()
    }
}
