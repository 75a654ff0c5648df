//! Clients that a user could have: one that checks every answer, and the load generator that redis brings.
//!
//! * **Decides:** what counts as lost, doubled, reset and as a gap: see [`counter`].
//! * **Flow:** a worker thread inside a client's network -> one TCP connection -> the service in the VM.
//! * **Invariants:** (1) a value counts as acknowledged only when its answer was read whole; (2) a worker keeps its
//!   one connection; if that breaks, the break is counted, never hidden by reconnecting, unless the guest was told to boot ([`boots`]).
//! * **Source:** the redis serialization protocol's description; `redis-benchmark --help`.
//! * **Not here:** what a gap may be at most: the demo and the scenarios judge.

pub mod boots;
mod broadcasts;
pub mod counter;
pub mod downloads;
pub mod ledger;
pub mod load;
pub mod mariadb;
pub mod passers;
pub mod postgres;
pub mod registers;
mod resp;
pub mod streams;
pub mod upload;

pub use boots::Boots;
pub use broadcasts::{Broadcasts, EVERYBODY};
pub use counter::{Answers, Counter, CounterReport, CounterSpec};
pub use passers::{Passers, PassersReport, PassersSpec};
pub use resp::{Answer, Connection};
pub use upload::Upload;
