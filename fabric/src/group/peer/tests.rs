use super::*;
use std::net::{TcpListener, TcpStream};

/// Two ends of a link, each of which has opened its control region to the other.
fn linked() -> (Peer, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    let mut ours = Peer::new(ReplicaId(1), Stream::unprotected(ours, "peer")).unwrap();
    let mut theirs = Peer::new(ReplicaId(0), Stream::unprotected(theirs, "peer")).unwrap();
    let begun = std::time::Instant::now();
    while !ours.is_up() || !theirs.is_up() {
        ours.progress(1 << 20, 1, false).unwrap();
        theirs.progress(1 << 20, 1, false).unwrap();
        assert!(begun.elapsed().as_secs() < 60, "no grant came");
    }
    (ours, theirs)
}

#[test]
fn what_a_link_had_no_room_for_goes_on_when_it_has() {
    let (mut ours, mut theirs) = linked();
    let (message, mut counters) = (vec![7; 100_000], Counters::default());
    const MESSAGES: usize = 60;
    for _ in 0..MESSAGES {
        ours.send_entries(Term(1), &message, &mut counters);
    }
    assert!(
        ours.unplaced_bytes() > 0,
        "six megabytes are more than the ring and the link take"
    );
    let (mut heard, mut buffer) = (0, Vec::new());
    let begun = std::time::Instant::now();
    while heard < MESSAGES {
        for peer in [&mut ours, &mut theirs] {
            peer.flush(true, &mut counters).unwrap();
            peer.progress(1 << 20, 1, false).unwrap();
        }
        while theirs.hear(&mut buffer, 1).is_some() {
            heard += 1;
        }
        while ours.hear(&mut buffer, 1).is_some() {}
        assert!(
            begun.elapsed().as_secs() < 60,
            "{heard} of {MESSAGES} messages arrived"
        );
    }
    assert_eq!((ours.queued_bytes(), counters.given_up), (0, 0));
}

#[test]
fn a_peer_that_takes_nothing_costs_a_bounded_queue() {
    // It grants its memory, and never says how far it has read.
    let (mut ours, _theirs) = linked();
    let (message, mut counters) = (vec![7; 100_000], Counters::default());
    for _ in 0..200 {
        // No log ring was granted: entries go by the mailbox.
        ours.send_entries(Term(1), &message, &mut counters);
        assert!(ours.failed.is_none(), "the link is well, only slow");
        let most = QUEUE_MAX_BYTES + message.len();
        assert!(ours.queued_bytes() <= most, "{} bytes wait", ours.queued_bytes());
    }
    // 20 MB were said: a part fills the ring or the link, eight wait.
    assert!(counters.given_up > 80, "{counters:?}");
    assert!(ours.queued_bytes() > QUEUE_MAX_BYTES / 2);
}

const LEADER: Option<ReplicaId> = Some(ReplicaId(0));
const ANOTHER: Option<ReplicaId> = Some(ReplicaId(2));
const RING_BYTES: usize = 1 << 20;

/// Lets the other end's grants and revocations arrive, in one go where they come at once.
fn until_granted(ours: &mut Peer, theirs: &mut Peer) {
    theirs.flush(true, &mut Counters::default()).unwrap();
    let begun = std::time::Instant::now();
    while ours.transport.granted(LOG) != theirs.transport.opened(LOG) {
        ours.progress(1 << 20, 1, false).unwrap();
        assert!(begun.elapsed().as_secs() < 60, "the grant does not arrive");
    }
}

/// An entry of the first term gets through.
fn an_entry_arrives(ours: &mut Peer, theirs: &mut Peer, entry: &[u8]) {
    let (mut buffer, mut counters) = (Vec::new(), Counters::default());
    ours.send_entries(Term(1), entry, &mut counters);
    let begun = std::time::Instant::now();
    while theirs.hear(&mut buffer, 1).is_none() {
        ours.flush(true, &mut counters).unwrap();
        theirs.progress(1 << 20, 1, false).unwrap();
        assert!(begun.elapsed().as_secs() < 60, "the entry does not arrive");
    }
    assert_eq!(buffer, entry);
}

#[test]
fn a_log_ring_outlives_a_moment_without_a_leader() {
    let (mut ours, mut theirs) = linked();
    theirs.open_log(Term(1), LEADER, RING_BYTES);
    until_granted(&mut ours, &mut theirs);
    let ring = theirs.transport.opened(LOG);
    assert!(ring.is_some());
    an_entry_arrives(&mut ours, &mut theirs, &[1; 100]);
    // Its follower's patience ended, and it is heard again.
    theirs.open_log(Term(1), None, RING_BYTES);
    theirs.open_log(Term(1), LEADER, RING_BYTES);
    assert_eq!(theirs.transport.opened(LOG), ring);
    an_entry_arrives(&mut ours, &mut theirs, &[2; 100]);
    assert_eq!(
        theirs.log.as_ref().map(|(log, _)| log.consumed() > 200),
        Some(true)
    );
    // A newer term ends it, whoever leads.
    theirs.open_log(Term(2), None, RING_BYTES);
    assert_eq!(theirs.transport.opened(LOG), None);
}

#[test]
fn a_log_ring_that_was_revoked_is_not_opened_again_in_its_term_and_entries_arrive_all_the_same() {
    let (mut ours, mut theirs) = linked();
    theirs.open_log(Term(1), LEADER, RING_BYTES);
    until_granted(&mut ours, &mut theirs);
    an_entry_arrives(&mut ours, &mut theirs, &[1; 100]);
    theirs.open_log(Term(1), ANOTHER, RING_BYTES);
    theirs.open_log(Term(1), LEADER, RING_BYTES);
    until_granted(&mut ours, &mut theirs);
    assert_eq!(ours.transport.granted(LOG), None);
    an_entry_arrives(&mut ours, &mut theirs, &[2; 100]);
    theirs.open_log(Term(2), LEADER, RING_BYTES);
    until_granted(&mut ours, &mut theirs);
    assert_eq!(ours.transport.granted(LOG).map(|grant| grant.epoch), Some(2));
}

#[test]
fn a_log_ring_that_is_granted_anew_in_one_term_is_written_with_its_own_key() {
    let (mut ours, mut theirs) = linked();
    theirs.open_log(Term(1), LEADER, RING_BYTES);
    until_granted(&mut ours, &mut theirs);
    an_entry_arrives(&mut ours, &mut theirs, &[1; 100]);
    // As earlier builds do.
    theirs.transport.revoke(LOG);
    theirs.transport.register(LOG, 1, RING_BYTES).unwrap();
    let grant = theirs.transport.opened(LOG).unwrap();
    let ring = RingReader::new(log_place(RING_BYTES), grant.epoch, grant.key);
    theirs.log = Some((ring, grant.epoch));
    until_granted(&mut ours, &mut theirs);
    an_entry_arrives(&mut ours, &mut theirs, &[2; 100]);
}
