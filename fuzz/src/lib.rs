//! What every decoder must stand: any bytes give a value or an error, never a panic, and what they promise holds.
//!
//! **Flow**: one function per target. `cargo xtask fuzz` gives it to libFuzzer; `tests/inputs.rs` runs it over `seeds/` (made
//! by `examples/seeds.rs`) and `found/` (inputs that once broke something) with every `cargo test`.
//! **Invariants**: 1. a target that takes a checksum is also given right ones: a broken peer computes them rightly, too.
//! 2. each target asserts more than "no panic" where there is something to assert.
//! **Not here**: control socket, configuration and what is told of a program beside its images (serde), QMP (QEMU is our own child); what tar and
//! CRIU read of a copy that comes here.

mod chance;
mod consensus;
mod gate;
mod guest;
mod images;
mod link;
mod log;
mod output;
mod packet;
mod script;
pub mod seeds;
mod speculation;
mod transport;
mod virtqueue;
mod wire;

/// One target.
pub struct Target {
    /// Its name: `cargo xtask fuzz NAME`.
    pub name: &'static str,
    /// Whose bytes it takes, for `cargo xtask fuzz --list`.
    pub about: &'static str,
    run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 21] = [
    Target {
        name: "agreed",
        about: "entries of the agreed log, the agreed state",
        run: wire::agreed,
    },
    Target {
        name: "announce",
        about: "frames that a guest sends",
        run: guest::announce,
    },
    Target {
        name: "bystander",
        about: "segments of other clients beside a speculative connection that keeps to the rules",
        run: speculation::bystander,
    },
    Target {
        name: "chance",
        about: "how far a program on another host has drawn its chance",
        run: chance::chance,
    },
    Target {
        name: "consensus",
        about: "messages between replicas",
        run: wire::consensus,
    },
    Target {
        name: "frames",
        about: "the stream of frames from QEMU",
        run: guest::frames,
    },
    Target {
        name: "gate",
        about: "where a program's inputs stand on another host; its clients and copies after that",
        run: gate::gate,
    },
    Target {
        name: "images",
        about: "a program's lists of memory and its folders, from another host",
        run: images::images,
    },
    Target {
        name: "link",
        about: "both sides of the handshake between hosts",
        run: link::link,
    },
    Target {
        name: "log",
        about: "the log's files after a crash",
        run: log::log,
    },
    Target {
        name: "mirror",
        about: "the stream of disk writes between hosts",
        run: guest::mirror,
    },
    Target {
        name: "nbd",
        about: "what QEMU's block layer asks",
        run: guest::nbd,
    },
    Target {
        name: "output",
        about: "frames of guests and clients, as the commit rule compares them",
        run: output::output,
    },
    Target {
        name: "packet",
        about: "frames of clients and guests, the table of connections",
        run: packet::packet,
    },
    Target {
        name: "ring",
        about: "what a peer writes into our memory",
        run: transport::ring,
    },
    Target {
        name: "shm",
        about: "messages with descriptors of a process of this host",
        run: transport::shm,
    },
    Target {
        name: "speculation",
        about: "segments of clients, VM and shadow sockets in any order; checkpoints of connections",
        run: speculation::speculation,
    },
    Target {
        name: "step",
        about: "a member that says anything at any time",
        run: consensus::step,
    },
    Target {
        name: "sync",
        about: "messages of a sync and of a join",
        run: wire::sync,
    },
    Target {
        name: "tcp",
        about: "one-sided writes framed on a byte stream",
        run: transport::tcp,
    },
    Target {
        name: "virtqueue",
        about: "a card's rings as a guest writes them into its memory",
        run: virtqueue::virtqueue,
    },
];

/// Runs a target by its name.
///
/// # Panics
/// When the target finds something.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("a target of this name").run)(bytes);
}
