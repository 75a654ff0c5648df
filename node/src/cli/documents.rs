//! What the documentation says of the command line, checked against the sources: every error has an entry in docs/troubleshooting.md, and
//! every command that is shown exists.

use super::Arguments;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const TROUBLE: &str = include_str!("../../../docs/troubleshooting.md");
/// What a message begins with in the sources: the types' own words, answers of a daemon, bad input.
const SAID: [&str; 6] = [
    "#[error(",
    "Answer::failed(",
    "Answer::refused(",
    "BadInput(",
    "bail!(",
    "senseless(",
];
const ROOMS: [&str; 6] = ["node", "guest", "fabric", "program", "core", "speculation"];
/// A message with fewer letters of its own hands on another one.
const LETTERS: usize = 12;
/// A message stands soon after its marker, or it is made elsewhere.
const NEAR: usize = 40;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "documents.rs" {
            found.push(path);
        }
    }
}

/// The literal that `text` begins with, behind its quotation mark, as a person reads it; `…` for what differs.
fn literal(text: &str) -> String {
    let (mut words, mut letters) = (String::new(), text.chars().peekable());
    let mut inside = false;
    while let Some(letter) = letters.next() {
        match letter {
            '"' => break,
            '\\' => match letters.next() {
                Some('\n') => while letters.next_if(|next| next.is_whitespace()).is_some() {},
                Some(other) => words.push(other),
                None => break,
            },
            '{' if letters.next_if_eq(&'{').is_some() => words.push('{'),
            '{' => {
                inside = true;
                words.push('…');
            }
            '}' if !inside => {
                letters.next_if_eq(&'}');
                words.push('}');
            }
            '}' => inside = false,
            _ if inside => {}
            other => words.push(other),
        }
    }
    words
}

/// Every message of the sources, and where it is.
fn messages() -> BTreeMap<String, PathBuf> {
    let mut files = Vec::new();
    for room in ROOMS {
        sources(&root().join(room).join("src"), &mut files);
    }
    let mut found = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a source");
        let text = text.split("\n#[cfg(test)]").next().unwrap_or_default();
        for part in SAID.iter().flat_map(|said| text.split(said).skip(1)) {
            let Some((before, rest)) = part.split_once('"') else {
                continue;
            };
            // Another call or statement lies between.
            if before.len() > NEAR || before.contains(';') || before.replace("()", "").contains(')') {
                continue;
            }
            let message = literal(rest);
            if message.chars().filter(|letter| letter.is_alphabetic()).count() >= LETTERS {
                found.insert(message, file.clone());
            }
        }
    }
    found
}

/// What stands in backticks in the first cells of the tables of messages.
fn entries() -> Vec<&'static str> {
    let tables = TROUBLE.split("\n## Events\n").nth(1).expect("the events");
    let tables = tables.split_once("\n## ").expect("messages after the events").1;
    let rows = tables.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| {
        assert_eq!(row.matches(" | ").count(), 2, "three cells: {row}");
        row.split(" | ")
            .next()
            .unwrap_or_default()
            .split('`')
            .skip(1)
            .step_by(2)
    })
    .collect()
}

/// The entry's words are in the message, in their order, with anything where it has `…`.
fn fits(entry: &str, message: &str) -> bool {
    let mut rest = message;
    entry
        .split('…')
        .map(str::trim)
        .all(|piece| match rest.split_once(piece) {
            Some((_, behind)) => {
                rest = behind;
                true
            }
            None => false,
        })
}

#[test]
fn every_error_has_an_entry_in_troubleshooting_and_no_entry_is_left_over() {
    let (messages, entries) = (messages(), entries());
    assert!(messages.len() > 180, "only {} messages are found", messages.len());
    let missing: Vec<_> = messages
        .iter()
        .filter(|(message, _)| !entries.iter().any(|entry| fits(entry, message)))
        .collect();
    assert!(
        missing.is_empty(),
        "no entry in docs/troubleshooting.md for {missing:#?}"
    );
    for entry in &entries {
        assert!(entry.len() > 7, "'{entry}' fits too much");
        assert!(
            messages.keys().any(|message| fits(entry, message)),
            "nothing says '{entry}'"
        );
    }
}

#[test]
fn every_page_is_once_in_the_table_of_contents() {
    let contents = include_str!("../../../docs/SUMMARY.md");
    let links = contents
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    let mut listed: Vec<&str> = links.collect();
    listed.push("SUMMARY.md");
    listed.sort_unstable();
    let pages = std::fs::read_dir(root().join("docs")).expect("docs");
    let names = pages.map(|entry| {
        entry
            .expect("an entry")
            .file_name()
            .to_string_lossy()
            .into_owned()
    });
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".md")).collect();
    names.sort_unstable();
    assert_eq!(listed, names);
}

