//! What holds in an epoch, and how epochs follow each other: each invariant, and any order of events.

use super::backup::{self, BackupEpochs};
use super::primary::{Loaded, Phase, PrimaryEpochs, Stage};
use super::{Inputs, Release, Rules};
use crate::policy::{Mode, Policy};
use crate::units::Epoch;
use proptest::prelude::*;

const MATCH: Mode = Mode::Match;
const ACTIVE: Mode = Mode::Active;
const PASSIVE: Mode = Mode::Passive;

fn rules(mode: Mode) -> Rules {
    Rules::of(mode, false)
}

/// Followed by a backup that has joined in this mode.
fn synced(mode: Mode) -> PrimaryEpochs {
    let mut epochs = joining(mode);
    epochs.join_copied();
    let loaded = sync(&mut epochs, Epoch(1), false, mode);
    assert!(matches!(loaded, Loaded::NextEpoch { joined: true, .. }));
    epochs.backup_is_complete();
    assert!(epochs.is_synced() && epochs.rules() == rules(mode));
    epochs
}

fn joining(mode: Mode) -> PrimaryEpochs {
    let mut epochs = PrimaryEpochs::new(rules(mode));
    epochs.session_begins();
    epochs.join_begins();
    epochs
}

/// A sync from its beginning to its end.
fn sync(epochs: &mut PrimaryEpochs, epoch: Epoch, switchover: bool, next: Mode) -> Loaded {
    if epochs.begin(0, epoch, switchover, rules(next)) {
        assert!(epochs.is_proposed() && !epochs.holds_log());
        assert!(epochs.sync_agreed(epoch) && epochs.holds_log());
    }
    assert!(epochs.is_draining());
    assert_eq!(epochs.drained().epoch, epoch);
    assert!(epochs.is_stopping());
    epochs.line_drawn();
    assert!(!epochs.is_stopping());
    epochs.resumed();
    assert_eq!(epochs.holds_log(), switchover);
    epochs.acknowledged(epoch);
    epochs.loaded()
}

#[test]
fn the_rules_of_each_policy_are_those_of_its_paper() {
    let table = [
        (Policy::None, Inputs::Direct, false, Release::Sync),
        (Policy::Remus, Inputs::Direct, false, Release::Sync),
        (Policy::Str, Inputs::Agreed, true, Release::Sync),
        (Policy::Colo, Inputs::Agreed, true, Release::Match),
        (Policy::Plover, Inputs::Agreed, true, Release::Sync),
        (Policy::Dunlin, Inputs::Agreed, true, Release::Match),
    ];
    for (policy, inputs, runs, release) in table {
        let first = Rules::first(policy, false);
        let is = (first.inputs(), first.backup_runs(), first.release());
        assert_eq!(is, (inputs, runs, release), "{policy:?}");
        assert_eq!(
            policy.inputs_are_agreed(),
            inputs == Inputs::Agreed,
            "{policy:?}: two tables"
        );
        assert_eq!(
            policy.compares_output(),
            first.compares(),
            "{policy:?}: two tables"
        );
    }
    // Connections that are ahead of their clients outlive a backup: the next one begins without running.
    for policy in [Policy::Remus, Policy::Dunlin] {
        let first = Rules::first(policy, true);
        let is = (first.inputs(), first.backup_runs(), first.release());
        assert_eq!(is, (Inputs::Direct, false, Release::Speculative), "{policy:?}");
        for mode in Mode::ALL {
            let next = Rules::of(mode, true);
            assert_eq!(first.needs_all_held(next), mode.backup_runs(), "{mode:?}");
            assert!(!next.needs_all_held(first), "{mode:?}");
        }
    }
    for mode in Mode::ALL {
        for speculative in [false, true] {
            assert_eq!(Rules::of(mode, speculative).mode(), mode);
        }
    }
}

#[test]
fn the_table_for_people_is_the_codes() {
    let page = include_str!("../../../../docs/replica.md");
    let modes = Mode::ALL.map(|mode| (mode.name(), mode, false));
    for (name, mode, speculative) in modes.into_iter().chain([("passive, speculative", PASSIVE, true)]) {
        let of = Rules::of(mode, speculative);
        let backup = if of.backup_runs() { "runs" } else { "holds" };
        let row = format!("| {name} | {:?} | {backup} | {:?} |", of.inputs(), of.release()).to_lowercase();
        assert!(page.contains(&row), "docs/replica.md should say: {row}");
    }
}

