//! Debian packages, downloaded and unpacked beside the system, never installed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// One package at one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// The real package's name (a meta package is followed to what it names).
    pub name: String,
    /// Its version, as Debian writes it.
    pub version: String,
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

/// The package that `name` stands for now: Debian's kernel packages are named by a meta package.
pub fn resolve(name: &str) -> Result<Package> {
    let fields = show(name)?;
    if let Some(depends) = field(&fields, "Depends").filter(|_| name.starts_with("linux-image-")) {
        let real = depends.split([',', ' ', '(']).next().unwrap_or_default().trim();
        if real.starts_with("linux-image-") {
            return resolve(real);
        }
    }
    let version = field(&fields, "Version").context("a package without a version")?;
    Ok(Package {
        name: name.to_owned(),
        version: version.to_owned(),
    })
}

fn field<'a>(fields: &'a str, name: &str) -> Option<&'a str> {
    fields
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

fn show(name: &str) -> Result<String> {
    let output = Command::new("apt-cache")
        .args(["show", "--no-all-versions", name])
        .output()
        .context("apt-cache is not here: the guest image is made of Debian's packages")?;
    if !output.status.success() || output.stdout.is_empty() {
        bail!("package {name} is unknown here: run 'apt-get update' (or 'cargo xtask setup'), then again");
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Downloads `package` once into `cache`/debs and unpacks it into `into`, which it returns.
pub fn unpack(package: &Package, cache: &Path, into: &Path) -> Result<PathBuf> {
    let debs = cache.join("debs");
    let home = debs.join(format!(
        "{}_{}",
        package.name,
        package.version.replace([':', '/'], "_")
    ));
    if find_deb(&home).is_none() {
        let half_made = debs.join(format!("loading-{}-{}", std::process::id(), package.name));
        fs::create_dir_all(&half_made)?;
        let output = Command::new("apt-get")
            .args(["-q", "-o", "APT::Sandbox::User=root", "download"])
            .arg(format!("{}={}", package.name, package.version))
            .current_dir(&half_made)
            .output()?;
        if !output.status.success() {
            let _ = fs::remove_dir_all(&half_made);
            let words = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            bail!("cannot download {package}: {words} (an old package list? 'apt-get update' renews it)");
        }
        if fs::rename(&half_made, &home).is_err() {
            fs::remove_dir_all(&half_made)?;
        }
    }
    let deb = find_deb(&home).with_context(|| format!("no .deb in {}: remove it", home.display()))?;
    fs::create_dir_all(into)?;
    let status = Command::new("dpkg-deb")
        .arg("-x")
        .arg(&deb)
        .arg(into)
        .status()
        .context("dpkg-deb is not here")?;
    if !status.success() {
        bail!("{} is damaged: remove it and run again", deb.display());
    }
    Ok(into.to_path_buf())
}

fn find_deb(dir: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
}
