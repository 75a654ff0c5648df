//! What it decides: whom to kill, and whether what the survivors say is what they promised.
//!
//! * **Flow:** three counting replicas ([`super::replica`]); this process reads their lines on one channel, kills with SIGKILL,
//!   starts again, and checks.
//! * **Invariants:** (1) a time is from the SIGKILL to the line that a new leader has an entry of its own term agreed; (2) an
//!   acknowledged number, its index and the chain up to it are the same on every replica ever after.
//! * **Not here:** VMs.

use super::child::{Config, Part, Running, Scratch, spawn, write_keys};
use super::replica::{Job, Line, ReplicaPart};
use super::{Durability, Fabric, Report, Target, Wait};
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Times of one way of killing leaders.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kills {
    /// "idle" or "loaded", with fabric and durability.
    pub what: String,
    /// How many.
    pub runs: usize,
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// The longest.
    pub worst_ms: f64,
}

/// What the crash run found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Crash {
    /// Fabric and durability.
    pub what: String,
    /// Numbers that all three hold at the end, in order.
    pub entries: u64,
    /// SIGKILLs on the way.
    pub kills: usize,
    /// Of these, of the leader.
    pub leader_kills: usize,
    /// Acknowledged positions that were compared.
    pub compared: usize,
    /// How long it took.
    pub seconds: f64,
}

struct Trio {
    config: Config,
    running: [Option<Running>; 3],
    generation: [u32; 3],
    lines: Receiver<(u8, u32, Line, Instant)>,
    sender: Sender<(u8, u32, Line, Instant)>,
    leader: Option<u8>,
    follows: [bool; 3],
}

impl Trio {
    fn start(dir: PathBuf, fabric: Fabric, durability: Durability, job: Job) -> Result<Self> {
        write_keys(&dir)?;
        let (sender, lines) = channel();
        let part = Part::Replica(ReplicaPart {
            job,
            inline_disk: false,
        });
        let config = Config {
            me: 0,
            dir,
            fabric,
            durability,
            wait: Wait::Block,
            part,
        };
        let running = [None, None, None];
        let mut this = Self {
            config,
            running,
            generation: [0; 3],
            lines,
            sender,
            leader: None,
            follows: [false; 3],
        };
        for id in 0..3 {
            this.spawn(id)?;
        }
        Ok(this)
    }

    fn spawn(&mut self, id: u8) -> Result<()> {
        let mut running = spawn(&Config {
            me: id,
            ..self.config.clone()
        })?;
        let out = running.0.stdout.take().expect("piped");
        self.generation[id as usize] += 1;
        let (sender, generation) = (self.sender.clone(), self.generation[id as usize]);
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let Ok(line) = serde_json::from_str(&line) else {
                    continue;
                }; // torn by the SIGKILL
                if sender.send((id, generation, line, Instant::now())).is_err() {
                    return;
                }
            }
        });
        self.running[id as usize] = Some(running);
        self.follows[id as usize] = false;
        Ok(())
    }

    fn kill(&mut self, id: u8) -> Instant {
        let at = Instant::now();
        self.running[id as usize] = None; // SIGKILL, and reaped
        self.follows[id as usize] = false;
        if self.leader == Some(id) {
            // Whoever follows the next one will say so.
            (self.leader, self.follows) = (None, [false; 3]);
        }
        at
    }

    /// Kills one that was deposed already.
    fn kill_follower(&mut self, id: u8) {
        let leader = self.leader;
        self.kill(id);
        self.leader = leader;
    }

    /// Freezes it (SIGSTOP): no end of a connection is seen, as when a host loses its power. It stays frozen until killed.
    fn freeze(&mut self, id: u8) -> Result<Instant> {
        if let Some(running) = &self.running[usize::from(id)] {
            let pid = nix::unistd::Pid::from_raw(running.0.id() as i32);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP)?;
        }
        (self.leader, self.follows) = (None, [false; 3]);
        Ok(Instant::now())
    }

    /// The next line of a replica that runs; keeps `leader` and `follows`.
    fn next(&mut self, until: Instant) -> Result<Option<(u8, Line, Instant)>> {
        loop {
            let Ok((id, generation, line, at)) = self
                .lines
                .recv_timeout(until.saturating_duration_since(Instant::now()))
            else {
                return Ok(None);
            };
            let current = self.running[id as usize].is_some() && self.generation[id as usize] == generation;
            match &line {
                Line::Wrong(what) => bail!("replica {id}: {what}"),
                Line::Decides { .. } if current => {
                    self.leader = Some(id);
                    self.follows[id as usize] = false;
                }
                Line::Follows if current => self.follows[id as usize] = true,
                // An acknowledgement of a replica that was killed since still counts.
                _ => {}
            }
            if current || matches!(line, Line::Acked { .. }) {
                return Ok(Some((id, line, at)));
            }
        }
    }

    fn is_whole(&self) -> bool {
        self.leader
            .is_some_and(|l| (0..3).all(|id| id == l || self.follows[usize::from(id)]))
    }
}

fn name(fabric: Fabric, durability: Durability) -> String {
    format!("{fabric:?} {durability:?}").to_lowercase()
}