#[test]
fn a_primary_goes_from_one_epoch_to_the_next_with_its_rules() {
    let mut epochs = synced(MATCH);
    let to = sync(&mut epochs, Epoch(2), false, PASSIVE);
    let (was, now) = (rules(MATCH), rules(PASSIVE));
    let joined = false;
    assert_eq!(to, Loaded::NextEpoch { was, now, joined });
    assert_eq!(epochs.inputs(), Inputs::Direct);
    assert!(!epochs.begin(0, Epoch(3), false, now), "nobody runs: no entry");
    assert!(epochs.is_draining() && !epochs.holds_log());
    let ended = epochs.session_ended().expect("there was one");
    assert!(ended.broken && !ended.handed && ended.phase == Phase::Synced);
    assert_eq!(
        epochs.inputs(),
        Inputs::Agreed,
        "nobody follows: as the policy says"
    );
    assert_eq!(epochs.session_ended(), None);
}

#[test]
fn invariant_1_there_is_one_sync_at_a_time_and_none_after_a_switchover() {
    let mut epochs = synced(ACTIVE);
    assert!(epochs.may_begin());
    epochs.precopy(0, Epoch(2));
    assert!(!epochs.may_begin());
    assert!(epochs.precopied() && !epochs.precopied());
    assert_eq!(sync(&mut epochs, Epoch(2), true, ACTIVE), Loaded::Switchover);
    assert!(epochs.is_handed() && !epochs.may_begin());
    assert!(epochs.switchover_failed() && !epochs.switchover_failed());
    assert!(epochs.may_begin());
}

#[test]
#[should_panic(expected = "invariant 1")]
fn two_syncs_at_once_are_a_programmers_error() {
    let mut epochs = synced(ACTIVE);
    epochs.begin(0, Epoch(2), false, rules(ACTIVE));
    epochs.begin(0, Epoch(2), false, rules(ACTIVE));
}

#[test]
fn invariant_2_a_last_sync_of_a_join_that_the_log_has_refused_is_the_last_when_it_is_taken() {
    let mut epochs = joining(MATCH);
    epochs.join_copied();
    for _ in 0..3 {
        assert!(epochs.begin(0, Epoch(1), false, rules(MATCH)));
        epochs.log_refused();
        assert_eq!(epochs.session(), Some(Phase::Copied));
        assert_eq!(epochs.take_refused(true), Some(false));
    }
    assert!(epochs.begin(0, Epoch(1), false, rules(MATCH)));
    assert_eq!(epochs.session(), Some(Phase::LastSync));
    assert!(epochs.sync_agreed(Epoch(1)));
    epochs.drained();
    assert!(epochs.line_drawn(), "output is held from this line on");
}

#[test]
fn what_the_log_refused_is_not_tried_in_another_session_or_by_another_leader() {
    let refused = || {
        let mut epochs = synced(ACTIVE);
        epochs.begin(0, Epoch(2), true, rules(ACTIVE));
        epochs.log_refused();
        epochs
    };
    let mut deposed = refused();
    assert_eq!(deposed.take_refused(false), None);
    assert_eq!(deposed.take_refused(true), None);
    let mut lost = refused();
    lost.session_ended();
    lost.session_begins();
    assert_eq!(lost.take_refused(true), None);
    assert_eq!(refused().take_refused(true), Some(true));
}

#[test]
fn invariant_3_inputs_are_agreed_from_the_proposal_of_a_sync_after_which_the_backup_runs() {
    let mut epochs = synced(PASSIVE);
    assert_eq!(epochs.inputs(), Inputs::Direct);
    assert!(epochs.begin(0, Epoch(2), false, rules(MATCH)));
    assert_eq!(epochs.inputs(), Inputs::Agreed);
    epochs.log_refused();
    assert_eq!(epochs.inputs(), Inputs::Direct);
}

#[test]
fn invariant_4_a_switchover_that_ends_with_this_hosts_own_election_does_not_keep_it_from_leading() {
    // The backup has asked for votes, so this host follows nobody; then the backup's host dies, before or after its stream ends.
    for stream_ends in [false, true] {
        let mut epochs = synced(ACTIVE);
        sync(&mut epochs, Epoch(2), true, ACTIVE);
        assert!(epochs.holds_log(), "the inputs are the backup's");
        assert!(!epochs.deposed(false));
        if stream_ends {
            assert!(epochs.session_ended().expect("there was one").handed);
        }
        epochs.elected();
        assert!(
            !epochs.holds_log(),
            "the entry that makes it lead stands behind the sync's"
        );
        assert!(epochs.switchover_failed(), "and then the VM goes on");
    }
}

