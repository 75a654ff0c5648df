//! Transcripts (`transcripts/*.txt`): what the host that serves sees, and what it makes of it.
//!
//! `30 b` is a look after 30 s, with host b away; `-` for nobody, and words for what else is so; the standby is d, if they do not say that it is b. `! d why` says that host d could not take the part.
//! `UPDATE_TRANSCRIPTS=1` writes the files anew: read the difference
//! before you keep it.

#![expect(
    clippy::disallowed_methods,
    reason = "transcripts are files; the core itself has none"
)]

use super::{Sight, Standby};
use proptest::prelude::*;
use std::fmt::Write as _;
use std::path::PathBuf;

const SECOND_US: u64 = 1_000_000;
const AFTER_US: u64 = 30 * SECOND_US;

fn look(standby: &mut Standby, words: &[&str]) -> String {
    let [seconds, away, more @ ..] = words else {
        panic!("{words:?}: a time and a host")
    };
    let seconds: u64 = seconds.parse().expect("seconds");
    let known = ["protected", "paused", "follows", "standby=b"];
    assert!(more.iter().all(|word| known.contains(word)), "{more:?}");
    let sight = Sight {
        serves: !more.contains(&"follows"),
        lacks_a_copy: !more.contains(&"protected") && !more.contains(&"paused"),
        away: Some(*away).filter(|away| *away != "-"),
        standby: if more.contains(&"standby=b") { "b" } else { "d" },
        after_us: AFTER_US,
    };
    match standby.look(seconds * SECOND_US, &sight) {
        None => "  waits".to_owned(),
        Some(moves) => format!(
            "  asks {} to take the part of {}{}",
            moves.comes,
            moves.leaves,
            if moves.announces { ", and tells people" } else { "" }
        ),
    }
}

fn play(text: &str) -> String {
    let mut standby = Standby::default();
    let mut played = String::new();
    for line in text.lines().filter(|line| !line.starts_with("  ")) {
        let _infallible = writeln!(played, "{line}");
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match &words[..] {
            [] | ["#", ..] => continue,
            ["!", host, why @ ..] => match standby.could_not(host, &why.join(" ")) {
                true => "  tells people why".to_owned(),
                false => "  has told people".to_owned(),
            },
            words => look(&mut standby, words),
        };
        let _infallible = writeln!(played, "{answer}");
    }
    played
}

#[test]
fn transcripts_are_as_written() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/replica/standby/transcripts");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        let written = std::fs::read_to_string(&path).expect("a text");
        let played = play(&written);
        if std::env::var_os("UPDATE_TRANSCRIPTS").is_some() {
            std::fs::write(&path, &played).expect("a file");
        } else {
            assert_eq!(played, written, "{}", path.display());
        }
        count += 1;
    }
    assert_eq!(count, 5, "each of them is read");
}

proptest! {
    /// Whatever it sees, and whoever refuses: no part moves before its host was away for as long as the file says, nor from a host that does
    /// not serve or lacks nothing, and each try has as long to itself.
    #[test]
    fn no_part_moves_too_early(looks in prop::collection::vec(
        (0..20_u64, prop::option::of(0..3_usize), any::<bool>(), any::<bool>()), 1..200,
    )) {
        let hosts = ["b", "c", "e"];
        let mut standby = Standby::default();
        let (mut now_us, mut since_us, mut before) = (0, 0, None);
        for (seconds, away, serves, lacks_a_copy) in looks {
            now_us += seconds * SECOND_US;
            let away = away.map(|at| hosts[at]);
            let sight = Sight { serves, lacks_a_copy, away, standby: "d", after_us: AFTER_US };
            let counts = away.filter(|_| serves && lacks_a_copy);
            if counts.is_none() || counts != before {
                since_us = now_us;
            }
            before = counts;
            let moves = standby.look(now_us, &sight);
            let is_due = counts.is_some() && now_us - since_us >= AFTER_US;
            prop_assert_eq!(moves.is_some(), is_due);
            if let Some(moves) = moves {
                prop_assert_eq!(Some(&moves.leaves[..]), away);
                prop_assert!(moves.comes == "d" || moves.comes == moves.leaves);
                since_us = now_us;
                standby.could_not(&moves.comes, "why");
            }
        }
    }
}
