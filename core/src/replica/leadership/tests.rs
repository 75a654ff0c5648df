//! Who leads, who is dropped and who speaks: each row of the table, each invariant, and any order of events.

use super::*;
use crate::consensus::EntryKind;
use crate::units::Epoch;
use proptest::prelude::*;

const A: ReplicaId = ReplicaId(0);
const B: ReplicaId = ReplicaId(1);

fn set(ids: &[ReplicaId]) -> ReplicaSet {
    ids.iter().fold(ReplicaSet::default(), |set, id| set.with(*id))
}

fn complete(ids: &[ReplicaId]) -> Agreed {
    let (set, epoch) = (set(ids), Epoch(1));
    Agreed::Complete { set, epoch }
}

fn fresh(me: ReplicaId) -> Leadership {
    Leadership::new(me, false, A, AgreedState::default())
}

fn whole() -> Candidacy {
    let whole = true;
    Candidacy {
        whole,
        ..Candidacy::default()
    }
}

fn agree(host: &mut Leadership, ids: &[ReplicaId]) -> Settled {
    assert!(host.apply(host.appended.said_at, &complete(ids)));
    host.complete_agreed(false)
}

/// It booted the VM, and speaks alone.
fn alone() -> Leadership {
    let mut host = fresh(A);
    assert!(host.may_lead(Candidacy::default()));
    host.elected();
    assert_eq!(host.leads_now(Candidacy::default()), Lead::Boots);
    assert_eq!(agree(&mut host, &[A]), Settled::Boots);
    assert_eq!(host.voice(), Voice::Shut, "nothing runs yet");
    host.booted();
    assert_eq!((host.part(), host.voice()), (Part::Primary, Voice::Alone));
    host
}

/// It speaks, and B follows.
fn protected() -> Leadership {
    let mut host = alone();
    host.join_line_drawn();
    assert_eq!(
        host.voice(),
        Voice::Protected,
        "output waits for the group's word"
    );
    assert_eq!(agree(&mut host, &[A, B]), Settled::Protected);
    host
}

/// It follows A.
fn backup() -> Leadership {
    let mut host = fresh(B);
    assert!(host.apply(Index(1), &complete(&[A])));
    host.joins();
    host.keeps_output();
    assert_eq!(agree(&mut host, &[A, B]), Settled::Follows);
    host
}

#[test]
fn a_vm_that_never_ran_is_booted_by_the_first_host_alone() {
    assert!(fresh(A).may_lead(Candidacy::default()));
    assert!(!fresh(B).may_lead(whole()));
    let mut told = fresh(A);
    told.entry_appended(Index(1), &complete(&[B]));
    assert!(
        !told.is_fresh() && !told.may_lead(Candidacy::default()),
        "invariant 4: it has lived elsewhere"
    );
    let mut witness = Leadership::new(A, true, A, AgreedState::default());
    assert!(!witness.may_lead(whole()));
    witness.elected();
    assert!(!witness.takes_over());
}

#[test]
fn a_primary_that_is_deposed_says_nothing_until_it_leads_again() {
    for (survives, goes_on, voice) in [
        (true, Resumes::Protected, Voice::Protected),
        (false, Resumes::DropsBackup, Voice::Shut),
    ] {
        let mut host = protected();
        host.deposed();
        assert_eq!((host.leads(), host.voice()), (false, Voice::Shut));
        host.elected();
        assert_eq!(host.leads_now(whole()), Lead::GoesOn);
        assert_eq!(host.resumes(survives), goes_on);
        assert_eq!(host.voice(), voice);
        if goes_on == Resumes::DropsBackup {
            assert_eq!(agree(&mut host, &[A]), Settled::Alone, "invariant 2");
            assert_eq!(host.voice(), Voice::Alone);
        }
    }
}

#[test]
fn a_line_that_is_drawn_by_a_deposed_primary_gives_it_no_voice() {
    let mut host = alone();
    host.deposed();
    host.join_line_drawn();
    assert_eq!(host.voice(), Voice::Shut);
}

#[test]
fn the_drop_may_be_agreed_between_two_terms() {
    let mut host = protected();
    host.deposed();
    assert_eq!(agree(&mut host, &[A]), Settled::Nothing, "it does not lead");
    host.elected();
    assert_eq!(host.leads_now(whole()), Lead::GoesOn);
    assert_eq!(host.resumes(false), Resumes::Alone);
    assert_eq!(host.voice(), Voice::Alone);
}

