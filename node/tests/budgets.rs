//! Walks docs/budgets.md: every queue of the daemon has a limit that is the code's, a metric and a test that fills it, and none is left
//! out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A row of the table: queue, made in, limit, when it is full, metric, test.
struct Row {
    queue: String,
    cells: Vec<String>,
}

const MADE_IN: usize = 0;
const LIMIT: usize = 1;
const METRIC: usize = 3;
const TEST: usize = 4;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn rows() -> Vec<Row> {
    let page = read("docs/budgets.md");
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| queue |"));
    rows.map(|line| {
        let cells = line.trim_matches('|').split(" | ");
        let mut cells: Vec<String> = cells.map(|cell| cell.trim().to_owned()).collect();
        assert_eq!(cells.len(), 6, "not six cells: {line}");
        Row {
            queue: cells.remove(0),
            cells,
        }
    })
    .collect()
}

/// What stands in backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Sources of the daemon, without their tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a source folder") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() && name != "tests" && name != "conformance" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// `8` and `MiB` as a number of bytes, entries or microseconds.
fn amount(number: &str, unit: &str) -> Option<u64> {
    let number: u64 = number.replace(',', "").parse().ok()?;
    let scale = match unit {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "ms" => 1000,
        "s" => 1_000_000,
        _ => return None,
    };
    Some(number * scale)
}

/// The limits of a cell that it gives a number for: `` `NAME` (8 MiB)`` or ``10,000 `NAME` ``.
fn told_limits(cell: &str) -> Vec<(&str, u64)> {
    let parts: Vec<&str> = cell.split('`').collect();
    let mut told = Vec::new();
    for at in (1..parts.len()).step_by(2) {
        let (before, after) = (parts[at - 1], parts.get(at + 1).copied().unwrap_or_default());
        let behind = after.strip_prefix(" (").and_then(|after| {
            let (inside, _) = after.split_once(')')?;
            let (number, unit) = inside.split_once(' ').unwrap_or((inside, ""));
            amount(number, unit)
        });
        let ahead = before
            .strip_suffix(' ')
            .and_then(|before| amount(before.rsplit(' ').next()?, ""));
        told.extend(behind.or(ahead).map(|amount| (parts[at], amount)));
    }
    told
}

/// What a constant, or a field where it gets its usual value, is worth in the source: a product, a shift, another constant, or a time.
/// The shapes of files have usual values in a list (`name, is_name: usize = 256;`).
fn worth(name: &str, code: &str, depth: u32) -> Option<u64> {
    let constant = format!("const {name}: ");
    let field = format!("{name}: ");
    let usual = format!("{name}, is_{name}: ");
    code.lines().map(str::trim).find_map(|line| {
        let line = line.trim_start_matches("pub(super) ").trim_start_matches("pub ");
        let value = match line.strip_prefix(&constant).or_else(|| line.strip_prefix(&usual)) {
            Some(rest) => rest.split_once(" = ")?.1,
            None => line.strip_prefix(&field)?,
        };
        let value = value.trim_end_matches(';').trim_end_matches(',');
        value_of(value, code, depth)
    })
}

fn value_of(value: &str, code: &str, depth: u32) -> Option<u64> {
    let value = value.trim();
    if let Some((number, shift)) = value.split_once(" << ") {
        return Some(value_of(number, code, depth)? << value_of(shift, code, depth)?);
    }
    if let Some((one, other)) = value.split_once(" * ") {
        return Some(value_of(one, code, depth)? * value_of(other, code, depth)?);
    }
    let time = |unit| {
        let number = value.strip_prefix(unit)?.strip_prefix('(')?.strip_suffix(')')?;
        number.replace('_', "").parse::<u64>().ok()
    };
    if let Some(seconds) = time("Duration::from_secs") {
        return Some(seconds * 1_000_000);
    }
    if let Some(ms) = time("Duration::from_millis") {
        return Some(ms * 1000);
    }
    let is_name = !value.is_empty() && value.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    match value.replace('_', "").parse() {
        Ok(number) => Some(number),
        Err(_) if is_name && depth > 0 => worth(value, code, depth - 1),
        Err(_) => None,
    }
}

