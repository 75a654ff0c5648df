//! Random TCP conversations through the whole of `output` on two hosts: clients, two guests that are alike but for
//! their numbers, their segmentation and their timing, a network that loses, repeats and reorders, syncs, and
//! fail-overs. After every frame: (A) what leaves for a client, the backup's own guest has said; (B) what is
//! acknowledged to it, the backup's guest has got; (C) the client's stream is what the service must answer, byte for
//! byte, in one set of numbers, with timestamps that never go back, and without a reset that nobody meant; (D) when the
//! faults end, all conversations do.

mod conversation;

use conversation::{Broken, Plan, Seen, converse};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngSeed, TestRunner};

fn any_plan() -> impl Strategy<Value = Plan> {
    (
        any::<u64>(),
        1_usize..4,
        0_u8..30,
        prop::option::weighted(0.8, 20_u32..600),
        any::<bool>(),
        any::<bool>(),
        prop_oneof![Just(0_u8), 0_u8..20],
        prop_oneof![Just(0_u8), 0_u8..10],
        prop_oneof![Just(0_u32), 0_u32..60_000],
        prop_oneof![Just(0_u8), 0_u8..90],
    )
        .prop_map(
            |(
                seed,
                clients,
                loss_percent,
                fail_over_at,
                stamps,
                sack,
                differs,
                drops,
                patience_us,
                passive,
            )| Plan {
                seed,
                clients,
                loss_percent,
                fail_over_at,
                stamps,
                sack,
                differs_percent: differs,
                drop_percent: drops,
                patience_us,
                passive_percent: passive,
                resets: true,
                broken: None,
            },
        )
}

/// The same 1,000 everywhere; `DUNLIN_CONVERSATIONS=100000 cargo test --release` looks further, with other ones each time.
#[allow(
    clippy::disallowed_methods,
    reason = "how much a test looks at is not a setting of the core"
)]
fn config() -> ProptestConfig {
    let more = std::env::var("DUNLIN_CONVERSATIONS").ok();
    let cases = more
        .as_deref()
        .map_or(1000, |count| count.parse().expect("a number"));
    ProptestConfig {
        cases,
        rng_seed: if more.is_some() {
            RngSeed::Random
        } else {
            RngSeed::Fixed(1)
        },
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_client_sees_one_unbroken_stream_that_both_vms_said(plan in any_plan()) {
        if let Err(why) = converse(&plan) {
            return Err(TestCaseError::fail(format!("{why} in {plan:?}")));
        }
    }
}

/// The same plans every time.
fn plans(count: usize) -> impl Iterator<Item = Plan> {
    let mut runner = TestRunner::deterministic();
    (0..count).map(move |_| any_plan().new_tree(&mut runner).expect("a plan").current())
}

/// A check that never gets there shows nothing.
#[test]
fn conversations_get_everywhere() {
    let seen: Vec<Seen> = plans(200)
        .map(|plan| converse(&plan).expect("it holds"))
        .collect();
    let total = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    assert!(total(|seen| seen.conversations) > 500, "{seen:?}");
    assert!(total(|seen| seen.matched) > 10_000, "{seen:?}");
    assert!(total(|seen| seen.by_sync) > 3000, "{seen:?}");
    assert!(total(|seen| seen.take_overs) > 200, "{seen:?}");
    assert!(total(|seen| seen.from_passive) > 40, "{seen:?}");
    assert!(total(|seen| seen.lost_backups) > 50, "{seen:?}");
}

/// `plan`, with guests that say the same, and clients that wait for it.
fn equal(plan: Plan) -> Plan {
    Plan {
        differs_percent: 0,
        drop_percent: 0,
        passive_percent: 0,
        patience_us: 1_000_000,
        resets: false,
        ..plan
    }
}

/// Whatever is equal leaves without a sync, however the network and the hosts behave. What is left are resets that
/// answer stray segments after the end of a connection: of these the two VMs' timing decides.
#[test]
fn guests_that_say_the_same_need_no_sync() {
    let seen: Vec<Seen> = plans(500)
        .map(|plan| converse(&equal(plan)).expect("it holds"))
        .collect();
    let total = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    assert!(total(|seen| seen.conversations) > 1500, "{seen:?}");
    assert!(total(|seen| seen.forced) <= 2, "{seen:?}");
}

/// The checks find what was broken on purpose.
#[test]
fn what_is_broken_is_found() {
    let found = |broken, claim: &str| {
        let broken = |plan| Plan {
            broken: Some(broken),
            ..plan
        };
        plans(300)
            .filter_map(|plan| converse(&broken(plan)).err())
            .any(|why| why.starts_with(claim))
    };
    assert!(
        found(Broken::ReleasesAll, "A: "),
        "words that only one VM has said"
    );
    assert!(
        found(Broken::ReleasesAcks, "B: "),
        "bytes that only one VM has got"
    );
    // A backup that hears the wrong numbers says nothing, and so a sync mends what it does: no client sees that.
    let forced: u64 = plans(100)
        .filter_map(|plan| {
            let broken = Some(Broken::TranslatesNothing);
            let plan = equal(plan);
            converse(&Plan { broken, ..plan }).ok()
        })
        .map(|seen| seen.forced)
        .sum();
    assert!(forced > 100, "only {forced} syncs for a backup that is deaf");
    assert!(
        found(Broken::TakesOverWithoutAWord, "C: "),
        "timestamps that go back"
    );
}