#[test]
fn a_backup_speaks_when_its_claim_is_agreed_and_claims_in_each_term() {
    let mut host = backup();
    assert_eq!(
        host.take_over_step(true, Term(1)),
        Step::Nothing,
        "nobody has elected it"
    );
    host.elected();
    assert_eq!(
        host.take_over_step(false, Term(2)),
        Step::Nothing,
        "inputs are missing"
    );
    assert_eq!(host.leads_now(whole()), Lead::TakesOver);
    assert_eq!(host.take_over_step(true, Term(2)), Step::Begins);
    assert_eq!(
        host.take_over_step(true, Term(2)),
        Step::Nothing,
        "it is under way"
    );
    host.took_over();
    assert_eq!(host.take_over_step(true, Term(2)), Step::Claims);
    host.claimed(Term(2));
    assert_eq!(host.take_over_step(true, Term(2)), Step::Nothing);
    host.deposed();
    assert_eq!(
        agree(&mut host, &[B]),
        Settled::Follows,
        "agreed, and it leads no more"
    );
    assert_eq!(host.take_over_step(true, Term(3)), Step::Nothing);
    host.elected();
    assert_eq!(host.leads_now(whole()), Lead::TakesOver);
    assert_eq!(host.take_over_step(true, Term(4)), Step::Claims);
    host.claimed(Term(4));
    assert_eq!(agree(&mut host, &[B]), Settled::Speaks);
    assert_eq!((host.part(), host.voice()), (Part::Primary, Voice::Alone));
}

#[test]
fn a_claim_that_is_agreed_makes_nobody_speak_whose_copy_is_not_an_ordinary_vm() {
    let mut host = backup();
    host.elected();
    assert_eq!(host.leads_now(whole()), Lead::TakesOver);
    assert_eq!(agree(&mut host, &[B]), Settled::Nothing, "invariant 3");
    assert_eq!(host.voice(), Voice::Backup);
}

#[test]
fn who_may_have_been_dropped_does_not_stand() {
    let mut host = backup();
    assert!(host.may_lead(whole()));
    host.entry_appended(Index(9), &complete(&[A]));
    assert!(!host.may_lead(whole()), "invariant 4: it may be agreed");
    host.entry_appended(Index(9), &complete(&[A, B]));
    assert!(host.may_lead(whole()), "another leader's entry has its place");
    assert_eq!(agree(&mut host, &[A]), Settled::Dropped);
    assert!(!host.may_lead(whole()));
}

#[test]
fn what_is_appended_counts_until_another_leaders_entry_has_its_place() {
    let log = |entries: &[(u64, u64, Agreed)]| -> Vec<Entry> {
        let entry = |(term, index, entry): &(u64, u64, Agreed)| Entry {
            stamp: Viewstamp {
                term: Term(*term),
                index: Index(*index),
            },
            kind: EntryKind::Data,
            payload: agreed::encode(entry),
        };
        entries.iter().map(entry).collect()
    };
    let input = || Agreed::Frames(Vec::new());
    let look = |host: &mut Leadership, log: &[Entry]| {
        let newest = log.last().expect("it is not empty").stamp;
        let at = |index| log.iter().find(|entry| entry.stamp.index == index).cloned();
        host.look_at_appended(Index(1), newest, at);
    };
    let mut host = backup();
    look(&mut host, &log(&[(1, 2, input()), (1, 3, complete(&[A]))]));
    assert!(!host.may_lead(whole()));
    look(&mut host, &log(&[(1, 2, input()), (2, 3, input())]));
    assert!(host.may_lead(whole()), "it was never agreed");
    look(&mut host, &log(&[(1, 2, input()), (3, 3, complete(&[A]))]));
    assert!(!host.may_lead(whole()), "in the same place again");
    look(&mut host, &log(&[(4, 2, input())]));
    assert!(host.may_lead(whole()), "a shorter log");
}

