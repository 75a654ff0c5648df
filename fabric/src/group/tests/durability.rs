//! What a host makes of its log when the durability has been changed between two of its starts.

use super::*;

/// A group whose time passes in rounds only, each with this durability; a follower of its leader, and its term.
fn at_work(durability: Durability) -> (Cluster, u8, Term) {
    let mut c = Cluster::begin(Fabric::Tcp, durability, 256 << 10, Some(0));
    let leader = c.leader();
    let term = c.group(leader).term();
    (c, (leader + 1) % 3, term)
}

fn agree(c: &mut Cluster, numbers: std::ops::Range<usize>) {
    for n in numbers {
        c.propose(numbered(n, 100));
        c.round();
    }
}

/// The replica is started again with this durability.
fn again(c: &mut Cluster, id: u8, durability: Durability) {
    c.kill(id);
    c.durability = durability;
    c.start(id);
}

fn files(c: &Cluster, id: u8, begin: &str) -> usize {
    let folder = c.dir.path().join(id.to_string());
    let names = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name());
    names
        .filter(|name| name.to_str().unwrap().starts_with(begin))
        .count()
}

/// It says nothing that counts before its leader has brought it up to date; then its disk is as good as any.
fn recovers_and_is_kept(c: &mut Cluster, id: u8, term: Term, count: usize) {
    assert_eq!(c.group(id).role(), Role::Recovering);
    assert_eq!(
        c.group(id).core().appended().index,
        Index(0),
        "nothing old is taken for new"
    );
    assert_eq!(
        files(c, id, "log-") + files(c, id, "snapshot"),
        0,
        "nor left to be"
    );
    c.until_all_have(count);
    c.until("it takes part again, and its disk says so", |c| {
        c.group(id).role() != Role::Recovering && files(c, id, "in-memory") == 0
    });
    assert_eq!(c.group(id).term(), term, "nobody had to be elected for it");
    let held = c.group(id).core().appended();
    again(c, id, Durability::Disk);
    assert_ne!(c.group(id).role(), Role::Recovering);
    assert_eq!(c.group(id).core().appended(), held);
}

#[test]
fn a_log_that_was_in_memory_is_not_an_empty_one_on_disk() {
    let (mut c, id, term) = at_work(Durability::Memory);
    agree(&mut c, 0..20);
    c.until_all_have(20);
    again(&mut c, id, Durability::Disk);
    recovers_and_is_kept(&mut c, id, term, 20);
}

#[test]
fn a_log_on_disk_that_was_left_for_one_in_memory_does_not_come_back() {
    let (mut c, id, term) = at_work(Durability::Disk);
    agree(&mut c, 0..10);
    c.until_all_have(10);
    again(&mut c, id, Durability::Memory);
    agree(&mut c, 10..20);
    c.until_all_have(20);
    c.until("it takes part", |c| c.group(id).role() != Role::Recovering);
    // What is on its disk is of the first ten. A crash before it is brought up to date changes nothing.
    again(&mut c, id, Durability::Disk);
    assert_eq!(c.group(id).role(), Role::Recovering);
    again(&mut c, id, Durability::Disk);
    recovers_and_is_kept(&mut c, id, term, 20);
}
