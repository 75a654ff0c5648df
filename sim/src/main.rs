//! What it decides: nothing. The command line of the simulator.
//!
//! Flow: arguments -> `dunlin_sim::run_with` -> a verdict and, for a failing seed, the command that repeats it.
//!
//! Invariants: exit code 0 only if every seed passed (with `--bug`: only if the bug was found).
//!
//! Not here: the worlds.
#![forbid(unsafe_code)]

use dunlin_core::consensus::MAX_MEMBERS;
use dunlin_sim::{Bug, Options, run_with, session, trace, whole};
use std::process::ExitCode;

const USAGE: &str =
    "dunlin-sim [--seeds N] [--seed S | --fresh] [--members N] [--sessions | --whole] [--bug NAME|all] [--strict] [--threads N] [--trace]
  --sessions   worlds of a primary and its backup (core's replica::sync) instead of the log's
  --whole      worlds of a VM's three hosts: consensus, leadership and epochs together
  --seeds N    how many worlds (default 1000; 1 when --seed is given alone)
  --seed S     the first seed (default 1)
  --fresh      the first seed is taken from the clock: worlds that nobody has seen
  --members N  groups of N (1 to 127); without it the seed says, 1 to 7
  --bug NAME   put this fault back on purpose; `all` tries each and prints the seed that finds it
  --strict     check every word against the disk even with a bug (on without one)
  --trace      print everything that happens in the world of --seed";

struct Arguments {
    options: Options,
    all_bugs: bool,
    trace: bool,
    /// Other worlds than the log's.
    others: Option<Worlds>,
    other_bug: Option<session::Bug>,
}

/// Worlds of replicas.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worlds {
    Sessions,
    Whole,
}

impl Worlds {
    fn flag(self) -> &'static str {
        match self {
            Self::Sessions => "--sessions",
            Self::Whole => "--whole",
        }
    }

    fn bugs(self) -> &'static [session::Bug] {
        match self {
            Self::Sessions => &session::Bug::ALL,
            Self::Whole => &session::Bug::OF_HOSTS,
        }
    }

    fn trace(self, seed: u64, bug: Option<session::Bug>) -> String {
        let verdict = match self {
            Self::Sessions => session::play(seed, bug, true).map(|tally| format!("{tally:?}")),
            Self::Whole => whole::play(seed, bug, true).map(|tally| format!("{tally:?}")),
        };
        verdict.unwrap_or_else(|what| format!("FAILED: {what}"))
    }

    fn run(self, seeds: u64, start: u64, bug: Option<session::Bug>) -> (u64, String, Option<(u64, String)>) {
        match self {
            Self::Sessions => {
                let report = session::run(seeds, start, bug);
                (report.seeds, format!("{:?}", report.tally), report.failure)
            }
            Self::Whole => {
                let report = whole::run(seeds, start, bug);
                (report.seeds, format!("{:?}", report.tally), report.failure)
            }
        }
    }
}

fn parse() -> Result<Arguments, String> {
    let (mut seeds, mut start, mut bug, mut strict, mut threads) = (None, None, None, false, 0);
    let mut size = None;
    let (mut all_bugs, mut trace, mut fresh) = (false, false, false);
    let (mut others, mut other_bug) = (None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value\n{USAGE}"));
        let number = |text: String| {
            text.parse::<u64>()
                .map_err(|_| format!("{text} is not a number\n{USAGE}"))
        };
        match word.as_str() {
            "--seeds" => seeds = Some(number(value()?)?),
            "--seed" => start = Some(number(value()?)?),
            "--members" => {
                let members = number(value()?)?;
                if members == 0 || members > MAX_MEMBERS as u64 {
                    return Err(format!(
                        "a group has 1 to {MAX_MEMBERS} members, not {members}\n{USAGE}"
                    ));
                }
                size = Some(members as u8);
            }
            "--sessions" => others = Some(Worlds::Sessions),
            "--whole" => others = Some(Worlds::Whole),
            "--fresh" => {
                fresh = true;
                start = Some(fresh_seed());
            }
            "--threads" => threads = number(value()?)? as usize,
            "--strict" => strict = true,
            "--trace" => trace = true,
            "--bug" => match value()?.as_str() {
                "all" => all_bugs = true,
                name => {
                    let worlds = [Worlds::Sessions, Worlds::Whole].into_iter().find_map(|worlds| {
                        let bug = worlds.bugs().iter().find(|bug| is_named(bug, name))?;
                        Some((worlds, *bug))
                    });
                    match worlds {
                        Some((worlds, found)) => {
                            others = Some(worlds);
                            other_bug = Some(found);
                        }
                        None => bug = Some(find_bug(name)?),
                    }
                }
            },
            _ => return Err(format!("unknown argument {word}\n{USAGE}")),
        }
    }
    if fresh {
        let many = seeds.unwrap_or(1);
        println!(
            "fresh seeds from {}; repeat: cargo run -p dunlin-sim -- {}--seed {0} --seeds {many}{}",
            start.unwrap_or(1),
            others
                .map(|worlds| format!("{} ", worlds.flag()))
                .unwrap_or_default(),
            of_size(size)
        );
    }
    let seeds = seeds.unwrap_or(if start.is_some() { 1 } else { 1000 });
    let start = start.unwrap_or(1);
    let strict = strict || (bug.is_none() && !all_bugs);
    Ok(Arguments {
        options: Options {
            seeds,
            start,
            size,
            bug,
            strict,
            threads,
        },
        all_bugs,
        trace,
        others,
        other_bug,
    })
}