/// It was said twice, since nobody agreed for long, and the second one comes when the next backup joins.
#[test]
fn an_old_word_that_nobody_else_is_complete_gives_no_voice_while_a_backup_joins_or_has_joined() {
    let mut host = alone();
    host.join_line_drawn();
    assert!(host.apply(Index(7), &complete(&[A])));
    assert_eq!(
        host.complete_agreed(true),
        Settled::Nothing,
        "a join's last sync is under way"
    );
    assert_eq!(host.voice(), Voice::Protected);
    // The join's session has ended, and its own word is on its way.
    host.entry_appended(Index(9), &complete(&[A, B]));
    assert!(host.apply(Index(8), &complete(&[A])));
    assert_eq!(host.complete_agreed(false), Settled::Nothing);
    assert_eq!(host.voice(), Voice::Protected);
    assert_eq!(agree(&mut host, &[A, B]), Settled::Protected);
    assert_eq!(agree(&mut host, &[A]), Settled::Alone, "a new one");
    assert_eq!(host.voice(), Voice::Alone);
}

#[test]
fn an_older_word_that_is_applied_late_says_nothing_against_a_newer_one() {
    let mut host = fresh(B);
    assert!(host.apply(Index(1), &complete(&[A])));
    host.joins();
    host.keeps_output();
    host.entry_appended(Index(2), &complete(&[A, B]));
    host.entry_appended(Index(3), &complete(&[A]));
    assert!(host.apply(Index(2), &complete(&[A, B])));
    assert_eq!(host.complete_agreed(false), Settled::Follows);
    assert!(!host.may_lead(whole()), "invariant 4");
}

#[test]
fn a_copy_that_another_host_serves_ends() {
    let mut host = protected();
    host.deposed();
    assert_eq!(agree(&mut host, &[B]), Settled::EndedHere);
    host.ends();
    assert_eq!((host.part(), host.voice()), (Part::None, Voice::Shut));
    host.joins();
    assert_eq!(agree(&mut host, &[B, A]), Settled::Follows);
}

#[test]
fn a_copy_that_was_never_complete_makes_room_for_a_new_one() {
    let mut host = fresh(B);
    assert!(host.apply(Index(1), &complete(&[A])));
    assert_eq!(host.invited(true, false), Invited::Joins);
    assert_eq!(host.invited(false, false), Invited::Refuses, "of another term");
    host.joins();
    host.keeps_output();
    assert_eq!(
        host.invited(true, false),
        Invited::Refuses,
        "it is being brought in"
    );
    assert_eq!(host.invited(true, true), Invited::EndsStaleCopy);
    assert_eq!(
        host.invited(false, true),
        Invited::Refuses,
        "whoever leads may have said that it is complete"
    );
    host.ends();
    assert_eq!(host.invited(true, false), Invited::Joins);
    assert_eq!(
        backup().invited(true, true),
        Invited::Refuses,
        "it is complete, and may take over"
    );
    assert_eq!(protected().invited(true, false), Invited::Refuses);
}

#[test]
fn who_leads_without_a_complete_copy_steps_down() {
    let mut host = fresh(B);
    assert!(host.apply(Index(1), &complete(&[A])));
    host.elected();
    assert_eq!(host.leads_now(Candidacy::default()), Lead::StepsDown);
    let ends = Candidacy {
        ends: true,
        ..Candidacy::default()
    };
    assert!(host.may_lead(ends));
    assert_eq!(host.leads_now(ends), Lead::Ends);
    host.joins();
    assert_eq!(host.leads_now(whole()), Lead::StepsDown, "it has not joined yet");
}

#[test]
fn a_mandate_boots_what_is_newest_and_by_order_what_is_older() {
    let with = |mandate| Candidacy {
        mandate,
        ..Candidacy::default()
    };
    for (complete_there, mandate, follows) in [
        ([A], Mandate::Newest, Lead::Boots),
        ([B], Mandate::Newest, Lead::StepsDown),
        ([B], Mandate::Stale, Lead::Boots),
        ([A], Mandate::None, Lead::StepsDown),
    ] {
        let mut host = fresh(A);
        assert!(host.apply(Index(1), &complete(&complete_there)));
        assert_eq!(host.may_lead(with(mandate)), mandate != Mandate::None);
        host.elected();
        assert_eq!(
            host.leads_now(with(mandate)),
            follows,
            "{complete_there:?} {mandate:?}"
        );
    }
    let failed = Candidacy {
        failed: true,
        ..with(Mandate::Newest)
    };
    assert!(!fresh(A).may_lead(failed));
}