#[test]
fn every_number_of_the_page_is_the_sources() {
    let mut compared = 0;
    // Where a VM's file has a limit's usual value.
    let config = read("api/src/files/vm.rs");
    for Row { queue, cells } in rows() {
        let code: String = quoted(&cells[MADE_IN]).iter().map(|path| read(path)).collect();
        for (name, told) in told_limits(&cells[LIMIT]) {
            let found = worth(name, &code, 3).or_else(|| worth(name, &config, 3));
            assert_eq!(found, Some(told), "{queue}: {name}");
            compared += 1;
        }
    }
    assert!(compared > 60, "only {compared} numbers were compared");
}

#[test]
fn a_number_that_is_not_the_sources_is_seen() {
    let code = "    pub(super) const KEPT_BYTES: usize = 16 << 10;\nconst LINES: usize = 2 * KEPT;\nconst KEPT: usize = 10_000;\n\
                \x20   wait: Duration::from_millis(300),\n    first: u64,\n    first: 256 * 1024,\n";
    for (cell, right) in [
        ("`KEPT_BYTES` (16 KiB) each", true),
        ("`KEPT_BYTES` (16 MiB) each", false),
        ("20,000 `LINES`", true),
        ("20,001 `LINES`", false),
        ("`wait` (300 ms)", true),
        ("`wait` (3 s)", false),
        ("`first` (256 KiB)", true),
        ("`unknown` (1)", false),
    ] {
        let told = told_limits(cell);
        let [(name, told)] = told[..] else {
            panic!("{cell}: {told:?}")
        };
        assert_eq!(worth(name, code, 3) == Some(told), right, "{cell}");
    }
}

#[test]
fn every_row_names_where_it_is_made_its_limit_its_metric_and_its_test() {
    let rows = rows();
    assert!(rows.len() > 30, "the table is cut short: {} rows", rows.len());
    let metrics = read("node/src/metrics.rs") + &read("node/src/metrics/figures.rs");
    let queues = read("node/src/vm/queues.rs");
    let config = read("api/src/files/vm.rs");
    let mut scenarios = vec![root().join("xtask/src/scenarios.rs")];
    sources(&root().join("xtask/src/scenarios"), &mut scenarios);
    sources(&root().join("vmtest/src/scenario"), &mut scenarios);
    let files = fs::read_dir(root().join("vmtest/scenarios")).expect("the scenarios");
    scenarios.extend(files.map(|file| file.expect("a file").path()));
    let played: String = scenarios
        .iter()
        .map(|path| fs::read_to_string(path).expect("a source file"))
        .collect();
    for Row { queue, cells } in &rows {
        let made_in = quoted(&cells[MADE_IN]);
        assert!(!made_in.is_empty(), "{queue}: made nowhere");
        let code: String = made_in.iter().map(|path| read(path)).collect();
        let limits = quoted(&cells[LIMIT]);
        assert!(!limits.is_empty(), "{queue}: no limit");
        for limit in limits {
            let known = code.contains(limit) || config.contains(limit);
            assert!(known, "{queue}: its limit {limit} is not in its source");
        }
        let named = quoted(&cells[METRIC]);
        let none = cells[METRIC].starts_with("none: ");
        assert!(!named.is_empty() || none, "{queue}: no metric");
        for metric in named.iter().filter(|_| !none) {
            let (name, label) = metric.split_once('{').unwrap_or((metric, ""));
            assert!(
                metrics.contains(&format!("\"{name}\"")),
                "{queue}: no metric {name}"
            );
            if let Some(label) = label.strip_prefix("queue=") {
                let label = label.trim_end_matches('}');
                assert!(queues.contains(label), "{queue}: no queue {label}");
            }
        }
        tested(queue, &cells[TEST], &played);
    }
}

/// Each test that a row names is one: a function that the test runner calls, or a scenario.
/// `played` is the source of every scenario.
fn tested(queue: &str, cell: &str, played: &str) {
    let tests = quoted(cell);
    assert!(!tests.is_empty(), "{queue}: no test fills it");
    for test in tests {
        let Some((path, name)) = test.split_once(": ") else {
            let is_played = played.contains(&format!("\"{test}\""));
            assert!(is_played, "{queue}: no scenario '{test}'");
            continue;
        };
        let text = read(path);
        let at = text
            .find(&format!("fn {name}("))
            .unwrap_or_else(|| panic!("{queue}: no test {name} in {path}"));
        let is_test = text[..at].trim_end().ends_with("#[test]");
        assert!(is_test, "{queue}: {name} in {path} is not a test");
    }
}

