//! What it decides: what a replica's process does in the measurements: drives a `Group`, proposes when it leads, applies.
//!
//! * **Flow:** [`measure`] starts three; replica 0 is the only one that may lead, measures every payload and number of
//!   outstanding entries, prints figures and ends. For `leader-kill` and `crash` any may lead, and all report what they see.
//! * **Invariants:** (1) an applied entry's content is checked against its number; (2) the chain of hashes is over index and
//!   payload, so equal chains mean equal logs.
//! * **Not here:** who is killed (`faults`).

use super::child::{Config, Links, Part, Scratch, figure, say, spawn, write_keys};
use super::raw::{PAYLOADS, figures};
use super::{Durability, Fabric, Series, Wait, scale};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use dunlin_core::consensus::{EntryKind, Member, Role};
use dunlin_core::units::{Index, ReplicaId};
use dunlin_fabric::group::{Group, GroupConfig, GroupEvent};
use dunlin_fabric::log::Mode;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What kind of replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ReplicaPart {
    pub(super) job: Job,
    pub(super) inline_disk: bool,
}
/// What it does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Job {
    /// Replica 0 leads and measures.
    Measure { seconds: f64 },
    /// The same in a group of so many members, in memory, 64 bytes an entry; also what it costs the leader ([`super::scale`]).
    Scale { seconds: f64, members: u8 },
    /// Whoever leads proposes numbers up to `entries`, `per_s` of them (0: none), and everybody reports.
    Count { entries: u64, per_s: u64 },
}

impl Job {
    /// Nobody else may come to lead, so nobody else need be connected with all.
    pub(super) fn is_led_by_the_first(&self) -> bool {
        matches!(self, Self::Scale { .. })
    }
}

/// What a counting replica reports.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Line {
    /// It leads and its first entry of the term is agreed.
    Decides { term: u64 },
    /// It follows a leader and takes part.
    Follows,
    /// The newest number that it has applied, at which index, and the chain up to there.
    Applied { number: u64, index: u64, chain: u64 },
    /// It is the leader and was told that this is agreed: it must never be lost.
    Acked { number: u64, index: u64, chain: u64 },
    /// Something that must not be.
    Wrong(String),
}

pub(super) fn group(config: &Config, part: &ReplicaPart) -> Result<Group> {
    let members = match part.job {
        Job::Scale { members, .. } => members,
        Job::Measure { .. } | Job::Count { .. } => 3,
    };
    let members = (0..members).map(Member::full).collect();
    let durability = match config.durability {
        Durability::Memory => dunlin_core::consensus::Durability::Memory,
        Durability::Disk => dunlin_core::consensus::Durability::Disk,
    };
    let dir = config.dir.join(format!("log{}", config.me));
    let mut cfg = GroupConfig::new(dir, ReplicaId(config.me), members, durability);
    cfg.wait = config.wait.policy();
    cfg.disk_mode = if part.inline_disk {
        Mode::Inline
    } else {
        Mode::Thread
    };
    match part.job {
        // Nothing is truncated, so that a restarted replica counts from the start.
        Job::Count { .. } => cfg.core.ring_entries = 1 << 21,
        // Busy processes on few cores: a figure must not be of an election,
        Job::Measure { .. } => (cfg.core.election_min_us, cfg.core.election_max_us) = (500_000, 1_000_000),
        // nor, where a hundred share them, of heartbeats.
        Job::Scale { .. } => {
            (cfg.core.election_min_us, cfg.core.election_max_us) = (3_000_000, 4_000_000);
            cfg.core.heartbeat_us = 100_000;
        }
    }
    Ok(Group::open(cfg)?)
}

pub(super) fn measure(
    scratch: &Scratch,
    fabric: Fabric,
    durability: Durability,
    wait: Wait,
    inline_disk: bool,
    seconds: f64,
) -> Result<Series> {
    let dir = scratch.sub("group")?;
    write_keys(&dir)?;
    let start = |me| {
        let part = Part::Replica(ReplicaPart {
            job: Job::Measure { seconds },
            inline_disk,
        });
        spawn(&Config {
            me,
            dir: dir.clone(),
            fabric,
            durability,
            wait,
            part,
        })
    };
    let _followers = [start(1)?, start(2)?];
    let figures = figures(&mut start(0)?, 3 * PAYLOADS.len())?;
    let name = |v: serde_json::Value| v.as_str().unwrap_or("?").to_owned();
    let (fabric, durability) = (
        name(serde_json::to_value(fabric)?),
        name(serde_json::to_value(durability)?),
    );
    let what = format!(
        "dunlin {fabric} {durability}{}",
        if inline_disk { ", log written inline" } else { "" }
    );
    Ok(Series {
        what,
        wait: wait.policy().to_string(),
        figures,
    })
}

/// Since when, and what it said last: what waits does not need to read it again.
struct Clock(Instant, std::cell::Cell<u64>);

