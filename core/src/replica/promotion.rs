//! What it decides: when a host serves alone because a person says that the others are dead (`dunlin promote --force`), what a person is told who
//! could say so, and how the others come back.
//!
//! Flow: an order -> [`judge`] -> the consensus stands alone (`consensus::alone`), or a cold start is ordered (`cold_start`) -> the host speaks -> a
//! host that was declared dead meets it, loses what it held, and is [taken back](readmits).
//!
//! Invariants:
//! 1. An order is taken only by a host that knows of no leader, and that holds a complete, living copy, or is told to boot its disk.
//! 2. Who was declared dead takes part again only over a link that was made after the order: a cable that was cut a moment ago still looks
//!    connected. (The loop ends all links when it takes the order.)
//! 3. Hosts come back one at a time; the witness last, since without a second copy it could only stop this one.
//!
//! Source: ours; a forced promotion, as other clusters have it. Not here: terms and logs (`consensus::alone`), the disks (`cold_start`).

use crate::consensus::Member;
use crate::units::ReplicaId;

/// Hosts that were not heard for so long are lost, as far as a person's help is worth asking for.
pub const LOST_US: u64 = 5_000_000;

/// What a host sees that is to serve alone.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// It leads: a majority answers.
    pub leads: bool,
    /// Another host leads.
    pub leader: Option<ReplicaId>,
    /// It may lead, as far as it knows.
    pub may_lead: bool,
    /// The VM never started, as far as it knows.
    pub fresh: bool,
    /// It may boot the VM from its disk, if no copy is alive.
    pub from_disk: bool,
}

/// What follows from an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ordered {
    /// It serves, alone.
    StandsAlone,
    /// How new its disk is has to be found out first.
    BootsFromDisk,
    /// Refused: a majority of the group answers.
    MajorityAnswers,
    /// Refused: that host leads, and is not dead.
    Led(ReplicaId),
    /// Refused: no complete and running copy is here.
    NoCopy,
}

/// Invariant 1.
#[must_use]
pub fn judge(sight: &Sight) -> Ordered {
    match (sight.leader, sight.may_lead && !sight.fresh, sight.from_disk) {
        _ if sight.leads => Ordered::MajorityAnswers,
        (Some(leader), ..) => Ordered::Led(leader),
        (None, true, _) => Ordered::StandsAlone,
        (None, false, true) => Ordered::BootsFromDisk,
        (None, false, false) => Ordered::NoCopy,
    }
}

/// Invariant 3: who is taken back next, of the VM's `hosts`, and the list of members with it. `is_connected`: over a link that counts
/// (invariant 2).
#[must_use]
pub fn readmits(
    hosts: impl Iterator<Item = Member> + Clone,
    members: &[Member],
    is_connected: impl Fn(ReplicaId) -> bool,
) -> Option<(Member, Vec<Member>)> {
    let mut absent = hosts.filter(|host| members.iter().all(|known| known.id != host.id));
    let full_is_absent = absent.clone().any(|member| !member.witness);
    let back = absent.find(|member| is_connected(member.id) && !(member.witness && full_is_absent))?;
    let mut members = members.to_vec();
    members.push(back);
    members.sort_by_key(|member| member.id);
    Some((back, members))
}

/// What a person may do where the other hosts are lost is said once for each loss, and not because a busy host was late.
#[derive(Clone, Copy, Debug, Default)]
pub struct Advice {
    told: bool,
}

impl Advice {
    /// `alone`: the VM is here, nobody leads, and nothing was heard of any other host for [`LOST_US`]. Whether it is to be said now.
    pub fn look(&mut self, alone: bool) -> bool {
        let told = std::mem::replace(&mut self.told, alone);
        alone && !told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ReplicaId = ReplicaId(0);
    const SIGHT: Sight = Sight {
        leads: false,
        leader: None,
        may_lead: true,
        fresh: false,
        from_disk: false,
    };

    #[test]
    fn invariant_1_an_order_needs_a_copy_or_a_disk_and_no_leader() {
        let leads = Sight { leads: true, ..SIGHT };
        assert_eq!(judge(&leads), Ordered::MajorityAnswers);
        let leader = Some(ReplicaId(1));
        assert_eq!(judge(&Sight { leader, ..SIGHT }), Ordered::Led(ReplicaId(1)));
        assert_eq!(judge(&SIGHT), Ordered::StandsAlone);
        for (may_lead, fresh) in [(false, false), (true, true), (false, true)] {
            let none = Sight {
                may_lead,
                fresh,
                ..SIGHT
            };
            assert_eq!(judge(&none), Ordered::NoCopy);
            let from_disk = Sight {
                from_disk: true,
                ..none
            };
            assert_eq!(judge(&from_disk), Ordered::BootsFromDisk);
        }
    }

    #[test]
    fn invariant_3_hosts_come_back_one_at_a_time_and_the_witness_last() {
        let hosts = [Member::full(0), Member::full(1), Member::witness(2)];
        let mut members = vec![Member::full(ME.0)];
        let mut back = |connected: &[u8]| {
            let is_connected = |id: ReplicaId| connected.contains(&id.0);
            let (back, list) = readmits(hosts.into_iter(), &members, is_connected)?;
            members = list;
            Some(back.id.0)
        };
        assert_eq!(back(&[]), None);
        assert_eq!(back(&[2]), None, "it could only stop this one");
        assert_eq!(back(&[1, 2]), Some(1));
        assert_eq!(back(&[2]), Some(2));
        assert_eq!(back(&[1, 2]), None, "all are there");
        assert_eq!(members, hosts);
    }

    #[test]
    fn advice_is_given_once_for_each_loss() {
        let mut advice = Advice::default();
        let said: Vec<bool> = [false, true, true, false, true]
            .map(|alone| advice.look(alone))
            .into();
        assert_eq!(said, [false, true, false, false, true]);
    }
}