fn of_size(size: Option<u8>) -> String {
    size.map(|size| format!(" --members {size}")).unwrap_or_default()
}

/// Microseconds since 1970: one run's worlds do not meet those of the one before.
fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_micros() as u64)
}

fn find_bug(name: &str) -> Result<Bug, String> {
    let known = Bug::ALL.iter().find(|bug| is_named(bug, name));
    let (all, of_sessions, of_whole) = (Bug::ALL, Worlds::Sessions.bugs(), Worlds::Whole.bugs());
    known.copied().ok_or_else(|| {
        format!("no bug {name}; there are {all:?}, with --sessions {of_sessions:?}, with --whole {of_whole:?}, and all")
    })
}

fn is_named(bug: &impl std::fmt::Debug, name: &str) -> bool {
    format!("{bug:?}").eq_ignore_ascii_case(name)
}

/// Worlds of replicas.
fn play_others(worlds: Worlds, arguments: &Arguments) -> ExitCode {
    let Options { seeds, start, .. } = arguments.options;
    let flag = worlds.flag();
    if arguments.trace {
        let verdict = worlds.trace(start, arguments.other_bug);
        println!("seed {start}: {verdict}");
        return match verdict.starts_with("FAILED") {
            false => ExitCode::SUCCESS,
            true => ExitCode::FAILURE,
        };
    }
    let bugs: Vec<Option<session::Bug>> = match arguments.all_bugs {
        true => worlds.bugs().iter().copied().map(Some).collect(),
        false => vec![arguments.other_bug],
    };
    let mut as_expected = true;
    for bug in bugs {
        let named = bug.map(|bug| format!(" --bug {bug:?}")).unwrap_or_default();
        let (played, tally, failure) = worlds.run(seeds, start, bug);
        match &failure {
            None => println!("{played} worlds from {start} passed {flag}{named}: {tally}"),
            Some((seed, what)) => {
                println!("seed {seed} FAILED{named}: {what}");
                println!("  repeat: cargo run -p dunlin-sim -- {flag} --seed {seed}{named} [--trace]");
            }
        }
        as_expected &= failure.is_some() == bug.is_some();
    }
    if as_expected {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn main() -> ExitCode {
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(usage) => {
            eprintln!("{usage}");
            return ExitCode::from(2);
        }
    };
    if let Some(worlds) = arguments.others {
        return play_others(worlds, &arguments);
    }
    let options = arguments.options;
    if arguments.trace {
        let verdict = trace(options.start, options);
        println!("seed {}: {verdict:?}", options.start);
        return if verdict.is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    if arguments.all_bugs {
        let found = Bug::ALL
            .iter()
            .filter(|bug| {
                play(Options {
                    bug: Some(**bug),
                    ..options
                })
            })
            .count();
        println!(
            "{found} of {} bugs found within {} seeds",
            Bug::ALL.len(),
            options.seeds
        );
        return if found == Bug::ALL.len() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    let failed = play(options);
    if failed == options.bug.is_some() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Plays and prints; true if a seed failed.
fn play(options: Options) -> bool {
    let began = std::time::Instant::now();
    let report = run_with(options);
    let bug = options
        .bug
        .map(|bug| format!(" --bug {bug:?}"))
        .unwrap_or_default();
    match &report.failure {
        None => println!(
            "{} seeds from {} passed{}: {} steps, {} entries agreed, {} elections, {} client operations answered, {:.1} s",
            report.seeds,
            options.start,
            if bug.is_empty() {
                String::new()
            } else {
                format!(" in spite of{bug}")
            },
            report.steps,
            report.agreed,
            report.elections,
            report.answered,
            began.elapsed().as_secs_f64()
        ),
        Some(failure) => {
            let strict = if options.strict && options.bug.is_some() {
                " --strict"
            } else {
                ""
            };
            println!("seed {} FAILED{bug}: {}", failure.seed, failure.what);
            println!(
                "  repeat: cargo run -p dunlin-sim -- --seed {}{}{bug}{strict} [--trace]",
                failure.seed,
                of_size(options.size)
            );
        }
    }
    report.failure.is_some()
}