/// `10 s` as the source has it.
fn in_source(bound: &str) -> String {
    match bound.split_once(' ') {
        Some((number, "s")) => format!("Duration::from_secs({number})"),
        Some((number, "ms")) => format!("Duration::from_millis({number})"),
        _ => panic!("no bound: {bound}"),
    }
}

#[test]
fn every_wait_of_the_page_is_in_its_table_with_its_bound() {
    let page = read("docs/waits.md");
    let section = page.split("\n## The page's own\n").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let told: BTreeSet<(String, String, String)> = section
        .lines()
        .filter(|line| line.contains(" | `node/"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            assert_eq!(cells.len(), 4, "{line}");
            let name = |cell: &str| cell.trim_matches('`').to_owned();
            (name(cells[1]), name(cells[2]), in_source(cells[0]))
        })
        .collect();
    let mut files = vec![root().join("node/src/web.rs")];
    sources(&root().join("node/src/web"), &mut files);
    sources(&root().join("node/src/metrics"), &mut files);
    let mut made = BTreeSet::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        let name = path
            .strip_prefix(root())
            .expect("under the root")
            .display()
            .to_string();
        let code = text.split("\nmod tests {").next().unwrap_or_default();
        for line in code.lines() {
            let constant = line.trim_start_matches("pub ").strip_prefix("const ");
            if let Some((wait, bound)) = constant.and_then(|rest| rest.split_once(": Duration = ")) {
                made.insert((
                    wait.to_owned(),
                    name.clone(),
                    bound.trim_end_matches(';').to_owned(),
                ));
            } else {
                assert!(
                    !line.contains("Duration::from"),
                    "{name}: a bound without a name: {line}"
                );
            }
        }
    }
    assert!(made.len() > 10, "{made:?}");
    assert_eq!(told, made);
}

#[test]
fn every_wait_of_the_disk_port_without_a_bound_says_why_it_ends() {
    let page = read("docs/waits.md");
    let section = page
        .split("\n## The disk port's own\n")
        .nth(1)
        .expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let told: BTreeSet<&str> = rows
        .flat_map(quoted)
        .filter(|name| name.ends_with(".rs"))
        .collect();
    let waits = [".wait(", ".wait_while(", ".join()", ".recv()"];
    let mut files = Vec::new();
    sources(&root().join("guest/src/disk"), &mut files);
    let mut found = BTreeSet::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        let code = text.split("\nmod tests {").next().unwrap_or_default();
        if code
            .lines()
            .any(|line| waits.iter().any(|wait| line.contains(wait)))
        {
            let name = path.strip_prefix(root()).expect("under the root");
            found.insert(name.display().to_string());
        }
    }
    assert!(found.len() > 8, "{found:?}");
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(told, found);
}

#[test]
fn no_queue_is_left_out() {
    let rows = rows();
    let told: BTreeSet<&str> = rows.iter().flat_map(|row| quoted(&row.cells[MADE_IN])).collect();
    let mut found = Vec::new();
    for crate_name in ["core", "fabric", "guest", "node", "program", "speculation"] {
        sources(&root().join(crate_name).join("src"), &mut found);
    }
    assert!(found.len() > 100, "only {} sources", found.len());
    let makes = [
        "VecDeque<",
        "VecDeque::",
        "unbounded()",
        "bounded(",
        "sync_channel(",
        "channel()",
        "channel::<",
        "bounded::<",
    ];
    let mut left_out = Vec::new();
    for path in found {
        let text = fs::read_to_string(&path).expect("a source file");
        let code = text.split("\nmod tests {").next().unwrap_or_default();
        let makes_one = code.lines().any(|line| {
            let line = line.trim_start();
            !line.starts_with("//") && makes.iter().any(|word| line.contains(word))
        });
        let name = path
            .strip_prefix(root())
            .expect("under the root")
            .display()
            .to_string();
        if makes_one && !told.contains(name.as_str()) {
            left_out.push(name);
        }
    }
    assert!(
        left_out.is_empty(),
        "these make a queue, and docs/budgets.md has no row for it: {left_out:?}"
    );
}
