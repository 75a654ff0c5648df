use super::*;
use bytes::Bytes;
use dunlin_core::units::Viewstamp;

#[test]
fn what_a_snapshot_has_overtaken_is_no_failure_and_waits_for_the_snapshot() {
    let held = |index| {
        let stamp = Viewstamp { term: Term(1), index };
        let (kind, payload) = (EntryKind::Data, Bytes::new());
        Some(Entry { stamp, kind, payload })
    };
    let followed = |agreed: &mut Agreed, held: &dyn Fn(Index) -> Option<Entry>| {
        agreed.follow(Index(3), held).map(|(index, _)| index)
    };
    let mut agreed = Agreed::default();
    assert_eq!(followed(&mut agreed, &held), Some(Index(1)));
    // The group has a snapshot up to the second entry, and its loop has heard of what was agreed before alone.
    assert_eq!(followed(&mut agreed, &|_| None), None);
    assert_eq!(agreed.applied, Index(1));
    agreed.applied = Index(2);
    assert_eq!(followed(&mut agreed, &held), Some(Index(3)));
    assert_eq!(followed(&mut agreed, &held), None);
}

#[test]
fn what_nobody_has_proposed_yet_is_refused_when_the_loop_ends() {
    let (proposals, waiting) = crossbeam_channel::bounded(2);
    let (reply, answers) = crossbeam_channel::bounded(2);
    for number in [7, 8] {
        let proposal = Proposal {
            by: None,
            data: Bytes::new(),
        };
        let reply = reply.clone();
        let asked = Asked {
            proposal,
            number,
            reply,
        };
        proposals.send(asked).expect("room");
    }
    drop(reply);
    refuse_waiting(&waiting, ENDS);
    let refused = answers.iter().map(|answer| match answer {
        LogAnswer::Refused { number, again, .. } => (number, again),
        other => panic!("{other:?}"),
    });
    assert_eq!(refused.collect::<Vec<_>>(), [(7, true), (8, true)]);
}
