//! The other replicas: authenticated links, one-sided writes, the log on disk, and the driver that joins them.
//!
//! `link` makes authenticated streams between hosts; `keys` makes what they need. `transport` writes one-sidedly into a
//! peer's memory over shm, tcp or verbs.

pub mod clock;
pub mod enroll;
pub mod group;
pub mod keys;
pub mod link;
pub mod log;
pub mod transport;
pub mod wait;
