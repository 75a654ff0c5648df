//! What each kind of event means to whoever looks after a VM.
//!
//! **Decides**: the sentence beside an event, and how it is to be taken. **Invariants**: 1. every kind that the daemon tells is here (a test reads
//! the daemon's sources). **Not here**: the event's own text, which says what happened this time.

use serde::Serialize;
use utoipa::ToSchema;

/// How an event is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tone {
    /// All is as it should be.
    Good,
    /// Something happened.
    Plain,
    /// Protection is less than was asked for, or soon may be.
    Warning,
    /// Somebody has to look at it.
    Bad,
}

use Tone::{Bad, Good, Plain, Warning};

/// Kind, tone, meaning.
const MEANINGS: &[(&str, Tone, &str)] = &[
    (
        "authority-changed",
        Plain,
        "Keys of the new authority count here from now on.",
    ),
    (
        "backup-lost",
        Warning,
        "The VM goes on without a second copy; one is looked for.",
    ),
    (
        "bad-input",
        Warning,
        "Another host said something that was not believed, and nothing was done by it.",
    ),
    (
        "breach",
        Warning,
        "Another host broke the protocol, and nothing was done by what it said.",
    ),
    (
        "cannot-lead",
        Plain,
        "Another host with a complete copy is to serve.",
    ),
    (
        "certificate-expires",
        Warning,
        "Exchange keys before it ends: 'dunlin cluster rotate'.",
    ),
    (
        "certificates-revoked",
        Plain,
        "Whoever shows one of these keys is refused.",
    ),
    (
        "cold-start",
        Warning,
        "All hosts were down: the VM boots from the newest disk.",
    ),
    (
        "deposed",
        Plain,
        "Another host serves; this one has fallen silent, so no two speak.",
    ),
    (
        "disk-error",
        Bad,
        "A disk of this host fails; where there is a backup, it takes over.",
    ),
    (
        "disk-full",
        Bad,
        "The storage of this host is full; where there is a backup, it takes over.",
    ),
    (
        "disks-differ",
        Bad,
        "The hosts' disks are not the same; the primary's is what clients see.",
    ),
    (
        "disks-equal",
        Good,
        "Both hosts' disks were compared, and are the same.",
    ),
    (
        "disks-not-compared",
        Plain,
        "The comparison of the disks was broken off; it is made again by its schedule.",
    ),
    (
        "down",
        Plain,
        "The VM was shut down everywhere, as a person asked.",
    ),
    (
        "down-by-force",
        Warning,
        "The VM was taken away from this host without the others' word.",
    ),
    (
        "dropped",
        Warning,
        "This host's copy is worth nothing any more; a new one is made.",
    ),
    (
        "elected",
        Plain,
        "This host decides for the VM's group from now on.",
    ),
    ("ended-here", Plain, "One copy too many was ended."),
    (
        "ends-here",
        Bad,
        "The VM ends with this host: nobody could take it.",
    ),
    (
        "exec",
        Plain,
        "Somebody runs a command beside a program, in one copy: nothing of it is replicated.",
    ),
    (
        "failed",
        Bad,
        "The VM does not run here; the text says what to mend.",
    ),
    ("fault", Plain, "A test asked for this."),
    ("forgotten", Plain, "Nothing of the VM is left on this host."),
    (
        "guest-panicked",
        Bad,
        "The guest's own kernel has failed; protection does not mend that.",
    ),
    ("guest-reset", Plain, "The guest boots anew, on both hosts."),
    ("guest-shutdown", Plain, "The guest has ended by itself."),
    (
        "handing-over",
        Plain,
        "The VM moves to its backup; clients keep their connections.",
    ),
    ("has-room", Good, "The VM runs on, nothing was lost."),
    ("host-begins", Plain, "This host's daemon was started."),
    ("host-ends", Plain, "This host's daemon was told to end."),
    (
        "join-failed",
        Warning,
        "No second copy was made; it is tried again.",
    ),
    ("joined", Good, "This host has a complete copy, and follows."),
    ("joining", Plain, "A second copy is being made while the VM runs."),
    (
        "keys-renewed",
        Good,
        "The old key of this host is refused from now on.",
    ),
    (
        "left-to-backup",
        Warning,
        "The backup goes on with the VM: its own host cannot.",
    ),
    (
        "link-lost",
        Warning,
        "Two hosts of the group do not hear each other; they connect again by themselves.",
    ),
    (
        "link-refused",
        Warning,
        "A host was not let in; the text says why.",
    ),
    ("link-up", Good, "Two hosts of the group hear each other."),
    ("listens", Good, "The program answers on its port."),
    (
        "load-failed",
        Bad,
        "The copy here is ended, and a new one is made.",
    ),
    (
        "log-disk-failed",
        Bad,
        "The state folder of this host cannot be written; the text says why.",
    ),
    (
        "log-disk-full",
        Bad,
        "Make room in the state folder of this host.",
    ),
    ("log-disk-room", Good, "The state folder has room again."),
    ("log-failed", Bad, "A shared log does not run on this host."),
    (
        "log-full",
        Warning,
        "Inputs wait in the network until a sync makes room.",
    ),
    ("log-leads", Plain, "This host leads a shared log."),
    (
        "log-refused",
        Warning,
        "The log had no room for an entry of its own, which is said again.",
    ),
    ("log-room", Good, "Inputs are taken again."),
    (
        "loop-stands-still",
        Bad,
        "This host's daemon is ended by systemd, and the others take over.",
    ),
    ("majority", Good, "Enough hosts answer again: the VM is served."),
    (
        "mirror-failed",
        Warning,
        "This backup's disk cannot follow; a new copy is made.",
    ),
    (
        "mirror-lost",
        Warning,
        "Disk writes do not reach the backup; it is dropped, and a new copy is made.",
    ),
    (
        "no-majority",
        Bad,
        "Too few hosts answer: the VM is silent until they do, so that no two copies speak.",
    ),
    (
        "no-page",
        Warning,
        "Another program has the page's usual address; 'page' in host.toml names another.",
    ),
    (
        "not-handed-over",
        Warning,
        "The VM ends with this host, or its backup takes over as after a death.",
    ),
    (
        "not-read",
        Plain,
        "The program was slow to read; both copies got their inputs all the same.",
    ),
    (
        "others-lost",
        Bad,
        "This host alone cannot know whether the others are dead; a person can.",
    ),
    ("output-full", Warning, "The VM waits as on a slow network."),
    (
        "overruled",
        Warning,
        "A person decided for the other side; the copy here is given up.",
    ),
    (
        "policy",
        Plain,
        "The VM is replicated in another way from now on.",
    ),
    (
        "powerdown-ignored",
        Plain,
        "The guest did not listen, and was switched off.",
    ),
    (
        "primary-lost",
        Warning,
        "The primary is silent; if it is dead, this host takes over.",
    ),
    (
        "poison-input",
        Bad,
        "Both copies of a program have ended by one input; it is not given to it again, and nobody serves.",
    ),
    ("program-ended", Bad, "The program itself has ended."),
    ("protected", Good, "The VM survives the death of either host."),
    (
        "qemu-died",
        Bad,
        "The VM's QEMU has ended here; a backup takes over.",
    ),
    ("readmitted", Good, "That host counts for the group again."),
    ("removed", Plain, "A person took that host out of the group."),
    ("serves", Good, "Clients are answered from here."),
    (
        "stalled",
        Warning,
        "The session between the copies was ended, so that the VM does not wait; a new copy is made.",
    ),
    (
        "standing-alone",
        Bad,
        "A person decided: this host serves without asking the others.",
    ),
    ("started", Good, "The VM runs."),
    ("state-left", Warning, "Remove the folder that the text names."),
    ("stepped-down", Plain, "A test asked for this."),
    ("take-over-failed", Bad, "The copy here could not go on."),
    (
        "took-over",
        Good,
        "This host serves the VM; clients keep their connections.",
    ),
    (
        "unprotected",
        Warning,
        "If this host dies now, the VM dies with it.",
    ),
    (
        "waiting",
        Warning,
        "The VM is not started before it is known who has the newest disk.",
    ),
    (
        "waits-for-backup",
        Warning,
        "The host ends when the VM is safe elsewhere.",
    ),
    (
        "waits-for-room",
        Bad,
        "The VM stands still: make room on its storage.",
    ),
];

