//! One daemon per host: it listens for the other hosts and for people, and holds the VMs' loops.
//!
//! **Flow**: [`run`] makes the [`Daemon`], which all threads share, and starts who listens: `incoming` (the other hosts), `control` (people on this
//! host), the page and the API (`crate::web`). What they are asked goes to `requests`, which asks the other hosts by `peers`.

mod changes;
mod control;
mod descriptors;
mod error;
pub mod examine;
mod exec;
pub mod identity;
mod incoming;
mod last_life;
pub mod logs;
pub mod members;
mod moving;
pub mod peers;
mod priority;
mod program;
mod renewal;
pub mod requests;
mod reservations;
pub mod roles;
mod run;
mod service;
mod shared;
mod standby;
pub mod starting;
mod store;
mod switchover;
pub mod telling;
mod threads;

pub use error::BadInput;
pub use run::run;
pub use shared::Daemon;
