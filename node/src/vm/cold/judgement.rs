//! What follows from what the hosts say that they hold: who boots a VM of which no copy is alive.
//!
//! Invariants: 1, 2 and 4 of `cold`.
//!
//! Not here: asking, and obeying a person (`cold`).

use super::Inquest;
use crate::config::VmConfig;
use crate::events::utc;
use crate::vm::run::VmLoop;
use dunlin_api::Standing;
use dunlin_core::agreed::ReplicaSet;
use dunlin_core::units::ReplicaId;

/// What follows from the answers.
pub(super) enum Verdict {
    /// This host boots the VM.
    Boot(String),
    /// It would, if a host that says nothing were dead.
    Silent(String),
    /// It does not: another host's disk is newer.
    Stale(String),
    /// It does not.
    NotHere(String),
}

/// Invariants 1, 2 and 4.
pub(super) fn judge(vm_loop: &VmLoop, inquest: Inquest) -> Verdict {
    let config = &vm_loop.config;
    let name = |id: ReplicaId| config.host_name(id);
    let mine = match inquest.disks {
        Ok(disks) => Standing {
            disks,
            ..vm_loop.standing()
        },
        Err(why) => return Verdict::NotHere(format!("the VM's disk here cannot be read: {why}")),
    };
    let mut standings = vec![(vm_loop.me, mine)];
    let mut silent = Vec::new();
    for (id, said) in inquest.others {
        match said {
            Ok(standing) if standing.alive || standing.led => {
                return Verdict::NotHere(format!(
                    "host '{}' holds a living copy of the VM, or knows who leads",
                    name(id)
                ));
            }
            Ok(standing) => standings.push((id, standing)),
            // A witness has no copy: without its word the others' has to do.
            Err(_) if is_witness(config, id) => {}
            Err(why) => silent.push(format!("host '{}' ({why})", name(id))),
        }
    }
    let word = newest_word(&standings);
    let complete = word.as_ref().map_or(ReplicaSet::default(), |word| word.complete);
    let able: Vec<_> = standings
        .iter()
        .filter(|(id, _)| !is_witness(config, *id))
        .cloned()
        .collect();
    let best = best(&able, complete);
    if let Some(word) = word.filter(|word| !word.complete.is_empty() && !word.complete.contains(vm_loop.me)) {
        let there = able.iter().find(|(id, _)| word.complete.contains(*id));
        return Verdict::Stale(match there {
            Some((id, standing)) => elsewhere(name(*id), &config.name, standing.recovering),
            None => word.tell(config),
        });
    }
    if best != vm_loop.me {
        let waits = able
            .iter()
            .any(|(id, standing)| *id == best && standing.recovering);
        return Verdict::Stale(elsewhere(name(best), &config.name, waits));
    }
    if standings[0].1.disks.iter().any(|disk| !disk.consistent) {
        return Verdict::NotHere("the VM's disk here is an unfinished copy".into());
    }
    if silent.is_empty() {
        Verdict::Boot(format!(
            "no host holds a living copy of the VM; it boots here, from the newest disk ({}); what was only in its memory is \
             gone",
            describe(&standings[0].1)
        ))
    } else {
        Verdict::Silent(format!(
            "no copy of the VM is alive here, and {} may hold one; if it is dead for good, 'dunlin promote --force \
             --from-disk {}' boots the VM from this host's disk ({})",
            silent.join(", "),
            config.name,
            describe(&standings[0].1)
        ))
    }
}

fn is_witness(config: &VmConfig, id: ReplicaId) -> bool {
    config
        .group
        .iter()
        .any(|host| host.member.id == id && host.member.witness)
}

/// Another host has the newest disk. It boots the VM by itself, unless it has forgotten what was agreed.
fn elsewhere(host: &str, vm: &str, waits: bool) -> String {
    let then = if waits {
        format!(
            "but does not know any more what was agreed (durability = \"memory\"), so it waits too: if no copy of the VM is alive \
             anywhere, 'dunlin promote --force --from-disk {vm}' said on host '{host}' boots it there"
        )
    } else {
        "and boots it".to_owned()
    };
    format!("no copy of the VM is alive here; host '{host}' has the newest disk, {then}")
}

/// What a host's log or note says of who was complete.
struct Word {
    /// Term and index.
    at: (u64, u64),
    complete: ReplicaSet,
    /// By the clock of who noted it.
    since_ms: Option<u64>,
    by: ReplicaId,
}

impl Word {
    /// Invariant 4, for a person.
    fn tell(&self, config: &VmConfig) -> String {
        let members = config
            .group
            .iter()
            .filter(|host| self.complete.contains(host.member.id));
        let names: Vec<String> = members.map(|host| format!("'{}'", host.name)).collect();
        let since = self
            .since_ms
            .map_or(String::new(), |since_ms| format!(" since {}", utc(since_ms)));
        format!(
            "host '{}' knows that host {} went on without this one{since}: the disk here lacks what clients were told since \
             then. Start host {}: it has the newest disk",
            config.host_name(self.by),
            names.join(" and "),
            names.join(" or "),
        )
    }
}

