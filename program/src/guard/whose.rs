//! As whom CRIU looks at a program where this daemon has no CAP_SYS_RESOURCE: a kernel tells a process' limits only to who has that, or is of
//! the process' own user and group.
//!
//! Decides:    whose CRIU is to be: the program's, where all of its processes are of one user and group.
//! Flow:       the processes' ids -> `Door::whose` -> CRIU's *real* ids become these, when it is let in; its effective ones stay root's.
//! Invariants: 1. nobody gets a right by it: the program stands still meanwhile, and CRIU keeps all of root's.
//! Source:     prlimit(2), credentials(7), proc(5). Not here: how it is made so (`inside::injected`).

use super::memory::inside;
use super::{GuardError, Place};
use crate::inside::injected::Whose;
use crate::inside::is_visitor;
use crate::proc::text;

/// The program's first process; the one before it is Dunlin's.
const FIRST: u32 = 2;
const SYS_RESOURCE: u64 = 1 << 24;

impl Place {
    /// None where CRIU may ask as it is, or nothing would help.
    pub(super) fn whose(&self) -> Result<Option<Whose>, GuardError> {
        let own = text("/proc/self/status").unwrap_or_default();
        if may_ask_all(&own) {
            return Ok(None);
        }
        let processes = self.all_processes()?.into_iter();
        // One that ends meanwhile is nobody's.
        let about = processes.filter_map(|process| text(process.join("status")).ok());
        let about: Vec<String> = about.collect();
        Ok(of_all(about.iter().map(String::as_str)))
    }
}

fn may_ask_all(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    effective.is_some_and(|bits| bits & SYS_RESOURCE != 0)
}

/// Whose all of the program's processes are.
fn of_all<'a>(statuses: impl Iterator<Item = &'a str>) -> Option<Whose> {
    let is_its = |status: &&str| inside(status).is_some_and(|number| number >= FIRST && !is_visitor(number));
    let mut all = statuses.filter(is_its).map(of);
    let first = all.next()??;
    all.all(|other| other == Some(first)).then_some(first)
}

/// None where it has several itself: a kernel asks for each of them.
fn of(status: &str) -> Option<Whose> {
    let id = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        // The real one, the effective one, the one it may take; the fourth, which files see, does not count.
        let mut ids = line.split_ascii_whitespace().take(3);
        let first = ids.next()?;
        ids.all(|other| other == first).then(|| first.parse().ok())?
    };
    Some(Whose {
        user: id("Uid:")?,
        group: id("Gid:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inside::first_visitor;

    fn status(inside: u32, user: &str, group: u32) -> String {
        format!(
            "Name:\tpostgres\nUid:\t{user}\nGid:\t{group}\t{group}\t{group}\t{group}\nNSpid:\t4711\t{inside}\n"
        )
    }

    fn whose(statuses: &[String]) -> Option<(u32, u32)> {
        of_all(statuses.iter().map(String::as_str)).map(|whose| (whose.user, whose.group))
    }

    #[test]
    fn a_program_of_one_user_is_that_ones() {
        let own = [status(2, "26\t26\t26\t26", 27), status(9, "26\t26\t26\t0", 27)];
        assert_eq!(whose(&own), Some((26, 27)));
        let keeper = status(1, "0\t0\t0\t0", 0);
        let visitor = status(first_visitor(), "0\t0\t0\t0", 0);
        let with_others = [&own[..], &[keeper, visitor]].concat();
        assert_eq!(whose(&with_others), Some((26, 27)), "Dunlin's own do not count");
    }

    #[test]
    fn a_program_of_several_is_nobodys() {
        let own = status(2, "26\t26\t26\t26", 27);
        for other in [
            status(3, "0\t0\t0\t0", 27),
            status(3, "26\t26\t26\t26", 28),
            status(3, "26\t26\t0\t26", 27),
        ] {
            assert_eq!(whose(&[own.clone(), other.clone()]), None, "{other}");
        }
        assert_eq!(whose(&[]), None);
        assert_eq!(whose(&["NSpid:\t4711\t2\n".to_owned()]), None);
    }

    #[test]
    fn a_daemon_with_the_right_may_ask_all() {
        assert!(may_ask_all("CapEff:\t000001ffffffffff\n"));
        assert!(!may_ask_all("CapEff:\t000001fffeffffff\n"));
        assert!(!may_ask_all("Name:\tdunlin\n"));
    }
}
