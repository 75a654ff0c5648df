//! Transcripts (`transcripts/*.txt`): an event in, effects out. And the tables: what is not in them is refused.
//!
//! A transcript's first line sets a side up. `> ` is an event; what follows is what the machine made of it, in full: its effects, and
//! its state with whom it listens to. `~ 950 ms` lets time pass. `UPDATE_TRANSCRIPTS=1` writes the files anew: read the difference before you keep it.

#![expect(
    clippy::disallowed_methods,
    reason = "transcripts are files; the core itself has none"
)]

mod language;
mod tables;

use super::backup::{self, Backup};
use super::primary::{self, Primary};
use super::table::{STATES, Side, StateRow};
use super::{Awaits, Event, Machine, Source};
use language::{Parse, Render, Words};
use std::fmt::Write as _;
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/replica/sync/transcripts")
}

/// Between two events.
const STEP_US: u64 = 1000;

fn listens(awaits: Option<Awaits>, now_us: u64) -> String {
    let Some(Awaits { from, wait, until_us }) = awaits else {
        return String::new();
    };
    let from = match from {
        Source::Messages => "the other host",
        Source::Words => "its loop",
        Source::Either => "both",
    };
    match wait {
        Some(wait) => {
            let (left_us, bound_us) = (until_us - now_us, wait.bound_us());
            // Anew after each event, but where several waits together have a bound.
            let cut = if left_us < bound_us {
                format!(" for {} ms more", left_us / 1000)
            } else {
                assert_eq!(left_us, bound_us, "longer than its bound");
                String::new()
            };
            format!(": listens to {from}, {}{cut}", wait.name())
        }
        None => format!(": listens to {from}"),
    }
}

/// The state is in the table, with what it listens to.
fn check_state(side: Side, name: &str, awaits: Option<Awaits>) {
    let its = |row: &&StateRow| row.side == side && row.name == name;
    let row = STATES.iter().find(its);
    let row = row.unwrap_or_else(|| panic!("the state '{name}' is not in the table"));
    assert_eq!(row.from, awaits.map(|awaits| awaits.from), "'{name}'");
    let wait = awaits.and_then(|awaits| awaits.wait);
    assert!(
        wait.map_or(row.waits.is_empty(), |wait| row.waits.contains(&wait)),
        "'{name}' waits {wait:?}"
    );
}

fn play<M: Machine>(mut machine: M, side: Side, lines: &[&str]) -> String
where
    Event<M::Word>: Parse,
    M::Effect: Render,
{
    let mut out = String::new();
    let mut now_us = 0;
    for line in lines {
        writeln!(out, "{line}").expect("a string");
        if let Some(passes) = line.strip_prefix("~ ") {
            let ms = passes.strip_suffix(" ms").and_then(|ms| ms.parse::<u64>().ok());
            now_us += 1000 * ms.expect("so many milliseconds");
        }
        let Some(event) = line.strip_prefix("> ") else {
            continue;
        };
        now_us += STEP_US;
        let mut effects = Vec::new();
        machine.step(now_us, Event::parse(event), &mut effects);
        for effect in &effects {
            writeln!(out, "    {}", effect.render()).expect("a string");
        }
        let awaits = machine.awaits();
        check_state(side, machine.state(), awaits);
        writeln!(out, "  {}{}", machine.state(), listens(awaits, now_us)).expect("a string");
    }
    out
}

fn played(text: &str) -> String {
    // What a machine made of it comes from the machine.
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("  ")).collect();
    let head: Vec<&str> = lines
        .iter()
        .copied()
        .take_while(|line| line.starts_with('#') || line.is_empty())
        .collect();
    lines.drain(..head.len());
    let setup = lines.remove(0);
    let words = Words::of(setup);
    let rest = match words.first() {
        "primary" => play(Primary::new(words.primary()), Side::Primary, &lines),
        "backup" => play(Backup::new(words.backup()), Side::Backup, &lines),
        other => panic!("'{other}' is no side"),
    };
    let head: String = head.iter().map(|line| format!("{line}\n")).collect();
    format!("{head}{setup}\n{rest}")
}

#[test]
fn the_transcripts_are_what_the_machines_do() {
    let update = std::env::var_os("UPDATE_TRANSCRIPTS").is_some();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a transcript");
        let played = played(&text);
        if update {
            std::fs::write(&file, &played).expect("written");
        } else {
            assert!(
                played == text,
                "{} is not what happens, which is:\n{played}",
                file.display()
            );
        }
    }
}

/// Every state of the tables is in a transcript, and every message is sent and taken in one.
#[test]
fn the_transcripts_leave_nothing_out() {
    let files = std::fs::read_dir(folder()).expect("a folder");
    let mut of = [String::new(), String::new()];
    for file in files {
        let text = std::fs::read_to_string(file.expect("an entry").path()).expect("a transcript");
        let is_primary = text.lines().any(|line| line.starts_with("primary "));
        of[usize::from(!is_primary)] += &text;
    }
    for row in &STATES {
        let text = &of[usize::from(row.side == Side::Backup)];
        let comes = text
            .lines()
            .filter_map(|line| line.strip_prefix("  "))
            .any(|line| line.split(':').next() == Some(row.name));
        assert!(comes || row.name == "new", "no transcript comes to {row:?}");
    }
    for row in &super::table::MESSAGES {
        if row.due == super::table::At::Loop {
            continue;
        }
        let takes = &of[usize::from(row.from == Side::Primary)];
        let taken = format!("> message {}", row.message);
        assert!(takes.contains(&taken), "no transcript takes {}", row.message);
    }
}

#[test]
#[should_panic(expected = "answers nothing in 'idle'")]
fn an_answer_to_nothing_is_a_programmers_error() {
    let text = std::fs::read_to_string(folder().join("primary-join.txt")).expect("a transcript");
    let mut lines: Vec<&str> = text.lines().filter(|line| line.starts_with("> ")).collect();
    lines.truncate(7);
    lines.push("> resumed");
    let setup = text
        .lines()
        .find(|line| line.starts_with("primary "))
        .expect("a setup");
    play(Primary::new(Words::of(setup).primary()), Side::Primary, &lines);
}

type PrimaryEvent = Event<primary::Word>;
type BackupEvent = Event<backup::Word>;