/// Of an event of that kind; what is not known is told without a meaning.
pub fn of(kind: &str) -> (Tone, &'static str) {
    let known = MEANINGS.iter().find(|(known, ..)| *known == kind);
    known.map_or((Plain, ""), |(_, tone, meaning)| (*tone, meaning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn sources(folder: &Path, into: &mut String) {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" {
                sources(&path, into);
            } else if name.ends_with(".rs") && name != "tests.rs" && name != "meaning.rs" {
                let text = std::fs::read_to_string(&path).expect("a source");
                into.push_str(text.split("\nmod tests {").next().unwrap_or_default());
            }
        }
    }

    /// All of the daemon's sources, and the first words in quotes after each call that tells an event, if they look like kinds.
    fn told() -> (String, BTreeSet<String>) {
        let mut text = String::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
        let mut kinds = BTreeSet::new();
        for call in ["self.event(", "events.push(", ".push(\n"] {
            for part in text.split(call).skip(1) {
                let call = part.split(';').next().unwrap_or_default();
                let is_kind = |word: &&str| {
                    !word.is_empty()
                        && word
                            .chars()
                            .all(|letter| letter.is_ascii_lowercase() || letter == '-')
                };
                if matches!(call.find('"'), Some(at) if at < 60) {
                    let words = call.split('"').skip(1).step_by(2).take(2);
                    kinds.extend(words.filter(is_kind).map(str::to_owned));
                }
            }
        }
        // What a group tells of its links and its disk gets its kind in one place.
        let words = text.split("pub fn words(event: GroupEvent").nth(1);
        let words = words
            .and_then(|rest| rest.split("\n}\n").next())
            .expect("vm/group.rs");
        let firsts = words
            .split("(\"")
            .skip(1)
            .filter_map(|part| part.split('"').next());
        kinds.extend(firsts.filter(|word| !word.contains(' ')).map(str::to_owned));
        (text, kinds)
    }

    #[test]
    fn every_kind_that_is_told_has_a_meaning() {
        let known: BTreeSet<String> = MEANINGS.iter().map(|(kind, ..)| (*kind).to_owned()).collect();
        let (text, told) = told();
        assert!(told.len() > 60, "only {}: {told:?}", told.len());
        let missing: Vec<&String> = told.difference(&known).collect();
        assert!(missing.is_empty(), "no meaning for {missing:?}");
        for (kind, _, meaning) in MEANINGS {
            assert!(text.contains(&format!("\"{kind}\"")), "nobody tells {kind}");
            assert!(meaning.ends_with('.') && meaning.len() < 120, "{kind}: {meaning}");
        }
    }
}
