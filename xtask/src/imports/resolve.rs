//! Where the names of a crate's modules lead to: its files, and who uses what of whom.
//!
//! # What it decides
//!
//! Which file a path ends in. A name leads to the file in which it is defined, whatever modules pass it on: one that only
//! passes on (`pub use`) is no dependency, and neither is the declaration of a module.
//!
//! # Flow
//!
//! [`graph`] takes all modules, follows each import and each path in code through imports, and draws an edge from the
//! file that says it to the file in which what it names is defined.
//!
//! # Invariants
//!
//! - An import that nobody else sees is a use. One that others see (`pub use`) is a use where the code says the name, too.
//! - A path that leads out of the crate draws nothing.
//!
//! # Not here
//!
//! What may depend on what: `cycles`.

use std::collections::{BTreeMap, BTreeSet};

use super::names::{Names, Path};
use crate::source::Module;

/// For each file the files that it uses, with what it uses of them.
pub type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Of one crate.
pub fn graph(modules: &[Module]) -> Graph {
    let scopes = Scopes(
        modules
            .iter()
            .map(|module| (module.path.clone(), (module.file.as_str(), Names::of(module))))
            .collect(),
    );
    let mut graph = Graph::new();
    for (module, (file, names)) in &scopes.0 {
        let uses = graph.entry((*file).to_owned()).or_default();
        let mut draw = |end: Option<End>, whole: bool| {
            let Some(End { module, name }) = end else { return };
            // To import a module is no use of what its file defines: that is what is said through it.
            let name = match name {
                Some(name) => name,
                None if whole => "*".to_owned(),
                None => return,
            };
            let target = scopes.0[&module].0;
            if target != *file {
                let said = [module.as_slice(), &[name]].concat().join("::");
                uses.entry(target.to_owned()).or_default().insert(said);
            }
        };
        for import in names.imports.values().filter(|import| !import.shown) {
            draw(scopes.path(module, &import.path), false);
        }
        for path in &names.unnamed {
            draw(scopes.path(module, path), false);
        }
        for glob in names.globs.iter().filter(|glob| !glob.shown) {
            draw(scopes.path(module, &glob.path), true);
        }
        for path in &names.said {
            draw(scopes.path(module, path), false);
        }
    }
    graph
}

/// What a path leads to: a module, or what has this name in it.
#[derive(Clone)]
struct End {
    module: Path,
    name: Option<String>,
}

struct Scopes<'a>(BTreeMap<Path, (&'a str, Names)>);

/// Imports that are followed for one path, at most: they can go round.
const MOST_STEPS: usize = 32;

impl Scopes<'_> {
    fn path(&self, from: &Path, path: &[String]) -> Option<End> {
        self.anchored(from, path, MOST_STEPS)
    }

    /// A path as the code of `from` says it.
    fn anchored(&self, from: &Path, path: &[String], steps: usize) -> Option<End> {
        let (first, rest) = path.split_first()?;
        let mut at = from.clone();
        match first.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()?),
            // A name in sight: nothing but an import, a module or an item of its own leads anywhere.
            _ => return self.below(&at, path, steps, false),
        }
        let up = rest.iter().take_while(|part| *part == "super").count();
        at.truncate(at.len().checked_sub(up)?);
        self.below(&at, &rest[up..], steps, true)
    }

    /// What `path` is in the module `at`. One that is not `sure` to be in this crate may be nothing at all.
    fn below(&self, at: &Path, path: &[String], steps: usize, sure: bool) -> Option<End> {
        let steps = steps.checked_sub(1)?;
        let here = |name| End {
            module: at.clone(),
            name,
        };
        let Some((first, rest)) = path.split_first() else {
            return Some(here(None));
        };
        let (_, names) = self.0.get(at)?;
        let child = [at.as_slice(), std::slice::from_ref(first)].concat();
        let import = names.imports.get(first);
        let defined = names.defined.contains(first);
        // A function may be called as a module is: the module is meant where more follows.
        if self.0.contains_key(&child) && (!rest.is_empty() || (import.is_none() && !defined)) {
            return self.below(&child, rest, steps, true);
        }
        if let Some(import) = import {
            let whole = [import.path.as_slice(), rest].concat();
            return self.anchored(at, &whole, steps);
        }
        if defined {
            return Some(here(Some(first.clone())));
        }
        for glob in &names.globs {
            if let Some(End { module, name: None }) = self.anchored(at, &glob.path, steps)
                && module != *at
                && let Some(end) = self.below(&module, path, steps, false)
            {
                return Some(end);
            }
        }
        // What a macro has written is in no list.
        sure.then(|| here(Some(first.clone())))
    }
}
