//! What each kind of event means to whoever looks after a VM.
//!
//! **Decides**: the sentence beside an event, and how it is to be taken, as docs/troubleshooting.md has them. **Invariants**: 1. every kind of event is on that page, and told
//! somewhere (a test reads both). **Not here**: the event's own text, which says what happened this time.

use dunlin_api::EventKind;
use serde::Serialize;
use std::sync::LazyLock;
use utoipa::ToSchema;

/// How serious an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tone {
    /// Everything is as it should be.
    Good,
    /// Something happened.
    Plain,
    /// Protection is less than was asked for, or may soon be.
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
pub fn of(kind: &EventKind) -> (Tone, &'static str) {
    let known = MEANINGS.iter().find(|(known, ..)| *known == kind.as_str());
    known.map_or((Tone::Plain, ""), |(_, tone, meaning)| (*tone, meaning))
}

/// Whether the page has that kind.
pub fn is_known(kind: &EventKind) -> bool {
    MEANINGS.iter().any(|(known, ..)| *known == kind.as_str())
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

    #[test]
    fn every_kind_has_a_meaning_and_is_told() {
        let mut text = String::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
        let known: BTreeSet<&str> = MEANINGS.iter().map(|(kind, ..)| *kind).collect();
        let kinds: BTreeSet<&str> = EventKind::ALL.iter().map(EventKind::as_str).collect();
        assert_eq!(known, kinds, "the rows of docs/troubleshooting.md, and the kinds");
        assert_eq!(known.len(), MEANINGS.len(), "a kind has two rows");
        for kind in EventKind::ALL {
            let (_, meaning) = of(kind);
            let told = format!("EventKind::{kind:?}");
            let is_whole = |at: usize| !text[at + told.len()..].starts_with(char::is_alphanumeric);
            assert!(
                text.match_indices(&told).any(|(at, _)| is_whole(at)),
                "nobody tells {kind}"
            );
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
