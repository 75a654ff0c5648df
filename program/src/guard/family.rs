//! Whether all of a program's processes are where CRIU takes them: the first one, and what it has begun, and what that has begun.
//!
//! Decides:    which process a copy would miss.
//! Flow:       the program stands still -> its processes' parents -> a join goes on, or fails with one line.
//! Invariants: 1. what a person runs beside the program counts as no process of it: neither do those that the command has begun.
//! Source:     proc(5): PPid, NSpid and NSsid in `status`. Not here: when it stands still (`ahead`).

use super::memory::inside;
use super::{GuardError, failed};
use crate::inside::is_visitor;
use crate::proc::{has_gone, text};
use std::collections::BTreeMap;

/// The copy's own first process, and the program's.
const KEEPS: u32 = 1;
const FIRST: u32 = 2;

#[derive(Clone, PartialEq, Eq, Debug)]
struct Member {
    /// As the host calls it.
    number: u32,
    parent: u32,
    /// As they are called inside.
    inside: u32,
    session: u32,
    name: String,
    ended: bool,
}

/// Of a program that stands still: all that is in its namespace.
///
/// # Errors
/// One line that names a process which CRIU would not take.
pub(super) fn is_whole(numbers: &[u32]) -> Result<(), GuardError> {
    let mut members = Vec::new();
    for number in numbers {
        match text(format!("/proc/{number}/status")) {
            Ok(about) => members.extend(Member::of(*number, &about)),
            // One that has gone meanwhile is none.
            Err(error) if has_gone(&error) => {}
            Err(error) => return Err(failed("who belongs to the program")(error)),
        }
    }
    match astray(members) {
        None => Ok(()),
        Some(member) => Err(GuardError(format!(
            "process {} ({}) has left its parent, and cannot be copied",
            member.inside, member.name
        ))),
    }
}

impl Member {
    fn of(number: u32, status: &str) -> Option<Self> {
        let word = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            number,
            parent: word("PPid:")?.trim().parse().ok()?,
            inside: inside(status)?,
            session: word("NSsid:")?.split_ascii_whitespace().last()?.parse().ok()?,
            name: word("Name:")?.trim().to_owned(),
            ended: word("State:")?.trim().starts_with(['Z', 'X']),
        })
    }

    fn is_beside(&self) -> bool {
        is_visitor(self.inside) || is_visitor(self.session)
    }
}

/// The first that does not come from the program's first process.
fn astray(members: Vec<Member>) -> Option<Member> {
    let all: BTreeMap<u32, Member> = members
        .into_iter()
        .map(|member| (member.number, member))
        .collect();
    let comes_from_it = |member: &Member| {
        let mut at = member;
        // No line of parents is longer than there are processes.
        for _ in 0..=all.len() {
            if at.inside == FIRST || at.is_beside() {
                return true;
            }
            match all.get(&at.parent) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        false
    };
    let is_its = |member: &&Member| member.inside != KEEPS && !member.ended;
    let mut its = all.values().filter(is_its);
    its.find(|member| !comes_from_it(member)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inside::first_visitor;

    /// A process of that number inside, whose number outside is 100 more.
    fn member(inside: u32, parent: u32, session: u32) -> Member {
        let status = format!(
            "Name:\tp{inside}\nState:\tT (stopped)\nPPid:\t{}\nNSpid:\t{}\t{inside}\nNSsid:\t900\t{session}\n",
            parent + 100,
            inside + 100
        );
        Member::of(inside + 100, &status).expect("a process")
    }

    #[test]
    fn who_has_left_its_parent_is_named() {
        let family = [
            member(1, 900, 0),
            member(2, 1, 2),
            member(5, 2, 2),
            member(6, 5, 6),
        ];
        assert_eq!(astray(family.to_vec()), None);
        let daemon = member(8, 1, 7);
        let found = astray([&family[..], std::slice::from_ref(&daemon)].concat());
        assert_eq!(found, Some(daemon.clone()));
        let its_child = member(9, 8, 7);
        assert!(astray([&family[..], &[daemon.clone(), its_child]].concat()).is_some());
        let ended = Member {
            ended: true,
            ..daemon
        };
        assert_eq!(astray([&family[..], &[ended]].concat()), None);
    }

    #[test]
    fn what_is_run_beside_a_program_is_not_missed() {
        let family = [member(1, 900, 0), member(2, 1, 2)];
        let first = first_visitor();
        let visitor = member(first, 900, first);
        let its_child = member(11, first, first);
        let of_a_session_of_its_own = member(12, 11, 12);
        let left_behind = member(13, 1, first);
        let beside = [visitor, its_child, of_a_session_of_its_own, left_behind];
        assert_eq!(astray([&family[..], &beside[..]].concat()), None);
    }

    #[test]
    fn ids_beyond_the_visitors_are_the_programs() {
        let beyond = (first_visitor()..).find(|id| !is_visitor(*id)).expect("an id");
        let family = [member(1, 900, 0), member(2, 1, 2), member(beyond, 2, beyond)];
        assert_eq!(astray(family.to_vec()), None);
        let daemon = member(beyond + 1, 1, beyond);
        let found = astray([&family[..], std::slice::from_ref(&daemon)].concat());
        assert_eq!(found, Some(daemon));
    }
}
