//! Files that cannot be understood one after the other.
//!
//! # What it decides
//!
//! Two files may use each other, as a module and a part of it do. A cycle through three or more is a knot: nobody can
//! read, test or move one of its files without the others.
//!
//! # Flow
//!
//! [`knots`] takes the groups of files that all reach each other, and looks for the shortest cycle of more than two files
//! in each.
//!
//! # Invariants
//!
//! - A cycle is simple: no file is in it twice. Several pairs that share a file (a module with many parts) are no knot.
//!
//! # Not here
//!
//! Who uses what: `resolve`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::resolve::Graph;

/// The shortest cycle of more than two files in each group of files that has one.
pub fn knots(graph: &Graph) -> Vec<Vec<&str>> {
    let mut shortest: BTreeMap<BTreeSet<&str>, Vec<&str>> = BTreeMap::new();
    let reach: BTreeMap<&str, BTreeSet<&str>> = graph
        .keys()
        .map(|file| (file.as_str(), reached(graph, file)))
        .collect();
    for (file, uses) in graph {
        for used in uses.keys().filter(|used| *used != file) {
            if !reach
                .get(used.as_str())
                .is_some_and(|back| back.contains(file.as_str()))
            {
                continue;
            }
            let Some(cycle) = back(graph, used, file) else {
                continue;
            };
            let group = reach[file.as_str()]
                .iter()
                .copied()
                .filter(|other| reach.get(other).is_some_and(|back| back.contains(file.as_str())))
                .collect();
            match shortest.get(&group) {
                Some(known) if known.len() <= cycle.len() => {}
                _ => drop(shortest.insert(group, cycle)),
            }
        }
    }
    shortest.into_values().collect()
}

fn reached<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open = vec![from];
    while let Some(file) = open.pop() {
        for used in graph.get(file).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(used.as_str()) {
                open.push(used);
            }
        }
    }
    found
}

/// The shortest way from `from` to `to` with a file in between, beginning with `to`, which uses `from`.
fn back<'a>(graph: &'a Graph, from: &'a str, to: &'a str) -> Option<Vec<&'a str>> {
    let mut before = BTreeMap::from([(from, from)]);
    let mut open = VecDeque::from([from]);
    while let Some(file) = open.pop_front() {
        for used in graph.get(file).into_iter().flat_map(BTreeMap::keys) {
            let used = used.as_str();
            if used == to && file != from {
                let mut cycle = vec![file];
                let mut at = file;
                while at != from {
                    at = before[at];
                    cycle.push(at);
                }
                cycle.push(to);
                cycle.reverse();
                return Some(cycle);
            }
            if used != to && !before.contains_key(used) {
                before.insert(used, file);
                open.push_back(used);
            }
        }
    }
    None
}
