//! Syncs, joins and fail-overs of the model.

use super::*;

impl World {
    /// When the next sync is asked for: on a difference at once, when output waits long enough and nobody has anything
    /// to do, and now and then.
    pub(super) fn sync_at(&self) -> Option<u64> {
        if self.sync.is_some() || self.backup.is_none() || !self.complete || self.orphaned {
            return None;
        }
        if self.primary.output.differs() {
            return Some(self.now);
        }
        let waits = self
            .waits_since
            .map(|since| since + u64::from(self.plan.patience_us));
        waits.into_iter().chain([self.next_sync_at]).min()
    }

    pub(super) fn look(&mut self) {
        let agreed = self.agreed.len();
        let idle = |host: &Host| !host.has_work(agreed) && !host.stands;
        let backup = self.passive || self.backup.as_ref().is_some_and(idle);
        let both = idle(&self.primary) && backup && self.words_under_way == 0;
        let waits = both && self.primary.output.waits();
        self.waits_since = waits.then(|| self.waits_since.unwrap_or(self.now));
    }

    pub(super) fn request_sync(&mut self, joins: bool) {
        let epoch = self.primary.output.epoch();
        let runs = joins || !self.random.percent(self.plan.passive_percent);
        let agreed = runs || !self.passive;
        self.sync = Some(Sync {
            epoch,
            joins,
            agreed,
            runs,
            state: None,
        });
        self.seen.syncs += 1;
        if agreed {
            self.agreed.push(Entry::Sync(epoch));
        } else {
            self.primary.stand(self.now);
            self.draw_line();
        }
    }

    /// The primary stands at the line.
    pub(super) fn draw_line(&mut self) {
        let Some(sync) = &mut self.sync else {
            // Its backup is gone.
            return self.primary.run(self.now);
        };
        if sync.joins {
            self.primary.output.compare_from(sync.epoch);
        }
        let table = self.primary.output.draw_line();
        sync.state = Some(Line {
            table,
            guest: self.primary.guest.clone(),
            clock: self.primary.clock(self.now),
            read_to: self.primary.read_to,
        });
        if sync.joins {
            self.primary.output.set_voice(Voice::Protected);
            let output = Output::new(Voice::Backup, sync.epoch);
            let random = Random::new(self.random.draw());
            let mut backup = Host::new(output, Guest::default(), random, self.primary.read_to, true);
            backup.stand(self.now);
            self.backup = Some(backup);
        }
        self.after(100, 3000, Event::PrimaryRuns);
        self.both_stand();
    }

    pub(super) fn both_stand(&mut self) {
        let drawn = self.sync.as_ref().is_some_and(|sync| sync.state.is_some());
        if drawn && self.backup.as_ref().is_some_and(|backup| backup.stands) {
            self.after(100, 20_000, Event::Staged);
        }
    }

    /// The backup holds the whole state.
    pub(super) fn staged(&mut self) -> Result<(), String> {
        if let Some(sync) = &mut self.sync
            && let Some(backup) = &mut self.backup
            && let Some(line) = sync.state.take()
        {
            let applied = backup.output.applied(sync.epoch, &line.table);
            applied.map_err(|error| format!("a table that cannot be read: {error}"))?;
            backup.becomes(line.guest, line.clock);
            backup.read_to = line.read_to;
            self.backup_is_passive = !sync.runs;
            self.told(Event::Acknowledged);
            self.after(100, 5000, Event::Loaded);
        }
        Ok(())
    }

    fn told(&mut self, event: Event) {
        self.told_at = self.told_at.max(self.now + self.random.within(20, 1500));
        self.at(self.told_at, event);
    }

    pub(super) fn acknowledged(&mut self) {
        let Some(sync) = &self.sync else { return };
        if sync.joins {
            self.primary.output.line_is_covered();
            self.after(50, 2000, Event::Complete);
        } else {
            self.primary.output.acknowledged(sync.epoch);
        }
    }

    /// The group has agreed that the backup is complete.
    pub(super) fn completed(&mut self) {
        self.complete = true;
        let epoch = self
            .backup
            .as_ref()
            .map_or(Epoch(0), |backup| Epoch(backup.output.epoch().0 - 1));
        self.primary.output.set_voice(Voice::Protected);
        self.primary.output.acknowledged(epoch);
        if let Some(at) = self.plan.fail_over_at
            && self.fails_left > 0
        {
            let at = u64::from(at) * 1000;
            self.fails_left -= 1;
            let event = match self.random.within(0, 3) {
                0 => Event::LosesBackup,
                _ => Event::Fails,
            };
            self.after(at / 2, at, event);
        }
    }

    pub(super) fn loaded(&mut self) {
        if let Some(backup) = &mut self.backup
            && !self.backup_is_passive
        {
            backup.run(self.now);
        }
        self.told(Event::LoadedHeard);
    }

    pub(super) fn loaded_heard(&mut self) {
        let Some(sync) = self.sync.take() else { return };
        self.primary.output.backup_loaded(sync.epoch);
        self.passive = !sync.runs;
        self.next_sync_at = self.now + self.random.within(1000, 400_000);
    }

    /// The primary is gone. What it has sent may still come, what it was told is lost.
    pub(super) fn fails(&mut self) {
        if !self.complete || self.orphaned {
            return;
        }
        self.orphaned = true;
        self.reign += 1;
        self.seen.from_passive += u64::from(self.backup_is_passive);
        (self.sync, self.passive) = (None, false);
        self.words_under_way = 0;
        if let Some(backup) = &mut self.backup {
            // A staged state is loaded; one that is not whole is thrown away.
            backup.run(self.now);
            if std::mem::take(&mut self.backup_is_passive) {
                // It executes nothing that was agreed meanwhile: clients send it again.
                backup.read_to = self.agreed.len();
            }
        }
        self.take_over_if_ready();
    }

    /// The backup is gone, and the group has agreed that it does not count any more.
    pub(super) fn loses_backup(&mut self) {
        if !self.complete || self.orphaned {
            return;
        }
        self.reign += 1;
        self.seen.lost_backups += 1;
        (self.sync, self.backup, self.complete) = (None, None, false);
        (self.passive, self.backup_is_passive) = (false, false);
        self.words_under_way = 0;
        self.primary.run(self.now);
        self.primary.output.set_voice(Voice::Alone);
        self.after(1000, 200_000, Event::Join);
    }

    pub(super) fn take_over_if_ready(&mut self) {
        let agreed = self.agreed.len();
        if !self.orphaned || self.backup.as_ref().is_none_or(|backup| backup.has_work(agreed)) {
            return;
        }
        let Some(mut host) = self.backup.take() else {
            return;
        };
        let tally = self.primary.output.tally();
        self.seen.by_sync += tally.by_sync;
        self.seen.matched += tally.released - tally.by_sync;
        self.seen.take_overs += 1;
        if self.plan.broken != Some(Broken::TakesOverWithoutAWord) {
            host.output.take_over(self.now);
        }
        host.output.set_voice(Voice::Alone);
        host.is_backup = false;
        self.primary = host;
        (self.complete, self.orphaned) = (false, false);
        self.after(1000, 200_000, Event::Join);
    }
}
