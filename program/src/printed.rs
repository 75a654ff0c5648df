//! What a program prints, in a file that never grows beyond its budget.
//!
//! Decides:    when the file begins anew: at half of the budget; the half before it stays beside it, as `NAME.1`.
//! Flow:       the pipe's reader (`copy`) -> here.
//! Invariants: 1. (disk) both together are at most `MOST_BYTES` and one write.
//! Not here:   who reads it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What both files may take.
pub const MOST_BYTES: u64 = 16 << 20;

/// The file.
#[derive(Debug)]
pub struct Printed {
    path: PathBuf,
    file: File,
    bytes: u64,
    most_bytes: u64,
}

/// Where the older half is.
#[must_use]
pub fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

impl Printed {
    /// Begins an empty one.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(path: &Path) -> io::Result<Self> {
        match fs::remove_file(older(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self {
            path: path.to_owned(),
            file: File::create(path)?,
            bytes: 0,
            most_bytes: MOST_BYTES,
        })
    }
}

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes > 0 && self.bytes + bytes.len() as u64 > self.most_bytes / 2 {
            fs::rename(&self.path, older(&self.path))?;
            self.file = File::create(&self.path)?;
            self.bytes = 0;
        }
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The last `most` lines of both, oldest first.
///
/// # Errors
/// Those of the file system; a program that has not printed anything has no lines.
pub fn last_lines(path: &Path, most: usize) -> io::Result<Vec<String>> {
    let read = |path: &Path| match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    };
    let mut bytes = read(&older(path))?;
    bytes.extend(read(path)?);
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(most);
    Ok(lines[from..].iter().map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_prints_for_ever_costs_a_bounded_file_and_its_last_lines_are_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("program.log");
        let mut printed = Printed::create(&path).expect("a file");
        printed.most_bytes = 1000;
        for n in 0..1000 {
            writeln!(printed, "line {n:04}").expect("room");
            let length = |path: &Path| fs::metadata(path).map_or(0, |about| about.len());
            let bytes = length(&path) + length(&older(&path));
            assert!(bytes <= 1000, "{bytes} bytes after line {n}");
        }
        let lines = last_lines(&path, 60).expect("lines");
        assert_eq!(lines.len(), 60, "the older half is there as well");
        assert_eq!(
            (lines[0].as_str(), lines[59].as_str()),
            ("line 0940", "line 0999")
        );
        // The next run has none of it.
        drop(Printed::create(&path).expect("a file"));
        assert_eq!(last_lines(&path, 60).expect("no lines"), Vec::<String>::new());
    }
}
