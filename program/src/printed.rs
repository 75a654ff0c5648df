//! What a program prints, in a file that never grows beyond its budget.
//!
//! Decides:    when the file begins anew: at half of the budget; the half before it stays beside it, as `NAME.1`.
//! Flow:       the pipe's reader (`copy`) -> here.
//! Invariants: 1. (disk) both together are at most `MOST_BYTES` and one write.
//! Not here:   who reads it.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
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

    /// Goes on in it, behind what is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn go_on(path: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self {
            path: path.to_owned(),
            bytes: file.metadata()?.len(),
            file,
            most_bytes: MOST_BYTES,
        })
    }
}

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes > 0 && self.bytes + bytes.len() as u64 > self.most_bytes / 2 {
            match fs::rename(&self.path, older(&self.path)) {
                // The file behind it could not be made the last time, as on a full disk.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
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

/// What is printed from some moment on.
#[derive(Debug)]
pub struct Follower {
    path: PathBuf,
    file: Option<File>,
    /// The beginning of a line whose end is not printed.
    begun: Vec<u8>,
}

/// One reading's bytes. A longer line is cut.
const MOST_AT_ONCE: usize = 64 << 10;

impl Follower {
    /// From now on; with the last `most` lines until now.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn begin(path: &Path, most: usize) -> io::Result<(Self, String)> {
        let mut file = open(path)?;
        let mut bytes = match fs::read(older(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            read => read.unwrap_or_default(),
        };
        if let Some(file) = &mut file {
            file.read_to_end(&mut bytes)?;
        }
        let whole = bytes
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |end| end + 1);
        let begun = bytes.split_off(whole);
        let ends = bytes.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
        let from = ends.map(|(at, _)| at + 1).nth(most).unwrap_or(0);
        let text = if most == 0 {
            String::new()
        } else {
            String::from_utf8_lossy(&bytes[from..]).into_owned()
        };
        let path = path.to_owned();
        Ok((Self { path, file, begun }, text))
    }

    /// Whole lines that were printed since, some at a time; none at the moment where it is empty.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn more(&mut self) -> io::Result<String> {
        let mut bytes = std::mem::take(&mut self.begun);
        let room = MOST_AT_ONCE.saturating_sub(bytes.len()) as u64;
        let mut is_read_out = true;
        if let Some(file) = &mut self.file {
            if file.metadata()?.len() < file.stream_position()? {
                // Another run of the program has begun it anew.
                file.rewind()?;
            }
            is_read_out = file.take(room).read_to_end(&mut bytes)? == 0;
        }
        if is_read_out && !self.is_current()? {
            self.file = open(&self.path)?;
            if let Some(file) = &mut self.file {
                file.take(room).read_to_end(&mut bytes)?;
            }
        }
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => end + 1,
            None if bytes.len() >= MOST_AT_ONCE => bytes.len(),
            None => 0,
        };
        self.begun = bytes.split_off(whole);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Whether what is read is still what is written: at half of the budget it is put beside.
    fn is_current(&self) -> io::Result<bool> {
        let number = |about: fs::Metadata| (about.dev(), about.ino());
        let there = match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            about => Some(number(about?)),
        };
        let here = self.file.as_ref().map(File::metadata).transpose()?.map(number);
        Ok(there.is_none() || there == here)
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
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

    #[test]
    fn who_follows_gets_every_line_once_over_a_new_half_and_a_new_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("program.log");
        let (mut early, nothing) = Follower::begin(&path, 10).expect("no file is no error");
        assert_eq!(nothing, "");
        let mut printed = Printed::create(&path).expect("a file");
        printed.most_bytes = 1000;
        writeln!(printed, "first\nsecond").expect("room");
        write!(printed, "thi").expect("room");
        assert_eq!(
            early.more().expect("read"),
            "first\nsecond\n",
            "whole lines alone"
        );
        let (mut late, last) = Follower::begin(&path, 1).expect("read");
        assert_eq!(last, "second\n");
        writeln!(printed, "rd").expect("room");
        assert_eq!(early.more().expect("read"), "third\n");
        assert_eq!(
            late.more().expect("read"),
            "third\n",
            "its beginning was printed before"
        );
        for n in 0..500 {
            writeln!(printed, "line {n:04}").expect("room");
            let text: String =
                std::iter::from_fn(|| early.more().ok().filter(|text| !text.is_empty())).collect();
            assert_eq!(text, format!("line {n:04}\n"));
        }
        drop(printed);
        let mut anew = Printed::create(&path).expect("a file");
        writeln!(anew, "anew").expect("room");
        assert_eq!(early.more().expect("read"), "anew\n");
    }
}
