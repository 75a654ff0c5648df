//! `cargo xtask scenarios`: stories on real QEMU, one after the other, with a summary line at the end.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use dunlin_vmtest::scenario::{
    self, World, bad_input, flood, interrupt, ledger::LedgerSpec, life, orders, passers, two_vms, upload,
};
use dunlin_vmtest::{image, paths};

/// Faults on real VMs: hosts killed, paused, cut off; what clients saw; what is left.
#[derive(clap::Args)]
pub struct Scenarios {
    /// Only those that are played for every commit.
    #[arg(long)]
    quick: bool,
    /// Say which there are.
    #[arg(long)]
    list: bool,
    /// How often `connections-come-and-go` and `ledger` kill the primary's host.
    #[arg(long, default_value_t = 4)]
    kills: u32,
    /// `long-upload` uploads for so many seconds at least, once protected and once not.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    upload_seconds: u64,
    /// How the ledger's disk is replicated.
    #[arg(long, default_value = "gannet", value_parser = ["gannet", "colo", "sync"])]
    storage: String,
    /// Write the ledger's figures to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
    /// Only these (a part of a name is enough); `bad-input` is the table of
    /// mistakes, `life`, `two-vms`, `flood`, `long-upload`, `connections-come-and-go` and `interrupt-leaves-nothing` are stories of their own.
    names: Vec<String>,
}

impl Scenarios {
    /// What belongs to every commit.
    pub fn quick() -> Self {
        Self {
            quick: true,
            list: false,
            kills: 4,
            upload_seconds: 0,
            storage: "gannet".to_owned(),
            json: None,
            names: Vec::new(),
        }
    }
}

/// Plays them; an error if any failed.
pub fn run(arguments: &Scenarios) -> Result<()> {
    let wanted = |name: &str, quick: bool| {
        let by_name =
            arguments.names.is_empty() || arguments.names.iter().any(|part| name.contains(part.as_str()));
        by_name && (quick || !arguments.quick)
    };
    let chosen: Vec<_> = scenario::all()
        .into_iter()
        .filter(|one| wanted(one.name, one.quick))
        .collect();
    if arguments.list {
        for one in &chosen {
            println!(
                "{:40} {} {}x{}{}",
                one.name,
                one.policy,
                one.machine,
                one.vcpus,
                if one.quick { " quick" } else { "" }
            );
        }
        for (name, _) in orders::STORIES {
            println!("{name:40} orders of a person, quick");
        }
        println!("{:40} plover pcx1, --kills N", "ledger");
        return Ok(());
    }
    let dunlin = super::ready(false)?;
    let image = image::ensure(&paths::guest_images(), &mut |line| println!("{line}"))?;
    let world = World { dunlin, image };
    let (mut passed, mut failed) = (0, 0);
    if wanted("bad-input", true) {
        match bad_input::run(&world) {
            Ok((refused, failures)) => {
                println!("scenario bad-input ... {refused} mistakes refused");
                passed += refused;
                failed += failures.len();
                for failure in failures {
                    println!("scenario bad-input ... FAILED {failure}");
                }
            }
            Err(error) => {
                println!("scenario bad-input ... FAILED {error:#}");
                failed += 1;
            }
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
                failed += 1;
                println!("scenario {name} ... FAILED ({seconds:.1} s) {error:#}");
            }
        }
    };
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
    if wanted("long-upload", true) {
        let begun = Instant::now();
        let outcome = upload::run(&world, Duration::from_secs(arguments.upload_seconds)).map(|outcome| {
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
    if wanted("connections-come-and-go", true) {
        let begun = Instant::now();
        let outcome = passers::run(&world, arguments.kills).map(|report| {
            format!(
                ", {} kills, {} connections, {} acknowledged, 0 lost, longest step {} ms",
                arguments.kills,
                report.connections,
                report.counted.acknowledged,
                report.longest_step_us / 1000
            )
        });
        tell("connections-come-and-go", begun, outcome);
    }
    if wanted("interrupt-leaves-nothing", true) {
        let begun = Instant::now();
        let played = std::env::current_exe().map_err(Into::into);
        let outcome = played.and_then(|program| interrupt::run(&world, &program));
        tell("interrupt-leaves-nothing", begun, outcome.map(|()| String::new()));
    }
    for one in &chosen {
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
                let of = |name: &str| outcome.syncs.get(name).copied().unwrap_or_default();
                words.push_str(&format!(
                    "; median sync: {} pages united, {} of them ahead, {} divergent, {} hashes as a list, {} as a tree in {} rounds, \
                     {} bytes",
                    of("united"),
                    of("ahead"),
                    of("divergent"),
                    of("list_hashes"),
                    of("tree_hashes"),
                    of("tree_rounds"),
                    of("bytes")
                ));
            }
            words
        });
        tell(one.name, begun, outcome);
    }
    // Not one for every commit: its guest is 281 MB, and each kill takes some five seconds.
    if wanted("ledger", false) {
        let begun = Instant::now();
        let outcome = ledger(arguments, &world.dunlin);
        tell("ledger", begun, outcome.map(|told| format!(", {told}")));
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        bail!("{failed} scenarios failed; repeat one with 'cargo xtask scenarios NAME'");
    }
    Ok(())
}

/// PostgreSQL's ledger over kills; returns what it has to tell.
fn ledger(arguments: &Scenarios, dunlin: &std::path::Path) -> Result<String> {
    let mut say = |line: &str| println!("{line}");
    let images = paths::guest_images();
    let spec = LedgerSpec {
        dunlin: dunlin.to_path_buf(),
        image: image::ensure_service(image::service("postgresql")?, &images, &mut say)?,
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