#[test]
fn invariant_4_a_switchover_for_which_nobody_could_be_asked_does_not_keep_this_host_from_leading() {
    let mut epochs = synced(ACTIVE);
    epochs.begin(0, Epoch(2), true, rules(ACTIVE));
    epochs.sync_agreed(Epoch(2));
    epochs.drained();
    epochs.line_drawn();
    epochs.resumed();
    // A moment without a majority. The group takes no transfer from a host that does not lead, and says nothing of that.
    assert!(!epochs.deposed(false));
    epochs.acknowledged(Epoch(2));
    assert_eq!(epochs.loaded(), Loaded::Switchover);
    assert!(epochs.holds_log());
    epochs.elected();
    assert!(!epochs.holds_log() && epochs.switchover_failed());
}

#[test]
fn a_session_outlives_a_term_and_what_it_holds_with_it() {
    let mut epochs = synced(ACTIVE);
    epochs.begin(0, Epoch(2), false, rules(ACTIVE));
    assert!(epochs.sync_agreed(Epoch(2)));
    assert!(!epochs.deposed(false) && epochs.holds_log());
    epochs.elected();
    assert!(epochs.holds_log(), "its stop lets the log go on");
    assert!(epochs.deposed(true) && !epochs.holds_log());
}

#[test]
#[should_panic(expected = "invariant 5")]
fn an_acknowledgement_of_another_sync_is_a_programmers_error() {
    let mut epochs = synced(ACTIVE);
    epochs.begin(0, Epoch(2), false, rules(ACTIVE));
    epochs.sync_agreed(Epoch(2));
    epochs.drained();
    epochs.line_drawn();
    epochs.acknowledged(Epoch(1));
}

/// A backup that has joined in this mode.
fn follower(mode: Mode) -> BackupEpochs {
    let mut epochs = BackupEpochs::new(rules(mode));
    assert!(!epochs.executes_inputs() && !epochs.may_lead());
    assert_eq!(epochs.awaits_entry(rules(mode)), mode.backup_runs());
    if mode.backup_runs() {
        assert!(epochs.sync_agreed(Epoch(1), false));
    }
    assert!(!epochs.awaits_entry(rules(mode)));
    epochs.acknowledges(rules(mode));
    assert!(!epochs.may_lead());
    assert_eq!(epochs.loaded(), None);
    assert!(epochs.may_lead() && epochs.is_settled() && !epochs.holds_log());
    epochs
}

#[test]
fn a_backup_gets_inputs_where_it_runs_and_tells_its_output_where_that_is_compared() {
    for (mode, executes, tells) in [
        (MATCH, true, true),
        (ACTIVE, true, false),
        (PASSIVE, false, false),
    ] {
        let epochs = follower(mode);
        assert_eq!(epochs.executes_inputs(), executes, "{mode:?}");
        assert_eq!(epochs.tells_output(), tells, "{mode:?}");
    }
    let mut epochs = follower(MATCH);
    assert!(epochs.sync_agreed(Epoch(2), false) && epochs.holds_log());
    assert_eq!(epochs.drained(), Epoch(2));
    epochs.acknowledges(rules(PASSIVE));
    assert!(
        epochs.tells_output(),
        "its old epoch goes on until the sync is applied"
    );
    epochs.loaded();
    assert!(!epochs.holds_log() && !epochs.executes_inputs());
}

#[test]
fn invariant_2_an_elected_backup_holds_nothing_back_but_for_a_sync_that_it_applies() {
    let mut draining = follower(ACTIVE);
    draining.sync_agreed(Epoch(2), false);
    assert!(draining.elected() && draining.is_settled() && !draining.holds_log());
    assert!(!draining.sync_agreed(Epoch(3), true) && !draining.holds_log());
    let mut loading = follower(ACTIVE);
    loading.sync_agreed(Epoch(2), false);
    loading.drained();
    loading.acknowledges(rules(ACTIVE));
    assert!(!loading.elected() && loading.holds_log());
    loading.loaded();
    assert!(loading.is_settled() && !loading.holds_log());
    let mut orphaned = follower(ACTIVE);
    orphaned.sync_agreed(Epoch(2), false);
    assert!(orphaned.session_ended() && !orphaned.holds_log());
    assert!(!orphaned.sync_agreed(Epoch(2), false));
    assert!(
        !BackupEpochs::new(rules(ACTIVE)).session_ended(),
        "half a copy is none"
    );
}