/// Kills the leader `runs` times, idle and loaded.
pub(super) fn leader_kill(scratch: &Scratch, runs: usize, report: &mut Report) -> Result<()> {
    println!(
        "\nleader-kill: SIGKILL of the leader (silent: SIGSTOP, so that no connection ends) to a new leader's first agreed entry, default timeouts, wait: block"
    );
    for (load, per_s, silent) in [
        ("idle", 0, false),
        ("loaded", 5000, false),
        ("silent, loaded", 5000, true),
    ] {
        for (fabric, durability) in [(Fabric::Tcp, Durability::Disk), (Fabric::Shm, Durability::Memory)] {
            let job = Job::Count {
                entries: u64::MAX,
                per_s,
            };
            let mut trio = Trio::start(scratch.sub("kill")?, fabric, durability, job)?;
            let mut times = Vec::new();
            while times.len() < runs {
                let patience = Instant::now() + Duration::from_secs(20);
                while !trio.is_whole() {
                    if trio.next(patience)?.is_none() {
                        bail!(
                            "leader-kill {load}: the three did not come together after {} runs",
                            times.len()
                        );
                    }
                }
                // A moment of the load, or of idleness.
                let calm = Instant::now() + Duration::from_millis(30);
                while trio.next(calm)?.is_some() {}
                let Some(leader) = trio.leader.filter(|_| trio.is_whole()) else {
                    continue;
                };
                let killed = if silent {
                    trio.freeze(leader)?
                } else {
                    trio.kill(leader)
                };
                let decided = loop {
                    match trio.next(Instant::now() + Duration::from_secs(20))? {
                        Some((_, Line::Decides { .. }, at)) if at > killed => break at,
                        Some(_) => {}
                        None => bail!("leader-kill {load}: no new leader within 20 s"),
                    }
                };
                times.push((decided - killed).as_secs_f64() * 1e3);
                trio.kill_follower(leader);
                trio.spawn(leader)?;
            }
            times.sort_by(f64::total_cmp);
            let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
            let what = format!("{load}, {}", name(fabric, durability));
            let kills = Kills {
                what,
                runs,
                p50_ms: at(50),
                p99_ms: at(99),
                worst_ms: at(100),
            };
            println!(
                "  {:<22} {runs} runs: p50 {:.1} ms, p99 {:.1} ms, worst {:.1} ms",
                kills.what, kills.p50_ms, kills.p99_ms, kills.worst_ms
            );
            for (share, measured, limit) in [("p50", kills.p50_ms, 50.0), ("p99", kills.p99_ms, 150.0)] {
                let what = format!("new leader after a kill, {}, {share} ms", kills.what);
                report.targets.push(Target {
                    what,
                    measured,
                    limit,
                    met: measured <= limit,
                });
            }
            report.leader_kill.push(kills);
        }
    }
    Ok(())
}

/// `entries` numbers while a random replica is killed every second.
pub(super) fn crash(scratch: &Scratch, entries: u64, report: &mut Report) -> Result<()> {
    println!("\ncrash: {entries} entries, a SIGKILL of a random replica every second");
    for (fabric, durability) in [(Fabric::Tcp, Durability::Disk), (Fabric::Shm, Durability::Memory)] {
        let begin = Instant::now();
        let job = Job::Count { entries, per_s: 4000 };
        let mut trio = Trio::start(scratch.sub("crash")?, fabric, durability, job)?;
        // index -> (number, chain), as first said by anybody; at the end, what each holds.
        let mut known = BTreeMap::<u64, (u64, u64)>::new();
        let mut last = [(0, 0, 0); 3];
        let mut crash = Crash {
            what: name(fabric, durability),
            entries: 0,
            kills: 0,
            leader_kills: 0,
            compared: 0,
            seconds: 0.0,
        };
        let mut random = u64::from_le_bytes(dunlin_fabric::keys::random()?);
        let (mut next_kill, mut progress) = (Instant::now() + Duration::from_secs(1), Instant::now());
        let mut restart: Option<(u8, Instant)> = None;
        while last.iter().any(|l| l.0 < entries) || last[1..].iter().any(|l| *l != last[0]) {
            let soon = Instant::now() + Duration::from_millis(20);
            if let Some((
                id,
                Line::Applied { number, index, chain } | Line::Acked { number, index, chain },
                _,
            )) = trio.next(soon)?
            {
                let first = *known.entry(index).or_insert((number, chain));
                if first != (number, chain) {
                    bail!(
                        "crash {}: replica {id} holds number {number}, chain {chain:x} at index {index}; {first:?} was said before",
                        crash.what
                    );
                }
                crash.compared += 1;
                let mine = &mut last[usize::from(id)];
                if number > mine.0 || index > mine.1 {
                    progress = Instant::now();
                }
                *mine = (number, index, chain);
            }
            if progress.elapsed() > Duration::from_secs(30) {
                bail!(
                    "crash {}: nothing moves any more: {last:?}, leader {:?}",
                    crash.what,
                    trio.leader
                );
            }
            let now = Instant::now();
            if let Some((id, _)) = restart.filter(|(_, at)| *at <= now) {
                trio.spawn(id)?;
                restart = None;
            }
            let done = last.iter().any(|l| l.0 >= entries);
            // In memory a second kill before the first victim is up to date again would lose a majority's memory: that is
            // what `durability = memory` means, and the run waits for it.
            let may = durability == Durability::Disk || trio.is_whole();
            if now >= next_kill && restart.is_none() && !done && may {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let victim = ((random >> 33) % 3) as u8;
                crash.leader_kills += usize::from(trio.leader == Some(victim));
                crash.kills += 1;
                trio.kill(victim);
                last[usize::from(victim)] = (0, 0, 0);
                restart = Some((victim, now + Duration::from_millis(100)));
                next_kill = now + Duration::from_secs(1);
            }
        }
        crash.entries = last[0].0;
        crash.seconds = begin.elapsed().as_secs_f64();
        println!(
            "  {:<12} {} entries on all three, in order, none lost, none twice; {} SIGKILLs ({} of the leader), {} positions compared, {:.0} s",
            crash.what, crash.entries, crash.kills, crash.leader_kills, crash.compared, crash.seconds
        );
        report.crash.push(crash);
    }
    Ok(())
}