impl Clock {
    fn now_us(&self) -> u64 {
        self.1.set(self.0.elapsed().as_micros() as u64);
        self.1.get()
    }
}

/// A replica, its links and its clock.
struct Loop<'a> {
    config: &'a Config,
    group: Group,
    links: Links,
    clock: Clock,
}

impl Loop<'_> {
    fn take_links(&mut self) {
        while let Ok((peer, stream)) = self.links.arrived.try_recv() {
            // A peer that was killed meanwhile: its successor comes.
            if self.group.add_link(ReplicaId(peer), stream).is_err() {
                self.links.lost(self.config.me, peer);
            }
        }
    }

    /// Handles what every job handles alike; gives back the rest.
    fn poll(&mut self) -> Result<Option<GroupEvent>> {
        match self.group.poll(self.clock.now_us()) {
            Some(GroupEvent::LinkLost { peer, .. }) => self.links.lost(self.config.me, peer.0),
            Some(GroupEvent::DiskFailed(why) | GroupEvent::DiskFull(why)) => bail!("the disk: {why}"),
            Some(GroupEvent::ProtocolViolation { peer, what, .. }) => {
                say(&Line::Wrong(format!("violation by {peer:?}: {what}")))?
            }
            other => return Ok(other),
        }
        self.poll()
    }

    fn wait(&mut self) {
        let now = self.clock.1.get();
        self.group.wait(now, now + 5_000); // arriving links do not wake it
    }
}

pub(super) fn child(config: &Config, part: &ReplicaPart) -> Result<()> {
    let mut group = group(config, part)?;
    let links = Links::new(config)?;
    let clock = Clock(Instant::now(), std::cell::Cell::new(0));
    match part.job {
        Job::Measure { seconds } => {
            group.may_lead(config.me == 0);
            let mut this = Loop {
                config,
                group,
                links,
                clock,
            };
            if config.me == 0 {
                this.lead_and_measure(seconds)
            } else {
                this.follow()
            }
        }
        Job::Scale { seconds, .. } => {
            group.may_lead(config.me == 0);
            let mut this = Loop {
                config,
                group,
                links,
                clock,
            };
            if config.me == 0 {
                this.lead_a_large_group(seconds)
            } else {
                this.follow()
            }
        }
        Job::Count { entries, per_s } => Loop {
            config,
            group,
            links,
            clock,
        }
        .count(entries, per_s),
    }
}

/// So long the followers have to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Entries kept behind the last applied one before they are truncated.
const KEEP: u64 = 1024;

