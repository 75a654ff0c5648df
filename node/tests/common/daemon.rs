//! A real daemon of a cluster of one host, and what users of this machine say to it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::free_address;

/// Users and groups that every Debian has: name, uid, gid.
pub const OPERATOR: (&str, u32, u32) = ("games", 5, 60);
pub const VIEWER: (&str, u32, u32) = ("daemon", 1, 1);
pub const STRANGER: (&str, u32, u32) = ("nobody", 65_534, 65_534);
pub const ROOT: (&str, u32, u32) = ("root", 0, 0);

pub type User = (&'static str, u32, u32);

/// The daemon, which ends with this.
pub struct Host {
    daemon: Option<Child>,
    folder: tempfile::TempDir,
    binary: PathBuf,
}

impl Host {
    pub fn new() -> Result<Self> {
        Self::beside(&[])
    }

    /// The first host of a cluster that has others, too: name, and port of this machine.
    pub fn beside(others: &[(&str, u16)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let binary = folder.path().join("dunlin");
        // Not by this process: what it has open for writing, a child that another test starts just then has open too, and nobody may execute it.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_dunlin"))
            .arg(&binary)
            .status()?;
        ensure!(copied.success(), "cp: {copied}");
        fs::set_permissions(&binary, Permissions::from_mode(0o755))?;
        let port = free_address()?.port();
        let made = Command::new(&binary)
            .arg("init")
            .arg(folder.path().join("etc"))
            .args(["--cluster", "one", "--host"])
            .arg(format!("a=127.0.0.1:{port}"))
            .args(
                others
                    .iter()
                    .flat_map(|(name, port)| ["--host".to_owned(), format!("{name}=127.0.0.1:{port}")]),
            )
            .arg("--control")
            .arg(folder.path().join("run/dunlin.sock"))
            .output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(Self {
            daemon: None,
            folder,
            binary,
        })
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("etc/a/host.toml")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/dunlin.sock")
    }

    /// The executable, a copy of its own.
    #[allow(dead_code, reason = "most tests talk by `say`")]
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Adds to host.toml.
    pub fn configure(&self, more: &str) -> Result<()> {
        let text = fs::read_to_string(self.file())?;
        Ok(fs::write(self.file(), format!("{more}\n{text}"))?)
    }

    pub fn start(&mut self) -> Result<()> {
        self.start_by(&[])
    }

    /// Starts it by another command, such as `unshare`, that executes what follows its own arguments.
    pub fn start_by(&mut self, command: &[&str]) -> Result<()> {
        let mut words: Vec<&OsStr> = command.iter().map(OsStr::new).collect();
        words.push(self.binary.as_os_str());
        let mut daemon = Command::new(words[0])
            .args(&words[1..])
            .arg("host")
            .arg(self.file())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = BufReader::new(daemon.stdout.take().context("its output")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let mut why = daemon.stderr.take().context("its words")?;
        self.daemon = Some(daemon);
        if !line.contains("ready") {
            let mut words = String::new();
            std::io::Read::read_to_string(&mut why, &mut words)?;
            anyhow::bail!("{words}");
        }
        // What it says later is nobody's here, and must not stop it.
        std::thread::spawn(move || std::io::copy(&mut why, &mut std::io::sink()));
        Ok(())
    }

    pub fn stop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    pub fn say(&self, user: User, words: &[&str]) -> Result<Output> {
        let output = Command::new(&self.binary)
            .arg("--socket")
            .arg(self.socket())
            .args(words)
            .uid(user.1)
            .gid(user.2)
            .current_dir("/")
            .output()?;
        Ok(output)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}
