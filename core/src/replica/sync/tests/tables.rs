//! The tables are the page's, and the machines'.

use crate::replica::sync::Source;
use crate::replica::sync::table::{At, MESSAGES, Row, STATES, Side, StateRow};
use crate::waits::Wait;

const PAGE: &str = include_str!("../../../../../docs/replica.md");

fn side(side: Side) -> &'static str {
    match side {
        Side::Primary => "primary",
        Side::Backup => "backup",
    }
}

fn at(at: At) -> String {
    match at {
        At::States(states) => {
            let names: Vec<String> = states.iter().map(|state| format!("`{state}`")).collect();
            names.join(", ")
        }
        At::Any => "any that listens".to_owned(),
        At::Loop => "any: the VM loops speak".to_owned(),
    }
}

fn message(row: &Row) -> String {
    let Row {
        message,
        from,
        sent,
        due,
        says,
    } = row;
    format!(
        "| `{message}` | {} | {} | {} | {says} |",
        side(*from),
        at(*sent),
        at(*due)
    )
}

fn state(row: &StateRow) -> String {
    let from = match row.from {
        None => "-",
        Some(Source::Messages) => "the other host",
        Some(Source::Words) => "its loop",
        Some(Source::Either) => "both",
    };
    let waits: Vec<String> = row
        .waits
        .iter()
        .map(|wait: &Wait| format!("`{}`", wait.name()))
        .collect();
    let comma = if waits.is_empty() { "" } else { ", " };
    format!(
        "| {} | `{}` | {from}{comma}{} | {} |",
        side(row.side),
        row.name,
        waits.join(" or "),
        row.what
    )
}

#[test]
fn the_tables_for_people_are_the_codes() {
    let rows: Vec<&str> = PAGE
        .lines()
        .filter(|line| {
            line.starts_with("| `") || line.starts_with("| primary") || line.starts_with("| backup")
        })
        .collect();
    let expected: Vec<String> = MESSAGES
        .iter()
        .map(message)
        .chain(STATES.iter().map(state))
        .collect();
    assert_eq!(
        rows,
        expected,
        "docs/replica.md should say:\n{}\n",
        expected.join("\n")
    );
}

#[test]
fn every_state_of_the_messages_is_one() {
    for row in &MESSAGES {
        let other = match row.from {
            Side::Primary => Side::Backup,
            Side::Backup => Side::Primary,
        };
        for (side, at) in [(row.from, row.sent), (other, row.due)] {
            let At::States(states) = at else { continue };
            for name in states {
                let its = |known: &StateRow| known.side == side && known.name == *name;
                assert!(STATES.iter().any(its), "{}: '{name}'", row.message);
            }
        }
    }
}
