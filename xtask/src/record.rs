//! `cargo xtask record`: the metrics of a real run, to look at with Prometheus and Grafana.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use dunlin_vmtest::paths;
use dunlin_vmtest::recording::{self, Recording, RecordingSpec};

use crate::accel::Accel;

/// The kept one is in every clone.
const KEPT_BYTES: usize = 400_000;

/// Record a real run: every metric of three hosts while a VM is started, loaded, moved, and loses its host.
#[derive(clap::Args)]
pub struct Record {
    /// Keep the recording and its picture in the repository: monitoring/recording.om.gz, docs/pictures/recording.svg.
    #[arg(long)]
    keep: bool,
    /// Only redraw the picture of the kept recording.
    #[arg(long, conflicts_with = "keep")]
    redraw: bool,
    #[command(flatten)]
    accel: Accel,
}

/// Runs it.
///
/// # Errors
/// With what did not go as it should.
pub fn run(arguments: &Record) -> Result<()> {
    if arguments.redraw {
        let text = recording::unpack(&fs::read(recording::kept())?)?;
        let picture = recording::draw(&Recording::parse(&text)?)?;
        return Ok(fs::write(recording::kept_picture(), picture)?);
    }
    let begun = Instant::now();
    let dunlin = super::ready(false)?;
    let (_, image) = arguments.accel.choose()?;
    let recorded = recording::run(&RecordingSpec { dunlin, image }, &mut |line| {
        println!("[{:6.2} s] {line}", begun.elapsed().as_secs_f64())
    })?;
    let folder = paths::target().join("recording");
    // Of this run alone.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let (text, picture) = (recorded.to_string(), recording::draw(&recorded)?);
    let file = folder.join("recording.om");
    fs::write(&file, &text)?;
    fs::write(folder.join("recording.svg"), &picture)?;
    blocks(&file, &folder.join("data"))?;
    if arguments.keep {
        let packed = recording::pack(&text)?;
        ensure!(
            packed.len() < KEPT_BYTES,
            "{} bytes are too many to keep ({KEPT_BYTES} at most): record fewer series",
            packed.len()
        );
        fs::write(recording::kept(), packed)?;
        fs::write(recording::kept_picture(), picture)?;
    }
    println!(
        "record: looks={} series={} seconds={:.0}; {} has it as text, as a picture and as Prometheus' blocks",
        recorded.looks().count(),
        recorded.series().count(),
        begun.elapsed().as_secs_f64(),
        folder.display()
    );
    Ok(())
}

/// Prometheus' own tool has to take it.
fn blocks(file: &Path, into: &Path) -> Result<()> {
    let promtool = paths::target().join("tools/usr/bin/promtool");
    let output = Command::new(&promtool)
        .args(["tsdb", "create-blocks-from", "openmetrics"])
        .args([file, into])
        .output()
        .with_context(|| format!("{} is not here: cargo xtask setup", promtool.display()))?;
    if !output.status.success() {
        bail!(
            "promtool does not take it: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
