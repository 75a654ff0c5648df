//! The source of a crate as a tree of modules, for the checks that read it.
//!
//! # What it decides
//!
//! Which file each module is in, and what in it is for tests only.
//!
//! # Flow
//!
//! [`Source::read`] reads all Rust files of a folder. [`Source::modules`] begins at a crate's root, follows `mod x;` from
//! file to file, and goes into inline modules.
//!
//! # Invariants
//!
//! - Nothing under `#[cfg(test)]` is followed.
//! - A file that no module names is an error: a check that passed it over would say more than it knows.
//!
//! # Not here
//!
//! Who uses what: `imports`. How many fields a structure has: `fields`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use syn::{Attribute, Item, Meta};

/// Rust files by name.
#[derive(Default)]
pub struct Source(BTreeMap<String, String>);

/// A module outside of tests.
pub struct Module {
    /// From the crate's root, which is the empty path.
    pub path: Vec<String>,
    /// Where it is written.
    pub file: String,
    /// What is in it; inline modules, which are listed for themselves, included.
    pub items: Vec<Item>,
}

impl Source {
    /// All Rust files in `folder`, by their names below `root`.
    pub fn read(root: &Path, folder: &str) -> Result<Self> {
        let mut source = Self::default();
        source.collect(root, folder)?;
        Ok(source)
    }

    fn collect(&mut self, root: &Path, folder: &str) -> Result<()> {
        for entry in fs::read_dir(root.join(folder)).with_context(|| folder.to_owned())? {
            let entry = entry?;
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.collect(root, &name)?;
            } else if name.ends_with(".rs") {
                self.0.insert(name, fs::read_to_string(entry.path())?);
            }
        }
        Ok(())
    }

    /// Made up, by name and text.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        Self(
            files
                .iter()
                .map(|(name, text)| ((*name).into(), (*text).into()))
                .collect(),
        )
    }

    /// The modules of the crate whose root is in `folder`.
    pub fn modules(&self, folder: &str) -> Result<Vec<Module>> {
        let root = ["lib.rs", "main.rs"]
            .map(|name| format!("{folder}/{name}"))
            .into_iter()
            .find(|name| self.0.contains_key(name))
            .with_context(|| format!("{folder} has neither lib.rs nor main.rs"))?;
        let mut walk = Walk {
            source: self,
            modules: Vec::new(),
            tests: BTreeSet::new(),
        };
        walk.file(Vec::new(), &root, folder)?;
        let known: BTreeSet<&str> = walk.modules.iter().map(|module| module.file.as_str()).collect();
        for name in self.0.keys() {
            let of_tests = walk
                .tests
                .iter()
                .any(|test| name == &format!("{test}.rs") || name.starts_with(&format!("{test}/")));
            if !known.contains(name.as_str()) && !of_tests {
                bail!("{name} belongs to no module that is found");
            }
        }
        Ok(walk.modules)
    }
}

struct Walk<'a> {
    source: &'a Source,
    modules: Vec<Module>,
    /// Where modules for tests only are, without `.rs`.
    tests: BTreeSet<String>,
}

impl Walk<'_> {
    /// `inside` is the folder in which the module's own modules are.
    fn file(&mut self, path: Vec<String>, file: &str, inside: &str) -> Result<()> {
        let text = &self.source.0[file];
        let parsed = syn::parse_file(text).with_context(|| file.to_owned())?;
        self.module(path, file, inside, parsed.items)
    }

    fn module(&mut self, path: Vec<String>, file: &str, inside: &str, items: Vec<Item>) -> Result<()> {
        for item in &items {
            let Item::Mod(child) = item else { continue };
            let name = child.ident.to_string();
            let below = format!("{inside}/{name}");
            if for_tests(&child.attrs) {
                self.tests.insert(below);
                continue;
            }
            let path = [path.as_slice(), std::slice::from_ref(&name)].concat();
            if let Some((_, items)) = &child.content {
                self.module(path, file, &below, items.clone())?;
                continue;
            }
            let written = [format!("{below}.rs"), format!("{below}/mod.rs")]
                .into_iter()
                .find(|name| self.source.0.contains_key(name))
                .with_context(|| format!("{file}: the module {name} is in no file"))?;
            self.file(path, &written, &below)?;
        }
        self.modules.push(Module {
            path,
            file: file.to_owned(),
            items,
        });
        Ok(())
    }
}

/// Whether `#[cfg(test)]` is among them.
pub fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string() == "test",
        Meta::Path(path) => path.is_ident("test"),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::Source;

    #[test]
    fn modules_are_followed_from_file_to_file_and_tests_are_not() {
        let source = Source::of(&[
            (
                "c/lib.rs",
                "mod a; mod b { mod inner { } } #[cfg(test)] mod tests;",
            ),
            ("c/a/mod.rs", "mod deep;"),
            ("c/a/deep.rs", ""),
            ("c/tests.rs", "mod more;"),
            ("c/tests/more.rs", ""),
        ]);
        let mut found: Vec<String> = source
            .modules("c")
            .unwrap()
            .iter()
            .map(|module| format!("{} in {}", module.path.join("::"), module.file))
            .collect();
        found.sort();
        let all = [
            " in c/lib.rs",
            "a in c/a/mod.rs",
            "a::deep in c/a/deep.rs",
            "b in c/lib.rs",
            "b::inner in c/lib.rs",
        ];
        assert_eq!(found, all);
    }

    #[test]
    fn a_file_that_no_module_names_is_an_error() {
        let source = Source::of(&[("c/lib.rs", ""), ("c/lost.rs", "")]);
        let error = source.modules("c").err().unwrap().to_string();
        assert_eq!(error, "c/lost.rs belongs to no module that is found");
        let source = Source::of(&[("c/lib.rs", "mod away;")]);
        assert!(source.modules("c").is_err());
    }
}
