//! Whether this host feeds a VM's standby now: as the VM's file, and this host's part in it, say.
//!
//! Flow: the daemon looks once a second (`daemon::standby`) -> a [`Feeder`] begins, goes on or ends.
//!
//! Not here: what it sends (`checkpoint`), when the standby gets a part (core's `replica::standby`).

use super::VmHandle;
use super::checkpoint::{Feeder, Feeds};
use super::shared::Host;
use dunlin_api::Role;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl VmHandle {
    /// Begins to feed the standby, goes on, or ends it: as the VM's file, and this host's part in it, say now.
    pub fn feed_standby(&self, host: &Arc<Host>) {
        let mut feeder = self.feeder.lock();
        if self.shared.over.load(Ordering::SeqCst) {
            // It says so to the standby.
            *feeder = None;
            return;
        }
        let config = self.config();
        let memory = self.shared.copy.lock().clone();
        let is_backup = self.shared.status.lock().role == Role::Backup && memory.strong_count() > 0;
        let standby = config.standby.as_ref().filter(|_| is_backup);
        let Some((standby, every)) = standby.and_then(|standby| Some((standby, standby.checkpoint?))) else {
            *feeder = None;
            return;
        };
        if feeder
            .as_ref()
            .is_some_and(|feeder| feeder.is_of(standby, &memory))
        {
            return;
        }
        // The one before has ended when its thread looks next.
        *feeder = None;
        let feeds = Feeds {
            host: host.clone(),
            vm: config.name.clone(),
            shared: self.shared.clone(),
            standby: standby.clone(),
            every,
            memory,
        };
        match Feeder::start(feeds) {
            Ok(begun) => *feeder = Some(begun),
            Err(error) => tracing::warn!(vm = config.name, "a thread for checkpoints: {error}"),
        }
    }
}
