//! Each rule by itself; whole hosts are in `sim/src/whole`.

use super::*;
use crate::units::Index;

fn at(term: u64, index: u64) -> Viewstamp {
    Viewstamp {
        term: Term(term),
        index: Index(index),
    }
}

fn disk(consistent: bool, term: u64, primary: bool, epoch: u64) -> DiskMark {
    DiskMark {
        consistent,
        term: Term(term),
        primary,
        epoch: Epoch(epoch),
    }
}

fn holding(last: Viewstamp, complete: u64, disk: DiskMark) -> Holding {
    Holding {
        last,
        complete: ReplicaSet(complete),
        disks: vec![disk],
        ..Holding::default()
    }
}

fn witness(last: Viewstamp, complete: u64) -> Holding {
    Holding {
        disks: vec![],
        ..holding(last, complete, disk(true, 0, false, 0))
    }
}

/// Hosts 0 and 1 can run the VM, 2 is the witness. What each of the first two finds, by what all hold; `None` says nothing.
fn verdicts(holds: [Option<Holding>; 3]) -> [Option<Verdict>; 2] {
    let group = [Member::full(0), Member::full(1), Member::witness(2)];
    [0, 1].map(|me: u8| {
        let mine = holds[usize::from(me)].as_ref()?;
        let answers = (0..3_u8)
            .filter(|id| *id != me)
            .filter_map(|id| Some((ReplicaId(id), holds[usize::from(id)].clone()?)))
            .collect();
        Some(ColdStart::default().judge(&group, ReplicaId(me), mine, &answers))
    })
}

const fn newer(host: u8) -> Option<Verdict> {
    Some(Verdict::NewerElsewhere {
        host: ReplicaId(host),
        recovering: false,
    })
}

#[test]
fn the_primarys_disk_is_newer_than_its_backups_whoever_asks() {
    let backup = holding(at(3, 90), 0b11, disk(true, 3, false, 40));
    let primary = holding(at(3, 90), 0b11, disk(true, 3, true, 0));
    let there = Some(witness(at(3, 90), 0b11));
    let found = verdicts([Some(backup), Some(primary), there]);
    assert_eq!(found, [newer(1), Some(Verdict::Boots)]);
}

#[test]
fn a_host_that_was_dropped_does_not_boot_though_it_does_not_know_it() {
    // Host 0 died first; host 1 went on alone and said so, which host 0 never heard.
    let old = holding(at(3, 90), 0b11, disk(true, 3, true, 0));
    let new = holding(at(4, 120), 0b10, disk(true, 4, true, 0));
    assert_eq!(
        verdicts([Some(old.clone()), Some(new), None]),
        [newer(1), Some(Verdict::Boots)]
    );
    // Host 1 says nothing, but the witness knows.
    let [found, _] = verdicts([Some(old.clone()), None, Some(witness(at(4, 119), 0b10))]);
    let word = Word {
        at: at(4, 119),
        complete: ReplicaSet(0b10),
        since_ms: None,
        by: ReplicaId(2),
    };
    assert_eq!(found, Some(Verdict::Superseded(word)));
    // Nobody knows.
    let [found, _] = verdicts([Some(old), None, None]);
    assert_eq!(found, Some(Verdict::Silent(vec![ReplicaId(1)])));
}

#[test]
fn a_note_counts_where_the_log_is_lost_and_says_since_when() {
    let note = |at, complete, since_ms| {
        Some(Noted {
            at,
            complete: ReplicaSet(complete),
            since_ms,
        })
    };
    // All were killed, and their logs were in memory: host 0 is a backup that had been dropped.
    let backup = Holding {
        noted: note(at(3, 50), 0b11, 1000),
        ..holding(at(0, 0), 0, disk(true, 3, false, 40))
    };
    let there = Holding {
        noted: note(at(3, 90), 0b10, 2000),
        ..witness(at(0, 0), 0)
    };
    let [found, _] = verdicts([Some(backup.clone()), None, Some(there.clone())]);
    let word = Word {
        at: at(3, 90),
        complete: ReplicaSet(0b10),
        since_ms: Some(2000),
        by: ReplicaId(2),
    };
    assert_eq!(found, Some(Verdict::Superseded(word)));
    // A log that goes on after the note says the same, and the note says since when.
    let there = Holding {
        last: at(4, 300),
        complete: ReplicaSet(0b10),
        ..there
    };
    let [found, _] = verdicts([Some(backup), None, Some(there)]);
    let word = Word {
        at: at(4, 300),
        ..word
    };
    assert_eq!(found, Some(Verdict::Superseded(word)));
}

