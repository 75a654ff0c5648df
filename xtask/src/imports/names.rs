//! What a module imports, defines and names.
//!
//! # What it decides
//!
//! Which paths of a module can lead to another file.
//!
//! # Flow
//!
//! [`Names::of`] goes through a module's items once: `use` trees, at the top or in a function, paths in code, and paths in
//! what macros and attributes are given.
//!
//! # Invariants
//!
//! - What is under `#[cfg(test)]` is passed over.
//! - A visibility (`pub(in crate::x)`) is no use, and what an inline module says is that module's own.
//!
//! # Not here
//!
//! Where a path leads to: `resolve`.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Field, FieldValue, ImplItem, Item, Local, Macro, Meta, Stmt, TraitItem, UseTree, Variant,
};

use crate::source::{Module, for_tests};

/// A path by its segments.
pub type Path = Vec<String>;

/// An imported name.
pub struct Import {
    /// What it stands for.
    pub path: Path,
    /// Others can see it here: then it is used here only where the code says it, too.
    pub shown: bool,
}

/// Of one module.
#[derive(Default)]
pub struct Names {
    /// By the name that they have here.
    pub imports: BTreeMap<String, Import>,
    /// Whatever is in these (`use x::*`), and whether others see it here.
    pub globs: Vec<Import>,
    /// `use x as _`.
    pub unnamed: Vec<Path>,
    /// Items that are written here.
    pub defined: BTreeSet<String>,
    /// Paths in code.
    pub said: BTreeSet<Path>,
}

impl Names {
    /// All of a module's.
    pub fn of(module: &Module) -> Self {
        let mut names = Self::default();
        for item in &module.items {
            if let Some(name) = defined(item) {
                names.defined.insert(name);
            }
            names.visit_item(item);
        }
        names
    }

    fn import(&mut self, before: &Path, tree: &UseTree, shown: bool) {
        let with = |name: &dyn ToString| [before.as_slice(), &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.import(&with(&path.ident), &path.tree, shown),
            UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|tree| self.import(before, tree, shown)),
            UseTree::Glob(_) => self.globs.push(Import {
                path: before.clone(),
                shown,
            }),
            UseTree::Name(name) if name.ident == "self" => self.named(before.last(), before.clone(), shown),
            UseTree::Name(name) => self.named(Some(&name.ident.to_string()), with(&name.ident), shown),
            UseTree::Rename(rename) => {
                let path = match rename.ident == "self" {
                    true => before.clone(),
                    false => with(&rename.ident),
                };
                match rename.rename == "_" {
                    true => self.unnamed.push(path),
                    false => self.named(Some(&rename.rename.to_string()), path, shown),
                }
            }
        }
    }

    fn named(&mut self, name: Option<&String>, path: Path, shown: bool) {
        let Some(name) = name else { return };
        // The same name may be imported in several functions, and from other places: no path is lost.
        if let Some(earlier) = self.imports.insert(name.clone(), Import { path, shown })
            && !earlier.shown
        {
            self.unnamed.push(earlier.path);
        }
    }

    /// Paths in what a macro or an attribute gets: it need not be Rust, so it is read as a row of names and colons.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Path::new();
        // Colons since the last name; more than two are none of a path.
        let mut colons = 0;
        let mut field = false;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.said(&mut path);
                    }
                    if !field {
                        path.push(name.to_string());
                    }
                    (colons, field) = (0, false);
                }
                TokenTree::Punct(sign) if sign.as_char() == ':' => colons += 1,
                other => {
                    self.said(&mut path);
                    colons = 0;
                    // What follows two dots is no field.
                    field = !field && matches!(&other, TokenTree::Punct(sign) if sign.as_char() == '.');
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.said(&mut path);
    }

    fn said(&mut self, path: &mut Path) {
        if !path.is_empty() {
            self.said.insert(std::mem::take(path));
        }
    }

    /// `#[serde(with = "crate::x")]`: a path as text.
    fn quoted(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.quoted(group.stream()),
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    if let Ok(path) = syn::parse_str::<syn::Path>(text.trim_matches('"')) {
                        self.visit_path(&path);
                    }
                }
                _ => {}
            }
        }
    }
}

/// The name that an item has in its module. Modules are listed for themselves.
fn defined(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if for_tests(attributes(item)) {
            return;
        }
        match item {
            // A path from another crate's root (`::x`) leads to no file of this one.
            Item::Use(item) if item.leading_colon.is_none() => {
                let shown = !matches!(item.vis, syn::Visibility::Inherited);
                self.import(&Path::new(), &item.tree, shown);
            }
            Item::Use(_) | Item::Mod(_) => {}
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !matches!(item, TraitItem::Fn(item) if for_tests(&item.attrs)) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast FieldValue) {
        if !for_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast Variant) {
        if !for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if !for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if !matches!(stmt, Stmt::Macro(stmt) if for_tests(&stmt.attrs)) {
            visit::visit_stmt(self, stmt);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.said
                .insert(path.segments.iter().map(|part| part.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        visit::visit_macro(self, called);
        self.tokens(called.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let Meta::List(list) = &attribute.meta else {
            return;
        };
        self.tokens(list.tokens.clone());
        if list.path.is_ident("serde") {
            self.quoted(list.tokens.clone());
        }
    }

    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
}
