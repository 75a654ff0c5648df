//! `cargo xtask scenarios`: stories on real QEMU, one after the other, with a summary line at the end.

mod list;
mod programs;
mod rolling;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::accel::RunsUnder;
use dunlin_vmtest::client::streams::StreamsReport;
use dunlin_vmtest::image::GuestImage;
use dunlin_vmtest::scenario::campaign::{CampaignSpec, plan};
use dunlin_vmtest::scenario::{
    self, Scenario, World, bad_input, compared, flood, full_log, interrupt, joining, ledger::LedgerSpec,
    life, orders, outpour, overload, passers, rejoins, sizes, soak, speculative, stalls, two_vms, upload,
};
use dunlin_vmtest::{image, paths};

use crate::accel::Accel;

/// What is played for every commit under KVM as well, where there is one that runs a guest: a running backup's take-over there and
/// back, a switchover, deaths at each step of a sync, all memory compared after each sync.
const UNDER_KVM: [&str; 4] = [
    "kill-primary-and-back",
    "planned-switchover",
    "death-in-a-sync",
    "audited-pc-1",
];

/// Play faults on real VMs: hosts are killed, paused and cut off. Checks what clients saw and what is left.
#[derive(clap::Args)]
pub struct Scenarios {
    /// Only the scenarios that are played for every commit.
    #[arg(long)]
    quick: bool,
    /// List the scenarios.
    #[arg(long)]
    list: bool,
    /// How often `connections-come-and-go`, `speculative-deaths`, `speculative-ipv6`, `speculative-modes`, `ledger`, `program-services` (with each program) and `program-kills` kill the primary's host.
    #[arg(long, default_value_t = 4)]
    kills: u32,
    #[command(flatten)]
    program: programs::Programs,
    #[command(flatten)]
    rolling: rolling::From,
    /// How long `long-upload` uploads at least, in seconds, once protected and once not.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    upload_seconds: u64,
    /// Busy loops beside the uploads of `long-upload`.
    #[arg(long, default_value_t = 0, value_name = "LOOPS")]
    upload_loops: usize,
    /// How the ledger's disk is replicated.
    #[arg(long, default_value = "gannet", value_parser = ["gannet", "colo", "sync"])]
    storage: String,
    /// Write the ledger's figures to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
    /// How many random faults `campaign` makes.
    #[arg(long, default_value_t = 20)]
    faults: usize,
    /// The seed of random choices. Without it: a fresh one from the clock, which is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// How long `overload` and `stalls` last, in seconds.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// How long `soak` lasts, in minutes.
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Only these kinds of faults, separated by commas.
    #[arg(long, value_delimiter = ',')]
    kinds: Vec<String>,
    /// Play the scenarios of this file, and no others (docs/campaign.md says how they are written).
    #[arg(long, value_name = "FILE")]
    file: Option<std::path::PathBuf>,
    #[command(flatten)]
    accel: Accel,
    /// Only these scenarios (a part of a name is enough). `bad-input` is the table of mistakes, and `program` is about bare programs. `life`,
    /// `two-vms`, `flood`, `outpour`, `long-upload`, `connections-come-and-go` and `interrupt-leaves-nothing` are stories of their own.
    names: Vec<String>,
}

impl Scenarios {
    /// What belongs to every commit.
    pub fn quick() -> Self {
        Self {
            quick: true,
            list: false,
            kills: 4,
            program: programs::Programs::default(),
            rolling: rolling::From::default(),
            upload_seconds: 0,
            upload_loops: 0,
            storage: "gannet".to_owned(),
            json: None,
            faults: 20,
            seed: None,
            seconds: 60,
            minutes: 60,
            kinds: Vec::new(),
            file: None,
            accel: Accel::tcg(),
            names: Vec::new(),
        }
    }

    /// [`UNDER_KVM`].
    fn under_kvm() -> Self {
        Self {
            quick: false,
            accel: Accel::auto(),
            names: UNDER_KVM.map(str::to_owned).to_vec(),
            ..Self::quick()
        }
    }

    fn chosen(&self) -> Result<Vec<Scenario>> {
        let all = match &self.file {
            Some(file) => scenario::read(file)?,
            None => scenario::all()?,
        };
        let wanted = |one: &Scenario| self.means(&one.name) && (one.quick || !self.quick);
        Ok(all.into_iter().filter(wanted).collect())
    }

    /// Of the stories that no file has.
    fn wants(&self, name: &str, quick: bool) -> bool {
        self.file.is_none() && self.means(name) && (quick || !self.quick)
    }

