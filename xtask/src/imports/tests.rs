use super::{resolve, told};
use crate::source::Source;

/// What is wrong with a crate of these files.
fn knots(files: &[(&str, &str)]) -> Vec<String> {
    told(&resolve::graph(&Source::of(files).modules("c").unwrap()), "c")
}

/// Who uses whom in it.
fn edges(files: &[(&str, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for (file, uses) in resolve::graph(&Source::of(files).modules("c").unwrap()) {
        for (used, what) in uses {
            let what: Vec<String> = what.into_iter().collect();
            found.push(format!("{file} {used} {}", what.join(" ")));
        }
    }
    found
}

#[test]
fn a_cycle_of_three_is_found_and_told_with_what_is_used() {
    let found = knots(&[
        ("c/lib.rs", "mod a; mod b; mod d;"),
        ("c/a.rs", "use crate::b::B; pub struct A;"),
        ("c/b.rs", "use super::d::{D, two}; pub struct B;"),
        ("c/d.rs", "pub struct D; pub fn two() { crate::a::A; }"),
    ]);
    let told =
        "  in c:\n    a.rs uses b.rs (b::B)\n    b.rs uses d.rs (d::D, d::two)\n    d.rs uses a.rs (a::A)";
    assert_eq!(found, [told]);
}

#[test]
fn pairs_that_share_a_file_are_no_cycle() {
    let found = knots(&[
        ("c/lib.rs", "mod a; mod b; use a::A; use b::B; struct Root;"),
        ("c/a.rs", "use crate::Root; pub struct A;"),
        ("c/b.rs", "use crate::Root; pub struct B;"),
    ]);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn of_two_cycles_in_one_knot_the_shorter_is_told() {
    let found = knots(&[
        ("c/lib.rs", "mod a; mod b; mod d; mod e;"),
        ("c/a.rs", "use crate::b::B; pub struct A;"),
        ("c/b.rs", "use crate::d::D; pub struct B;"),
        ("c/d.rs", "use crate::{a::A, e::E}; pub struct D;"),
        ("c/e.rs", "use crate::a::A; pub struct E;"),
    ]);
    assert_eq!(found.len(), 1);
    assert!(!found[0].contains("e.rs"), "{found:?}");
}

#[test]
fn a_name_leads_to_the_file_that_defines_it_whoever_passes_it_on() {
    let found = edges(&[
        (
            "c/lib.rs",
            "mod a; mod b; mod d; pub use a::A; use d::D as Other;",
        ),
        ("c/a.rs", "pub struct A;"),
        (
            "c/b.rs",
            "use super::Other; use crate::{A, d}; fn f() { d::deep::g() }",
        ),
        ("c/d.rs", "pub mod deep; pub struct D;"),
        ("c/d/deep.rs", "pub fn g() {}"),
    ]);
    let all = [
        "c/b.rs c/a.rs a::A",
        "c/b.rs c/d.rs d::D",
        "c/b.rs c/d/deep.rs d::deep::g",
        "c/lib.rs c/d.rs d::D",
    ];
    assert_eq!(found, all);
}

#[test]
fn what_a_module_passes_on_and_says_itself_it_uses() {
    let passes_on = ("c/a.rs", "pub fn f() {}");
    assert!(edges(&[("c/lib.rs", "mod a; pub use a::f;"), passes_on]).is_empty());
    let says = ("c/lib.rs", "mod a; pub use a::f; pub fn g() { f() }");
    assert_eq!(edges(&[says, passes_on]), ["c/lib.rs c/a.rs a::f"]);
}

#[test]
fn paths_are_found_in_functions_macros_and_attributes() {
    let other = ("c/a.rs", "pub fn f() {} pub const MOST: u8 = 1;");
    for text in [
        "mod a; fn g() { a::f() }",
        "mod a; fn g() { use a::f; f() }",
        "mod a; fn g() { println!(\"{}\", 1 + crate::a::f()) }",
        "mod a; fn g() { vec![(x.y, [self::a::f()])] }",
        "mod a; #[arg(default = a::f())] struct G;",
        "mod a; #[serde(with = \"a::f\")] struct G;",
        "mod a; use a::*;",
    ] {
        let found = edges(&[("c/lib.rs", text), other]);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
    }
}

#[test]
fn tests_other_crates_and_visibilities_draw_nothing() {
    let other = ("c/a.rs", "pub fn f() {}");
    for text in [
        "mod a; #[cfg(test)] use a::f;",
        "mod a; #[cfg(test)] fn g() { a::f() }",
        "mod a; struct G; impl G { #[cfg(test)] fn g() { a::f() } }",
        "mod a; #[cfg(test)] mod tests { use super::a::f; }",
        "mod a; use std::fmt; fn g() -> fmt::Result { fmt::f() }",
        "mod a; use anyhow::anyhow; fn g() { anyhow!(1) }",
        "mod a; fn g() { x.a::<f>() }",
        "mod a; struct G { pub(in crate::a) g: u8 }",
    ] {
        let found = edges(&[("c/lib.rs", text), other]);
        assert!(found.is_empty(), "{text}: {found:?}");
    }
}
