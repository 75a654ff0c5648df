//! A test that cannot run on this machine is never green in silence.

use std::io::Write;

/// Says that the test which calls this cannot run here, and why. `cargo xtask verify` and `cargo xtask test` collect these
/// words and tell them in their last line; in any other run the test fails.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {why}", thread.name().unwrap_or("a test"));
    let Some(file) = std::env::var_os("DUNLIN_SKIPPED") else {
        panic!("{line} (`cargo xtask verify` would tell it as skipped)");
    };
    let file = std::fs::File::options().create(true).append(true).open(file);
    // One write: tests of several threads and processes add to the file.
    let told = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    told.unwrap_or_else(|error| panic!("{line}, and it cannot be told: {error}"));
}
