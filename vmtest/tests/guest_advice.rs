//! The script for guests, `guest/advice/dunlin-guest`, in a root folder of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::Result;
use dunlin_vmtest::paths;

fn guest(root: &Path, words: &[&str]) -> Result<Output> {
    Ok(Command::new("sh")
        .arg(paths::workspace().join("guest/advice/dunlin-guest"))
        .args(words)
        .env("DUNLIN_ROOT", root)
        .output()?)
}

fn files(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(fs::read_to_string(path)?);
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn what_was_set_is_listed_and_taken_back() -> Result<()> {
    let root = tempfile::tempdir()?;
    let words = ["set", "no-timestamps", "no-kaslr", "zero-freed"];
    // Twice is as good as once.
    for _ in 0..2 {
        assert!(guest(root.path(), &words)?.status.success());
    }
    let expected = [
        "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX nokaslr\"\nGRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX init_on_free=1\"\n",
        "net.ipv4.tcp_timestamps=0\n",
    ];
    assert_eq!(files(root.path())?, expected);
    let listed = String::from_utf8(guest(root.path(), &["list"])?.stdout)?;
    let set: Vec<&str> = listed
        .lines()
        .filter(|line| line.ends_with(" set"))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(set, ["no-timestamps", "no-kaslr", "zero-freed"]);
    assert!(guest(root.path(), &["undo"])?.status.success());
    assert!(files(root.path())?.is_empty());
    Ok(())
}

#[test]
fn a_wrong_word_changes_nothing_and_is_told_in_one_line() -> Result<()> {
    let root = tempfile::tempdir()?;
    for words in [
        &["set", "no-kaslr", "no-clocks"][..],
        &["set", "no/kaslr"],
        &["set"],
        &["sett", "no-kaslr"],
        &["undo", "no-kaslr"],
        &[],
    ] {
        let output = guest(root.path(), words)?;
        let told = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
        assert!(
            told.lines().count() == 1 && told.starts_with("dunlin-guest: "),
            "{words:?}: {told}"
        );
        assert!(files(root.path())?.is_empty(), "{words:?}");
    }
    Ok(())
}
