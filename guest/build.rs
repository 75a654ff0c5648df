//! Compiles the preload object (`preload.c`) into a small shared library that the crate embeds.
//!
//! `cc` builds static libraries; a shared object is one more call of the same compiler.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=preload.c");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("preload.so");
    let compiler = cc::Build::new().warnings(true).get_compiler();
    let mut command: Command = compiler.to_command();
    command
        .args(["-shared", "-fPIC", "-Os", "-Wall", "-Werror", "-o"])
        .arg(&out)
        .arg("preload.c");
    let status = command.status().unwrap_or_else(|e| {
        panic!(
            "cannot run the C compiler {:?}: {e}; install one (Debian: apt-get install gcc libc6-dev)",
            compiler.path()
        )
    });
    assert!(status.success(), "the C compiler could not build guest/preload.c");
}