#[test]
#[should_panic(expected = "invariant 5")]
fn a_joins_last_sync_that_the_log_has_not_passed_here_is_not_acknowledged() {
    BackupEpochs::new(rules(MATCH)).acknowledges(rules(MATCH));
}

#[test]
fn invariant_4_a_sync_that_is_agreed_before_the_loop_has_heard_of_the_last_ones_end_is_begun() {
    let mut epochs = follower(PASSIVE);
    // The log knows nothing of this one.
    epochs.acknowledges(rules(PASSIVE));
    // The primary has heard that it is loaded, and goes on; this loop has not.
    assert!(epochs.sync_agreed(Epoch(3), false) && epochs.holds_log());
    assert!(!epochs.executes_inputs());
    assert_eq!(epochs.loaded(), Some(Epoch(3)), "to be drained");
    assert_eq!(epochs.phase(), backup::Phase::Draining(Epoch(3)));
    assert_eq!(epochs.drained(), Epoch(3));
    // The same where the last one was a join's.
    let mut joining = BackupEpochs::new(rules(PASSIVE));
    joining.acknowledges(rules(PASSIVE));
    assert!(joining.sync_agreed(Epoch(2), false) && joining.holds_log() && !joining.is_whole());
    assert_eq!(joining.loaded(), Some(Epoch(2)));
    // Elected before that: it will never be.
    let mut elected = follower(PASSIVE);
    elected.acknowledges(rules(PASSIVE));
    elected.sync_agreed(Epoch(3), false);
    elected.elected();
    assert_eq!(elected.loaded(), None);
    assert!(elected.is_settled() && !elected.holds_log());
}

proptest! {
    /// Whatever comes in whatever order that a session and a group may produce: no assertion breaks; what holds the log ends with the
    /// session or the election; and nobody's inputs go in at once beside a sync that the log knows of.
    #[test]
    fn any_order_of_events_keeps_a_primarys_invariants(steps in prop::collection::vec((0_u8..14, 0_u8..3), 0..300)) {
        let mut epochs = PrimaryEpochs::new(rules(MATCH));
        let mut epoch = Epoch(1);
        for (step, mode) in steps {
            let next = rules(Mode::ALL[usize::from(mode)]);
            let stage = epochs.run().map(|run| (run.stage, run.drawn));
            match step {
                0 if epochs.session().is_none() && !epochs.is_handed() => epochs.session_begins(),
                1 if epochs.session() == Some(Phase::Connecting) => epochs.join_begins(),
                1 if epochs.session() == Some(Phase::Joining) => epochs.join_copied(),
                2 | 3 if epochs.may_begin() => {
                    let switchover = step == 3 && epochs.is_synced();
                    if epochs.begin(0, epoch, switchover, next) && mode == 1 {
                        epochs.log_refused();
                    }
                }
                4 if epochs.may_begin() && epochs.is_synced() => epochs.precopy(0, epoch),
                5 => drop(epochs.precopied()),
                6 => drop(epochs.sync_agreed(epoch)),
                7 if stage == Some((Stage::Draining, false)) => drop(epochs.drained()),
                7 if stage == Some((Stage::Running, false)) => {
                    epochs.line_drawn();
                    epochs.resumed();
                }
                7 if stage == Some((Stage::Running, true)) => {
                    epochs.acknowledged(epoch);
                    epoch = epoch.next();
                }
                7 if stage == Some((Stage::Acknowledged, true)) => drop(epochs.loaded()),
                8 => epochs.backup_is_complete(),
                9 if mode == 0 => drop(epochs.session_ended()),
                10 if mode == 0 => drop(epochs.deposed(false)),
                11 if epochs.is_handed() => {
                    epochs.elected();
                    prop_assert!(!epochs.holds_log());
                }
                12 if mode == 0 => drop(epochs.switchover_failed()),
                13 => drop(epochs.take_refused(true)),
                _ => {}
            }
            if let Some(run) = epochs.run() {
                prop_assert!(!run.agreed || epochs.inputs() == Inputs::Agreed);
            }
            prop_assert!(!epochs.holds_log() || epochs.is_handed() || epochs.session().is_some());
        }
    }
}
