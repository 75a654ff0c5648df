//! The protocol of core's replica is tested with more lines than it has.
//!
//! # What it decides
//!
//! Which lines of a folder are tests: files called `tests.rs`, what is in a folder `tests` or `transcripts`, and the end
//! of any file from `#[cfg(test)] mod tests {` on. All other Rust is code, comments and empty lines included on both sides.
//!
//! # Not here
//!
//! Whether the tests are any good: the simulator (`cargo xtask sim`) asks that.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

const FOLDER: &str = "core/src/replica";

/// More lines of tests than of code.
pub fn check() -> Result<()> {
    let mut lines = Lines::default();
    lines.collect(&paths::workspace().join(FOLDER), false)?;
    lines.judge(FOLDER)?;
    println!(
        "verify: {FOLDER} has {} lines of tests and {} of code",
        lines.tests, lines.code
    );
    Ok(())
}

#[derive(Default)]
struct Lines {
    tests: usize,
    code: usize,
}

impl Lines {
    fn judge(&self, folder: &str) -> Result<()> {
        let Self { tests, code } = self;
        if *code == 0 {
            bail!("{folder} has no code");
        }
        if tests <= code {
            bail!("{folder} has {tests} lines of tests, which is not more than its {code} of code");
        }
        Ok(())
    }

    fn collect(&mut self, folder: &Path, of_tests: bool) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type()?.is_dir() {
                let of_tests = of_tests || name == "tests" || name == "transcripts";
                self.collect(&path, of_tests)?;
            } else {
                self.add(&name.to_string_lossy(), &fs::read_to_string(&path)?, of_tests);
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str, text: &str, of_tests: bool) {
        let lines: Vec<&str> = text.lines().collect();
        let rust = name.ends_with(".rs");
        let code = if of_tests || name == "tests.rs" {
            0
        } else {
            lines
                .windows(2)
                .position(|two| two[0] == "#[cfg(test)]" && two[1].starts_with("mod tests {"))
                .unwrap_or(lines.len())
        };
        if rust {
            self.code += code;
        }
        if rust || of_tests {
            self.tests += lines.len() - code;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Lines;

    #[test]
    fn tests_are_told_from_code() {
        let mut lines = Lines::default();
        lines.add("a.rs", "one\ntwo\n#[cfg(test)]\nmod tests {\n}\n", false);
        assert_eq!((lines.code, lines.tests), (2, 3));
        // A declaration is a line of code.
        lines.add("b.rs", "one\n#[cfg(test)]\nmod tests;\n", false);
        assert_eq!((lines.code, lines.tests), (5, 3));
        lines.add("tests.rs", "one\ntwo\n", false);
        lines.add("more.rs", "one\n", true);
        lines.add("said.txt", "one\n", true);
        lines.add("read.md", "one\n", false);
        assert_eq!((lines.code, lines.tests), (5, 7));
    }

    #[test]
    fn as_many_lines_of_tests_as_of_code_are_too_few() {
        let judge = |tests, code| Lines { tests, code }.judge("x").is_ok();
        assert!(judge(11, 10));
        assert!(!judge(10, 10));
        assert!(!judge(10, 11));
        assert!(!judge(1, 0), "an empty folder says nothing");
    }
}
