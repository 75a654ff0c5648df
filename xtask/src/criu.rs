//! CRIU for the tests: Debian's package with its libraries, unpacked beside the build and not installed.
//!
//! A kernel from 6.16 on wants CRIU 4.2, and Debian's stable releases have older ones. So it is taken from the testing release, with a
//! list of packages of its own; what this machine has installed is not touched. It runs by its own loader, in front of its own
//! libraries: a script beside it, which is what `DUNLIN_CRIU` names.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use dunlin_vmtest::paths;

/// The release that has it.
const RELEASE: &str = "forky";
/// What Debian signs its releases with.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Unpacks it, if that was not done before.
///
/// # Errors
/// When a package cannot be had, or it does not run.
pub fn ensure() -> Result<()> {
    let script = paths::criu();
    if script.exists() {
        return Ok(());
    }
    println!("setup: will unpack criu of Debian {RELEASE}: running programs are copied with it");
    let tools = script.parent().context("a folder")?.to_path_buf();
    let making = tools.with_extension(format!("making-{}", std::process::id()));
    let _ = fs::remove_dir_all(&making);
    let made = make(&making);
    let made = made.and_then(|()| {
        // Half of one, of an attempt that was cut off.
        let _ = fs::remove_dir_all(&tools);
        fs::rename(&making, &tools).context("moving it to its place")
    });
    if made.is_err() {
        let _ = fs::remove_dir_all(&making);
    }
    made?;
    let output = Command::new(&script).arg("--version").output();
    let runs = output.as_ref().is_ok_and(|output| output.status.success());
    ensure!(runs, "{} does not run: {output:?}", script.display());
    Ok(())
}

fn make(folder: &Path) -> Result<()> {
    let apt = Apt::new(folder)?;
    apt.run("apt-get", &["-q", "update"])?;
    let words = [
        "depends",
        "--recurse",
        "--no-recommends",
        "--no-suggests",
        "--no-conflicts",
        "--no-breaks",
        "--no-replaces",
        "--no-enhances",
        "criu",
    ];
    let names = apt.run("apt-cache", &words)?;
    // What is indented is a relation; what is in angle brackets is no package.
    let mut names: Vec<&str> = names
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_alphanumeric()))
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut words = vec!["-q", "-o", "APT::Sandbox::User=root", "download"];
    words.extend(names);
    apt.run("apt-get", &words)?;
    let root = folder.join("root");
    for deb in fs::read_dir(folder)? {
        let deb = deb?.path();
        if deb.extension().is_some_and(|kind| kind == "deb") {
            let status = Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&root).status()?;
            ensure!(status.success(), "{} is damaged", deb.display());
            fs::remove_file(deb)?;
        }
    }
    fs::remove_dir_all(&apt.folder)?;
    let script = folder.join("criu");
    let text = "#!/bin/sh\nroot=${0%/*}/root\nexec \"$root/usr/lib64/ld-linux-x86-64.so.2\" --library-path \
                \"$root/usr/lib/x86_64-linux-gnu\" \"$root/usr/sbin/criu\" \"$@\"\n";
    fs::write(&script, text)?;
    Ok(fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?)
}

/// Debian's tools with lists of their own.
struct Apt {
    folder: PathBuf,
    config: PathBuf,
    downloads: PathBuf,
}

impl Apt {
    fn new(downloads: &Path) -> Result<Self> {
        let folder = downloads.join("apt");
        fs::create_dir_all(folder.join("lists/partial"))?;
        fs::create_dir_all(folder.join("cache/archives/partial"))?;
        let mirror = mirror()?;
        let source =
            format!("Types: deb\nURIs: {mirror}\nSuites: {RELEASE}\nComponents: main\nSigned-By: {KEYS}\n");
        fs::write(folder.join("here.sources"), source)?;
        let at = folder.display();
        let text = format!(
            "Dir::Etc::SourceList \"/dev/null\";\nDir::Etc::SourceParts \"{at}/\";\nDir::State::Lists \"{at}/lists\";\n\
             Dir::Cache \"{at}/cache\";\nAcquire::Languages \"none\";\n"
        );
        let config = folder.join("apt.conf");
        fs::write(&config, text)?;
        Ok(Self {
            folder,
            config,
            downloads: downloads.to_path_buf(),
        })
    }

    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let output = Command::new(program)
            .args(words)
            .env("APT_CONFIG", &self.config)
            .current_dir(&self.downloads)
            .output()
            .with_context(|| format!("{program} is not here"))?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            bail!("CRIU from Debian {RELEASE} cannot be had: {words}");
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Where this machine gets Debian from.
fn mirror() -> Result<String> {
    let output = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(ORIGIN) $(CODENAME) $(REPO_URI)",
            "Created-By: Packages",
        ])
        .output()
        .context("apt-get is not here")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let of_release = |line: &str| {
        let (codename, uri) = line.strip_prefix("Debian ")?.split_once(' ')?;
        // Not of updates alone: those have no whole release.
        (!codename.contains('-')).then(|| uri.to_owned())
    };
    let mirror = text.lines().find_map(of_release);
    mirror.context("apt knows no mirror of Debian: 'apt-get update' after adding one")
}
