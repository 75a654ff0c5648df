//! An owner that waits for the group's descriptor itself, as a VM's loop does.

use super::*;

impl Cluster {
    /// Every owner has waited for its group's descriptor, as a VM's loop does, and says whether it was readable.
    fn wake(&mut self) {
        for group in self.groups.iter_mut().flatten() {
            group.arm();
            let readable = is_readable(group);
            group.woke(readable);
        }
    }
}

fn is_readable(group: &Group) -> bool {
    let mut fd = libc::pollfd {
        fd: group.epoll.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut fd, 1, 0) == 1 }
}

#[test]
fn an_owner_that_waits_itself_misses_nothing_and_what_did_not_ring_is_not_read() {
    for fabric in BOTH {
        let mut c = Cluster::new(fabric, Durability::Memory);
        let leader = c.leader();
        for n in 1..=100 {
            c.propose(numbered(n, 100));
            c.until("all have applied it", |c| {
                c.wake();
                (0..3).all(|id| c.data(id).len() == n)
            });
        }
        if fabric == Fabric::Shm {
            continue; // There writes land by themselves.
        }
        c.propose(numbered(101, 100));
        let (now, other) = (c.now_us(), (leader + 1) % 3);
        while c.group(leader).poll(now).is_some() {}
        let committed = c.group(other).committed();
        c.group(other).arm();
        let begun = Instant::now();
        while !is_readable(c.group(other)) {
            assert!(begun.elapsed().as_secs() < 60, "nothing came");
        }
        c.group(other).woke(false);
        while c.group(other).poll(now).is_some() {}
        assert_eq!(c.group(other).committed(), committed, "it was read");
    }
}