/// A line's words as a shell has them: what is quoted is one.
fn split(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for letter in line.chars() {
        match (letter, quote) {
            ('\'' | '"', None) => quote = Some(letter),
            (letter, Some(open)) if letter == open => quote = None,
            (letter, None) if letter.is_whitespace() => words.push(std::mem::take(&mut word)),
            (letter, _) => word.push(letter),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

/// The words of a shell's line, without its comment, up to what another program gets; nothing if it is no command of ours.
fn words(line: &str) -> Option<Vec<String>> {
    let line = line.trim().trim_start_matches("$ ").trim_start_matches("sudo ");
    let line = line.split(" #").next().unwrap_or_default();
    let ends = |word: &String| matches!(word.as_str(), "|" | "&&" | ">" | ";" | "||" | "&");
    let words: Vec<String> = split(line).into_iter().take_while(|word| !ends(word)).collect();
    let drawn = words.iter().any(|word| word == "──");
    (words.first().is_some_and(|word| word == "dunlin") && words.len() > 1 && !drawn).then_some(words)
}

/// Why there is no such command. `whole`: it is to be typed as it stands, and no mere name of a command.
fn wrong(words: &[String], whole: bool) -> Option<String> {
    // An author left the rest out.
    let cut = words
        .iter()
        .position(|word| word.contains("...") || word.contains('…'));
    let shown = &words[..cut.unwrap_or(words.len())];
    let error = Arguments::try_parse_from(shown).err()?;
    let fine = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            !whole || cut.is_some()
        }
        // The value itself was left out.
        ErrorKind::InvalidValue => cut.is_some() && error.to_string().contains("none was supplied"),
        _ => false,
    };
    (!fine).then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

#[test]
fn every_command_that_the_documentation_shows_exists() {
    let mut pages = vec![root().join("README.md")];
    for entry in std::fs::read_dir(root().join("docs")).expect("docs") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    let (mut seen, mut problems) = (0, Vec::new());
    for page in pages {
        // A line that goes on in the next one is one.
        let text = std::fs::read_to_string(&page)
            .expect("a page")
            .replace("\\\n", " ");
        let mut in_code = false;
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
                continue;
            }
            let shown: Vec<&str> = match in_code {
                true => vec![line],
                false => line.split('`').skip(1).step_by(2).collect(),
            };
            for words in shown.into_iter().filter_map(words) {
                seen += 1;
                let why = wrong(&words, in_code);
                problems.extend(why.map(|why| format!("{}: {}: {why}", page.display(), words.join(" "))));
            }
        }
    }
    assert!(seen > 150, "only {seen} commands are found");
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Every command that can be said, as a person says it; none that only has others below it.
fn commands(of: &clap::Command, before: &str, found: &mut Vec<String>) {
    for command in of.get_subcommands() {
        let name = format!("{before}{}", command.get_name());
        match command.has_subcommands() {
            true => commands(command, &format!("{name} "), found),
            false => found.push(name),
        }
    }
}

#[test]
fn every_command_has_its_addresses_which_are_the_document_s_or_says_why_it_has_none() {
    let page = include_str!("../../../docs/api.md");
    let section = page.split("\n## Commands\n").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let document = serde_json::to_value(crate::web::document()).expect("JSON");
    let quoted =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let (mut told, mut addresses) = (Vec::new(), std::collections::BTreeSet::new());
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let (names, asks) = row.trim_matches('|').split_once(" | ").expect("two cells");
        let here: Vec<String> = quoted(names);
        let has_none = asks.contains("none: ") || asks.contains("the control socket: ");
        let asked: Vec<String> = quoted(asks)
            .into_iter()
            .filter(|word| word.contains('/'))
            .collect();
        assert!(has_none == asked.is_empty(), "{row}");
        for address in asked {
            let (method, path) = address.split_once(' ').expect("a method and a path");
            let known = &document["paths"][path][method.to_lowercase()];
            assert!(known.is_object(), "{row}: {address} is not in the document");
            addresses.insert(address);
        }
        told.extend(here);
    }
    let mut all = Vec::new();
    commands(&Arguments::command(), "", &mut all);
    assert!(all.len() > 30, "{all:?}");
    all.sort_unstable();
    told.sort_unstable();
    assert_eq!(told, all, "told once, or once in the table of docs/api.md");
    // And every request that a command makes has one of these.
    for request in crate::control::address::examples() {
        let address = crate::control::address::Address::of(&request).expect("an address");
        let name = format!("{} {}", address.method, address.template);
        assert!(addresses.contains(&name), "{name} is no command's");
    }
}

#[test]
fn a_command_that_is_not_there_and_a_message_without_an_entry_are_found() {
    let none = |line: &str, whole| wrong(&words(line).expect("a command"), whole).is_some();
    assert!(none("dunlin statsu", false) && none("dunlin status --jason", false));
    assert!(none("sudo dunlin down  # which?", true) && !none("dunlin down", false));
    assert!(
        !none("dunlin down shop | cat", true) && !none("dunlin init mine --cluster mine --host ...", true)
    );
    assert_eq!(words("dunlin-scheduler --help"), None);
    assert_eq!(split("a 'b  c' \"d\""), ["a", "b  c", "d"]);
    let source = "the disk {disk:?} of \\\n     'x' is {{odd}}\" more";
    assert_eq!(literal(source), "the disk … of 'x' is {odd}");
    assert!(fits("disk … is", "the disk … of 'x' is {odd}") && !fits("is … disk", "the disk … is odd"));
}
