//! Frame out -> commit rule -> client.

pub mod gate;
