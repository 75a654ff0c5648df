//! No structure of node has more fields than a person keeps in mind.
//!
//! # What it decides
//!
//! How many fields a structure may have. One with more holds several things that have names of their own.
//!
//! # Not here
//!
//! Tests, and other crates: what core keeps for a connection or a group is the protocol's own list.

use anyhow::{Result, bail};
use dunlin_vmtest::paths;
use syn::visit::{self, Visit};
use syn::{Item, ItemStruct};

use crate::source::{Module, Source, for_tests};

/// Fields of a structure.
const MOST_FIELDS: usize = 15;

const FOLDER: &str = "node/src";

/// Every structure outside of tests.
pub fn check() -> Result<()> {
    let modules = Source::read(&paths::workspace(), FOLDER)?.modules(FOLDER)?;
    let (structures, large) = look(&modules);
    if !large.is_empty() {
        bail!("more than {MOST_FIELDS} fields:\n  {}", large.join("\n  "));
    }
    println!("verify: none of {structures} structures in {FOLDER} has more than {MOST_FIELDS} fields");
    Ok(())
}

/// How many structures there are, and those that are too large.
fn look(modules: &[Module]) -> (usize, Vec<String>) {
    let mut looked = Look::default();
    for module in modules {
        looked.file = &module.file;
        module.items.iter().for_each(|item| looked.visit_item(item));
    }
    (looked.structures, looked.large)
}

#[derive(Default)]
struct Look<'a> {
    file: &'a str,
    structures: usize,
    large: Vec<String>,
}

impl<'ast> Visit<'ast> for Look<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        // An inline module is listed for itself.
        if !matches!(item, Item::Mod(_)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        if !for_tests(&function.attrs) {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_item_struct(&mut self, structure: &'ast ItemStruct) {
        if for_tests(&structure.attrs) {
            return;
        }
        self.structures += 1;
        let fields = structure
            .fields
            .iter()
            .filter(|field| !for_tests(&field.attrs))
            .count();
        if fields > MOST_FIELDS {
            self.large
                .push(format!("{}: {} has {fields}", self.file, structure.ident));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::look;
    use crate::source::Source;

    fn large(text: &str) -> Vec<String> {
        let modules = Source::of(&[("c/lib.rs", text)]).modules("c").unwrap();
        look(&modules).1
    }

    fn structure(fields: usize) -> String {
        let fields: Vec<String> = (0..fields).map(|n| format!("f{n}: u8")).collect();
        format!("struct S {{ {} }}", fields.join(", "))
    }

    #[test]
    fn sixteen_fields_are_too_many_wherever_they_are() {
        assert_eq!(large(&structure(16)), ["c/lib.rs: S has 16"]);
        assert_eq!(large(&format!("mod inner {{ {} }}", structure(17))).len(), 1);
        assert_eq!(large(&format!("fn f() {{ {} }}", structure(18))).len(), 1);
        assert_eq!(large(&format!("struct T({});", "u8,".repeat(16))).len(), 1);
    }

    #[test]
    fn fifteen_are_not_and_tests_may_have_more() {
        assert!(large(&structure(15)).is_empty());
        assert!(large(&format!("#[cfg(test)] {}", structure(16))).is_empty());
        assert!(large(&format!("#[cfg(test)] mod tests {{ {} }}", structure(16))).is_empty());
    }
}
