//! Random conversations with a VM whose data is acknowledged speculatively (`speculation_model` says what is judged).

mod speculation_model;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngSeed, TestRunner};
use speculation_model::random::Random;
use speculation_model::{Broken, Plan, Seen, speculate};
use std::io::Write;

fn any_plan() -> impl Strategy<Value = Plan> {
    let faults = (
        0_u8..15,
        prop_oneof![3 => Just(0_u8), 1 => 0_u8..4],
        prop::collection::vec(1_000_u64..1_500_000, 0..4),
    );
    let options = (
        any::<bool>(),
        any::<bool>(),
        prop::option::weighted(0.8, 0_u8..8),
        prop_oneof![Just(536_u16), Just(1460), 100_u16..1460],
    );
    let times = (
        5_000_u64..60_000,
        1_000_u64..120_000,
        prop_oneof![Just(2_000_u64), 5_000_u64..80_000],
    );
    let loads = (
        prop_oneof![0_u64..3000, 0_u64..120_000],
        prop_oneof![0_u64..3000, 0_u64..60_000],
        any::<bool>(),
    );
    let given_back = (
        prop::option::weighted(0.2, 100_000_u64..2_000_000),
        prop::option::weighted(0.2, 8_usize << 10..128 << 10),
        1_000_u64..500_000,
    );
    (
        any::<u64>(),
        1_usize..5,
        faults,
        options,
        times,
        loads,
        given_back,
    )
        .prop_map(
            |(seed, clients, faults, options, times, loads, given_back)| Plan {
                seed,
                clients,
                loss_percent: faults.0,
                vm_loss_percent: faults.1,
                kills: faults.2,
                stamps: options.0,
                sack: options.1,
                scale: options.2,
                mss: options.3,
                epoch_us: times.0,
                safe_us: times.1,
                read_us: times.2,
                download: loads.0,
                upload: loads.1,
                vm_opens: loads.2,
                drain_us: given_back.0,
                budget: given_back.1,
                again_us: given_back.2,
                modes: vec![],
                broken: None,
            },
        )
}

/// The plan of this number.
fn plan(number: u64) -> Plan {
    let config = ProptestConfig {
        rng_seed: RngSeed::Fixed(number),
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    any_plan().new_tree(&mut runner).expect("a plan").current()
}

/// The same, and now and then the backup's VM runs, too.
fn plan_of_modes(number: u64) -> Plan {
    let mut random = Random::new(number);
    let mut plan = plan(number);
    let changes = random.within(1, 8);
    plan.modes = (0..changes).map(|_| random.within(1_000, 2_500_000)).collect();
    plan
}

/// `count` conversations from this number on hold.
fn hold(first: u64, count: u64, plan: fn(u64) -> Plan) -> Vec<Seen> {
    (first..first + count)
        .map(|number| {
            let plan = plan(number);
            speculate(&plan).unwrap_or_else(|why| {
                panic!(
                    "{why} in {plan:?}\nrepeat it: DUNLIN_CONVERSATION={number} DUNLIN_CONVERSATIONS=1 \
                     cargo test -p dunlin-core --test speculation nobody_chose"
                )
            })
        })
        .collect()
}

#[test]
fn both_streams_are_whole_wherever_hosts_die() {
    let seen = hold(0, 200, plan);
    let total = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    // A check that never gets there shows nothing.
    assert!(total(|seen| seen.begun) > 300, "{seen:?}");
    assert!(total(|seen| seen.take_overs) > 100, "{seen:?}");
    assert!(total(|seen| seen.bytes) > 5_000_000, "{seen:?}");
    assert!(total(|seen| seen.ahead) > 1_000, "{seen:?}");
    assert!(seen.iter().any(|seen| seen.most_outstanding > 4), "{seen:?}");
}

#[test]
fn both_streams_are_whole_wherever_modes_change_and_hosts_die() {
    let seen = hold(0, 200, plan_of_modes);
    let total = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    assert!(total(|seen| seen.begun) > 300, "{seen:?}");
    assert!(total(|seen| seen.runs) > 100, "{seen:?}");
    assert!(total(|seen| seen.take_overs_of_running) > 30, "{seen:?}");
    assert!(
        total(|seen| seen.take_overs - seen.take_overs_of_running) > 60,
        "{seen:?}"
    );
}

/// What such a search has found. The VM's last acknowledgement gets lost, and its primary dies while the backup's VM runs.
#[test]
fn what_was_found_once_holds() {
    hold(1_796_019_879_833_598_922, 1, plan_of_modes);
}

/// Others each time, from a start that the clock chooses. `DUNLIN_CONVERSATIONS=1000000` looks further (with `--release`),
/// `DUNLIN_CONVERSATION` begins elsewhere.
#[test]
#[allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "where a test looks, and how much, is not a setting of the core"
)]
fn conversations_that_nobody_chose_hold_as_well() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let clock = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("a clock after 1970").as_nanos() as u64
    };
    let first = number("DUNLIN_CONVERSATION").unwrap_or_else(clock);
    let count = number("DUNLIN_CONVERSATIONS").unwrap_or(200);
    // Past the harness, which shows what a test prints only when it fails.
    let told = writeln!(
        std::io::stderr(),
        "{count} speculative conversations from number {first} on"
    );
    told.expect("a place to say it");
    hold(first, count, plan);
    hold(first, count, plan_of_modes);
}

/// The checks find what was broken on purpose.
#[test]
fn what_is_broken_is_found() {
    let found = |broken, claim: &str| {
        (0..60).any(|number| {
            let mut plan = plan(number);
            plan.broken = Some(broken);
            plan.kills.push(300_000);
            plan.download = plan.download.max(50_000);
            speculate(&plan).is_err_and(|why| why.starts_with(claim))
        })
    };
    assert!(
        found(Broken::ReleasesEarly, "A: "),
        "bytes of a state that is not safe"
    );
    assert!(
        found(Broken::ReleasesEarly, "B: "),
        "acknowledgements of a state that is not safe"
    );
    assert!(
        found(Broken::OlderState, "D: "),
        "a checkpoint that is older than the VM"
    );
    assert!(found(Broken::ForgetsAll, "D: "), "connections that do not travel");
}

/// So do those of what changes of mode add.
#[test]
fn what_is_broken_about_modes_is_found() {
    let found = |broken| {
        (0..60).any(|number| {
            let mut plan = plan_of_modes(number);
            plan.broken = Some(broken);
            plan.kills.extend([300_000, 900_000]);
            plan.download = plan.download.max(50_000);
            speculate(&plan).is_err()
        })
    };
    assert!(found(Broken::RunsTooSoon), "bytes that the running copy lacks");
    assert!(found(Broken::LiftsNothing), "a clock that goes back");
}
