//! `cargo xtask package`: the Debian package, and a trial of it in a fresh Debian root that runs systemd.
//!
//! * **Decides:** what is in the package besides `packaging/debian`: the release executable, and the manual pages and
//!   completions that it makes of its own command line.
//! * **Flow:** cargo -> a folder of its own under the target directory -> `dpkg-buildpackage` -> one `.deb`; [`trial`] tries it.
//! * **Not here:** where files go and what is done at installation: `packaging/debian`.

mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

use crate::earlier::{git, with_tree};
use crate::{cargo, setup};

/// What building a package needs, with the reason.
const PACKAGES: [(&str, &str); 2] = [
    ("debhelper", "builds the package"),
    ("dpkg-dev", "dpkg-buildpackage"),
];

/// Build the Debian package.
#[derive(clap::Args)]
pub struct Package {
    /// Also try it in fresh Debian roots under systemd; needs root. On three hosts: from the first command to a libvirt VM that survives its host,
    /// keys and roles, and an upgrade of each host under load. On one host: from its installation to its purge.
    #[arg(long = "try")]
    trial: bool,
    /// Package the debug build, which is ready sooner.
    #[arg(long)]
    debug: bool,
    /// The commit whose package is upgraded in the trial.
    #[arg(long, default_value = "HEAD~1", value_name = "COMMIT")]
    from: String,
}

/// Builds it, and tries it where that is asked for.
pub fn run(arguments: &Package) -> Result<()> {
    setup::install(&PACKAGES)?;
    if arguments.trial && !dunlin_vmtest::is_root() {
        bail!("hosts are network namespaces, which needs root: run this with sudo");
    }
    let root = paths::workspace();
    // First: both builds share one target folder, and with it what they depend on.
    let earlier = match arguments.trial {
        true => Some(earlier(&arguments.from, !arguments.debug)?),
        false => None,
    };
    let binary = cargo::build_dunlin_of(&root, !arguments.debug)?;
    let out = paths::target().join("package");
    let version = version(&root)?;
    let deb = build(&root, &binary, &out, &version)?;
    println!("package: {}", deb.display());
    score(&root.join("packaging/debian/dunlin.service"))?;
    if let Some(earlier) = earlier {
        let debs = trial::Debs {
            this: &deb,
            later: &build(&root, &binary, &out.join("later"), &format!("{version}.1"))?,
            earlier: &earlier,
        };
        println!("package: upgraded from {}", earlier.display());
        trial::run(&debs, &out.join("transcript.txt"))?;
    }
    Ok(())
}

/// The package of an earlier commit, built from a work tree of its own.
fn earlier(commit: &str, release: bool) -> Result<PathBuf> {
    with_tree(commit, |tree| {
        let binary = cargo::build_dunlin_of(tree, release)?;
        let out = paths::target().join("package-earlier");
        build(tree, &binary, &out, &version(tree)?)
    })
}

/// The package of that version of the sources in `root`, in the folder `out` with all that it is made of.
fn build(root: &Path, binary: &Path, out: &Path, version: &str) -> Result<PathBuf> {
    // A file of an earlier build must not get into this one.
    match fs::remove_dir_all(out) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| out.display().to_string());
        }
        _ => {}
    }
    let stage = out.join("dunlin");
    fs::create_dir_all(stage.join("man"))?;
    fs::copy(binary, stage.join("dunlin"))?;
    for page in ["README.md", "SPECIFICATION.md", "ARCHITECTURE.md"] {
        fs::copy(root.join(page), stage.join(page))?;
    }
    for (from, to) in [
        ("packaging/debian", "debian"),
        ("monitoring", "monitoring"),
        ("docs", "docs"),
    ] {
        command("cp", &[Path::new("-r"), &root.join(from), &stage.join(to)])?;
    }
    said(binary, &["manual", &stage.join("man").to_string_lossy()])?;
    for shell in ["bash", "zsh", "fish"] {
        let script = said(binary, &["completions", shell])?;
        fs::write(stage.join(format!("dunlin.{shell}")), script)?;
    }
    fs::write(stage.join("debian/changelog"), changelog(root, version)?)?;
    let built = Command::new("dpkg-buildpackage")
        .args(["--build=binary", "--no-sign", "--no-check-builddeps"])
        .env("DEB_BUILD_OPTIONS", "noautodbgsym")
        .current_dir(&stage)
        .output()
        .context("dpkg-buildpackage is not here")?;
    if !built.status.success() {
        bail!("dpkg-buildpackage: {}", String::from_utf8_lossy(&built.stderr));
    }
    let deb = out.join(format!("dunlin_{version}_amd64.deb"));
    if !deb.is_file() {
        bail!("dpkg-buildpackage made no {}", deb.display());
    }
    Ok(deb)
}

/// The crates' version, and which commit it is: a later one is newer for dpkg, by its number where both are of one second.
fn version(root: &Path) -> Result<String> {
    let date = git(root, &["log", "-1", "--format=%cd", "--date=format:%Y%m%d%H%M%S"])?;
    let number = git(root, &["rev-list", "--count", "HEAD"])?;
    let commit = git(root, &["log", "-1", "--format=%h"])?;
    Ok(format!(
        "{}+git{date}.{number}.{commit}",
        env!("CARGO_PKG_VERSION")
    ))
}

fn changelog(root: &Path, version: &str) -> Result<String> {
    let date = git(root, &["log", "-1", "--format=%cD"])?;
    Ok(format!(
        "dunlin ({version}) unstable; urgency=medium\n\n  * See CHANGELOG.md in the source.\n\n \
         -- Dunlin maintainers <maintainers@dunlin.dev>  {date}\n"
    ))
}

/// How much of the host the service can reach, by systemd's own measure. Where systemd is missing it is not said.
fn score(unit: &Path) -> Result<()> {
    let Ok(output) = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(unit)
        .output()
    else {
        println!("package: systemd-analyze is not here: the unit's exposure is not measured");
        return Ok(());
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .with_context(|| {
            format!(
                "systemd-analyze says nothing of {}: {}",
                unit.display(),
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
    println!("package: {}", line.trim_start_matches(['→', ' ']));
    Ok(())
}

/// What a program says on its standard output.
fn said(program: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| program.display().to_string())?;
    if !output.status.success() {
        bail!(
            "{} {}: {}",
            program.display(),
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

fn command(program: &str, arguments: &[&Path]) -> Result<()> {
    let status = Command::new(program)
        .args(arguments)
        .status()
        .with_context(|| program.to_owned())?;
    if !status.success() {
        bail!("{program} failed");
    }
    Ok(())
}
