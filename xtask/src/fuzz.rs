//! `cargo xtask fuzz`: libFuzzer over every decoder (`fuzz/`), with what it needs installed by itself.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

use crate::cargo;

/// Fuzz the decoders: everything that reads bytes from a peer, a disk, QEMU, a guest or a bare program.
#[derive(clap::Args)]
pub struct Fuzz {
    /// Which targets (`--list` names them). Without a name: all of them.
    targets: Vec<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// List the targets, and whose bytes each of them reads.
    #[arg(long)]
    list: bool,
}

/// Runs it. What is found lies in `fuzz/artifacts/TARGET`; it becomes a test when it is moved to `fuzz/found/TARGET`.
pub fn run(options: &Fuzz) -> Result<()> {
    let known = &dunlin_fuzz::TARGETS;
    if options.list {
        known
            .iter()
            .for_each(|target| println!("{:<10} {}", target.name, target.about));
        return Ok(());
    }
    if let Some(unknown) = options
        .targets
        .iter()
        .find(|name| known.iter().all(|target| target.name != **name))
    {
        bail!("no fuzz target {unknown}; 'cargo xtask fuzz --list' names them");
    }
    if !(options.minutes > 0.0 && options.minutes <= 7.0 * 24.0 * 60.0) {
        bail!("--minutes {}: between 0 and a week", options.minutes);
    }
    tools()?;
    let wanted =
        |name: &str| options.targets.is_empty() || options.targets.iter().any(|target| target == name);
    let names: Vec<&str> = known
        .iter()
        .map(|target| target.name)
        .filter(|name| wanted(name))
        .collect();
    let mut failed = Vec::new();
    for name in &names {
        println!("fuzz: {name}, {} minutes", options.minutes);
        if let Err(error) = one(name, options.minutes) {
            println!("fuzz: {name}: {error:#}");
            failed.push(*name);
        }
    }
    if !failed.is_empty() {
        bail!(
            "something was found, or could not run: {}. Look into fuzz/artifacts; move an input to fuzz/found/TARGET when it is mended",
            failed.join(", ")
        );
    }
    println!(
        "fuzz: {} targets, {} minutes each, nothing found",
        names.len(),
        options.minutes
    );
    Ok(())
}

fn fuzz(arguments: &[&str]) -> Command {
    // The nightly cargo, whichever one runs us: rustup's proxy chooses it by name.
    let mut command = Command::new("cargo");
    command.args(["+nightly", "fuzz"]).args(arguments);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO") && text != "CARGO_HOME" && text != "CARGO_TARGET_DIR"
            || text == "RUSTUP_TOOLCHAIN"
        {
            command.env_remove(&name);
        }
    }
    command.current_dir(paths::workspace());
    command
}

fn one(name: &str, minutes: f64) -> Result<()> {
    let root = paths::workspace().join("fuzz");
    let folder = |kind: &str| root.join(kind).join(name);
    std::fs::create_dir_all(folder("corpus"))?;
    let time = format!("-max_total_time={}", (minutes * 60.0).ceil() as u64);
    let target_dir = paths::target().join("fuzz");
    let inputs = ["corpus", "seeds", "found"].map(folder);
    let mut command = fuzz(&["run", "--features", "libfuzzer", "--target-dir"]);
    command.arg(target_dir).arg(name);
    command.args(inputs.iter().filter(|path| path.is_dir()));
    // 8 KiB hold every kind of message; more only makes it slower.
    command.args([
        "--",
        &time,
        "-max_len=8192",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    let status = command.status().context("cargo is not here")?;
    if !status.success() {
        bail!(
            "libFuzzer ended with {status}; the input is in {}",
            shown(&folder("artifacts"))
        );
    }
    Ok(())
}

fn shown(path: &Path) -> String {
    path.strip_prefix(paths::workspace())
        .unwrap_or(path)
        .display()
        .to_string()
}

/// The nightly compiler (libFuzzer needs its instrumentation) and cargo-fuzz.
fn tools() -> Result<()> {
    let quiet = |command: &mut Command| {
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if !quiet(Command::new("rustup").arg("--version")) {
        bail!("fuzzing needs a nightly compiler, and rustup is not here to install it: https://rustup.rs");
    }
    if !quiet(
        Command::new("cargo")
            .args(["+nightly", "--version"])
            .env_remove("RUSTUP_TOOLCHAIN"),
    ) {
        println!("fuzz: installing the nightly compiler");
        let status = Command::new("rustup")
            .args(["toolchain", "install", "nightly", "--profile", "minimal"])
            .status()?;
        if !status.success() {
            bail!("rustup could not install the nightly compiler: without one there is no fuzzing here");
        }
    }
    if !quiet(&mut fuzz(&["--version"])) {
        cargo::run(&["install", "--locked", "cargo-fuzz"]).context("fuzzing needs cargo-fuzz")?;
    }
    Ok(())
}
