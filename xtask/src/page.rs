//! `cargo xtask page`: the page in a real browser.
//!
//! Chromium is Debian's package; what steers it and looks for barriers (puppeteer-core, axe-core) comes from npm, by the versions and sums of
//! `vmtest/browser/package-lock.json`, into `target/tools/browser`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::page::{PageSpec, Tools, test};
use dunlin_vmtest::paths;

use crate::accel::Accel;
use crate::setup;

/// The files that say what is fetched, and the program that steers the browser.
const LIBRARIES: [&str; 3] = ["package.json", "package-lock.json", ".npmrc"];
const SCRIPT: &str = "look.mjs";

/// Test the page of real daemons in a real browser.
#[derive(clap::Subcommand)]
pub enum Page {
    /// Go through every state that a person may meet: pictures (in target/page), axe-core, the keyboard, confirmations, hostile texts.
    Test {
        /// Only what needs no VM: bare programs, hosts, errors.
        #[arg(long)]
        without_vm: bool,
        #[command(flatten)]
        accel: Accel,
    },
}

/// Runs it.
///
/// # Errors
/// With the first thing that is not as it should be, or what this machine lacks.
pub fn run(task: &Page) -> Result<()> {
    let Page::Test { without_vm, accel } = task;
    let begun = Instant::now();
    let dunlin = super::ready(false)?;
    let guest = match without_vm {
        true => None,
        false => Some(accel.choose()?.1),
    };
    let tools = tools()?;
    let pictures = tools.pictures.clone();
    let spec = PageSpec { dunlin, tools, guest };
    let report = test(&spec, &mut |line| {
        println!("[{:6.2} s] {line}", begun.elapsed().as_secs_f64())
    })?;
    for note in &report.notes {
        println!("page: note: {note}");
    }
    println!(
        "page: PASS states={} notes={} seconds={:.0}; pictures are in {}",
        report.states.len(),
        report.notes.len(),
        begun.elapsed().as_secs_f64(),
        pictures.display()
    );
    Ok(())
}

/// Installs what is missing.
fn tools() -> Result<Tools> {
    let lacks = |program: &str| Command::new(program).arg("--version").output().is_err();
    // Any Node and any Chromium do, and many have one of their own.
    let packages = [
        ("chromium", "chromium", "shows the page"),
        ("node", "nodejs", "steers the browser"),
        ("npm", "npm", "fetches what steers the browser"),
    ];
    let missing: Vec<(&str, &str)> = packages
        .into_iter()
        .filter(|(program, ..)| lacks(program))
        .map(|(_, package, why)| (package, why))
        .collect();
    if !missing.is_empty() {
        setup::install(&missing)?;
    }
    let from = paths::workspace().join("vmtest/browser");
    let folder = paths::target().join("tools/browser");
    libraries(&from, &folder)?;
    fs::copy(from.join(SCRIPT), folder.join(SCRIPT)).context(SCRIPT)?;
    let pictures = paths::target().join("page");
    // Of this run alone.
    let _ = fs::remove_dir_all(&pictures);
    fs::create_dir_all(&pictures)?;
    Ok(Tools {
        node: on_path("node")?,
        chromium: on_path("chromium")?,
        script: folder.join(SCRIPT),
        pictures,
    })
}

/// Fetches them, unless these are there.
fn libraries(from: &Path, folder: &Path) -> Result<()> {
    let mut wanted = String::new();
    for file in LIBRARIES {
        wanted +=
            &fs::read_to_string(from.join(file)).with_context(|| format!("{}/{file}", from.display()))?;
    }
    // Written last: half of them are none.
    let whole = folder.join("fetched");
    if fs::read_to_string(&whole).is_ok_and(|there| there == wanted) {
        return Ok(());
    }
    println!(
        "setup: will fetch puppeteer-core and axe-core from npm: they steer the browser and look for barriers"
    );
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    for file in LIBRARIES {
        fs::copy(from.join(file), folder.join(file))?;
    }
    let output = Command::new("npm")
        .arg("ci")
        .current_dir(folder)
        .output()
        .context("npm is not here")?;
    if !output.status.success() {
        bail!("npm ci: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(fs::write(whole, wanted)?)
}

fn on_path(program: &str) -> Result<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
        .with_context(|| format!("{program} is on no path"))
}
