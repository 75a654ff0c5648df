//! Dunlin's core: everything that *decides*. Events in, actions out; no I/O, clock, thread or unsafe code.
//!
//! A frame that comes in passes `consensus`; a frame that goes out passes `output`; a disk write passes `disk`;
//! `offload` cuts what a card or a TAP hands over as one large frame, and puts it together again; what the two VMs no longer agree on is mended by `sync`; what a backup has heard of the network meanwhile is in `overheard`. `program` is what a bare program needs beside that. `policy` says which of these a VM uses, `agreed` is
//! what the group knows of a VM, `logged` what the entries of a log that programs share say, `replica` the order of what a host does with its copy, `waits` how long anything may be waited for, `watchdog` whether it gets on, `wire` turns all of it into bytes and back.
#![forbid(unsafe_code)]

pub mod agreed;
pub mod consensus;
pub mod disk;
pub mod logged;
pub mod offload;
pub mod output;
pub mod overheard;
pub mod policy;
pub mod program;
pub mod replica;
pub mod speculation;
pub mod sync;
pub mod units;
pub mod waits;
pub mod watchdog;
pub mod wire;
