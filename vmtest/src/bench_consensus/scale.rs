//! What it decides: how latency and the leader's work are measured as a group grows.
//!
//! * **Flow:** `bench consensus --replicas 3,5,7,9,15,31,63,105`: for each size so many processes, of which replica 0 leads and
//!   measures -> a table, and what was published of the growth of others.
//! * **Invariants:** (1) the CPU time is of the leader's whole process, its log's thread and its system calls included; (2) every size
//!   runs with the same settings; (3) all followers have acknowledged something before anything is measured.
//! * **Source:** the GAIA proposal 2.1.1 and figure 3: consensus latency from 3 to 9 replicas, and on up to 105.
//! * **Not here:** elections among so many: the followers are connected with the leader alone.

use super::child::{Config, Part, Scratch, spawn};
use super::replica::{Job, ReplicaPart};
use super::{Durability, Fabric, Figure, Report, Wait};
use anyhow::{Context, Result, bail};
use dunlin_core::consensus::MAX_MEMBERS;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader};

/// A figure, and what it cost the leader.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cost {
    /// Latency and throughput.
    pub figure: Figure,
    /// CPU time of the leader's process an entry.
    pub cpu_us: f64,
}

/// What a group of one size costs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scale {
    /// Members, the leader included.
    pub replicas: u8,
    /// One entry outstanding.
    pub one: Cost,
    /// 64 entries outstanding.
    pub many: Cost,
}

/// The sizes of `--replicas`.
pub(super) fn sizes(text: &str) -> Result<Vec<u8>> {
    text.split(',')
        .map(|size| match size.trim().parse::<u8>() {
            Ok(size) if size >= 2 && usize::from(size) <= MAX_MEMBERS => Ok(size),
            _ => bail!("--replicas wants numbers from 2 to {MAX_MEMBERS} by commas, not {size:?}"),
        })
        .collect()
}

/// What this process has used of the CPU, with its threads, in user and system mode.
pub(super) fn cpu_us() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("asking for the CPU time")?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds() as f64)
}

/// Measures each size in turn, `rounds` times, and keeps of each the round with the lowest median.
pub(super) fn run(
    scratch: &Scratch,
    sizes: &[u8],
    rounds: usize,
    seconds: f64,
    report: &mut Report,
) -> Result<()> {
    for round in 1..=rounds {
        println!("\nround {round} of {rounds}, load {}", super::load());
        for &replicas in sizes {
            let new = measure(scratch, replicas, seconds).with_context(|| format!("{replicas} replicas"))?;
            match report.scale.iter_mut().find(|known| known.replicas == replicas) {
                None => report.scale.push(new),
                Some(known) => {
                    keep_better(&mut known.one, new.one);
                    keep_better(&mut known.many, new.many);
                }
            }
        }
    }
    show(&report.scale);
    Ok(())
}

fn keep_better(known: &mut Cost, new: Cost) {
    if new.figure.p50_us < known.figure.p50_us {
        *known = new;
    }
}

fn measure(scratch: &Scratch, replicas: u8, seconds: f64) -> Result<Scale> {
    let dir = scratch.sub("scale")?;
    let start = |me| {
        let job = Job::Scale {
            seconds,
            members: replicas,
        };
        spawn(&Config {
            me,
            dir: dir.clone(),
            fabric: Fabric::Shm,
            durability: Durability::Memory,
            wait: Wait::Block,
            part: Part::Replica(ReplicaPart {
                job,
                inline_disk: false,
            }),
        })
    };
    let mut leader = start(0)?;
    let _followers = (1..replicas).map(start).collect::<Result<Vec<_>>>()?;
    let out = leader.0.stdout.take().context("the leader's output")?;
    let costs: Vec<Cost> = BufReader::new(out)
        .lines()
        .map(|line| Ok(serde_json::from_str(&line?)?))
        .collect::<Result<_>>()?;
    let [one, many] = costs.try_into().map_err(|costs: Vec<Cost>| {
        anyhow::anyhow!(
            "{} of 2 figures, then the leader ended: see its line above",
            costs.len()
        )
    })?;
    Ok(Scale { replicas, one, many })
}

fn show(scale: &[Scale]) {
    let Some(first) = scale.first() else { return };
    println!("\nshm, in memory, blocking, 64 B, all on this machine:");
    println!(
        "{:>8}  {:>10} {:>8}  {:>14}  {:>10} {:>14}",
        "replicas", "p50 us", "growth", "leader CPU us", "entries/s", "leader CPU us"
    );
    println!("{:>8}  {:>35}  {:>25}", "", "1 outstanding", "64 outstanding");
    for Scale { replicas, one, many } in scale {
        let growth = (one.figure.p50_us / first.one.figure.p50_us - 1.0) * 100.0;
        println!(
            "{replicas:>8}  {:>10.1} {:>+7.0}%  {:>14.2}  {:>10.0} {:>14.2}",
            one.figure.p50_us, growth, one.cpu_us, many.figure.per_s, many.cpu_us
        );
    }
    println!(
        "published (the GAIA proposal, 2.1.1, figure 3; a host for each replica, 40 Gbit/s): from 3 to 9 replicas three traditional \
         protocols +30.3 % to +156.8 %; DARE linear in the replicas, on up to 105; APUS up to 3.3 times faster than DARE."
    );
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn sizes_are_numbers_of_members() {
        assert_eq!(sizes("3, 5,127").unwrap(), [3, 5, 127]);
        for bad in ["", "1", "3,", "128", "three"] {
            let why = sizes(bad).unwrap_err().to_string();
            assert!(why.contains("2 to 127"), "{bad:?}: {why}");
        }
    }
}
