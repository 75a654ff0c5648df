//! Whether a history of registers can have happened: porcupine's word, asked through a small program in Go.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::client::registers::Operation;
use crate::paths;

/// The program, built if it is not or is older than its source. The first time its one library is fetched.
///
/// # Errors
/// Without Go, or if it does not build; the message says what to do.
pub fn checker() -> Result<PathBuf> {
    let program = paths::target().join("linearizability");
    let output = Command::new("go")
        .args(["build", "-o"])
        .args([&program, Path::new(".")])
        .current_dir(paths::workspace().join("vmtest/linearizability"))
        // The tree's own version control is none of Go's business.
        .env("GOFLAGS", "-buildvcs=false")
        .output()
        .context("go is not here: apt-get install golang-go (or 'cargo xtask setup')")?;
    ensure!(
        output.status.success(),
        "vmtest/linearizability cannot be built: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(program)
}

/// Writes the history to `file` and has it checked. Returns what the checker says of a history that is right.
///
/// # Errors
/// When it cannot have happened, with the register; the file stays.
pub fn check(checker: &Path, history: &[Operation], file: &Path) -> Result<String> {
    let mut lines = BufWriter::new(fs::File::create(file)?);
    for operation in history {
        serde_json::to_writer(&mut lines, operation)?;
        lines.write_all(b"\n")?;
    }
    lines.flush()?;
    let output = Command::new(checker).arg(file).output()?;
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        _ => bail!(
            "{} ({})",
            String::from_utf8_lossy(&output.stderr).trim(),
            file.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::registers::Kind;

    fn operation(kind: Kind, wrote: &str, read: &str, call_ns: u64, return_ns: u64) -> Operation {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Operation {
            client: call_ns % 7,
            kind,
            key: "one".to_owned(),
            wrote: text(wrote),
            read: text(read),
            call_ns,
            return_ns: (return_ns > 0).then_some(return_ns),
        }
    }

    #[test]
    fn histories_that_cannot_have_happened_are_found_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (checker, file) = (checker().unwrap(), dir.path().join("history"));
        let set = |value, call, end| operation(Kind::Set, value, "", call, end);
        let get = |value, call, end| operation(Kind::Get, "", value, call, end);
        let swap = |value, before, call, end| operation(Kind::GetSet, value, before, call, end);
        let right = [
            vec![set("a", 10, 20), get("a", 30, 40), swap("b", "a", 50, 60)],
            // At the same time: either order.
            vec![
                set("a", 10, 20),
                set("b", 15, 40),
                get("b", 16, 18),
                get("a", 19, 21),
            ],
            // No answer: it may have happened, late, or never.
            vec![
                set("a", 10, 20),
                set("b", 30, 0),
                get("a", 40, 50),
                get("b", 60, 70),
            ],
            vec![set("a", 10, 20), swap("b", "", 30, 0), get("a", 40, 50)],
        ];
        for history in &right {
            let said = check(&checker, history, &file).unwrap();
            assert!(said.contains(&format!("{} operations", history.len())), "{said}");
        }
        let wrong = [
            // A write that was told is gone.
            vec![set("a", 10, 20), get("", 30, 40)],
            // An old value came back.
            vec![
                set("a", 10, 20),
                set("b", 30, 40),
                get("b", 50, 60),
                get("a", 70, 80),
            ],
            // Carried out twice: nobody else wrote, and it found its own value.
            vec![set("a", 10, 20), swap("b", "b", 30, 40)],
        ];
        for history in &wrong {
            let error = check(&checker, history, &file).unwrap_err().to_string();
            assert!(error.contains("cannot have happened"), "{error}");
        }
    }
}