    fn means(&self, name: &str) -> bool {
        let means = |part: &String| {
            name == part || (!programs::ALONE.contains(&part.as_str()) && name.contains(part.as_str()))
        };
        self.names.is_empty() || self.names.iter().any(means)
    }
}

/// Plays [`UNDER_KVM`]. Returns what this machine cannot play, each with its reason.
pub fn run_under_kvm() -> Result<Vec<String>> {
    let arguments = Scenarios::under_kvm();
    let dunlin = super::ready(false)?;
    let (runs_under, image) = arguments.accel.choose()?;
    if runs_under == RunsUnder::Tcg {
        let skipped = |name| format!("scenario {name} under KVM: no KVM runs a guest here");
        return Ok(UNDER_KVM.map(skipped).to_vec());
    }
    play(&arguments, &arguments.chosen()?, dunlin, &runs_under, image)
}

/// Plays them; an error if any failed. Returns what this machine cannot play, each with its reason.
pub fn run(arguments: &Scenarios) -> Result<Vec<String>> {
    let chosen = arguments.chosen()?;
    if arguments.list {
        list::print(&chosen);
        return Ok(Vec::new());
    }
    rolling::prepare(arguments)?;
    let dunlin = super::ready(false)?;
    let (runs_under, image) = arguments.accel.choose()?;
    play(arguments, &chosen, dunlin, &runs_under, image)
}

