//! The version of the protocol that a group speaks.

use super::*;
use crate::link::PROTOCOL_VERSION;

#[test]
fn a_group_speaks_what_all_its_linked_hosts_know_and_nothing_while_one_is_away() {
    let mut c = Cluster::with_kept_time(Fabric::Tcp);
    c.leader();
    c.until("all links stand", |c| {
        (0..3).all(|id| c.group(id).protocol() == Some(PROTOCOL_VERSION))
    });
    // Host 2 comes back with an older build.
    let (near, far) = pair(Fabric::Tcp);
    let older = PROTOCOL_VERSION - 1;
    c.group(0).add_link(ReplicaId(2), near.speaking(older)).unwrap();
    c.group(2).add_link(ReplicaId(0), far.speaking(older)).unwrap();
    c.until("the link to it stands", |c| {
        c.group(0).protocol() == Some(older) && c.group(2).protocol() == Some(older)
    });
    let links = c.group(0).links();
    let spoken = links.iter().map(|link| link.spoken.as_ref().unwrap().version);
    assert_eq!(spoken.collect::<Vec<_>>(), [PROTOCOL_VERSION, older]);
    c.group(0).remove_link(ReplicaId(2));
    assert_eq!(
        c.group(0).protocol(),
        None,
        "nobody knows what it comes back with"
    );
}