#[test]
fn nobody_leads_what_has_ended_and_a_snapshot_deposes() {
    let mut host = protected();
    host.installed(AgreedState::default());
    assert_eq!((host.leads(), host.voice()), (false, Voice::Shut));
    let mut host = alone();
    assert!(host.apply(Index(1), &Agreed::Down));
    host.ends();
    assert!(!host.may_lead(whole()) && !host.apply(Index(1), &complete(&[A])));
    let mut told = backup();
    told.is_told_of_the_end();
    assert!(!told.may_lead(whole()));
}

#[test]
fn a_lost_backup_is_dropped_when_somebody_could_agree() {
    let host = protected();
    assert!(!host.may_drop_backup(false) && host.may_drop_backup(true));
    assert!(
        alone().may_drop_backup(false),
        "a join that failed is not complete"
    );
    // It was away, the other host has taken the VM over and has died, and this one is elected to have the end agreed.
    let mut stale = protected();
    stale.deposed();
    stale.elected();
    assert!(!stale.may_drop_backup(true), "it has not heard of that");
    assert_eq!(agree(&mut stale, &[B]), Settled::EndedHere);
}

/// Anything that can happen to a host.
#[derive(Clone, Copy, Debug)]
enum Event {
    Elected,
    Leads,
    Deposed,
    Agreed(u8),
    Appended(u8),
    Joins,
    Booted,
    Line,
    Ends,
    Step(bool),
    TookOver,
    Installed(u8),
}

fn any_event() -> impl Strategy<Value = Event> {
    let who = 1_u8..4;
    prop_oneof![
        Just(Event::Elected),
        Just(Event::Leads),
        Just(Event::Deposed),
        who.clone().prop_map(Event::Agreed),
        who.clone().prop_map(Event::Appended),
        Just(Event::Joins),
        Just(Event::Booted),
        Just(Event::Line),
        Just(Event::Ends),
        any::<bool>().prop_map(Event::Step),
        Just(Event::TookOver),
        who.prop_map(Event::Installed),
    ]
}

fn both(bits: u8) -> Vec<ReplicaId> {
    [A, B].into_iter().filter(|id| bits & 1 << id.0 != 0).collect()
}

proptest! {
    /// As its loop does what it is told to, and whatever else happens in whatever order: the assertions hold, and only a primary that leads
    /// has a voice.
    #[test]
    fn no_order_of_events_gives_a_voice_to_who_does_not_lead(events in prop::collection::vec(any_event(), 0..60)) {
        let mut host = fresh(B);
        let mut term = Term(1);
        for event in events {
            match event {
                Event::Elected => {
                    host.deposed();
                    host.elected();
                    term = Term(term.0 + 1);
                }
                Event::Leads => match host.leads_now(Candidacy { whole: host.part() != Part::None, ..Candidacy::default() }) {
                    Lead::GoesOn => drop(host.resumes(term.0.is_multiple_of(2))),
                    Lead::StepsDown => {
                        host.ends();
                        host.deposed();
                    }
                    Lead::Boots | Lead::TakesOver | Lead::Ends => {}
                },
                Event::Deposed => host.deposed(),
                Event::Agreed(bits) => match agree(&mut host, &both(bits)) {
                    Settled::Dropped | Settled::EndedHere => host.ends(),
                    _ => {}
                },
                Event::Appended(bits) => host.entry_appended(Index(1), &complete(&both(bits))),
                Event::Joins if host.part() == Part::None => {
                    host.joins();
                    host.keeps_output();
                }
                Event::Booted if host.part() == Part::Primary => host.booted(),
                Event::Line => host.join_line_drawn(),
                Event::Ends => host.ends(),
                Event::Step(settled) => match host.take_over_step(settled, term) {
                    Step::Claims => host.claimed(term),
                    Step::Begins | Step::Nothing => {}
                },
                Event::TookOver if host.take_over_is().0 => host.took_over(),
                Event::Installed(bits) => {
                    let mut state = AgreedState::default();
                    prop_assert!(state.apply(&complete(&both(bits))));
                    host.installed(state);
                    host.ends();
                }
                Event::Joins | Event::Booted | Event::TookOver => {}
            }
            let speaks = matches!(host.voice(), Voice::Alone | Voice::Protected);
            prop_assert!(!speaks || host.leads() && host.part() == Part::Primary);
            prop_assert!(host.voice() != Voice::Alone || host.state().complete == ReplicaSet::one(B));
            prop_assert!(host.voice() != Voice::Backup || host.part() == Part::Backup);
        }
    }
}