fn play(
    arguments: &Scenarios,
    chosen: &[Scenario],
    dunlin: std::path::PathBuf,
    runs_under: &RunsUnder,
    image: GuestImage,
) -> Result<Vec<String>> {
    let mut skipped = Vec::new();
    let wanted = |name: &str, quick: bool| arguments.wants(name, quick);
    let world = World { dunlin, image };
    // Told again at the end: of a long output the end is what is seen first, and kept.
    let (mut passed, mut failed) = (0, Vec::new());
    if wanted("bad-input", true) {
        let failures = match bad_input::run(&world) {
            Ok((refused, failures)) => {
                println!("scenario bad-input ... {refused} mistakes refused");
                passed += refused;
                failures
            }
            Err(error) => vec![format!("{error:#}")],
        };
        for failure in failures {
            failed.push(format!("scenario bad-input ... FAILED {failure}"));
            println!("{}", failed[failed.len() - 1]);
        }
    }
    let mut tell = |name: &str, begun: Instant, outcome: Result<String>| {
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(words) => {
                passed += 1;
                println!("scenario {name} ... ok ({seconds:.1} s{words})");
            }
            Err(error) => {
                failed.push(format!("scenario {name} ... FAILED ({seconds:.1} s) {error:#}"));
                println!("{}", failed[failed.len() - 1]);
            }
        }
    };
    if wanted("cluster-join", true) {
        let begun = Instant::now();
        let outcome = joining::run(&world).map(|refused| format!(", {refused} refused"));
        tell("cluster-join", begun, outcome);
    }
    programs::play(arguments, &world.dunlin, &mut tell);
    rolling::play(arguments, &world, &mut tell);
    if wanted("life", true) {
        let begun = Instant::now();
        let outcome = life::run(&world).map(|ended| format!(", {ended} times ended, nothing left"));
        tell("life", begun, outcome);
    }
    for story in orders::STORIES {
        if wanted(story.0, true) {
            let begun = Instant::now();
            tell(story.0, begun, orders::run(&world, story).map(|()| String::new()));
        }
    }
    if wanted("two-vms", true) {
        let begun = Instant::now();
        let outcome = two_vms::run(&world).map(|outcome| {
            let gap_ms = outcome.worst_gap_us / 1000;
            format!(
                ", {} acknowledged, 0 lost, worst gap {gap_ms} ms",
                outcome.acknowledged
            )
        });
        tell("two-vms", begun, outcome);
    }
    if wanted("flood", true) {
        let begun = Instant::now();
        let outcome = flood::run(&world).map(|outcome| {
            format!(
                ", {} MiB for a guest that does not read, {} frames dropped, the daemon grew by {} MiB",
                outcome.sent_mib, outcome.dropped, outcome.grown_mib
            )
        });
        tell("flood", begun, outcome);
    }
    if wanted("outpour", false) {
        let begun = Instant::now();
        let outcome = outpour::run(&world).map(|outcome| {
            format!(
                ", {} MiB fetched, every byte right; {} and {} KiB held at most with a slow link and without a majority, {} frames \
                 dropped without",
                outcome.poured_mib,
                outcome.peak_bytes[0] >> 10,
                outcome.peak_bytes[1] >> 10,
                outcome.dropped
            )
        });
        tell("outpour", begun, outcome);
    }
    if wanted("long-upload", true) {
        let begun = Instant::now();
        let outcome = upload::run(&world, Duration::from_secs(arguments.upload_seconds), arguments.upload_loops).map(|outcome| {
            format!(
                ", {} MiB protected and {} MiB unprotected through a log of {} MiB, which held {} MiB at most; longest \
                 answer {} ms",
                outcome.uploaded_mib[0],
                outcome.uploaded_mib[1],
                outcome.log_mib,
                outcome.peak_log_bytes >> 20,
                outcome.longest_ms
            )
        });
        tell("long-upload", begun, outcome);
    }
    if wanted("speculative-streams", false) {
        let begun = Instant::now();
        let outcome = speculative::timed(&world, 64).map(|[plain, with]| {
            let seconds = |report: &StreamsReport| (report.up.as_secs_f64(), report.down.as_secs_f64());
            let (plain, with) = (seconds(&plain), seconds(&with));
            format!(
                ", 64 MiB there and back, sha256 right: remus {:.1} and {:.1} s, remus+spec {:.1} and {:.1} s",
                plain.0, plain.1, with.0, with.1
            )
        });
        tell("speculative-streams", begun, outcome);
    }
    let loss = speculative::lossy(arguments.seed.unwrap_or(1));
    let kills = [
        ("speculative-switchover", "remus", 2, 0),
        ("speculative-deaths", "remus", 0, arguments.kills),
        ("speculative-ipv6", "remus", 1, arguments.kills),
        ("speculative-loss", "remus", 1, arguments.kills),
        ("speculative-modes", "dunlin", 2, arguments.kills),
    ];
    for (name, policy, switchovers, kills) in kills {
        if wanted(name, false) {
            let ipv6 = name == "speculative-ipv6";
            if ipv6 && let Some(why) = runs_under.lacks_ipv6() {
                println!("scenario {name} ... not played: {why}");
                skipped.push(format!("scenario {name}: {why}"));
                continue;
            }
            let begun = Instant::now();
            let faults = speculative::Faults {
                ipv6,
                cable: (name == "speculative-loss").then_some(loss),
                policy,
                switchovers,
                kills,
            };
            let outcome = speculative::faults(&world, faults).map(|(report, compared)| {
                format!(
                    ", {switchovers} switchovers, {kills} kills ({compared} while outputs were compared), {} MiB there and {} MiB back, every byte right; longest standstill {} ms",
                    report.up_bytes >> 20,
                    report.down_bytes >> 20,
                    report.longest.as_millis()
                )
            });
            tell(name, begun, outcome);
        }
    }
    for (name, policy, quick) in [
        ("connections-come-and-go", "dunlin", true),
        ("speculative-come-and-go", "remus+spec", false),
    ] {
        if !wanted(name, quick) {
            continue;
        }
        let begun = Instant::now();
        let outcome = passers::run(&world, policy, arguments.kills).map(|report| {
            format!(
                ", {} kills, {} connections, {} acknowledged, 0 lost, longest step {} ms",
                arguments.kills,
                report.connections,
                report.counted.acknowledged,
                report.longest_step_us / 1000
            )
        });
        tell(name, begun, outcome);
    }
    if wanted("interrupt-leaves-nothing", true) {
        let begun = Instant::now();
        let played = std::env::current_exe().map_err(Into::into);
        let outcome = played.and_then(|program| interrupt::run(&world, &program));
        tell("interrupt-leaves-nothing", begun, outcome.map(|()| String::new()));
    }
    for one in chosen {
        if let Some(why) = runs_under.refuses(one.machine, one.vcpus) {
            println!("scenario {} ... not played: {why}", one.name);
            skipped.push(format!("scenario {}: {why}", one.name));
            continue;
        }
        let begun = Instant::now();
        let outcome = scenario::run(&world, one).map(|outcome| {
            let gap_ms = outcome.worst_gap_us / 1000;
            let mut words = format!(
                ", {} acknowledged, 0 lost, worst gap {gap_ms} ms",
                outcome.clients.acknowledged
            );
            if outcome.silences.0 > 0 {
                words.push_str(&format!(
                    "; nothing left in {} silences of {} ms together",
                    outcome.silences.0,
                    outcome.silences.1.as_millis()
                ));
            }
            if one.audit {
                let median = outcome.syncs.clone().unwrap_or_default();
                words.push_str(&format!(
                    "; median sync: {} pages united, {} of them pre-copied, {} divergent, {} hashes as a list, {} as a tree in {} rounds, \
                     {} bytes",
                    median.united,
                    median.pre_copied,
                    median.divergent,
                    median.list_hashes,
                    median.tree_hashes,
                    median.tree_rounds,
                    median.bytes
                ));
            }
            words
        });
        tell(&one.name, begun, outcome);
    }
    for size in &sizes::SIZES {
        if wanted(size.name, false) {
            let begun = Instant::now();
            let outcome = sizes::run(&world, size);
            tell(size.name, begun, outcome.map(|told| format!(", {told}")));
        }
    }
    // Not one for every commit: its guest is 281 MB, and each kill takes some five seconds.
    if wanted("ledger", false) {
        let begun = Instant::now();
        let outcome = ledger(arguments, &world.dunlin, runs_under);
        tell("ledger", begun, outcome.map(|told| format!(", {told}")));
    }
    if wanted("campaign", true) {
        let begun = Instant::now();
        let outcome = campaign(arguments, &world.dunlin, runs_under);
        tell("campaign", begun, outcome.map(|told| format!(", {told}")));
    }
    if wanted("overload", false) {
        let begun = Instant::now();
        let spec = overload::OverloadSpec {
            loops: 8,
            lasts: Duration::from_secs(arguments.seconds),
        };
        let outcome = overload::run(&world, spec).map(|outcome| {
            format!(
                ", {} acknowledged, 0 lost, no election but for the kill, protected {:.2} % of the time, join {:.1} s, longest wait \
                 for an answer {} ms",
                outcome.clients.acknowledged,
                outcome.protected_percent,
                outcome.join.as_secs_f64(),
                outcome.longest_gap_ms
            )
        });
        tell("overload", begun, outcome);
    }
    if wanted("rejoins", false) {
        let begun = Instant::now();
        let outcome = rejoins::run(&world).map(|daemons| {
            let words = daemons
                .iter()
                .map(|(host, then, now)| format!(", {host}: {then} -> {now} KiB"));
            words.collect::<String>()
        });
        tell("rejoins", begun, outcome);
    }
    if wanted("primary-log-disk-full", false) {
        let begun = Instant::now();
        let outcome = full_log::run(&world).map(|answers| format!(", {answers} acknowledged, 0 lost"));
        tell("primary-log-disk-full", begun, outcome);
    }
    if wanted("disks-compared-by-schedule", false) {
        let begun = Instant::now();
        let outcome = compared::run(&world).map(|times| format!(", {times} comparisons"));
        tell("disks-compared-by-schedule", begun, outcome);
    }
    // By name alone: it lasts.
    if arguments.names.iter().any(|name| name == "soak") {
        let begun = Instant::now();
        let lasts = Duration::from_secs(60 * arguments.minutes);
        let outcome = soak::run(&world, lasts, &mut |line| println!("{line}")).map(|outcome| {
            let (connections, acknowledged) = (
                outcome.clients.connections,
                outcome.clients.counted.acknowledged,
            );
            format!(", {connections} connections, {acknowledged} acknowledged, 0 lost, memory of each process flat")
        });
        tell("soak", begun, outcome);
    }
    if arguments.names.iter().any(|name| name == "stalls") {
        let begun = Instant::now();
        tell("stalls", begun, stalls(arguments, &world.dunlin, runs_under));
    }
    println!("{passed} passed, {} failed", failed.len());
    if !failed.is_empty() {
        let again = failed.join("\n");
        let times = failed.len();
        bail!("{times} scenarios failed; repeat one with 'cargo xtask scenarios NAME'\n{again}");
    }
    Ok(skipped)
}

