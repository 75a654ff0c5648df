use super::*;
use proptest::prelude::*;

const TERM: Term = Term(3);
const SIGHT: Sight = Sight {
    now_us: 0,
    term: TERM,
    life: Life::Running,
    leader_elsewhere: None,
    leads: true,
    part: Part::Primary,
    has_guest: true,
};

fn ordered(now: bool) -> Shutdown<u8> {
    let mut shutdown = Shutdown::default();
    shutdown.order(0, now, 7);
    shutdown
}

#[test]
fn a_guest_is_asked_once_and_has_its_time_to_switch_itself_off() {
    let mut shutdown = ordered(false);
    assert_eq!(shutdown.turn(&SIGHT), Turn::AsksGuest);
    assert_eq!(shutdown.turn(&SIGHT), Turn::Nothing, "it is being asked");
    shutdown.guest_was_asked(true);
    let now_us = 10;
    assert_eq!(
        shutdown.turn(&Sight { now_us, ..SIGHT }),
        Turn::GuestAsked(vec![7])
    );
    assert_eq!(shutdown.quit_at_us(), Some(now_us + POWERDOWN_US));
    assert!(!shutdown.guest_ignores(POWERDOWN_US, TERM));
    assert!(shutdown.guest_ignores(now_us + POWERDOWN_US, TERM));
    assert!(shutdown.ignored_end_was_said(TERM), "news");
    assert!(!shutdown.guest_ignores(now_us + POWERDOWN_US, TERM), "once");
    // Nobody waits any more, and whoever orders it next asks anew.
    assert_eq!(shutdown.turn(&SIGHT), Turn::Nothing);
    shutdown.order(0, false, 8);
    assert_eq!(shutdown.turn(&SIGHT), Turn::AsksGuest);
}

#[test]
fn what_a_guest_was_asked_ends_with_its_copy() {
    let mut shutdown = ordered(false);
    assert_eq!(shutdown.turn(&SIGHT), Turn::AsksGuest);
    shutdown.guest_was_asked(true);
    assert_eq!(shutdown.turn(&SIGHT), Turn::GuestAsked(vec![7]));
    shutdown.guest_left(true);
    assert!(shutdown.has_guest_left());
    shutdown.copy_ended();
    assert!(!shutdown.has_guest_left() && !shutdown.guest_ignores(u64::MAX, TERM));
}

#[test]
fn an_end_that_a_guest_ignores_is_to_be_said_until_it_is_and_once_in_each_term() {
    let mut shutdown = ordered(false);
    assert_eq!(shutdown.turn(&SIGHT), Turn::AsksGuest);
    shutdown.guest_was_asked(true);
    assert_eq!(shutdown.turn(&SIGHT), Turn::GuestAsked(vec![7]));
    // Nobody leads in that moment, so it cannot be said.
    for _ in 0..2 {
        assert!(shutdown.guest_ignores(POWERDOWN_US, TERM), "it is not forgotten");
        assert_eq!(shutdown.quit_at_us(), Some(POWERDOWN_US));
    }
    assert!(shutdown.ignored_end_was_said(TERM), "news");
    assert!(!shutdown.guest_ignores(u64::MAX, TERM));
    assert_eq!(shutdown.quit_at_us(), None, "nothing is waited for");
    // It may have been lost with that term.
    let term = Term(4);
    assert!(shutdown.guest_ignores(POWERDOWN_US, term));
    assert!(!shutdown.ignored_end_was_said(term), "people have heard of it");
    // Whoever orders it anew gives the guest its time anew.
    shutdown.order(POWERDOWN_US, false, 8);
    let now_us = POWERDOWN_US;
    let sight = Sight {
        now_us,
        term,
        ..SIGHT
    };
    assert_eq!(shutdown.turn(&sight), Turn::AsksGuest);
    shutdown.guest_was_asked(true);
    assert_eq!(shutdown.turn(&sight), Turn::GuestAsked(vec![8]));
    assert_eq!(shutdown.quit_at_us(), Some(2 * POWERDOWN_US));
    assert!(!shutdown.guest_ignores(2 * POWERDOWN_US - 1, term));
    assert!(shutdown.guest_ignores(2 * POWERDOWN_US, term));
}

