//! The optional script for guests, on a tree that is not a system: what it writes, and that it takes all of it back.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn advice(root: &Path, words: &[&str]) -> Output {
    let script = dunlin_vmtest::paths::workspace().join("guest/advice/dunlin-guest-advice");
    Command::new("sh")
        .arg(script)
        .args(words)
        .env("DUNLIN_ADVICE_ROOT", root)
        .output()
        .unwrap()
}

fn files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path().to_string_lossy().into_owned());
        }
    }
    found
}

#[test]
fn advice_is_applied_shown_and_undone() {
    let root = std::env::temp_dir().join(format!("dunlin-advice-{}", std::process::id()));
    fs::create_dir_all(&root).unwrap();
    assert!(advice(&root, &["--show"]).status.success());
    assert!(files(&root).is_empty(), "--show must change nothing");
    assert!(advice(&root, &["--apply"]).status.success());
    // Twice, as a person would.
    assert!(advice(&root, &["--apply"]).status.success());
    let written = files(&root);
    assert_eq!(written.len(), 1, "{written:?}");
    assert!(
        fs::read_to_string(&written[0])
            .unwrap()
            .contains("tcp_timestamps = 0")
    );
    assert!(String::from_utf8_lossy(&advice(&root, &["--show"]).stdout).contains("It is there"));
    assert!(advice(&root, &["--undo"]).status.success());
    assert!(files(&root).is_empty());
    assert!(advice(&root, &["--undo"]).status.success());
    fs::remove_dir_all(&root).unwrap();
}

#[test]
fn a_wrong_word_is_refused() {
    for words in [&[][..], &["--aply"]] {
        assert_eq!(advice(Path::new("/nonexistent"), words).status.code(), Some(2));
    }
}