/// A mixed load without a fault; returns what it has to tell.
fn stalls(arguments: &Scenarios, dunlin: &std::path::Path, runs_under: &RunsUnder) -> Result<String> {
    let spec = mixed(arguments, dunlin, runs_under)?;
    let vcpus = if *runs_under == RunsUnder::Tcg { 2 } else { 1 };
    let outcome = stalls::run(&spec, vcpus, Duration::from_secs(arguments.seconds))?;
    for (wait, seen) in &outcome.longest {
        let seen: Vec<String> = seen
            .iter()
            .map(|(what, times)| format!("{what} ({times})"))
            .collect();
        println!(
            "stalls: {} ms without a commit: {}",
            wait.as_millis(),
            seen.join("; ")
        );
    }
    let at = |part: f64| outcome.commits[((outcome.commits.len() - 1) as f64 * part) as usize].as_millis();
    if at(1.0) >= stalls::TOO_LONG.as_millis() {
        bail!("a commit waited for {} ms without a fault", at(1.0));
    }
    Ok(format!(
        ", {vcpus} vCPUs, {} commits: p50 {} ms, p99 {} ms, longest {} ms; {} looks",
        outcome.commits.len(),
        at(0.5),
        at(0.99),
        at(1.0),
        outcome.looks
    ))
}

fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64 % 1_000_000_000)
}

/// Who plays with the mixed load, and where its chance comes from.
fn mixed(arguments: &Scenarios, dunlin: &std::path::Path, runs_under: &RunsUnder) -> Result<CampaignSpec> {
    let mut say = |line: &str| println!("{line}");
    let kinds = arguments.kinds.iter().map(|name| {
        let known = plan::KINDS.iter().find(|(_, known, _)| known == name);
        known.map(|(kind, ..)| *kind).with_context(|| {
            let known: Vec<&str> = plan::KINDS.iter().map(|(_, known, _)| *known).collect();
            format!(
                "there is no kind of fault '{name}': there are {}",
                known.join(", ")
            )
        })
    });
    Ok(CampaignSpec {
        dunlin: dunlin.to_path_buf(),
        kinds: kinds.collect::<Result<_>>()?,
        image: image::ensure_service(&image::MIXED, &paths::guest_images(), &mut say)?.under(runs_under),
        checker: dunlin_vmtest::linear::checker()?,
        seed: arguments.seed.unwrap_or_else(fresh_seed),
        faults: arguments.faults,
    })
}

/// Random faults under a mixed load; returns what it has to tell.
fn campaign(arguments: &Scenarios, dunlin: &std::path::Path, runs_under: &RunsUnder) -> Result<String> {
    let spec = mixed(arguments, dunlin, runs_under)?;
    let outcome = scenario::campaign::run(&spec, &mut |line| println!("{line}"))?;
    if let Some(file) = &arguments.json {
        std::fs::write(file, serde_json::to_string_pretty(&outcome)?)?;
    }
    for (kind, gaps) in &outcome.gaps_ms {
        println!(
            "campaign: {kind:12} {:3} times, longest wait for an answer: p50 {} ms, worst {} ms",
            gaps.len(),
            gaps[gaps.len() / 2],
            gaps[gaps.len() - 1]
        );
    }
    let loads = &outcome.loads;
    Ok(format!(
        "seed {}, {} faults, 0 lost: {} counted, {} commits, {} files, {}; {} turns of one speaker ({} frames unheard), \
         protected again after p50 {} ms, worst {} ms",
        spec.seed,
        spec.faults,
        loads.counters.acknowledged,
        loads.ledger.told,
        loads.downloads.whole,
        loads.linearizable,
        outcome.turns,
        outcome.missed,
        outcome
            .reprotected_ms
            .get(outcome.reprotected_ms.len() / 2)
            .unwrap_or(&0),
        outcome.reprotected_ms.last().unwrap_or(&0)
    ))
}

/// PostgreSQL's ledger over kills; returns what it has to tell.
fn ledger(arguments: &Scenarios, dunlin: &std::path::Path, runs_under: &RunsUnder) -> Result<String> {
    let mut say = |line: &str| println!("{line}");
    let images = paths::guest_images();
    let spec = LedgerSpec {
        dunlin: dunlin.to_path_buf(),
        image: image::ensure_service(image::service("postgresql")?, &images, &mut say)?.under(runs_under),
        clients: image::clients(&images, &mut say)?,
        kills: arguments.kills,
        connections: 4,
        storage: arguments.storage.clone(),
        disk_mib: 384,
    };
    let outcome = scenario::ledger::run(&spec, &mut say)?;
    if let Some(file) = &arguments.json {
        std::fs::write(file, serde_json::to_string_pretty(&outcome)?)?;
    }
    let mut gaps = outcome.gaps_ms.clone();
    gaps.sort_unstable();
    let at = |percent: usize| {
        gaps.get(gaps.len().saturating_sub(1) * percent / 100)
            .copied()
            .unwrap_or(0)
    };
    Ok(format!(
        "{} kills, {} commits told, {} lost, {} connections broken, balances right, images equal {} times, pg_amcheck: {}, \
         gap ms p50 {} p99 {} worst {}",
        outcome.kills,
        outcome.ledger.told,
        outcome.ledger.lost,
        outcome.ledger.resets,
        outcome.equal_images,
        outcome.amcheck,
        at(50),
        at(99),
        at(100),
    ))
}
