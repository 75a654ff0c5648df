//! Real QEMU end to end: a guest image, hosts as network namespaces, clients that check every answer.
//!
//! * **Decides:** nothing. It builds a small world on one machine, runs the `dunlin` executable in it and watches.
//! * **Flow:** [`image`] (what runs in the VM) -> [`testbed`] (hosts, switch, faults) -> [`cluster`] (daemons) ->
//!   [`client`] (load and checks) -> [`traces`] (nothing is left); [`demo`] is all of it once.
//! * **Invariants:** (1) whatever a [`testbed::Testbed`] made is gone when it is dropped, and when its process dies in
//!   any other way; (2) the faults are real: a killed host is a SIGKILL of all of its processes at once.
//! * **Source:** `ARCHITECTURE.md`, and the demo and benchmark that `README.md` describes.
//! * **Not here:** any use of Dunlin's crates: these tests use only the executable, as a user does.

pub mod accel;
pub mod bench_consensus;
pub mod bench_disk;
pub mod bench_vm;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod image;
pub mod linear;
pub mod page;
pub mod paths;
pub mod program;
/// The simulator's, so that chance is the same thing everywhere.
#[path = "../../sim/src/random.rs"]
mod random;
pub mod recording;
pub mod scenario;
pub mod testbed;
pub mod traces;

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context, Result};

/// Whether this process runs as root, which network namespaces need.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// An address of this machine at which nobody listens now, for a process that is to listen there.
///
/// Not one that the kernel chose: any connection of this machine might have that port before the process does.
pub fn free_address() -> Result<SocketAddr> {
    const TRIES: u64 = 100;
    // Above those that services are known by, below those that Linux gives to connections.
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    let chance = RandomState::new();
    (0..TRIES)
        .map(|attempt| {
            let offset = chance.hash_one(attempt) % u64::from(PORTS.end - PORTS.start);
            SocketAddr::from((
                Ipv4Addr::LOCALHOST,
                PORTS.start + u16::try_from(offset).unwrap_or_default(),
            ))
        })
        .find(|address| TcpListener::bind(address).is_ok())
        .with_context(|| {
            format!("none of {TRIES} ports of this machine is free: see who listens with 'ss -ltn'")
        })
}
