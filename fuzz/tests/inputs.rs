//! Every seed, and every input that once broke something, through its target: with every `cargo test`, on any compiler.

use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The files of `folder/target`, sorted.
fn inputs(name: &str, target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(files) = std::fs::read_dir(folder(name).join(target)) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn the_seeds_are_those_that_the_generator_makes() {
    for (target, name, content) in dunlin_fuzz::seeds::all() {
        let path = folder("seeds").join(target).join(&name);
        let kept = std::fs::read(&path).unwrap_or_default();
        assert!(
            kept == content,
            "{} is not what the generator makes: cargo run -p dunlin-fuzz --example seeds",
            path.display()
        );
    }
}

#[test]
fn every_target_has_seeds_and_stands_them_and_all_that_was_found() {
    for target in &dunlin_fuzz::TARGETS {
        let seeds = inputs("seeds", target.name);
        assert!(!seeds.is_empty(), "no seeds for {}", target.name);
        for (path, bytes) in seeds.iter().chain(&inputs("found", target.name)) {
            let outcome = std::panic::catch_unwind(|| dunlin_fuzz::run(target.name, bytes));
            assert!(outcome.is_ok(), "{} breaks {}", path.display(), target.name);
        }
    }
}

/// Cut anywhere and with any one byte changed, seeds are still only bytes.
#[test]
fn damaged_seeds_break_nothing() {
    for target in dunlin_fuzz::TARGETS.iter().filter(|target| target.name != "log") {
        for (path, bytes) in inputs("seeds", target.name) {
            for at in 0..bytes.len().min(200) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0xff;
                for input in [&bytes[..at], &damaged[..]] {
                    let outcome = std::panic::catch_unwind(|| dunlin_fuzz::run(target.name, input));
                    assert!(
                        outcome.is_ok(),
                        "{} damaged at byte {at} breaks {}",
                        path.display(),
                        target.name
                    );
                }
            }
        }
    }
}

#[test]
fn every_target_is_a_binary_of_the_fuzzer() {
    let manifest = std::fs::read_to_string(folder("Cargo.toml")).unwrap();
    for target in &dunlin_fuzz::TARGETS {
        assert!(
            manifest.contains(&format!("name = \"{}\"", target.name)),
            "{}",
            target.name
        );
        assert!(
            folder("fuzz_targets")
                .join(format!("{}.rs", target.name))
                .is_file(),
            "{}",
            target.name
        );
    }
}
