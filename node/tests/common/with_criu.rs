//! A part of a test that copies a running program: in a process of its own, whose environment names CRIU.

use super::skipped::skip;
use std::process::Command;

/// Plays the ignored test `part` of this file; without root or CRIU it is skipped, and said so.
pub fn play(part: &str) {
    let criu = dunlin_vmtest::paths::criu();
    if !rustix::process::geteuid().is_root() || !criu.exists() {
        return skip("programs are copied as root, with CRIU (cargo xtask setup)");
    }
    let own = std::env::current_exe().expect("it runs");
    let output = Command::new(own)
        .args(["--exact", part, "--ignored", "--nocapture"])
        .env("DUNLIN_CRIU", criu)
        .output()
        .expect("it runs");
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}{}",
        said(&output.stdout),
        said(&output.stderr)
    );
}