impl Loop<'_> {
    fn apply(&mut self, through: Index) {
        self.group.applied(through);
        if through.0 > self.group.core().first().0 + 2 * KEEP {
            self.group.truncate(Index(through.0 - KEEP), Bytes::new());
        }
    }

    fn follow(&mut self) -> Result<()> {
        loop {
            self.take_links();
            while let Some(event) = self.poll()? {
                match event {
                    GroupEvent::Committed { through } => self.apply(through),
                    GroupEvent::SnapshotInstalled(s) => self.group.applied(s.last.index),
                    _ => {}
                }
            }
            self.wait();
        }
    }

    /// Until this replica leads and all others have acknowledged something.
    fn lead(&mut self) -> Result<()> {
        let begun = Instant::now();
        while !(self.group.is_leader()
            && self
                .group
                .links()
                .iter()
                .all(|l| l.connected && l.acknowledged.is_some_and(|a| a.0 > 0)))
        {
            self.take_links();
            while let Some(event) = self.poll()? {
                if let GroupEvent::Committed { through } = event {
                    self.apply(through);
                }
            }
            if begun.elapsed() > PATIENCE {
                let links = self.group.links();
                let up = links.iter().filter(|link| link.connected).count();
                bail!(
                    "after {PATIENCE:?} {up} of {} followers are connected",
                    links.len()
                );
            }
            self.wait();
        }
        Ok(())
    }

    fn lead_a_large_group(&mut self, seconds: f64) -> Result<()> {
        self.lead()?;
        for outstanding in [1, 64] {
            self.run(64, outstanding, 0.2)?;
            let before = scale::cpu_us()?;
            let (samples, elapsed) = self.run(64, outstanding, seconds)?;
            let cpu_us = (scale::cpu_us()? - before) / samples.len().max(1) as f64;
            say(&scale::Cost {
                figure: figure(64, outstanding, samples, elapsed),
                cpu_us,
            })?;
        }
        Ok(())
    }

    fn lead_and_measure(&mut self, seconds: f64) -> Result<()> {
        self.lead()?;
        for payload in PAYLOADS {
            for outstanding in [1, 8, 64] {
                self.run(payload, outstanding, 0.1)?;
                let (samples, elapsed) = self.run(payload, outstanding, seconds)?;
                say(&figure(payload, outstanding, samples, elapsed))?;
            }
        }
        Ok(())
    }

    /// Keeps `outstanding` entries under way for so long; the time of each from `propose` to `Committed`.
    fn run(&mut self, payload: usize, outstanding: usize, seconds: f64) -> Result<(Vec<u64>, f64)> {
        let bytes = Bytes::from(vec![7u8; payload]);
        let (mut samples, mut under_way) = (Vec::with_capacity(1 << 20), VecDeque::new());
        let begin = Instant::now();
        let mut proposing = true;
        while proposing || !under_way.is_empty() {
            while proposing && under_way.len() < outstanding {
                match self.group.propose(bytes.clone()) {
                    Ok(index) => under_way.push_back((index, Instant::now())),
                    Err(e) => bail!("the leader refused: {e}"),
                }
            }
            while let Some(event) = self.poll()? {
                match event {
                    GroupEvent::Committed { through } => {
                        let now = Instant::now();
                        while let Some((_, t)) = under_way.front().filter(|(index, _)| *index <= through) {
                            samples.push((now - *t).as_nanos() as u64);
                            under_way.pop_front();
                        }
                        proposing = (now - begin).as_secs_f64() < seconds;
                        self.apply(through);
                        if outstanding > under_way.len() && proposing {
                            break; // propose first: that is what a loaded owner does
                        }
                    }
                    GroupEvent::BecameFollower { .. } => {
                        bail!("lost the leadership in the measurement: too few cores")
                    }
                    _ => {}
                }
            }
            if !proposing || under_way.len() >= outstanding {
                self.wait();
            }
        }
        Ok((samples, begin.elapsed().as_secs_f64()))
    }

    fn count(&mut self, entries: u64, per_s: u64) -> Result<()> {
        let (mut applied, mut index, mut chain) = (0u64, 0u64, 0u64);
        let (mut barrier, mut decides, mut follows) = (None, false, false);
        let (mut first, mut proposed, mut since, mut reported) = (0u64, 0u64, Instant::now(), Instant::now());
        loop {
            self.take_links();
            while let Some(event) = self.poll()? {
                match event {
                    GroupEvent::BecameLeader { barrier: b, .. } => {
                        (barrier, decides, follows) = (Some(b), false, false)
                    }
                    GroupEvent::BecameFollower { .. } => (barrier, decides, follows) = (None, false, false),
                    GroupEvent::Committed { through } => {
                        while index < through.0 {
                            index += 1;
                            let entry = self
                                .group
                                .entry(Index(index))
                                .context("an agreed entry is not held")?;
                            let mut all = index.to_le_bytes().to_vec();
                            all.extend_from_slice(&chain.to_le_bytes());
                            all.extend_from_slice(&entry.payload);
                            chain = fold(&all);
                            if entry.kind == EntryKind::Data {
                                let number = entry
                                    .payload
                                    .first_chunk::<8>()
                                    .map_or(0, |b| u64::from_le_bytes(*b));
                                if number != applied + 1 {
                                    say(&Line::Wrong(format!(
                                        "number {number} at index {index} follows {applied}"
                                    )))?;
                                }
                                applied = number;
                            }
                        }
                        self.group.applied(through);
                        if barrier.is_some_and(|b| b <= through) {
                            if !decides {
                                decides = true;
                                (first, proposed, since) = (applied, applied, Instant::now());
                                say(&Line::Decides {
                                    term: self.group.term().0,
                                })?;
                            }
                            say(&Line::Acked {
                                number: applied,
                                index,
                                chain,
                            })?;
                        } else if reported.elapsed().as_millis() > 20 || applied == entries {
                            reported = Instant::now();
                            say(&Line::Applied {
                                number: applied,
                                index,
                                chain,
                            })?;
                        }
                    }
                    _ => {}
                }
            }
            let taking_part = matches!(self.group.role(), Role::Follower { leader: Some(_) });
            if taking_part
                && !follows
                && self.group.links().iter().all(|l| l.connected)
                && self.group.committed().0 > 0
            {
                follows = true;
                say(&Line::Follows)?;
            }
            if decides && per_s > 0 {
                // So many are due since this reign began; at most 64 under way.
                let due = first + (since.elapsed().as_secs_f64() * per_s as f64) as u64;
                while proposed < due.min(entries).min(applied + 64) {
                    let mut payload = (proposed + 1).to_le_bytes().to_vec();
                    payload.extend_from_slice(&self.clock.now_us().to_le_bytes());
                    payload.extend_from_slice(&std::process::id().to_le_bytes());
                    if self.group.propose(Bytes::from(payload)).is_err() {
                        break;
                    }
                    proposed += 1;
                }
            }
            let now = self.clock.now_us();
            self.group
                .wait(now, now + if decides && per_s > 0 { 300 } else { 5_000 });
        }
    }
}

/// FNV-1a: enough to compare logs that nobody forges.
fn fold(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}