/// Who was complete, by the newest log or note.
fn newest_word(standings: &[(ReplicaId, Standing)]) -> Option<Word> {
    let logs = standings.iter().map(|(by, standing)| Word {
        at: standing.last,
        complete: ReplicaSet(standing.complete),
        since_ms: None,
        by: *by,
    });
    let notes = || {
        standings.iter().filter_map(|(by, standing)| {
            standing.noted.map(|note| Word {
                at: note.at,
                complete: ReplicaSet(note.complete),
                since_ms: Some(note.since_ms),
                by: *by,
            })
        })
    };
    let newest = logs.chain(notes()).max_by_key(|word| word.at)?;
    let since_ms = notes()
        .filter(|note| note.complete == newest.complete)
        .max_by_key(|note| note.at)
        .and_then(|note| note.since_ms);
    Some(Word { since_ms, ..newest })
}

/// The host to boot: in the complete set, then the newest consistent disks, then the first in the VM's list.
fn best(standings: &[(ReplicaId, Standing)], complete: ReplicaSet) -> ReplicaId {
    let rank = |(id, standing): &&(ReplicaId, Standing)| {
        (
            complete.contains(*id),
            standing.disks.clone(),
            std::cmp::Reverse(id.0),
        )
    };
    standings
        .iter()
        .max_by_key(rank)
        .map_or(ReplicaId(0), |(id, _)| *id)
}

fn describe(standing: &Standing) -> String {
    match standing.disks.first() {
        Some(disk) => format!(
            "term {}, {}",
            disk.term,
            if disk.primary {
                "as primary".to_owned()
            } else {
                format!("as backup up to epoch {}", disk.epoch)
            }
        ),
        None => "it has none: it boots as at first".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::DiskStanding;
    use dunlin_api::Note;

    fn standing(id: u8, last: (u64, u64), complete: u64, disk: DiskStanding) -> (ReplicaId, Standing) {
        let standing = Standing {
            last,
            complete,
            disks: vec![disk],
            ..Standing::default()
        };
        (ReplicaId(id), standing)
    }

    fn disk(consistent: bool, term: u64, primary: bool, epoch: u64) -> DiskStanding {
        DiskStanding {
            consistent,
            term,
            primary,
            epoch,
        }
    }

    fn chosen(standings: &[(ReplicaId, Standing)]) -> u8 {
        best(standings, newest_word(standings).expect("a log").complete).0
    }

    #[test]
    fn a_note_counts_where_the_log_is_lost_and_says_since_when() {
        // All were killed, and their logs were in memory: host 0 is a backup that had been dropped, host 2 the witness.
        let note = |at, complete, since_ms| {
            Some(Note {
                at,
                complete,
                since_ms,
            })
        };
        let mut backup = standing(0, (0, 0), 0, disk(true, 3, false, 40));
        backup.1.noted = note((3, 50), 0b11, 1000);
        let mut witness = standing(2, (0, 0), 0, disk(true, 0, false, 0));
        witness.1.noted = note((3, 90), 0b10, 2000);
        let word = newest_word(&[backup, witness]).expect("a note");
        assert_eq!((word.complete.0, word.since_ms, word.by.0), (0b10, Some(2000), 2));
        // A log that goes on after the note says the same, and the note says since when.
        let mut witness = standing(2, (4, 300), 0b10, disk(true, 0, false, 0));
        witness.1.noted = note((3, 90), 0b10, 2000);
        let word = newest_word(&[witness]).expect("a log");
        assert_eq!((word.at, word.since_ms), ((4, 300), Some(2000)));
    }

    #[test]
    fn who_waits_for_a_person_is_not_said_to_boot() {
        assert!(elsewhere("a", "shop", false).ends_with("has the newest disk, and boots it"));
        let waits = elsewhere("a", "shop", true);
        assert!(!waits.contains("and boots it") && waits.contains("--from-disk shop' said on host 'a'"));
    }

    #[test]
    fn the_primarys_disk_is_newer_than_its_backups() {
        let primary = standing(1, (3, 90), 0b11, disk(true, 3, true, 0));
        let backup = standing(0, (3, 90), 0b11, disk(true, 3, false, 40));
        assert_eq!(chosen(&[backup.clone(), primary.clone()]), 1);
        assert_eq!(chosen(&[primary, backup]), 1, "whoever asks");
    }

    #[test]
    fn a_host_that_was_dropped_does_not_boot_though_it_does_not_know_it() {
        // Host 0 died first; host 1 went on alone and said so, which host 0 never heard.
        let old = standing(0, (3, 90), 0b11, disk(true, 3, true, 0));
        let new = standing(1, (4, 120), 0b10, disk(true, 4, true, 0));
        assert_eq!(chosen(&[old, new]), 1);
    }

    #[test]
    fn an_unfinished_copy_is_not_chosen_and_without_disks_the_first_host_is() {
        let half = standing(0, (5, 10), 0b11, disk(false, 9, false, 9));
        let whole = standing(1, (5, 10), 0b11, disk(true, 5, true, 0));
        assert_eq!(chosen(&[half, whole]), 1);
        let bare = |id| {
            let (id, standing) = standing(id, (5, 10), 0b11, disk(true, 0, false, 0));
            (
                id,
                Standing {
                    disks: Vec::new(),
                    ..standing
                },
            )
        };
        assert_eq!(chosen(&[bare(1), bare(0)]), 0);
    }
}
