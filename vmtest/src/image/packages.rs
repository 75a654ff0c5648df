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
    download(std::slice::from_ref(package), cache)?;
    let deb = downloaded(package, cache)?;
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

/// Downloads those of `packages` that are not yet in `cache`/debs, in one call of apt-get.
pub fn download(packages: &[Package], cache: &Path) -> Result<()> {
    let debs = cache.join("debs");
    let missing: Vec<&Package> = packages
        .iter()
        .filter(|package| find_deb(&home(package, cache)).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let half_made = debs.join(format!("loading-{}", std::process::id()));
    let _ = fs::remove_dir_all(&half_made);
    fs::create_dir_all(&half_made)?;
    let output = Command::new("apt-get")
        .args(["-q", "-o", "APT::Sandbox::User=root", "download"])
        .args(
            missing
                .iter()
                .map(|package| format!("{}={}", package.name, package.version)),
        )
        .current_dir(&half_made)
        .output()?;
    if !output.status.success() {
        let _ = fs::remove_dir_all(&half_made);
        let words = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        bail!(
            "cannot download {}: {words} (an old package list? 'apt-get update' renews it)",
            missing
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        );
    }
    for package in missing {
        // apt-get writes a version's colon as %3a into the file's name.
        let start = format!("{}_{}_", package.name, package.version.replace(':', "%3a"));
        let deb = fs::read_dir(&half_made)?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&start))
            })
            .with_context(|| format!("apt-get downloaded no {package}"))?;
        let home = home(package, cache);
        fs::create_dir_all(&home)?;
        fs::rename(&deb, home.join(deb.file_name().unwrap_or_default()))?;
    }
    fs::remove_dir_all(&half_made)?;
    Ok(())
}

/// The file of a package that was downloaded.
pub fn downloaded(package: &Package, cache: &Path) -> Result<PathBuf> {
    let home = home(package, cache);
    find_deb(&home).with_context(|| format!("no .deb in {}: remove it", home.display()))
}

fn home(package: &Package, cache: &Path) -> PathBuf {
    cache.join("debs").join(format!(
        "{}_{}",
        package.name,
        package.version.replace([':', '/'], "_")
    ))
}

fn find_deb(dir: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
}