#[test]
fn an_unfinished_copy_is_not_chosen_and_without_disks_the_first_host_is() {
    let half = holding(at(5, 10), 0b11, disk(false, 9, false, 9));
    let whole = holding(at(5, 10), 0b11, disk(true, 5, true, 0));
    assert_eq!(
        verdicts([Some(half.clone()), Some(whole), None]),
        [newer(1), Some(Verdict::Boots)]
    );
    let [found, _] = verdicts([Some(half), None, None]);
    assert_eq!(found, Some(Verdict::Unfinished));
    let bare = || Some(witness(at(5, 10), 0b11));
    assert_eq!(
        verdicts([bare(), bare(), bare()]),
        [Some(Verdict::Boots), newer(0)]
    );
}

#[test]
fn nobody_boots_beside_a_living_copy_or_a_leader() {
    let disk = holding(at(3, 90), 0b11, disk(true, 3, true, 0));
    let lives = Holding {
        copy: LivingCopy::Stands,
        ..disk.clone()
    };
    let [found, _] = verdicts([Some(disk.clone()), Some(lives), None]);
    assert_eq!(found, Some(Verdict::Alive(ReplicaId(1))));
    let led = Holding {
        led: true,
        ..witness(at(3, 90), 0b11)
    };
    let [found, _] = verdicts([Some(disk), None, Some(led)]);
    assert_eq!(found, Some(Verdict::Alive(ReplicaId(2))));
}

#[test]
fn a_copy_whose_host_may_not_be_elected_waits_for_who_knows_more() {
    let waits = |complete| Holding {
        copy: LivingCopy::Waits,
        ..holding(at(3, 90), complete, disk(true, 3, false, 40))
    };
    let there = || Some(witness(at(3, 90), 0b01));
    // It was dropped, and is about to be ended.
    let mine = || holding(at(3, 95), 0b01, disk(true, 3, true, 0));
    for complete in [0b11, 0b01] {
        let [found, _] = verdicts([Some(mine()), Some(waits(complete)), there()]);
        assert_eq!(found, Some(Verdict::Boots));
    }
    // It is complete, and its log does not say so yet.
    let knows = holding(at(3, 95), 0b11, disk(true, 3, true, 0));
    let [found, _] = verdicts([Some(knows), Some(waits(0b01)), there()]);
    assert_eq!(found, Some(Verdict::Informs(ReplicaId(1))));
    let mut cold = asking();
    assert_eq!(cold.answered(9, found.as_ref()), Answered::Mandated);
    assert_eq!(cold.mandate(), Mandate::Informs);
    let mut cold = ColdStart::default();
    cold.order(true);
    cold.look(&LOST);
    assert_eq!(
        cold.answered(9, found.as_ref()),
        Answered::Refuses,
        "a copy is alive"
    );
}

const LOST: Sight = Sight {
    now_us: 0,
    lost: true,
    leads: false,
    has_lived: true,
    recovering: false,
};

fn later(now_us: u64) -> Sight {
    Sight { now_us, ..LOST }
}

/// One that asks, by itself.
fn asking() -> ColdStart {
    let mut cold = ColdStart::default();
    assert_eq!(cold.look(&LOST), Look::Nothing);
    assert_eq!(cold.look(&later(LEADERLESS_US)), Look::Nothing);
    assert_eq!(cold.look(&later(LEADERLESS_US + 1)), Look::Inquires);
    assert_eq!(
        cold.look(&later(LEADERLESS_US + 2)),
        Look::Nothing,
        "it asks already"
    );
    cold
}