#[test]
fn without_a_guest_to_ask_the_end_is_said_once_a_term_and_that_it_was_not_asked_once() {
    let mut shutdown = ordered(false);
    assert_eq!(shutdown.turn(&SIGHT), Turn::AsksGuest);
    shutdown.guest_was_asked(false);
    assert_eq!(shutdown.turn(&SIGHT), Turn::Says { unasked: true });
    // The log has not taken it: it is said again, the other is not.
    assert_eq!(shutdown.turn(&SIGHT), Turn::Says { unasked: false });
    assert!(!shutdown.was_said());
    shutdown.said(TERM);
    assert_eq!(shutdown.turn(&SIGHT), Turn::Nothing);
    let term = Term(4);
    assert_eq!(
        shutdown.turn(&Sight { term, ..SIGHT }),
        Turn::Says { unasked: false },
        "it may have been lost with the old one"
    );
    // At once, or of a VM that is not there: nobody is asked.
    for (now, part, has_guest) in [
        (true, Part::Primary, true),
        (false, Part::Primary, false),
        (false, Part::None, false),
    ] {
        let sight = Sight {
            part,
            has_guest,
            ..SIGHT
        };
        assert_eq!(ordered(now).turn(&sight), Turn::Says { unasked: false });
    }
}

#[test]
fn a_backup_that_takes_over_is_ended_at_once_or_as_the_primary() {
    let sight = Sight {
        part: Part::Backup,
        has_guest: false,
        ..SIGHT
    };
    assert_eq!(ordered(false).turn(&sight), Turn::Nothing);
    assert_eq!(ordered(true).turn(&sight), Turn::Says { unasked: false });
}

#[test]
fn invariant_1_an_order_lets_a_host_lead_until_it_is_agreed_and_a_witness_never() {
    let mut shutdown = ordered(true);
    assert!(shutdown.leads_to_end(false, Life::Running));
    assert!(shutdown.leads_to_end(false, Life::Fresh));
    assert!(!shutdown.leads_to_end(true, Life::Running));
    assert!(!shutdown.leads_to_end(false, Life::Down));
    assert_eq!(shutdown.turn(&SIGHT), Turn::Says { unasked: false });
    shutdown.said(TERM);
    assert!(shutdown.leads_to_end(false, Life::Running), "it is on its way");
    assert_eq!(shutdown.overdue(PATIENCE_US, Life::Running), [7]);
    assert!(!shutdown.leads_to_end(false, Life::Running));
}

#[test]
fn invariant_2_whoever_asked_is_answered_by_a_leader_elsewhere_or_when_it_is_late() {
    let mut shutdown = ordered(true);
    let nobody = Sight {
        leads: false,
        ..SIGHT
    };
    assert_eq!(shutdown.turn(&nobody), Turn::Nothing);
    shutdown.order(10, true, 8);
    assert_eq!(shutdown.overdue(PATIENCE_US - 1, Life::Running), []);
    assert_eq!(shutdown.overdue(PATIENCE_US, Life::Running), [7]);
    let leader_elsewhere = Some(ReplicaId(1));
    let elsewhere = Sight {
        leader_elsewhere,
        ..nobody
    };
    assert_eq!(shutdown.turn(&elsewhere), Turn::Refers(ReplicaId(1), vec![8]));
    assert!(!shutdown.is_ordered());
}

#[test]
fn invariant_2_whoever_asked_does_not_hear_that_an_agreed_end_came_to_nothing() {
    let mut shutdown = ordered(true);
    assert_eq!(shutdown.agreed(0, true), AgreedEnd::Tells);
    assert_eq!(
        shutdown.overdue(u64::MAX, Life::Down),
        [],
        "however long the others take"
    );
    shutdown.forgets(Life::Down, false);
    assert!(shutdown.is_done(Life::Down));
    assert_eq!(shutdown.take_orders(), [7]);
}

#[test]
fn invariant_3_an_end_by_force_needs_that_nobody_leads() {
    let mut shutdown = ordered(true);
    assert_eq!(shutdown.force(Some(ReplicaId(1))), Err(ReplicaId(1)));
    assert!(shutdown.is_ordered());
    assert_eq!(shutdown.force(None), Ok(vec![7]));
    shutdown.forgets(Life::Running, true);
    assert!(shutdown.is_forgotten());
}

#[test]
#[should_panic(expected = "invariant 4")]
fn invariant_4_nobody_forgets_a_vm_whose_end_is_not_agreed() {
    ordered(true).forgets(Life::Running, false);
}

#[test]
fn invariant_4_who_leads_tells_and_the_others_wait_for_that_word() {
    let mut leader = ordered(true);
    assert!(!leader.is_done(Life::Running));
    assert_eq!(leader.agreed(0, true), AgreedEnd::Tells);
    assert_eq!(leader.agreed(0, true), AgreedEnd::Nothing, "it does already");
    assert_eq!(
        leader.agreed(0, false),
        AgreedEnd::Nothing,
        "deposed, it still does"
    );
    assert!(!leader.is_untold(u64::MAX), "however long that takes");
    assert!(!leader.is_done(Life::Down), "it has not told all");
    leader.forgets(Life::Down, false);
    assert!(leader.is_done(Life::Down));

    let mut other = Shutdown::<u8>::default();
    assert_eq!(other.agreed(5, false), AgreedEnd::Awaits);
    assert!(!other.is_untold(5 + TOLD_US - 1));
    assert!(other.is_untold(5 + TOLD_US));
    assert!(other.is_done(Life::Down));
    other.forgets(Life::Down, false);
    assert!(!other.is_untold(u64::MAX) && other.told_by_us().is_none());
}

