//! What each kind of event means to whoever looks after a VM.
//!
//! **Decides**: the sentence beside an event, and how it is to be taken, as docs/troubleshooting.md has them. **Invariants**: 1. every kind that the
//! daemon tells is on that page (a test reads the daemon's sources). **Not here**: the event's own text, which says what happened this time.

use serde::Serialize;
use std::sync::LazyLock;
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

/// The page whose table says it: people read the same words there, with what to do.
const PAGE: &str = include_str!("../../../docs/troubleshooting.md");

/// Kind, tone, meaning.
static MEANINGS: LazyLock<Vec<(&str, Tone, &str)>> = LazyLock::new(|| {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `"));
    rows.filter_map(row).collect()
});

/// A row of the table of events: kind, tone, meaning, what to do.
fn row(line: &'static str) -> Option<(&'static str, Tone, &'static str)> {
    let mut cells = line.trim_matches('|').split('|').map(str::trim);
    let kind = cells.next()?.trim_matches('`');
    let tone = match cells.next()? {
        "good" => Tone::Good,
        "plain" => Tone::Plain,
        "warning" => Tone::Warning,
        "bad" => Tone::Bad,
        // Of another table.
        _ => return None,
    };
    Some((kind, tone, cells.next()?))
}

/// Of an event of that kind; what is not known is told without a meaning.
pub fn of(kind: &str) -> (Tone, &'static str) {
    let known = MEANINGS.iter().find(|(known, ..)| *known == kind);
    known.map_or((Tone::Plain, ""), |(_, tone, meaning)| (*tone, meaning))
}

/// Whether the page has that kind.
pub fn is_known(kind: &str) -> bool {
    MEANINGS.iter().any(|(known, ..)| *known == kind)
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
        // What a comparison of disks found gets its kind in one place, too.
        let found = text.split("pub fn event(&self) -> (&'static str, &str)").nth(1);
        let found = found.and_then(|rest| rest.split("\n    }\n").next());
        let kinds_found = found.expect("vm/verification.rs").split("=> (\"").skip(1);
        kinds.extend(
            kinds_found
                .filter_map(|part| part.split('"').next())
                .map(str::to_owned),
        );
        (text, kinds)
    }

    #[test]
    fn every_kind_that_is_told_has_a_meaning() {
        let known: BTreeSet<String> = MEANINGS.iter().map(|(kind, ..)| (*kind).to_owned()).collect();
        let (text, told) = told();
        assert!(told.len() > 60, "only {}: {told:?}", told.len());
        let missing: Vec<&String> = told.difference(&known).collect();
        assert!(
            missing.is_empty(),
            "no row in docs/troubleshooting.md for {missing:?}"
        );
        assert_eq!(known.len(), MEANINGS.len(), "a kind has two rows");
        for (kind, _, meaning) in MEANINGS.iter() {
            assert!(text.contains(&format!("\"{kind}\"")), "nobody tells {kind}");
            assert!(meaning.ends_with('.') && meaning.len() < 120, "{kind}: {meaning}");
            let to_do = PAGE
                .lines()
                .find(|line| line.starts_with(&format!("| `{kind}` |")));
            let to_do = to_do.and_then(|line| line.trim_end_matches(" |").rsplit(" | ").next());
            assert!(
                to_do.is_some_and(|words| words.len() > 7),
                "{kind}: what is to be done?"
            );
        }
    }
}