#[test]
fn a_mandate_is_given_by_a_verdict_and_ends_with_the_first_leader() {
    let mut cold = asking();
    let now_us = LEADERLESS_US + 10;
    assert_eq!(cold.answered(now_us, Some(&Verdict::Boots)), Answered::Mandated);
    assert_eq!(cold.mandate(), Mandate::Newest);
    // It asks again, and the answer has changed.
    assert_eq!(cold.look(&later(now_us + AGAIN_US - 1)), Look::Nothing);
    assert_eq!(cold.look(&later(now_us + AGAIN_US)), Look::Inquires);
    let alive = Verdict::Alive(ReplicaId(1));
    assert_eq!(cold.answered(now_us, Some(&alive)), Answered::Waits);
    assert_eq!(cold.mandate(), Mandate::None);

    let mut cold = asking();
    cold.answered(now_us, Some(&Verdict::Boots));
    let led = Sight { lost: false, ..LOST };
    assert_eq!(cold.look(&led), Look::Over);
    assert_eq!(cold.mandate(), Mandate::None);
    assert_eq!(cold.look(&led), Look::Nothing, "it is said once");
}

#[test]
fn an_answer_that_comes_after_a_leader_did_is_too_late() {
    let mut cold = asking();
    assert_eq!(cold.look(&Sight { lost: false, ..LOST }), Look::Over);
    assert_eq!(cold.answered(9, Some(&Verdict::Boots)), Answered::Late);
    assert_eq!(cold.mandate(), Mandate::None);
}

#[test]
fn by_itself_a_host_waits_for_those_who_say_nothing() {
    for verdict in [
        Verdict::Silent(vec![ReplicaId(1)]),
        Verdict::Unfinished,
        Verdict::NewerElsewhere {
            host: ReplicaId(1),
            recovering: true,
        },
    ] {
        let mut cold = asking();
        assert_eq!(cold.answered(9, Some(&verdict)), Answered::Waits);
        assert_eq!(cold.mandate(), Mandate::None);
    }
    assert_eq!(
        asking().answered(9, None),
        Answered::Waits,
        "its disk cannot be read"
    );
}

#[test]
fn a_person_may_say_that_the_silent_are_dead_and_that_an_older_disk_will_do() {
    let silent = Verdict::Silent(vec![ReplicaId(1)]);
    let older = Verdict::NewerElsewhere {
        host: ReplicaId(1),
        recovering: false,
    };
    for (force_stale, verdict, answered, mandate) in [
        (false, &silent, Answered::Obeys, Mandate::Newest),
        (true, &silent, Answered::Obeys, Mandate::Newest),
        (false, &Verdict::Boots, Answered::Obeys, Mandate::Newest),
        (false, &older, Answered::Refuses, Mandate::None),
        (true, &older, Answered::Obeys, Mandate::Stale),
        (true, &Verdict::Unfinished, Answered::Refuses, Mandate::None),
        (
            true,
            &Verdict::Alive(ReplicaId(1)),
            Answered::Refuses,
            Mandate::None,
        ),
    ] {
        let mut cold = ColdStart::default();
        cold.order(force_stale);
        assert_eq!(cold.look(&LOST), Look::Inquires, "at once");
        assert_eq!(
            cold.answered(9, Some(verdict)),
            answered,
            "{force_stale} {verdict:?}"
        );
        assert_eq!(cold.mandate(), mandate);
    }
}

#[test]
fn without_its_log_a_host_asks_only_by_order() {
    let mut cold = ColdStart::default();
    let recovering = |now_us| Sight {
        recovering: true,
        ..later(now_us)
    };
    assert_eq!(cold.look(&recovering(0)), Look::Nothing);
    assert_eq!(cold.look(&recovering(LEADERLESS_US + 1)), Look::Recovering);
    cold.order(false);
    assert_eq!(cold.look(&recovering(LEADERLESS_US + 2)), Look::Inquires);
    // Nor one that knows of no life of the VM's.
    let mut cold = ColdStart::default();
    cold.look(&LOST);
    let unborn = Sight {
        has_lived: false,
        ..later(LEADERLESS_US + 1)
    };
    assert_eq!(cold.look(&unborn), Look::Nothing);
}