#[test]
fn invariant_5_an_agreed_end_is_taken_up_past_a_sync_that_holds_the_log() {
    let skips = |appended: Option<u64>, applied, committed, is_end: bool| {
        let appended = appended.map(Index);
        Shutdown::<()>::skips_to(appended, Index(applied), Index(committed), |_| is_end)
    };
    assert_eq!(skips(Some(9), 4, 9, true), Some(Index(8)));
    assert_eq!(skips(Some(9), 4, 8, true), None, "it is not agreed yet");
    assert_eq!(skips(Some(9), 9, 9, true), None, "it is applied");
    assert_eq!(skips(Some(9), 4, 9, false), None, "another entry has its place");
    assert_eq!(skips(None, 4, 9, true), None);
}

/// What may happen to an order.
#[derive(Clone, Debug)]
enum Happens {
    Order(bool),
    Turn {
        leads: bool,
        elsewhere: bool,
        part: u8,
        guest: bool,
    },
    Asked(bool),
    Time(u64),
    Term,
    CopyEnds,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        any::<bool>().prop_map(Happens::Order),
        (any::<bool>(), any::<bool>(), 0_u8..3, any::<bool>()).prop_map(|(leads, elsewhere, part, guest)| {
            Happens::Turn {
                leads: leads && !elsewhere,
                elsewhere,
                part,
                guest,
            }
        }),
        any::<bool>().prop_map(Happens::Asked),
        (1_u64..3 * PATIENCE_US).prop_map(Happens::Time),
        Just(Happens::Term),
        Just(Happens::CopyEnds),
    ]
}

proptest! {
    /// Every order is answered once, by a turn or by time; nothing is said without an order and a lead; a guest is asked by one thread.
    #[test]
    fn every_order_is_answered_once(all in prop::collection::vec(happens(), 1..80)) {
        let mut shutdown = Shutdown::default();
        let (mut now_us, mut term, mut next, mut open) = (0_u64, 1, 0_u32, std::collections::BTreeMap::new());
        let mut asking = false;
        for one in all {
            match one {
                Happens::Order(now) => {
                    shutdown.order(now_us, now, next);
                    open.insert(next, now_us);
                    next += 1;
                }
                Happens::Turn { leads, elsewhere, part, guest } => {
                    let part = [Part::None, Part::Primary, Part::Backup][usize::from(part)];
                    let sight = Sight {
                        now_us,
                        term: Term(term),
                        life: Life::Running,
                        leader_elsewhere: elsewhere.then_some(ReplicaId(1)),
                        leads,
                        part,
                        has_guest: guest && part == Part::Primary,
                    };
                    match shutdown.turn(&sight) {
                        Turn::Nothing => {}
                        Turn::Refers(_, who) => {
                            prop_assert!(elsewhere);
                            for one in who {
                                prop_assert!(open.remove(&one).is_some());
                            }
                            prop_assert!(open.is_empty());
                        }
                        Turn::AsksGuest => {
                            prop_assert!(leads && sight.has_guest && !open.is_empty());
                            asking = true;
                        }
                        Turn::GuestAsked(who) => {
                            prop_assert!(leads && sight.has_guest);
                            for one in who {
                                prop_assert!(open.remove(&one).is_some());
                            }
                            prop_assert!(open.is_empty());
                        }
                        Turn::Says { .. } => {
                            prop_assert!(leads && !open.is_empty());
                            shutdown.said(Term(term));
                        }
                    }
                }
                Happens::Asked(yes) => {
                    if std::mem::replace(&mut asking, false) {
                        shutdown.guest_was_asked(yes);
                    }
                }
                Happens::Time(us) => now_us += us,
                Happens::Term => term += 1,
                Happens::CopyEnds => shutdown.copy_ended(),
            }
            for one in shutdown.overdue(now_us, Life::Running) {
                let at_us = open.remove(&one);
                prop_assert!(at_us.is_some_and(|at_us| now_us >= at_us + PATIENCE_US));
            }
            prop_assert!(open.values().all(|at_us| now_us < at_us + PATIENCE_US), "somebody waits for too long");
            prop_assert_eq!(shutdown.is_ordered(), !open.is_empty());
        }
    }
}
