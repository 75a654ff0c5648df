//! The files that people write: one for the cluster, one for each host, one for each VM or bare program.
//!
//! **Decides**: their keys, what stands for a key that is left out, and of which kind a value is. **Flow**: TOML -> [`VmFile`], [`HostFile`] or
//! [`ClusterFile`] -> the daemon checks it and makes its own configuration of it; the other way round, whoever makes a file fills such a type and writes
//! it as TOML. **Invariants**: 1. a key that is not known is an error, and the message has all that are. 2. what was read is written in such a way that
//! it is read as the same. 3. of a VM's file what is as it would be without a word is not written: a host of an earlier build, which does not know a newer
//! key, takes it. **Not here**: which values make sense on a host (`config` in `node`, docs/configuration.md), where a path that is not absolute begins.

mod cluster;
mod host;
mod machine;
mod program;
mod vm;

pub use cluster::{ClusterFile, ClusterHost, Durability};
pub use host::{CONTROL, HostFile};
pub use machine::{Accel, DiskFormat, DiskTable, Firmware, Machine, NicBackend, NicTable, VmTable};
pub use program::{Order, ProgramNicTable, ProgramTable, RestartPolicy, Source};
pub use vm::{Compare, MemoryTable, POLICIES, STORAGES, SyncTable, VmFile};

/// What a key has that is left out, and whether a value is that.
macro_rules! usual {
    ($($key:ident, $is:ident: $type:ty = $value:expr;)+) => {$(
        fn $key() -> $type {
            $value
        }

        fn $is(value: &$type) -> bool {
            *value == $key()
        }
    )+};
}

use usual;

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests;
