//! A wall clock for each host, which can be set.
//!
//! The testbed's hosts share a kernel, and a time namespace moves only the clocks that never jump. So the wall clock is moved where a
//! program reads it: by a small object (`clock.c`) preloaded into what is started with [`Clock::onto`].

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

const SOURCE: &str = include_str!("clock.c");

/// The wall clock of one host.
pub struct Clock {
    object: PathBuf,
    file: PathBuf,
    offset_ns: i64,
}

impl Clock {
    /// A clock that is right, kept in `dir`.
    pub fn new(dir: &Path) -> Result<Self> {
        let (source, object, file) = (dir.join("clock.c"), dir.join("clock.so"), dir.join("clock"));
        fs::write(&source, SOURCE)?;
        let output = Command::new("gcc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .args([&object, &source])
            .output()
            .context("gcc is not here: apt-get install gcc libc6-dev (or 'cargo xtask setup')")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "clock.c cannot be compiled: {}",
            said.trim()
        );
        fs::write(&file, 0_i64.to_ne_bytes())?;
        Ok(Self {
            object,
            file,
            offset_ns: 0,
        })
    }

    /// What the command starts goes by this clock.
    pub fn onto(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.object)
            .env("DUNLIN_LAB_CLOCK", &self.file);
    }

    /// Sets it forward, or back.
    pub fn jump_ms(&mut self, by_ms: i64) -> Result<()> {
        self.offset_ns += by_ms * 1_000_000;
        self.write()
    }

    /// Sets it right.
    pub fn set_right(&mut self) -> Result<()> {
        self.offset_ns = 0;
        self.write()
    }

    fn write(&self) -> Result<()> {
        use std::os::unix::fs::FileExt;
        // In place: the readers have mapped it.
        let file = fs::File::options().write(true).open(&self.file)?;
        Ok(file.write_all_at(&self.offset_ns.to_ne_bytes(), 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wall_clock_jumps_for_whoever_was_started_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut clock = Clock::new(dir.path()).unwrap();
        let year = |clock: &Clock| -> i32 {
            let mut command = Command::new("date");
            clock.onto(&mut command);
            let output = command.arg("+%Y").output().unwrap();
            String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
        };
        let now = year(&clock);
        let ten_years_ms = 3653 * 86_400_000;
        clock.jump_ms(ten_years_ms).unwrap();
        assert!((now + 9..=now + 11).contains(&year(&clock)));
        clock.jump_ms(-2 * ten_years_ms).unwrap();
        assert!((now - 11..=now - 9).contains(&year(&clock)));
        clock.set_right().unwrap();
        assert!((now..=now + 1).contains(&year(&clock)));
    }
}
